"""Images in folders by class: a few hundred small generated files, some of them odd, two of them broken."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from together import script_together
from torch import Tensor

from anybit.artifact.pictures import read_picture
from anybit.data import Batches, Dataset, Split, base, load_dataset
from anybit.data.folder import (
    Images,
    RandomCrop,
    find_images,
    load_folder,
    set_apart,
    usual_workers,
)
from anybit.errors import DataError, MissingDependency
from anybit.evaluate.sweep import sweep
from anybit.simulate.prepare import prepare
from anybit.train.loop import train
from anybit.train.recipe import load_recipe

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")

RECIPES = Path(__file__).parent.parent / "paper" / "recipes" / "paper"
COLOURS = {"apple": (220, 40, 40), "leaf": (40, 200, 60), "sea": (30, 60, 210), "stone": (128, 128, 128)}
"""By class: these can be learned in a few steps."""
TRAIN, TEST = 60, 15
BROKEN = ("train/leaf/007.JPEG", "val/sea/003.JPEG")
"""The first is text, the second is cut short."""


def picture(name: str, number: int) -> Image.Image:
    """Return an image of a class, with noise, each of another size."""
    random = np.random.default_rng([number, *name.encode()])
    width, height = random.integers(30, 70, 2)
    pixels = np.array(COLOURS[name]) + random.normal(0, 25, (height, width, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def make(root: Path) -> Path:
    for part, count in (("train", TRAIN), ("val", TEST)):
        for name in COLOURS:
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                picture(name, number + (part == "val") * TRAIN).save(root / part / name / f"{number:03}.JPEG")
    apples = root / "train" / "apple"
    picture("apple", 0).save(apples / "000.JPEG", "PNG")  # ImageNet has one of these
    picture("apple", 1).convert("L").save(apples / "001.JPEG")
    picture("apple", 2).convert("CMYK").save(apples / "002.JPEG")
    (root / BROKEN[0]).write_text("no image at all")
    raw = (root / BROKEN[1]).read_bytes()
    (root / BROKEN[1]).write_bytes(raw[: len(raw) // 2])
    (apples / "notes.txt").write_text("not an image, and not called one")
    (apples / ".hidden.JPEG").write_text("left by some other program")
    return root


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("images") / "small")


@pytest.fixture(scope="module")
def sound(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same folder without the broken files."""
    root = tmp_path_factory.mktemp("images") / "sound"
    shutil.copytree(made, root)
    for name in BROKEN:
        (root / name).unlink()
    return root


def small(path: Path, workers: int = 2) -> Dataset:
    return load_folder(path, resize=32, size=24, workers=workers)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(split: Split) -> Images:
    assert isinstance(split.x, Images)
    return split.x


def drawn(data: Dataset, seed: int = 0, *, passes: int = 1, batch: int = 32) -> list[tuple[Tensor, Tensor]]:
    batches = Batches(data.train, batch, generator=seeded(seed), augment=data.augment)
    return [pair for _ in range(passes) for pair in batches]


def alike(a: list[tuple[Tensor, Tensor]], b: list[tuple[Tensor, Tensor]]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in zip(a, b, strict=True)
    )


# What is found


def test_the_splits_have_the_sizes_and_classes_they_should(made: Path) -> None:
    data = small(made)
    assert data.name == "small"
    assert data.classes == tuple(sorted(COLOURS))
    assert data.shape == (3, 24, 24)
    assert (len(data.train), len(data.validation), len(data.test)) == (4 * 58, 4 * 2, 4 * 15)  # a 25th of 60 is 2
    for split in (data.train, data.validation, data.test):
        names = images(split).names
        assert split.x.shape == (len(split), 3, 24, 24)
        assert [data.classes[label] for label in split.y.tolist()] == [name.split("/")[1] for name in names]
    every = [name for split in (data.train, data.validation, data.test) for name in images(split).names]
    assert sorted(every) == sorted(str(path.relative_to(made)) for path in made.rglob("[0-9]*.JPEG"))
    assert {name.partition("/")[0] for name in images(data.test).names} == {"val"}


