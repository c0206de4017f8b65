"""Ranges that minimise the squared error of quantization: a narrower grid is finer, and cuts more off.

The search runs on a histogram, with the values of a bin spread evenly over it, so that the error of every candidate
has a closed form at every width. All values are in units of the largest one; then the candidates are the same for
all tensors, and one matrix product gives the errors of all channels. The winner is polished and compared with the
range from smallest to largest value on the tensor itself: what is returned is never worse than that.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from anybit.errors import SpecError
from anybit.plan.grid import Array, make_grid, min_max
from anybit.plan.rows import as_rows, blocks, per_row
from anybit.spec import QuantSpec

Numbers = npt.NDArray[np.integer[Any] | np.floating[Any]]

BINS = 1024
"""Bins on either side of zero."""

FRACTIONS: Array = np.concatenate([np.linspace(1, 0.8, 20, endpoint=False), np.geomspace(0.8, 1 / 256, 108)])
"""Candidates, as parts of the whole range: in small steps at first, where values that have an end are decided."""

HEIGHT = 64
"""Rows searched at a time."""

SAMPLED = 1 << 17
"""Values of a row that go into its histogram, evenly spread over it: more would not move the best candidate."""


def mse_range(x: Array, spec: QuantSpec) -> tuple[Array, Array]:
    """Return the (low, high) that `x` is best clipped to at the width of `spec`, shaped like those of `min_max`.

    Among a hundred values of ±1, a single 4 is worth losing at 2 bits: the one scale is best at (100 · 1 + 4) / 101.
    At 8 bits it is kept, nearly: 1 is exact at the scale 1/32, which ends at 127/32.

    >>> x = np.array([1.0, -1.0] * 50 + [4.0])
    >>> [float(mse_range(x, QuantSpec(bits))[1].round(2)) for bits in (2, 8)]
    [1.03, 3.97]
    """
    if spec.symmetric and not spec.signed:
        x = np.maximum(x, x.dtype.type(0))  # without negative codes they become zero over every range
    low, high = min_max(x, spec.axis)
    grid = make_grid(low, high, spec)
    rows = as_rows(x, spec.axis)
    scale, zero = (np.array(as_rows(v, spec.axis)[:, 0] if v.ndim else v.reshape(1), np.float64) for v in grid[:2])
    for top in range(0, len(rows), HEIGHT):
        part = slice(top, top + HEIGHT)
        scale[part], zero[part] = _fit(rows[part], scale[part], zero[part], spec)
    nothing = _nothing(np.maximum(high, -low), x.dtype)
    whole = np.minimum(low, x.dtype.type(0)), np.maximum(high, x.dtype.type(0))
    best = [per_row(((end - zero) * scale).astype(x.dtype), x, spec.axis) for end in spec.levels]
    return np.where(nothing, whole[0], best[0]), np.where(nothing, whole[1], best[1])


def mse_from_histogram(counts: Numbers, edges: Numbers, spec: QuantSpec) -> tuple[float, float]:
    """Return the (low, high) that values with this histogram are best clipped to, one grid for all of them.

    The codes 0 to 3 divide [0, 7] best at 0, 2, 4 and 6, in the middle of what they stand for (zero has no left half):

    >>> low, high = mse_from_histogram(np.array([1]), np.array([0, 7]), QuantSpec(2, signed=False))
    >>> low, round(high)
    (0.0, 6)
    """
    mass, ends = _checked(counts, edges)
    peak = float(_whole(ends[0], ends[-1], spec)) or 1.0
    below = np.concatenate([[0.0], np.cumsum(mass)])
    even = np.diff(np.interp(np.linspace(-peak, peak, 2 * BINS + 1), ends, below))[None]
    scale, zero = (float(v[0]) for v in _search(even, spec))
    low, high = ((end - zero) * scale * peak for end in spec.levels)
    if not spec.symmetric:
        return low, high
    # The side that is shorter says where values end; the other one decides the grid.
    return min(max(low, float(ends[0])), 0.0), max(min(high, float(ends[-1])), 0.0)


def percentile_from_histogram(counts: Numbers, edges: Numbers, percent: float) -> tuple[float, float]:
    """Return the range, widened to zero, that holds `percent` of the values and leaves as many out on either side.

    >>> percentile_from_histogram(np.array([10, 80, 10]), np.array([-2.0, -1.0, 1.0, 2.0]), 90)
    (-1.5, 1.5)
    """
    if not 0 < percent <= 100:
        raise SpecError(f"a percentile is above 0 and at most 100; got {percent}")
    mass, ends = _checked(counts, edges)
    below = np.concatenate([[0.0], np.cumsum(mass)])
    outside = (1 - percent / 100) / 2
    # Empty bins repeat a value of `below`: the upper end is found from above, so that neither end enters them.
    low = np.interp(outside, below / below[-1], ends)
    high = -np.interp(outside, (below[-1] - below[::-1]) / below[-1], -ends[::-1])
    return min(float(low), 0.0), max(float(high), 0.0)


def _checked(counts: Numbers, edges: Numbers) -> tuple[Array, Array]:
    """Return a histogram in float64, without the empty bins at either end."""
    mass, ends = np.asarray(counts, np.float64), np.asarray(edges, np.float64)
    if mass.ndim != 1 or ends.shape != (mass.size + 1,):
        raise SpecError(f"a histogram of n bins has n + 1 edges; got counts {mass.shape} and edges {ends.shape}")
    if not np.isfinite(ends).all() or not (np.diff(ends) > 0).all():
        raise SpecError("the edges of a histogram are finite and go up")
    if not np.isfinite(mass).all() or (mass < 0).any() or not mass.any():
        raise SpecError("the counts of a histogram are zero or more, and not all zero; has calibration seen no data?")
    first, last = np.flatnonzero(mass)[[0, -1]]
    return mass[first : last + 1], ends[first : last + 2]


def _fit(rows: Array, scale: Array, zero: Array, spec: QuantSpec) -> tuple[Array, Array]:
    """Return the best scale and zero of each row, starting from those that cover it all."""
    unit = _whole(rows.min(1), rows.max(1), spec)
    unit = np.where(_nothing(unit, rows.dtype), 1.0, unit)
    new_scale, new_zero = _search(_histogram(rows, unit), spec)
    whole, scale = _measure(rows, scale, zero, spec)
    error, new_scale = _measure(rows, new_scale * unit, new_zero, spec)
    better = error < whole
    return np.where(better, new_scale, scale), np.where(better, new_zero, zero)


def _nothing(size: Array, dtype: np.dtype[Any]) -> npt.NDArray[np.bool_]:
    """Tell where values are so small that no part of their range makes a usable scale."""
    found: npt.NDArray[np.bool_] = size < 2.0**32 * float(np.finfo(dtype).tiny)
    return found


def _whole(low: Array, high: Array, spec: QuantSpec) -> Array:
    """Return the width that the highest code has to reach over, in float64."""
    low, high = np.minimum(low, 0.0), np.maximum(high, 0.0)
    if not spec.symmetric:
        return high.astype(np.float64) - low
    return np.maximum(high, -low if spec.signed else 0.0).astype(np.float64)


def _histogram(rows: Array, unit: Array) -> Array:
    """Count the values of each row in `2 · BINS` even bins from `-unit` to `unit`; of long rows, a sample."""
    # An odd step falls on every tap of a kernel in turn.
    every = -(-rows.shape[1] // SAMPLED) | 1
    if rows.shape[1] > SAMPLED:
        rows = rows[:, ::every]
    counts = np.zeros((len(rows), 2 * BINS))
    for down, across in blocks(*rows.shape):
        place = rows[down, across] * (BINS / unit[down, None]).astype(rows.dtype)
        np.clip(np.floor(place, out=place), -BINS, BINS - 1, out=place)
        bins = place.astype(np.intp)
        bins += 2 * BINS * np.arange(len(bins))[:, None] + BINS
        counts[down] += np.bincount(bins.ravel(), minlength=len(bins) * 2 * BINS).reshape(len(bins), -1)
    return counts


def _measure(rows: Array, scale: Array, zero: Array, spec: QuantSpec) -> tuple[Array, Array]:
    """Return each row's squared error, and a scale at which it is no larger.

    With the codes k fixed, `sum (x - s k)²` is least at `s = sum xk / sum k²`, and rounding anew at that scale
    can only lower it further.
    """
    first, last = spec.levels
    squares, products, codes2 = np.zeros((3, len(rows)))
    for down, across in blocks(*rows.shape):
        own, nought = scale[down, None].astype(rows.dtype), zero[down, None].astype(rows.dtype)
        ratio = rows[down, across] / own
        codes = np.rint(ratio)
        np.minimum(np.maximum(codes, first - nought, out=codes), last - nought, out=codes)
        products[down] += np.einsum("ij,ij->i", ratio, codes)
        codes2[down] += np.einsum("ij,ij->i", codes, codes)
        ratio -= codes
        squares[down] += np.einsum("ij,ij->i", ratio, ratio)
    factor = np.where(codes2 > 0, products / np.maximum(codes2, 1), 1.0)
    return squares * scale**2, factor * scale


def _search(counts: Array, spec: QuantSpec) -> tuple[Array, Array]:
    """Return the best scale, in units of the histogram's half width, and the best zero of each row of counts."""
    first, last = spec.levels
    negative, positive = counts[:, BINS - 1 :: -1], counts[:, BINS:]
    if not spec.symmetric:
        return _search_asymmetric(negative, positive, last - first)
    mass = positive + negative if spec.signed else positive
    errors = mass @ _clipped_errors(last)
    best = _first_best(errors)
    return FRACTIONS[best] / last, np.zeros(len(counts))


