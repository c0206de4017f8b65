"""Figure 3: what bounded noise on all weights does to the loss, against what the gradient predicts.

Every weight is moved by uniform noise of at most half a bin of its own grid, with a draw of its own for each test
batch. The first-order prediction is `⟨Δ, ∇L⟩`. A point is one test image, or the mean over one batch; both sides see
the network with batch norm folded, whose weights are the ones that would be quantized.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paper.figures.drawing import COLORS, MARKERS, PANEL, SINGLE, legend_below, title
from paper.figures.request import Request
from paper.runs import bin_width, folded_weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = (9.6, 9.2)
OVER = ("images", "batches")


@dataclass(frozen=True)
class Induced:
    """Predicted and measured changes of the loss, in nats, one after the other, and how well they go together."""

    label: str
    bits: int
    over: str
    """What one point is of: "images", or "batches" of them."""
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


def induced_losses(
    network: nn.Module, weights: Sequence[Tensor], shifts: Sequence[Tensor], x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the predicted and the measured change of the loss of each example when the weights are shifted.

    The gradient of a sum with coefficients `c` is linear in them, and the derivative of its product with the shift by
    `c` is the prediction for each example: two passes for all of them.
    """
    losses = _losses(network, x, y)
    coefficients = torch.ones_like(losses, requires_grad=True)
    grads = torch.autograd.grad(losses, list(weights), coefficients, create_graph=True)
    along = torch.stack([(g.double() * s.double()).sum() for g, s in zip(grads, shifts, strict=True)]).sum()
    (predicted,) = torch.autograd.grad(along, coefficients)
    with shifted(weights, shifts), torch.no_grad():
        return predicted, _losses(network, x, y) - losses.detach()


def _losses(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(network(x).double(), y, reduction="none")


def measure(request: Request) -> list[Induced]:
    """Shift the weights of each run by one draw per test batch; the draws are the same for every run of one shape."""
    series = []
    for run, net, batches in request.networks():
        weights = folded_weights(net)
        generator = torch.Generator().manual_seed(request.seed)
        pairs = []
        for x, y in batches:
            noise = uniform_noise([weight.detach() for weight in weights], request.bits.weights, generator)
            pairs.append(induced_losses(net, weights, noise, x, y))
        for over in OVER:
            sides = [[side if over == "images" else side.mean()[None] for side in pair] for pair in pairs]
            predicted, measured = (tuple(torch.cat(side).tolist()) for side in zip(*sides, strict=True))
            agreement = correlation(predicted, measured)
            series.append(Induced(run.label, request.bits.weights, over, predicted, measured, agreement))
    return series


def draw(figure: Figure, series: list[Induced]) -> None:
    """Draw a row of panels for images and one for batches, a panel per run, each with the line of agreement."""
    columns = len(series) // len(OVER)
    figure.set_figwidth(max(SINGLE, PANEL * columns))
    grid = figure.subplots(len(OVER), columns, squeeze=False)
    for index, induced in enumerate(series):
        run, axes = index // len(OVER), grid[OVER.index(induced.over)][index // len(OVER)]
        axes.axline((0, 0), slope=1, color="black", linestyle="--", linewidth=1, label="prediction = measurement")
        axes.scatter(
            induced.predicted,
            induced.measured,
            s=22 if induced.over == "batches" else 6,
            marker=MARKERS[run % len(MARKERS)],
            color=COLORS[run % len(COLORS)],
            alpha=0.8 if induced.over == "batches" else 0.3,
            linewidths=0,
            rasterized=True,
            label=f"test {induced.over}, correlation {induced.correlation:.2f}",
        )
        if induced.over == "images":  # a few images far out would leave the others in a corner
            axes.set(xlim=_most(induced.predicted), ylim=_most(induced.measured))
        axes.set(
            xlabel="first-order prediction ⟨Δ, ∇L⟩, in nats",
            ylabel="measured change of the loss, in nats",
            title=title(induced.label),
        )
        legend_below(axes, 1)
    figure.suptitle(f"Uniform noise of one {series[0].bits}-bit bin on all weights")


def _most(values: Sequence[float]) -> tuple[float, float]:
    """Return ends between which all but one in a hundred values lie, with some room.

    >>> low, high = _most([0.0] * 500 + [1.0] * 500 + [80.0])
    >>> round(low, 2), round(high, 2)
    (-0.1, 1.1)
    """
    low, high = torch.tensor(values).quantile(torch.tensor([0.005, 0.995])).tolist()
    room = 0.1 * (high - low) or 1e-3
    return low - room, high + room
