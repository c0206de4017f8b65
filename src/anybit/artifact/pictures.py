"""Inputs from files: pictures, and numpy arrays for everything else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from anybit.errors import DataError, MissingDependency

PICTURES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".pgm"}
LARGEST = 64 * 2**20
"""Pixels of the largest picture that is opened: a file of a few bytes can claim any size."""

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
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: cannot be read as a numpy array ({error})") from error
    if array.shape == tuple(shape):
        array = array[None]
    if array.shape[1:] != tuple(shape) or array.dtype.kind not in "fiub":
        raise DataError(f"{path}: an array of shape {list(shape)} is expected, got {list(array.shape)} {array.dtype}")
    return np.asarray(array, np.float32)


def _picture(path: Path, shape: Sequence[int], mean: Sequence[float], std: Sequence[float]) -> Floats:
    image = pillow()
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise DataError(
            f"{path}: the network takes inputs of shape {list(shape)}, which no picture has; use .npy files"
        )
    try:
        with image.open(path) as picture:
            if picture.width * picture.height > LARGEST:
                raise DataError(f"{path}: {picture.width} x {picture.height} pixels are more than {LARGEST}")
            return as_batch(picture, shape, mean=mean, std=std)
    except (OSError, ValueError, SyntaxError, image.DecompressionBombError) as error:
        raise DataError(f"{path}: cannot be read as a picture ({error})") from error


def as_batch(picture: Any, shape: Sequence[int], *, mean: Sequence[float], std: Sequence[float]) -> Floats:
    """Return one of Pillow's pictures as a batch of one: scaled to size, to numbers from 0 to 1, and normalized."""
    channels, height, width = shape
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
