"""What a figure is asked for: which runs, how many test examples, which width, which seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anybit.common.progress import Start, quiet
from anybit.data import Batches, Dataset
from anybit.errors import DataError, SpecError
from anybit.spec import Bits
from paper.runs import Run, load_data, load_runs, quantized

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
        if self.examples is not None and self.examples < 1:
            raise SpecError(f"a figure needs one test example or more, got {self.examples}")
        runs = load_runs(self.paths, merge_seeds=merge_seeds)
        if not runs or (pair and len(runs) != 2):
            wanted = "two runs, the one without penalty first" if pair else "run folders, --runs DIR once for each"
            raise SpecError(f"this figure is drawn from {wanted}; got {len(runs)}")
        dataset = load_data(runs[0].data)
        if self.examples is not None:
            dataset = replace(dataset, test=dataset.test.first(self.examples))
        for run in runs:
            _check_fit(run, dataset)
        return runs, dataset

    def networks(self, **how: Any) -> Iterator[tuple[Run, Any, Batches]]:
        """Give each run with its quantized network and the test batches, and move a progress bar on after it."""
        runs, dataset = self.load(**how)
        advance = self.start("runs", len(runs))
        batches = Batches(dataset.test.channels_last(), BATCH)
        for run in runs:
            yield run, quantized(run.model, dataset), batches
            advance(1)


@torch.no_grad()
def _check_fit(run: Run, dataset: Dataset) -> None:
    try:
        logits = run.model(dataset.test.x[:2])
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{run.path}: cannot take the inputs of {run.data}, {dataset.shape}: {reason}") from error
    if logits.shape[1] < len(dataset.classes):
        raise DataError(f"{run.path}: tells {logits.shape[1]} classes apart, {run.data} has {len(dataset.classes)}")


def floats(values: Tensor | Sequence[float]) -> tuple[float, ...]:
    """Return plain numbers, ready for JSON.

    >>> floats(torch.tensor([0.5, 2.0]))
    (0.5, 2.0)
    """
    return tuple(float(value) for value in values)
