"""Figure 1: the l1 norm of the gradient against its l2 norm, one point per test batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paper.figures.drawing import COLORS, MARKERS, plain_log
from paper.figures.request import Request
from paper.runs import folded_weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = (6.4, 4.4)


@dataclass(frozen=True)
class Norms:
    """The two norms of the gradient over all weights of one run, batch by batch."""

    label: str
    weights: int
    l1: tuple[float, ...]
    l2: tuple[float, ...]


def gradient_norms(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Return the l1 and the l2 norm of the mean cross-entropy's gradient over all weights to be quantized.

    Logits `(0, 0)` for class 0 are moved by -½ and +½ for each unit of input:

    >>> model = nn.Linear(1, 2, bias=False)
    >>> _ = nn.init.zeros_(model.weight)
    >>> l1, l2 = gradient_norms(model, torch.ones(1, 1), torch.tensor([0]))
    >>> l1, round(l2, 4)
    (1.0, 0.7071)
    """
    weights = folded_weights(model)
    grads = torch.autograd.grad(F.cross_entropy(model(x), y), weights)
    return (
        sum(float(grad.abs().sum(dtype=torch.float64)) for grad in grads),
        sum(float(grad.double().square().sum()) for grad in grads) ** 0.5,
    )


def measure(request: Request) -> list[Norms]:
    """Go through the test set once with each run."""
    series = []
    for run, _, batches in request.networks():
        pairs = [gradient_norms(run.model, x, y) for x, y in batches]
        count = sum(weight.numel() for weight in folded_weights(run.model))
        series.append(Norms(run.label, count, tuple(l1 for l1, _ in pairs), tuple(l2 for _, l2 in pairs)))
    return series


def draw(figure: Figure, series: list[Norms]) -> None:
    """Scatter one point per batch, on logarithmic axes, below the line that no gradient can cross."""
    axes = figure.subplots()
    ends = [end(value for norms in series for value in norms.l2) for end in (min, max)]
    most = max(norms.weights for norms in series) ** 0.5
    axes.plot(
        ends, [most * end for end in ends], color="black", linestyle="--", linewidth=1, label="√n times the l2 norm"
    )
    for index, norms in enumerate(series):
        axes.scatter(
            norms.l2,
            norms.l1,
            s=22,
            marker=MARKERS[index % len(MARKERS)],
            color=COLORS[index % len(COLORS)],
            alpha=0.75,
            linewidths=0,
            label=norms.label,
        )
    axes.set(
        xlabel="l2 norm of the gradient over all weights",
        ylabel="l1 norm of the gradient over all weights",
        title="Gradient of the loss, one point per test batch",
    )
    plain_log(axes, "x", "y")
    axes.legend(loc="lower right")  # looking for the best place may take long, and then warns
