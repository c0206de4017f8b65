"""The uniform grid, for numpy and torch arrays alike: the only place that computes a scale, a zero or a code.

A code `q` stands for the value `(q - zero) · scale`. Rounding is to the nearest code, ties to the even one, as ONNX's
QuantizeLinear does it. Torch arrays stay on their device and let gradients through wherever they exist. In float32 both
kinds give the same numbers, bit for bit.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from anybit.errors import SpecError
from anybit.spec import FLOAT, QuantSpec

Array = Any
"""A numpy array or a torch tensor."""


class Grid(NamedTuple):
    """A uniform grid: arrays without dimensions, or one entry per index of the spec's axis, shaped to broadcast."""

    scale: Array
    zero: Array
    low: int
    high: int


def space(x: Array) -> Any:
    """Return the library that an array belongs to: numpy, or torch, which is imported if there is a tensor.

    >>> space(np.ones(1)).__name__
    'numpy'
    """
    return np if isinstance(x, np.ndarray | np.generic) else sys.modules[type(x).__module__.partition(".")[0]]


def make_grid(low: Array, high: Array, spec: QuantSpec) -> Grid:
    """Return the grid that covers `[low, high]` (and zero, always) with the levels of `spec`.

    Symmetric: `scale = max(|low|, |high|) / highest code`, zero at code 0. Asymmetric: zero is widened into the
    range and put on the nearest code, so that padding and ReLU stay exact.

    >>> float(make_grid(np.float32(-1), np.float32(3.5), QuantSpec(bits=4)).scale)
    0.5
    >>> [float(v) for v in make_grid(np.float64(-1), np.float64(2), QuantSpec(bits=2, symmetric=False))[:2]]
    [1.0, 1.0]
    """
    return _both(low, high, spec)[0]


def _both(low: Array, high: Array, spec: QuantSpec) -> tuple[Grid, Array]:
    """Return the grid of a range, and the scale that it asks for: zero where that is too small to divide by."""
    if spec.bits == FLOAT:
        raise SpecError("a tensor in floating point has no grid")
    xp = space(low)
    if xp is np:  # asking a device would mean to wait for it
        _check_range(low, high)
    first, last = spec.levels
    nothing = xp.zeros_like(low)
    low, high = xp.minimum(low, nothing), xp.maximum(high, nothing)
    with np.errstate(over="ignore"):
        if spec.symmetric:
            own = (xp.maximum(-low, high) if spec.signed else high) / _like(low, last)
        else:
            own = (high - low) / _like(low, last - first)
    faint = own < xp.finfo(own.dtype).tiny
    # On a scale too small to divide by every value is zero, and any grid is exact.
    scale = xp.where(faint, xp.ones_like(own), own)
    zero = nothing if spec.symmetric else xp.clip(xp.round(first - low / scale), first, last)
    return Grid(_array(scale), _array(zero), first, last), xp.where(faint, nothing, own)


def _like(x: Array, number: int) -> Array:
    """Return what to divide `x` by: some devices multiply by the inverse of a number, and not of an array."""
    return number if space(x) is np else space(x).full_like(x, number)


def _array(x: Array) -> Array:
    """Give numpy's single numbers, which it makes of arrays without dimensions, their dimensions back."""
    return np.asarray(x) if isinstance(x, np.generic) else x


def _check_range(low: Array, high: Array) -> None:
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise SpecError("a range must be finite; the tensor it came from has infinite or NaN entries")
    if (low > high).any():
        raise SpecError("a range goes from low to high, and this one is the wrong way round")


def min_max(x: Array, axis: int | None = None) -> tuple[Array, Array]:
    """Return the smallest and largest entry, per tensor or per index of `axis`, shaped to broadcast with `x`.

    >>> [a.tolist() for a in min_max(np.array([[1.0, -2.0], [3.0, 4.0]]), axis=0)]
    [[[-2.0], [3.0]], [[1.0], [4.0]]]
    """
    xp = space(x)
    if 0 in x.shape:
        raise SpecError("an empty tensor has no range")
    if axis is None:
        return _array(x.min()), _array(x.max())
    others = tuple(d for d in range(x.ndim) if d != axis % x.ndim)
    if not others:
        return x, x
    return xp.amin(x, axis=others, keepdims=True), xp.amax(x, axis=others, keepdims=True)


FAINTEST = 2.0**-16
"""A channel's scale is at least this part of the tensor's largest: its bias must fit into whole units of it."""


