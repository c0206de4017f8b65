"""Mixed widths as a value, and the choice of one width for every weight under a budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from anybit.errors import SpecError
from anybit.plan.knapsack import cheapest
from anybit.plan.points import Weight
from anybit.spec import FLOAT, Bits, check_width

Unit = Literal["bits", "bytes", "seconds"]
UNITS = get_args(Unit)


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
    seconds: float | None = None
    """How long a run took at these widths, where the budget was one of time."""

    def __str__(self) -> str:
        width = max(map(len, self.layers))
        lines = [f"{name.ljust(width)}  {bits.weights}" for name, bits in self.layers.items()]
        took = "" if self.seconds is None else f"; {1e3 * self.seconds:.2f} ms a run"
        return "\n".join(
            [
                *lines,
                f"{self.average_bits:.2f} bits on average, {self.size} bytes{took}; {self.by} {self.loss:.4f} -> "
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
    if unit not in UNITS:
        raise SpecError(f'unit is "bits" (per weight, on average), "bytes" (in all) or "seconds" (a run); got {unit!r}')
    check_width(activations, "activations")
    return choices


def choose(
    points: Sequence[Weight], costs: Mapping[str, Sequence[float]], choices: Sequence[int], budget: float, unit: str
) -> Choice:
    """Return the widths that cost least together and take no more than a budget of bits or bytes.

    >>> points = [Weight("a", shape=(10,)), Weight("b", shape=(10,))]
    >>> choose(points, {"a": [9, 0], "b": [1, 0]}, [2, 8], 5, "bits")
    Choice(widths={'a': 8, 'b': 2}, average=5.0, size=13, cost=1)
    """
    sizes = sizes_of(points, choices)
    count = sum(math.prod(p.shape) for p in points)
    room = int(budget * count) if unit == "bits" else int(budget * 8)
    try:
        return within(points, costs, choices, sizes, room)
    except SpecError as error:
        least = sum(row[0] for row in sizes)
        raise SpecError(
            f"a budget of {budget:g} {unit} cannot be met: even at the narrowest widths the weights take "
            f"{least / count:.2f} bits on average, {-(-least // 8)} bytes"
        ) from error


def sizes_of(points: Sequence[Weight], choices: Sequence[int]) -> list[list[int]]:
    """Return the bits of each weight at each width; layers that are kept wide take what they take."""
    return [[math.prod(p.shape) * max(bits, p.floor) for bits in choices] for p in points]


def within(
    points: Sequence[Weight],
    costs: Mapping[str, Sequence[float]],
    choices: Sequence[int],
    takes: Sequence[Sequence[int]],
    room: int,
) -> Choice:
    """Return the widths that cost least together, of all that fit into the room; `takes` counts it, row by row."""
    table, sizes = [costs[p.name] for p in points], sizes_of(points, choices)
    picked = cheapest(table, takes, room)
    used = sum(row[i] for row, i in zip(sizes, picked, strict=True))
    return Choice(
        {p.name: choices[i] for p, i in zip(points, picked, strict=True)},
        used / sum(math.prod(p.shape) for p in points),
        -(-used // 8),
        sum(row[i] for row, i in zip(table, picked, strict=True)),
    )
