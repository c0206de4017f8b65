"""The simulated network: any width, as often as you like, from one set of weights."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from anybit.errors import SpecError
from anybit.quant.allocate import Allocation, allocate
from anybit.quant.bias import CorrectedBias
from anybit.quant.points import ActivationPoint, Point, WeightPoint
from anybit.quant.signature import Signature
from anybit.spec import FLOAT, Bits, LayerWidths, Range, layer_bits, names_point


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
    shape = "x".join(str(size) for size in entry.shape)
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

    def __init__(self, body: fx.GraphModule, points: list[Point], takes: Signature) -> None:
        super().__init__()
        self.body = body
        self._takes = takes
        self._points = points
        self._biases = [module for module in body.modules() if isinstance(module, CorrectedBias)]
        self._bits = Bits()
        self._layers: dict[str, Bits] = {}
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
        """The widths that the network runs at, apart from layers with widths of their own."""
        return self._bits

    @property
    def layers(self) -> dict[str, Bits]:
        """The layers with widths of their own, as they were given to `set_bits`."""
        return dict(self._layers)

    def set_bits(self, *, weights: int, activations: int, layers: LayerWidths | None = None) -> None:
        """Run at these widths from now on; 32 means floating point.

        Args:
            weights: The width of every weight.
            activations: The width of every activation. The input and what convolutions hand to sums never go
                below 8 bits.
            layers: Other widths for points whose name matches a pattern, as (weights, activations). A pattern names
                points as the plan does, or the layer that a weight belongs to; where several match the last one wins.

        Outside of training mode the weights are rounded now, not in the next forward pass.
        """
        bits = Bits(weights, activations)
        chosen = layer_bits(layers)
        widths = {point: _of(point, bits) for point in self._points}
        for pattern, pair in chosen.items():
            found = [point for point in self._points if _matches(point, pattern)]
            if not found:
                some = ", ".join(point.name for point in self._points[:5])
                raise SpecError(f"no point matches the pattern {pattern!r}; the plan has {some}, ...")
            widths.update({point: _of(point, pair) for point in found})
        for point, width in widths.items():
            point.set_bits(width)
        self._bits, self._layers = bits, chosen
        if not self.training:
            self._round()

    def _round(self) -> None:
        """Put every weight on its grid now, and correct the biases that go with them."""
        weights = [p for p in self._points if isinstance(p, WeightPoint)]
        # Helpers compute on one core at a time; nearest rounding is spread over all of them by PyTorch itself.
        new = [p for p in weights if p.kept() is None]
        for point in weights[:1]:
            point.make_room(sum(p.master.nbytes for p in new))
        busy = [p for p in new if not p.rule.plain]
        busy.sort(key=lambda p: -p.master.numel())
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for point, value in zip(busy, pool.map(WeightPoint.rounded, busy), strict=True):
                point.keep(value)
        for point in weights:
            point.quantized()
        for bias in self._biases:
            bias.shift()

    @contextlib.contextmanager
    def at(self, *, weights: int, activations: int, layers: LayerWidths | None = None) -> Iterator[QuantizedNetwork]:
        """Run at these widths inside a `with` block, then at the old ones again."""
        before, apart = self._bits, self._layers
        self.set_bits(weights=weights, activations=activations, layers=layers)
        try:
            yield self
        finally:
            self.set_bits(weights=before.weights, activations=before.activations, layers=apart)

    def allocate(self, *, budget: float, loader: Iterable[Any], **options: Any) -> Allocation:
        """Choose a width for every weight under a budget; see `anybit.quant.allocate.allocate`."""
        return allocate(self, budget=budget, loader=loader, **options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network as the original was called in the example, with any batch size."""
        self._takes.check(args, kwargs)
        return self.body(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedNetwork:
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        with warnings.catch_warnings():
            # The captured graph's own types warn about each other when copied.
            warnings.simplefilter("ignore", FutureWarning)
            new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    @property
    def unranged(self) -> list[str]:
        """The activations that stay in floating point because nobody knows their range."""
        return [p.name for p in self._points if isinstance(p, ActivationPoint) and p.range is None]


def _of(point: Point, bits: Bits) -> int:
    return bits.weights if isinstance(point, WeightPoint) else bits.activations


def _matches(point: Point, pattern: str) -> bool:
    return names_point(pattern, point.name, weight=isinstance(point, WeightPoint))
