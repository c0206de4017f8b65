"""What must not grow: what a network keeps of widths used before, and what the measurement of growth says."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from anybit.quant import points
from anybit.quant.points import WeightCache, WeightPoint
from torch import nn

import anybit
from anybit.simulate.network import QuantizedNetwork
from anybit.spec import QuantSpec

ROOT = Path(__file__).parents[1]


def network(helpers: tuple[str, ...] = ()) -> QuantizedNetwork:
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(32, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU())]
    return anybit.prepare(nn.Sequential(*layers).eval(), torch.zeros(2, 32), input_range=(0, 1), helpers=helpers)


def cache_of(net: QuantizedNetwork) -> WeightCache:
    return next(p._cache for p in net.points if isinstance(p, WeightPoint))


WEIGHTS = 4 * 32 * 32 * 4
"""Bytes of the network's weights."""


# Widths used before


@pytest.mark.parametrize("helpers", [(), ("sums", "clip", "bias")], ids=["nearest", "helpers"])
@pytest.mark.parametrize(("limit", "most"), [(10 * WEIGHTS, 4), (3 * WEIGHTS, 3), (1.5 * WEIGHTS, 1), (0, 1)])
def test_other_widths_are_kept_as_far_as_whole_ones_fit(
    limit: float, most: int, helpers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = network(helpers)
    cache = cache_of(net)
    cache.limit = int(limit)
    seen = []
    kept = WeightPoint.keep
    monkeypatch.setattr(WeightPoint, "keep", lambda point, value: (kept(point, value), seen.append(cache.nbytes))[0])
    for bits in (8, 7, 6, 5):
        net.set_bits(weights=bits, activations=8)
        assert all(p.kept() is not None for p in net.points if isinstance(p, WeightPoint))
    assert cache.nbytes == most * WEIGHTS
    assert max(seen) == most * WEIGHTS  # also while it switches


def test_going_back_to_floating_point_lets_go_of_what_is_too_large() -> None:
    net = network()
    cache_of(net).limit = WEIGHTS // 2
    net.set_bits(weights=4, activations=8)
    assert cache_of(net).nbytes == WEIGHTS
    net.set_bits(weights=32, activations=32)
    assert cache_of(net).nbytes <= WEIGHTS // 2


def test_weights_in_use_stay_whatever_the_limit() -> None:
    net = network()
    cache_of(net).limit = 0
    net.set_bits(weights=4, activations=8)
    before = [p.kept() for p in net.points if isinstance(p, WeightPoint)]
    net.set_bits(weights=4, activations=8, layers={"0": (8, 8)})
    after = [p.kept() for p in net.points if isinstance(p, WeightPoint)]
    assert [a is b for a, b in zip(before, after, strict=True)] == [False, True, True, True]
    assert cache_of(net).nbytes == WEIGHTS


def test_making_room_drops_the_oldest_first() -> None:
    cache = WeightCache(limit=3 * 400)
    point = WeightPoint("w", torch.ones(100), QuantSpec(4), cache=cache)
    for bits in (4, 5, 6):
        point.set_bits(bits)
        point.quantized()
    point.set_bits(7)
    point.make_room(400)
    assert [spec.bits for _, spec in cache._kept] == [5, 6]
    assert WeightCache().limit == points.CACHE_BYTES


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
