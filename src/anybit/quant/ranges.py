"""Where the ranges of activations come from: batch norm, the user, or calibration data."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anybit.errors import DataError, SpecError
from anybit.quant.capture import call_arguments
from anybit.quant.moments import Moments
from anybit.quant.points import ActivationPoint, Observer
from anybit.rounding.clip import mse_from_histogram, percentile_from_histogram
from anybit.spec import NARROWEST, QuantSpec, Range

PERCENTILE = 99.99
"""How much of a tensor the percentile method covers, by default."""

CLIPPED_WIDTHS = tuple(range(NARROWEST, 9))
"""Widths for which clipping can be worth it; wider grids cover all values."""


def from_moments(moments: Moments) -> Range:
    """Return the one interval that covers every channel's."""
    return Range(float(moments.low.min()), float(moments.high.max()), moments.source)


class MinMax(Observer):
    """The smallest and the largest value seen."""

    name = "min-max"

    def __init__(self) -> None:
        self.low = float("inf")
        self.high = -float("inf")

    def update(self, x: Tensor) -> None:
        """Look at one batch."""
        low, high = (float(v) for v in torch.aminmax(x.detach()))
        self.low, self.high = min(self.low, low), max(self.high, high)

    def range(self) -> Range:
        """Return the range that holds everything seen."""
        if self.low > self.high:
            raise DataError("calibration saw no data; the loader yields at least one batch")
        return Range(self.low, self.high, f"calibration, {self.name}")


class Histogram(MinMax):
    """Counts over bins that grow with the values seen: twice as wide, half as many, whenever they do not reach."""

    bins = 4096

    def __init__(self) -> None:
        super().__init__()
        self.reach = 0.0
        self.counts = torch.zeros(self.bins, dtype=torch.float64)

    def update(self, x: Tensor) -> None:
        """Look at one batch."""
        super().update(x)
        most = max(-self.low, self.high)
        if self.reach == 0.0:
            self.reach = most
        while self.reach < most:
            self.reach *= 2
            pairs = self.counts.view(-1, 2).sum(1)
            self.counts = torch.nn.functional.pad(pairs, (self.bins // 4, self.bins // 4))
        if self.reach > 0.0:
            values = x.detach().flatten().float().cpu()
            self.counts += torch.histc(values, self.bins, -self.reach, self.reach).double()

    @property
    def edges(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The borders of the bins."""
        return np.linspace(-self.reach, self.reach, self.bins + 1)


class Percentile(Histogram):
    """The interval that leaves a hundredth of a percent of the values outside, split between both ends."""

    name = "percentile"

    def range(self) -> Range:
        """Return the range that holds all but the outermost values."""
        whole = super().range()
        if self.reach == 0.0:
            return whole
        low, high = percentile_from_histogram(self.counts.numpy(), self.edges, PERCENTILE)
        low, high = max(low, self.low), min(high, self.high)
        return Range(min(low, high), high, f"calibration, {self.name} {PERCENTILE:g}")


class MeanSquare(Histogram):
    """For each width the interval with the smallest squared error; from 9 bits on everything seen."""

    name = "mse"

    def ranges(self, spec: QuantSpec) -> dict[int, Range]:
        """Return the range for each width."""
        ranges = super().ranges(spec)
        if self.reach == 0.0:
            return ranges
        source = f"calibration, {self.name}"
        for bits in CLIPPED_WIDTHS:
            grid = QuantSpec(bits, spec.symmetric, signed=self.low < 0)
            low, high = mse_from_histogram(self.counts.numpy(), self.edges, grid)
            ranges[bits] = Range(max(float(low), self.low), min(float(high), self.high), source)
        return ranges


OBSERVERS: dict[str, type[Observer]] = {"min-max": MinMax, "percentile": Percentile, "mse": MeanSquare}
"""The ways to set a range from data: add one here."""


def calibrate(
    network: nn.Module, points: list[ActivationPoint], loader: Iterable[Any], *, method: str = "min-max"
) -> None:
    """Run the loader through `network` and give every point the range that its observer proposes.

    The loader yields inputs, or pairs of inputs and targets; inputs are a tensor, a tuple of them, or a dict by name.
    If anything fails no range is changed. In a terminal a progress bar shows the time left.
    """
    if method not in OBSERVERS:
        raise SpecError(f"a calibration method is one of {', '.join(OBSERVERS)}; got {method!r}")
    for point in points:
        point.observer = OBSERVERS[method]()
    try:
        with torch.no_grad():
            for batch in _shown(loader):
                args, kwargs = call_arguments(batch[0] if isinstance(batch, tuple | list) else batch)
                network(*args, **kwargs)
        found = [point.observer.ranges(point.spec) for point in points if point.observer is not None]
    finally:
        for point in points:
            point.observer = None
    for point, ranges in zip(points, found, strict=True):
        for bits, value in ranges.items():
            point.set_range(value, bits=bits)


def _shown(loader: Iterable[Any]) -> Iterable[Any]:
    """Return the loader with a progress bar around it, where somebody can see it."""
    if not sys.stderr.isatty():
        return loader
    from rich.console import Console
    from rich.progress import track

    total = len(loader) if isinstance(loader, Sized) else None
    return track(loader, "calibrating", total=total, console=Console(stderr=True), transient=True)


def join(points: list[ActivationPoint]) -> None:
    """Give points that meet in a concatenation one range, so that they are on one grid there."""
    for bits in {bits for point in points for bits in point.own_widths}:
        ranges = [point.range_at(bits) for point in points]
        known = [value for value in ranges if value is not None]
        if len(known) == len(points):
            sources = " | ".join(dict.fromkeys(value.source for value in known))
            joined = Range(min(r.low for r in known), max(r.high for r in known), sources)
            for point in points:
                point.set_range(joined, bits=bits)
