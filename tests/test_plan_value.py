"""A plan is a value; a network and its plan survive being stored; what is kept of other widths has a bound."""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import CASES, Case
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import anybit
from anybit.artifact import session as sessions
from anybit.artifact.master import open_master
from anybit.errors import SpecError
from anybit.plan.numbers import Kept
from anybit.plan.text import plan_from_values, plan_to_values
from anybit.simulate import network as simulated
from anybit.simulate.modules import Weight, executors
from anybit.simulate.network import QuantizedNetwork

SMALL = [c for c in CASES if c.name not in ("vgg-like", "resnet18", "mobilenetv2", "recurrent", "kinks")]


def prepared(case: Case, seed: int = 0, **options: Any) -> QuantizedNetwork:
    torch.manual_seed(seed)
    data = None if case.data_free else [(case.inputs(8), None)]
    return anybit.prepare(case.build().eval(), case.inputs(2), calibration=data, **options, preset="paper")


@pytest.fixture(scope="module", params=SMALL, ids=lambda c: c.name)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def net(case: Case) -> QuantizedNetwork:
    return prepared(case, helpers="all", method="mse")


# The plan


def test_a_plan_prints_is_hashable_and_equal_to_its_copies(net: QuantizedNetwork) -> None:
    plan = net.plan
    lines = str(plan).splitlines()
    assert len(lines) == 2 + len(plan.points) + len(plan.left)
    for point, line in zip(plan.points, lines[2:], strict=False):
        assert line.startswith(f"{point.name} ")
        assert point.kind in line
    twin = copy.deepcopy(plan)
    assert twin is not plan
    assert twin == plan
    assert hash(twin) == hash(plan)
    assert {plan: 1}[twin] == 1
    moved = dataclasses.replace(plan, points=tuple(reversed(plan.points)))
    assert moved != plan
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.points = ()  # type: ignore[misc]


def test_a_plan_is_the_same_after_values_and_json(net: QuantizedNetwork) -> None:
    values = plan_to_values(net.plan)
    again = plan_from_values(json.loads(json.dumps(values)), where="here")
    assert again == net.plan
    assert hash(again) == hash(net.plan)
    assert str(again) == str(net.plan)
    assert plan_to_values(again) == values
    at = anybit.Bits(5, 6)
    assert again.widths(at) == net.plan.widths(at)


def test_a_plan_is_the_same_after_the_file(net: QuantizedNetwork, tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    anybit.save(net, path)
    assert anybit.load(path).plan == net.plan
    assert open_master(path).plan == net.plan


def test_the_widths_of_the_network_change_nothing_in_the_plan(case: Case, net: QuantizedNetwork) -> None:
    before = net.plan
    net.set_bits(weights=3, activations=4)
    case.run(net, case.inputs(2))
    assert net.plan is before


# A network and its state


def by_torch(state: dict[str, Tensor]) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


def by_safetensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return load(save({name: tensor.contiguous() for name, tensor in state.items()}))


def outputs(case: Case, net: QuantizedNetwork, inputs: Any) -> list[Tensor]:
    with torch.no_grad():
        return [t.clone() for t in pytree.tree_leaves(case.run(net, inputs))]


@pytest.fixture(scope="module")
def stranger(case: Case) -> QuantizedNetwork:
    """The same network with other weights."""
    return prepared(case, seed=1, helpers="all", method="mse")


@pytest.mark.parametrize("through", [by_torch, by_safetensors])
def test_a_state_dict_brings_weights_and_ranges_into_another_network(
    case: Case,
    net: QuantizedNetwork,
    stranger: QuantizedNetwork,
    through: Callable[[dict[str, Tensor]], dict[str, Tensor]],
) -> None:
    other = copy.deepcopy(stranger)
    inputs = case.inputs(4)
    other.set_bits(weights=4, activations=4)
    before = outputs(case, other, inputs)
    assert other.plan != net.plan
    other.load_state_dict(through(net.state_dict()))
    assert other.plan == net.plan
    assert other.bits == anybit.Bits(4, 4)
    for weights, activations in ((4, 4), (32, 32), (8, 8), (3, 32), (12, 6)):
        for each in (net, other):
            each.set_bits(weights=weights, activations=activations)
        for a, b in zip(outputs(case, net, inputs), outputs(case, other, inputs), strict=True):
            assert torch.equal(a, b)
    other.set_bits(weights=4, activations=4)
    after = outputs(case, other, inputs)
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))  # so that equal outputs say something


