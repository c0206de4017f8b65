"""The best choice for every layer under a budget: a knapsack with a handful of choices per layer, solved exactly."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from anybit.errors import SpecError


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
