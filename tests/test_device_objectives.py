"""Every penalty on a model that lives on another device, and how often a step would wait for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from second_device import device_reads, second_device
from test_gradient import flat, grads
from test_loops import Net, batch, close
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anybit.objectives.base import Penalty
from anybit.objectives.gradient import GradientPenalty
from anybit.objectives.kurtosis import KurtosisPenalty
from anybit.objectives.noise import UniformNoise
from anybit.objectives.orthogonal import OrthogonalPenalty
from anybit.objectives.restore import random_state, set_random_state


@pytest.fixture
def device() -> torch.device:
    return second_device()


PENALTIES: dict[str, Callable[[nn.Module], Penalty]] = {
    "two-pass": lambda m: GradientPenalty(m, weight=1e-2, activation=1e-2),
    "two-pass, l2": lambda m: GradientPenalty(m, weight=1e-2, activation=1e-2, norm="l2"),
    "two-pass, range": lambda m: GradientPenalty(m, weight=1e-2, activation=1e-2, scale="range"),
    "worst-case": lambda m: GradientPenalty(m, weight=1e-2, activation=1e-2, objective="worst-case"),
    "double-backward": lambda m: GradientPenalty(m, weight=1e-2, activation=1e-2, engine="double-backward"),
    "kurtosis": lambda m: KurtosisPenalty(m, strength=0.1),
    "orthogonal": lambda m: OrthogonalPenalty(m, strength=0.1),
    "sum": lambda m: GradientPenalty(m, weight=1e-2, activation=1e-2) + KurtosisPenalty(m, strength=0.1),
}


def closure_on(model: nn.Module, device: torch.device | str) -> Callable[[], Tensor]:
    x, y = (t.to(device) for t in batch())
    return lambda: F.cross_entropy(model(x), y)


@pytest.mark.parametrize("name", PENALTIES)
def test_a_step_on_the_device_is_the_step_on_the_cpu(device: torch.device, name: str) -> None:
    results = []
    for place in ("cpu", device):
        torch.manual_seed(0)
        model = Net().to(place)
        step = PENALTIES[name](model).backward(closure_on(model, place))
        assert all(p.grad is None or p.grad.device == p.device for p in model.parameters())
        results.append((step, flat([g.cpu() for g in grads(model)])))
    close(results[1][1], results[0][1])
    assert results[1][0].loss == pytest.approx(results[0][0].loss, rel=1e-5)
    assert results[1][0].weight_norm == pytest.approx(results[0][0].weight_norm, rel=1e-4, nan_ok=True)


class Deep(nn.Module):
    """As many layers as wanted, each with batch norm and an activation that has a kink."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU6()) for _ in range(layers)), nn.Linear(6, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize("name", PENALTIES)
def test_a_step_waits_for_the_device_three_times_at_most(device: torch.device, name: str) -> None:
    counts = []
    for layers in (2, 9):
        torch.manual_seed(0)
        model = Deep(layers).to(device)
        x, y = torch.randn(8, 6).to(device), (torch.arange(8) % 4).to(device)
        penalty = PENALTIES[name](model)
        with device_reads() as reads:
            penalty.backward(lambda model=model, x=x, y=y: F.cross_entropy(model(x), y))
        counts.append(len(reads))
    assert counts[0] == counts[1], "the number of reads depends on the number of layers"
    assert 1 <= counts[0] <= 3


def test_what_counts_as_a_read(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    with device_reads() as reads:
        float(x.sum())
        bool((x > 0).all())
        x.tolist()
        x.cpu()
        assert len(reads) == 4
        (x * 2).abs().sum()
        torch.ones(2).tolist()
        assert len(reads) == 4
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)


def test_noise_on_the_device(device: torch.device) -> None:
    torch.manual_seed(0)
    model = Net().to(device)
    closure = closure_on(model, device)
    penalty = UniformNoise(model, widths=(3,))
    before = [p.detach().cpu().clone() for p in model.parameters()]
    penalty.backward(closure)
    assert all(torch.equal(a, p.detach().cpu()) for a, p in zip(before, model.parameters(), strict=True))
    noisy = flat([g.cpu() for g in grads(model)])
    model.zero_grad()
    closure().backward()
    assert not torch.allclose(noisy, flat([g.cpu() for g in grads(model)]))
    with device_reads() as reads:
        penalty.backward(closure)
    assert len(reads) == 1  # the loss, for the log: none for an activation


def test_the_devices_own_random_numbers_are_the_same_in_both_passes(device: torch.device) -> None:
    torch.manual_seed(0)
    model = Net(drop=0.5).to(device)
    masks: list[Tensor] = []
    model.drop.register_forward_hook(lambda module, args, out: masks.append(((out == 0) & (args[0] != 0)).cpu()))
    GradientPenalty(model, weight=1e-3).backward(closure_on(model, device))
    assert len(masks) == 2
    assert torch.equal(masks[0], masks[1])
    assert bool(masks[0].any())
    state = random_state()
    assert len(state[1]) == 1
    drawn = torch.rand(4, device=device).cpu(), torch.rand(4)
    set_random_state(state)
    again = torch.rand(4, device=device).cpu(), torch.rand(4)
    assert all(torch.equal(a, b) for a, b in zip(drawn, again, strict=True))


THREADS = """
import sys, threading, torch, torch.nn.functional as F
sys.path.insert(0, {tests!r})
from second_device import second_device
device = second_device(own_threads=True)
from test_device_objectives import Recomputed, closure_on
from anybit.objectives.gradient import GradientPenalty
from anybit.objectives.noise import UniformNoise
results = []
for place in ("cpu", device):
    torch.manual_seed(0)
    model = Recomputed().to(place)
    seen = set()
    model.a.weight.register_hook(lambda grad: seen.add(threading.get_ident()))
    closure = closure_on(model, place)
    GradientPenalty(model, weight=1e-2, activation=1e-2).backward(closure)
    results.append(torch.cat([p.grad.cpu().flatten() for p in model.parameters()]))
    assert (threading.get_ident() in seen) == (place == "cpu"), "the device has no thread of its own"
    UniformNoise(model).backward(closure)
error = float((results[0] - results[1]).norm() / results[0].norm())
assert error < 2e-3, error
print("fine")
"""


class Recomputed(Net):
    """The same network, a part of which is computed again in the backward pass, in the device's thread."""

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda t: F.max_pool2d(F.relu(self.norm(self.a(t))), 2), x, use_reentrant=False)
        return self.head(F.relu(self.b(x)).flatten(1))


@pytest.mark.slow
def test_a_device_with_a_thread_of_its_own(device: torch.device) -> None:
    script = THREADS.format(tests=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.endswith("fine\n"), done.stderr[-2000:]
