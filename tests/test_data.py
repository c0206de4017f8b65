from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from anybit.data import Batches, Split, load_dataset
from anybit.data.arrays import load_arrays
from anybit.data.base import Augment, shift
from anybit.data.digits import load_digits
from anybit.errors import DataError, MissingDependency


def numbered(n: int) -> Split:
    """Inputs that say which one they are."""
    return Split(torch.arange(n).float().view(n, 1), torch.arange(n))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_digits_have_the_sizes_and_the_range_they_promise() -> None:
    data = load_dataset("digits")
    assert (len(data.train), len(data.validation), len(data.test)) == (1097, 250, 450)
    assert data.shape == (1, 8, 8)
    assert data.classes == tuple("0123456789")
    for part in (data.train, data.validation, data.test):
        assert part.x.shape == (len(part), 1, 8, 8)
        assert part.x.dtype == torch.float32
        assert part.y.dtype == torch.int64
        assert set(part.y.tolist()) == set(range(10))
        assert (float(part.x.min()), float(part.x.max())) == data.input_range == (0.0, 1.0)


def test_the_splits_of_digits_are_the_whole_and_share_nothing() -> None:
    from sklearn import datasets

    raw = datasets.load_digits()
    whole = sorted((label, *image.ravel()) for label, image in zip(raw.target, raw.images, strict=True))
    data = load_digits()
    parts = [
        [(int(y), *(16 * x).flatten().tolist()) for x, y in zip(part.x, part.y, strict=True)]
        for part in (data.train, data.validation, data.test)
    ]
    assert sorted(parts[0] + parts[1] + parts[2]) == whole
    assert len(set(whole)) == len(whole)  # no image is there twice, so equal lists mean disjoint splits


def test_digits_are_the_same_every_time_whatever_the_global_seed() -> None:
    torch.manual_seed(1)
    a = load_digits()
    torch.manual_seed(2)
    b = load_digits()
    for name in ("train", "validation", "test"):
        assert torch.equal(getattr(a, name).x, getattr(b, name).x)
        assert torch.equal(getattr(a, name).y, getattr(b, name).y)


def test_without_scikit_learn_the_install_line_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MissingDependency, match=r"scikit-learn.*pip install 'anybit\[data\]'"):
        load_digits()


@pytest.mark.parametrize(("n", "batch"), [(1, 1), (7, 3), (6, 3), (5, 100), (10, 1)])
@pytest.mark.parametrize("shuffled", [False, True])
def test_every_example_once_per_epoch(n: int, batch: int, shuffled: bool) -> None:
    batches = Batches(numbered(n), batch, generator=seeded(0) if shuffled else None)
    if shuffled and n == 7:  # a last batch of one, which batch norm cannot take, is left out of training
        drawn = [y.tolist() for _, y in batches]
        assert [len(y) for y in drawn] == [3, 3]
        assert len(batches) == 2
        return
    for _ in range(3):
        drawn = list(batches)
        assert len(drawn) == len(batches) == -(-n // batch)
        assert [len(y) for _, y in drawn[:-1]] == [batch] * (len(drawn) - 1)
        assert len(drawn[-1][1]) == n - batch * (len(drawn) - 1)
        assert all(torch.equal(x.flatten().long(), y) for x, y in drawn)  # inputs keep their labels
        order = torch.cat([y for _, y in drawn]).tolist()
        assert sorted(order) == list(range(n))
        if not shuffled:
            assert order == list(range(n))


def test_the_order_depends_on_the_generator_alone() -> None:
    def two_epochs(seed: int, global_seed: int) -> list[list[int]]:
        torch.manual_seed(global_seed)
        batches = Batches(numbered(50), 8, generator=seeded(seed))
        return [torch.cat([y for _, y in batches]).tolist() for _ in range(2)]

    first = two_epochs(3, 1)
    assert first == two_epochs(3, 2)
    assert first != two_epochs(4, 1)
    assert first[0] != first[1]  # a new order every epoch


def test_augmentation_is_applied_to_inputs_and_repeats() -> None:
    def noisy(x: Tensor, generator: torch.Generator) -> Tensor:
        return x + torch.rand(x.shape, generator=generator)

    def draw(seed: int) -> Tensor:
        return torch.cat([x - y[:, None] for x, y in Batches(numbered(9), 4, generator=seeded(seed), augment=noisy)])

    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))
    assert (draw(0) > 0).all()
    assert (draw(0) < 1).all()