def test_the_state_of_another_network_is_refused() -> None:
    one, other = (prepared(next(c for c in CASES if c.name == name)) for name in ("dropout", "small-conv"))
    with pytest.raises((SpecError, RuntimeError), match=r"other points|Missing key"):
        one.load_state_dict(other.state_dict())


# Weights that change


def small(**options: Any) -> QuantizedNetwork:
    return copy.deepcopy(_small(**options))


@functools.cache
def _small(**options: Any) -> QuantizedNetwork:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5))
    return anybit.prepare(model.eval(), torch.randn(2, 8), input_range=(-3, 3), **options, preset="paper")


def by_data(change: Callable[[Tensor], object]) -> Callable[[nn.Parameter], object]:
    return lambda p: change(p.data)


def add_to_one(x: Tensor) -> None:
    x[0] += 0.5


def swap_two(x: Tensor) -> None:
    x[[0, 1]] = x[[1, 0]]


def negate_one(x: Tensor) -> None:
    x.view(-1)[3] *= -1


CHANGES = {
    "mul_": by_data(lambda x: x.mul_(1.5)),
    "flip": by_data(lambda x: x.copy_(x.flip(0))),
    "add to one": by_data(add_to_one),
    "swap": by_data(swap_two),
    "sign": by_data(negate_one),
    "numpy": lambda p: p.detach().numpy().__imul__(0.5),
    "assigned": lambda p: setattr(p, "data", p.data * 2),
    "moving average": by_data(lambda x: x.lerp_(torch.ones_like(x), 0.1)),
    "part of a buffer": lambda p: setattr(p, "data", torch.randn(p.numel() + 1)[1:].view(p.shape)),
}


