"""What an epoch takes, in spite of what else the machine does."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

LONGEST = 10
"""Steps that one step may count as: what took longer was a process put to sleep."""


class EpochTime(NamedTuple):
    """Seconds on the clock, and seconds of processor time, which other work on the machine hardly changes."""

    wall: float
    processor: float


class Clock:
    """Times one epoch: `tick` after every step."""

    def __init__(self) -> None:
        self._ticks = [time.perf_counter()]
        self._processor = time.process_time()

    def tick(self) -> None:
        """Note that a step is done."""
        self._ticks.append(time.perf_counter())

    def read(self) -> EpochTime:
        """Return the time so far."""
        return EpochTime(time_running(self._ticks), time.process_time() - self._processor)


def time_running(ticks: Sequence[float]) -> float:
    """Return the time from the first to the last tick without the gaps in which the process was stopped.

    A step that took more than ten times the median counts as ten medians:

    >>> time_running([0.0, 1.0, 2.0, 3.0, 603.0])
    13.0
    """
    gaps = [after - before for before, after in itertools.pairwise(ticks)]
    longest = LONGEST * statistics.median(gaps) if gaps else 0.0
    return math.fsum(min(gap, longest) for gap in gaps)
