"""What must not grow: what a network keeps of widths used before, and what the measurement of growth says."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import anybit
from anybit.plan.numbers import Kept
from anybit.simulate.modules import Weight, executors
from anybit.simulate.network import CACHE_BYTES, QuantizedNetwork

ROOT = Path(__file__).parents[1]


def network(helpers: tuple[str, ...] = ()) -> QuantizedNetwork:
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(32, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU())]
    return anybit.prepare(
        nn.Sequential(*layers).eval(), torch.zeros(2, 32), input_range=(0, 1), helpers=helpers, preset="paper"
    )


def values(net: QuantizedNetwork) -> list[torch.Tensor | None]:
    """The rounded weights in use."""
    return [module.value for module in executors(net.body).values() if isinstance(module, Weight)]


WEIGHTS = 4 * 32 * 32 * 4
"""Bytes of the network's rounded weights at one width."""

CODES = 4 * 32 * 32
"""Bytes of their codes, which are made, and kept, only where the way of rounding needs them."""

ELSE = 8 * 2**10
"""More than the bytes of everything else about a width: scales, grids, biases."""


# Widths used before


@pytest.mark.parametrize(
    ("helpers", "size"), [((), WEIGHTS), (("sums", "clip", "bias"), WEIGHTS + CODES)], ids=["nearest", "helpers"]
)
@pytest.mark.parametrize(("widths", "extra", "most"), [(10, 0, 4), (3, ELSE, 3), (1.5, 0, 1), (0, 0, 0)])
def test_other_widths_are_kept_as_far_as_whole_ones_fit(
    widths: float, extra: int, most: int, helpers: tuple[str, ...], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = network(helpers)
    cache = net._kept
    limit = cache.limit = int(widths * size + extra)
    seen = []
    get = Kept.get
    monkeypatch.setattr(Kept, "get", lambda kept, *rest: (get(kept, *rest), seen.append(cache.nbytes))[0])
    for bits in (8, 7, 6, 5):
        net.set_bits(weights=bits, activations=8)
        assert all(value is not None for value in values(net))
    whole = [b for b in (8, 7, 6, 5) if all(("value", name, b, None) in cache for name in net.weights)]
    assert whole == [8, 7, 6, 5][4 - most :]  # the newest
    assert most * size <= cache.nbytes <= min(limit, most * size + ELSE)
    assert max(seen) <= limit  # also while it switches


def test_going_back_to_floating_point_lets_go_of_what_is_too_large() -> None:
    net = network()
    net._kept.limit = WEIGHTS // 2
    net.set_bits(weights=4, activations=8)
    assert all(value is not None for value in values(net))
    net.set_bits(weights=32, activations=32)
    assert values(net) == [None] * 4
    assert net._kept.nbytes <= WEIGHTS // 2


def test_weights_in_use_stay_whatever_the_limit() -> None:
    net = network()
    net._kept.limit = 0
    net.set_bits(weights=4, activations=8)
    before = values(net)
    net.set_bits(weights=4, activations=8, layers={"0": (8, 8)})
    assert [a is b for a, b in zip(before, values(net), strict=True)] == [False, True, True, True]
    assert net._kept.nbytes == 0


def test_making_room_drops_the_oldest_first() -> None:
    cache = Kept(3 * 400)
    for bits in (4, 5, 6):
        cache.get(bits, lambda: torch.ones(100), lambda t: t.numel() * t.element_size())
    cache.get(4, lambda: torch.ones(100), lambda t: 400)  # used again, so 5 is the oldest
    cache.make_room(400)
    assert [bits for bits in (4, 5, 6) if bits in cache] == [4, 6]
    assert cache.nbytes == 800
    assert network()._kept.limit == CACHE_BYTES


# The measurement


@pytest.fixture(scope="module")
def scale() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scale", ROOT / "benchmarks" / "scale.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("parameters", [1e6, 3e7, 3e8])
def test_the_wide_network_has_the_parameters_that_it_says(scale: ModuleType, parameters: float) -> None:
    assert scale.count(parameters) == pytest.approx(parameters, rel=0.05)
    with torch.device("meta"):
        sizes = [p.numel() for p in scale.Wide(parameters).parameters()]
    assert max(sizes) < 0.07 * sum(sizes)  # no layer is much of it


def test_the_exponent_is_that_of_the_largest_points(scale: ModuleType) -> None:
    rows = [
        {"call": "save", "millions": m, "parameters": 1e6 * m, "cpu_seconds": 99.0 if m < 30 else 2.0 * m**1.5}
        for m in scale.SIZES
    ]
    assert scale.exponents(rows) == {"save": pytest.approx(1.5)}
    assert scale.exponents(rows[:2]) == {}


def test_results_are_replaced_point_by_point(scale: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "scale.json"
    results = scale.Results(path)
    results.add("step", [{"batch": 32, "ratio": 2.0}, {"batch": 64, "ratio": 3.0}], ("batch",))
    again = scale.Results(path)
    again.add("step", [{"batch": 64, "ratio": 2.5}], ("batch",))
    found = json.loads(path.read_text())
    assert [(row["batch"], row["ratio"]) for row in found["step"]] == [(32, 2.0), (64, 2.5)]
    assert "commit" in found
    assert found["network"] == []


def test_what_breaks_the_limit_is_named(scale: ModuleType) -> None:
    rows = [{"call": call, "millions": 100, "peak": 2.3} for call in ("set_bits", "save", "prepare")]
    assert [line.split()[0] for line in scale.asked_for(rows)] == ["set_bits", "save"]
    assert scale.asked_for([{"call": "save", "millions": 100, "peak": 2.1}]) == []


def test_the_measured_limits_hold() -> None:
    found = json.loads((ROOT / "results" / "scale.json").read_text(encoding="utf-8"))
    rows = [
        r for r in found["network"] if r["call"] in ("set_bits", "set_bits, helpers", "save") and r["millions"] > 99
    ]
    assert {r["millions"] for r in rows} >= {100, 300}
    assert all(r["peak"] <= 2.2 for r in rows)
