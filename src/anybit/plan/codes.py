"""A weight as whole numbers, and the bias that goes with it: what both executors put into effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from anybit.plan.clip import mse_range
from anybit.plan.extras import Rounded, mark_of, unpack
from anybit.plan.grid import Grid, bias_codes, bias_units, fits, mean_shift, min_max, weight_grid
from anybit.plan.points import Weight
from anybit.plan.rows import BLOCK, as_rows, blocks
from anybit.plan.sums import squant
from anybit.spec import Bits, QuantSpec

Floats = npt.NDArray[np.float32]
Whole = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, eq=False)
class Codes:
    """`(values - zero) · scale`; scale and zero are single, or one per index of `axis`."""

    values: Whole
    scale: Floats
    zero: Whole
    axis: int | None
    bits: int

    def dequantized(self, out: Floats | None = None) -> Floats:
        """Return the weight in floating point, in `out` if that is given.

        >>> Codes(np.array([-7, 2], np.int8), np.array(0.5, np.float32), np.array(0, np.int8), None, 4).dequantized()
        array([-3.5,  1. ], dtype=float32)
        """
        out, shifted = np.empty(self.values.shape, np.float32) if out is None else out, self.zero.any()
        for codes, to, scale, zero in _pieces(self.values, out, self.scale, self.zero.astype(np.float32), self.axis):
            to[...] = codes
            if shifted:
                to -= zero
            to *= scale
        return out

    def error(self, exact: Floats) -> Floats:
        """Return by how much rounding moved each entry."""
        found = self.dequantized()
        found -= exact
        return found

    def along_axis(self, vector: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return one number per index of the axis in a shape that broadcasts with the weight."""
        return vector if self.axis is None else vector.reshape(broadcast(self.values.ndim, self.axis))

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        return self.values.nbytes + self.scale.nbytes + self.zero.nbytes


def broadcast(rank: int, axis: int) -> list[int]:
    """Return the shape in which one number per index of `axis` broadcasts with a tensor.

    >>> broadcast(4, 1)
    [1, -1, 1, 1]
    """
    return [-1 if d == axis else 1 for d in range(rank)]


def _pieces(x: Any, out: Any, scale: Any, zero: Any, axis: int | None) -> Iterator[tuple[Any, ...]]:
    """Yield matching pieces of a weight and of what is made of it that stay in the cache, with their scale and zero."""
    if axis not in (None, 0) or not x.flags.c_contiguous:
        shape = () if axis is None else broadcast(x.ndim, axis)
        yield x, out, scale.reshape(shape), zero.reshape(shape)
        return
    rows, to = as_rows(x, axis), as_rows(out, axis)
    own = [v.reshape(-1, 1) if v.size == len(rows) else np.broadcast_to(v, (len(rows), 1)) for v in (scale, zero)]
    for down, across in blocks(*rows.shape):
        yield rows[down, across], to[down, across], *(v[down] for v in own)


Ends = tuple[Floats, Floats]
"""The smallest and the largest value on a weight's grid: of the tensor, or of each channel."""


def limits(weight: Floats, how: Weight, bits: int) -> Ends:
    """Return the ends of a weight's grid at a width: all entries, or what clipping leaves of them."""
    spec = how.spec(bits)
    return mse_range(weight, spec) if how.clip else min_max(weight, spec.axis)


@dataclass(frozen=True, eq=False)
class Nearest:
    """A weight that is rounded to the nearest codes when somebody asks: whole numbers, or at once what they stand for.

    It tells what `Codes` tell, bit for bit.
    """

    weight: Floats
    grid: Grid
    spec: QuantSpec
    inside: bool
    """Whether nothing lies outside of the grid."""

    @property
    def bits(self) -> int:
        """The width."""
        return self.spec.bits

    @property
    def scale(self) -> Floats:
        """The scale, single or one per index of the axis."""
        return _flat(self.grid.scale, self.spec)

    def codes(self) -> Codes:
        """Return whole numbers."""
        middle = _middle(self.spec)
        out = np.empty(self.weight.shape, _kind(self.bits))
        room = np.empty(min(self.weight.size, BLOCK), np.float32)
        for part, codes, scale, zero in _pieces(self.weight, out, *self.grid[:2], self.spec.axis):
            # What is not in one piece comes whole.
            ratio = room[: part.size].reshape(part.shape) if part.size <= room.size else np.empty_like(part)
            self._round(part, ratio, scale, zero)
            if middle:
                ratio -= middle
            codes[...] = ratio
        return _codes(out, self.grid, self.spec)

    def dequantized(self, out: Floats | None = None) -> Floats:
        """Return the weight in floating point, in `out` if that is given."""
        out = np.empty(self.weight.shape, np.float32) if out is None else out
        for part, to, scale, zero in _pieces(self.weight, out, *self.grid[:2], self.spec.axis):
            self._round(part, to, scale, zero)
            if not self.spec.symmetric:
                to -= zero
            to *= scale
        return out

    def error(self, exact: Floats) -> Floats:
        """Return by how much rounding moved each entry."""
        return self.dequantized() - exact

    def _round(self, part: Floats, to: Floats, scale: Floats, zero: Floats) -> None:
        """Put the nearest codes of a part into `to`."""
        with np.errstate(over="ignore"):
            np.divide(part, scale, out=to)
        np.rint(to, out=to)
        to += 0 if self.spec.symmetric else zero  # adding 0 takes the sign off a zero
        if not self.inside:
            np.clip(to, self.grid.low, self.grid.high, out=to)


