"""Uploaded pictures: bytes from a stranger, checked before they are decoded."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from anybit.artifact.pictures import Floats, as_batch, decode, find_inputs, pillow
from anybit.errors import DataError

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
        picture = decode(data, formats=list(TYPES), largest=LARGEST_PICTURE)
    except DataError as error:
        raise DataError(f"this file {error}") from error
    return as_batch(picture, shape, mean=mean, std=std)


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
        with pillow().open(io.BytesIO(data), formats=list(TYPES)) as picture:
            return Example(
                path.name, data, TYPES.get(picture.format, TYPES["JPEG"])
            )  # MPO is a JPEG with more behind it
    except (DataError, OSError) as error:
        raise DataError(f"{path}: cannot be an example: {error}") from error
