"""The modules that put a tensor on a grid: weights, and the activations on their way into a product."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anybit.errors import SpecError
from anybit.quant.uniform import Grid, fake_quantize, gapless, make_grid, snap_, straight_through
from anybit.quant.weights import Rule, quantized_weight, weight_limits, weight_range
from anybit.spec import FLOAT, NARROWEST, QuantSpec, Range, check_width

CACHE_BYTES = 512 * 2**20
"""How much memory the quantized weights of widths used before may take, so that going back to one costs nothing."""


class Point(nn.Module, ABC):
    """One quantization point: a name, a grid, and the width it runs at now."""

    kind = "point"
    floor = NARROWEST
    """The width it never goes below. A floor of 32 keeps a point in floating point."""

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
        """Change the width, as far as the floor allows; whatever was stored in floating point stays as it was."""
        self.spec = self.spec.with_bits(max(check_width(bits), self.floor))

    @property
    @abstractmethod
    def range(self) -> Range | None:
        """The interval that the grid covers at the current width."""


class WeightCache:
    """The quantized weights of a network at the widths used so far, the least recently used dropped first."""

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self.limit = limit
        self._kept: OrderedDict[tuple[WeightPoint, QuantSpec], Tensor] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """The memory that the kept weights take."""
        return sum(t.numel() * t.element_size() for t in self._kept.values())

    def get(self, point: WeightPoint) -> Tensor | None:
        """Return a point's weights at its current width, if they are kept."""
        key = (point, point.spec)
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key]

    def put(self, point: WeightPoint, value: Tensor) -> None:
        """Keep a point's weights at its current width; those in use now stay, whatever the limit."""
        self._kept[point, point.spec] = value
        self._shrink(self.limit)

    def make_room(self, nbytes: int) -> None:
        """Drop what is not in use before so many bytes of new weights are made, not after.

        Unless as much again fits beside them, nothing else is kept: a part of a network's weights at some width is of
        no use.
        """
        self._shrink(self.limit - nbytes if 2 * nbytes <= self.limit else 0)

    def _shrink(self, limit: int) -> None:
        excess = self.nbytes - limit
        for key in list(self._kept):
            if excess <= 0:
                break
            if key[0].spec != key[1]:
                excess -= self._kept[key].numel() * self._kept[key].element_size()
                del self._kept[key]

    def drop(self, point: WeightPoint) -> None:
        """Forget a point's weights at every width."""
        for key in [key for key in self._kept if key[0] is point]:
            del self._kept[key]


class WeightPoint(Point):
    """A weight: the master in floating point, and its rounded copies at the widths used so far."""

    kind = "weight"

    def __init__(
        self,
        name: str,
        weight: Tensor,
        spec: QuantSpec,
        *,
        cache: WeightCache | None = None,
        rule: Rule | None = None,
    ) -> None:
        super().__init__(name, spec, weight.shape)
        if not bool(torch.isfinite(weight).all()):
            raise SpecError(f"{name} has infinite or NaN entries; a network with such weights cannot be quantized")
        self.master = nn.Parameter(weight.detach().clone())
        self.rule = rule or Rule()
        self._cache = cache or WeightCache()
        self._version = self.master._version
        self._limits: dict[QuantSpec | None, tuple[Tensor, Tensor]] = {}

    @property
    def range(self) -> Range:
        """The interval that the grid covers: all entries, or what clipping leaves of them."""
        return weight_range(self.limits(), self.spec, self.rule)

    def limits(self) -> tuple[Tensor, Tensor]:
        """Return the ends of the grid at the current width; without clipping all widths have the same."""
        self._check_version()
        key = self.spec if self.rule.clip else None
        if key not in self._limits:
            self._limits[key] = weight_limits(self.master.detach(), self.spec, self.rule)
        return self._limits[key]

    def grid(self) -> Grid:
        """Return the grid at the current width."""
        return make_grid(*self.limits(), self.spec)

    def forward(self) -> Tensor:
        """Return the weight at the current width; with gradients on, straight through to the master."""
        if self.bits == FLOAT:
            return self.master
        if not (torch.is_grad_enabled() and self.master.requires_grad):
            return self.quantized()
        if self.rule.plain:
            return fake_quantize(self.master, *self.grid())
        return straight_through(self.master, self.quantized())

    def quantized(self) -> Tensor:
        """Return the weight at the current width, rounded as the rule says, from the cache where it is."""
        value = self.kept()
        if value is None:
            value = self.rounded()
            self.keep(value)
        return value

    def kept(self) -> Tensor | None:
        """Return what is already there for the current width."""
        if self.bits == FLOAT:
            return self.master.detach()
        self._check_version()
        return self._cache.get(self)

    @torch.no_grad()
    def rounded(self) -> Tensor:
        """Round the weight to its grid, without looking at what is kept."""
        return quantized_weight(self.master.detach(), self.limits(), self.spec, self.rule)

    def make_room(self, nbytes: int) -> None:
        """Make room for new weights of this network, at the cost of widths used before."""
        self._cache.make_room(nbytes)

    def keep(self, value: Tensor) -> None:
        """Remember the weight at the current width."""
        self._cache.put(self, value)

    def _check_version(self) -> None:
        """Forget what was derived from a master that has changed since."""
        if self._version != self.master._version:
            self._forget()
            self._version = self.master._version

    def _forget(self) -> None:
        self._cache.drop(self)
        self._limits.clear()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> WeightPoint:
        # The module moves to another device or dtype.
        self._forget()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