def round_weight(
    weight: Floats, how: Weight, bits: int, ends: Ends | None = None, own: Rounded | None = None
) -> Codes | Nearest:
    """Put a weight on its grid: to the nearest codes or keeping sums, over its whole range or clipped.

    `ends` are its `limits`, for callers that have them; `own` is what it has of its own, where that holds.
    """
    spec = how.spec(bits)
    found = own is not None and bool(own.scale)
    grid = own.grid(weight.ndim, spec) if own and found else weight_grid(*(ends or limits(weight, how, bits)), spec)
    if own and found:
        codes = unpack(own, weight, grid)
    elif how.sums:
        codes = squant(weight, *grid, axis=how.channels, groups=how.groups)
    else:
        # Whatever lies on a symmetric grid's own range is rounded to one of its codes.
        return Nearest(weight, grid, spec, inside=spec.symmetric and not how.clip)
    middle = _middle(spec)
    return _codes((codes - codes.dtype.type(middle) if middle else codes).astype(_kind(bits)), grid, spec)


def encode(weight: Floats, how: Weight, bits: int, ends: Ends | None = None, own: Rounded | None = None) -> Codes:
    """Return the codes of a weight on its grid.

    >>> encode(np.array([-3.0, 1.6, 3.0], np.float32), Weight("a"), 3).values.tolist()
    [-3, 2, 3]
    """
    found = round_weight(weight, how, bits, ends, own)
    return found if isinstance(found, Codes) else found.codes()


def rounded_at(how: Weight, weight: Floats, pair: Bits | None) -> Rounded | None:
    """Return what a weight has of its own at a pair of widths, unless it has changed since that was found."""
    found = how.own(pair)
    return found if found is not None and found.mark == mark_of(weight) else None


def _kind(bits: int) -> type[np.signedinteger[Any]]:
    return np.int8 if bits <= 8 else np.int16


def _middle(spec: QuantSpec) -> int:
    """Return what is taken off codes from 0 on, which would not fit in a signed byte."""
    return 0 if spec.symmetric else 2 ** (spec.bits - 1)


def _flat(x: Floats, spec: QuantSpec) -> Floats:
    return np.asarray(x, np.float32).reshape(() if spec.axis is None else (-1,))


def _codes(values: Whole, grid: Grid, spec: QuantSpec) -> Codes:
    zero = _flat(grid.zero - _middle(spec), spec).astype(_kind(spec.bits))
    return Codes(values, _flat(grid.scale, spec), zero, spec.axis, spec.bits)


@dataclass(frozen=True, eq=False)
class RoundedBias:
    """A layer's bias at some widths: its values and, where integer kernels add it, whole numbers and their unit."""

    values: Floats
    codes: npt.NDArray[np.int32] | None = None
    unit: Floats | None = None


def round_bias(
    exact: Floats,
    how: Weight,
    weight: Codes | Nearest,
    master: Floats,
    mean: Floats | None,
    source: Grid | None,
    bits: int,
    shift: Floats | None = None,
) -> RoundedBias:
    """Return the bias of a layer whose weight is rounded.

    Args:
        exact: The bias in floating point.
        how: The layer's weight in the plan.
        weight: It on its grid.
        master: The weight in floating point.
        mean: Of each input channel, if the bias is to take back what rounding adds to the mean of the output.
        source: The grid of the layer's input, if it has one.
        bits: The width of that grid.
        shift: What reconstruction found to be added at these widths, in place of what the mean would tell.

    Where weight and input both have at most 8 bits the bias becomes a whole number of units, as integer kernels add it,
    unless it is too large for that.
    """
    if shift is not None:
        exact = exact + shift
    elif mean is not None:
        exact = exact - mean_shift(weight.error(master), mean, channels=how.channels, groups=how.groups)
    if source is None or max(bits, weight.bits) > 8:
        return RoundedBias(exact)
    unit = np.asarray(bias_units(source.scale, weight.scale, exact.size), np.float32)
    codes = bias_codes(exact, unit)
    if not fits(codes):
        return RoundedBias(exact)
    whole = codes.astype(np.int32)
    unit = unit if unit.size > 1 else unit.reshape(())
    return RoundedBias(whole.astype(np.float32) * unit, whole, unit)
