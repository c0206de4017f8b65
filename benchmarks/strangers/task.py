"""What a network is for: inputs to calibrate it with, others to try it on, and what its answer decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Feed = Mapping[str, Array]
Run = Callable[[Feed], dict[str, Array]]
"""A network: inputs by name in, outputs by name out."""
Agree = Callable[[Any, Any], float]

CALIBRATION_SEED, TEST_SEED = 1, 2
MOST_INPUTS = 16
"""How many calibration inputs a tool gets."""


@dataclass(frozen=True)
class Task:
    """Inputs and decisions of one network.

    `calibrate` may run the network in floating point, for inputs that come out of the run before. `decide` makes one
    decision of one of the `samples`; `agree` compares two of them, 1.0 for equal; `also` are further views of the same.
    """

    calibrate: Callable[[Run], Sequence[Feed]]
    samples: Sequence[Any]
    decide: Callable[[Run, Any], Any]
    agree: Agree
    also: Mapping[str, Agree] = field(default_factory=dict)


def simple(calibration: Sequence[Feed], test: Sequence[Feed], decide: Callable[[dict[str, Array]], Any], agree: Agree,
           **also: Agree) -> Task:  # fmt: skip
    """Return a task whose decision needs one run, and nothing but its outputs."""
    return Task(lambda run: calibration, test, lambda run, feed: decide(run(feed)), agree, also)


def scores(task: Task, run: Run, wanted: Sequence[Any]) -> dict[str, float]:
    """Return how equal the decisions are to those of the network in floating point."""
    found = [task.decide(run, sample) for sample in task.samples]
    measures = {"score": task.agree, **task.also}
    return {
        name: float(np.mean([agree(a, b) for a, b in zip(wanted, found, strict=True)]))
        for name, agree in measures.items()
    }


def seeded(make: Callable[[np.random.Generator], Any], seed: int, count: int) -> list[Any]:
    """Return `count` things made with a generator of their own each, so that one more changes none of the others."""
    return [make(np.random.default_rng([seed, index])) for index in range(count)]
