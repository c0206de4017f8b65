"""Images in folders by class: `train/CLASS/*.JPEG` and `val/CLASS/*.JPEG` as ImageNet comes, or just `CLASS/*.JPEG`.

They do not fit into memory: threads decode them, a few batches ahead of whoever uses them. Threads will do, because
Pillow and NumPy let go of the interpreter while they work. What an image becomes follows from the seed and from its
place alone, not from the number of threads. A file that cannot be read is skipped and reported, once.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from anybit.artifact.feeding import Preprocessing
from anybit.artifact.pictures import pillow, read_picture
from anybit.data.base import Augment, Dataset, Split
from anybit.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

SIZE = 224
ENDINGS = (".jpeg", ".jpg", ".png", ".webp", ".bmp")
TRAIN, VALIDATIONS, TEST = "train", ("val", "validation", "valid"), "test"
LAYOUT = "images by class are expected here, as train/CLASS/*.JPEG and val/CLASS/*.JPEG, or as CLASS/*.JPEG"
SHARE, MOST = 25, 50
"""Of each class in the training folder, one image in so many is for validation, and at most so many in all."""
HELD_OUT = 10
"""Of class folders without train/ and val/, one image in so many is for validation, and as many are for the test."""

AHEAD = 2
"""Batches that are made before they are asked for."""
MOST_WORKERS = 16

log = logging.getLogger("anybit.data")


def load_folder(
    path: Path,
    *,
    how: Preprocessing | None = None,
    size: int | None = None,
    resize: int | None = None,
    workers: int | None = None,
) -> Dataset:
    """Return the images in a folder.

    Of `train`, `val` and `test`, or whichever of them are there, `val` is the test split where there is no `test`. A
    fixed 25th of the training folder, at most 50 images of a class, is for validation if nothing else is. Of class
    folders alone, a fixed tenth of each is for validation, and a tenth for the test. All splits are in a fixed order
    that mixes the classes, so that the first n images are a fair sample.

    Args:
        path: The folder.
        how: What becomes of an image; as usual for ImageNet, if not given.
        size: Another side of the square that is cut out: of the middle in evaluation, at random in training.
        resize: What the shorter side is brought to in evaluation; 8/7 of the size, if not given.
        workers: Threads that decode; as many as there are processor cores for this process, if not given.
    """
    if size is not None and not 0 < size <= (resize or size):
        raise DataError(f"size must be above 0 and at most resize = {resize}, got {size}")
    if workers is not None and workers < 1:
        raise DataError(f"workers must be 1 or more, got {workers}")
    pillow().init()
    path = Path(path)
    parts, classes = find_images(path)
    how = how or Preprocessing.named("imagenet")
    how = replace(how, channels=how.channels or "rgb", labels=classes, layout="nchw")
    if size or 0 in (how.size or (0,)):
        how = replace(how, size=(size or SIZE, size or SIZE), shorter=resize or 0)
    number, skipped = {name: index for index, name in enumerate(classes)}, Skipped(path)

    def split(names: list[str] | None) -> Split | None:
        if not names:
            return None
        labels = torch.tensor([number[_class_of(name)] for name in names], dtype=torch.long)
        return Split(Images(path, names, how, skipped, workers or usual_workers()), labels)

    train, validation, test = (split(parts.get(part)) for part in ("train", "validation", "test"))
    name, augment = path.resolve().name, RandomCrop(how.size)
    return Dataset(name, train, validation, test, classes, how.interval, augment=augment, preprocessing=how)


def usual_workers() -> int:
    """Return how many threads decode: the cores of this machine, shared by the processes that torchrun started."""
    cores = len(os.sched_getaffinity(0)) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, min(MOST_WORKERS, cores))


def find_images(path: Path) -> tuple[dict[str, list[str]], tuple[str, ...]]:
    """Return the files of every split (relative to `path`, in their order) and the classes."""
    if not path.is_dir():
        raise DataError(f"{path}: no such folder; {LAYOUT}")
    held_out = next((name for name in VALIDATIONS if os.path.lexists(path / name)), None)
    there = [name for name in (TRAIN, held_out, TEST) if name and os.path.lexists(path / name)]
    problems: list[str] = []
    found = {part: _by_class(path, part, problems) for part in there or [""]}
    for one, other in ((a, b) for a in found for b in found if found[a] and found[b]):
        if lonely := sorted(found[one].keys() - found[other].keys()):
            problems.append(f"classes in {one} that are not in {other}: {', '.join(lonely)}")
    for part, by_class in found.items():
        least = {TRAIN: 2 if len(found) > 1 and TEST not in found else 1, "": 3}.get(part, 1)
        if few := sorted(name for name, files in by_class.items() if len(files) < least):
            where, images = f" in {part}" * bool(part), f"image{'s' * (least > 1)}"
            problems.append(f"classes{where} with less than {least} {images}: {', '.join(few)}")
    if problems:
        raise DataError(f"{path}: {'; '.join(problems)}; {LAYOUT}")
    names = {part: sorted((n for files in by.values() for n in files), key=_mixed) for part, by in found.items()}
    classes = tuple(sorted(next(iter(found.values()))))
    if not there:
        rest, test = set_apart(names[""], HELD_OUT)
        train, validation = set_apart(rest, HELD_OUT - 1)
        return {"train": train, "validation": validation, "test": test}, classes
    splits = {"train": names.get(TRAIN, []), "test": names.get(TEST) or names.get(held_out or "", [])}
    if TEST in names and held_out:
        splits["validation"] = names[held_out]
    elif splits["train"]:
        splits["train"], splits["validation"] = set_apart(splits["train"], SHARE, MOST)
    return splits, classes


def _by_class(root: Path, part: str, problems: list[str]) -> dict[str, list[str]]:
    """Return the files of every class; what cannot be listed is added to the problems."""
    found: dict[str, list[str]] = {}
    try:
        with os.scandir(root / part) as entries:
            classes = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        problems.append(f"{part}/ cannot be read ({error.strerror})")
        return found
    if not classes:
        problems.append(f"{part or '.'}/ has no folder of a class")
    for name in classes:
        inside = f"{part}/{name}".lstrip("/")
        try:
            with os.scandir(root / inside) as entries:
                files = [entry.name for entry in entries if _is_image(entry.name)]
        except OSError as error:
            problems.append(f"{inside}/ cannot be read ({error.strerror})")
            continue
        found[name] = [f"{inside}/{file}" for file in files]
    return found


def _is_image(name: str) -> bool:
    return name.lower().endswith(ENDINGS) and not name.startswith(".")


def _class_of(name: str) -> str:
    return name.split("/")[-2]


def _mixed(name: str) -> bytes:
    """Return a key that sorts names in an order which is fixed and looks random."""
    key = "/".join(name.split("/")[-2:])
    return hashlib.blake2b(key.encode(errors="surrogateescape"), digest_size=8).digest()


def set_apart(names: Sequence[str], share: int, most: int = 10**9) -> tuple[list[str], list[str]]:
    """Split files into those to keep and one in `share` of every class, from the front, at least one of each.

    >>> train, validation = set_apart([f"train/{a}/{n}.JPEG" for a in ("cat", "dog") for n in range(50)], 25)
    >>> len(train), validation
    (96, ['train/cat/0.JPEG', 'train/cat/1.JPEG', 'train/dog/0.JPEG', 'train/dog/1.JPEG'])
    """
    left = {name: min(most, max(1, n // share)) for name, n in Counter(map(_class_of, names)).items()}
    kept: list[str] = []
    apart: list[str] = []
    for name in names:
        own = left[_class_of(name)] > 0
        left[_class_of(name)] -= own
        (apart if own else kept).append(name)
    return kept, apart


@dataclass(frozen=True)
class RandomCrop:
    """Cuts out a rectangle of 8 to 100 % of the area, about square, brings it to `size`, and mirrors half of them."""

    size: tuple[int, ...]
    least: float = 0.08
    ratio: float = 4 / 3
    """The most that a rectangle is wider than high, or higher than wide."""
    tries: int = 10

    def box(self, width: int, height: int, random: Random) -> tuple[int, int, int, int]:
        """Draw a rectangle inside an image: left, top, right, bottom."""
        for _ in range(self.tries):
            area = width * height * random.uniform(self.least, 1.0)
            ratio = math.exp(random.uniform(-math.log(self.ratio), math.log(self.ratio)))
            wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < wide <= width and 0 < high <= height:
                left, top = random.randrange(width - wide + 1), random.randrange(height - high + 1)
                return left, top, left + wide, top + high
        # An image so long that no rectangle fitted: the largest in its middle that may be taken.
        wide, high = min(width, round(height * self.ratio)), min(height, round(width * self.ratio))
        left, top = (width - wide) // 2, (height - high) // 2
        return left, top, left + wide, top + high

    def __call__(self, image: Picture, random: Random) -> Picture:
        """Return a random part of an image, mirrored or not."""
        library = pillow()
        size = self.size[1], self.size[0]
        part = image.crop(self.box(*image.size, random)).resize(size, library.Resampling.BILINEAR)
        return part.transpose(library.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else part


@dataclass
class Skipped:
    """The files of a data set that could not be read. Each is reported once, and how many there are after a pass."""

    root: Path
    reasons: dict[str, str] = field(default_factory=dict)
    _told: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, error: Exception) -> None:
        """Note a file, and report it if it is new."""
        reason = (str(error) or type(error).__name__).partition("\n")[0]
        with self._lock:
            if name in self.reasons:
                return
            self.reasons[name] = reason
        log.warning("%s: skipped, it cannot be read as an image (%s)", self.root / name, reason)

    def tell(self) -> None:
        """Report how many files were skipped, unless that was said already."""
        with self._lock:
            count, told, self._told = len(self.reasons), self._told, len(self.reasons)
        if count > told:
            log.warning("%s: %d file%s skipped so far", self.root, count, " was" if count == 1 else "s were")


@dataclass(frozen=True)
class Images:
    """The images of one split, decoded when they are asked for."""

    root: Path
    names: Sequence[str]
    how: Preprocessing
    noted: Skipped
    workers: int

    @property
    def shape(self) -> tuple[int, ...]:
        """How many there are, and the shape of one."""
        return len(self.names), 1 if self.how.channels == "grey" else 3, *self.how.size

    @property
    def skipped(self) -> tuple[str, ...]:
        """The files that could not be read so far, of all splits."""
        return tuple(sorted(str(self.root / name) for name in self.noted.reasons))

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: slice | Tensor) -> Tensor:
        ((x, _),) = self.batches([torch.arange(len(self.names))[index]], full=True)
        return x

    def part(self, index: slice) -> Images:
        """Return some of the images, without decoding them."""
        return replace(self, names=self.names[index])

    def digest(self) -> str:
        """Return a checksum over the names, sizes and times of the files and what becomes of them."""
        total = hashlib.blake2b(repr(replace(self.how, labels=())).encode(), digest_size=16)
        for name in self.names:
            total.update(b"\0" + name.encode(errors="surrogateescape"))
            try:
                found = (self.root / name).stat()
            except OSError:  # it counts as broken when it is read
                continue
            total.update(f"\0{found.st_size} {found.st_mtime_ns}".encode())
        return total.hexdigest()

    def batches(
        self, places: Iterable[Tensor], *, full: bool, augment: Augment | None = None, seed: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Decode one batch after the other, some ahead; yield them and the places they are from.

        Args:
            places: The numbers of the images, for each batch.
            full: Let the next one stand in for one that cannot be read, instead of leaving it out.
            augment: Changes each image.
            seed: What is drawn for an image follows from this and from its place.
        """
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="decode")
        waiting: deque[list[Future[tuple[Tensor, int] | None]]] = deque()
        try:
            for place in places:
                waiting.append([pool.submit(self._make, at, full, augment, seed) for at in place.tolist()])
                if len(waiting) > AHEAD:
                    yield from _kept(waiting.popleft())
            while waiting:
                yield from _kept(waiting.popleft())
            self.noted.tell()
        finally:
            pool.shutdown(cancel_futures=True)

    def _make(self, place: int, full: bool, augment: Augment | None, seed: int) -> tuple[Tensor, int] | None:
        """Return an image, or the next one that can be read, and its place."""
        n = len(self.names)
        for candidate in ((place + i) % n for i in range(n if full else 1)):
            image = self._read(self.names[candidate])
            if image is not None:
                if augment is None:
                    return torch.from_numpy(self.how(image)[0]), candidate
                changed = augment(image, Random((seed << 64) + place))
                return torch.from_numpy(self.how.normalize(np.asarray(changed))), candidate
        if full:
            raise DataError(f"{self.root}: no image of this split can be read; put whole files there")
        return None

    def _read(self, name: str) -> Picture | None:
        if name in self.noted.reasons:
            return None
        try:
            image: Picture = read_picture(self.root / name)
        except MemoryError:
            raise
        except Exception as error:  # a broken file fails in a dozen ways, each with an exception of its own
            self.noted.add(name, error)
            return None
        mode = "L" if self.how.channels == "grey" else "RGB"
        return image if image.mode == mode else image.convert(mode)  # without the copy that convert makes


def _kept(made: list[Future[tuple[Tensor, int] | None]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Wait for a batch and give what could be read, if that is anything."""
    found = [pair for future in made if (pair := future.result()) is not None]
    if found:
        yield torch.stack([image for image, _ in found]), torch.tensor([place for _, place in found])
