from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cases import CASES, Case, images, warmed_up
from grids import quantize_tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import anybit
from anybit.errors import AnybitError, CaptureError, DataError, RangeError, SpecError
from anybit.models import build_model
from anybit.plan.grid import make_grid
from anybit.simulate.modules import Bias, Weight, executors
from anybit.simulate.network import QuantizedNetwork
from anybit.simulate.rounding import fake_quantize
from anybit.spec import QuantSpec


def small() -> nn.Module:
    torch.manual_seed(0)
    return warmed_up(build_model("small-conv", channels=1, classes=10, multiplier=0.5), images(1, 8, 8)).eval()


def weight_widths(net: QuantizedNetwork) -> set[int]:
    return {m.bits for m in executors(net.body).values() if isinstance(m, Weight)}


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_full_precision_is_the_original_at_any_batch_size(case: Case) -> None:
    torch.manual_seed(0)
    model = case.build()
    flags = [module.training for module in model.modules()]
    before = copy.deepcopy(model.state_dict())
    data = None if case.data_free else [(case.inputs(8), None) for _ in range(2)]
    net = anybit.prepare(model, case.inputs(1), calibration=data, preset="paper")
    assert [module.training for module in model.modules()] == flags
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    model.eval()
    for n in (1, 2, 7):
        inputs = case.inputs(n)
        with torch.no_grad():
            torch.testing.assert_close(case.run(net, inputs), case.run(model, inputs), rtol=1e-5, atol=1e-5)
    net.set_bits(weights=4, activations=4)
    with torch.no_grad():
        case.run(net, case.inputs(3))


def whole(bias: Tensor, unit: Tensor) -> Tensor:
    """A bias as integer kernels add it: a whole number of units of weight times input."""
    return torch.round(bias / unit) * unit


def test_the_simulation_is_what_one_would_write_by_hand() -> None:
    torch.manual_seed(0)
    conv, norm, head = nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.Linear(3, 2)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 0.5, 2.0]))
        norm.bias.copy_(torch.tensor([0.0, 1.0, -1.0]))
        norm.running_var.fill_(4.0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.head = conv, norm, head

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))

    net = anybit.prepare(Net().eval(), torch.rand(2, 1, 6, 6), input_range=(0.0, 1.0), preset="paper")
    net.set_bits(weights=4, activations=3)
    x = torch.rand(5, 1, 6, 6)
    factor = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    weight = quantize_tensor((conv.weight * factor.view(-1, 1, 1, 1)).detach(), QuantSpec(4))
    bias = whole(norm.bias - norm.running_mean * factor, weight.abs().max() / 7 * (1 / 255))
    x8 = fake_quantize(x, make_grid(torch.tensor(0.0), torch.tensor(1.0), QuantSpec(8, signed=False)))
    top = torch.tensor(-1.0 + 6 * 2.0)  # the channel that reaches furthest: beta + 6 gamma
    stored = fake_quantize(
        torch.relu(nn.functional.conv2d(x8, weight, bias)),
        make_grid(torch.tensor(0.0), top, QuantSpec(8, signed=False)),
    )
    y = stored.mean((2, 3))
    y3 = fake_quantize(y, make_grid(torch.tensor(0.0), top, QuantSpec(3, signed=False)))
    last = quantize_tensor(head.weight.detach(), QuantSpec(4))
    want = nn.functional.linear(y3, last, whole(head.bias, last.abs().max() / 7 * (top / 7)))
    torch.testing.assert_close(net(x), want)


