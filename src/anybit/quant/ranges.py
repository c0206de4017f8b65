"""Where the ranges of activations come from: batch norm, the user, or calibration data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from anybit.errors import DataError, SpecError
from anybit.quant.capture import call_arguments
from anybit.quant.moments import Moments
from anybit.quant.points import ActivationPoint, Observer
from anybit.spec import Range


def from_moments(moments: Moments) -> Range:
    """Return the one interval that covers every channel's."""
    return Range(float(moments.low.min()), float(moments.high.max()), moments.source)


class MinMax(Observer):
    """The smallest and the largest value seen."""

    name = "min-max"

    def __init__(self) -> None:
        self.low: float | None = None
        self.high: float | None = None

    def update(self, x: Tensor) -> None:
        """Look at one batch."""
        low, high = (float(v) for v in torch.aminmax(x.detach()))
        self.low = low if self.low is None else min(self.low, low)
        self.high = high if self.high is None else max(self.high, high)

    def range(self) -> Range:
        """Return the range that fits all batches seen."""
        if self.low is None or self.high is None:
            raise DataError("calibration saw no data; the loader yields at least one batch")
        return Range(self.low, self.high, f"calibration, {self.name}")


OBSERVERS: dict[str, type[Observer]] = {"min-max": MinMax}
"""The ways to set a range from data: add one here."""


def calibrate(
    network: nn.Module, points: list[ActivationPoint], loader: Iterable[Any], *, method: str = "min-max"
) -> None:
    """Run the loader through `network` and give every point the range that its observer proposes.

    The loader yields inputs, or pairs of inputs and targets; inputs are a tensor, a tuple of them, or a dict by name.
    If anything fails no range is changed.
    """
    if method not in OBSERVERS:
        raise SpecError(f"a calibration method is one of {', '.join(OBSERVERS)}; got {method!r}")
    for point in points:
        point.observer = OBSERVERS[method]()
    try:
        with torch.no_grad():
            for batch in loader:
                args, kwargs = call_arguments(batch[0] if isinstance(batch, tuple | list) else batch)
                network(*args, **kwargs)
        ranges = [point.observer.range() for point in points if point.observer is not None]
    finally:
        for point in points:
            point.observer = None
    for point, value in zip(points, ranges, strict=True):
        point.set_range(value)
