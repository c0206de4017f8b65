"""What stands in a simulated network in place of weights, activations and biases: it executes a plan, no more.

While a network is trained (`net.train()`) its weights change with every step, so their grids follow them
live: the plan's own functions, on the device, with gradients through them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anybit.plan import points as plan
from anybit.plan.codes import RoundedBias, limits
from anybit.plan.grid import Grid, bias_codes, bias_units, fits, mean_shift, min_max, weight_grid
from anybit.plan.observe import Calibration
from anybit.simulate.rounding import fake_quantize, gapless, round_through, snap_, straight_through
from anybit.spec import FLOAT, Bits


def wide(x: Tensor) -> Tensor:
    """Return a tensor in float32, in which everything about widths is computed."""
    return x if x.dtype == torch.float32 else x.float()


def on_device(grid: Grid, device: torch.device) -> Grid:
    """Return a grid of numpy arrays as one of tensors."""
    scale, zero = (torch.from_numpy(np.asarray(v, np.float32)).to(device) for v in grid[:2])
    return Grid(scale, zero, grid.low, grid.high)


class Weight(nn.Module):
    """A weight: the master in floating point, and what the plan makes of it at the current width."""

    def __init__(self, point: plan.Weight, weight: Tensor) -> None:
        super().__init__()
        self.point = point
        self.master = nn.Parameter(weight.detach().clone())
        self.bits = FLOAT
        self.fitted: Bits | None = None
        """The pair of widths whose own rounding `value` has."""
        self.stretches = False
        """Whether gradients reach a live grid's own ends too, so that training can pull in a weight that is alone far
        out."""
        self.value: Tensor | None = None
        """The rounded weight, while it does not follow the master live."""

    def forward(self) -> Tensor:
        """Return the weight at the current width; with gradients on, straight through to the master."""
        if self.bits == FLOAT:
            return self.master
        if self.training:
            return self.live()
        gradients = torch.is_grad_enabled() and self.master.requires_grad
        assert self.value is not None
        return straight_through(self.master, self.value) if gradients else self.value

    def live(self) -> Tensor:
        """Round the weight as it is now, with gradients inside the grid."""
        if self.point.sums:
            from anybit.plan.codes import encode

            codes = encode(wide(self.master.detach()).cpu().numpy(), self.point, self.bits)
            return straight_through(self.master, torch.from_numpy(codes.dequantized()).to(self.master))
        return fake_quantize(wide(self.master), self.grid()).to(self.master.dtype)

    def grid(self) -> Grid:
        """Return the grid of the weight as it is now, on its device."""
        master = wide(self.master if self.stretches else self.master.detach())
        spec = self.point.spec(self.bits)
        if not self.point.clip:
            low, high = min_max(master, spec.axis)
        else:
            ends = limits(master.detach().cpu().numpy(), self.point, self.bits)
            low, high = (torch.from_numpy(np.asarray(end)).to(master.device) for end in ends)
        return weight_grid(low, high, spec)


class Activation(nn.Module):
    """A tensor on its way into a product. Without a grid it is handed on as it is."""

    def __init__(self, point: plan.Activation, *, fresh: bool) -> None:
        super().__init__()
        self.point = point
        self.fresh = fresh
        """Whether the tensor that comes in belongs to nobody else, and may be overwritten."""
        self.rectifies = False
        """Whether the tensor that comes in has yet to go through a ReLU."""
        self.given: Grid | None = None
        self._placed: Grid | None = None
        """The grid as it was given, and on the device, once something has come in."""
        self.ends = (0.0, 0.0)
        """Between which values of `x` gradients go through: half a bin beyond the grid."""
        self.bits = FLOAT
        self.centred = True
        self.calibration: Calibration | None = None

    def set_grid(self, grid: Grid | None, bits: int) -> None:
        """Put what comes in on this grid, given in numpy, from now on."""
        if grid is not self.given or bits != self.bits:
            self.given, self._placed, self.bits = grid, None, bits

    def grid(self, device: torch.device) -> Grid | None:
        """Return the grid where it is needed."""
        grid = self.given
        if grid is not None and (self._placed is None or self._placed.scale.device != device):
            self._placed = on_device(grid, device)
            self.centred = not np.any(grid.zero)  # asking the device would mean to wait for it
            low, high = (float((end - grid.zero) * grid.scale) for end in (grid.low - 0.5, grid.high + 0.5))
            self.ends = (0.0 if self.rectifies else low, high)
        return self._placed

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` on the grid, or untouched."""
        if self.calibration is not None:
            seen = torch.relu(x) if self.rectifies else x
            self.calibration.update({self.point.name: wide(seen.detach()).cpu().numpy()})
        grid = self.grid(x.device)
        if grid is None:
            return torch.relu(x) if self.rectifies else x
        if self.rectifies and not (self.centred and grid.low == 0):
            x = torch.relu(x)
        if x.dtype != torch.float32:
            return round_through(x.float(), grid, self.ends, centred=self.centred).to(x.dtype)
        if self.fresh and not torch.is_grad_enabled() and gapless(x):
            return snap_(x, grid, centred=self.centred)
        return round_through(x, grid, self.ends, centred=self.centred)


class Bias(nn.Module):
    """A layer's bias: corrected and in whole units of weight times input, as far as the widths ask for it."""

    def __init__(self, point: plan.Bias, bias: nn.Parameter, weight: Weight, source: Activation | None) -> None:
        super().__init__()
        self.point = point
        self.master = bias
        self.__dict__["weight"], self.__dict__["source"] = weight, source  # they have places of their own
        self.given: RoundedBias | None = None
        self.value: Tensor | None = None

    def set_value(self, found: RoundedBias) -> None:
        """Add this from now on, while it does not follow the weight live."""
        if self.value is None or found is not self.given:
            self.given, self.value = found, torch.from_numpy(found.values).to(self.master)

    def forward(self) -> Tensor:
        """Return the bias that goes with the current widths; gradients go straight through."""
        weight: Weight = self.__dict__["weight"]
        if weight.bits == FLOAT:
            return self.master
        value = self.live() if self.training else self.value
        assert value is not None
        gradients = torch.is_grad_enabled() and self.master.requires_grad
        return straight_through(self.master, value) if gradients else value

    @torch.no_grad()
    def live(self) -> Tensor:
        """Return what the plan would make of bias and weight as they are now."""
        weight: Weight = self.__dict__["weight"]
        source: Activation | None = self.__dict__["source"]
        bias, how = wide(self.master), weight.point
        if self.point.mean is not None:
            mean = torch.tensor(self.point.mean, dtype=torch.float32, device=bias.device)
            error = wide(weight.live()) - wide(weight.master)
            bias = bias - mean_shift(error, mean, channels=how.channels, groups=how.groups)
        grid = None if source is None else source.grid(bias.device)
        if source is None or grid is None or max(source.bits, weight.bits) > 8:
            return bias.to(self.master.dtype)
        unit = bias_units(grid.scale, weight.grid().scale, bias.numel())
        codes = bias_codes(bias, unit)
        return torch.where(fits(codes), codes * unit, bias).to(self.master.dtype)


def executors(body: nn.Module) -> dict[str, Any]:
    """Return the modules that execute a plan, by the name of their point."""
    return {m.point.name: m for m in body.modules() if isinstance(m, Weight | Activation | Bias)}
