"""Data sets, split once and for all into training, validation and test: in memory, from a folder, or of loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from anybit.artifact.feeding import Preprocessing
from anybit.common.named import called, is_code
from anybit.common.text import did_you_mean, quoted
from anybit.data.arrays import load_arrays
from anybit.data.base import Batches, Dataset, Given, Split
from anybit.data.digits import load_digits
from anybit.errors import DataError

__all__ = ["DATASETS", "Batches", "Dataset", "Given", "Split", "as_dataset", "load_dataset"]


DATASETS: dict[str, Callable[[], Dataset]] = {"digits": load_digits}
"""The data sets known by name: add one here."""


def load_dataset(
    name: str, *, code: bool = False, how: Preprocessing | None = None, size: int | None = None
) -> Dataset:
    """Return the data set of that name, the one in that `.npz` file, or the images in that folder.

    Args:
        name: Which one.
        code: Whether it may also be `package.module:function` or `file.py:function`, which is imported and called. Do
            not allow that for a name that stands in a file from somebody else.
        how: What becomes of the images in a folder; as usual for ImageNet, if not given.
        size: The side that the images in a folder are brought to.
    """
    if name in DATASETS:
        return DATASETS[name]()
    if is_code(name):
        if not code:
            raise DataError(f"the data come from a function, {name}, and a file may not start code; say --data {name}")
        return as_dataset(called(name), name)
    if name.endswith(".npz"):
        return load_arrays(Path(name))
    if name and not Path(name).is_file() and (Path(name).is_dir() or len(Path(name).parts) > 1):
        from anybit.data.folder import load_folder

        return load_folder(Path(name), how=how, size=size)
    raise DataError(
        f"no data set {quoted(name)}: use {', '.join(DATASETS)}, a folder of images, the path of an .npz file, or a "
        f"function of yours, such as my_data.py:load{did_you_mean(name, DATASETS)}"
    )


def as_dataset(made: Any, name: str) -> Dataset:
    """Return what a function of the user's made as a data set: one loader, or (train, [validation,] test).

    A list of loaders is taken as the tuple; a list of batches is one loader. The validation loader may be None.
    """
    if isinstance(made, Dataset):
        return made
    several = isinstance(made, tuple) or (isinstance(made, list) and any(isinstance(p, DataLoader) for p in made))
    parts = tuple(made) if several else (made,)
    parts = parts[:1] + parts[2:] if len(parts) == 3 and parts[1] is None else parts
    good = all(isinstance(part, Iterable) and not isinstance(part, Tensor | str | dict) for part in parts)
    if not good or not 1 <= len(parts) <= 3:
        raise DataError(
            f"{name}: must return one loader, or the loaders (train, test) or (train, validation, test); returned "
            f"{type(made).__name__}" + f" of {len(parts)}" * several
        )
    test = Given(parts[-1])
    train = Given(parts[0]) if len(parts) > 1 else None
    return Dataset(name, train, Given(parts[1]) if len(parts) == 3 else None, test)
