"""Mixed widths from the first-order bound: each layer's share is known before anything is rounded.

Rounding moves no entry of a weight by more than half a bin δ, so to first order a layer adds at most
`δ ‖∇L‖₁` to the loss (the paper's section 3). The widths that make the sum smallest under a budget are a
knapsack problem with a handful of choices per layer, small enough to solve exactly.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from anybit.errors import DataError, SpecError
from anybit.quant.points import WeightPoint
from anybit.quant.uniform import make_grid
from anybit.quant.weights import weight_limits
from anybit.spec import FLOAT, Bits, check_width

if TYPE_CHECKING:
    from anybit.quant.network import QuantizedNetwork

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


def cheapest(costs: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]], budget: int) -> list[int]:
    """Return for each row the index to choose so that the sizes fit the budget and the costs are smallest.

    Exact: row after row, of all partial choices only those are kept that no other one beats in size and cost, and
    that could still end below the best choice known.

    >>> cheapest([[9, 1], [5, 4]], [[1, 2], [1, 2]], budget=3)
    [1, 0]
    """
    table = [(np.asarray(c, float), np.asarray(s, np.int64)) for c, s in zip(costs, sizes, strict=True)]
    if sum(int(s.min()) for _, s in table) > budget:
        raise SpecError(f"the budget of {budget} is less than the smallest choice of every layer together")
    bound = _relaxed(table)
    # The bound is a sum of differences: what floating point adds to it must not cut off the best choice.
    known = _greedy(table, budget) + 1e-9 * sum(float(abs(c).max()) for c, _ in table)
    total, cost = np.zeros(1, np.int64), np.zeros(1)
    trail: list[tuple[Any, Any]] = []
    for index, (row_costs, row_sizes) in enumerate(table):
        new_size = (total[:, None] + row_sizes).ravel()
        new_cost = (cost[:, None] + row_costs).ravel()
        rest = bound[index + 1](budget - new_size)
        alive = np.flatnonzero(new_cost + rest <= known)
        order = alive[np.lexsort((new_cost[alive], new_size[alive]))]
        best = np.minimum.accumulate(new_cost[order])
        keep = order[np.concatenate([[True], new_cost[order][1:] < best[:-1]])]
        trail.append((keep // len(row_costs), keep % len(row_costs)))
        total, cost = new_size[keep], new_cost[keep]
    at = int(np.argmin(cost))
    choice = []
    for before, taken in reversed(trail):
        choice.append(int(taken[at]))
        at = int(before[at])
    return choice[::-1]


def _hull(costs: Any, sizes: Any) -> list[tuple[int, float]]:
    """Return the choices that some price of size makes the best, smallest first."""
    hull: list[tuple[int, float]] = []
    for size, cost in sorted(zip(sizes.tolist(), costs.tolist(), strict=True)):
        if hull and cost >= hull[-1][1]:
            continue
        while hull and hull[-1][0] == size:
            hull.pop()
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-1], (size, cost)):
            hull.pop()
        hull.append((size, cost))
    return hull


def _gain(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (a[1] - b[1]) / (b[0] - a[0])


def _steps(table: list[tuple[Any, Any]]) -> tuple[int, float, list[tuple[float, int]]]:
    """Return the smallest size, its cost, and the steps up from there: (cost saved per unit of size, size)."""
    hulls = [_hull(*row) for row in table]
    steps = [(_gain(a, b), b[0] - a[0]) for hull in hulls for a, b in itertools.pairwise(hull)]
    return sum(h[0][0] for h in hulls), sum(h[0][1] for h in hulls), sorted(steps, reverse=True)


def _relaxed(table: list[tuple[Any, Any]]) -> list[Callable[[Any], Any]]:
    """Return for each row the least cost of it and all after it, by size, were choices divisible: a lower bound."""

    def bound(rows: list[tuple[Any, Any]]) -> Callable[[Any], Any]:
        size, cost, steps = _steps(rows)
        sizes = np.cumsum([size, *(s for _, s in steps)])
        costs = np.cumsum([cost, *(-g * s for g, s in steps)])
        return lambda room: np.where(room < sizes[0], np.inf, np.interp(room, sizes, costs))

    return [bound(table[index:]) if table[index:] else _nothing for index in range(len(table) + 1)]


def _nothing(room: Any) -> Any:
    return np.where(room < 0, np.inf, 0.0)


def _greedy(table: list[tuple[Any, Any]], budget: int) -> float:
    """Return the cost of a choice that fits: from the smallest up, the most saved per unit of size first."""
    hulls = [_hull(*row) for row in table]
    at = [0] * len(hulls)
    room = budget - sum(h[0][0] for h in hulls)
    while True:
        options = [
            (_gain(h[i], h[i + 1]), row) for row, (h, i) in enumerate(zip(hulls, at, strict=True))
            if i + 1 < len(h) and h[i + 1][0] - h[i][0] <= room
        ]  # fmt: skip
        if not options:
            return sum(h[i][1] for h, i in zip(hulls, at, strict=True))
        _, row = max(options)
        room -= hulls[row][at[row] + 1][0] - hulls[row][at[row]][0]
        at[row] += 1


def half_bin(point: WeightPoint, bits: int) -> Tensor:
    """Return the largest error that rounding to a width makes in an entry, per tensor or per channel."""
    spec = point.spec.with_bits(bits)
    return make_grid(*weight_limits(point.master.detach(), spec, point.rule), spec).scale / 2


def bounds(
    net: QuantizedNetwork, loader: Iterable[Any], widths: Sequence[int], *, loss: Loss = F.cross_entropy
) -> dict[str, list[float]]:
    """Return for each weight and width the most that rounding it adds to the loss, to first order.

    The gradient's l1 norm is taken batch by batch and averaged: at a minimum the mean gradient vanishes, those of the
    batches do not.
    """
    points = [p for p in net.points if isinstance(p, WeightPoint)]
    halves = {p.name: [half_bin(p, bits) for bits in widths] for p in points}
    totals = {p.name: [0.0] * len(widths) for p in points}
    batches = 0
    with net.at(weights=FLOAT, activations=FLOAT):
        for x, y in _pairs(loader):
            with torch.enable_grad():
                value = loss(net(x), y)
                grads = torch.autograd.grad(value, [p.master for p in points], allow_unused=True)
            for point, grad in zip(points, grads, strict=True):
                for index, half in enumerate(halves[point.name]):
                    totals[point.name][index] += 0.0 if grad is None else float((grad.abs() * half).sum())
            batches += 1
    return {name: [value / batches for value in values] for name, values in totals.items()}


def _pairs(loader: Iterable[Any]) -> Iterable[tuple[Any, Any]]:
    empty = True
    for batch in loader:
        if not (isinstance(batch, tuple | list) and len(batch) == 2):
            raise DataError("allocation needs labels: a loader of pairs (inputs, targets)")
        empty = False
        yield batch[0], batch[1]
    if empty:
        raise DataError("allocation saw no data; the loader yields at least one batch")


@torch.no_grad()
def mean_loss(net: QuantizedNetwork, loader: Iterable[Any], loss: Loss) -> float:
    """Return the loss over a loader, batches weighted by their size."""
    total, count = 0.0, 0
    for x, y in _pairs(loader):
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
    points = [p for p in net.points if isinstance(p, WeightPoint)]
    counts = [p.master.numel() for p in points]
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
