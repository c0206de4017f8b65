"""Rounding in PyTorch: the plan's own functions, with gradients straight through, and in place where nobody looks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anybit.plan.grid import Grid, dequantize, quantize


def straight_through(x: Tensor, value: Tensor) -> Tensor:
    """Return `value`, with gradients going to `x` as if it had been that.

    >>> x = torch.tensor([0.4], requires_grad=True)
    >>> straight_through(x, torch.tensor([2.0])).backward()
    >>> x.grad
    tensor([1.])
    """
    result: Tensor = _StraightThrough.apply(x, value)  # type: ignore[no-untyped-call]
    return result


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


def fake_quantize(x: Tensor, grid: Grid) -> Tensor:
    """Return `x` moved to the grid, with straight-through gradients inside the range and none outside.

    >>> x = torch.tensor([0.26, 5.0], requires_grad=True)
    >>> y = fake_quantize(x, Grid(torch.tensor(0.5), torch.tensor(0.0), -7, 7))
    >>> y.sum().backward()
    >>> y.tolist(), x.grad.tolist()
    ([0.5, 3.5], [1.0, 0.0])
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return dequantize(quantize(x, grid), grid)  # type: ignore[no-any-return]
    scaled = x / grid.scale
    rounded = straight_through(scaled, torch.round(scaled.detach()))
    return dequantize(torch.clamp(rounded + grid.zero, grid.low, grid.high), grid)  # type: ignore[no-any-return]


def round_through(x: Tensor, grid: Grid, ends: tuple[float, float], *, centred: bool) -> Tensor:
    """Return what `fake_quantize` does, for one scale, in one go: gradients are one where x is between the ends.

    With an end at zero and codes from zero on it is a ReLU and the rounding of its result at once.

    >>> x = torch.tensor([-0.4, 0.26, 5.0], requires_grad=True)
    >>> y = round_through(x, Grid(torch.tensor(0.5), torch.tensor(0.0), 0, 7), (0.0, 3.75), centred=True)
    >>> y.sum().backward()
    >>> y.tolist(), x.grad.tolist()
    ([0.0, 0.5, 3.5], [0.0, 1.0, 0.0])
    """
    result: Tensor = _RoundThrough.apply(x, grid, ends, centred)  # type: ignore[no-untyped-call]
    return result


class _RoundThrough(torch.autograd.Function):
    """Rounding a cacheful at a time, and the gradient of a clamp."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Grid, ends: tuple[float, float], centred: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.ends = ends
        x = x if gapless(x) else x.contiguous()
        return snap_(x, grid, centred=centred, out=torch.empty_like(x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        return torch.ops.aten.hardtanh_backward(grads[0], x, *ctx.ends), None, None, None


CHUNK = 2**16
"""Elements that are taken through all the steps of rounding while they are in the processor's cache."""


def snap_(x: Tensor, grid: Grid, *, centred: bool, out: Tensor | None = None) -> Tensor:
    """Move a tensor without gaps to a grid with one scale, bit for bit as `fake_quantize` would; return it.

    It happens in place, or into `out`, which lies in memory as `x` does.

    >>> snap_(torch.tensor([0.26, 5.0]), Grid(torch.tensor(0.5), torch.tensor(0.0), -7, 7), centred=True)
    tensor([0.5000, 3.5000])
    """
    out = x if out is None else out
    flat = [t.as_strided((t.numel(),), (1,)) if x.device.type == "cpu" else t for t in (x, out)]
    pieces = [torch.split(t, CHUNK) if x.device.type == "cpu" else (t,) for t in flat]
    for source, part in zip(*pieces, strict=True):
        torch.div(source, grid.scale, out=part).round_()
        if centred:
            part.clamp_(grid.low, grid.high)
        else:
            part.add_(grid.zero).clamp_(grid.low, grid.high).sub_(grid.zero)
        part.mul_(grid.scale)
    return out


def gapless(x: Tensor) -> bool:
    """Tell whether a tensor fills its memory, in the usual order of dimensions or with channels last.

    >>> images = torch.zeros(2, 3, 4, 4)
    >>> gapless(images), gapless(images.to(memory_format=torch.channels_last)), gapless(images[:, :2])
    (True, True, False)
    """
    return x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))
