from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import images, warmed_up
from hypothesis import given, settings
from hypothesis import strategies as st

import anybit
from anybit.artifact.latency import Clock, choose_in_time, kernel
from anybit.artifact.master import Master
from anybit.errors import SpecError
from anybit.models import build_model
from anybit.simulate.network import QuantizedNetwork


def network(**options: Any) -> QuantizedNetwork:
    torch.manual_seed(0)
    model = warmed_up(build_model("small-conv", channels=1, classes=10, multiplier=0.5), images(1, 8, 8)).eval()
    return anybit.prepare(model, torch.rand(2, 1, 8, 8), input_range=(0, 1), preset="paper", **options)


def inputs() -> list[torch.Tensor]:
    return [torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(1))]


@functools.cache
def master() -> Master:
    return network().as_master()


@functools.cache
def names() -> list[str]:
    return [p.name for p in master().plan.weights]


COUNT = 8
"""How many they are."""


@dataclass(frozen=True)
class MadeUp(Clock):
    """A clock of a machine whose every layer and kernel takes a known time, and some more if all are wide."""

    takes: tuple[tuple[float, float, float], ...] = ()
    exact: float = 0.0
    together: float = 0.0

    def engine(self, weights: Mapping[str, int], *, exact: bool = False) -> Any:
        kernels = [kernel(weights[name]) for name in names()]
        whole = self.exact if exact or 1 in kernels else 0.0
        wide = self.together * (sum(k > 0 for k in kernels) > 1)
        return whole + wide + sum(row[k] for row, k in zip(self.takes, kernels, strict=True))

    def times(self, *engines: Any) -> list[list[float]]:
        return [[engine] * 3 for engine in engines]


times = st.tuples(*[st.floats(1e-4, 1e-2)] * 3).map(lambda t: tuple(sorted(t)))


@given(
    st.lists(times, min_size=COUNT, max_size=COUNT).map(tuple),
    st.floats(0, 1e-2),
    st.floats(0, 1e-2),
    st.floats(1e-4, 0.2),
)
@settings(deadline=None, max_examples=30)
def test_the_budget_is_never_exceeded_and_the_best_choice_is_found(
    takes: tuple[tuple[float, float, float], ...], exact: float, together: float, budget: float
) -> None:
    clock = MadeUp(master(), {}, takes=takes, exact=exact, together=together)
    choices, errors = [4, 8, 9], {name: [9.0 / (i + 1), 2.0 / (i + 1), 0.0] for i, name in enumerate(names())}
    narrowest = clock.seconds(dict.fromkeys(names(), 4))
    if narrowest > budget:
        with pytest.raises(SpecError, match="cannot be met"):
            choose_in_time(clock, errors, choices, budget)
        return
    found, seconds = choose_in_time(clock, errors, choices, budget)
    assert seconds == clock.seconds(found.widths)
    assert seconds <= budget
    if not together:  # then times add up, and the best is known
        fitting = [
            sum(errors[name][i] for name, i in zip(names(), pick, strict=True))
            for pick in itertools.product(range(3), repeat=COUNT)
            # The clock counts in ticks, rounded up, and as if a wide weight made all sums exact.
            if clock.seconds({n: choices[i] for n, i in zip(names(), pick, strict=True)}) + exact * (max(pick) == 2)
            <= budget - 1e-7 * (COUNT + 1)
        ]
        assert not fitting or found.cost <= min(fitting) + 1e-9


def test_a_generous_budget_gives_the_widths_with_the_least_error(tmp_path: Path) -> None:
    net = network(per_channel=True)
    anybit.save(net, tmp_path / "net.onnx")
    for what in (net, tmp_path / "net.onnx"):
        found = anybit.allocate(what, inputs(), budget=60.0, unit="seconds", widths=(3, 8), threads=1)
        assert {bits.weights for bits in found.layers.values()} == {8}
        assert found.seconds is not None
        assert 0 < found.seconds <= 60
        assert "ms a run" in str(found)


def test_the_bound_takes_a_budget_of_seconds_too() -> None:
    net = network()
    batches = [(x, torch.arange(len(x)) % 10) for x in inputs()]
    found = net.allocate(budget=60.0, unit="seconds", loader=batches, widths=(3, 8), threads=1)
    assert {bits.weights for bits in found.layers.values()} == {8}
    assert found.seconds is not None


def test_what_no_width_can_meet_is_refused_in_one_sentence() -> None:
    with pytest.raises(SpecError, match="a budget of 1e-09 seconds cannot be met: a run at the narrowest widths takes"):
        anybit.allocate(network(), inputs(), budget=1e-9, unit="seconds", widths=(3, 8), threads=1)


def test_a_run_is_timed_on_one_input_where_the_batch_is_free() -> None:
    feed = {master().inputs[0]: np.zeros((8, 1, 8, 8), np.float32)}
    clock = Clock.of(master(), feed, 8, 1)
    assert isinstance(clock.master, Master)
    assert clock.feed[master().inputs[0]].shape == (1, 1, 8, 8)
    assert all(seconds > 0 for seconds in clock.times(clock.engine(dict.fromkeys(names(), 4)))[0])
