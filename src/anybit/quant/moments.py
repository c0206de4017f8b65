"""Ranges without data: mean, variance and interval of each tensor, channel by channel, from batch norm alone.

A batch norm says that its output has mean β and standard deviation |γ| per channel, so `β ± nγ` holds nearly
all of it. From there the interval and the first two moments are carried through the operators that follow: a
function of one value is applied to the bell curve itself, sums add means and variances, a concatenation lines
channels up. Where nothing is known the answer is `None`, and calibration data must tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from anybit.quant.capture import module_path
from anybit.quant.fold import BatchNorm
from anybit.quant.ops import (
    AVERAGING,
    BOUNDED,
    CHOOSING,
    ELEMENTWISE,
    PADDING,
    RESHAPING,
    SCALAR_ARITHMETIC,
    TRANSPOSED_CONVOLUTIONS,
    WEIGHTED,
    attribute,
    groups_of,
)

aten = torch.ops.aten

CHANNEL_KEEPING = (CHOOSING | PADDING) - {
    aten.select.int,
    aten.index_select.default,
    aten.roll.default,
    aten.flip.default,
    aten.repeat.default,
    aten.repeat_interleave.self_int,
    aten.pixel_shuffle.default,
    aten.pixel_unshuffle.default,
    aten.channel_shuffle.default,
}
"""Operators that move no value to another channel, as long as the number of channels stays the same."""

ESTIMATED = " (estimated)"
"""Added to where a range came from when it was carried through a layer without batch norm."""

STEPS = 513
"""Points on each channel's bell curve: enough for moments of a kinked function to three digits."""


@dataclass(frozen=True)
class Moments:
    """What is known of a tensor without data, one entry per channel (its dimension 1)."""

    mean: Tensor
    var: Tensor
    low: Tensor
    high: Tensor
    source: str


def gaussian(mean: Tensor, std: Tensor, *, n: float, source: str) -> Moments:
    """Return the moments of a normal distribution and the interval of n standard deviations around its mean.

    >>> gaussian(torch.tensor([1.0]), torch.tensor([0.5]), n=6, source="bn").high.tolist()
    [4.0]
    """
    mean, std = mean.double(), std.abs().double()
    return Moments(mean, std**2, mean - n * std, mean + n * std, source)


def through_function(x: Moments, function: Callable[[Tensor], Tensor]) -> Moments:
    """Return the moments of `function(x)`, taking `x` as normal inside its interval.

    The rectified normal has mean `1/sqrt(2π)` and second moment `1/2`:

    >>> x = gaussian(torch.zeros(1), torch.ones(1), n=6, source="bn")
    >>> y = through_function(x, torch.relu)
    >>> [round(float(v), 3) for v in (y.mean, y.var, y.low, y.high)]
    [0.399, 0.341, 0.0, 6.0]
    """
    t = torch.linspace(0, 1, STEPS, dtype=x.mean.dtype)[:, None]
    grid = x.low + (x.high - x.low) * t
    std = x.var.sqrt().clamp(min=torch.finfo(x.mean.dtype).tiny)
    density = torch.exp(-0.5 * ((grid - x.mean) / std) ** 2)
    # A constant channel has no width: every grid point is the same value, and so is every weight.
    density = torch.where(x.high > x.low, density, torch.ones_like(density))
    density = torch.where(x.mean.isnan(), x.mean, density)
    density = density / density.sum(0)
    values = function(grid)
    mean = (density * values).sum(0)
    var = (density * (values - mean) ** 2).sum(0)
    return Moments(mean, var, values.amin(0), values.amax(0), x.source)


def add(x: Moments, y: Moments) -> Moments:
    """Return the moments of an independent sum: means and variances add.

    Above and below the mean the interval grows as the standard deviations of a sum do, by the root of the squares.
    For two normal tensors that is n standard deviations of the sum; for a rectified one, whose upper tail is longer
    than its variance says, it still covers that tail.

    >>> one = gaussian(torch.tensor([1.0]), torch.tensor([3.0]), n=2, source="a")
    >>> two = gaussian(torch.tensor([0.0]), torch.tensor([4.0]), n=2, source="b")
    >>> s = add(one, two)
    >>> float(s.low), float(s.high), s.source
    (-9.0, 11.0, 'a, b')
    """
    mean, var = x.mean + y.mean, x.var + y.var
    low = mean - torch.hypot(x.mean - x.low, y.mean - y.low)
    high = mean + torch.hypot(x.high - x.mean, y.high - y.mean)
    # Where only intervals are known they add up as they are.
    low, high = torch.where(mean.isnan(), x.low + y.low, low), torch.where(mean.isnan(), x.high + y.high, high)
    return Moments(mean, var, low, high, _sources(x, y))


def _sources(x: Moments, y: Moments) -> str:
    return ", ".join(dict.fromkeys([*x.source.split(", "), *y.source.split(", ")]))


