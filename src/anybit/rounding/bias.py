"""Analytic bias correction: rounding a weight shifts the mean of a layer's output, and the bias can take that back.

If the weight changes by `error`, the output changes by `error · x`, and on average by `error · E[x]`. The bias that
keeps the mean is `b - bias_shift(error, E[x])`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from anybit.errors import SpecError
from anybit.rounding.grid import Array


def bias_shift(
    error: Array,
    input_mean: Array,
    *,
    groups: int = 1,
    transposed: bool = False,
    stride: int | Sequence[int] = 1,
) -> Array:
    """Return by how much each output channel's mean moves: the sum over taps and inputs of `error · E[x]`.

    Every tap is taken to fall on the image: where a convolution reaches over a border padded with zeros, the true
    shift is smaller.

    Args:
        error: Rounded minus exact weight, of a linear layer or a convolution of any dimension.
        input_mean: The mean of each input channel.
        groups: The groups of the convolution.
        transposed: Whether the weight is that of a transposed convolution, with input channels first.
        stride: Only matters to transposed convolutions, where one output in `stride` (per dimension) sees a tap.

    Two inputs of mean 1 and 10, two taps each:

    >>> bias_shift(np.array([[[0.1, 0.1], [0.0, -0.5]]]), np.array([1.0, 10.0])).round(9).tolist()
    [-4.8]
    """
    if error.ndim < 2:
        raise SpecError(f"a weight has at least two dimensions, outputs and inputs; got the shape {error.shape}")
    inputs = error.shape[0] if transposed else error.shape[1] * groups
    outputs = error.shape[1] * groups if transposed else error.shape[0]
    if inputs % groups or outputs % groups:
        raise SpecError(f"{outputs} output and {inputs} input channels cannot be split into {groups} groups")
    if input_mean.shape != (inputs,):
        raise SpecError(
            f"a weight of shape {error.shape} in {groups} group(s) has {inputs} input channels, "
            f"so as many means are expected; got the shape {input_mean.shape}"
        )
    means = input_mean.astype(error.dtype, copy=False).reshape(groups, -1)
    taps = math.prod(error.shape[2:])
    if not transposed:
        kernels = error.reshape(groups, outputs // groups, -1)
        shift = np.stack([own @ mean.repeat(taps) for own, mean in zip(kernels, means, strict=True)])
    else:
        every = math.prod([stride] * (error.ndim - 2) if isinstance(stride, int) else stride)
        kernels = error.reshape(groups, inputs // groups, -1)
        by_tap = np.stack([mean @ own for own, mean in zip(kernels, means, strict=True)])
        shift = by_tap.reshape(groups, outputs // groups, taps).sum(2) / every
    result: Array = shift.reshape(-1).astype(error.dtype)
    return result
