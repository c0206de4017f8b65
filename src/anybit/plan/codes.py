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
from anybit.plan.rows import as_rows, blocks
from anybit.plan.sums import squant
from anybit.spec import QuantSpec

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

    def dequantized(self) -> Floats:
        """Return the weight in floating point.

        >>> Codes(np.array([-7, 2], np.int8), np.array(0.5, np.float32), np.array(0, np.int8), None, 4).dequantized()
        array([-3.5,  1. ], dtype=float32)
        """
        out, shifted = np.empty(self.values.shape, np.float32), self.zero.any()
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
    own = [np.broadcast_to(v.reshape(-1, 1), (len(rows), 1)) for v in (scale, zero)]
    for down, across in blocks(*rows.shape):
        yield rows[down, across], to[down, across], *(v[down] for v in own)


def limits(weight: Floats, how: Weight, bits: int) -> tuple[Floats, Floats]:
    """Return the ends of a weight's grid at a width: all entries, or what clipping leaves of them."""
    spec = how.spec(bits)
    return mse_range(weight, spec) if how.clip else min_max(weight, spec.axis)


def encode(weight: Floats, how: Weight, bits: int) -> Codes:
    """Put a weight on its grid: to the nearest codes or keeping sums, over its whole range or clipped.

    >>> encode(np.array([-3.0, 1.6, 3.0], np.float32), Weight("a"), 3).values.tolist()
    [-3, 2, 3]
    """
    spec = how.spec(bits)
    own = rounded_at(how, weight, bits)
    found = own is not None and bool(own.scale)
    grid = own.grid(weight.ndim, spec) if own and found else weight_grid(*limits(weight, how, bits), spec)
    # Codes from 0 on would not fit in a signed byte.
    middle = 0 if spec.symmetric else 2 ** (bits - 1)
    if own and found:
        values = (unpack(own, weight, grid) - np.float32(middle)).astype(_kind(bits))
    elif how.sums:
        codes = squant(weight, *grid, axis=how.channels, groups=how.groups)
        values = (codes - codes.dtype.type(middle) if middle else codes).astype(_kind(bits))
    else:
        # Whatever lies on a symmetric grid's own range is rounded to one of its codes.
        values = _nearest(weight, grid, spec, middle, inside=spec.symmetric and not how.clip)
    shape = () if spec.axis is None else (-1,)
    scale, zero = np.asarray(grid.scale, np.float32), np.asarray(grid.zero - middle, _kind(bits))
    return Codes(values, scale.reshape(shape), zero.reshape(shape), spec.axis, bits)


def rounded_at(how: Weight, weight: Floats, bits: int) -> Rounded | None:
    """Return what a weight has of its own at a width, unless it has changed since that was found."""
    found = next((rounded for rounded in how.rounded if rounded.bits == bits), None)
    return found if found is not None and found.mark == mark_of(weight) else None


def _kind(bits: int) -> type[np.signedinteger[Any]]:
    return np.int8 if bits <= 8 else np.int16


def _nearest(weight: Floats, grid: Grid, spec: QuantSpec, middle: int, *, inside: bool) -> Whole:
    """Return the nearest codes less `middle`, as `quantize` gives them, a cacheful at a time."""
    out = np.empty(weight.shape, _kind(spec.bits))
    for part, codes, scale, zero in _pieces(weight, out, grid.scale, grid.zero, spec.axis):
        with np.errstate(over="ignore"):
            ratio = part / scale
        np.rint(ratio, out=ratio)
        if not spec.symmetric:
            ratio += zero
        if not inside:
            np.clip(ratio, grid.low, grid.high, out=ratio)
        if middle:
            ratio -= middle
        codes[...] = ratio
    return out


@dataclass(frozen=True, eq=False)
class RoundedBias:
    """A layer's bias at some widths: its values and, where integer kernels add it, whole numbers and their unit."""

    values: Floats
    codes: npt.NDArray[np.int32] | None = None
    unit: Floats | None = None


def round_bias(
    exact: Floats,
    how: Weight,
    weight: Codes,
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
        weight: Its codes.
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
