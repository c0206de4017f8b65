from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import images, warmed_up
from hypothesis import example, given, settings
from hypothesis import strategies as st

import anybit
from anybit.errors import DataError, SpecError
from anybit.models import build_model
from anybit.plan.knapsack import cheapest
from anybit.simulate.allocate import bounds
from anybit.simulate.network import QuantizedNetwork

rows = st.integers(1, 4).flatmap(
    lambda n: st.lists(
        st.lists(st.tuples(st.floats(0, 10), st.integers(1, 9)), min_size=n, max_size=n), min_size=1, max_size=5
    )
)


@example([[(0.0, 1)] * 4, [(0.0, 2)] * 3 + [(8.0, 1)], [(0.0, 2)] * 3 + [(1 / 3, 1)]], 5)
@given(rows, st.integers(1, 40))
@settings(deadline=None, max_examples=300)
def test_no_choice_within_the_budget_is_cheaper(table: list[list[tuple[float, int]]], budget: int) -> None:
    costs, sizes = [[c for c, _ in row] for row in table], [[s for _, s in row] for row in table]
    fitting = [
        sum(costs[r][i] for r, i in enumerate(pick))
        for pick in itertools.product(*(range(len(row)) for row in table))
        if sum(sizes[r][i] for r, i in enumerate(pick)) <= budget
    ]
    if not fitting:
        with pytest.raises(SpecError, match="less than the smallest"):
            cheapest(costs, sizes, budget)
        return
    pick = cheapest(costs, sizes, budget)
    assert sum(sizes[r][i] for r, i in enumerate(pick)) <= budget
    assert sum(costs[r][i] for r, i in enumerate(pick)) == pytest.approx(min(fitting), abs=1e-9)


