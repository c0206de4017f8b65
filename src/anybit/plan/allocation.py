"""Mixed widths as a value, and the choice of one width for every weight under a budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from anybit.errors import SpecError
from anybit.plan.knapsack import cheapest
from anybit.plan.points import Weight
from anybit.spec import FLOAT, Bits, check_width


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
    """What rounding the weights was to add: the first-order bound on the growth of the loss, or output error."""
    loss: float
    """In floating point, on the loader; 0 where the output error is what counts."""
    measured: float
    """The same at these widths."""
    by: str = "loss"

    def __str__(self) -> str:
        width = max(map(len, self.layers))
        lines = [f"{name.ljust(width)}  {bits.weights}" for name, bits in self.layers.items()]
        return "\n".join(
            [
                *lines,
                f"{self.average_bits:.2f} bits on average, {self.size} bytes; {self.by} {self.loss:.4f} -> "
                f"{self.measured:.4f}, predicted +{self.predicted:.4f}",
            ]
        )


@dataclass(frozen=True)
class Choice:
    """A width for every weight, bits on average, bytes in all, and what they cost together."""

    widths: dict[str, int]
    average: float
    size: int
    cost: float


def check_choices(widths: Sequence[int], unit: str, activations: int) -> list[int]:
    """Return the widths to choose from, in order, if everything that the user said makes sense."""
    choices = sorted({check_width(width, "widths") for width in widths})
    if not choices or choices[-1] == FLOAT:
        raise SpecError("widths to choose from are one or more of 2 to 16")
    if unit not in ("bits", "bytes"):
        raise SpecError(f'unit is "bits" (per weight, on average) or "bytes" (in all); got {unit!r}')
    check_width(activations, "activations")
    return choices


def choose(
    points: Sequence[Weight], costs: Mapping[str, Sequence[float]], choices: Sequence[int], budget: float, unit: str
) -> Choice:
    """Return the widths that cost least together and take no more than the budget.

    >>> points = [Weight("a", shape=(10,)), Weight("b", shape=(10,))]
    >>> choose(points, {"a": [9, 0], "b": [1, 0]}, [2, 8], 5, "bits")
    Choice(widths={'a': 8, 'b': 2}, average=5.0, size=13, cost=1)
    """
    counts = [math.prod(p.shape) for p in points]
    # Layers that are kept wide take what they take.
    floors = [[max(bits, p.floor) for bits in choices] for p in points]
    room = int(budget * sum(counts)) if unit == "bits" else int(budget * 8)
    table = [costs[p.name] for p in points]
    try:
        picked = cheapest(table, [[n * b for b in row] for n, row in zip(counts, floors, strict=True)], room)
    except SpecError as error:
        least = sum(n * row[0] for n, row in zip(counts, floors, strict=True))
        raise SpecError(
            f"a budget of {budget:g} {unit} cannot be met: even at the narrowest widths the weights take "
            f"{least / sum(counts):.2f} bits on average, {-(-least // 8)} bytes"
        ) from error
    widths = {p.name: choices[i] for p, i in zip(points, picked, strict=True)}
    used = sum(n * row[i] for n, row, i in zip(counts, floors, picked, strict=True))
    return Choice(widths, used / sum(counts), -(-used // 8), sum(row[i] for row, i in zip(table, picked, strict=True)))