def test_what_makes_no_batches() -> None:
    with pytest.raises(DataError, match="without examples"):
        Batches(numbered(0), 4)
    with pytest.raises(DataError, match="pass generator="):
        Batches(numbered(4), 4, augment=shift(1))


@pytest.mark.parametrize("augment", [None, shift(1)])
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_pass_without_its_first_batches_has_the_others(augment: Augment | None, shuffled: bool) -> None:
    split = Split(torch.rand(23, 1, 4, 4, generator=seeded(1)), torch.arange(23))
    if augment is not None and not shuffled:
        pytest.skip("augmentation draws random numbers")
    for done in range(7):
        a, b = seeded(0), seeded(0)
        whole = list(Batches(split, 4, generator=a if shuffled else None, augment=augment))
        rest = list(Batches(split, 4, generator=b if shuffled else None, augment=augment).after(done))
        assert len(rest) == max(0, 6 - done)
        for (x, y), (u, v) in zip(rest, whole[done:], strict=True):
            assert torch.equal(x, u)
            assert torch.equal(y, v)
        assert torch.equal(a.get_state(), b.get_state())  # and the next pass is the same too


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_processes_share_every_batch(processes: int) -> None:
    split = Split(torch.rand(23, 1, 4, 4, generator=seeded(1)), torch.arange(23))
    whole = list(Batches(split, 7, generator=seeded(0), augment=shift(1)))
    for rank in range(processes):
        part = list(Batches(split, 7, generator=seeded(0), augment=shift(1), part=(rank, processes)))
        for (x, y), (u, v) in zip(part, whole, strict=True):
            assert torch.equal(x, u[rank::processes])
            assert torch.equal(y, v[rank::processes])
    for bad in ((processes, processes), (-1, processes), (0, 0)):
        with pytest.raises(DataError, match="part is "):
            Batches(split, 7, part=bad)


def test_parts_and_checksums_of_a_split_in_memory() -> None:
    split = numbered(9)
    assert split.tensors() == (split.x, split.y)
    assert split.first(4).y.tolist() == [0, 1, 2, 3]
    assert len(split.first(100)) == 9
    others = [split.first(8), Split(split.x + 1, split.y), Split(split.x, split.y + 1), Split(split.x.T, split.y)]
    assert len({split.digest(), *(other.digest() for other in others)}) == 5
    assert split.digest() == numbered(9).digest()
    assert load_digits().skipped == ()


@pytest.mark.parametrize("pixels", [0, 1, 2])
def test_shift_moves_each_image_as_a_whole(pixels: int) -> None:
    x = torch.rand(200, 2, 5, 4, generator=seeded(0)) + 1
    before = x.clone()
    out = shift(pixels)(x, seeded(1))
    assert torch.equal(x, before)
    assert out.shape == x.shape
    seen = set()
    for image, moved in zip(x, out, strict=True):
        found = [
            (down, right)
            for down in range(-pixels, pixels + 1)
            for right in range(-pixels, pixels + 1)
            if torch.equal(by_hand(image, down, right), moved)
        ]
        assert len(found) == 1
        seen.add(found[0])
    assert len(seen) == (2 * pixels + 1) ** 2


def test_shift_repeats_with_its_generator() -> None:
    x = torch.rand(20, 1, 8, 8)
    assert torch.equal(shift(1)(x, seeded(0)), shift(1)(x, seeded(0)))
    assert not torch.equal(shift(1)(x, seeded(0)), shift(1)(x, seeded(1)))


def by_hand(image: Tensor, down: int, right: int) -> Tensor:
    """Move an image pixel by pixel, zeros coming in: the oracle."""
    out = torch.zeros_like(image)
    _, height, width = image.shape
    for row in range(height):
        for column in range(width):
            if 0 <= row - down < height and 0 <= column - right < width:
                out[:, row, column] = image[:, row - down, column - right]
    return out