def test_the_plan_lists_every_point_once_and_prints() -> None:
    net = anybit.prepare(small(), torch.randn(2, 1, 8, 8), input_range=(0, 1), preset="paper")
    kinds = [point.kind for point in net.plan.points]
    assert kinds.count("weight") == 8  # six convolutions and two linear layers
    assert kinds.count("input") == 1
    assert kinds.count("activation") == 7  # what feeds the other seven layers
    points = net.plan.points
    assert len({point.name for point in points}) == len(points)
    net.set_bits(weights=4, activations=6)
    found = net.numbers().widths
    text = net.plan.table(found)
    for printed in (text, str(net.plan)):
        assert len(printed.splitlines()) == len(points) + 2
        assert "batch norm features.1" in printed
    assert {text.splitlines()[2 + i].split()[-1] for i, p in enumerate(points) if p.kind == "weight"} == {"4"}
    widths = {point.kind: {found[p.name] for p in points if p.kind == point.kind} for point in points}
    assert widths == {"weight": {4}, "activation": {6}, "input": {8}, "accumulator": {8}}
    kinds_of = {name: module.bits for name, module in executors(net.body).items() if not isinstance(module, Bias)}
    assert kinds_of == found  # the modules run at what the plan says


def test_without_a_range_the_input_stays_in_floating_point_and_the_plan_says_so() -> None:
    net = anybit.prepare(small(), torch.randn(2, 1, 8, 8), preset="paper")
    assert [a.name for a in net.plan.activations if not a.ranges] == ["x"]
    (line,) = [line.split() for line in str(net.plan).splitlines() if line.startswith("x ")]
    assert "unknown" in line
    assert line[-1] == "float"


widths = st.tuples(*[st.one_of(st.integers(2, 16), st.just(32))] * 2)
_NETS = [
    anybit.prepare(small(), torch.randn(2, 1, 8, 8), input_range=(0, 1), per_channel=True, preset="paper"),
    anybit.prepare(
        small(), torch.randn(2, 1, 8, 8), input_range=(0, 1), helpers="all", symmetric=False, preset="paper"
    ),
]
_X = torch.rand(4, 1, 8, 8)
_WANT = [net(_X).detach() for net in _NETS]
patterns = st.sampled_from(["features.*", "*", "*.weight", "classifier"])


@given(st.sampled_from([0, 1]), st.lists(st.tuples(widths, st.dictionaries(patterns, widths, max_size=2)), max_size=6))
@settings(deadline=None, max_examples=60)
def test_any_sequence_of_widths_then_32_is_bit_for_bit_the_start(index: int, sequence: list[Any]) -> None:
    net = _NETS[index]
    for (weights, activations), layers in sequence:
        net.set_bits(weights=weights, activations=activations, layers=layers)
        with torch.no_grad():
            net(_X)
    net.set_bits(weights=32, activations=32)
    assert torch.equal(net(_X), _WANT[index])


def test_at_restores_the_widths_also_when_the_body_raises() -> None:
    net = anybit.prepare(small(), torch.randn(2, 1, 8, 8), preset="paper")
    net.set_bits(weights=6, activations=5)
    with net.at(weights=2, activations=2):
        assert net.bits == anybit.Bits(2, 2)
    assert net.bits == anybit.Bits(6, 5)
    with pytest.raises(SpecError, match="must be a tensor"), net.at(weights=2, activations=2):
        net("not a tensor")
    assert net.bits == anybit.Bits(6, 5)
    assert weight_widths(net) == {6}


@pytest.mark.parametrize(("weights", "activations"), [(1, 8), (8, 17), (0, 0), (4.5, 8), (32, 1)])
def test_bad_widths_change_nothing(weights: int, activations: int) -> None:
    net = anybit.prepare(small(), torch.randn(2, 1, 8, 8), preset="paper")
    net.set_bits(weights=4, activations=4)
    want = net(_X)
    with pytest.raises(SpecError, match="must be"):
        net.set_bits(weights=weights, activations=activations)
    assert net.bits == anybit.Bits(4, 4)
    assert torch.equal(net(_X), want)


def test_the_network_has_weights_of_its_own() -> None:
    model = small()
    net = anybit.prepare(model, torch.randn(2, 1, 8, 8), preset="paper")
    want = net(_X)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.zero_()
    assert torch.equal(net(_X), want)


