"""Putting a weight on its grid, by the rule that the user chose: how to round, and whether to clip."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anybit.quant.uniform import fake_quantize, make_grid, min_max
from anybit.rounding.clip import mse_range
from anybit.rounding.grid import dequantize
from anybit.rounding.grid import make_grid as make_numpy_grid
from anybit.rounding.squant import squant
from anybit.spec import FLOAT, QuantSpec, Range


@dataclass(frozen=True)
class Rule:
    """How a weight becomes codes: to the nearest, or keeping sums; over all of its range, or clipped.

    `channels` is the dimension that runs over output channels and `groups` those of the convolution, which
    sum-preserving rounding needs to know.
    """

    sums: bool = False
    clip: bool = False
    channels: int = 0
    groups: int = 1

    @property
    def plain(self) -> bool:
        """Whether this is nearest rounding over the whole range."""
        return not (self.sums or self.clip)


def weight_limits(weight: Tensor, spec: QuantSpec, rule: Rule) -> tuple[Tensor, Tensor]:
    """Return the ends of a weight's grid, per tensor or per channel: all entries, or what clipping leaves."""
    if not rule.clip or spec.bits == FLOAT:
        return min_max(weight, spec.axis)
    low, high = mse_range(weight.cpu().float().numpy(), spec)
    return torch.as_tensor(low).to(weight), torch.as_tensor(high).to(weight)


def weight_range(limits: tuple[Tensor, Tensor], spec: QuantSpec, rule: Rule) -> Range:
    """Return the interval that a weight's grid covers, over all channels."""
    low, high = limits
    clipped = rule.clip and spec.bits != FLOAT
    return Range(float(low.min()), float(high.max()), "weights, clipped" if clipped else "weights")


def quantized_weight(weight: Tensor, limits: tuple[Tensor, Tensor], spec: QuantSpec, rule: Rule) -> Tensor:
    """Return a weight on the grid with these ends."""
    low, high = limits
    if not rule.sums:
        return fake_quantize(weight, *make_grid(low, high, spec))
    grid = make_numpy_grid(low.cpu().float().numpy(), high.cpu().float().numpy(), spec)
    codes = squant(weight.cpu().float().numpy(), *grid, axis=rule.channels, groups=rule.groups)
    return torch.from_numpy(dequantize(codes, grid.scale, grid.zero, out=codes)).to(weight)