def test_many_layers_are_solved_exactly_in_no_time() -> None:
    """Fifty layers, seven widths: 7**50 choices. With equal sizes the answer is known from sorting the gains."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.rand(50, generator=generator).tolist()
    costs = [[s / 2**b for b in range(2, 9)] for s in scale]
    pick = cheapest(costs, [[10 * b for b in range(2, 9)] for _ in scale], 50 * 40)
    gains = sorted((s / 2**b - s / 2 ** (b + 1) for s in scale for b in range(2, 8)), reverse=True)[: 50 * 2]
    assert sum(c[i] for c, i in zip(costs, pick, strict=True)) == pytest.approx(sum(s / 4 for s in scale) - sum(gains))


def network(**options: object) -> QuantizedNetwork:
    torch.manual_seed(0)
    model = warmed_up(build_model("small-conv", channels=1, classes=10, multiplier=0.5), images(1, 8, 8)).eval()
    return anybit.prepare(model, torch.rand(2, 1, 8, 8), input_range=(0, 1), **options, preset="paper")  # type: ignore[arg-type]


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.rand(16, 1, 8, 8, generator=generator), torch.arange(16) % 10) for _ in range(3)]


@pytest.mark.parametrize("options", [{}, {"per_channel": True}, {"helpers": ["clip"]}])
def test_the_bound_is_half_a_bin_times_the_gradient(options: dict[str, object]) -> None:
    net = network(**options)
    found = bounds(net, batches(), [3, 6])
    point = net.plan.weights[0]
    master = net.weights[point.name]
    norms = []
    for x, y in batches():
        (grad,) = torch.autograd.grad(F.cross_entropy(net(x), y), master)
        norms.append(grad.abs())
    for index, bits in enumerate((3, 6)):
        net.set_bits(weights=bits, activations=32)
        levels = 2 ** (bits - 1) - 1
        top = torch.from_numpy(net.numbers().codes(point.name).dequantized()).abs()
        top = top.amax((1, 2, 3), keepdim=True) if options.get("per_channel") else top.max()
        want = torch.stack([(n * top / levels / 2).sum() for n in norms]).mean()
        assert found[point.name][index] == pytest.approx(float(want), rel=1e-4)
    # Twice the width of a bin is twice the bound: 3 bits have 3 levels, 6 have 31.
    if not options.get("helpers"):
        assert found[point.name][0] / found[point.name][1] == pytest.approx(31 / 3, rel=1e-4)


def test_an_allocation_meets_its_budget_and_beats_equal_widths_in_the_bound() -> None:
    net = network()
    net.set_bits(weights=5, activations=7)
    allocation = net.allocate(budget=4, loader=batches())
    assert (net.bits, net.layers) == (anybit.Bits(5, 7), {})
    assert allocation.average_bits <= 4
    counts = {name: weight.numel() for name, weight in net.weights.items()}
    assert set(allocation.layers) == set(counts)
    bits = sum(counts[name] * pair.weights for name, pair in allocation.layers.items())
    assert allocation.average_bits == pytest.approx(bits / sum(counts.values()))
    assert allocation.size == -(-bits // 8)
    at_four = bounds(net, batches(), [4])
    assert allocation.predicted < sum(value for (value,) in at_four.values())
    net.set_bits(weights=8, activations=8, layers=allocation.layers)
    losses = [F.cross_entropy(net(x), y).item() for x, y in batches()]
    assert allocation.measured == pytest.approx(sum(losses) / 3, rel=1e-5)
    net.set_bits(weights=32, activations=32)
    losses = [F.cross_entropy(net(x), y).item() for x, y in batches()]
    assert allocation.loss == pytest.approx(sum(losses) / 3, rel=1e-5)
    assert len(str(allocation).splitlines()) == len(counts) + 1
    assert all(weight.grad is None for weight in net.weights.values())


def test_bytes_and_bits_are_the_same_budget() -> None:
    net = network()
    total = sum(weight.numel() for weight in net.weights.values())
    one, two = (
        net.allocate(budget=3, loader=batches()),
        net.allocate(budget=3 * total / 8, loader=batches(), unit="bytes"),
    )
    assert one.layers == two.layers


def test_layers_that_are_kept_wide_take_their_share_of_the_budget() -> None:
    net = network(sensitive="8-bit")
    allocation = net.allocate(budget=4, loader=batches(), activations=32)
    net.set_bits(weights=8, activations=32, layers=allocation.layers)
    widths = {name: net.numbers().widths[name] for name in net.weights}
    used = sum(widths[name] * weight.numel() for name, weight in net.weights.items())
    assert used / sum(weight.numel() for weight in net.weights.values()) == pytest.approx(allocation.average_bits)
    assert allocation.average_bits <= 4
    first, *_, last = (p.name for p in net.plan.weights)
    assert widths[first] == widths[last] == 8


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"budget": 1.5}, SpecError, "cannot be met: even at the narrowest widths the weights take 2.00 bits"),
        ({"budget": 4, "unit": "stones"}, SpecError, "unit is"),
        ({"budget": 4, "widths": (1, 2)}, SpecError, "must be 2 to 16"),
        ({"budget": 4, "widths": ()}, SpecError, "one or more of 2 to 16"),
        ({"budget": 4, "activations": 99}, SpecError, "activations must be"),
        ({"budget": 4, "loader": []}, DataError, "saw no data"),
        ({"budget": 4, "by": "luck"}, SpecError, 'by is "bound"'),
        ({"budget": 4, "by": "output", "loader": []}, DataError, "saw no data"),
    ],
)
def test_bad_requests_are_refused_and_change_nothing(
    options: dict[str, object], error: type[Exception], message: str
) -> None:
    net = network()
    net.set_bits(weights=5, activations=7)
    with pytest.raises(error, match=message):
        net.allocate(**{"loader": batches(), **options})  # type: ignore[arg-type]
    assert net.bits == anybit.Bits(5, 7)


def test_without_labels_the_networks_own_predictions_stand_in() -> None:
    net = network()
    inputs = [x for x, _ in batches()]
    with torch.no_grad():
        own = [(x, net(x).argmax(1)) for x in inputs]
    assert net.allocate(budget=4, loader=inputs) == net.allocate(budget=4, loader=own)


@pytest.mark.parametrize("budget", [2.5, 4.0])
def test_by_output_error_the_budget_holds_and_equal_widths_are_beaten(budget: float, tmp_path: Path) -> None:
    net = network(per_channel=True)
    inputs = [x for x, _ in batches()]
    found = net.allocate(budget=budget, loader=inputs, by="output", activations=32)
    assert found.average_bits <= budget
    assert "output error" in str(found)
    exact = torch.cat([net(x) for x in inputs]).detach()

    def error(**layers: Any) -> float:
        with torch.no_grad(), net.at(weights=8, activations=32, layers=layers):
            return float((torch.cat([net(x) for x in inputs]) - exact).square().mean() / exact.var(correction=0))

    mixed = error(**found.layers)
    assert found.measured == pytest.approx(mixed, rel=1e-2)
    assert mixed < error(**dict.fromkeys(net.weights, anybit.Bits(int(budget), 32)))
    anybit.save(net, tmp_path / "net.onnx")
    again = anybit.allocate(tmp_path / "net.onnx", inputs, budget=budget, activations=32)
    assert again.layers == found.layers
