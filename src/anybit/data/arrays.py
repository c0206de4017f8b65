"""A data set of the user's own, from a NumPy `.npz` file with `x_train`, `y_train`, `x_test`, `y_test`.

It may also have `x_validation` and `y_validation`, or only a test part.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from anybit.artifact.arrays import read_arrays
from anybit.data.base import Dataset, Split
from anybit.errors import DataError

PARTS = ("train", "validation", "test")
NAMES = ("x_train", "y_train", "x_test", "y_test")
VALIDATION_SHARE = 0.1
MOST_CLASSES = 100_000
"""Labels run from 0; one above this is taken for a mistake, before a list of all classes fills the memory."""

LARGEST = float(np.finfo(np.float32).max)


def load_arrays(path: Path) -> Dataset:
    """Return the data set in `path`.

    Without `x_validation` a tenth of the training part is for validation, the last of each class. Images with their
    channels last are taken as such: (N, 32, 32, 3) becomes (N, 3, 32, 32).
    """
    arrays = _read(path)
    parts = [part for part in PARTS if f"x_{part}" in arrays]
    problems = [p for part in parts for p in _problems(arrays[f"x_{part}"], arrays[f"y_{part}"], part)]
    shapes = {part: arrays[f"x_{part}"].shape[1:] for part in parts}
    if not problems and len(set(shapes.values())) > 1:
        problems = [", ".join(f"x_{part} has inputs of shape {shape}" for part, shape in shapes.items())]
    if problems:
        raise DataError(f"{path}: {'; '.join(problems)}")
    splits: dict[str, Split] = {}
    for part in parts:
        x, y = _tensor(arrays[f"x_{part}"], np.float32), _tensor(arrays[f"y_{part}"], np.int64)
        splits[part] = Split(_channels_first(x), y)
    if "train" in splits and "validation" not in splits:
        splits["train"], splits["validation"] = _set_apart(splits["train"])
    classes = tuple(str(i) for i in range(max(int(split.y.max()) for split in splits.values()) + 1))
    ranged = splits.get("train", splits["test"])
    span = (float(ranged.x[:].min()), float(ranged.x[:].max()))
    train, validation, test = (splits.get(part) for part in PARTS)
    return Dataset(path.stem, train, validation, test, classes, input_range=span)


def _channels_first(x: torch.Tensor) -> torch.Tensor:
    """Return images with their channels in front; one of 32x32x3 has no 32 channels."""
    last = x.dim() == 4 and x.shape[-1] in (1, 3, 4) and x.shape[1] not in (1, 3, 4)
    return x.permute(0, 3, 1, 2).contiguous() if last else x


def _set_apart(split: Split) -> tuple[Split, Split]:
    """Return the data without the last tenth of every class, and that tenth; of one example none is taken."""
    apart = torch.zeros(len(split), dtype=torch.bool)
    for label in set(split.y.tolist()):
        own = torch.nonzero(split.y == label).flatten()
        if len(own) > 1:
            apart[own[len(own) - max(1, round(len(own) * VALIDATION_SHARE)) :]] = True
    if not apart.any():
        apart[-1] = True
    return Split(split.x[~apart], split.y[~apart]), Split(split.x[apart], split.y[apart])


def _read(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of every part; one for tests alone has no other arrays."""
    if not path.exists():
        raise DataError(f"{path}: no such file; an .npz file with {', '.join(NAMES)} is expected here")
    arrays = read_arrays(path)
    there = [f"{kind}_{part}" for part in PARTS if f"x_{part}" in arrays for kind in "xy"]
    wanted = there if arrays.keys() == {"x_test", "y_test"} else [*NAMES, *there]
    if missing := [name for name in dict.fromkeys(wanted) if name not in arrays]:
        raise DataError(f"{path}: lacks {', '.join(missing)}; save it with np.savez(path, {missing[0]}=..., ...)")
    return {name: arrays[name] for name in there}


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
