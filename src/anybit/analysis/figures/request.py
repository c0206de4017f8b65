"""What a figure is asked for: which runs, how many test examples, which width, which seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from anybit.analysis.runs import Run, dataset_of, load_runs
from anybit.common.progress import Start, quiet
from anybit.data import Batches, Dataset
from anybit.errors import SpecError
from anybit.spec import Bits

BITS = Bits(4, 4)

BATCH = 100
"""Test examples per batch, where a figure has one point for each."""


@dataclass(frozen=True)
class Request:
    """The settings of one figure."""

    paths: tuple[Path, ...] = ()
    examples: int | None = None
    """The first so many of the test set; `None` for all."""
    bits: Bits = BITS
    seed: int = 0
    start: Start = quiet

    def load(self, *, pair: bool = False, merge_seeds: bool = False) -> tuple[list[Run], Dataset]:
        """Load the runs and their data; `pair` insists on two, the one without penalty first."""
        if not self.paths:
            raise SpecError("this figure is drawn from run folders; pass --runs DIR, once for each")
        if self.examples is not None and self.examples < 1:
            raise SpecError(f"a figure needs one test example or more, got {self.examples}")
        runs = load_runs(self.paths, merge_seeds=merge_seeds)
        if pair and len(runs) != 2:
            raise SpecError(f"this figure compares two runs, the one without penalty first; got {len(runs)}")
        return runs, dataset_of(runs, examples=self.examples)

    def batches(self, dataset: Dataset, runs: Sequence[Run]) -> Iterator[tuple[Run, Batches]]:
        """Give each run with the test batches; a progress bar moves on when the caller comes back for the next."""
        advance = self.start("runs", len(runs))
        batches = Batches(dataset.test.channels_last(), BATCH)
        for run in runs:
            yield run, batches
            advance(1)


def floats(values: Tensor | Sequence[float]) -> tuple[float, ...]:
    """Return plain numbers, ready for JSON.

    >>> import torch
    >>> floats(torch.tensor([0.5, 2.0]))
    (0.5, 2.0)
    """
    return tuple(float(value) for value in values)
