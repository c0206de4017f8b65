"""Rounding that preserves sums, without data, after Guo et al., "SQuant" (ICLR 2022).

Rounding to nearest makes each weight's error small and lets the errors of a kernel add up; a smooth input feels
just that sum. With errors in units of the scale (code minus exact ratio), three stages make each sum small:

1. element: round to nearest, so that `|error| <= 1/2`;
2. kernel: while a kernel's errors add up to more than 1/2, move the element that was rounded furthest in that
   direction to its other neighbour, so that `|sum over a kernel| <= 1/2`;
3. channel: the same for the kernels of an output channel, one element each, so that `|sum over a channel| <= 1/2`.

An element only ever sits on one of the two codes next to its value, so `|error| < 1` to the end, and no kernel's
sum leaves (-1, 1). In a weight matrix every element is a kernel of its own.

An element outside the grid (where a range was clipped) keeps the code at that end. What was cut off counts in the
sums, and the others make up for it as far as they can: where they run out, the sum stays above 1/2.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from anybit.errors import SpecError
from anybit.graph.view import by_output
from anybit.plan.grid import Array
from anybit.plan.rows import BLOCK

Indices = npt.NDArray[np.intp]

TURNS = 32
"""Kernels of up to so many taps give up their largest entries one after the other: few have more than one to give."""


def squant(x: Array, scale: Array, zero: Array, low: int, high: int, *, axis: int = 0, groups: int = 1) -> Array:
    """Return codes of the weight `x` whose errors add up to nearly nothing, in the dtype of `x`.

    Args:
        x: The weight of a convolution or a linear layer.
        scale: One scale, or one per output channel, shaped to broadcast, as `make_grid` returns it.
        zero: The code of the value zero, shaped like `scale`.
        low: The lowest code.
        high: The highest code.
        axis: The dimension that runs over output channels: 0, or 1 for transposed convolutions.
        groups: Only matters with `axis=1`, where the weight's shape does not tell the groups of a convolution.

    To nearest, all four would become 0 and lose 1.6 together:

    >>> one, nought = np.ones(()), np.zeros(())
    >>> squant(np.full((1, 4), 0.4), one, nought, -7, 7).tolist()
    [[1.0, 1.0, 0.0, 0.0]]
    """
    if x.size == 0:
        return x.copy()
    if axis not in (0, 1) or axis >= x.ndim:
        raise SpecError(f"the output channels of a weight are its dimension 0 or 1; got {axis} of {x.ndim}")
    if axis == 1 and x.shape[0] % groups:
        raise SpecError(f"{x.shape[0]} input channels cannot be split into {groups} groups")
    kernels = by_output(x, axis, groups)
    channels, inputs, taps = kernels.shape
    codes = np.empty(kernels.shape, x.dtype)
    scales, zeros = (_one_per_channel(v, x, axis, groups) for v in (scale, zero))
    step = max(1, BLOCK // (inputs * taps))
    for top in range(0, channels, step):
        part = slice(top, top + step)
        own_scale, own_zero = (v if v.size == 1 else v[part].repeat(inputs) for v in (scales, zeros))
        # Taps first: what is done to every kernel alike then runs along the memory.
        columns = kernels[part].reshape(-1, taps).T
        codes[part].reshape(-1, taps)[:] = _round(columns, own_scale, own_zero, low, high, inputs=inputs).T
    return _as_it_was(codes, x, axis, groups)


def _as_it_was(codes: Array, x: Array, axis: int, groups: int) -> Array:
    """Undo `by_output`."""
    if axis == 0:
        return codes.reshape(x.shape)
    return codes.reshape(groups, x.shape[1], x.shape[0] // groups, -1).swapaxes(1, 2).reshape(x.shape)


def _one_per_channel(value: Array, x: Array, axis: int, groups: int) -> Array:
    """Return a grid's scale or zero as one number per output channel, or as a single one."""
    value = np.asarray(value, x.dtype)
    if value.size == 1:
        return value.reshape(1)
    if value.ndim != x.ndim or value.size != x.shape[axis] or value.shape[axis] != x.shape[axis]:
        raise SpecError(
            f"errors add up along an output channel, so each has one scale: {x.shape[axis]} of them along dimension "
            f"{axis} of a weight of shape {x.shape}; got scales of shape {value.shape}"
        )
    return np.tile(value.reshape(-1), groups if axis == 1 else 1)


