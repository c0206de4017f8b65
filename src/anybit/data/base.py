"""The shape that every data set comes in, and batches drawn from it."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anybit.errors import DataError

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""Changes a batch of inputs that are in memory."""

MOST_BYTES = 2 * 2**30
"""More than this is not put into memory at once."""


class ImageAugment(ABC):
    """An augmentation of one image as it is decoded, with random numbers that belong to that image alone."""

    @abstractmethod
    def __call__(self, image: Any, random: Random) -> Any:
        """Return the changed image."""


class Lazy(ABC):
    """Inputs that are made when they are asked for, because all of them do not fit into memory."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """How many there are, and the shape of one."""

    @property
    @abstractmethod
    def skipped(self) -> tuple[str, ...]:
        """The files that could not be read so far."""

    @abstractmethod
    def __getitem__(self, index: slice | Tensor) -> Tensor:
        """Make as many inputs as are asked for; one of the same class stands in for one that cannot be made."""

    @abstractmethod
    def part(self, index: slice) -> Lazy:
        """Return some of the inputs, without making them."""

    @abstractmethod
    def digest(self) -> str:
        """Return a checksum that tells these inputs from others."""

    @abstractmethod
    def batches(
        self, places: Iterable[Tensor], *, full: bool, augment: ImageAugment | None = None, seed: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Make one batch after the other, each of the inputs at some places; yield them and the places they are from.

        Args:
            places: The numbers of the inputs, for each batch.
            full: Let one of the same class stand in for one that cannot be made, instead of leaving it out.
            augment: Changes each image.
            seed: What is drawn for an image follows from this and from its place.
        """


