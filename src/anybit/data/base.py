"""The shape that every data set comes in, and batches drawn from it."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import length_hint
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Subset

from anybit.artifact.feeding import Preprocessing
from anybit.errors import DataError

if TYPE_CHECKING:
    from anybit.data.folder import Images

Augment = Callable[..., Any]
"""Changes a batch of inputs that are in memory, with a generator; or one image as it is decoded, with a `Random`."""

MOST_BYTES = 2 * 2**30
"""More than this is not put into memory at once."""


@dataclass(frozen=True)
class Split:
    """Inputs and labels of one part of a data set. `x[:2]` is a tensor, also of images that are not in memory."""

    x: Tensor | Images
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
        """Return a checksum over inputs and labels; of files, over their names, sizes and times."""
        shape = str(tuple(self.x.shape)).encode()
        return checksum([shape, self.x if isinstance(self.x, Tensor) else self.x.digest().encode(), self.y])


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, as a checksum takes them."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def checksum(values: Iterable[Any]) -> str:
    """Return a checksum over tensors, bytes, and whatever else by how it prints."""
    total = hashlib.blake2b(digest_size=16)
    for value in values:
        data = bytes_of(value) if isinstance(value, Tensor) else value
        total.update(data if isinstance(data, memoryview | bytes) else repr(data).encode())
    return total.hexdigest()


@dataclass(frozen=True)
class Given:
    """One part of a data set that is a loader of the user's own: batches come as it makes them."""

    loader: Iterable[Any]

    def __len__(self) -> int:
        """How many examples there are, as far as the loader says so."""
        return len(self.loader.dataset) if hasattr(self.loader, "dataset") else self.steps

    @property
    def steps(self) -> int:
        """How many batches there are."""
        if (steps := length_hint(self.loader, -1)) < 0:  # of an iterable data set, a DataLoader has none either
            raise DataError("training needs a loader with a length; use a DataLoader of a data set that has one")
        return steps

    def first(self, count: int) -> Given:
        """Return the first examples, or about as many in batches where the loader does not tell examples apart."""
        if count >= len(self):
            return self
        own = self.loader
        if isinstance(own, DataLoader) and own.batch_size and not isinstance(own.dataset, IterableDataset):
            few: Any = Subset(own.dataset, range(count))
            shuffle, workers = isinstance(own.sampler, RandomSampler), own.num_workers
            return Given(DataLoader(few, own.batch_size, shuffle, num_workers=workers, collate_fn=own.collate_fn))
        steps = -(-count * self.steps // len(self))
        return Given(list(itertools.islice(self.after(0, None), steps)))

    def digest(self) -> str:
        """Return a checksum over all batches, as they come after one fixed seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return checksum(leaf for batch in self.loader for leaf in pytree.tree_leaves(batch))

    def after(self, done: int, generator: torch.Generator | None) -> Iterator[Any]:
        """Go through one pass without its first batches.

        What the loader draws follows from `generator`, and what the rest of the program draws is left alone. So a pass
        that is taken up again goes on with the batches that were left.
        """
        seed = 0 if generator is None else int(torch.randint(2**62, (), generator=generator))
        state, index = torch.Generator().manual_seed(seed).get_state(), 0
        batches: Iterator[Any] | None = None
        while True:
            own = torch.get_rng_state()
            torch.set_rng_state(state)
            try:
                batches = iter(self.loader) if batches is None else batches
                batch = next(batches, None)
                state = torch.get_rng_state()
            finally:
                torch.set_rng_state(own)
            if batch is None:
                return
            if index >= done:
                yield batch
            index += 1


Part = Split | Given


@dataclass(frozen=True)
class Dataset:
    """Training, validation and test data, as far as there are any.

    `input_range` is the interval that inputs are made to fit, and `preprocessing` how a picture becomes an input.
    """

    name: str
    train: Any
    validation: Any
    test: Any
    classes: tuple[str, ...] = ()
    input_range: tuple[float, float] | None = None
    augment: Augment | None = None
    preprocessing: Preprocessing | None = None
    sample: Any = None
    """What an input looks like, where there is no data at all."""

    def need(self, part: str, what: str) -> Any:
        """Return a part that is needed, or ask for it by name."""
        found = getattr(self, part)
        if found is None:
            where = {"train": "training", "validation": "validation", "test": "test"}[part]
            raise DataError(
                f"{what} needs {where} data, and {self.name} has none; let a function return the loaders (train, "
                "validation, test), or put images in train/, validation/ and test/"
            )
        return found

    @property
    def example(self) -> Any:
        """A batch of the first part there is: inputs alone, or as a loader gives them."""
        if self.sample is not None:
            return self.sample
        part = next((p for p in (self.train, self.test, self.validation) if p is not None), None)
        if part is None:
            raise DataError(f"{self.name}: there is no data in it")
        if isinstance(part, Split):
            return part.x[:2]
        for batch in part.after(0, None):
            return batch
        raise DataError(f"{self.name}: its loader yields no batch")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        leaf = next(leaf for leaf in pytree.tree_leaves(self.example) if isinstance(leaf, Tensor))
        return tuple(leaf.shape[1:])

    def count_classes(self) -> int:
        """Return how many classes there are; of loaders, by the labels of the training or the test data."""
        if self.classes:
            return len(self.classes)
        part, most = self.train or self.test, -1
        for batch in part.after(0, None) if isinstance(part, Given) else ():
            labels = batch[1] if isinstance(batch, tuple | list) and len(batch) > 1 else None
            if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() != 1:
                raise DataError(f"{self.name}: how many classes there are cannot be told; make the network by code")
            most = max(most, int(labels.max()))
        return most + 1

    @property
    def skipped(self) -> tuple[str, ...]:
        """The files that could not be read so far; none if everything is in memory."""
        parts = [part for part in (self.train, self.validation, self.test) if isinstance(part, Split)]
        return tuple(sorted({path for part in parts if not isinstance(part.x, Tensor) for path in part.x.skipped}))


class Batches:
    """Batches of a part of a data set: in order, or in a new random order every time it is iterated over.

    The order and the augmentation depend on `generator` alone, so that a run can be repeated. In a random order, which
    is for training, a last batch of one example is left out, because batch norm cannot take it; of images that cannot
    be read, others stand in, so that batches keep their size. A loader of the user's own makes its batches itself.

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
        split: Part,
        batch: int,
        *,
        generator: torch.Generator | None = None,
        augment: Augment | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        if isinstance(split, Split) and len(split) == 0:
            raise DataError("a split without examples gives no batches")
        if augment is not None and generator is None:
            raise DataError("augmentation draws random numbers; pass generator=")
        if not 0 <= part[0] < part[1]:
            raise DataError(f"part is (number, how many), counted from 0; got {part}")
        self.split, self.batch, self.generator, self.augment, self.part = split, batch, generator, augment, part

    def __len__(self) -> int:
        return self.split.steps if isinstance(self.split, Given) else -(-self.used // self.batch)

    @property
    def used(self) -> int:
        """How many examples one pass has."""
        n = len(self.split)
        return n - (self.generator is not None and n > 1 and n % self.batch == 1 and self.batch > 1)

    def __iter__(self) -> Iterator[Any]:
        return self.after(0)

    def after(self, done: int) -> Iterator[Any]:
        """Go through one pass without its first `done` batches; the others are what they are in a whole pass."""
        if isinstance(self.split, Given):
            share = slice(self.part[0], None, self.part[1])
            for batch in self.split.after(done, self.generator):
                alone = self.part[1] == 1
                yield batch if alone else pytree.tree_map_only(Tensor, lambda t: t[share] if t.dim() else t, batch)
            return
        order = None if self.generator is None else torch.randperm(len(self.split), generator=self.generator)
        yield from (self._cut if isinstance(self.split.x, Tensor) else self._made)(order, done)

    def _cut(self, order: Tensor | None, done: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Take batches out of inputs in memory."""
        assert isinstance(self.split, Split)
        mine = slice(self.part[0], None, self.part[1])
        for start in range(0, self.used, self.batch):
            if start < done * self.batch and self.augment is None:
                continue
            index = slice(start, start + self.batch) if order is None else order[start : start + self.batch]
            x, y = self.split.x[index], self.split.y[index]
            if self.augment is not None:
                x = self.augment(x, self.generator)  # also of what is left out: the next batch draws after it
            if start >= done * self.batch:
                yield (x, y) if self.part[1] == 1 else (x[mine], y[mine])

    def _made(self, order: Tensor | None, done: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Have batches made, none that is not used."""
        assert isinstance(self.split, Split)
        assert not isinstance(self.split.x, Tensor)
        # One number per pass, drawn before the first image: what comes of it hangs neither on batches nor on threads.
        seed = 0 if self.augment is None else int(torch.randint(2**62, (), generator=self.generator))
        order = torch.arange(len(self.split)) if order is None else order
        places = (
            order[start : start + self.batch][self.part[0] :: self.part[1]]
            for start in range(done * self.batch, self.used, self.batch)
        )
        full = self.generator is not None
        for x, place in self.split.x.batches(places, full=full, augment=self.augment, seed=seed):
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
