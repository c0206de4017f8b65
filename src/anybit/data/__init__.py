"""Data sets, split once and for all into training, validation and test: in memory, or decoded from a folder."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

from anybit.common.named import by_name, is_code
from anybit.common.text import quoted
from anybit.data.arrays import load_arrays
from anybit.data.base import Batches, Dataset, Lazy, Split
from anybit.data.digits import load_digits
from anybit.errors import DataError

__all__ = ["DATASETS", "Batches", "Dataset", "Lazy", "Split", "load_dataset"]


DATASETS: dict[str, Callable[[], Dataset]] = {"digits": load_digits}
"""The data sets known by name: add one here."""


def load_dataset(name: str, *, code: bool = False) -> Dataset:
    """Return the data set of that name, the one in that `.npz` file, or the images in that folder.

    With `code` it may also be `package.module:function` or `file.py:function`, which is imported and called. Do not
    allow that for a name that stands in a file from somebody else.
    """
    if name in DATASETS:
        return DATASETS[name]()
    if is_code(name):
        return _made(name, code)
    if name.endswith(".npz"):
        return load_arrays(Path(name))
    if name and not Path(name).is_file() and (Path(name).is_dir() or len(Path(name).parts) > 1):
        from anybit.data.folder import load_folder

        return load_folder(Path(name))
    close = get_close_matches(name[:80], DATASETS, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise DataError(
        f"no data set {quoted(name)}: use {', '.join(DATASETS)}, a folder of images, the path of an .npz file, or a "
        f"function of yours, such as my_data.py:load{hint}"
    )


def _made(name: str, code: bool) -> Dataset:
    if not code:
        raise DataError(f"the data come from a function, {name}, and a file may not start code; say --data {name}")
    made = by_name(name)()
    if not isinstance(made, Dataset):
        raise DataError(f"{name}: must return an anybit.data.Dataset, returned {type(made).__name__}")
    return made
