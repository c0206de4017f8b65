"""Ranges from calibration data."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import anybit
from anybit.errors import DataError, SpecError
from anybit.plan.observe import OBSERVERS, Histogram
from anybit.plan.points import Activation
from anybit.simulate.modules import executors
from anybit.spec import FLOAT, QuantSpec


def observed(method: str, batches: list[Tensor], *, symmetric: bool = True) -> dict[int, tuple[float, float]]:
    observer = OBSERVERS[method]()
    for batch in batches:
        observer.update(batch.numpy())
    point = Activation("x", "activation", symmetric=symmetric)
    return {bits: (r.low, r.high) for bits, r in observer.ranges(point).items()}


def squared_error(x: Tensor, low: float, high: float, bits: int, *, symmetric: bool = True) -> float:
    spec = QuantSpec(bits, symmetric, signed=bool(x.min() < 0))
    first, last = spec.levels
    span = max(-low, high) if symmetric else high - min(low, 0.0)
    scale = span / (last if symmetric else last - first)
    zero = 0.0 if symmetric else round(first - min(low, 0.0) / scale)
    codes = torch.clamp(torch.round(x / scale) + zero, first, last)
    return float(((codes - zero) * scale - x).pow(2).mean())


def test_a_histogram_that_grows_counts_everything_once() -> None:
    torch.manual_seed(0)
    batches = [torch.randn(1000) * s for s in (0.1, 5.0, 1.0, 40.0)]
    histogram = OBSERVERS["mse"]()
    assert isinstance(histogram, Histogram)
    for batch in batches:
        histogram.update(batch.numpy())
    everything = torch.cat(batches)
    assert float(histogram.counts.sum()) == len(everything)
    edges = torch.from_numpy(histogram.edges).float()
    # Merging pairs of bins keeps every value in a bin that holds it: compare coarse sums.
    for low, high in ((-math.inf, -10.0), (-10.0, 0.0), (0.0, 10.0), (10.0, math.inf)):
        inside = (edges[1:] > low) & (edges[:-1] < high)
        want = int(((everything > low) & (everything <= high)).sum())
        assert abs(float(histogram.counts[inside].sum()) - want) <= 0.02 * len(everything)
    assert (histogram.low, histogram.high) == (float(everything.min()), float(everything.max()))


def test_percentile_leaves_the_outliers_out() -> None:
    torch.manual_seed(0)
    x = torch.randn(200_000)
    x[0] = 100.0
    ranges = observed("percentile", [x[:100_000], x[100_000:]])
    low, high = ranges[FLOAT]
    assert -5.0 < low < -3.4
    assert 3.4 < high < 5.0  # 99.99 % of a normal tensor lie within 3.89


@pytest.mark.parametrize("symmetric", [True, False])
def test_mse_ranges_err_less_than_others_at_every_width(symmetric: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(50_000) + (0 if symmetric else 1.5)
    x[:20] *= 6
    ranges = observed("mse", [x[:30_000], x[30_000:]], symmetric=symmetric)
    assert set(ranges) == {FLOAT, *range(2, 8)}
    assert ranges[FLOAT] == (float(x.min()), float(x.max()))
    widest = 0.0
    for bits in range(2, 8):
        low, high = ranges[bits]
        own = squared_error(x, low, high, bits, symmetric=symmetric)
        assert own <= 1.02 * squared_error(x, *ranges[FLOAT], bits, symmetric=symmetric)
        for factor in (0.7, 0.85, 1.2, 1.5):
            other = squared_error(x, low * factor, high * factor, bits, symmetric=symmetric)
            assert own <= 1.03 * other, (bits, factor)
        assert max(-low, high) >= widest * 0.98
        widest = max(-low, high)


def test_what_is_never_negative_keeps_the_grid_without_negative_codes() -> None:
    torch.manual_seed(0)
    x = torch.relu(torch.randn(5000))
    for method in OBSERVERS:
        assert all(low >= 0 for low, _ in observed(method, [x]).values()), method


@pytest.mark.parametrize("method", OBSERVERS)
@pytest.mark.parametrize("value", [1.0, -1.0, 0.3, 1e-30, 3e30])
@pytest.mark.parametrize("symmetric", [True, False])
def test_values_that_are_all_alike(method: str, value: float, symmetric: bool) -> None:
    for low, high in observed(method, [torch.full((3, 7), value)], symmetric=symmetric).values():
        assert low == pytest.approx(value, rel=0.02)
        assert high == pytest.approx(value, rel=0.02)


@pytest.mark.parametrize("method", OBSERVERS)
def test_a_tensor_of_zeros_and_a_loader_without_batches(method: str) -> None:
    assert observed(method, [torch.zeros(10)])[FLOAT] == (0.0, 0.0)
    with pytest.raises(DataError, match="saw no data"):
        observed(method, [])


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


def test_each_width_runs_on_its_own_range() -> None:
    torch.manual_seed(0)
    data = torch.randn(500, 4)
    net = anybit.prepare(Two(), data[:2], calibration=[data[:250], (data[250:], None)], method="mse", preset="paper")
    (point,) = [a for a in net.plan.activations if a.kind == "activation"]
    seen = []
    for bits in (2, 4, 8, 16):
        net.set_bits(weights=32, activations=bits)
        found = point.range_at(bits)
        assert found is not None
        assert found.source == "calibration, mse"
        seen.append(found.high)
        with torch.no_grad():
            hidden = executors(net)[point.name](torch.full((1, 16), 1e6))
        assert float(hidden.max()) == pytest.approx(found.high, rel=1e-5)
    assert seen[0] < seen[1] < seen[3]


def test_a_loader_that_fails_leaves_no_trace_and_says_why() -> None:
    model = Two()
    with pytest.raises(SpecError, match="one of min-max, percentile, mse"):
        anybit.prepare(model, torch.randn(2, 4), calibration=[torch.randn(2, 4)], method="guess", preset="paper")

    def broken() -> object:
        yield torch.randn(8, 4)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        anybit.prepare(model, torch.randn(2, 4), calibration=broken(), preset="paper")
    with pytest.raises(DataError, match="saw no data"):
        anybit.prepare(model, torch.randn(2, 4), calibration=[], preset="paper")


def test_calibration_data_wins_over_batch_norm_but_not_over_the_user() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).eval()
    data = torch.randn(64, 4)
    net = anybit.prepare(model, data[:2], calibration=[data], input_range=(-9.0, 9.0), preset="paper")
    ranges = {a.kind: a.range_at(FLOAT) for a in net.plan.activations}
    assert ranges["input"] is not None
    assert ranges["input"].high == 9.0
    assert ranges["activation"] is not None
    assert ranges["activation"].high == pytest.approx(float(model[:3](data).detach().max()))