@dataclass(frozen=True)
class Split:
    """Inputs and labels of one part of a data set. `x[:2]` is a tensor, also of inputs that are not in memory."""

    x: Tensor | Lazy
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def first(self, count: int) -> Split:
        """Return the first so many examples; nothing is copied or decoded.

        >>> Split(torch.zeros(5, 2), torch.arange(5)).first(3).y.tolist()
        [0, 1, 2]
        """
        x = self.x[:count] if isinstance(self.x, Tensor) else self.x.part(slice(count))
        return Split(x, self.y[:count])

    def channels_last(self) -> Split:
        """Return images with the channels of a pixel side by side, which small convolutions take in less time.

        >>> Split(torch.zeros(5, 3, 4, 4), torch.arange(5)).channels_last().x.stride()
        (48, 1, 12, 3)
        """
        if not isinstance(self.x, Tensor) or self.x.dim() != 4:
            return self
        return Split(self.x.contiguous(memory_format=torch.channels_last), self.y)

    def fitting(self) -> Split:
        """Return the first examples, as many as `tensors` takes; all of them if they are in memory anyway."""
        if isinstance(self.x, Tensor):
            return self
        return self.first(MOST_BYTES // (4 * int(np.prod(self.x.shape[1:]))))

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return all inputs and labels, if they are not too large for the memory; what cannot be read is left out."""
        if isinstance(self.x, Tensor):
            return self.x, self.y
        size = 4 * int(np.prod(self.x.shape))
        if size > MOST_BYTES:
            raise DataError(
                f"{len(self):,} inputs of shape {tuple(self.x.shape[1:])} take {size / 2**30:.1f} GiB of memory, "
                f"at most {MOST_BYTES / 2**30:.1f} are expected here; take a part of them"
            )
        made = list(self.x.batches([torch.arange(len(self))], full=False))
        if not made:
            raise DataError(f"not one of {len(self):,} inputs can be read; put whole files there")
        ((x, place),) = made
        return x, self.y[place]

    def digest(self) -> str:
        """Return a checksum over inputs and labels; of inputs that are not in memory, over what they are called."""
        total = hashlib.blake2b(str(tuple(self.x.shape)).encode(), digest_size=16)
        total.update(_bytes(self.x) if isinstance(self.x, Tensor) else self.x.digest().encode())
        total.update(_bytes(self.y))
        return total.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class Dataset:
    """A classification data set. `input_range` is the interval its inputs are made to fit."""

    name: str
    train: Split
    validation: Split
    test: Split
    classes: tuple[str, ...]
    input_range: tuple[float, float]
    augment: Augment | ImageAugment | None = None
    pixels: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    """Of pictures: the mean and the spread by channel that pixels from 0 to 1 were normalized with."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.train.x.shape[1:])

    @property
    def skipped(self) -> tuple[str, ...]:
        """The files that could not be read so far; none if everything is in memory."""
        lazy = [split.x for split in (self.train, self.validation, self.test) if isinstance(split.x, Lazy)]
        return tuple(sorted({path for x in lazy for path in x.skipped}))


class Batches:
    """Batches of a split: in order, or in a new random order every time it is iterated over.

    The order and the augmentation depend on `generator` alone, so that a run can be repeated. Of inputs that are not in
    memory, those that cannot be read are left out; in a random order, which is for training, another one of the same
    class stands in, so that batches keep their size.

    Args:
        split: Where the examples come from.
        batch: How many go together.
        generator: Draws the order and the augmentation.
        augment: Changes the inputs.
        part: The number of this process, and of how many. All see the same batches; of each, this one takes the
            examples `number::how many`.
    """

    def __init__(
        self,
        split: Split,
        batch: int,
        *,
        generator: torch.Generator | None = None,
        augment: Augment | ImageAugment | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        if len(split) == 0:
            raise DataError("a split without examples gives no batches")
        if augment is not None and generator is None:
            raise DataError("augmentation draws random numbers; pass generator=")
        if augment is not None and isinstance(augment, ImageAugment) is not isinstance(split.x, Lazy):
            raise DataError("this augmentation is not for these inputs; use the data set's own")
        if not 0 <= part[0] < part[1]:
            raise DataError(f"part is (number, how many), counted from 0; got {part}")
        self.split, self.batch, self.generator, self.augment, self.part = split, batch, generator, augment, part

    def __len__(self) -> int:
        return -(-len(self.split) // self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.after(0)

    def after(self, done: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Go through one pass without its first `done` batches; the others are what they are in a whole pass."""
        order = None if self.generator is None else torch.randperm(len(self.split), generator=self.generator)
        if isinstance(self.split.x, Tensor):
            yield from self._cut(self.split.x, order, done)
        else:
            yield from self._made(self.split.x, order, done)

    def _cut(self, inputs: Tensor, order: Tensor | None, done: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Take batches out of inputs in memory."""
        mine = slice(self.part[0], None, self.part[1])
        for start in range(0, len(self.split), self.batch):
            if start < done * self.batch and self.augment is None:
                continue
            index = slice(start, start + self.batch) if order is None else order[start : start + self.batch]
            x, y = inputs[index], self.split.y[index]
            if not (self.augment is None or self.generator is None or isinstance(self.augment, ImageAugment)):
                x = self.augment(x, self.generator)  # also of what is left out: the next batch draws after it
            if start >= done * self.batch:
                yield (x, y) if self.part[1] == 1 else (x[mine], y[mine])

    def _made(self, inputs: Lazy, order: Tensor | None, done: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Have batches made, none that is not used."""
        # One number per pass, drawn before the first image: what comes of it hangs neither on batches nor on threads.
        seed = 0 if self.augment is None else int(torch.randint(2**62, (), generator=self.generator))
        order = torch.arange(len(self.split)) if order is None else order
        places = (
            order[start : start + self.batch][self.part[0] :: self.part[1]]
            for start in range(done * self.batch, len(self.split), self.batch)
        )
        augment = self.augment if isinstance(self.augment, ImageAugment) else None
        for x, place in inputs.batches(places, full=self.generator is not None, augment=augment, seed=seed):
            yield x, self.split.y[place]


def shift(pixels: int) -> Augment:
    """Return an augmentation that moves each image by up to so many pixels, filling with zeros."""

    def augment(x: Tensor, generator: torch.Generator) -> Tensor:
        n, _, height, width = x.shape
        padded = torch.nn.functional.pad(x, [pixels] * 4)
        top, left = torch.randint(0, 2 * pixels + 1, (2, n, 1), generator=generator)
        rows = (top + torch.arange(height))[:, None, :, None]
        columns = (left + torch.arange(width))[:, None, None, :]
        return padded[
            torch.arange(n)[:, None, None, None], torch.arange(x.shape[1])[None, :, None, None], rows, columns
        ]

    return augment
