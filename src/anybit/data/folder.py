"""Images in folders by class, as ImageNet comes: `train/CLASS/*.JPEG` and `val/CLASS/*.JPEG`.

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
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from anybit.artifact.pictures import pillow, read_picture
from anybit.data.base import Dataset, ImageAugment, Lazy, Split
from anybit.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of the pixels of ImageNet, by channel, on a scale from 0 to 1."""

SIZE, RESIZE = 224, 256
ENDINGS = (".jpeg", ".jpg", ".png", ".webp", ".bmp")
TRAIN, TESTS = "train", ("val", "validation")
LAYOUT = "images by class are expected here, as train/CLASS/*.JPEG and val/CLASS/*.JPEG"
SHARE, MOST = 25, 50
"""Of each class in the training folder, one image in so many is for validation, and at most so many in all."""

AHEAD = 2
"""Batches that are made before they are asked for."""
MOST_WORKERS = 16

log = logging.getLogger("anybit.data")


def load_folder(path: Path, *, resize: int = RESIZE, size: int = SIZE, workers: int | None = None) -> Dataset:
    """Return the images in a folder, normalized as usual for ImageNet.

    `val` (or `validation`) is the test split. A fixed 25th of the training folder, at most 50 images of a class, is for
    validation. All splits are in a fixed order that mixes the classes, so that the first n images are a fair sample.

    Args:
        path: The folder.
        resize: What the shorter side is brought to in evaluation.
        size: The side of the square that is cut out: of the middle in evaluation, at random in training.
        workers: Threads that decode; as many as there are processor cores for this process, if not given.
    """
    if not 0 < size <= resize:
        raise DataError(f"size must be above 0 and at most resize = {resize}, got {size}")
    if workers is not None and workers < 1:
        raise DataError(f"workers must be 1 or more, got {workers}")
    pillow().init()
    path = Path(path)
    train, test, classes = find_images(path)
    train, validation = set_apart(train)
    crop, skipped, workers = CentreCrop(resize, size), Skipped(path), workers or usual_workers()

    def split(names: list[str]) -> Split:
        labels = _labels(names, classes)
        return Split(Images(path, names, labels, crop=crop, skipped=skipped, workers=workers), labels)

    name = path.resolve().name
    return Dataset(
        name,
        split(train),
        split(validation),
        split(test),
        classes,
        pixel_range(),
        augment=RandomCrop(size),
        pixels=(MEAN, STD),
    )


def usual_workers() -> int:
    """Return how many threads decode: the cores of this machine, shared by the processes that torchrun started."""
    cores = len(os.sched_getaffinity(0)) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, min(MOST_WORKERS, cores))


def find_images(path: Path) -> tuple[list[str], list[str], tuple[str, ...]]:
    """Return the training files, the test files (relative to `path`, in their order) and the classes."""
    if not path.is_dir():
        raise DataError(f"{path}: no such folder; {LAYOUT}")
    problems: list[str] = []
    held_out = next((name for name in TESTS if os.path.lexists(path / name)), TESTS[0])
    train, test = (_by_class(path, part, problems) for part in (TRAIN, held_out))
    if train and test:
        for here, there, one, other in ((train, test, TRAIN, held_out), (test, train, held_out, TRAIN)):
            if lonely := sorted(here.keys() - there.keys()):
                problems.append(f"classes in {one} that are not in {other}: {', '.join(lonely)}")
    for part, found, least in ((TRAIN, train, 2), (held_out, test, 1)):
        if few := sorted(name for name, files in found.items() if len(files) < least):
            problems.append(f"classes in {part} with less than {least} image{'s'[: least - 1]}: {', '.join(few)}")
    if problems:
        raise DataError(f"{path}: {'; '.join(problems)}; {LAYOUT}")
    names = ([name for files in found.values() for name in files] for found in (train, test))
    first, second = (sorted(part, key=_mixed) for part in names)
    return first, second, tuple(sorted(train))


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
        problems.append(f"{part}/ has no folder of a class")
    for name in classes:
        try:
            with os.scandir(root / part / name) as entries:
                files = [entry.name for entry in entries if _is_image(entry.name)]
        except OSError as error:
            problems.append(f"{part}/{name}/ cannot be read ({error.strerror})")
            continue
        found[name] = [f"{part}/{name}/{file}" for file in files]
    return found