def concatenate(parts: list[Moments]) -> Moments:
    """Return the moments of tensors joined along their channels."""
    columns = [torch.cat([getattr(part, name) for part in parts]) for name in ("mean", "var", "low", "high")]
    source = " | ".join(dict.fromkeys(part.source for part in parts))
    return Moments(columns[0], columns[1], columns[2], columns[3], source)


def multiply(x: Moments, y: Moments) -> Moments:
    """Return the moments of an independent product.

    >>> half = gaussian(torch.tensor([0.5]), torch.tensor([0.0]), n=6, source="a")
    >>> two = gaussian(torch.tensor([2.0]), torch.tensor([1.0]), n=2, source="a")
    >>> p = multiply(half, two)
    >>> [float(v) for v in (p.mean, p.var, p.low, p.high)]
    [1.0, 0.25, 0.0, 2.0]
    """
    corners = torch.stack([x.low * y.low, x.low * y.high, x.high * y.low, x.high * y.high])
    var = x.var * y.var + x.var * y.mean**2 + y.var * x.mean**2
    return Moments(x.mean * y.mean, var, corners.amin(0), corners.amax(0), _sources(x, y))


def within(low: float, high: float, source: str) -> Moments:
    """Return what is known of a tensor that stays inside an interval: nothing else, so mean and variance are NaN."""
    nan = torch.full((1,), math.nan, dtype=torch.float64)
    return Moments(nan, nan, torch.full_like(nan, low), torch.full_like(nan, high), source)


def through_layer(
    x: Moments, weight: Tensor, bias: Tensor | None, *, n: float, groups: int = 1, transposed: bool = False
) -> Moments:
    """Return the moments of a convolution's or linear layer's output where no batch norm follows.

    Channels are taken as independent, so the interval grows as in a sum of them, by the root of the squares, and is at
    least n standard deviations to either side. The taps of one channel's kernel see neighbours, which are alike, so
    their standard deviations add: the wider of the two extremes. The interval never exceeds what the input's allows.

    >>> x = gaussian(torch.tensor([1.0, 0.0]), torch.tensor([3.0, 4.0]), n=2, source="a")
    >>> y = through_layer(x, torch.ones(1, 2), None, n=2)
    >>> [float(v) for v in (y.mean, y.var, y.low, y.high)]
    [1.0, 25.0, -9.0, 11.0]
    """
    kernel = weight.detach().double().flatten(2) if weight.dim() > 2 else weight.detach().double().unsqueeze(2)
    if transposed:  # (in, out per group, taps) to (out, in per group, taps)
        ins, outs, taps = kernel.shape
        kernel = kernel.view(groups, ins // groups, outs, taps).transpose(1, 2).reshape(groups * outs, -1, taps)
    outs, ins, _ = kernel.shape
    index = torch.arange(outs) // (outs // groups)

    def inputs(values: Tensor) -> Tensor:
        return values.expand(groups * ins).view(groups, ins)[index]

    positive, negative = kernel.clamp(min=0).sum(2), kernel.clamp(max=0).sum(2)
    shift = torch.zeros(outs, dtype=torch.float64) if bias is None else bias.detach().double()
    mean = ((positive + negative) * inputs(x.mean)).sum(1) + shift
    var = ((positive - negative) ** 2 * inputs(x.var)).sum(1)
    below, above = inputs(x.mean - x.low), inputs(x.high - x.mean)
    # A rectified input has a long tail above and next to none below, which its variance does not tell apart.
    up = torch.maximum((positive * above - negative * below).square().sum(1).sqrt(), n * var.sqrt())
    down = torch.maximum((positive * below - negative * above).square().sum(1).sqrt(), n * var.sqrt())
    low, high = inputs(x.low).clamp(max=0), inputs(x.high).clamp(min=0)  # the border is padded with zeros
    lowest, highest = (positive * low + negative * high).sum(1), (positive * high + negative * low).sum(1)
    return Moments(
        mean,
        var,
        torch.maximum(mean - down, lowest + shift),
        torch.minimum(mean + up, highest + shift),
        x.source if x.source.endswith(ESTIMATED) else x.source + ESTIMATED,
    )


def propagate(module: fx.GraphModule, known: dict[fx.Node, BatchNorm], *, n: float = 6.0) -> dict[fx.Node, Moments]:
    """Return the moments of every node that some batch norm reaches, and the interval of what is bounded by itself."""
    moments: dict[fx.Node, Moments] = {}
    for node in module.graph.nodes:
        if node in known:
            norm = known[node]
            source = f"batch norm {node.meta.get('anybit_after') or module_path(node)}"
            moments[node] = gaussian(norm.beta.detach(), norm.gamma.detach(), n=n, source=source)
        elif (result := _apply(module, node, moments, n)) is not None:
            moments[node] = result
        elif (bounds := _bounds(node)) is not None:
            name = str(node.target).split(".")[1].lstrip("_")
            moments[node] = within(*bounds, f"{name} stays inside")
    return moments


def _bounds(node: fx.Node) -> tuple[float, float] | None:
    """Return the interval that a function keeps its output in, whatever comes in."""
    if node.target in (aten.hardtanh.default, aten.clamp.default):
        given: list[Any] = list(node.args[1:3])
        given += ([-1.0, 1.0] if node.target is aten.hardtanh.default else [None, None])[len(given) :]
        low, high = given
        return (float(low), float(high)) if isinstance(low, int | float) and isinstance(high, int | float) else None
    return BOUNDED.get(node.target)


def _apply(module: fx.GraphModule, node: fx.Node, moments: dict[fx.Node, Moments], n: float) -> Moments | None:
    if node.op != "call_function" or not node.args:
        return None
    if node.target is aten.cat.default:
        return _cat(node, moments)
    first = node.args[0]
    x = moments.get(first) if isinstance(first, fx.Node) else None
    if x is None:
        return None
    target: Any = node.target
    plain = not any(isinstance(arg, fx.Node) for arg in node.args[1:])
    if target in ELEMENTWISE or (target in SCALAR_ARITHMETIC and plain):
        return through_function(x, lambda grid: target(grid, *node.args[1:], **node.kwargs))
    if target in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor):
        return _of_two(node, x, moments)
    if target in WEIGHTED:
        return _layer(module, node, x, n)
    if (target in AVERAGING or target in CHANNEL_KEEPING) and _keeps_channels(node):
        return x
    if target in RESHAPING:
        return _reshaped(node, x)
    return None


