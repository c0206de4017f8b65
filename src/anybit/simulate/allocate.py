"""Mixed widths from the first-order bound: each layer's share is known before anything is rounded.

Rounding moves no entry of a weight by more than half a bin δ, so to first order a layer adds at most
`δ ‖∇L‖₁` to the loss (the paper's section 3). The widths that make the sum smallest under a budget are a
knapsack problem with a handful of choices per layer, small enough to solve exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from anybit.errors import DataError, SpecError
from anybit.graph.from_torch import to_numpy
from anybit.plan.codes import limits
from anybit.plan.grid import weight_grid
from anybit.plan.knapsack import cheapest
from anybit.simulate.capture import moved_to
from anybit.spec import FLOAT, Bits, check_width

if TYPE_CHECKING:
    from anybit.simulate.network import QuantizedNetwork

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Allocation:
    """Widths per layer, what they take, and what they were predicted and found to cost.

    `net.set_bits(weights=8, activations=8, layers=allocation.layers)` puts them into effect.
    """

    layers: dict[str, Bits]
    average_bits: float
    size: int
    """The weights' size in bytes, without scales."""
    predicted: float
    """The first-order bound on the growth of the loss from rounding the weights."""
    loss: float
    """In floating point, on the loader."""
    measured: float
    """The same at these widths."""

    def __str__(self) -> str:
        width = max(map(len, self.layers))
        lines = [f"{name.ljust(width)}  {bits.weights}" for name, bits in self.layers.items()]
        return "\n".join(
            [
                *lines,
                f"{self.average_bits:.2f} bits on average, {self.size} bytes; loss {self.loss:.4f} -> "
                f"{self.measured:.4f}, first-order bound +{self.predicted:.4f}",
            ]
        )


def half_bin(net: QuantizedNetwork, name: str, bits: int) -> Tensor:
    """Return the largest error that rounding to a width makes in an entry of a weight, per tensor or per channel."""
    point, master = net.plan.weight(name), net.weights[name]
    ends = limits(to_numpy(master).astype(np.float32, copy=False), point, bits)
    return torch.from_numpy(np.asarray(weight_grid(*ends, point.spec(bits)).scale)).to(master) / 2


def bounds(
    net: QuantizedNetwork, loader: Iterable[Any], widths: Sequence[int], *, loss: Loss = F.cross_entropy
) -> dict[str, list[float]]:
    """Return for each weight and width the most that rounding it adds to the loss, to first order.

    The gradient's l1 norm is taken batch by batch and averaged: at a minimum the mean gradient vanishes, those of the
    batches do not.
    """
    weights = net.weights
    halves = {name: [half_bin(net, name, bits) for bits in widths] for name in weights}
    nothing = torch.zeros((), device=next(iter(weights.values())).device)
    totals = {name: [nothing] * len(widths) for name in weights}
    batches = 0
    with net.at(weights=FLOAT, activations=FLOAT):
        for x, y in _pairs(loader, net):
            with torch.enable_grad():
                value = loss(net(x), y)
                grads = torch.autograd.grad(value, list(weights.values()), allow_unused=True)
            for name, grad in zip(weights, grads, strict=True):
                for index, half in enumerate(halves[name]):
                    totals[name][index] = totals[name][index] + (0 if grad is None else (grad.abs() * half).sum())
            batches += 1
    return {name: (torch.stack(values) / batches).tolist() for name, values in totals.items()}


def _pairs(loader: Iterable[Any], net: QuantizedNetwork) -> Iterable[tuple[Any, Any]]:
    device = next(net.parameters()).device
    empty = True
    for batch in loader:
        if not (isinstance(batch, tuple | list) and len(batch) == 2):
            raise DataError("allocation needs labels: a loader of pairs (inputs, targets)")
        empty = False
        yield moved_to(device, batch[0]), moved_to(device, batch[1])
    if empty:
        raise DataError("allocation saw no data; the loader yields at least one batch")


@torch.no_grad()
def mean_loss(net: QuantizedNetwork, loader: Iterable[Any], loss: Loss) -> float:
    """Return the loss over a loader, batches weighted by their size."""
    total, count = 0.0, 0
    for x, y in _pairs(loader, net):
        total += float(loss(net(x), y)) * len(y)
        count += len(y)
    return total / count


def allocate(
    net: QuantizedNetwork,
    *,
    budget: float,
    loader: Iterable[Any],
    unit: Literal["bits", "bytes"] = "bits",
    activations: int = 8,
    widths: Sequence[int] = (2, 3, 4, 5, 6, 7, 8),
    loss: Loss = F.cross_entropy,
) -> Allocation:
    """Choose a width for every weight so that the first-order bound on the loss is smallest under a budget.

    Args:
        net: A prepared network; its widths are not changed.
        budget: How much the weights may take: bits per weight on average, or bytes in all.
        loader: Pairs of inputs and targets, the same ones each time it is iterated; a few hundred examples will do.
        unit: What the budget counts, "bits" (on average) or "bytes".
        activations: The width of all activations when the loss is measured.
        widths: What to choose from.
        loss: A function of the network's output and the targets.
    """
    choices = sorted({check_width(width, "widths") for width in widths})
    if not choices or choices[-1] == FLOAT:
        raise SpecError("widths to choose from are one or more of 2 to 16")
    if unit not in ("bits", "bytes"):
        raise SpecError(f'unit is "bits" (per weight, on average) or "bytes" (in all); got {unit!r}')
    check_width(activations, "activations")
    points = net.plan.weights
    counts = [math.prod(p.shape) for p in points]
    # Layers that are kept wide by `ends` take what they take.
    floors = [[max(bits, p.floor) for bits in choices] for p in points]
    room = int(budget * sum(counts)) if unit == "bits" else int(budget * 8)
    costs = bounds(net, loader, choices, loss=loss)
    table = [costs[p.name] for p in points]
    try:
        picked = cheapest(table, [[n * b for b in row] for n, row in zip(counts, floors, strict=True)], room)
    except SpecError as error:
        least = sum(n * row[0] for n, row in zip(counts, floors, strict=True))
        raise SpecError(
            f"a budget of {budget:g} {unit} cannot be met: even at the narrowest widths the weights take "
            f"{least / sum(counts):.2f} bits on average, {-(-least // 8)} bytes"
        ) from error
    layers = {p.name: Bits(choices[i], activations) for p, i in zip(points, picked, strict=True)}
    with net.at(weights=FLOAT, activations=FLOAT):
        before = mean_loss(net, loader, loss)
    with net.at(weights=choices[-1], activations=activations, layers=layers):
        after = mean_loss(net, loader, loss)
    used = sum(n * row[i] for n, row, i in zip(counts, floors, picked, strict=True))
    predicted = sum(row[i] for row, i in zip(table, picked, strict=True))
    return Allocation(layers, used / sum(counts), -(-used // 8), predicted, before, after)