@pytest.mark.parametrize("helpers", [(), ("sums", "clip", "bias")], ids=["nearest", "helpers"])
@pytest.mark.parametrize("kind", ["weight", "bias"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_changed_in_any_way_is_seen(change: str, kind: str, helpers: tuple[str, ...]) -> None:
    net = small(helpers=helpers)
    net.set_bits(weights=4, activations=8)
    x = torch.randn(6, 8)
    with torch.no_grad():
        before = net(x)
    name = net.plan.weights[0].name if kind == "weight" else net.plan.biases[0].name
    CHANGES[change](executors(net.body)[name].master)
    with torch.no_grad():
        after = net(x)
    assert not torch.equal(after, before)
    fresh = small(helpers=helpers)
    fresh.load_state_dict(net.state_dict())
    fresh.set_bits(weights=4, activations=8)
    with torch.no_grad():
        assert torch.equal(fresh(x), after)


@pytest.mark.parametrize("bits", [(5, 7), (4, 8), (4, 6), (3, 8)])
def test_what_was_rounded_while_a_weight_was_another_is_not_used(bits: tuple[int, int]) -> None:
    net, fresh = small(helpers="bias"), small(helpers="bias")
    x = torch.randn(6, 8)
    for weights in (4, 3):
        net.set_bits(weights=weights, activations=8)
    changed = [parameter.data for parameter in net.parameters()]
    kept = [value.clone() for value in changed]
    for value in changed:
        value.mul_(1.5)
    net.set_bits(weights=bits[0], activations=bits[1])  # a width that is new, or new with these activations, or not
    for value, old in zip(changed, kept, strict=True):
        value.copy_(old)
    fresh.set_bits(weights=bits[0], activations=bits[1])
    with torch.no_grad():
        assert torch.equal(net(x), fresh(x))


def test_numbers_are_those_of_the_weights_as_they_are_now() -> None:
    net = small()
    net.set_bits(weights=4, activations=8)
    name = net.plan.weights[0].name
    old = net.numbers().codes(name)
    net.weights[name].data.copy_(net.weights[name].data.flip(0))
    new = net.numbers().codes(name)
    assert np.array_equal(new.values, old.values[::-1])
    x = torch.randn(3, 8)
    with torch.no_grad():
        net(x)
    assert np.array_equal(executors(net.body)[name].value.numpy(), new.dequantized())


def test_in_training_mode_without_gradients_the_numbers_are_the_same() -> None:
    for options in ({}, {"per_channel": True}, {"symmetric": False}, {"helpers": "all"}):
        net = small(**options)
        net.set_bits(weights=4, activations=5)
        x = torch.randn(6, 8)
        with torch.no_grad():
            want = net(x)
            assert torch.equal(net.train()(x), want)
        assert torch.equal(net(x).detach(), want)
        net.set_bits(weights=3, activations=5)
        net.set_bits(weights=4, activations=5)
        with torch.no_grad():
            assert torch.equal(net.eval()(x), want)  # though no weight changed since it was rounded last
        for parameter in net.parameters():
            parameter.requires_grad_(False)
        assert torch.equal(net.train()(x), want)


# What is kept


def test_kept_never_holds_more_than_its_bytes() -> None:
    kept = Kept(1000)
    most = 0
    for key in [1, 2, 3, 1, 4, 5, 6, 1, 7]:
        assert kept.get(key, lambda key=key: np.full(100, key, np.float32), lambda a: a.nbytes)[0] == key
        most = max(most, kept.nbytes)
        assert kept.nbytes == 400 * len(kept) <= 1000
    assert most == 800
    assert kept.get("large", lambda: np.zeros(1000, np.float32), lambda a: a.nbytes).shape == (1000,)
    assert "large" not in kept
    assert kept.nbytes == 800  # nothing had to go for what does not fit
    assert 7 in kept
    kept.clear()
    assert (kept.nbytes, len(kept), 7 in kept) == (0, 0, False)


@pytest.mark.parametrize("limit", [0, 700, 5000])
@pytest.mark.parametrize("helpers", [(), ("sums", "bias")], ids=["nearest", "helpers"])
def test_a_network_with_little_room_gives_the_same_answers(
    limit: int, helpers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    roomy, x = small(helpers=helpers), torch.randn(6, 8)
    monkeypatch.setattr(simulated, "CACHE_BYTES", limit)
    net = _small.__wrapped__(helpers=helpers)
    assert net._kept.limit == limit
    for bits in (8, 4, 3, 8, 12, 4, 32, 8):
        for each in (roomy, net):
            each.set_bits(weights=bits, activations=bits)
        with torch.no_grad():
            assert torch.equal(net(x), roomy(x))
        assert net._kept.nbytes <= limit
    assert roomy._kept.nbytes > 5000
    assert all(m.value is not None for m in executors(net.body).values() if isinstance(m, Weight))


def test_a_session_keeps_no_more_than_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net.onnx"
    anybit.save(small(helpers="bias"), path)
    x = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
    roomy = anybit.load(path)
    want = {}
    for bits in (8, 4, 3, 32):
        roomy.set_bits(weights=bits, activations=bits)
        want[bits] = roomy.run(x)
    limit = roomy._kept.nbytes // 2
    monkeypatch.setattr(sessions, "KEEP_BYTES", limit)
    monkeypatch.setattr(sessions, "CODES_BYTES", 0)
    tight = anybit.load(path)
    for bits in (8, 4, 3, 8, 4, 32):
        tight.set_bits(weights=bits, activations=bits)
        assert np.array_equal(tight.run(x), want[bits])
        assert 0 < tight._kept.nbytes <= limit
