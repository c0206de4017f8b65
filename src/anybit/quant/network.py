"""The simulated network: any width, as often as you like, from one set of weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from anybit.quant.points import ActivationPoint, Point, WeightPoint
from anybit.spec import FLOAT, Bits, Range


@dataclass(frozen=True)
class PlanEntry:
    """One line of the plan."""

    name: str
    kind: str
    shape: tuple[object, ...]
    range: Range | None
    bits: int


class Plan(tuple[PlanEntry, ...]):
    """Every quantization point, in the order of the network; prints as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        head = ("point", "kind", "shape", "range", "range from", "bits")
        rows = [head, *(_cells(entry) for entry in self)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _cells(entry: PlanEntry) -> tuple[str, ...]:
    shape = "x".join(str(size) if isinstance(size, int) else "N" for size in entry.shape)
    interval, source = ("unknown", "stays in floating point") if entry.range is None else (
        str(entry.range), entry.range.source
    )  # fmt: skip
    return (
        entry.name,
        entry.kind,
        shape,
        interval,
        source,
        "float" if entry.bits == FLOAT else str(entry.bits),
    )


class QuantizedNetwork(nn.Module):
    """A captured network with a switch for its bit width. `anybit.prepare` makes these.

    The weights in floating point are never changed by `set_bits`: any sequence of widths followed by 32 gives
    back the original output, bit for bit.
    """

    def __init__(self, body: fx.GraphModule, points: list[Point]) -> None:
        super().__init__()
        self.body = body
        self._points = points
        self._bits = Bits()
        self.eval()

    @property
    def points(self) -> tuple[Point, ...]:
        """The quantization points, in the order of the network."""
        return tuple(self._points)

    @property
    def plan(self) -> Plan:
        """What is quantized, over which range, and where the range came from."""
        return Plan(PlanEntry(p.name, p.kind, p.shape, p.range, p.bits) for p in self._points)

    @property
    def bits(self) -> Bits:
        """The widths that the network runs at."""
        return self._bits

    def set_bits(self, *, weights: int, activations: int) -> None:
        """Run at these widths from now on; 32 means floating point."""
        bits = Bits(weights, activations)
        for point in self._points:
            point.set_bits(bits.weights if isinstance(point, WeightPoint) else bits.activations)
        self._bits = bits

    @contextlib.contextmanager
    def at(self, *, weights: int, activations: int) -> Iterator[QuantizedNetwork]:
        """Run at these widths inside a `with` block, then at the old ones again."""
        before = self._bits
        self.set_bits(weights=weights, activations=activations)
        try:
            yield self
        finally:
            self.set_bits(weights=before.weights, activations=before.activations)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network as the original was called."""
        return self.body(*args, **kwargs)

    @property
    def unranged(self) -> list[str]:
        """The activations that stay in floating point because nobody knows their range."""
        return [p.name for p in self._points if isinstance(p, ActivationPoint) and p.range is None]
