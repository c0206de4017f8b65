"""Figure 3: what bounded noise on all weights does to the loss, against what the gradient predicts.

Every weight is moved by uniform noise of at most half a bin of its own grid. The first-order prediction is
`⟨Δ, ∇L⟩`. One point is one test batch with a draw of its own; both sides see the network with batch norm folded,
whose weights are the ones that would be quantized.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paper.figures.drawing import COLORS, MARKERS, legend_below, panels, title
from paper.figures.request import Request
from paper.runs import bin_width, folded_weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = (9.6, 4.6)


@dataclass(frozen=True)
class Induced:
    """Predicted and measured changes of the loss, in nats, batch by batch, and how well they go together."""

    label: str
    bits: int
    predicted: tuple[float, ...]
    measured: tuple[float, ...]
    correlation: float


def correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Pearson's correlation, or 0 where one side does not vary.

    >>> round(correlation([1.0, 2.0, 3.0], [6.0, 4.0, 2.0]), 6), correlation([1.0, 2.0], [3.0, 3.0])
    (-1.0, 0.0)
    """
    x, y = (torch.tensor(values, dtype=torch.float64) for values in (a, b))
    x, y = x - x.mean(), y - y.mean()
    lengths = float(torch.linalg.vector_norm(x) * torch.linalg.vector_norm(y))
    return max(-1.0, min(1.0, float(x @ y) / lengths)) if lengths > 0 else 0.0


def uniform_noise(weights: Sequence[Tensor], bits: int, generator: torch.Generator) -> list[Tensor]:
    """Return noise for each weight, uniform within half a bin of its grid at this width.

    >>> weight = torch.tensor([7.0, -3.0])
    >>> (noise,) = uniform_noise([weight], 4, torch.Generator().manual_seed(0))
    >>> bool((noise.abs() <= 0.5).all())
    True
    """
    return [torch.rand(w.shape, generator=generator).sub_(0.5).to(w).mul_(bin_width(w, bits)) for w in weights]


@contextlib.contextmanager
def shifted(weights: Sequence[Tensor], shifts: Sequence[Tensor]) -> Iterator[None]:
    """Add the shifts for the time being; afterwards the weights are what they were, bit for bit."""
    before = [weight.detach().clone() for weight in weights]
    try:
        with torch.no_grad():
            for weight, shift in zip(weights, shifts, strict=True):
                weight.add_(shift)
        yield
    finally:
        with torch.no_grad():
            for weight, value in zip(weights, before, strict=True):
                weight.copy_(value)


def induced_loss(
    network: nn.Module, weights: Sequence[Tensor], shifts: Sequence[Tensor], x: Tensor, y: Tensor
) -> tuple[float, float]:
    """Return the predicted and the measured change of the loss of one batch when the weights are shifted."""
    loss = _loss(network, x, y)
    grads = torch.autograd.grad(loss, list(weights))
    predicted = sum(float((g.double() * s.double()).sum()) for g, s in zip(grads, shifts, strict=True))
    with shifted(weights, shifts), torch.no_grad():
        return predicted, float(_loss(network, x, y) - loss.detach())


def _loss(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(network(x).double(), y)


def measure(request: Request) -> list[Induced]:
    """Shift the weights of each run by one draw per test batch; the draws are the same for every run of one shape."""
    series = []
    for run, net, batches in request.networks():
        weights = folded_weights(net)
        generator = torch.Generator().manual_seed(request.seed)
        pairs = []
        for x, y in batches:
            noise = uniform_noise([weight.detach() for weight in weights], request.bits.weights, generator)
            pairs.append(induced_loss(net, weights, noise, x, y))
        predicted, measured = (tuple(side) for side in zip(*pairs, strict=True))
        agreement = correlation(predicted, measured)
        series.append(Induced(run.label, request.bits.weights, predicted, measured, agreement))
    return series


def draw(figure: Figure, series: list[Induced]) -> None:
    """Draw one panel per run, with the line on which prediction and measurement agree."""
    for index, (axes, induced) in enumerate(zip(panels(figure, len(series)), series, strict=True)):
        axes.axline((0, 0), slope=1, color="black", linestyle="--", linewidth=1, label="prediction = measurement")
        axes.scatter(
            induced.predicted,
            induced.measured,
            s=22,
            marker=MARKERS[index % len(MARKERS)],
            color=COLORS[index % len(COLORS)],
            alpha=0.8,
            linewidths=0,
            label=f"test batches, correlation {induced.correlation:.2f}",
        )
        axes.set(
            xlabel="first-order prediction ⟨Δ, ∇L⟩, in nats",
            ylabel="measured change of the loss, in nats",
            title=title(induced.label),
        )
        legend_below(axes, 1)
    figure.suptitle(f"Uniform noise of one {series[0].bits}-bit bin on all weights")
