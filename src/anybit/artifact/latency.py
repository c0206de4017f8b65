"""How long a master runs on this machine, and what the width of each weight adds to it.

ONNX Runtime has one kernel for bytes that stay below 8 bits, one for whole bytes, and floating point for more. As soon
as one weight has whole bytes, the sums of the entire network are computed exactly, which may cost all layers time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from anybit.artifact.master import Master
from anybit.artifact.prefer import interleaved
from anybit.artifact.quantized_graph import quantized_graph
from anybit.artifact.reconstruct import Feed
from anybit.artifact.runtime import compile_model
from anybit.common.bars import progress_bars
from anybit.errors import SpecError
from anybit.plan.allocation import Choice, within
from anybit.plan.numbers import Kept, Numbers
from anybit.plan.points import Widths
from anybit.spec import Bits

BYTE = 8
CODES_BYTES = 2**28
ROUNDS = 9
TRIES = 4
"""How often widths are chosen again, with less room, if together they take longer than one by one."""

CAREFUL = 0.97
TICK = 1e-7
"""Seconds are counted in these, as whole numbers."""


@dataclass(frozen=True)
class Clock:
    """Times a master on one input with activations at one width."""

    master: Master
    feed: Feed
    activations: int = 8
    threads: int | None = None
    kept: Kept = field(default_factory=lambda: Kept(CODES_BYTES))

    @classmethod
    def of(cls, master: Master, feed: Feed, activations: int, threads: int | None) -> Clock:
        """Return a clock for the first input of a batch, where the network leaves their number free."""
        kinds = {value.name: value.type.tensor_type.shape.dim for value in master.graph.graph.input}
        free = all(len(dims) > 0 and not dims[0].HasField("dim_value") for dims in kinds.values())
        return cls(master, {name: x[:1] for name, x in feed.items()} if free else feed, activations, threads)

    def widths(self, weights: Mapping[str, int]) -> Widths:
        """Return the widths of all points, with the floors that some weights have."""
        layers = {name: Bits(bits, self.activations) for name, bits in weights.items()}
        return self.master.plan.widths(Bits(BYTE, self.activations), layers)

    def engine(self, weights: Mapping[str, int], *, exact: bool = False) -> Any:
        """Return the network at these widths, compiled."""
        numbers = Numbers(self.master.plan, self.widths(weights), self.master.tensors, self.kept)
        model, needed = quantized_graph(self.master, numbers, packed=False)
        return compile_model(model, exact=exact or needed, threads=self.threads, where=str(self.master.path))

    def times(self, *engines: Any) -> list[list[float]]:
        """Return the seconds of every round for each engine; they take turns, so that a busy moment hits all."""
        runs = {str(i): partial(engine.run, None, dict(self.feed)) for i, engine in enumerate(engines)}
        return list(interleaved(runs, rounds=ROUNDS, seconds=math.inf).values())

    def seconds(self, weights: Mapping[str, int]) -> float:
        """Return how long a run takes at these widths: the median."""
        return statistics.median(self.times(self.engine(weights))[0])


def kernel(bits: int) -> int:
    """Return a number that widths share if the same kernel computes with them.

    >>> [kernel(bits) for bits in (2, 7, 8, 9, 32)]
    [0, 0, 1, 2, 2]
    """
    return (bits >= BYTE) + (bits > BYTE)


@dataclass(frozen=True)
class Latencies:
    """Seconds of a run with every weight at the narrowest width, and the ticks that each weight and width adds."""

    base: float
    ticks: list[list[int]]


def latencies(clock: Clock, choices: Sequence[int], *, exact: bool) -> Latencies:
    """Measure each weight with each kernel, all others at the narrowest width; `exact` as if some weight needed it."""
    points = clock.master.plan.weights
    narrow = {p.name: choices[0] for p in points}
    base = clock.engine(narrow, exact=exact)
    seconds = statistics.median(clock.times(base)[0])
    ticks: list[list[int]] = []
    with progress_bars() as start:
        advance = start("latency of each weight", len(points))
        for p in points:
            lowest = kernel(max(choices[0], p.floor))
            known = {lowest: 0.0}
            for bits in choices:
                number = kernel(max(bits, p.floor))
                if number not in known:
                    own, others = clock.times(clock.engine(narrow | {p.name: bits}, exact=exact), base)
                    known[number] = max(0.0, statistics.median(a - b for a, b in zip(own, others, strict=True)))
            ticks.append([math.ceil(known[kernel(max(bits, p.floor))] / TICK) for bits in choices])
            advance(1)
    return Latencies(seconds, ticks)


def choose_in_time(
    clock: Clock, costs: Mapping[str, Sequence[float]], choices: Sequence[int], budget: float
) -> tuple[Choice, float]:
    """Return the widths that cost least among those that run within a budget of seconds, and what they take.

    What was chosen is measured as a whole; as long as that is above the budget, it is chosen again with less room.

    Raises:
        SpecError: Even the fastest widths take longer.
    """
    points = clock.master.plan.weights
    found: list[tuple[Choice, float]] = []
    fastest = clock.seconds({p.name: choices[0] for p in points})
    for part in _parts(choices, [p.floor for p in points]):
        if found and len(part) == 1:  # the last resort
            break
        measured, room = latencies(clock, part, exact=kernel(part[-1]) > 0), budget
        own = {name: row[: len(part)] for name, row in costs.items()}
        for _ in range(TRIES):
            if room < measured.base:
                break
            picked = within(points, own, part, measured.ticks, int((room - measured.base) / TICK))
            seconds = clock.seconds(picked.widths)
            if seconds <= budget:
                found.append((picked, seconds))
                break
            room *= CAREFUL * budget / seconds
    if not found:
        raise SpecError(
            f"a budget of {budget:g} seconds cannot be met: a run at the narrowest widths takes {fastest:.2g} here"
        )
    return min(found, key=lambda pair: pair[0].cost)


def _parts(choices: Sequence[int], floors: Iterable[int]) -> list[list[int]]:
    """Return the widths to choose from: those that make no sums exact, all of them, the narrowest alone."""
    below = [bits for bits in choices if bits < BYTE]
    alone = 1 < len(below) < len(choices) and all(floor < BYTE for floor in floors)
    return [*([below] if alone else []), list(choices), list(choices[:1])]
