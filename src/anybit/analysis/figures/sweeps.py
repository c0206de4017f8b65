"""Figure 4: accuracy at every weight width, weights alone and with 4-bit activations; bars from worst to best seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anybit.analysis.figures.drawing import COLORS, LINES, MARKERS
from anybit.analysis.figures.request import Request
from anybit.evaluate.sweep import sweep
from anybit.pages.rows import Summary, summarize
from anybit.spec import FLOAT, Bits, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = (9.6, 4.4)

WEIGHTS = (FLOAT, 8, 6, 5, 4, 3, 2)
ACTIVATIONS = {FLOAT: "weights only", 4: "activations at 4 bits"}

APART = 0.08
"""How far the marks of two runs at one width are moved apart, in steps of the horizontal axis."""


def measure(request: Request) -> list[Row]:
    """Sweep each run over all pairs of widths."""
    runs, dataset = request.load(merge_seeds=True)
    widths = [Bits(weights, activations) for activations in ACTIVATIONS for weights in WEIGHTS]
    rows = []
    for run, batches in request.batches(dataset, runs):
        rows += sweep(run.quantized(dataset), batches, widths=widths, label=run.label, seed=run.seed)
    return rows


def bars(summaries: list[Summary]) -> tuple[list[float], list[list[float]]]:
    """Return the means in percent, and how far the worst and the best seed are below and above.

    >>> bars([Summary("a", Bits(4, 4), mean=0.5, low=0.25, high=1.0, seeds=3)])
    ([50.0], [[25.0], [50.0]])
    """
    below = [100 * (s.mean - s.low) for s in summaries]
    above = [100 * (s.high - s.mean) for s in summaries]
    return [100 * s.mean for s in summaries], [below, above]


def draw(figure: Figure, rows: list[Row]) -> None:
    """Draw one panel per activation width and one line per kind of run."""
    found = summarize(rows)
    labels = list(dict.fromkeys(s.label for s in found))
    panels = figure.subplots(1, len(ACTIVATIONS), sharey=True)
    for axes, (activations, title) in zip(panels, ACTIVATIONS.items(), strict=True):
        for index, label in enumerate(labels):
            mine = [s for s in found if s.label == label and s.bits.activations == activations]
            means, spread = bars(mine)
            places = [place + (index - (len(labels) - 1) / 2) * APART for place in range(len(mine))]
            seeds = f" ({mine[0].seeds} seeds)" if mine[0].seeds > 1 else ""
            axes.errorbar(
                places,
                means,
                yerr=spread if mine[0].seeds > 1 else None,
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