def _round(kernels: Array, scale: Array, zero: Array, low: int, high: int, *, inputs: int) -> Array:
    """Return codes of kernels (tap, kernel), every `inputs` of which make up an output channel."""
    with np.errstate(over="ignore"):
        ratio = np.divide(kernels, scale, order="C")
    least, most = ratio.min(), ratio.max()
    if not np.isfinite([least, most]).all():
        raise SpecError("a weight divided by its scale must be finite; this one has infinite or NaN entries")
    first, last = low - zero, high - zero
    clipped = bool(least < first.max() or most > last.min())
    inside = np.minimum(np.maximum(ratio, first), last) if clipped else ratio
    codes = np.rint(inside)
    error = codes - inside  # zero, so never worth a move, where the grid has ended
    sums = error.sum(0)
    if clipped:
        sums += np.subtract(inside, ratio, out=ratio).sum(0)
    _settle_kernels(error, codes, sums)
    if inputs > 1:
        _settle_channels(error, codes, sums.reshape(-1, inputs), clipped=clipped)
    codes += zero
    return codes


def _settle_kernels(error: Array, codes: Array, sums: Array) -> None:
    """Move elements until no column of errors adds up to more than 1/2; all three arrays follow."""
    signs = np.sign(sums)
    moved = _largest(error * signs, _moves(sums, len(error))).view(np.int8) * signs
    error -= moved
    codes -= moved
    sums -= moved.sum(0)


def _settle_channels(error: Array, codes: Array, sums: Array, *, clipped: bool) -> None:
    """Move one element each of some kernels until no row of sums adds up to more than 1/2."""
    inputs = sums.shape[1]
    total = sums.sum(1)
    signs = np.sign(total)
    value = sums.T * signs
    if clipped:  # a kernel may have no element left to move
        movable = (error * signs.repeat(inputs)).max(0) > 0
        value = np.where(movable.reshape(sums.shape).T, value, 0)
    column, channel = np.nonzero(_largest(value, _moves(total, inputs)))
    kernel, towards = channel * inputs + column, signs[channel]
    element = (error[:, kernel] * towards).argmax(0)
    codes[element, kernel] -= towards


def _moves(sums: Array, most: int) -> Indices:
    """Return how many moves by one bring each sum to within 1/2."""
    return np.asarray(np.rint(np.minimum(np.abs(sums), most)), np.intp)


def _largest(values: Array, count: Indices) -> npt.NDArray[np.bool_]:
    """Mark the `count[i]` largest positive entries of each column i; of equal ones the first.

    >>> _largest(np.array([[1.0], [3.0], [3.0], [-4.0]]), np.array([2])).ravel().tolist()
    [False, True, True, False]
    """
    return _by_turns(values, count) if len(values) <= TURNS else _by_bar(values, count) & (values > 0)


def _by_turns(values: Array, count: Indices) -> npt.NDArray[np.bool_]:
    """Take the largest entry of every column that wants one, then the next of those that want another."""
    top = values.max(0)
    top[(count <= 0) | (top <= 0)] = np.inf
    chosen: npt.NDArray[np.bool_] = values == top
    several = np.flatnonzero(chosen.view(np.uint8).sum(0, dtype=np.uint8) > 1)
    if several.size:  # equal entries: the first one
        chosen[:, several] &= chosen[:, several].cumsum(0) == 1
    again = np.flatnonzero(count > 1)
    if again.size:
        rest = np.where(chosen[:, again], -np.inf, values[:, again])
        chosen[:, again] |= _by_turns(rest, count[again] - 1)
    return chosen


def _by_bar(values: Array, count: Indices) -> npt.NDArray[np.bool_]:
    """Compare every column with its `count`-th largest entry."""
    rows, most = np.ascontiguousarray(values.T), max(int(count.max()), 1)
    top = np.partition(rows, len(values) - most, axis=1)[:, len(values) - most :]
    top.sort(axis=1)
    bar = np.take_along_axis(top, most - np.maximum(count, 1)[:, None], 1)
    above, equal = rows > bar, rows == bar
    room = count - above.sum(1)
    chosen: npt.NDArray[np.bool_] = above | (equal & (equal.cumsum(1) <= room[:, None]))
    return chosen.T
