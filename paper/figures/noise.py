"""Figure 6: the rounding errors of all weights, in units of their own bin, against the uniform distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paper.figures.drawing import COLORS, LINES, legend_below, panels, title
from paper.figures.request import Request, floats
from paper.runs import bin_width, folded_weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = (9.6, 5.0)

WIDTHS = (8, 4, 3, 2)
BINS = 50


@dataclass(frozen=True)
class Noise:
    """The density of the rounding error over [-½, ½] for all weights of one run at one width.

    `distance` is Kolmogorov's: the largest difference between the two distribution functions.
    """

    label: str
    bits: int
    density: tuple[float, ...]
    distance: float
    weights: int


def rounding_errors(weight: Tensor, bits: int) -> Tensor:
    """Return `w/δ` minus the nearest whole number, for each entry.

    >>> rounding_errors(torch.tensor([7.0, 2.25, -3.75]), 4)
    tensor([0.0000, 0.2500, 0.2500])
    """
    steps = weight.double() / bin_width(weight, bits).double()
    return (steps - steps.round()).flatten().to(weight)


def distance_to_uniform(errors: Tensor) -> float:
    """Return the largest difference between the distribution function of the errors and the uniform one on [-½, ½].

    >>> round(distance_to_uniform(torch.tensor([-0.25, 0.25])), 4)
    0.25
    """
    steps = torch.arange(len(errors) + 1, dtype=torch.float64) / len(errors)
    uniform = errors.double().sort().values + 0.5
    return float(torch.maximum(steps[1:] - uniform, uniform - steps[:-1]).max())


def describe(label: str, weights: Sequence[Tensor], bits: int) -> Noise:
    """Return the density and the distance for several weight tensors taken together."""
    errors = torch.cat([rounding_errors(weight, bits) for weight in weights])
    counts = torch.histc(errors.double(), BINS, -0.5, 0.5)
    return Noise(label, bits, floats(counts / len(errors) * BINS), distance_to_uniform(errors), len(errors))


def measure(request: Request) -> list[Noise]:
    """Round the weights of each run, batch norm folded, to each width."""
    series = []
    for run, net, _ in request.networks():
        weights = [weight.detach() for weight in folded_weights(net)]
        series += [describe(run.label, weights, bits) for bits in WIDTHS]
    return series


def draw(figure: Figure, series: list[Noise]) -> None:
    """Draw one panel per run and one stepped line per width."""
    labels = list(dict.fromkeys(noise.label for noise in series))
    all_axes = panels(figure, len(labels), sharey=True)
    top = max(value for noise in series for value in noise.density)
    edges = [i / BINS - 0.5 for i in range(BINS + 1)]
    for axes, label in zip(all_axes, labels, strict=True):
        axes.axhline(1, color="black", linewidth=1)
        for index, noise in enumerate(noise for noise in series if noise.label == label):
            axes.stairs(
                noise.density,
                edges,
                color=COLORS[index % len(COLORS)],
                linestyle=LINES[index % len(LINES)],
                linewidth=1.6,
                baseline=None,
                label=f"{noise.bits} bits, D = {noise.distance:.3f}",
            )
        axes.set(
            title=title(label), xlabel="rounding error of a weight, in bins", xlim=(-0.5, 0.5), ylim=(0, 1.05 * top)
        )
        legend_below(axes, 2)
    all_axes[0].set_ylabel("density")
    figure.suptitle(
        f"Rounding errors of {series[0].weights:,} weights; thin line: uniform, D: Kolmogorov's distance from it"
    )
