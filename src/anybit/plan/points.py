"""The plan as a value: every point of a network, its grid rule, its range and where that came from.

A plan knows no numbers of the network itself. `plan.at(bits, layers, tensors=...)` gives them: the codes and scale of
each weight, the grid of each activation, the bias of each layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from anybit.errors import SpecError
from anybit.plan.extras import Rounded, Shift, described
from anybit.plan.grid import Grid, make_grid
from anybit.spec import FLOAT, NARROWEST, Bits, LayerWidths, QuantSpec, Range, layer_bits, names_point

if TYPE_CHECKING:
    from anybit.plan.numbers import Kept, Numbers

KINDS = ("activation", "input", "accumulator")
FLOORS = {"activation": NARROWEST, "input": 8, "accumulator": 8}
"""The width that each kind of activation never goes below: an input keeps that of an 8-bit image, and what a
convolution hands to a sum is stored wide enough not to matter."""

Widths = Mapping[str, int]
"""The width of every point, by its name."""

Size = int | str | None
"""One dimension of a shape: a number, the name of one that is free, or nothing where nobody knows."""


@dataclass(frozen=True)
class Weight:
    """A weight and how it is put on a grid: `sums` keeps sums of errors small, `clip` clips its range.

    It never goes below the width `floor`, `because` of what it is.

    With `centred` its grid is symmetric at 8 bits, whatever it is at others: integer kernels know one zero for all
    channels, and a code less a zero of its own would need 9 bits.

    `channels` is the dimension that runs over output channels; `axis` the one with scales of its own. `tensor` is what
    the file calls it, where that is another name. `rounded` says for some pairs of widths which way each entry rounds.
    """

    name: str
    tensor: str = ""
    shape: tuple[int, ...] = ()
    axis: int | None = None
    symmetric: bool = True
    centred: bool = False
    floor: int = NARROWEST
    because: str = ""
    sums: bool = False
    clip: bool = False
    channels: int = 0
    groups: int = 1
    rounded: tuple[Rounded, ...] = ()

    kind = "weight"

    def own(self, pair: Bits | None) -> Rounded | None:
        """Return what it has of its own where this pair of widths was asked for."""
        return next((rounded for rounded in self.rounded if rounded.pair == pair), None)

    def rounds(self, own: Rounded) -> int:
        """Return the width at which it is rounded where the pair of `own` is asked for."""
        return max(own.weights, self.floor)

    @property
    def place(self) -> str:
        """What the file calls it."""
        return self.tensor or self.name

    def spec(self, bits: int) -> QuantSpec:
        """Return the grid at a width."""
        return QuantSpec(bits, self.symmetric or (self.centred and bits == 8), axis=self.axis)


@dataclass(frozen=True)
class Activation:
    """A value of the network and the interval it stays in, by width; 32 stands for all widths without their own.

    Without any interval it stays in floating point. `value` is what the file calls it, where that is another name.
    """

    name: str
    kind: str
    value: str = ""
    shape: tuple[Size, ...] = ()
    ranges: tuple[tuple[int, Range], ...] = ()
    symmetric: bool = True
    floor: int = NARROWEST
    because: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SpecError(f"kind must be one of {', '.join(KINDS)}; got {self.kind[:60]!r}")

    @property
    def place(self) -> str:
        """What the file calls it."""
        return self.value or self.name

    def range_at(self, bits: int) -> Range | None:
        """Return the interval at a width."""
        found = dict(self.ranges)
        return found.get(bits, found.get(FLOAT))

    def spec(self, bits: int) -> QuantSpec:
        """Return the grid's rule at a width; a range that starts at zero has no negative codes."""
        value = self.range_at(bits)
        return QuantSpec(bits, self.symmetric, signed=value is not None and value.low < 0)

    def grid(self, bits: int) -> Grid:
        """Return the grid at a width, in float32.

        >>> grid = Activation("y", "activation", ranges=((32, Range(0.0, 7.5, "")),)).grid(4)
        >>> float(grid.scale), grid.low, grid.high
        (0.5, 0, 15)
        """
        value = self.range_at(bits)
        assert value is not None
        return make_grid(np.float32(value.low), np.float32(value.high), self.spec(bits))


@dataclass(frozen=True)
class Bias:
    """The bias of a layer. Where weight and input are both whole numbers it is one too, in units of both scales.

    `weight` and `input` name the layer's weight and the activation that feeds it. With the `mean` of each input channel
    the bias takes back what the rounding of the weight adds to the mean of the layer's output.
    """

    name: str
    weight: str
    input: str = ""
    tensor: str = ""
    mean: tuple[float, ...] | None = None
    shifts: tuple[Shift, ...] = ()

    @property
    def place(self) -> str:
        """What the file calls it."""
        return self.tensor or self.name


@dataclass(frozen=True)
class Left:
    """Something that stays in floating point at every width, and why."""

    name: str
    reason: str


Point = Weight | Activation


