"""Data sets, split once and for all into training, validation and test: in memory, or decoded from a folder."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

from anybit.common.text import quoted
from anybit.data.arrays import load_arrays
from anybit.data.base import Batches, Dataset, Lazy, Split
from anybit.data.digits import load_digits
from anybit.errors import DataError

__all__ = ["DATASETS", "Batches", "Dataset", "Lazy", "Split", "load_dataset"]


def _cifar10() -> Dataset:
    # Imported on use: few runs need it, and the import brings tar and subprocess along.
    from anybit.data.cifar10 import load_cifar10

    return load_cifar10()


DATASETS: dict[str, Callable[[], Dataset]] = {"digits": load_digits, "cifar10": _cifar10}
"""The data sets known by name: add one here."""


def load_dataset(name: str) -> Dataset:
    """Return the data set of that name, the one in that `.npz` file, or the images in that folder."""
    if name in DATASETS:
        return DATASETS[name]()
    if name.endswith(".npz"):
        return load_arrays(Path(name))
    if name and not Path(name).is_file() and (Path(name).is_dir() or len(Path(name).parts) > 1):
        from anybit.data.folder import load_folder

        return load_folder(Path(name))
    close = get_close_matches(name[:80], DATASETS, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise DataError(
        f"no data set {quoted(name)}: use {', '.join(DATASETS)}, a folder of images, or the path of an .npz file{hint}"
    )
