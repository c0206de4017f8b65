"""A data set of the user's own, from a NumPy `.npz` file with `x_train`, `y_train`, `x_test`, `y_test`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from anybit.artifact.arrays import read_arrays
from anybit.data.base import Dataset, Split
from anybit.errors import DataError

NAMES = ("x_train", "y_train", "x_test", "y_test")
VALIDATION_SHARE = 0.1
MOST_CLASSES = 100_000
"""Labels run from 0; one above this is taken for a mistake, before a list of all classes fills the memory."""

LARGEST = float(np.finfo(np.float32).max)


def load_arrays(path: Path) -> Dataset:
    """Return the data set in `path`; the last tenth of the training part is for validation."""
    arrays = read_arrays(path, NAMES)
    problems = [p for part in ("train", "test") for p in _problems(arrays[f"x_{part}"], arrays[f"y_{part}"], part)]
    if not problems and arrays["x_train"].shape[1:] != arrays["x_test"].shape[1:]:
        problems = [f"x_train has inputs of shape {arrays['x_train'].shape[1:]}, x_test {arrays['x_test'].shape[1:]}"]
    if problems:
        raise DataError(f"{path}: {'; '.join(problems)}")
    x, y = _tensor(arrays["x_train"], np.float32), _tensor(arrays["y_train"], np.int64)
    test = Split(_tensor(arrays["x_test"], np.float32), _tensor(arrays["y_test"], np.int64))
    cut = len(y) - max(1, round(len(y) * VALIDATION_SHARE))
    classes = tuple(str(i) for i in range(int(max(y.max(), test.y.max())) + 1))
    span = (float(x.min()), float(x.max()))
    return Dataset(path.stem, Split(x[:cut], y[:cut]), Split(x[cut:], y[cut:]), test, classes, input_range=span)


def _tensor(array: np.ndarray, dtype: type[np.generic]) -> torch.Tensor:
    # NumPy converts first: torch takes neither long doubles nor the other byte order.
    return torch.from_numpy(np.ascontiguousarray(array, dtype))


def _problems(x: np.ndarray, y: np.ndarray, part: str) -> list[str]:
    found = []
    if x.ndim < 2 or len(x) < 2 or x.size == 0 or x.dtype.kind not in "fiub":
        found.append(
            f"x_{part} must hold numbers, at least two inputs along its first dimension; got {x.shape} {x.dtype}"
        )
    elif not (float(x.min()) >= -LARGEST and float(x.max()) <= LARGEST):  # NaN is neither
        found.append(f"x_{part} has infinite or NaN entries, or some too large for 32 bits")
    if y.ndim != 1 or y.dtype.kind not in "iu":
        found.append(f"y_{part} must hold whole numbers in one dimension; got {y.shape} {y.dtype}")
    elif x.ndim and len(y) != len(x):
        found.append(f"x_{part} has {len(x)} inputs, y_{part} has {len(y)} labels")
    elif len(y) and y.min() < 0:
        found.append(f"y_{part} has negative labels")
    elif len(y) and y.max() >= MOST_CLASSES:
        found.append(f"y_{part} has the label {y.max()}; labels count the classes from 0")
    return found