def weight_grid(low: Array, high: Array, spec: QuantSpec) -> Grid:
    """Return the grid of a weight: as `make_grid`, but channels that are (nearly) zero get no scale of (nearly) zero.

    Integer kernels add the bias in whole units of the weight's scale times the input's, 32 bits long. A dead channel's
    own scale would leave its bias no room, and any scale is fine for its weights.

    >>> low, high = np.float32([[-1], [0]]), np.float32([[7], [0]])
    >>> (weight_grid(low, high, QuantSpec(4, axis=0)).scale * 2**16).ravel().tolist()
    [65536.0, 1.0]
    """
    xp = space(low)
    grid, own = _both(low, high, spec)
    most = xp.amax(own) if spec.axis is not None else own
    least = FAINTEST * xp.where(most > 0, most, xp.ones_like(most))
    tiny = xp.finfo(own.dtype).tiny  # below it numbers lose digits
    return grid._replace(scale=_array(xp.maximum(xp.clip(own, tiny, None), least)))


def quantize(x: Array, grid: Grid) -> Array:
    """Return the codes of `x` as whole numbers between the grid's ends, in the dtype of `x`.

    >>> quantize(np.array([-9.0, 0.5, 1.5, 9.0]), Grid(np.float64(1), np.float64(0), -7, 7)).tolist()
    [-7.0, 0.0, 2.0, 7.0]
    """
    xp = space(x)
    with np.errstate(over="ignore"):
        return xp.clip(xp.round(x / grid.scale) + grid.zero, grid.low, grid.high)


def dequantize(codes: Array, grid: Grid) -> Array:
    """Return the values that the codes stand for.

    >>> dequantize(np.array([0.0, 3.0]), Grid(np.float64(0.5), np.float64(1), 0, 7)).tolist()
    [-0.5, 1.0]
    """
    return (codes - grid.zero) * grid.scale


def on_grid(x: Array, grid: Grid) -> Array:
    """Return what `dequantize(quantize(x, grid), grid)` does, for large arrays: in float32, without others beside it.

    >>> on_grid(np.array([-9.0, 0.4, 1.6, 9.0]), Grid(np.float32(0.5), np.float32(2), 0, 7)).tolist()
    [-1.0, 0.5, 1.5, 2.5]
    """
    with np.errstate(over="ignore"):
        out = np.asarray(x / grid.scale, np.float32)
    np.rint(out, out=out)
    np.clip(out, grid.low - grid.zero, grid.high - grid.zero, out=out)
    out *= grid.scale
    return out


LARGEST_BIAS = 2.0**30
"""Biases of more units do not fit into 32 bits beside the sum they are added to."""


def bias_units(input_scale: Array, weight_scale: Array, size: int) -> Array:
    """Return what a bias is counted in by integer kernels: both scales multiplied, one per output or one for all."""
    unit = input_scale * weight_scale.reshape(-1)
    # The groups of a transposed convolution share scales.
    return space(unit).tile(unit, (size // unit.shape[0],)) if unit.shape[0] > 1 else unit


def bias_codes(bias: Array, unit: Array) -> Array:
    """Return a bias in whole units.

    >>> bias_codes(np.float32([1.0, -0.3]), np.float32([0.125])).tolist()
    [8.0, -2.0]
    """
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # what is not finite does not fit
        return space(bias).round(bias / unit)


def fits(codes: Array) -> Array:
    """Tell whether integer kernels can add such a bias, as an array without dimensions."""
    xp = space(codes)
    return xp.all(xp.abs(codes) <= LARGEST_BIAS)


def mean_shift(error: Array, input_mean: Array, *, channels: int = 0, groups: int = 1) -> Array:
    """Return by how much each output's mean moves if the weight changes by `error`: the sum of `error · E[x]`.

    `channels` is the dimension that runs over outputs. Every tap is taken to fall on the image: where a convolution
    reaches over a border padded with zeros, the true shift is smaller.

    Two inputs of mean 1 and 10, two taps each:

    >>> mean_shift(np.array([[[0.1, 0.1], [0.0, -0.5]]]), np.array([1.0, 10.0])).round(9).tolist()
    [-4.8]
    """
    xp = space(error)
    exact = xp.float32 if str(getattr(error, "device", "")).startswith("mps") else xp.float64  # it has no other
    by_input = error.reshape(*error.shape[:2], -1).sum(-1, dtype=exact)  # over taps
    if channels == 0:  # (outputs, inputs of a group)
        kernels = by_input.reshape(groups, -1, by_input.shape[1])
    else:  # (inputs, outputs of a group)
        kernels = xp.swapaxes(by_input.reshape(groups, -1, by_input.shape[1]), 1, 2)
    means = xp.asarray(input_mean, dtype=exact).reshape(groups, -1, 1)
    return xp.asarray(kernels @ means, dtype=error.dtype).reshape(-1)