def arrays() -> dict[str, Any]:
    noise = np.random.default_rng(0)
    return {
        "x_train": noise.random((40, 1, 4, 4)).astype(np.float32),
        "y_train": np.arange(40) % 3,
        "x_test": noise.random((6, 1, 4, 4)).astype(np.float32),
        "y_test": np.arange(6) % 4,
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mine.npz"


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_good_file(save: Callable[..., None], path: Path) -> None:
    values = arrays()
    save(path, **values)
    data = load_dataset(str(path))
    assert data.name == "mine"
    assert data.classes == ("0", "1", "2", "3")  # the fourth is in the test part only
    assert (len(data.train), len(data.validation), len(data.test)) == (37, 3, 6)
    assert data.validation.y.tolist() == [1, 2, 0]  # one of each class, the last
    assert np.array_equal(data.train.x.numpy(), values["x_train"][:37])
    assert np.array_equal(data.validation.x.numpy(), values["x_train"][37:])
    assert np.array_equal(data.test.x.numpy(), values["x_test"])
    assert data.test.y.tolist() == values["y_test"].tolist()
    assert data.input_range == (float(values["x_train"].min()), float(values["x_train"].max()))


def test_a_file_sorted_by_class_is_validated_on_every_class(path: Path) -> None:
    y = np.repeat(np.arange(4), 30)
    np.savez(path, x_train=np.random.rand(120, 5), y_train=y, x_test=np.random.rand(4, 5), y_test=np.arange(4))
    data = load_arrays(path)
    assert data.validation.y.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert len(data.train) == 108


def test_images_with_their_channels_last(path: Path) -> None:
    values = arrays()
    x = np.random.default_rng(1).random((40, 8, 6, 3))
    np.savez(path, **{**values, "x_train": x, "x_test": x[:6]})
    data = load_arrays(path)
    assert data.shape == (3, 8, 6)
    assert np.array_equal(data.test.x.numpy(), x[:6].transpose(0, 3, 1, 2).astype(np.float32))


def test_a_file_may_have_validation_or_only_tests(path: Path) -> None:
    values = arrays()
    more = {"x_validation": values["x_test"][:2], "y_validation": values["y_test"][:2]}
    np.savez(path, **values, **more)
    data = load_arrays(path)
    assert (len(data.train), len(data.validation), len(data.test)) == (40, 2, 6)
    np.savez(path, x_test=values["x_test"], y_test=values["y_test"])
    data = load_arrays(path)
    assert (data.train, data.validation, len(data.test)) == (None, None, 6)
    with pytest.raises(DataError, match="anybit train needs training data, and mine has none; let a function return"):
        data.need("train", "anybit train")


@pytest.mark.parametrize("x", ["u1", "i2", ">f4", "f8", "f2", "longdouble", "?"])
@pytest.mark.parametrize("y", ["u1", ">i8", "i4", "u8"])
def test_any_real_numbers_will_do(x: str, y: str, path: Path) -> None:
    values = arrays()
    for part in ("train", "test"):
        values[f"x_{part}"] = (4 * values[f"x_{part}"]).round().astype(x)
        values[f"y_{part}"] = values[f"y_{part}"].astype(y)
    np.savez(path, **values)
    data = load_arrays(path)
    assert (data.test.x.dtype, data.test.y.dtype) == (torch.float32, torch.int64)
    assert np.array_equal(data.test.x.numpy(), values["x_test"].astype("f4"))
    assert np.array_equal(data.test.y.numpy(), values["y_test"].astype("i8"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_test": None, "y_test": None}, "lacks x_test, y_test; save it with np.savez"),
        ({"x_train": np.zeros(40)}, "x_train must hold numbers, at least two inputs"),
        ({"x_train": np.float32(1)}, "x_train must hold numbers, at least two inputs"),
        ({"x_train": np.zeros((1, 4)), "y_train": np.zeros(1, int)}, "x_train must hold numbers, at least two"),
        ({"x_train": np.zeros((40, 0, 4))}, "x_train must hold numbers"),
        ({"x_train": np.full((40, 1, 4, 4), "a")}, "x_train must hold numbers"),
        ({"x_train": np.zeros((40, 1, 4, 4), complex)}, "x_train must hold numbers"),
        (
            {"x_test": np.zeros((6, 1, 5, 5))},
            r"x_train has inputs of shape \(1, 4, 4\), x_test has inputs of shape \(1, 5, 5\)",
        ),
        ({"y_train": np.zeros(39, int)}, "x_train has 40 inputs, y_train has 39 labels"),
        ({"y_train": np.zeros((40, 10), int)}, "y_train must hold whole numbers in one dimension"),
        ({"y_train": np.zeros(40)}, "y_train must hold whole numbers in one dimension; got .* float64"),
        ({"y_train": np.int64(1)}, "y_train must hold whole numbers"),
        ({"y_test": np.arange(6) - 1}, "y_test has negative labels"),
        ({"y_test": np.arange(6) + 10**12}, "y_test has the label 1000000000005; labels count the classes from 0"),
        ({"x_test": np.full((6, 1, 4, 4), np.nan)}, "x_test has infinite or NaN entries"),
        ({"x_train": np.full((40, 1, 4, 4), -np.inf)}, "x_train has infinite or NaN entries"),
        ({"x_train": np.full((40, 1, 4, 4), 1e300)}, "x_train has infinite or NaN entries, or some too large"),
    ],
)
def test_arrays_that_cannot_be_used(change: dict[str, Any], message: str, path: Path) -> None:
    values = {name: value for name, value in {**arrays(), **change}.items() if value is not None}
    np.savez(path, **values)
    refused(path, message)


def test_all_problems_are_told_at_once(path: Path) -> None:
    values = {**arrays(), "x_train": np.full((40, 1, 4, 4), np.nan), "y_test": -np.ones(6, int)}
    np.savez(path, **values)
    assert "y_test has negative labels" in refused(path, "x_train has infinite or NaN entries")


def npz(path: Path, **entries: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(f"{name}.npy", data)
    return path


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def test_arrays_that_would_fill_the_memory_are_refused_before_they_are_read(tmp_path: Path) -> None:
    labels = npy(np.zeros(2, np.int64))
    whole = npy(np.zeros((2, 1, 2, 2), np.float32))
    lying = whole.replace(b"(2, 1, 2, 2), ", b"(2, 1, 9, 2), ")
    path = npz(tmp_path / "a.npz", x_train=lying, y_train=labels, x_test=whole, y_test=labels)
    with pytest.raises(DataError, match="x_train claims 272 bytes and has 160"):
        load_arrays(path)
    bomb = npy(np.zeros((2, 1, 8000, 8000), np.float32))
    path = npz(tmp_path / "b.npz", x_train=bomb, y_train=labels, x_test=whole, y_test=labels)
    assert path.stat().st_size < 10**6
    with pytest.raises(DataError, match=r"would unfold to 488 MB, the file has 0; save it with np\.savez"):
        load_arrays(path)
    path = tmp_path / "c.npz"
    path.write_bytes(whole)
    with pytest.raises(DataError, match=r"not a whole \.npz file \(no archive"):
        load_arrays(path)


def test_nothing_is_unpickled(path: Path, tmp_path: Path) -> None:
    np.savez(path, **{**arrays(), "x_train": np.array([Bomb(tmp_path / "boom")] * 40, object)})
    refused(path, "Object arrays cannot be loaded")
    with path.open("wb") as file:
        np.save(file, np.array([Bomb(tmp_path / "boom")], object))
    refused(path, "not a whole .npz file")
    path.write_bytes(b"\x80\x04\x95 a pickle by its first bytes")
    refused(path, "not a whole .npz file")
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("share", [0, 0.01, 0.3, 0.6, 0.9, 0.999])
def test_a_file_cut_short(share: float, save: Callable[..., None], path: Path) -> None:
    save(path, **arrays())
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    refused(path, "not a whole .npz file")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_damaged_bytes_are_refused_or_do_not_matter(save: Callable[..., None], path: Path) -> None:
    save(path, **arrays())
    raw = path.read_bytes()
    want = load_arrays(path)
    errors: list[str] = []
    for position in range(0, len(raw), 11):
        damaged = bytearray(raw)
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        try:
            data = load_arrays(path)
        except DataError as error:
            errors.append(str(error))
        else:  # a date, or the other copy of a name, inside the archive
            assert torch.equal(data.train.x, want.train.x)
            assert torch.equal(data.test.y, want.test.y)
    assert all(message.startswith(f"{path}: ") for message in errors)
    assert len(errors) > 0.7 * len(raw) / 11


def test_files_that_are_no_archive(tmp_path: Path) -> None:
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "text.npz").write_text("x_train = 3")
    with zipfile.ZipFile(tmp_path / "zip.npz", "w") as archive:
        archive.writestr("x_train.npy", "not an array")
    array = io.BytesIO()
    np.save(array, np.zeros(3))
    (tmp_path / "array.npz").write_bytes(array.getvalue())
    for name, message in (
        ("missing.npz", "no such file; an .npz file with x_train, y_train, x_test, y_test is expected here"),
        ("folder.npz", "not a whole .npz file"),
        ("text.npz", "not a whole .npz file"),
        ("zip.npz", "not a whole .npz file"),
        ("array.npz", "not a whole .npz file"),
    ):
        refused(tmp_path / name, message)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return self.path.touch, ()


def refused(path: Path, message: str) -> str:
    with pytest.raises(DataError, match=message) as caught:
        load_dataset(str(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(DataError, match=r"no data set 'digit': use digits, .*; did you mean 'digits'\?"):
        load_dataset("digit")
    for name in ("", "imagenet", "mine.npy"):
        with pytest.raises(DataError, match=r"or a function of yours, such as my_data\.py:load$"):
            load_dataset(name)