def _search_asymmetric(negative: Array, positive: Array, last: int) -> tuple[Array, Array]:
    """Search scale and zero: at each scale the window slides to where it cuts off as much above as below.

    Zero is a code, so either side of it is a problem of its own, tied to the other by the number of codes only.
    """
    scale = FRACTIONS / last
    above, below = _beyond(positive), _beyond(negative)
    table = _rounding_errors(last)
    sides = ((positive @ table, above), (negative @ table, below))

    def errors(zero: Array) -> Array:
        """Add what is cut off on either side to the rounding error of what is left."""
        total = np.zeros(zero.shape)
        for (inner, beyond), codes in zip(sides, (last - zero, zero), strict=True):
            number, _, squares = _read(beyond, codes * scale)
            # Beyond the last code values are rounded as elsewhere, evenly; without any code all is lost.
            total += np.where(codes > 0, inner - number * scale**2 / 12, 0) + squares
        return total

    shape = (len(positive), len(scale))
    low, high = np.zeros(shape), np.full(shape, float(last))
    while (low < high).any():
        middle = np.floor((low + high) / 2)
        rises = _read(below[1:2], middle * scale) > _read(above[1:2], (last - middle) * scale)
        low, high = np.where(rises[0], middle + 1, low), np.where(rises[0], high, middle)
    zeros = np.stack([low, np.maximum(low - 1, 0)], 2)
    both = np.stack([errors(zeros[..., 0]), errors(zeros[..., 1])], 2).reshape(len(positive), -1)
    best = _first_best(both)
    return scale[best // 2], zeros.reshape(both.shape)[np.arange(len(best)), best]


def _first_best(errors: Array) -> npt.NDArray[np.intp]:
    """Return where each row is least; of nearly equal ones the first, so that rounding does not decide."""
    least = errors.min(1, keepdims=True)
    best: npt.NDArray[np.intp] = np.argmax(errors <= least + 1e-9 * np.abs(least), axis=1)
    return best


def _beyond(counts: Array) -> Array:
    """Return the sums of 1, x - c and (x - c)² over the values x above each bin edge c."""
    width = 1 / BINS
    number = _from_above(counts)
    first = _from_above(counts * (width / 2) + width * number[:, 1:])
    second = _from_above(counts * (width**2 / 3) + 2 * width * first[:, 1:] + width**2 * number[:, 1:])
    return np.stack([number, first, second])


def _from_above(steps: Array) -> Array:
    """Add up each row from its end, which is zero."""
    sums = np.zeros((len(steps), steps.shape[1] + 1))
    np.cumsum(steps[:, ::-1], axis=1, out=sums[:, -2::-1])
    return sums


def _read(moments: Array, at: Array) -> Array:
    """Read `_beyond` between its edges, row by row."""
    place = np.minimum(at, 1.0) * BINS
    left = np.minimum(place, BINS - 1).astype(np.intp)
    part = place - left
    left += np.arange(len(left))[:, None] * (BINS + 1)
    flat = moments.reshape(len(moments), -1)
    values: Array = flat[:, left] * (1 - part) + flat[:, left + 1] * part
    return values


@functools.cache
def _clipped_errors(last: int) -> Array:
    """Return the mean squared error in each bin (row) of the codes 0 to `last` up to each fraction (column)."""
    top = FRACTIONS
    edges = np.linspace(0, 1, BINS + 1)[:, None]
    integral = _rounding_integral(np.minimum(edges, top), top / last) + np.maximum(edges - top, 0) ** 3 / 3
    return np.diff(integral, axis=0) * BINS


@functools.cache
def _rounding_errors(last: int) -> Array:
    """Return the mean squared error in each bin (row) of endless grids with the asymmetric scales (columns)."""
    edges = np.linspace(0, 1, BINS + 1)[:, None]
    return np.diff(_rounding_integral(edges, FRACTIONS / last), axis=0) * BINS


def _rounding_integral(x: Array, scale: Array) -> Array:
    """Return the integral of `(t - nearest code)²` from 0 to x: a whole step has `scale³ / 12`.

    >>> _rounding_integral(np.array([0.5, 1.0, 2.0]), np.array(1.0)).tolist() == [1 / 24, 1 / 12, 2 / 12]
    True
    """
    steps = x / scale
    whole = np.rint(steps)
    return scale**3 * (whole / 12 + (steps - whole) ** 3 / 3)
