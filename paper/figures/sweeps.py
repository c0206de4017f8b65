"""Figure 4: accuracy at every weight width, weights alone and with 4-bit activations; bars from worst to best seed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

import anybit
from anybit.spec import FLOAT, Bits, Row
from paper.figures.drawing import COLORS, LINES, MARKERS
from paper.figures.request import Request

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = (9.6, 4.4)

WEIGHTS = (FLOAT, 8, 6, 5, 4, 3, 2)
ACTIVATIONS = {FLOAT: "weights only", 4: "activations at 4 bits"}

APART = 0.08
"""How far the marks of two runs at one width are moved apart, in steps of the horizontal axis."""


def measure(request: Request) -> list[Row]:
    """Sweep each run over all pairs of widths."""
    widths = [Bits(weights, activations) for activations in ACTIVATIONS for weights in WEIGHTS]
    rows = []
    for run, net, batches in request.networks(merge_seeds=True):
        rows += anybit.sweep(net, batches, widths=widths, label=run.label, seed=run.seed)
    return rows


def bars(seeds: Iterable[Sequence[float]]) -> tuple[list[float], list[list[float]]]:
    """Return the mean over seeds in percent, and how far the worst and the best seed are below and above.

    >>> bars([[0.25, 0.5, 0.75]])
    ([50.0], [[25.0], [25.0]])
    """
    found = [(100 * fmean(each), 100 * min(each), 100 * max(each)) for each in seeds]
    return [mean for mean, _, _ in found], [
        [mean - low for mean, low, _ in found],
        [high - mean for mean, _, high in found],
    ]


def draw(figure: Figure, rows: list[Row]) -> None:
    """Draw one panel per activation width and one line per kind of run."""
    labels = list(dict.fromkeys(row.label for row in rows))
    panels = figure.subplots(1, len(ACTIVATIONS), sharey=True)
    for axes, (activations, title) in zip(panels, ACTIVATIONS.items(), strict=True):
        for index, label in enumerate(labels):
            own = [row for row in rows if row.label == label and row.activations == activations]
            mine = [[row.accuracy for row in own if row.weights == width] for width in WEIGHTS]
            means, spread = bars(mine)
            places = [place + (index - (len(labels) - 1) / 2) * APART for place in range(len(mine))]
            seeds = f" ({len(mine[0])} seeds)" if len(mine[0]) > 1 else ""
            axes.errorbar(
                places,
                means,
                yerr=spread if seeds else None,
                capsize=3,
                color=COLORS[index % len(COLORS)],
                linestyle=LINES[index % len(LINES)],
                marker=MARKERS[index % len(MARKERS)],
                label=label + seeds,
            )
        axes.set_xticks(range(len(WEIGHTS)), ["float" if w == FLOAT else str(w) for w in WEIGHTS])
        axes.set(title=title, xlabel="weight width, in bits", ylim=(0, 102))
    panels[0].set_ylabel(f"test accuracy, in % (n = {rows[0].n:,})")
    panels[0].legend(loc="lower left")
