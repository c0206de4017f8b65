"""The uniform grid in numpy: the same numbers, bit for bit, as `quant/uniform.py` gives for float32 tensors.

A code `q` stands for the value `(q - zero) · scale`. Rounding is to the nearest code, ties to the even one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from anybit.errors import SpecError
from anybit.spec import FLOAT, QuantSpec

Array = npt.NDArray[np.floating[Any]]


class Grid(NamedTuple):
    """A uniform grid: arrays without dimensions, or one entry per index of the spec's axis, shaped to broadcast."""

    scale: Array
    zero: Array
    low: int
    high: int


def make_grid(low: Array, high: Array, spec: QuantSpec) -> Grid:
    """Return the grid that covers `[low, high]` (and zero, always) with the levels of `spec`.

    Symmetric: `scale = max(|low|, |high|) / highest code`, zero at code 0. Asymmetric: zero is widened into the
    range and put on the nearest code, so that padding and ReLU stay exact.

    >>> float(make_grid(np.float64(-1), np.float64(3.5), QuantSpec(bits=4)).scale)
    0.5
    >>> [float(v) for v in make_grid(np.float64(-1), np.float64(2), QuantSpec(bits=2, symmetric=False))[:2]]
    [1.0, 1.0]
    """
    if spec.bits == FLOAT:
        raise SpecError("a tensor in floating point has no grid")
    low, high = np.asarray(low), np.asarray(high)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise SpecError("a range must be finite; the tensor it came from has infinite or NaN entries")
    if (low > high).any():
        raise SpecError("a range goes from low to high, and this one is the wrong way round")
    first, last = spec.levels
    number = np.result_type(low, high).type  # plain numbers would widen an array without dimensions in numpy 1
    low, high = np.minimum(low, number(0)), np.maximum(high, number(0))
    with np.errstate(over="ignore"):
        if spec.symmetric:
            span = np.maximum(-low, high) if spec.signed else high
            scale = _usable(span / number(last))
            zero = np.zeros_like(scale)
        else:
            scale = _usable((high - low) / number(last - first))
            zero = np.clip(np.rint(number(first) - low / scale), number(first), number(last))
    return Grid(np.asarray(scale), np.asarray(zero), first, last)


def _usable(scale: Array) -> Array:
    """Replace scales too small to divide by: on such a tensor every value is zero and any grid is exact."""
    return np.where(scale < np.finfo(scale.dtype).tiny, scale.dtype.type(1), scale)


def min_max(x: Array, axis: int | None = None) -> tuple[Array, Array]:
    """Return the smallest and largest entry, per tensor or per index of `axis`, shaped to broadcast with `x`.

    >>> [a.tolist() for a in min_max(np.array([[1.0, -2.0], [3.0, 4.0]]), axis=0)]
    [[[-2.0], [3.0]], [[1.0], [4.0]]]
    """
    if x.size == 0:
        raise SpecError("an empty tensor has no range")
    if axis is None:
        return np.asarray(x.min()), np.asarray(x.max())
    others = tuple(d for d in range(x.ndim) if d != axis % x.ndim)
    if not others:
        return x, x
    return x.min(others, keepdims=True), x.max(others, keepdims=True)


def quantize(x: Array, scale: Array, zero: Array, low: int, high: int) -> Array:
    """Return the codes of `x` as whole numbers in `[low, high]`, in the dtype of `x`.

    >>> quantize(np.array([-9.0, 0.5, 1.5, 9.0]), np.float64(1), np.float64(0), -7, 7).tolist()
    [-7.0, 0.0, 2.0, 7.0]
    """
    with np.errstate(over="ignore"):
        return np.clip(np.rint(x / scale) + zero, x.dtype.type(low), x.dtype.type(high))


def dequantize(codes: Array, scale: Array, zero: Array, out: Array | None = None) -> Array:
    """Return the values that the codes stand for, in `out` if given, which may be the codes themselves.

    >>> dequantize(np.array([0.0, 3.0]), np.float64(0.5), np.float64(1)).tolist()
    [-0.5, 1.0]
    """
    shifted = np.subtract(codes, zero, out=out) if np.any(zero) else codes
    values: Array = np.multiply(shifted, scale, out=out)
    return values
