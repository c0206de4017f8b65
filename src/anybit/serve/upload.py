"""Uploads, pictures and arrays: bytes from a stranger, checked before they are decoded."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from anybit.artifact.feeding import Preprocessing
from anybit.artifact.inputs import Feed, Input, evenly, fed, find_files, read_feeds
from anybit.artifact.pictures import decode, pillow
from anybit.errors import DataError

LARGEST_UPLOAD = 10_000_000
"""Bytes."""

LARGEST_PICTURE = 40_000_000
"""Pixels: a file of a few bytes can claim any size."""

TYPES = {
    "PNG": "image/png", "JPEG": "image/jpeg", "BMP": "image/bmp", "WEBP": "image/webp", "GIF": "image/gif",
}  # fmt: skip
"""Pillow's name of each kind of picture that is taken, and its media type."""

ARRAYS = {b"\x93NUMPY": ".npy", b"PK": ".npz"}
"""How files of arrays start, and what they are called."""

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}
MOST_EXAMPLES = 24

_TAKEN = "PNG, JPEG, BMP, WebP or GIF"


@dataclass(frozen=True)
class Example:
    """A picture that the page offers."""

    name: str
    data: bytes
    kind: str


def read_upload(data: bytes, takes: Sequence[Input], how: Preprocessing | None) -> Feed:
    """Return an upload as what the network takes; of a GIF the first frame, of arrays the first example.

    Args:
        data: A picture, or an .npy or .npz file.
        takes: The network's inputs.
        how: What is done to pictures, if the network takes one.

    Raises:
        DataError: It is neither, of another type, too large, or broken; or the network takes something else.
    """
    if not takes:
        return {}
    arrays = next((ending for start, ending in ARRAYS.items() if data.startswith(start)), None)
    try:
        if arrays is not None:
            return _read_arrays(data, arrays, takes)
        picture = decode(data, formats=list(TYPES), largest=LARGEST_PICTURE)
    except DataError as error:
        raise DataError(f"this file {error}") from error
    if how is None:
        names = ", ".join(map(str, takes))
        raise DataError(f"this network takes no picture but {names}; upload an .npy or .npz file")
    return {takes[0].name: fed(how, picture, takes[0])}


def _read_arrays(data: bytes, ending: str, takes: Sequence[Input]) -> Feed:
    if ending == ".npy" and len(takes) > 1:
        names = ", ".join(value.name for value in takes)
        raise DataError(f"holds one array, but the network has {len(takes)} inputs; upload an .npz file with {names}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"upload{ending}"
        path.write_bytes(data)
        try:
            _, feed = next(read_feeds([str(path)], takes, Preprocessing()))
        except DataError as error:
            raise DataError(str(error).removeprefix(f"{path}: ")) from error
        return feed


def read_examples(folder: Path) -> tuple[Example, ...]:
    """Return some files of a folder, taken evenly over their names, each small and whole enough to be uploaded.

    Arrays are offered where there are no pictures.
    """
    files = find_files(folder)
    found = [path for path in files if path.suffix.lower() in SUFFIXES] or [
        path for path in files if path.suffix.lower() in ARRAYS.values()
    ]
    if not found:
        raise DataError(f"{folder}: holds no {_TAKEN} picture and no array to offer as an example")
    return tuple(_example(path) for path in evenly(found, MOST_EXAMPLES))


def _example(path: Path) -> Example:
    try:
        if path.stat().st_size > LARGEST_UPLOAD:
            raise DataError(f"more than {LARGEST_UPLOAD // 10**6} MB; take it out of the folder")
        data = path.read_bytes()
        if path.suffix.lower() in ARRAYS.values():
            return Example(path.name, data, "application/octet-stream")
        try:
            decode(data, formats=list(TYPES), largest=LARGEST_PICTURE)
        except DataError as error:
            raise DataError(f"this file {error}") from error
        with pillow().open(io.BytesIO(data), formats=list(TYPES)) as picture:
            return Example(
                path.name, data, TYPES.get(picture.format, TYPES["JPEG"])
            )  # MPO is a JPEG with more behind it
    except (DataError, OSError) as error:
        raise DataError(f"{path}: cannot be an example: {error}") from error