class ActivationPoint(Point):
    """A tensor on its way into a product. Without a range it stays in floating point at every width."""

    kind = "activation"

    def __init__(self, name: str, spec: QuantSpec, shape: Sequence[object], *, fresh: bool = False) -> None:
        super().__init__(name, spec, shape)
        self.fresh = fresh
        """Whether the tensor that comes in belongs to nobody else, and may be overwritten."""
        self._ranges: dict[int, Range] = {}
        self._grid: Grid | None = None
        self._grids: dict[int, tuple[QuantSpec, Grid | None]] = {}
        self.observer: Observer | None = None

    @property
    def range(self) -> Range | None:
        """The interval that the grid covers at the current width, or `None` while nobody knows."""
        return self.range_at(self.bits)

    def range_at(self, bits: int) -> Range | None:
        """Return the interval for a width: its own, or the one that serves all widths without their own."""
        return self._ranges.get(bits, self._ranges.get(FLOAT))

    @property
    def own_widths(self) -> tuple[int, ...]:
        """The widths that have a range of their own; 32 stands for all others."""
        return tuple(self._ranges)

    def set_range(self, value: Range, *, bits: int = FLOAT) -> None:
        """Cover `value` from now on, at one width or (by default) at all that have no range of their own.

        A range that starts at zero gets the grid without negative codes.
        """
        self._ranges[bits] = value
        self._grids.clear()
        self._update()

    def set_bits(self, bits: int) -> None:
        """Change the width."""
        super().set_bits(bits)
        self._update()

    def _update(self) -> None:
        if self.bits not in self._grids:
            self._grids[self.bits] = self._at(self.bits)
        self.spec, self._grid = self._grids[self.bits]

    def _at(self, bits: int) -> tuple[QuantSpec, Grid | None]:
        """Return the spec and the grid at a width; without a range there is no grid."""
        value = self.range_at(bits)
        if value is None:
            return self.spec.with_bits(bits), None
        spec = QuantSpec(bits, self.spec.symmetric, signed=value.low < 0, axis=None)
        return spec, None if bits == FLOAT else make_grid(torch.tensor(value.low), torch.tensor(value.high), spec)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` on the grid, or untouched at 32 bits."""
        if self.observer is not None:
            self.observer.update(x)
        if self._grid is None:
            return x
        if self.fresh and not torch.is_grad_enabled() and gapless(x):
            return snap_(x, *self._grid)
        return fake_quantize(x, *self._grid)


class InputPoint(ActivationPoint):
    """The network's own input, which keeps the width of the data it comes as: at least that of an 8-bit image."""

    kind = "input"
    floor = 8


class AccumulatorPoint(ActivationPoint):
    """What a convolution hands to a sum or an average: stored as an integer, but wide enough not to matter."""

    kind = "accumulator"
    floor = 8


class Observer(ABC):
    """Watches a tensor over several batches and proposes a range for it."""

    name = "observer"

    @abstractmethod
    def update(self, x: Tensor) -> None:
        """Look at one batch."""

    @abstractmethod
    def range(self) -> Range:
        """Return the range that fits all batches seen."""

    def ranges(self, spec: QuantSpec) -> dict[int, Range]:
        """Return a range per width, 32 standing for all that are not named; by default one for all."""
        return {FLOAT: self.range()}
