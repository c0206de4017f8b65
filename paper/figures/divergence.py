"""Figure 2: how far quantization moves the predictions, as D(float‖quantized), one value per test batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from anybit.evaluate.sweep import kl_divergence
from anybit.spec import Bits
from paper.figures.drawing import COLORS, HATCHES, plain_log
from paper.figures.request import BATCH, Request
from paper.runs import predict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = (7.2, 4.4)

WIDTHS = (Bits(8, 4), Bits(6, 4), Bits(4, 4), Bits(3, 3))

LEAST = 1e-12
"""Drawn in place of a divergence of zero, which has no place on a logarithmic axis."""


@dataclass(frozen=True)
class Divergence:
    """Mean divergence of each test batch, in nats, for one run at one pair of widths."""

    label: str
    bits: str
    values: tuple[float, ...]


def batch_divergences(reference: Tensor, logits: Tensor, *, batch: int = BATCH) -> tuple[float, ...]:
    """Return the mean divergence of each batch of predictions.

    >>> import torch
    >>> batch_divergences(torch.zeros(4, 2), torch.zeros(4, 2), batch=2)
    (0.0, 0.0)
    """
    parts = [slice(start, start + batch) for start in range(0, len(logits), batch)]
    return tuple(kl_divergence(reference[part], logits[part]) for part in parts)


def measure(request: Request) -> list[Divergence]:
    """Predict the test set in floating point and at each pair of widths."""
    series = []
    for run, net, batches in request.networks():
        reference, _ = predict(net, batches)
        for bits in WIDTHS:
            with net.at(weights=bits.weights, activations=bits.activations):
                logits, _ = predict(net, batches)
            series.append(Divergence(run.label, str(bits), batch_divergences(reference, logits)))
    return series


def draw(figure: Figure, series: list[Divergence]) -> None:
    """Draw one box per run at each pair of widths."""
    axes = figure.subplots()
    labels = list(dict.fromkeys(entry.label for entry in series))
    widths = list(dict.fromkeys(entry.bits for entry in series))
    wide = 0.8 / len(labels)
    for index, label in enumerate(labels):
        mine = {entry.bits: entry.values for entry in series if entry.label == label}
        boxes = axes.boxplot(
            [[max(value, LEAST) for value in mine[bits]] for bits in widths],
            positions=[place + (index - (len(labels) - 1) / 2) * wide for place in range(len(widths))],
            widths=0.8 * wide,
            patch_artist=True,
            manage_ticks=False,
            medianprops={"color": "black", "linewidth": 1.6},
            flierprops={"marker": ".", "markersize": 4, "markerfacecolor": "black", "markeredgecolor": "none"},
            label=label,
        )
        for box in boxes["boxes"]:
            box.set(facecolor=COLORS[index % len(COLORS)], hatch=HATCHES[index % len(HATCHES)], edgecolor="black")
            box.set_alpha(0.8)
    axes.set_xticks(range(len(widths)), widths)
    axes.set(
        xlabel="widths of weights (W) and activations (A), in bits",
        ylabel="D(float‖quantized) per test batch, in nats",
        title="What quantization does to the predictions",
    )
    plain_log(axes, "y")
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper left")  # looking for the best place may take long, and then warns
