"""The shape that every data set comes in, and batches drawn from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from anybit.errors import DataError

Augment = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class Split:
    """Inputs and labels of one part of a data set."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Dataset:
    """A classification data set, whole, in memory. `input_range` is the interval its inputs are made to fit."""

    name: str
    train: Split
    validation: Split
    test: Split
    classes: tuple[str, ...]
    input_range: tuple[float, float]
    augment: Augment | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.train.x.shape[1:])


class Batches:
    """Batches of a split: in order, or in a new random order every time it is iterated over.

    The order and the augmentation depend on `generator` alone, so that a run can be repeated.
    """

    def __init__(
        self,
        split: Split,
        batch: int,
        *,
        generator: torch.Generator | None = None,
        augment: Augment | None = None,
    ) -> None:
        if len(split) == 0:
            raise DataError("a split without examples gives no batches")
        if augment is not None and generator is None:
            raise DataError("augmentation draws random numbers; pass generator=")
        self.split, self.batch, self.generator, self.augment = split, batch, generator, augment

    def __len__(self) -> int:
        return -(-len(self.split) // self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = None if self.generator is None else torch.randperm(len(self.split), generator=self.generator)
        for start in range(0, len(self.split), self.batch):
            index = slice(start, start + self.batch) if order is None else order[start : start + self.batch]
            x, y = self.split.x[index], self.split.y[index]
            if self.augment is not None and self.generator is not None:
                x = self.augment(x, self.generator)
            yield x, y


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