def _of_two(node: fx.Node, x: Moments, moments: dict[fx.Node, Moments]) -> Moments | None:
    other = node.args[1]
    y = moments.get(other) if isinstance(other, fx.Node) else None
    if y is None or node.kwargs.get("alpha", 1) != 1 or not _same_channels(node):
        return None
    if other is node.args[0]:  # a tensor with itself is a function of one value
        return through_function(x, lambda grid: node.target(grid, grid))  # type: ignore[operator]
    if node.target is aten.sub.Tensor:
        y = replace(y, mean=-y.mean, low=-y.high, high=-y.low)
    return multiply(x, y) if node.target is aten.mul.Tensor else add(x, y)


def _same_channels(node: fx.Node) -> bool:
    """Tell whether both operands have their channels in dimension 1, and the same number of them."""
    shapes = [arg.meta["val"].shape for arg in node.args[:2]]  # type: ignore[union-attr]
    return len(shapes[0]) == len(shapes[1]) > 1 and shapes[0][1] == shapes[1][1]


def _layer(module: fx.GraphModule, node: fx.Node, x: Moments, n: float) -> Moments | None:
    """Follow a layer without batch norm, where the input's mean is known and its channels are in dimension 1."""
    _, weight, *rest = node.args
    bias = rest[0] if rest else None
    constants = [arg for arg in (weight, bias) if isinstance(arg, fx.Node)]
    dims = node.args[0].meta["val"].dim()  # type: ignore[union-attr]
    if any(arg.op != "get_attr" for arg in constants) or bool(x.mean.isnan().any()):
        return None
    if node.target is aten.linear.default and dims != 2:
        return None
    transposed = node.target in TRANSPOSED_CONVOLUTIONS
    return through_layer(
        x,
        attribute(module, constants[0]),
        attribute(module, constants[1]) if len(constants) > 1 else None,
        n=n,
        groups=groups_of(node),
        transposed=transposed,
    )


def _cat(node: fx.Node, moments: dict[fx.Node, Moments]) -> Moments | None:
    parts = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else 0
    if dim != 1 or not isinstance(parts, list | tuple):
        return None
    found = [moments.get(part) for part in parts if isinstance(part, fx.Node)]
    complete = [part for part in found if part is not None]
    return concatenate(complete) if len(complete) == len(parts) else None


def _keeps_channels(node: fx.Node) -> bool:
    """Tell whether dimension 1 still runs over the same channels."""
    before, after = node.args[0].meta["val"].shape, node.meta["val"].shape  # type: ignore[union-attr]
    if node.target is aten.mean.dim and any(d % len(before) < 2 for d in node.args[1]):  # type: ignore
        return False
    return len(after) > 1 and before[1] == after[1]


def _reshaped(node: fx.Node, x: Moments) -> Moments | None:
    """Follow (batch, channel, ...) to the same, or to (batch, features) with each channel's features together."""
    before, after = node.args[0].meta["val"].shape, node.meta["val"].shape  # type: ignore[union-attr]
    if node.target in (aten.permute.default, aten.transpose.int, aten.expand.default) or len(after) < 2:
        return None
    if before[0] != after[0]:
        return None
    if before[1] == after[1]:
        return x
    if len(after) == 2 and isinstance(after[1], int) and after[1] % x.mean.numel() == 0:
        k = after[1] // x.mean.numel()
        names = ("mean", "var", "low", "high")
        return replace(x, **{name: getattr(x, name).repeat_interleave(k) for name in names})
    return None
