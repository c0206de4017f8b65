"""Quantization of a model that lives on another device, with batches that live on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import images, warmed_up
from second_device import device_reads, second_device
from torch import Tensor, nn

import anybit
from anybit.models import build_model
from anybit.simulate.modules import Activation, executors
from anybit.simulate.network import QuantizedNetwork

X = torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 10
LOADER = [(X[:8], Y[:8]), (X[8:], Y[8:])]
"""Batches in ordinary memory, as loaders give them."""


@pytest.fixture(scope="module")
def device() -> torch.device:
    return second_device()


def model() -> nn.Module:
    torch.manual_seed(0)
    return warmed_up(build_model("small-conv", channels=1, classes=10, multiplier=0.25), images(1, 8, 8)).eval()


WAYS: dict[str, dict[str, Any]] = {
    "data-free": {"input_range": (0, 1)},
    "calibrated": {"calibration": LOADER, "method": "mse", "per_channel": True, "symmetric": False},
    "helpers": {"input_range": (0, 1), "helpers": "all"},
}


@pytest.fixture(scope="module", params=WAYS)
def pair(request: pytest.FixtureRequest, device: torch.device) -> tuple[QuantizedNetwork, QuantizedNetwork]:
    """The same network on the CPU and on the device."""
    way = WAYS[request.param]
    return anybit.prepare(model(), X[:2], **way, preset="paper"), anybit.prepare(
        model().to(device), X[:2].to(device), **way, preset="paper"
    )


Pair = tuple[QuantizedNetwork, QuantizedNetwork]


def tensors_of(net: QuantizedNetwork) -> list[Tensor]:
    found: list[Tensor] = [*net.parameters(), *net.buffers()]
    for module in executors(net.body).values():
        if isinstance(module, Activation):
            grid = module._placed  # where the values that came in last were
            found += [] if grid is None else grid[:2]
        elif module.value is not None:
            found.append(module.value)
    return found


def test_the_plan_is_that_of_the_cpu(pair: Pair) -> None:
    here, there = pair
    names = [[(p.name, p.kind) for p in net.plan.points] for net in pair]
    assert names[0] == names[1]
    for a, b in zip(here.plan.activations, there.plan.activations, strict=True):
        for (width, one), (same, other) in zip(a.ranges, b.ranges, strict=True):
            assert width == same
            assert (one.low, one.high) == pytest.approx((other.low, other.high), rel=1e-5)


def test_every_width_runs_there_and_gives_what_the_cpu_gives(pair: Pair, device: torch.device) -> None:
    here, there = pair
    for weights, activations in ((32, 32), (8, 8), (4, 4), (3, 32), (12, 6)):
        for net in pair:
            net.set_bits(weights=weights, activations=activations)
        assert {t.device for t in tensors_of(there)} == {device}
        with torch.no_grad():
            want, got = here(X), there(X.to(device))
        assert got.device == device
        # A sum on the border between two codes may fall on either side.
        off = float((got.cpu() - want).abs().max()) / float(want.abs().max())
        assert off < (1e-4 if activations == 32 else 0.1)
        numbers = [net.numbers() for net in pair]
        for name in numbers[0].weights:
            assert np.array_equal(*(n.codes(name).values for n in numbers))


def test_gradients_go_through_there(pair: Pair, device: torch.device) -> None:
    grads = []
    for net, place in zip(pair, ("cpu", device), strict=True):
        net.train().set_bits(weights=6, activations=32)
        F.cross_entropy(net(X.to(place)), Y.to(place)).backward()
        net.eval()
        grads.append([w.grad for w in net.weights.values()])
        assert all(w.grad is not None and w.grad.device == w.device for w in net.weights.values())
        net.zero_grad()
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=1e-3, atol=1e-5)


def test_a_sweep_moves_the_batches(pair: Pair) -> None:
    here, there = (anybit.sweep(net, LOADER, widths=[(32, 32), (8, 8), (4, 32)]) for net in pair)
    for a, b in zip(here, there, strict=True):
        assert a.bits == b.bits
        assert a.n == b.n == 12
        assert b.loss == pytest.approx(a.loss, rel=2e-2)
    assert there[0].kl == 0.0


def test_allocation_moves_the_batches(pair: Pair) -> None:
    here, there = (net.allocate(budget=4, loader=LOADER) for net in pair)
    assert there.layers == here.layers
    assert there.predicted == pytest.approx(here.predicted, rel=1e-3)
    assert there.loss == pytest.approx(here.loss, rel=1e-4)


def test_a_master_of_it_is_that_of_the_cpu(pair: Pair, device: torch.device, tmp_path: Path) -> None:
    _, there = pair
    for net, name in zip(pair, ("here.onnx", "there.onnx"), strict=True):
        anybit.save(net, tmp_path / name)
    assert {t.device for t in tensors_of(there)} == {device}  # it stays where it is
    sessions = [anybit.load(tmp_path / name) for name in ("here.onnx", "there.onnx")]
    for bits in (32, 5):
        for session in sessions:
            session.set_bits(weights=bits, activations=32)
        a, b = (session.run(X.numpy()) for session in sessions)
        assert np.abs(a - b).max() < 1e-4 * np.abs(a).max()
    assert sessions[1].plan == there.plan


def test_a_network_moves_between_devices_and_keeps_its_widths(device: torch.device) -> None:
    net = anybit.prepare(model(), X[:2], input_range=(0, 1), preset="paper")
    net.set_bits(weights=4, activations=32)
    with torch.no_grad():
        want = net(X)
        moved = net.to(device)
        assert {t.device for t in tensors_of(moved)} == {device}
        torch.testing.assert_close(moved(X.to(device)).cpu(), want, rtol=1e-4, atol=1e-4)
        back = moved.cpu()
        assert torch.equal(back(X), want)


def test_a_state_dict_goes_from_device_to_device(device: torch.device) -> None:
    there = anybit.prepare(model().to(device), X[:2].to(device), input_range=(0, 1), preset="paper")
    here = anybit.prepare(model(), X[:2], input_range=(0, 0.5), preset="paper")
    here.load_state_dict(there.state_dict())
    assert here.plan == there.plan
    assert {t.device.type for t in tensors_of(here)} == {"cpu"}


def test_activations_never_wait_for_the_device(pair: Pair, device: torch.device) -> None:
    """One look at all weights together tells whether any changed; nothing else is read in a forward pass."""
    there, x = pair[1], X.to(device)
    with torch.no_grad():
        for widths in ((32, 8), (8, 8)):
            there.set_bits(weights=widths[0], activations=widths[1])
            there(x)
            with device_reads() as reads:
                there(x)
            assert len(reads) <= (0 if widths[0] == 32 else 1), reads


def test_training_never_waits_for_the_device(device: torch.device) -> None:
    net = anybit.prepare(
        model().to(device), X[:2].to(device), input_range=(0, 1), per_channel=True, preset="paper"
    ).train()
    net.set_bits(weights=4, activations=4)
    x, y = X.to(device), Y.to(device)
    F.cross_entropy(net(x), y).backward()
    with device_reads() as reads:
        F.cross_entropy(net(x), y).backward()
    assert reads == []