@dataclass(frozen=True)
class Plan:
    """Every quantization point, in the order of the network; prints as a table."""

    points: tuple[Point, ...] = ()
    biases: tuple[Bias, ...] = ()
    left: tuple[Left, ...] = ()

    def __post_init__(self) -> None:
        _once([*(point.name for point in self.points), *(bias.name for bias in self.biases)])

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The points that are weights."""
        return tuple(point for point in self.points if isinstance(point, Weight))

    @property
    def activations(self) -> tuple[Activation, ...]:
        """The points that are values on their way through the network."""
        return tuple(point for point in self.points if isinstance(point, Activation))

    def widths(self, bits: Bits, layers: LayerWidths | None = None) -> Widths:
        """Return the width of every point: that of `bits`, or of the last pattern that matches, above its floor.

        A pattern matches the name of a point, or that of the layer that a weight belongs to.

        >>> plan = Plan((Weight("a.weight"), Activation("x", "input", floor=8)))
        >>> plan.widths(Bits(4, 4))
        {'a.weight': 4, 'x': 32}
        >>> plan.widths(Bits(4, 4), {"a": (8, 8)})
        {'a.weight': 8, 'x': 32}
        """
        asked, widths = self.asked(bits, layers), {}
        for point in self.points:
            pair = asked[point.name]
            width = max(pair.weights if isinstance(point, Weight) else pair.activations, point.floor)
            unknown = isinstance(point, Activation) and point.range_at(width) is None
            widths[point.name] = FLOAT if unknown else width
        return widths

    def asked(self, bits: Bits, layers: LayerWidths | None = None) -> dict[str, Bits]:
        """Return the pair that is asked for every point: `bits`, or that of the last pattern that matches."""
        chosen = layer_bits(layers)
        for pattern in chosen:
            if not any(_matches(point, pattern) for point in self.points):
                some = ", ".join(point.name for point in self.points[:5])
                raise SpecError(f"no point matches the pattern {pattern!r}; the plan has {some}, ...")
        return {
            point.name: next((chosen[pattern] for pattern in reversed(chosen) if _matches(point, pattern)), bits)
            for point in self.points
        }

    def at(
        self,
        bits: Bits,
        layers: LayerWidths | None = None,
        *,
        tensors: Mapping[str, Any],
        kept: Kept | None = None,
    ) -> Numbers:
        """Return everything at a width: codes and scale of each weight, grid of each activation, bias of each layer.

        Args:
            bits: The widths of weights and activations.
            layers: Other widths for points whose name matches a pattern.
            tensors: The weights and biases in float32, by name.
            kept: What was made for other widths, to be used again and added to; without it nothing is forgotten.
        """
        from anybit.plan.numbers import Kept, Numbers

        room = Kept(2**62) if kept is None else kept
        return Numbers(self, self.widths(bits, layers), tensors, room, self.asked(bits, layers))

    def weight(self, name: str) -> Weight:
        """Return the weight of that name."""
        return self._named[name]  # type: ignore[return-value]

    def activation(self, name: str) -> Activation:
        """Return the activation of that name."""
        return self._named[name]  # type: ignore[return-value]

    def bias(self, name: str) -> Bias:
        """Return the bias of that name."""
        return self._named[name]  # type: ignore[return-value]

    @cached_property
    def _named(self) -> dict[str, Weight | Activation | Bias]:
        return {entry.name: entry for entry in (*self.points, *self.biases)}

    def with_ranges(self, ranges: Mapping[str, tuple[tuple[int, Range], ...]]) -> Plan:
        """Return the plan with other ranges for the activations that are named."""
        points = (
            replace(p, ranges=ranges[p.name]) if isinstance(p, Activation) and p.name in ranges else p
            for p in self.points
        )
        return replace(self, points=tuple(points))

    def __str__(self) -> str:
        return self.table()

    def table(self, widths: Widths | None = None) -> str:
        """Return the plan as text, with the width of every point if they are given."""
        head = ("point", "kind", "shape", "range", "range from", "bits" if widths else "bits from")
        rows = [head, *(_cells(point, widths) for point in self.points)]
        columns = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, columns, strict=True)).rstrip() for row in rows]
        left = [f"stays in floating point: {entry.name} ({entry.reason})" for entry in self.left]
        own = described({weight.name: weight.rounded for weight in self.weights})
        return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:], *left, *own])


def _cells(point: Point, widths: Widths | None) -> tuple[str, ...]:
    found = None if isinstance(point, Weight) else point.range_at(FLOAT if widths is None else widths[point.name])
    if isinstance(point, Weight):
        where = "per channel" if point.axis is not None else "per tensor"
        interval, source = "its own", f"weights, {where}" + (", clipped" if point.clip else "")
    else:
        interval, source = ("unknown", "") if found is None else (str(found), found.source)
    bits = point.floor if widths is None else widths[point.name]
    unknown = not isinstance(point, Weight) and not point.ranges
    number = "float" if bits == FLOAT or unknown else str(bits)
    return (
        point.name,
        point.kind,
        "x".join("?" if size is None else str(size) for size in point.shape),
        interval,
        source,
        f"{number} ({point.because})" if point.because and bits == point.floor else number,
    )


def _matches(point: Point, pattern: str) -> bool:
    return names_point(pattern, point.name, weight=isinstance(point, Weight))


def _once(names: Iterable[str]) -> None:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise SpecError(f"the name {twice[0][:60]!r} is listed twice")
