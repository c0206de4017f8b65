"""The uniform grid: from a range and a `QuantSpec` to scales, codes and simulated values.

A code `q` stands for the value `(q - zero) · scale`. Rounding is to the nearest code, ties to the even one, as
ONNX's QuantizeLinear does it. `fake_quantize` goes to the grid and back and lets gradients through unchanged
inside the range (the straight-through estimator), zero outside.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from anybit.errors import SpecError
from anybit.spec import FLOAT, QuantSpec


class Grid(NamedTuple):
    """A uniform grid: scalar tensors, or one entry per index of the spec's axis, shaped to broadcast."""

    scale: Tensor
    zero: Tensor
    low: int
    high: int


def make_grid(low: Tensor, high: Tensor, spec: QuantSpec) -> Grid:
    """Return the grid that covers `[low, high]` (and zero, always) with the levels of `spec`.

    Symmetric: `scale = max(|low|, |high|) / highest code`, zero at code 0. Asymmetric: zero is widened into the
    range and put on the nearest code, so that padding and ReLU stay exact.

    >>> make_grid(torch.tensor(-1.0), torch.tensor(1.4), QuantSpec(bits=4)).scale
    tensor(0.2000)
    >>> make_grid(torch.tensor(-1.0), torch.tensor(2.0), QuantSpec(bits=2, symmetric=False))[:2]
    (tensor(1.), tensor(1.))
    """
    if spec.bits == FLOAT:
        raise SpecError("a tensor in floating point has no grid")
    if not bool(torch.isfinite(low).all() and torch.isfinite(high).all()):
        raise SpecError("a range must be finite; the tensor it came from has infinite or NaN entries")
    if bool((low > high).any()):
        raise SpecError("a range goes from low to high, and this one is the wrong way round")
    first, last = spec.levels
    low, high = low.clamp(max=0), high.clamp(min=0)
    if spec.symmetric:
        span = torch.maximum(-low, high) if spec.signed else high
        scale = span / last
        zero = torch.zeros_like(scale)
    else:
        scale = (high - low) / (last - first)
        zero = torch.round(first - low / _usable(scale)).clamp(first, last)
    return Grid(_usable(scale), zero, first, last)


def _usable(scale: Tensor) -> Tensor:
    """Replace scales too small to divide by: on such a tensor every value is zero and any grid is exact."""
    return torch.where(scale < torch.finfo(scale.dtype).tiny, torch.ones_like(scale), scale)


def min_max(x: Tensor, axis: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest entry, per tensor or per index of `axis`, shaped to broadcast with `x`.

    >>> [t.tolist() for t in min_max(torch.tensor([[1.0, -2.0], [3.0, 4.0]]), axis=0)]
    [[[-2.0], [3.0]], [[1.0], [4.0]]]
    """
    if x.numel() == 0:
        raise SpecError("an empty tensor has no range")
    if axis is None:
        low, high = torch.aminmax(x)
        return low, high
    axis = axis % x.dim()
    others = [d for d in range(x.dim()) if d != axis]
    if not others:
        return x, x
    return x.amin(others, keepdim=True), x.amax(others, keepdim=True)


def quantize(x: Tensor, scale: Tensor, zero: Tensor, low: int, high: int) -> Tensor:
    """Return the codes of `x` as whole numbers in `[low, high]`, in the dtype of `x`.

    >>> quantize(torch.tensor([-9.0, 0.5, 1.5, 9.0]), torch.tensor(1.0), torch.tensor(0.0), -7, 7)
    tensor([-7.,  0.,  2.,  7.])
    """
    return torch.clamp(torch.round(x / scale) + zero, low, high)


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Return the values that the codes stand for.

    >>> dequantize(torch.tensor([0.0, 3.0]), torch.tensor(0.5), torch.tensor(1.0))
    tensor([-0.5000,  1.0000])
    """
    return (codes - zero) * scale


def fake_quantize(x: Tensor, scale: Tensor, zero: Tensor, low: int, high: int) -> Tensor:
    """Return `x` moved to the grid, with straight-through gradients inside the range and none outside.

    >>> x = torch.tensor([0.26, 5.0], requires_grad=True)
    >>> y = fake_quantize(x, torch.tensor(0.5), torch.tensor(0.0), -7, 7)
    >>> y.sum().backward()
    >>> y.tolist(), x.grad.tolist()
    ([0.5, 3.5], [1.0, 0.0])
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return snap_(x.clone(), scale, zero, low, high)
    scaled = x / scale
    rounded = straight_through(scaled, torch.round(scaled.detach()))
    return dequantize(torch.clamp(rounded + zero, low, high), scale, zero)


def straight_through(x: Tensor, value: Tensor) -> Tensor:
    """Return `value`, with gradients going to `x` as if it had been that.

    >>> x = torch.tensor([0.4], requires_grad=True)
    >>> straight_through(x, torch.tensor([2.0])).backward()
    >>> x.grad
    tensor([1.])
    """
    result: Tensor = _StraightThrough.apply(x, value)  # type: ignore[no-untyped-call]
    return result


def gapless(x: Tensor) -> bool:
    """Tell whether a tensor fills its memory, in the usual order of dimensions or with channels last.

    >>> images = torch.zeros(2, 3, 4, 4)
    >>> gapless(images), gapless(images.to(memory_format=torch.channels_last)), gapless(images[:, :2])
    (True, True, False)
    """
    return x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))


CHUNK = 2**16
"""Elements that are taken through all the steps of rounding while they are in the processor's cache."""


def snap_(x: Tensor, scale: Tensor, zero: Tensor, low: int, high: int) -> Tensor:
    """Move a tensor without gaps to the grid in place, bit for bit as `quantize` and `dequantize` would; return it.

    >>> snap_(torch.tensor([0.26, 5.0]), torch.tensor(0.5), torch.tensor(0.0), -7, 7)
    tensor([0.5000, 3.5000])
    """
    centred = not bool(zero.any())
    parts = torch.split(x.as_strided((x.numel(),), (1,)), CHUNK) if scale.dim() == 0 else (x,)
    for part in parts:
        part.div_(scale).round_()
        if centred:
            part.clamp_(low, high)
        else:
            part.add_(zero).clamp_(low, high).sub_(zero)
        part.mul_(scale)
    return x


class _StraightThrough(torch.autograd.Function):
    """The second argument, with the gradient of the first."""

    @staticmethod
    def forward(x: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def quantize_tensor(x: Tensor, spec: QuantSpec) -> Tensor:
    """Return `x` on the grid that its own smallest and largest entries span.

    >>> quantize_tensor(torch.tensor([-3.0, 1.4, 3.0]), QuantSpec(bits=2))
    tensor([-3.,  0.,  3.])
    """
    if spec.bits == FLOAT:
        return x
    low, high = min_max(x.detach(), spec.axis)
    return fake_quantize(x, *make_grid(low, high, spec))
