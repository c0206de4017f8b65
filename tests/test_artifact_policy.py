from __future__ import annotations

import itertools
import sys
import types
from collections import namedtuple
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anybit import policy
from anybit.errors import MissingDependency, SpecError
from anybit.policy import Chooser, Reading, Step, battery, latency, measure, memory, parse_steps, power, read_machine
from anybit.spec import Bits

Battery = namedtuple("Battery", "percent secsleft power_plugged")


def machine(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    fake = types.ModuleType("psutil")
    fake.virtual_memory = lambda: types.SimpleNamespace(available=12345)  # type: ignore[attr-defined]
    for name, function in functions.items():
        setattr(fake, name, function)
    monkeypatch.setitem(sys.modules, "psutil", fake)


def test_the_machine_is_read_with_a_battery_without_one_and_where_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, sensors_battery=lambda: Battery(55, 100, False))
    assert read_machine() == Reading(55.0, False, 12345)
    machine(monkeypatch, sensors_battery=lambda: Battery(55, 100, True))
    assert read_machine() == Reading(55.0, True, 12345)
    machine(monkeypatch, sensors_battery=lambda: Battery(55, 100, None))
    assert read_machine() == Reading(55.0, False, 12345)
    machine(monkeypatch, sensors_battery=lambda: None)
    assert read_machine() == Reading(None, True, 12345)
    machine(monkeypatch)  # a system whose psutil knows no batteries
    assert read_machine() == Reading(None, True, 12345)
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(MissingDependency, match="psutil"):
        read_machine()


def test_this_machine_can_be_read() -> None:
    reading = read_machine()
    assert reading.free_bytes is not None
    assert reading.free_bytes > 0


def test_battery_steps_and_mains() -> None:
    follow = battery(Step(50, Bits(8, 8)), Step(20, Bits(4, 4)), mains=Bits(16, 16))
    found = [follow(Reading(p, on_mains=False)) for p in (0, 19.9, 20, 49.9, 50, 100)]
    assert found == [Bits(4, 4), Bits(4, 4), Bits(8, 8), Bits(8, 8), Bits(16, 16), Bits(16, 16)]
    assert follow(Reading(5, on_mains=True)) == Bits(16, 16)
    assert follow(Reading()) == Bits(16, 16)
    assert battery()(Reading(10, on_mains=False)) == Bits(4, 4)
    with pytest.raises(SpecError, match="two steps"):
        battery(Step(20, Bits(4, 4)), Step(20, Bits(8, 8)))
    for percent in (0, 101, -5):
        with pytest.raises(SpecError, match="above 0 and up to 100"):
            Step(percent, Bits())


def test_power_memory_and_latency() -> None:
    follow = power(mains=Bits(8, 8), unplugged=Bits(2, 2))
    assert [follow(Reading(50, on_mains=m)) for m in (True, False)] == [Bits(8, 8), Bits(2, 2)]
    sizes = {Bits(): 400, Bits(8, 8): 100, Bits(4, 4): 50}
    assert [memory(sizes, budget=b)(Reading()) for b in (10, 50, 399, 400)] == [
        Bits(4, 4), Bits(4, 4), Bits(8, 8), Bits(),
    ]  # fmt: skip
    assert memory(sizes)(Reading(free_bytes=799)) == Bits(8, 8)
    assert memory(sizes)(Reading()) == Bits(4, 4)
    times = {Bits(): 0.4, Bits(8, 8): 0.1, Bits(4, 4): 0.05}
    assert [latency(times, budget=b)(Reading()) for b in (0.01, 0.05, 0.3, 0.4)] == [
        Bits(4, 4), Bits(4, 4), Bits(8, 8), Bits(),
    ]  # fmt: skip
    with pytest.raises(SpecError, match="at least one"):
        memory({})
    with pytest.raises(SpecError, match="above zero"):
        latency(times, budget=0)


def test_a_function_of_the_users_own_is_a_policy() -> None:
    chooser = Chooser(lambda reading: Bits(2, 2) if (reading.percent or 100) < 50 else Bits(8, 8))
    assert chooser.choose(Reading(40, on_mains=False)) == Bits(2, 2)
    assert chooser.choose(Reading(90, on_mains=False)) == Bits(8, 8)


@given(st.lists(st.floats(18.6, 21.4), min_size=3, max_size=40))
@settings(max_examples=200, deadline=None)
def test_a_hovering_battery_does_not_flap(charges: list[float]) -> None:
    chooser = Chooser(battery(Step(20, Bits(4, 4))), margin=3)
    chosen = [chooser.choose(Reading(p, on_mains=False)) for p in charges]
    changes = sum(a != b for a, b in itertools.pairwise(chosen))
    assert changes <= 1  # down, once


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30))
@settings(max_examples=200, deadline=None)
def test_the_width_is_never_more_expensive_than_the_policy_says(charges: list[float]) -> None:
    follow = battery(Step(20, Bits(2, 2)), Step(50, Bits(4, 4)), Step(80, Bits(8, 8)))
    chooser = Chooser(follow, margin=5)
    for p in charges:
        reading = Reading(p, on_mains=False)
        assert chooser.choose(reading).weights <= follow(reading).weights


def test_falling_is_followed_at_once_and_the_cable_too() -> None:
    chooser = Chooser(battery(Step(20, Bits(4, 4))), margin=5)
    assert chooser.choose(Reading(21, on_mains=False)) == Bits()
    assert chooser.choose(Reading(19.9, on_mains=False)) == Bits(4, 4)
    assert chooser.choose(Reading(19.9, on_mains=True)) == Bits()
    assert chooser.choose(Reading(19.9, on_mains=False)) == Bits(4, 4)
    assert chooser.choose(Reading(24.9, on_mains=False)) == Bits(4, 4)
    assert chooser.choose(Reading(25.1, on_mains=False)) == Bits()
    with pytest.raises(SpecError, match="margin"):
        Chooser(battery(), margin=-1)


def test_memory_does_not_flap_either() -> None:
    chooser = Chooser(memory({Bits(): 1000, Bits(4, 4): 100}), margin=10)
    found = [chooser.choose(Reading(free_bytes=free)) for free in (2000, 1990, 2010, 2200, 2230)]
    assert found == [Bits(), Bits(4, 4), Bits(4, 4), Bits(4, 4), Bits()]


def test_steps_are_read_as_people_write_them() -> None:
    assert parse_steps(["20%:w4a4", "50:8,8"]) == (Step(20, Bits(4, 4)), Step(50, Bits(8, 8)))
    for word in ("W4A4", "x:W4A4", "20", ":"):
        with pytest.raises(SpecError, match="a step looks like 20:W4A4"):
            parse_steps([word])
    with pytest.raises(SpecError, match="a pair of widths looks like"):
        parse_steps(["20:W"])
    with pytest.raises(SpecError, match="above 0"):
        parse_steps(["120:W4A4"])


def test_measuring_counts_only_after_the_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 10.0, 11.0, 20.0, 24.0])
    monkeypatch.setattr(policy.time, "perf_counter", lambda: next(clock))
    runs: list[int] = []
    assert measure(lambda: runs.append(1), repeats=3) == 2.0
    assert len(runs) == 4
