"""Pictures out of files and uploads, all of which may come from strangers."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anybit.common.text import explaining
from anybit.errors import DataError, MissingDependency

PICTURES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".ppm", ".pgm"}
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "PPM")
"""What is tried on a file, whatever its name says: some of Pillow's other readers start programs."""

LARGEST = 64 * 2**20
"""Pixels of the largest picture that is opened: a file of a few bytes can claim any size."""

LONGEST = 256 * 2**20
"""Bytes of the largest file."""

MOST_SCANS, MOST_WORK = 100, 8 * LARGEST
"""Passes over the picture that a progressive JPEG may take (usual are ten), and pixels over all of them."""


def read_picture(path: Path) -> Any:
    """Return the picture in a file as `decode` does."""
    size = path.stat().st_size
    if size > LONGEST:
        raise DataError(f"has {size >> 20} MB, more than {LONGEST >> 20}; make it smaller first")
    return decode(path.read_bytes())


def decode(data: bytes, *, formats: Sequence[str] = FORMATS, largest: int = LARGEST) -> Any:
    """Return a picture as one of Pillow's, in bytes of grey ("L") or of colour ("RGB"); of several frames the first.

    Pixels of 16 bits keep their value: 65535 is white. Floating-point ones are from 0 to 1.

    Args:
        data: The bytes of a file.
        formats: Pillow's names of the formats that are tried.
        largest: Pixels of the largest picture that is decoded.

    Raises:
        DataError: It is no picture, too large, would take too long, or is broken.
    """
    image = pillow()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's own limit is another one
        try:
            picture = image.open(io.BytesIO(data), formats=list(formats))
        except image.DecompressionBombError:
            raise DataError(f"has more than {largest:,} pixels; make it smaller first") from None
        except Exception as error:
            known = ", ".join(formats[:-1]).replace("WEBP", "WebP")
            raise DataError(f"is no picture of a known type; {known} or {formats[-1]} is expected") from error
        _check_work(picture, data, largest)
        with explaining(DataError, "is broken or cut short", "; save it again and retry"):
            picture.load()
            return _in_bytes(picture, image)


def _check_work(picture: Any, data: bytes, largest: int) -> None:
    """Refuse what would take too long or too much memory to decode."""
    pixels = picture.width * picture.height
    if pixels > largest:
        size = f"{picture.width} x {picture.height}"
        raise DataError(f"has {size} pixels, more than {largest:,}; make it smaller first")
    scans = count_scans(data) if data.startswith(b"\xff\xd8") else 1
    if scans > MOST_SCANS or scans * pixels > MOST_WORK:
        raise DataError(f"is a JPEG of {scans} passes, which would take too long to decode; save it again")


def _in_bytes(picture: Any, image: Any) -> Any:
    """Return a picture in grey or colour of 8 bits, by value."""
    if picture.mode in ("I", "F") or picture.mode.startswith("I;"):
        values = np.asarray(picture)
        most = 1 if picture.mode == "F" else 65535
        if not (values.size and values.min() >= 0 and values.max() <= most):  # NaN is neither
            raise DataError(f"has pixels that are not from 0 to {most}; save it with 8 or 16 bits")
        return image.fromarray(np.rint(values * (255 / most)).astype(np.uint8))
    if "transparency" in picture.info:  # Pillow warns of palettes with transparent colours otherwise
        picture = picture.convert("RGBA")
    grey = picture.mode in ("1", "L", "LA", "La")
    wanted = "L" if grey else "RGB"
    return picture if picture.mode == wanted else picture.convert(wanted)


def count_scans(data: bytes) -> int:
    r"""Return how many passes over the picture a JPEG takes.

    Behind the first one, no pass but a further one can hold its mark: there a byte ff of the picture is ff 00.

    >>> count_scans(bytes.fromhex("ffd8 ffe00004ffda ffda0002 55ff00 ffda0002 66 ffd9"))
    2
    """
    at = 2
    while data[at : at + 1] == b"\xff" and data[at : at + 2] != b"\xff\xda":
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big") if data[at + 1 : at + 2] != b"\xff" else 1
    return data.count(b"\xff\xda", at)


def pillow() -> Any:
    """Import Pillow's `Image`, or say how to install it."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise MissingDependency("pillow", "data", "reading pictures") from error
    return Image
