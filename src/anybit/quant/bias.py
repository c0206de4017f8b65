"""Bias correction: rounding a weight moves the mean of a layer's output, and the bias takes that back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anybit.quant.points import WeightPoint
from anybit.rounding.bias import bias_shift
from anybit.rounding.rows import BLOCK
from anybit.spec import FLOAT, QuantSpec

KEPT = 64
"""Widths whose shifts are remembered: a few numbers each."""


class CorrectedBias(nn.Module):
    """The bias of a layer, less what the rounding of its weight adds to the mean of its output.

    The mean of the layer's input comes from batch norm, so that no data is needed.
    """

    def __init__(self, point: WeightPoint, bias: nn.Parameter, mean: Tensor, *, groups: int, transposed: bool) -> None:
        super().__init__()
        self.__dict__["point"] = point  # a reference, not a submodule: the point has a place of its own
        self.master = bias
        self.mean = mean.detach().cpu().float()
        self.groups = groups
        self.transposed = transposed
        self._shifts: OrderedDict[tuple[QuantSpec, int], Tensor] = OrderedDict()

    def shift(self) -> Tensor | None:
        """Return the change of the output's mean at the weight's current width."""
        point: WeightPoint = self.__dict__["point"]
        if point.bits == FLOAT:
            return None
        key = (point.spec, point.master._version)
        if key not in self._shifts:
            self._shifts[key] = self._shift_of(point.quantized(), point.master.detach())
            while len(self._shifts) > KEPT:
                self._shifts.popitem(last=False)
        return self._shifts[key]

    def _shift_of(self, rounded: Tensor, exact: Tensor) -> Tensor:
        # Outputs are independent of each other, so that the error of a few at a time stays in the cache.
        alone = self.groups == 1 and not self.transposed
        rows = max(1, BLOCK // max(1, exact[0].numel())) if alone else len(exact)
        shifts = [
            bias_shift((a - b).float().cpu().numpy(), self.mean.numpy(), groups=self.groups, transposed=self.transposed)
            for a, b in zip(torch.split(rounded, rows), torch.split(exact, rows), strict=True)
        ]
        return torch.from_numpy(np.concatenate(shifts)).to(self.master)

    def forward(self) -> Tensor:
        """Return the bias that goes with the weight's current width."""
        shift = self.shift()
        return self.master if shift is None else self.master - shift

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> CorrectedBias:
        # The module moves to another device or dtype.
        self._shifts.clear()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self