def test_training_through_the_grid_moves_the_master_weights() -> None:
    net = anybit.prepare(small(), torch.randn(2, 1, 8, 8), input_range=(0, 1), preset="paper")
    net.set_bits(weights=3, activations=4)
    before = net(_X).detach()
    loss = nn.functional.cross_entropy(net(_X), torch.arange(4))
    loss.backward()
    assert all(m.grad is not None and bool((m.grad != 0).any()) for m in net.weights.values())
    torch.optim.SGD(net.parameters(), lr=0.5).step()
    with torch.no_grad():
        after = net(_X)
        assert not torch.equal(after, before)
    torch.testing.assert_close(net(_X), after, rtol=0, atol=0)  # the cache saw that the master moved


def error_of(model: nn.Module, **options: bool) -> float:
    x = torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    want = model(x).detach()
    net = anybit.prepare(model, x[:2], input_range=(0, 1), **options, preset="paper")
    net.set_bits(weights=4, activations=8)
    with torch.no_grad():
        return float((net(x) - want).pow(2).mean())


def test_per_channel_errs_less_where_one_channel_stands_out() -> None:
    model = small()
    with torch.no_grad():
        model.features[0].weight[0] *= 30
        model.features[1].running_var[0] *= 30**2
        model.features[1].weight[0] *= 30
    assert error_of(model, per_channel=True) < error_of(model)


def test_asymmetric_errs_less_where_weights_are_lopsided() -> None:
    model = small()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.weight.copy_(module.weight.abs())
    warmed_up(model, images(1, 8, 8)).eval()
    assert error_of(model, symmetric=False) < error_of(model)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


def test_without_batch_norm_the_points_are_named_and_calibration_helps() -> None:
    model = Bare()
    with pytest.raises(RangeError, match="calibration=loader") as caught:
        anybit.prepare(model, torch.randn(2, 4), preset="paper")
    assert caught.value.problems == ("relu",)
    data = torch.randn(100, 4)
    net = anybit.prepare(model, data[:2], calibration=[(data[:50], None), data[50:]], preset="paper")
    hidden = torch.relu(model.a(data)).detach()
    ranges = {point.name: point.range_at(32) for point in net.plan.activations}
    assert ranges["x"] is not None
    assert ranges["relu"] is not None
    assert ranges["x"].low == pytest.approx(float(data.min()))
    assert ranges["relu"].high == pytest.approx(float(hidden.max()))
    assert all(a.ranges for a in net.plan.activations)
    with pytest.raises(DataError, match="saw no data"):
        anybit.prepare(model, data[:2], calibration=[], preset="paper")
    with pytest.raises(SpecError, match="one of min-max"):
        anybit.prepare(model, data[:2], calibration=[data], method="guess", preset="paper")


class Fixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(4, -1)


class ByValue(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if bool(x.sum() > 0) else -x


class Holder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.stem(x))


def test_networks_that_cannot_be_captured_say_where_and_why() -> None:
    with pytest.raises(CaptureError, match="fixed at 4"):
        anybit.prepare(Holder(Fixed()), torch.randn(4, 4), preset="paper")
    with pytest.raises(CaptureError, match="inner") as caught:
        anybit.prepare(Holder(ByValue()), torch.randn(4, 4), preset="paper")
    assert len(caught.value.problems) == 1
    with pytest.raises(CaptureError, match=r"torch\.nn\.Module is expected"):
        anybit.prepare(torch.relu, torch.randn(4, 4), preset="paper")  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match="at least one tensor"):
        anybit.prepare(Bare(), (), preset="paper")


def test_weights_that_are_not_finite_are_refused() -> None:
    model = Bare()
    with torch.no_grad():
        model.a.weight[0, 0] = float("nan")
    with pytest.raises(AnybitError, match=r"a\.weight has infinite or NaN"):
        anybit.prepare(model, torch.randn(2, 4), calibration=[torch.randn(4, 4)], preset="paper")


def test_outputs_that_are_next_to_nothing_are_no_reason_to_refuse() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3)).eval()
    with torch.no_grad():
        model[1].weight *= 1e-43  # folded, it has few digits left
        model[4].bias.zero_()
    assert anybit.prepare(model, torch.randn(2, 1, 8, 8)).plan.weights