def test_every_class_is_validated_on(made: Path) -> None:
    data = small(made)
    assert Counter(data.validation.y.tolist()) == dict.fromkeys(range(4), 2)
    names = [f"train/{name}/{number}" for name, count in (("a", 2), ("b", 74), ("c", 2000)) for number in range(count)]
    train, validation = set_apart(names, 25, 50)
    assert Counter(name.split("/")[1] for name in validation) == {"a": 1, "b": 2, "c": 50}
    assert sorted(train + validation) == sorted(names)


def test_the_order_is_fixed_and_mixes_the_classes(made: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(made, moved)
    a, b = small(made), small(moved)
    for split in ("train", "validation", "test"):
        assert images(getattr(a, split)).names == images(getattr(b, split)).names
    assert min(Counter(a.train.y[:60].tolist()).values()) >= 5  # the first of them are a sample
    (moved / "train" / "sea" / "new.JPEG").write_bytes((made / "train" / "sea" / "000.JPEG").read_bytes())
    more = small(moved)  # one more file leaves the others where they were
    assert len(set(images(more.validation).names) & set(images(a.validation).names)) >= 7


def test_validation_may_be_spelled_out(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "long")
    (tmp_path / "long" / "val").rename(tmp_path / "long" / "validation")
    data, usual = small(tmp_path / "long"), small(sound)
    assert torch.equal(data.test.x[:], usual.test.x[:])
    assert torch.equal(data.test.y, usual.test.y)


def test_a_folder_is_a_data_set_by_its_path(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = load_dataset(str(made))
    assert data.shape == (3, 224, 224)
    assert data.train.x[:2].shape == (2, 3, 224, 224)
    assert data.augment == RandomCrop((224, 224))
    monkeypatch.chdir(made.parent)
    assert load_dataset("small").classes == data.classes
    with pytest.raises(DataError, match=r"^data/imagenet: no such folder; images by class are expected here"):
        load_dataset("data/imagenet")


# What is cut out, and what becomes of the pixels


@pytest.mark.parametrize("shape", [(500, 375), (64, 64), (40, 90)])
def test_random_rectangles_are_inside_and_as_large_and_as_square_as_they_should(shape: tuple[int, int]) -> None:
    width, height = shape
    random, crop = Random(0), RandomCrop((24, 24))
    areas, ratios, lefts = [], [], set()
    for _ in range(2000):
        left, top, right, bottom = crop.box(width, height, random)
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
        areas.append((right - left) * (bottom - top) / (width * height))
        ratios.append((right - left) / (bottom - top))
        lefts.add(left)
    assert min(areas) > 0.07
    assert max(areas) <= 1
    assert min(ratios) > 0.7
    assert max(ratios) < 1.4
    assert len(lefts) > 20
    if width == height:
        assert np.mean(areas) == pytest.approx(0.5, abs=0.05)
        assert np.mean(np.log(ratios)) == pytest.approx(0, abs=0.02)


def test_an_image_too_long_for_any_rectangle_gives_its_middle() -> None:
    assert RandomCrop((24, 24)).box(1000, 30, Random(0)) == (480, 0, 520, 30)
    assert RandomCrop((24, 24)).box(30, 1000, Random(0)) == (0, 480, 30, 520)
    assert RandomCrop((24, 24)).box(1, 1, Random(0)) == (0, 0, 1, 1)


def test_half_of_the_images_are_mirrored() -> None:
    ramp = np.broadcast_to(np.arange(0, 250, 5, dtype=np.uint8)[None, :, None], (50, 50, 3))
    image, random = Image.fromarray(ramp.copy()), Random(0)
    rows = [np.asarray(RandomCrop((8, 8))(image, random))[4, :, 0].astype(int) for _ in range(400)]
    assert all((np.diff(row) > 0).all() or (np.diff(row) < 0).all() for row in rows)
    assert 0.4 < np.mean([row[0] > row[-1] for row in rows]) < 0.6


def test_nothing_falls_out_of_the_range_that_is_promised(made: Path) -> None:
    data = small(made)
    for x in (data.validation.x[:], torch.cat([x for x, _ in drawn(data)])):
        assert data.input_range[0] <= float(x.min()) < float(x.max()) <= data.input_range[1]


def test_the_odd_ones_are_read_like_the_others(made: Path) -> None:
    data = small(made)
    names = [name for split in (data.train, data.validation) for name in images(split).names]
    for name in ("train/apple/000.JPEG", "train/apple/001.JPEG", "train/apple/002.JPEG"):
        assert name in names
    list(Batches(data.train, 64))
    list(Batches(data.validation, 64))
    assert data.skipped in ((), (str(made / BROKEN[0]),))


# The same again


def test_order_and_augmentation_follow_from_the_seed_alone(made: Path) -> None:
    one = drawn(small(made, workers=1), passes=2)
    torch.manual_seed(5)
    assert alike(one, drawn(small(made, workers=5), passes=2))
    assert not alike(one, drawn(small(made), seed=1, passes=2))
    half = len(one) // 2
    assert not alike(one[:half], one[half:])  # another order and other rectangles in every pass
    x, y = (torch.cat(parts) for parts in zip(*one[:half], strict=True))
    other = drawn(small(made), batch=50)
    assert torch.equal(torch.cat([y for _, y in other]), y)
    assert torch.equal(torch.cat([x for x, _ in other]), x)  # nor do they hang on the size of batches


def test_every_image_once_per_pass(sound: Path) -> None:
    data = small(sound)
    whole = data.train.x[:]
    for _ in range(2):
        shuffled = list(Batches(data.train, 50, generator=seeded(3)))
        assert [len(y) for _, y in shuffled] == [50, 50, 50, 50, len(data.train) - 200]
        order = torch.randperm(len(data.train), generator=seeded(3))
        assert torch.equal(torch.cat([x for x, _ in shuffled]), whole[order])
        assert torch.equal(torch.cat([y for _, y in shuffled]), data.train.y[order])
    straight = list(Batches(data.train, 50))
    assert torch.equal(torch.cat([x for x, _ in straight]), whole)
    assert torch.equal(torch.cat([y for _, y in straight]), data.train.y)


def test_augmented_images_are_parts_of_their_image(made: Path) -> None:
    """The slow way: each image alone, from its own random numbers."""
    data = small(made)
    generator = seeded(2)
    order = torch.randperm(len(data.train), generator=generator)
    seed = int(torch.randint(2**62, (), generator=generator))
    (first, _), *_ = drawn(data, seed=2, batch=8)
    for place, found in zip(order[:8].tolist(), first, strict=True):
        image = read_picture(made / images(data.train).names[place]).convert("RGB")
        pixels = np.asarray(RandomCrop((24, 24))(image, Random((seed << 64) + place)))
        assert np.array_equal(found.numpy(), images(data.train).how.normalize(pixels))


def test_what_is_measured_is_what_is_run(made: Path) -> None:
    data = load_folder(made, size=28)
    how = images(data.test).how
    assert how == data.preprocessing
    assert (how.size, how.labels) == ((28, 28), data.classes)
    names = [name for name in images(data.test).names if name != BROKEN[1]][:3]
    for name in names:
        place = images(data.test).names.index(name)
        want = how(read_picture(made / name))[0]
        assert np.array_equal(data.test.x[place : place + 1][0].numpy(), want)


def test_a_pass_can_be_taken_up_where_it_was_left(made: Path) -> None:
    data = small(made)
    whole = drawn(data, passes=2)
    generator = seeded(0)
    batches = Batches(data.train, 32, generator=generator, augment=data.augment)
    for _ in batches:
        pass
    begun = generator.get_state()
    steps = iter(batches)
    for _ in range(3):
        next(steps)
    generator = seeded(99)
    generator.set_state(begun)
    again = Batches(data.train, 32, generator=generator, augment=data.augment)
    assert alike(list(again.after(3)), whole[len(batches) + 3 :])
    assert list(again.after(len(again))) == []


def test_what_was_done_before_is_not_decoded_again(made: Path) -> None:
    data = small(made)
    place = images(data.test).names.index(BROKEN[1])
    list(Batches(data.test, 1).after(place + 1))
    assert data.skipped == ()
    list(Batches(data.test, 1).after(place))
    assert data.skipped == (str(made / BROKEN[1]),)


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_take_their_shares_of_the_same_batches(made: Path, processes: int) -> None:
    whole = drawn(small(made))
    for rank in range(processes):
        data = small(made)
        part = Batches(data.train, 32, generator=seeded(0), augment=data.augment, part=(rank, processes))
        assert len(part) == len(whole)
        assert alike(list(part), [(x[rank::processes], y[rank::processes]) for x, y in whole])


def test_a_process_decodes_its_share_only(made: Path) -> None:
    place = images(small(made).test).names.index(BROKEN[1])
    for rank in range(2):
        data = small(made)
        list(Batches(data.test, 10, part=(rank, 2)))
        assert len(data.skipped) == (place % 10 % 2 == rank)


# Files that cannot be read


def test_broken_files_are_left_out_of_evaluation(made: Path, sound: Path, caplog: pytest.LogCaptureFixture) -> None:
    data, want = small(made), small(sound)
    for batch in (1, 7, 100):
        pairs = list(Batches(data.test, batch))
        assert all(len(y) for _, y in pairs)
        assert torch.equal(torch.cat([x for x, _ in pairs]), want.test.x[:])
        assert torch.equal(torch.cat([y for _, y in pairs]), want.test.y)
    path = made / BROKEN[1]
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2  # once, not three times
    assert lines[0].startswith(f"{path}: skipped, it cannot be read as an image (")
    assert "truncated" in lines[0]
    assert lines[1] == f"{made}: 1 file was skipped so far"
    assert data.skipped == (str(path),)
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_in_training_the_next_image_stands_in(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = small(made)
    split = data.train if BROKEN[0] in images(data.train).names else data.validation
    place = images(split).names.index(BROKEN[0])
    order = torch.randperm(len(split), generator=seeded(4)).tolist()
    pairs = list(Batches(split, 32, generator=seeded(4)))
    x, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    assert len(y) == len(split)  # batches keep their size
    stand_in = (place + 1) % len(split)
    assert torch.equal(x[order.index(place)], x[order.index(stand_in)])
    assert y[order.index(place)] == split.y[stand_in]  # with its own label
    assert torch.equal(split.x[place : place + 1], split.x[stand_in : stand_in + 1])
    for _ in Batches(split, 32, generator=seeded(5)):
        pass
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "is no picture of a known type" in line] == lines[:1]
    assert lines[1:] == [f"{made}: 1 file was skipped so far"]


def test_what_a_user_sees_who_set_up_nothing(made: Path) -> None:
    code = f"""
from pathlib import Path
from anybit.data import Batches
from anybit.data.folder import load_folder
data = load_folder(Path({str(made)!r}), resize=32, size=24)
splits = 2 * [data.train, data.validation, data.test]
print(sum(len(y) for split in splits for _, y in Batches(split, 32)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 2 * (4 * (TRAIN + TEST) - 2)
    lines = done.stderr.splitlines()
    for name in BROKEN:
        assert sum(line.startswith(f"{made / name}: skipped") for line in lines) == 1
    assert f"{made}: 2 files were skipped so far" in lines
    assert len(lines) == 4


def test_a_split_without_a_whole_file(sound: Path, tmp_path: Path) -> None:
    root = tmp_path / "gone"
    shutil.copytree(sound, root)
    for name in ("sea", "leaf", "apple", "stone"):
        for file in (root / "train" / name).iterdir():
            file.write_bytes(file.read_bytes()[:100])
    data = small(root)
    with pytest.raises(DataError, match=r"gone: no image of this split can be read; put whole files there$"):
        drawn(data)
    assert decoding() == []
    assert list(Batches(data.train, 16)) == []


def test_a_file_that_vanishes_counts_as_broken(sound: Path, tmp_path: Path) -> None:
    root = tmp_path / "vanishing"
    shutil.copytree(sound, root)
    data = small(root)
    gone = root / images(data.test).names[0]
    gone.unlink()
    assert sum(len(y) for _, y in Batches(data.test, 16)) == len(data.test) - 1
    assert data.skipped == (str(gone),)


def decoding() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("decode")]


def test_no_thread_is_left_behind(made: Path) -> None:
    steps = iter(Batches(small(made, workers=3).train, 8))
    next(steps)
    assert decoding()
    steps.close()  # type: ignore[attr-defined]
    assert decoding() == []
    list(Batches(small(made).test, 8))
    assert decoding() == []


# Folders that cannot be used


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    root = tmp_path / "tiny"
    for part, count in (("train", 3), ("val", 1)):
        for name in ("a", "b"):
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                picture("sea", number).save(root / part / name / f"{number}.jpg")
    return root


def refused(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        load_dataset(str(path))
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert len(text.splitlines()) == 1
    assert text.endswith("as train/CLASS/*.JPEG and val/CLASS/*.JPEG, or as CLASS/*.JPEG")
    return text


def test_the_smallest_folder_will_do(tiny: Path) -> None:
    data = load_folder(tiny, resize=8, size=8)
    assert (len(data.train), len(data.validation), len(data.test)) == (4, 2, 2)


def test_all_problems_of_a_folder_are_told_at_once(tiny: Path) -> None:
    (tiny / "train" / "only").mkdir()
    picture("sea", 0).save(tiny / "train" / "only" / "0.jpg")
    (tiny / "val" / "extra").mkdir()
    (tiny / "val" / "a" / "0.jpg").rename(tiny / "val" / "a" / "0.gif")
    text = refused(tiny)
    for part in (
        "classes in train that are not in val: only",
        "classes in val that are not in train: extra",
        "classes in train with less than 2 images: only",
        "classes in val with less than 1 image: a, extra",
    ):
        assert part in text


def test_folders_without_the_layout(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "has no folder of a class" in refused(tmp_path / "empty")
    (tmp_path / "flat" / "train").mkdir(parents=True)
    picture("sea", 0).save(tmp_path / "flat" / "train" / "0.jpg")
    assert "train/ has no folder of a class" in refused(tmp_path / "flat")
    (tmp_path / "few" / "a").mkdir(parents=True)
    assert "classes with less than 3 images: a" in refused(tmp_path / "few")
    assert "no such folder" in refused(tmp_path / "nowhere" / "at" / "all")


def test_a_folder_that_cannot_be_listed(tiny: Path) -> None:
    shutil.rmtree(tiny / "val")
    (tiny / "val").symlink_to("val")  # root may read everything, but cannot go round in circles
    assert "val/ cannot be read (Too many levels of symbolic links)" in refused(tiny)
    (tiny / "val").unlink()
    (tiny / "val").write_text("a file")
    assert "val/ cannot be read (Not a directory)" in refused(tiny)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_class_that_may_not_be_read(tiny: Path) -> None:
    (tiny / "train" / "a").chmod(0)
    try:
        assert "train/a/ cannot be read (Permission denied)" in refused(tiny)
    finally:
        (tiny / "train" / "a").chmod(0o755)


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.npy").write_text("")
    with pytest.raises(DataError, match=r"mine\.npy': use digits, a folder of images, the path of an \.npz"):
        load_dataset(str(tmp_path / "mine.npy"))
    with pytest.raises(DataError, match="no such folder"):
        find_images(tmp_path / "mine.npy")


def test_settings_that_cannot_be(tiny: Path) -> None:
    for size, resize in ((0, 8), (9, 8), (-1, 8)):
        with pytest.raises(DataError, match=f"size must be above 0 and at most resize = 8, got {size}"):
            load_folder(tiny, size=size, resize=resize)
    with pytest.raises(DataError, match="workers must be 1 or more, got 0"):
        load_folder(tiny, workers=0)
    data = load_folder(tiny, resize=8, size=8)
    with pytest.raises(DataError, match="pass generator="):
        Batches(data.train, 2, augment=data.augment)


def test_without_pillow_the_install_line_is_printed(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingDependency, match=r"pillow.*pip install 'anybit\[data\]'"):
        load_folder(tiny)


def test_threads_are_shared_by_the_processes_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, processes, want in ((8, "1", 8), (8, "4", 2), (2, "4", 1), (64, "2", 16)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        assert usual_workers() == want


# As a split


def test_a_part_of_a_split_is_not_decoded(made: Path, sound: Path) -> None:
    data = small(sound)
    part = data.train.first(10)
    assert isinstance(part.x, Images)
    assert part.x.shape == (10, 3, 24, 24)
    assert torch.equal(part.x[:], data.train.x[:10])
    assert torch.equal(part.y, data.train.y[:10])
    assert torch.equal(data.train.x[torch.tensor([3, 0])], data.train.x[:4][[3, 0]])
    broken = small(made)
    broken.test.first(images(broken.test).names.index(BROKEN[1]) + 1)
    assert broken.skipped == ()


def test_all_inputs_at_once_if_there_is_room(made: Path, sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = small(sound)
    x, y = small(made).test.tensors()  # without the broken one
    assert torch.equal(x, data.test.x[:])
    assert torch.equal(y, data.test.y)
    monkeypatch.setattr(base, "MOST_BYTES", 4 * 3 * 24 * 24 * 10)
    with pytest.raises(DataError, match=r"231 inputs of shape \(3, 24, 24\) take .*; take a part of them"):
        data.train.tensors()


def test_not_one_file_can_be_read(tiny: Path) -> None:
    for file in (tiny / "val").rglob("*.jpg"):
        file.write_bytes(b"")
    data = load_folder(tiny, resize=8, size=8)
    assert list(Batches(data.test, 1)) == []
    with pytest.raises(DataError, match="not one of 2 inputs can be read"):
        data.test.tensors()


def test_a_checksum_tells_data_apart(made: Path, sound: Path) -> None:
    data = small(made)
    assert data.train.digest() == small(made, workers=1).train.digest()
    others = [small(sound).train, data.validation, data.train.first(9), load_folder(made, resize=33, size=24).train]
    others.append(Split(data.train.x, data.train.y.flip(0)))
    assert len({data.train.digest(), *(split.digest() for split in others)}) == 6
    assert data.skipped == ()  # nothing was decoded for it


def test_a_checksum_changes_with_what_is_in_a_file(sound: Path, tmp_path: Path) -> None:
    root = tmp_path / "changing"
    shutil.copytree(sound, root)
    before = small(root).train.digest()
    assert small(root).train.digest() == before
    picture("sea", 999).save(root / "train" / "apple" / "010.JPEG")  # the same name
    assert small(root).train.digest() != before


@pytest.mark.parametrize(
    ("parts", "sizes"),
    [
        ({"": 20}, (32, 4, 4)),  # class folders alone: a tenth of each for validation, a tenth for the test
        ({"train": 20, "val": 4, "test": 3}, (40, 8, 6)),
        ({"train": 20, "test": 3}, (38, 2, 6)),
        ({"train": 20, "val": 4}, (38, 2, 8)),
        ({"train": 20}, (38, 2, None)),
        ({"val": 4}, (None, None, 8)),
        ({"test": 4}, (None, None, 8)),
    ],
)
def test_every_way_to_lay_out_a_folder(parts: dict[str, int], sizes: tuple[int | None, ...], tmp_path: Path) -> None:
    for part, count in parts.items():
        for name in ("a", "b"):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(count):
                picture("sea", number).save(tmp_path / part / name / f"{number}.jpg")
    data = load_folder(tmp_path, size=12)
    found = [None if split is None else len(split) for split in (data.train, data.validation, data.test)]
    assert tuple(found) == sizes
    assert (data.classes, data.shape) == (("a", "b"), (3, 12, 12))
    for split in (data.train, data.validation, data.test):
        assert split is None or set(split.y.tolist()) == {0, 1}  # every class is everywhere
    names = [name for split in (data.train, data.validation, data.test) if split for name in images(split).names]
    assert len(set(names)) == len(names)


# Training from a folder


@pytest.mark.slow
def test_a_network_learns_from_a_folder(made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = load_recipe(RECIPES / "imagenet-resnet18-base.toml").changed(
        {"epochs": 4, "model.multiplier": 0.125, "data.batch": 32, "optimizer.warmup": 1, "optimizer.lr": 0.05}
    )
    data = small(made)
    model, results = train(recipe, data, tmp_path / "run")
    assert results["validation_accuracy"] >= 0.75  # of four colours
    net = prepare(model, data.test.x[:2], input_range=data.input_range, preset="paper")
    rows = sweep(net, Batches(data.test, 16), widths=[(8, 8), (2, 2)])
    assert [row.n for row in rows] == [4 * TEST - 1] * 2
    assert rows[0].accuracy > 0.7
    assert data.skipped == tuple(sorted(str(made / name) for name in BROKEN))
    assert len([record for record in caplog.records if ": skipped, " in record.getMessage()]) == 2


TOGETHER = """
import sys
from pathlib import Path
from anybit.data.folder import load_folder
from anybit.train.loop import train
from anybit.train.recipe import load_recipe

recipe, images, out = sys.argv[1:]
changes = {"epochs": 2, "model.multiplier": 0.125, "data.batch": 40, "optimizer.warmup": 1, "penalty.weight": 1e-4}
data = load_folder(Path(images), resize=32, size=24)
_, results = train(load_recipe(recipe).changed(changes), data, out)
sys.stdout.write(f"accuracy {results['validation_accuracy']}\\n")  # whole lines: two processes write to one pipe
"""


@pytest.mark.slow
def test_the_recipe_for_imagenet_runs_in_two_processes(made: Path, tmp_path: Path) -> None:
    words = [str(RECIPES / "imagenet-resnet18-base.toml"), str(made), str(tmp_path / "run")]
    done = script_together(tmp_path, TOGETHER, *words)
    lines = [line for line in done.stdout.splitlines() if line.startswith("accuracy")]
    assert len(lines) == 2
    assert lines[0] == lines[1]
    files = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert files == ["log.jsonl", "model.safetensors", "run.json"]
    log = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert len(log) == 2 * math.ceil(4 * 58 / 40)
    assert 1 <= done.stderr.count(f"{BROKEN[0]}: skipped") <= 2  # at most once by each process
    summary = json.loads((tmp_path / "run" / "run.json").read_text())
    assert summary["skipped_files"] == [str(made / BROKEN[0])]  # whichever process it was that met it


@pytest.fixture(autouse=True)
def _quiet_threads() -> Iterator[None]:
    yield
    assert decoding() == []


def test_a_run_goes_on_from_the_middle_of_a_pass(made: Path, tmp_path: Path) -> None:
    recipe = load_recipe(RECIPES / "imagenet-resnet18-base.toml").changed(
        {"epochs": 2, "model.multiplier": 0.125, "data.batch": 40, "optimizer.warmup": 1, "penalty.weight": 1e-4}
    )
    whole, _ = train(recipe, small(made), tmp_path / "whole")
    left = iter(range(8))

    def stop(steps: int) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(recipe, small(made), tmp_path / "cut", progress=stop, save_every=0)
    said: list[str] = []
    again, _ = train(recipe, small(made, workers=1), tmp_path / "cut", resume=True, say=said.append)
    assert "going on after step 8" in said[0]
    assert "1 of the data's files could not be read" in said[1]
    assert json.loads((tmp_path / "cut" / "run.json").read_text())["skipped_files"] == [str(made / BROKEN[0])]
    assert all(map(torch.equal, whole.state_dict().values(), again.state_dict().values()))
    logs = [(tmp_path / name / "log.jsonl").read_text() for name in ("whole", "cut")]
    assert logs[0] == logs[1]
