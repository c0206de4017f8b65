"""Ranges from data: what watches a value over several inputs and then names the range that fits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from anybit.errors import DataError, SpecError
from anybit.plan.clip import mse_from_histogram, percentile_from_histogram
from anybit.plan.grid import make_grid
from anybit.plan.moments import ESTIMATED, certain
from anybit.plan.points import Activation, Plan
from anybit.plan.rows import as_rows
from anybit.spec import FLOAT, NARROWEST, WIDEST, QuantSpec, Range

Array = npt.NDArray[Any]

PERCENTILE = 99.99
"""How much of a tensor the percentile method covers, by default."""

CLIPPED_WIDTHS = tuple(range(NARROWEST, 8))
"""Widths for which clipping is worth it; wider grids cover all values."""
RARE = 0.5
"""At 8 bits values are clipped only if that leaves so much of the squared error: what is rare may be what counts."""


class Observer(ABC):
    """Watches a value over several batches and proposes a range for it."""

    name = "observer"

    @abstractmethod
    def update(self, x: Array) -> None:
        """Look at one batch."""

    @abstractmethod
    def range(self) -> Range:
        """Return the range that fits all batches seen."""

    def ranges(self, point: Activation, rare: float = RARE) -> dict[int, Range]:
        """Return a range per width, 32 standing for all that are not named; by default one for all."""
        return {FLOAT: self.range()}


class MinMax(Observer):
    """The smallest and the largest value seen."""

    name = "min-max"

    def __init__(self) -> None:
        self.low = float("inf")
        self.high = -float("inf")

    def update(self, x: Array) -> None:
        """Look at one batch."""
        if x.size:
            self.low, self.high = min(self.low, float(x.min())), max(self.high, float(x.max()))

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
        self.counts = np.zeros(self.bins)

    def update(self, x: Array) -> None:
        """Look at one batch."""
        super().update(x)
        most = max(-self.low, self.high)
        if self.reach == 0.0:
            self.reach = most
        while self.reach < most < np.inf:
            self.reach *= 2
            self.counts = np.pad(self.counts.reshape(-1, 2).sum(1), self.bins // 4)
        if 0.0 < self.reach < np.inf:
            place = (x.reshape(-1).astype(np.float32, copy=False) + np.float32(self.reach)) * np.float32(
                self.bins / 2 / self.reach
            )
            index = np.clip(place.astype(np.int64), 0, self.bins - 1)
            self.counts += np.bincount(index, minlength=self.bins)

    @property
    def edges(self) -> npt.NDArray[np.float64]:
        """The borders of the bins."""
        return np.linspace(-self.reach, self.reach, self.bins + 1)

    def _inside(self, low: float, high: float, source: str) -> Range:
        """Return an interval without what lies beyond everything seen."""
        low, high = max(low, self.low), min(high, self.high)
        return Range(min(low, high), high, source)  # of values that are all alike, an interval may hold none


class Percentile(Histogram):
    """The interval that leaves a hundredth of a percent of the values outside, split between both ends."""

    name = "percentile"

    def range(self) -> Range:
        """Return the range that holds all but the outermost values."""
        whole = super().range()
        if self.reach == 0.0:
            return whole
        low, high = percentile_from_histogram(self.counts, self.edges, PERCENTILE)
        return self._inside(low, high, f"calibration, {self.name} {PERCENTILE:g}")


class MeanSquare(Histogram):
    """For each width the interval with the smallest squared error; from 8 bits on everything but outliers."""

    name = "mse"

    def ranges(self, point: Activation, rare: float = RARE) -> dict[int, Range]:
        """Return the range for each width."""
        ranges = super().ranges(point)
        if self.reach == 0.0:
            return ranges
        source = f"calibration, {self.name}"
        for bits in CLIPPED_WIDTHS:
            grid = QuantSpec(bits, point.symmetric, signed=self.low < 0)
            ranges[bits] = self._best(grid, source)
        eight = QuantSpec(8, point.symmetric, signed=self.low < 0)
        clipped, whole = self._best(eight, source), ranges[FLOAT]
        if self._error(clipped, eight) < rare * self._error(whole, eight):
            ranges[8] = clipped
        return ranges

    def _best(self, grid: QuantSpec, source: str) -> Range:
        return self._inside(*mse_from_histogram(self.counts, self.edges, grid), source)

    def _error(self, covered: Range, grid: QuantSpec) -> float:
        """Return the squared error of a grid over an interval: what is cut off, and even rounding of the rest."""
        centres = (self.edges[:-1] + self.edges[1:]) / 2
        cut = centres - np.clip(centres, covered.low, covered.high)
        step = float(make_grid(np.float64(covered.low), np.float64(covered.high), grid).scale)
        return float((self.counts * cut**2).sum() + self.counts.sum() * step**2 / 12)


OBSERVERS: dict[str, type[Observer]] = {"min-max": MinMax, "percentile": Percentile, "mse": MeanSquare}
"""The ways to set a range from data: add one here."""


SIGNAL = "signal"
"""Why a value keeps many bits: it is the input of a network for sound or other measurements, or close to it."""


def given(point: Activation) -> bool:
    """Tell whether the user said where a value lies."""
    return bool(point.ranges) and point.ranges[0][1].source == "given by the user"


class Channels(NamedTuple):
    """Where the mean of each input channel of a layer is seen: at a point, along one of its dimensions.

    Of a transposed convolution every output sees one in `stride` taps.
    """

    point: str
    axis: int
    stride: int = 1


class Calibration:
    """Watches the activations of a plan while somebody runs the network."""

    def __init__(
        self,
        plan: Plan,
        method: str,
        *,
        made_up: bool = False,
        only: Container[str] | None = None,
        source: str = "",
        fed: Mapping[str, Channels] | None = None,
    ) -> None:
        """Watch all activations or `only` some; ranges say that they come from `source`, if that is given.

        Those from inputs that are `made_up` say so, and leave room for real ones. `fed` says of biases where the means
        are seen that correct them.
        """
        if method not in OBSERVERS:
            raise SpecError(f"a calibration method is one of {', '.join(OBSERVERS)}; got {method!r}")
        self.made_up, self.source = made_up, source
        wanted = [a for a in plan.activations if a.kind != "input" or not (given(a) or a.because == SIGNAL)]
        wanted = [a for a in wanted if only is None or a.name in only]
        self.plan, self.points = plan, wanted
        self.observers = {a.name: OBSERVERS[method]() for a in wanted}
        self.fed = {bias: where for bias, where in (fed or {}).items() if where.point in self.observers}
        self.sums = dict.fromkeys({(where.point, where.axis) for where in self.fed.values()}, (np.zeros(1), 0))

    def update(self, values: Mapping[str, Array] | Iterable[tuple[str, Array]]) -> None:
        """Look at values by the names of their points."""
        for name, value in dict(values).items():
            self.observers[name].update(value)
            for key in [key for key in self.sums if key[0] == name and value.size]:
                rows, (total, count) = as_rows(value, key[1] % value.ndim), self.sums[key]
                self.sums[key] = total + rows.sum(1, dtype=np.float64), count + rows.shape[1]

    def done(self, rare: float = RARE) -> Plan:
        """Return the plan with the ranges that were found; at 8 bits clipped if that leaves so much of the error."""
        found = {}
        for point in self.points:
            ranges = self.observers[point.name].ranges(point, rare)
            if self.made_up:
                if point.kind == "input":
                    continue
                if not _far_off(point, ranges[FLOAT]):
                    found[point.name] = _reaching(point, ranges[FLOAT])
                    continue
                ranges = roomier(ranges, point)
                if point.ranges and certain(point.ranges[0][1].source):  # and needs no guess
                    ranges[FLOAT] = point.ranges[0][1]
            found[point.name] = tuple((b, replace(r, source=self.source or r.source)) for b, r in ranges.items())
        biases = (b if b.mean is not None else replace(b, mean=self._mean(b.name)) for b in self.plan.biases)
        return replace(self.plan.with_ranges(found), biases=tuple(biases))

    def both(self) -> tuple[Plan, Plan]:
        """Return the plan twice: clipped at 8 bits with care, and wherever that lowers the error of the value itself.

        Which is better shows in the outputs.
        """
        return self.done(), self.done(rare=1.0)

    def _mean(self, bias: str) -> tuple[float, ...] | None:
        """Return the mean of each input channel of a layer, as exact as a few inputs are, if it was seen."""
        if bias not in self.fed:
            return None
        point, axis, stride = self.fed[bias]
        total, count = self.sums[point, axis]
        return tuple(float(f"{mean:.4g}") for mean in total / (count * stride)) if count else None


MADE_UP, LAYER_NORM = "made-up inputs", "layer norm"
ROOM, MUCH_ROOM = 2.0, 8.0
"""How much larger real values may be than those of made-up inputs, where bits are there to spare: a few, or many."""
SPARE = 7
"""From this width on."""
FAR_OFF = 8.0
"""A range without data that is so much larger than any value seen is no use."""


def roomier(ranges: dict[int, Range], point: Activation) -> dict[int, Range]:
    """Return ranges from made-up inputs, with room for what real ones may do.

    A sum that goes below zero may go as far above it, and the other way round: made-up sound has no speech in it.

    >>> seen = {32: Range(-1.0, 2.0, ""), 4: Range(-1.0, 1.0, ""), 8: Range(-1.0, 1.0, "")}
    >>> roomier(seen, Activation("y", "activation"))
    {32: Range(low=-2.0, high=4.0, source='made-up inputs'), 4: Range(low=-1.0, high=1.0, source='made-up inputs')}
    >>> str(roomier(seen, Activation("y", "accumulator"))[32])
    '[-4, 4]'
    >>> str(roomier(seen, Activation("y", "activation", floor=16))[32])
    '[-8, 16]'
    """
    low, high = ranges[FLOAT].low, ranges[FLOAT].high
    if point.kind == "accumulator" and low < 0:
        low, high = min(low, -high), max(-low, high)
    room = MUCH_ROOM if point.floor >= WIDEST else ROOM
    found = {FLOAT: Range(low * room, high * room, MADE_UP)}
    return found | {b: replace(r, source=MADE_UP) for b, r in ranges.items() if b < SPARE}


def _reaching(point: Activation, seen: Range) -> tuple[tuple[int, Range], ...]:
    """Return ranges without data; those of a layer norm reach as far as made-up inputs do, where bits are to spare.

    It fixes the spread over all channels; a few channels may lie far outside, as they do in transformers.
    """

    def reaching(bits: int, known: Range) -> Range:
        if bits < SPARE or not known.source.startswith(LAYER_NORM):
            return known
        return replace(known, low=min(known.low, seen.low), high=max(known.high, seen.high))

    return tuple((bits, reaching(bits, known)) for bits, known in point.ranges)


def _far_off(point: Activation, seen: Range) -> bool:
    """Tell whether made-up inputs say more of a value than what is known without any.

    Intervals that were carried through layers without normalization, or through a division, grow from step to step and
    soon mean nothing.
    """
    if not point.ranges:
        return True
    known = point.ranges[0][1]
    return ESTIMATED in known.source or max(-known.low, known.high) > FAR_OFF * max(-seen.low, seen.high)