def _is_image(name: str) -> bool:
    return name.lower().endswith(ENDINGS) and not name.startswith(".")


def _class_of(name: str) -> str:
    return name.split("/")[1]


def _mixed(name: str) -> bytes:
    """Return a key that sorts names in an order which is fixed and looks random."""
    return hashlib.blake2b(name.partition("/")[2].encode(errors="surrogateescape"), digest_size=8).digest()


def _labels(names: Sequence[str], classes: tuple[str, ...]) -> Tensor:
    number = {name: index for index, name in enumerate(classes)}
    return torch.tensor([number[_class_of(name)] for name in names], dtype=torch.long)


def set_apart(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split training files into those to train on and those to validate on, class by class, from the front.

    >>> train, validation = set_apart([f"train/{a}/{n}.JPEG" for a in ("cat", "dog") for n in range(50)])
    >>> len(train), validation
    (96, ['train/cat/0.JPEG', 'train/cat/1.JPEG', 'train/dog/0.JPEG', 'train/dog/1.JPEG'])
    """
    left: dict[str, int] = {}
    for name in names:
        left[_class_of(name)] = left.get(_class_of(name), 0) + 1
    left = {name: min(MOST, max(1, count // SHARE)) for name, count in left.items()}
    train, validation = [], []
    for name in names:
        if left[_class_of(name)]:
            left[_class_of(name)] -= 1
            validation.append(name)
        else:
            train.append(name)
    return train, validation


@dataclass(frozen=True)
class CentreCrop:
    """Brings the shorter side of an image to `resize` pixels and cuts the middle `size` by `size` out of it."""

    resize: int
    size: int

    def box(self, width: int, height: int) -> tuple[float, float, float, float]:
        """Return what part of the image that is: left, top, right, bottom, in its own pixels.

        >>> CentreCrop(resize=32, size=24).box(128, 64)
        (40.0, 8.0, 88.0, 56.0)
        """
        short = min(width, height)
        across, down = (int(self.resize * side / short) for side in (width, height))
        left, top = round((across - self.size) / 2), round((down - self.size) / 2)
        wide, high = width / across, height / down
        right, bottom = min(width, (left + self.size) * wide), min(height, (top + self.size) * high)
        return left * wide, top * high, right, bottom

    def __call__(self, image: Picture) -> Picture:
        """Return the middle of an image."""
        # Only the pixels of the crop are computed; they are those of the whole image, resized and then cut.
        return image.resize((self.size, self.size), pillow().Resampling.BILINEAR, box=self.box(*image.size))


@dataclass(frozen=True)
class RandomCrop(ImageAugment):
    """Cuts out a rectangle of 8 to 100 % of the area, about square, brings it to `size`, and mirrors half of them."""

    size: int
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
        part = image.crop(self.box(*image.size, random)).resize((self.size, self.size), library.Resampling.BILINEAR)
        return part.transpose(library.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else part


def decode(path: Path) -> Picture:
    """Return the image in a file, in colour, whatever it is stored as."""
    image: Picture = read_picture(path)
    return image if image.mode == "RGB" else image.convert("RGB")  # without the copy that convert makes


def _columns(values: Iterable[float]) -> np.ndarray:
    return np.array(list(values), np.float32).reshape(3, 1, 1)


_FACTOR = _columns(1 / (255 * std) for std in STD)
_OFFSET = _columns(mean / std for mean, std in zip(MEAN, STD, strict=True))


def normalize(pixels: np.ndarray, out: np.ndarray) -> None:
    """Write bytes of shape (height, width, 3) as numbers of shape (3, height, width), mean 0 and deviation 1."""
    np.multiply(pixels.transpose(2, 0, 1), _FACTOR, out=out)
    np.subtract(out, _OFFSET, out=out)


def pixel_range() -> tuple[float, float]:
    """Return the interval that normalized pixels fall into, from black to white in every channel."""
    ends = np.empty((3, 1, 2), np.float32)
    normalize(np.array([[[0] * 3, [255] * 3]], np.uint8), ends)
    return float(ends.min()), float(ends.max())


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


class Images(Lazy):
    """The images of one split, decoded when they are asked for.

    Args:
        root: The folder of the data set.
        names: The files in it.
        labels: Their classes, by number.
        crop: What becomes of an image that is not augmented.
        skipped: Where files that cannot be read are noted.
        workers: Threads that decode.
    """

    def __init__(
        self,
        root: Path,
        names: Sequence[str],
        labels: Tensor,
        *,
        crop: CentreCrop,
        skipped: Skipped,
        workers: int,
    ) -> None:
        self.root, self.names, self.labels = root, names, labels
        self.crop, self.workers, self._skipped = crop, workers, skipped

    @property
    def shape(self) -> tuple[int, ...]:
        """How many there are, and the shape of one."""
        return len(self.names), 3, self.crop.size, self.crop.size

    @property
    def skipped(self) -> tuple[str, ...]:
        """The files that could not be read so far, of all splits."""
        return tuple(sorted(str(self.root / name) for name in self._skipped.reasons))

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: slice | Tensor) -> Tensor:
        places = torch.arange(len(self.names))[index]
        ((x, _),) = self.batches([places], full=True)
        return x

    def part(self, index: slice) -> Images:
        """Return some of the images, without decoding them."""
        return Images(
            self.root,
            self.names[index],
            self.labels[index],
            crop=self.crop,
            skipped=self._skipped,
            workers=self.workers,
        )

    def digest(self) -> str:
        """Return a checksum over the names of the files and what is cut out of them."""
        total = hashlib.blake2b(repr(self.crop).encode(), digest_size=16)
        for name in self.names:
            total.update(b"\0" + name.encode(errors="surrogateescape"))
        return total.hexdigest()

    def batches(
        self, places: Iterable[Tensor], *, full: bool, augment: ImageAugment | None = None, seed: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Decode one batch after the other, some ahead; see `Lazy.batches`. A batch that would be empty is left out."""
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="decode")
        waiting: deque[_Promise] = deque()
        try:
            for place in places:
                out = np.empty((len(place), *self.shape[1:]), np.float32)
                made = [
                    pool.submit(self._make, at, row, full=full, augment=augment, seed=seed)
                    for at, row in zip(place.tolist(), out, strict=True)
                ]
                waiting.append(_Promise(place, out, made))
                if len(waiting) > AHEAD:
                    yield from waiting.popleft().kept(full)
            while waiting:
                yield from waiting.popleft().kept(full)
            self._skipped.tell()
        finally:
            pool.shutdown(cancel_futures=True)

    def _make(self, place: int, out: np.ndarray, *, full: bool, augment: ImageAugment | None, seed: int) -> bool:
        """Write an image, or one that stands in for it, to `out`; return whether there is one."""
        for candidate in self._candidates(place) if full else [place]:
            image = self._read(self.names[candidate])
            if image is not None:
                image = self.crop(image) if augment is None else augment(image, Random((seed << 64) + place))
                normalize(np.asarray(image), out)
                return True
        if full:
            name = self.names[place].rpartition("/")[0]
            raise DataError(f"{self.root / name}: no image of this split can be read; put whole files there")
        return False

    def _candidates(self, place: int) -> Iterator[int]:
        """Yield a place, and then those of the same class behind it, from the front again at the end."""
        yield place
        alike = torch.nonzero(self.labels == self.labels[place]).flatten().tolist()
        at = alike.index(place)
        yield from alike[at + 1 :] + alike[:at]

    def _read(self, name: str) -> Picture | None:
        if name in self._skipped.reasons:
            return None
        try:
            return decode(self.root / name)
        except MemoryError:
            raise
        except Exception as error:  # a broken file fails in a dozen ways, each with an exception of its own
            self._skipped.add(name, error)
            return None


@dataclass(frozen=True)
class _Promise:
    """A batch that is being made."""

    place: Tensor
    out: np.ndarray
    made: list[Future[bool]]

    def kept(self, full: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Wait for it and give what could be read, if that is anything."""
        there = torch.tensor([future.result() for future in self.made], dtype=torch.bool)
        x = torch.from_numpy(self.out)
        if full or there.all():
            yield x, self.place
        elif there.any():
            yield x[there], self.place[there]
