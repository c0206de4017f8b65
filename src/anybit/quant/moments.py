"""Ranges without data: mean, variance and interval of each tensor, channel by channel, from batch norm alone.

A batch norm says that its output has mean β and standard deviation |γ| per channel, so `β ± nγ` holds nearly
all of it. From there the interval and the first two moments are carried through the operators that follow: a
function of one value is applied to the bell curve itself, sums add means and variances, a concatenation lines
channels up. Where nothing is known the answer is `None`, and calibration data must tell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from anybit.quant.capture import module_path
from anybit.quant.fold import BatchNorm
from anybit.quant.ops import AVERAGING, CHOOSING, ELEMENTWISE, RESHAPING, SCALAR_ARITHMETIC

aten = torch.ops.aten

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
    (-9.0, 11.0, 'a + b')
    """
    mean, var = x.mean + y.mean, x.var + y.var
    low = mean - torch.hypot(x.mean - x.low, y.mean - y.low)
    high = mean + torch.hypot(x.high - x.mean, y.high - y.mean)
    source = x.source if x.source == y.source else f"{x.source} + {y.source}"
    return Moments(mean, var, low, high, source)


def concatenate(parts: list[Moments]) -> Moments:
    """Return the moments of tensors joined along their channels."""
    columns = [torch.cat([getattr(part, name) for part in parts]) for name in ("mean", "var", "low", "high")]
    source = " | ".join(dict.fromkeys(part.source for part in parts))
    return Moments(columns[0], columns[1], columns[2], columns[3], source)


def propagate(module: fx.GraphModule, known: dict[fx.Node, BatchNorm], *, n: float = 6.0) -> dict[fx.Node, Moments]:
    """Return the moments of every node that some batch norm reaches."""
    moments: dict[fx.Node, Moments] = {}
    for node in module.graph.nodes:
        if node in known:
            norm = known[node]
            source = f"batch norm {node.meta.get('anybit_after') or module_path(node)}"
            moments[node] = gaussian(norm.beta.detach(), norm.gamma.detach(), n=n, source=source)
        elif (result := _apply(node, moments)) is not None:
            moments[node] = result
    return moments


def _apply(node: fx.Node, moments: dict[fx.Node, Moments]) -> Moments | None:
    if node.op != "call_function" or not node.args:
        return None
    first = node.args[0]
    x = moments.get(first) if isinstance(first, fx.Node) else None
    if node.target is aten.cat.default:
        return _cat(node, moments)
    if x is None:
        return None
    target: Any = node.target
    if target in ELEMENTWISE:
        return through_function(x, lambda grid: target(grid, *node.args[1:], **node.kwargs))
    if target in SCALAR_ARITHMETIC and not any(isinstance(arg, fx.Node) for arg in node.args[1:]):
        return through_function(x, lambda grid: target(grid, *node.args[1:], **node.kwargs))
    if target is aten.add.Tensor:
        y = moments.get(node.args[1]) if isinstance(node.args[1], fx.Node) else None
        if y is None or node.kwargs.get("alpha", 1) != 1 or x.mean.shape != y.mean.shape:
            return None
        return add(x, y)
    if target in AVERAGING and _keeps_channels(node):
        return x
    if target in CHOOSING and _keeps_channels(node):
        return x
    if target in RESHAPING:
        return _reshaped(node, x)
    return None


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
