"""Arrays out of .npy and .npz files, which may come from strangers: no pickle, and no more numbers than bytes."""

from __future__ import annotations

import math
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from anybit.common.text import explaining, printable
from anybit.errors import DataError

UNFOLDING, MOST_UNFOLDED = 3, 200 * 10**6
"""Compressed arrays may take so many times the size of their file, and so many bytes more."""


def read_array(path: Path) -> npt.NDArray[Any]:
    """Return the array in an .npy file, mapped into memory: it cannot claim more numbers than the file has."""
    with explaining(DataError, f"{path}: cannot be read as a numpy array", "; save it again"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about headers that Python 2 wrote
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            array.close()
            raise ValueError("an archive of several arrays")
        return array


def read_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays in an .npz file."""
    if not path.exists():
        raise DataError(f"{path}: no such file; an .npz file is expected here")
    # Opened here, because np.load leaves a damaged archive open.
    with (
        explaining(DataError, f"{path}: not a whole .npz file", "; save it again with np.savez"),
        path.open("rb") as raw,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # about headers that Python 2 wrote
        if raw.read(2) != b"PK":
            raise ValueError("no archive of several arrays")
        raw.seek(0)
        file = np.load(raw, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile) or file.zip is None:
            raise ValueError("no archive of several arrays")
        with file:
            _check_sizes(file.zip, path, file.files)
            return {name: file[name] for name in file.files}


def _check_sizes(archive: zipfile.ZipFile, path: Path, names: Sequence[str]) -> None:
    """Refuse arrays that claim more numbers than they hold, or that would unfold to fill the memory."""
    entries = {entry.filename: entry for entry in archive.infolist()}
    total, most = 0, UNFOLDING * path.stat().st_size + MOST_UNFOLDED
    for name in names:
        entry = entries.get(f"{name}.npy") or entries[name]
        with archive.open(entry) as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
            claimed = math.prod(shape) * dtype.itemsize + file.tell()
        if dtype.hasobject:
            raise ValueError("Object arrays cannot be loaded")
        if claimed != entry.file_size:
            raise DataError(
                f"{path}: {printable(name, 40)} claims {claimed} bytes and has {entry.file_size}; save it again"
            )
        total += claimed
    if total > most:
        raise DataError(
            f"{path}: its arrays would unfold to {total >> 20} MB, the file has {path.stat().st_size >> 20}; save it "
            "with np.savez, not compressed"
        )
