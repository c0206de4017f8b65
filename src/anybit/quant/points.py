"""The places where a tensor is put on a grid: weights, and the activations that feed a layer with weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

from anybit.errors import SpecError
from anybit.quant.capture import module_path
from anybit.quant.ops import TRANSPARENT, WEIGHTED, output_axis
from anybit.quant.uniform import Grid, fake_quantize, make_grid, min_max
from anybit.spec import FLOAT, QuantSpec, Range, check_width

CACHED_WIDTHS = 16
"""Widths whose quantized weights are kept, so that going back to one costs nothing."""


class Point(nn.Module):
    """One quantization point: a name, a grid, and the width it runs at now."""

    kind = "point"

    def __init__(self, name: str, spec: QuantSpec, shape: Sequence[object]) -> None:
        super().__init__()
        self.name = name
        self.spec = spec
        self.shape = tuple(shape)

    @property
    def bits(self) -> int:
        """The width this point runs at."""
        return self.spec.bits

    def set_bits(self, bits: int) -> None:
        """Change the width; whatever was stored in floating point stays as it was."""
        self.spec = self.spec.with_bits(check_width(bits))

    @property
    def range(self) -> Range | None:
        """The interval that the grid covers."""
        raise NotImplementedError


class WeightPoint(Point):
    """A weight: the master in floating point, and its rounded copies at the widths used so far."""

    kind = "weight"

    def __init__(self, name: str, weight: Tensor, spec: QuantSpec) -> None:
        super().__init__(name, spec, weight.shape)
        if not bool(torch.isfinite(weight).all()):
            raise SpecError(f"{name} has infinite or NaN entries; a network with such weights cannot be quantized")
        self.master = nn.Parameter(weight.detach().clone())
        self._cache: OrderedDict[QuantSpec, Tensor] = OrderedDict()
        self._version = self.master._version

    @property
    def range(self) -> Range:
        """The smallest and largest entry."""
        low, high = min_max(self.master.detach())
        return Range(float(low), float(high), "weights")

    def grid(self, spec: QuantSpec | None = None) -> Grid:
        """Return the grid at the current width, or at that of another spec."""
        spec = spec or self.spec
        return make_grid(*min_max(self.master.detach(), spec.axis), spec)

    def forward(self) -> Tensor:
        """Return the weight at the current width; with gradients on, straight through to the master."""
        if self.bits == FLOAT:
            return self.master
        if torch.is_grad_enabled() and self.master.requires_grad:
            return fake_quantize(self.master, *self.grid())
        return self._cached()

    def _cached(self) -> Tensor:
        if self._version != self.master._version:
            self._cache.clear()
            self._version = self.master._version
        if self.spec not in self._cache:
            with torch.no_grad():
                self._cache[self.spec] = fake_quantize(self.master, *self.grid())
            if len(self._cache) > CACHED_WIDTHS:
                self._cache.popitem(last=False)
        self._cache.move_to_end(self.spec)
        return self._cache[self.spec]


class ActivationPoint(Point):
    """A tensor on its way into a layer. Without a range it stays in floating point at every width."""

    kind = "activation"

    def __init__(self, name: str, spec: QuantSpec, shape: Sequence[object]) -> None:
        super().__init__(name, spec, shape)
        self._range: Range | None = None
        self._grid: Grid | None = None
        self.observer: Observer | None = None

    @property
    def range(self) -> Range | None:
        """The interval that the grid covers, or `None` while nobody knows."""
        return self._range

    def set_range(self, value: Range) -> None:
        """Cover `value` from now on; a range that starts at zero gets the grid without negative codes."""
        self._range = value
        self.spec = QuantSpec(self.bits, self.spec.symmetric, signed=value.low < 0, axis=None)
        self._update()

    def set_bits(self, bits: int) -> None:
        """Change the width."""
        super().set_bits(bits)
        self._update()

    def _update(self) -> None:
        self._grid = None
        if self._range is not None and self.bits != FLOAT:
            low, high = torch.tensor(self._range.low), torch.tensor(self._range.high)
            self._grid = make_grid(low, high, self.spec)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` on the grid, or untouched at 32 bits."""
        if self.observer is not None:
            self.observer.update(x)
        return x if self._grid is None else fake_quantize(x, *self._grid)


class InputPoint(ActivationPoint):
    """The network's own input, which keeps the width of the data it comes as: at least `floor` bits."""

    kind = "input"
    floor = 8

    def set_bits(self, bits: int) -> None:
        """Change the width, but never below that of an 8-bit image."""
        super().set_bits(max(bits, self.floor))


class Observer(ABC):
    """Watches a tensor over several batches and proposes a range for it."""

    name = "observer"

    @abstractmethod
    def update(self, x: Tensor) -> None:
        """Look at one batch."""

    @abstractmethod
    def range(self) -> Range:
        """Return the range that fits all batches seen."""


def find_points(module: fx.GraphModule) -> tuple[dict[fx.Node, list[fx.Node]], dict[fx.Node, list[fx.Node]]]:
    """Return the nodes to quantize: weights and activations, each with the layers that it feeds.

    An activation is taken at the place where its values arise, before pooling by maximum and reshaping, so that a
    tensor that feeds several layers is quantized once.
    """
    weights: dict[fx.Node, list[fx.Node]] = {}
    activations: dict[fx.Node, list[fx.Node]] = {}
    for layer in module.graph.nodes:
        if layer.target not in WEIGHTED:
            continue
        weight = _origin(layer.args[1])
        if weight.op == "get_attr":
            weights.setdefault(weight, []).append(layer)
        source = _origin(layer.args[0])
        if source.op != "get_attr":
            activations.setdefault(source, []).append(layer)
    return weights, activations


def _origin(node: fx.Node) -> fx.Node:
    while node.target in TRANSPARENT:
        (node,) = [arg for arg in node.args[:1] if isinstance(arg, fx.Node)]
    return node


def weight_axis(layers: list[fx.Node], *, per_channel: bool) -> int | None:
    """Return the axis that gets scales of its own, where all layers that share a weight agree on one."""
    axes = {output_axis(layer) for layer in layers}
    return axes.pop() if per_channel and len(axes) == 1 else None


def point_name(node: fx.Node, taken: set[str]) -> str:
    """Return a name that a person recognizes: the module's path, numbered where one module is used often."""
    stem = str(node.target) if node.op in ("get_attr", "placeholder") else module_path(node)
    stem = str(node.meta.get("anybit_after", stem))
    name, count = stem, 1
    while name in taken:
        count += 1
        name = f"{stem}:{count}"
    taken.add(name)
    return name
