"""Inputs from files: pictures, and numpy arrays for everything else. All of them may come from strangers."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from anybit.common.text import printable
from anybit.errors import AnybitError, DataError, MissingDependency

PICTURES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".ppm", ".pgm"}
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "PPM")
"""What is tried on a file, whatever its name says: some of Pillow's other readers start programs."""

LARGEST = 64 * 2**20
"""Pixels of the largest picture that is opened: a file of a few bytes can claim any size."""

LONGEST = 256 * 2**20
"""Bytes of the largest file."""

MOST_SCANS, MOST_WORK = 100, 8 * LARGEST
"""Passes over the picture that a progressive JPEG may take (usual are ten), and pixels over all of them."""

Floats = npt.NDArray[np.float32]


def find_inputs(path: Path) -> list[Path]:
    """Return the pictures and arrays in a folder, sorted by name, or the one file that `path` is."""
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; pictures or .npy files are expected here")
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    found = [p for p in files if p.suffix.lower() in PICTURES | {".npy"}]
    if not found:
        raise DataError(f"{path}: holds no picture ({', '.join(sorted(PICTURES))}) and no .npy file")
    return found


def read_inputs(
    paths: Sequence[Path], shape: Sequence[int], *, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)
) -> Iterator[tuple[Path, Floats]]:
    """Yield each file as a batch of one, in the shape that the network takes.

    Pictures are scaled to size, to numbers from 0 to 1, and then normalized by `mean` and `std`, one per channel or
    one for all. Arrays are taken as they are.
    """
    for path in paths:
        yield path, (_array(path, shape) if path.suffix.lower() == ".npy" else _picture(path, shape, mean, std))


def _array(path: Path, shape: Sequence[int]) -> Floats:
    array = read_array(path)
    if _fits(array.shape, shape):
        array = array[None]
    if not _fits(array.shape[1:], shape) or len(array) == 0 or array.dtype.kind not in "fiub":
        found = f"{list(array.shape)} {printable(array.dtype, 40)}"
        raise DataError(f"{path}: an array of shape {list(shape)} is expected, got {found}")
    with np.errstate(over="ignore"):
        values = np.asarray(array, np.float32)
    if not (math.isfinite(values.min()) and math.isfinite(values.max())):
        raise DataError(f"{path}: has NaN or infinite entries, or some too large for 32 bits; save finite numbers")
    return values


def read_array(path: Path) -> npt.NDArray[Any]:
    """Return the array in an .npy file, mapped into memory: it cannot claim more numbers than the file has."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about headers that Python 2 wrote
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            array.close()
            raise ValueError("an archive of several arrays")
    except Exception as error:  # a damaged header fails in a dozen ways, each with an exception of its own
        raise DataError(f"{path}: cannot be read as a numpy array ({printable(error, 200)}); save it again") from error
    return array


def _fits(found: Sequence[int], shape: Sequence[int]) -> bool:
    """Tell whether a shape is the one that is wanted, in which 0 stands for any size."""
    return len(found) == len(shape) and all(size in (0, own) for size, own in zip(shape, found, strict=True))


def _picture(path: Path, shape: Sequence[int], mean: Sequence[float], std: Sequence[float]) -> Floats:
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise DataError(
            f"{path}: the network takes inputs of shape {list(shape)}, which no picture has; use .npy files"
        )
    try:
        return as_batch(read_picture(path), shape, mean=mean, std=std)
    except (DataError, OSError) as error:
        raise DataError(f"{path}: {printable(getattr(error, 'strerror', None) or error, 300)}") from error


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
        try:
            picture.load()
            return _in_bytes(picture, image)
        except AnybitError:
            raise
        except Exception as error:  # Pillow's readers have no common base for what they raise on broken files
            raise DataError(f"is broken or cut short ({printable(error, 120)}); save it again and retry") from error


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


def as_batch(picture: Any, shape: Sequence[int], *, mean: Sequence[float], std: Sequence[float]) -> Floats:
    """Return what `decode` gives as a batch of one: scaled to size, to numbers from 0 to 1, and normalized."""
    channels = shape[0]
    height, width = shape[1] or picture.height, shape[2] or picture.width  # a free size is that of the picture
    mode, smooth = "RGB" if channels == 3 else "L", pillow().Resampling.BILINEAR
    scaled = np.asarray(picture.convert(mode).resize((width, height), smooth), np.float32)
    pixels = scaled.reshape(height, width, channels) / 255
    normal = (pixels - np.asarray(mean, np.float32)) / np.asarray(std, np.float32)
    return np.asarray(normal.transpose(2, 0, 1)[None], np.float32)


def pillow() -> Any:
    """Import Pillow's `Image`, or say how to install it."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise MissingDependency("pillow", "data", "reading pictures") from error
    return Image
