"""The appendices by letter: which network each looks at, and the rows that come out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

from anybit.analysis.hoeffding import BoundCheck, check_bound
from anybit.analysis.runs import Run, dataset_of, load_run, small_run
from anybit.analysis.second_order import SecondOrder, second_order
from anybit.analysis.singular_values import LayerValues, layer_values
from anybit.common.progress import Start, quiet
from anybit.data import Dataset
from anybit.errors import SpecError

EXAMPLES = 200
"""Test examples whose mean loss appendix B differentiates twice."""


def appendix_rows(
    part: str, *, run: Path | None = None, seed: int = 0, start: Start = quiet
) -> Sequence[BoundCheck] | Sequence[SecondOrder] | Sequence[LayerValues]:
    """Return the rows of appendix a, b or c; b and c look at a run, or at a small network trained on the spot."""
    if part == "a":
        return check_bound(seed=seed)
    if part not in ("b", "c"):
        raise SpecError(f"the appendices with numbers in them are a, b and c; got {part!r}")
    trained, dataset = _network(run, seed, start)
    if part == "c":
        return layer_values(trained.model, dataset.test.x[:2])
    x, y = dataset.test.x[:EXAMPLES].double(), dataset.test.y[:EXAMPLES]

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(x), y)

    return second_order(trained.model.double(), loss, seed=seed, start=start)


def _network(run: Path | None, seed: int, start: Start) -> tuple[Run, Dataset]:
    if run is None:
        return small_run(seed=seed, start=start)
    trained = load_run(run)
    return trained, dataset_of([trained])
