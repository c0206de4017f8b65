"""Uploaded pictures: bytes from a stranger, checked before they are decoded."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anybit.artifact.pictures import Floats, as_batch, find_inputs, pillow
from anybit.errors import AnybitError, DataError

LARGEST_UPLOAD = 10_000_000
"""Bytes."""

LARGEST_PICTURE = 40_000_000
"""Pixels: a file of a few bytes can claim any size."""

TYPES = {
    "PNG": "image/png", "JPEG": "image/jpeg", "BMP": "image/bmp", "WEBP": "image/webp", "GIF": "image/gif",
}  # fmt: skip
"""Pillow's name of each kind of picture that is taken, and its media type."""

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}
MOST_EXAMPLES = 24

_TAKEN = "PNG, JPEG, BMP, WebP or GIF"


@dataclass(frozen=True)
class Example:
    """A picture that the page offers."""

    name: str
    data: bytes
    kind: str


def read_upload(
    data: bytes, shape: Sequence[int], *, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)
) -> Floats:
    """Return a picture as a batch of one, scaled and normalized as `anybit run` does it; of a GIF the first frame.

    Raises:
        DataError: It is no picture, of another type, too large, or broken.
    """
    try:
        with _opened(data) as picture:
            return as_batch(picture, shape, mean=mean, std=std)
    except AnybitError:
        raise
    except Exception as error:  # Pillow's readers have no common base for what they raise on broken files
        reason = " ".join(str(error).split())[:120]
        raise DataError(f"this picture is broken or cut short ({reason}); save it again and retry") from error


def _opened(data: bytes) -> Any:
    """Return Pillow's picture with type and size checked; nothing of it is decoded yet."""
    image = pillow()
    try:
        picture = image.open(io.BytesIO(data), formats=list(TYPES))
    except (image.DecompressionBombError, image.DecompressionBombWarning):
        raise DataError(f"this picture has more than {LARGEST_PICTURE:,} pixels; make it smaller first") from None
    except OSError:
        raise DataError(f"this file is no picture of a known type; {_TAKEN} is expected") from None
    if picture.width * picture.height > LARGEST_PICTURE:
        size = f"{picture.width} x {picture.height}"
        raise DataError(f"this picture has {size} pixels, more than {LARGEST_PICTURE:,}; make it smaller first")
    return picture


def read_examples(folder: Path) -> tuple[Example, ...]:
    """Return some pictures of a folder, taken evenly over their names, each small and whole enough to be uploaded."""
    found = [path for path in find_inputs(folder) if path.suffix.lower() in SUFFIXES]
    if not found:
        raise DataError(f"{folder}: holds no {_TAKEN} picture to offer as an example")
    count = min(len(found), MOST_EXAMPLES)
    return tuple(_example(found[i * len(found) // count]) for i in range(count))


def _example(path: Path) -> Example:
    try:
        if path.stat().st_size > LARGEST_UPLOAD:
            raise DataError(f"more than {LARGEST_UPLOAD // 10**6} MB; take it out of the folder")
        data = path.read_bytes()
        read_upload(data, (1, 1, 1))
        with _opened(data) as picture:
            return Example(path.name, data, TYPES[picture.format])
    except (DataError, OSError) as error:
        raise DataError(f"{path}: cannot be an example: {error}") from error
