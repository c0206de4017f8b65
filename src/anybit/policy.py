"""Choosing a width from what the machine says: battery, power source, memory, time per run, or a function.

    policy = battery(Step(20, Bits(4, 4)), Step(50, Bits(8, 8)))
    chooser = Chooser(policy, margin=3)
    bits = chooser.choose(read_machine())

A policy is a function from a `Reading` to `Bits`; nothing in here knows a network. `Chooser` adds hysteresis, so
that a battery that hovers at 20% does not make the width flap.
"""

from __future__ import annotations

import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from anybit.errors import MissingDependency, SpecError
from anybit.spec import Bits

FULL = Bits()


@dataclass(frozen=True)
class Reading:
    """What the machine says now. A desktop or a server has no battery: `percent` is `None`, and it is on mains."""

    percent: float | None = None
    on_mains: bool = True
    free_bytes: int | None = None


Policy = Callable[[Reading], Bits]


def read_machine() -> Reading:
    """Return what psutil knows about this machine.

    Raises:
        MissingDependency: psutil is not installed.
    """
    try:
        psutil = importlib.import_module("psutil")
    except ModuleNotFoundError as error:
        raise MissingDependency("psutil", "policy", "reading battery and memory") from error
    sensors = getattr(psutil, "sensors_battery", None)  # not there on systems without such a thing
    battery = sensors() if sensors is not None else None
    free = int(psutil.virtual_memory().available)
    if battery is None:
        return Reading(free_bytes=free)
    # On some systems nobody knows whether the cable is in: then it counts as out, the careful guess.
    return Reading(float(battery.percent), bool(battery.power_plugged), free)


@dataclass(frozen=True, order=True)
class Step:
    """Below `percent` of the battery, run at `bits`."""

    percent: float
    bits: Bits

    def __post_init__(self) -> None:
        if not 0 < self.percent <= 100:
            raise SpecError(f"a step of a battery policy is above 0 and up to 100 percent; got {self.percent:g}")


BATTERY = (Step(20, Bits(4, 4)), Step(50, Bits(4, 8)), Step(100, Bits(8, 8)))
"""4 bits below 20%, then 4-bit weights, then 8 bits; floating point on mains."""


def battery(*steps: Step, mains: Bits = FULL) -> Policy:
    """Return a policy that follows the battery: the lowest step that the charge is below, `mains` when plugged in.

    A machine without a battery is on mains.

    >>> policy = battery(Step(20, Bits(4, 4)), Step(80, Bits(8, 8)))
    >>> [str(policy(Reading(percent, on_mains=False))) for percent in (10, 20, 79, 95)]
    ['W4A4', 'W8A8', 'W8A8', 'FP']
    >>> str(policy(Reading()))
    'FP'
    """
    chosen = sorted(steps or BATTERY)
    if twice := [a.percent for a, b in itertools.pairwise(chosen) if a.percent == b.percent]:
        raise SpecError(f"two steps of a battery policy are at {twice[0]:g} percent")

    def policy(reading: Reading) -> Bits:
        if reading.on_mains or reading.percent is None:
            return mains
        return next((step.bits for step in chosen if reading.percent < step.percent), mains)

    return policy


def power(*, mains: Bits = FULL, unplugged: Bits = Bits(4, 8)) -> Policy:  # noqa: B008
    """Return a policy that looks at the cable only.

    >>> str(power()(Reading(90, on_mains=False)))
    'W4A8'
    """
    return lambda reading: mains if reading.on_mains else unplugged


def memory(sizes: Mapping[Bits, int], *, budget: int | None = None) -> Policy:
    """Return a policy that takes the widest pair whose network fits: in `budget` bytes, or in half of what is free.

    Args:
        sizes: How many bytes the network takes at each pair of widths, as `anybit bench` measures it.
        budget: How many bytes it may take.

    >>> policy = memory({Bits(8, 8): 1000, Bits(4, 4): 500, Bits(): 4000})
    >>> [str(policy(Reading(free_bytes=free))) for free in (100, 1200, 3000, 9000)]
    ['W4A4', 'W4A4', 'W8A8', 'FP']
    """
    _most_within(sizes, 0)  # refused now if there is none
    return lambda reading: _most_within(sizes, budget if budget is not None else (reading.free_bytes or 0) // 2)


def latency(seconds: Mapping[Bits, float], *, budget: float) -> Policy:
    """Return a policy that takes the slowest pair that keeps the time per run within `budget` seconds.

    What takes longer is taken to be more accurate; where nothing keeps within the budget, the fastest is taken.

    >>> str(latency({Bits(): 0.02, Bits(8, 8): 0.01, Bits(4, 4): 0.008}, budget=0.015)(Reading()))
    'W8A8'
    """
    if not budget > 0:
        raise SpecError(f"a time budget is above zero seconds; got {budget}")
    chosen = _most_within(seconds, budget)
    return lambda reading: chosen


def _most_within(measured: Mapping[Bits, float], limit: float) -> Bits:
    """Return the pair that takes most without passing a limit, or that takes least if all do."""
    if not measured:
        raise SpecError("a policy needs at least one measured pair of widths")
    order = sorted(measured, key=lambda bits: measured[bits])
    return ([bits for bits in order if measured[bits] <= limit] or order[:1])[-1]


def measure(run: Callable[[], object], *, repeats: int = 20) -> float:
    """Return the median time of a run in seconds, after one that warms up."""
    run()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


class Chooser:
    """Follows a policy, but goes back to a more expensive width only when the battery is well above the border.

    >>> chooser = Chooser(battery(Step(20, Bits(4, 4))), margin=3)
    >>> [str(chooser.choose(Reading(p, on_mains=False))) for p in (21, 19, 20.5, 22, 23.5)]
    ['FP', 'W4A4', 'W4A4', 'W4A4', 'FP']
    """

    def __init__(self, policy: Policy, *, margin: float = 3.0) -> None:
        if margin < 0:
            raise SpecError(f"a margin is zero or more percent; got {margin}")
        self.policy, self.margin = policy, margin
        self.bits: Bits | None = None

    def choose(self, reading: Reading) -> Bits:
        """Return the widths for a reading: new ones if the policy also chose them with a charge `margin` lower."""
        wanted = self.policy(reading)
        if self.bits is not None and wanted != self.bits:
            wanted = self._confirmed(wanted, reading)
        self.bits = wanted
        return wanted

    def _confirmed(self, wanted: Bits, reading: Reading) -> Bits:
        """Return `wanted` unless a slightly lower charge, or a slightly smaller memory, would not change anything."""
        assert self.bits is not None
        lower = reading
        if reading.percent is not None:
            lower = replace(lower, percent=reading.percent - self.margin)
        if reading.free_bytes is not None:
            lower = replace(lower, free_bytes=int(reading.free_bytes * (1 - self.margin / 100)))
        return self.bits if self.policy(lower) == self.bits else wanted


def parse_steps(words: Iterable[str]) -> tuple[Step, ...]:
    """Read steps as people write them.

    >>> parse_steps(["20:W4A4", "50:W8A8"])[0]
    Step(percent=20.0, bits=Bits(weights=4, activations=4))
    """
    steps = []
    for word in words:
        percent, colon, bits = word.partition(":")
        try:
            steps.append(Step(float(percent.rstrip("%")), Bits.parse(bits)))
        except ValueError as error:
            if isinstance(error, SpecError) and colon:
                raise
            raise SpecError(f"a step looks like 20:W4A4, below 20 percent at W4A4; got {word!r}") from None
    return tuple(steps)
