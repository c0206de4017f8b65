"""Weights that are computed from parameters in every pass are weights all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import anybit
from anybit.simulate.capture import capture
from anybit.simulate.constants import fold_constants


class Mixed(nn.Module):
    """A product with half the sum of two matrices, and one with a matrix that is only turned around."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(6, 6)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ ((self.a + self.b) / 2)) @ self.c.t()


def networks() -> dict[str, tuple[nn.Module, Tensor, list[str]]]:
    torch.manual_seed(0)
    sound = [parametrizations.weight_norm(nn.Conv1d(4, 8, 3)), nn.BatchNorm1d(8), nn.ReLU()]
    sound += [parametrizations.weight_norm(nn.ConvTranspose1d(8, 6, 4, 2)), nn.Tanh(), nn.Linear(24, 5)]
    rows = [parametrizations.spectral_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 3)]
    return {
        "weight norm": (nn.Sequential(*sound), torch.randn(2, 4, 13), ["0.weight", "3.weight", "5.weight"]),
        "spectral norm": (nn.Sequential(*rows), torch.randn(2, 6), ["0.weight", "2.weight"]),
        "a product": (Mixed(), torch.randn(2, 6), ["matmul.weight", "c"]),
    }


@pytest.mark.parametrize("name", networks())
def test_a_computed_weight_is_a_weight_in_network_and_file(name: str, tmp_path: Path) -> None:
    model, x, weights = networks()[name]
    model.eval()
    net = anybit.prepare(model, x, calibration=[x])
    assert [weight.name for weight in net.plan.weights] == weights
    anybit.save(net, tmp_path / "m.onnx")
    session: Any = anybit.load(tmp_path / "m.onnx")
    with torch.no_grad():
        assert torch.allclose(net(x), model(x), atol=1e-5)
        for bits in ({"weights": 8, "activations": 8}, {"weights": 3, "activations": 8}):
            net.set_bits(**bits)
            session.set_bits(**bits)
            assert np.allclose(session.run(x.numpy()), net(x).numpy(), atol=1e-5)


def test_parameters_that_are_only_turned_around_stay_what_they_are() -> None:
    body = capture(Mixed().eval(), torch.randn(2, 6))
    before = {name: p.data_ptr() for name, p in body.named_parameters()}
    fold_constants(body)
    after = {name: p.data_ptr() for name, p in body.named_parameters()}
    assert after["c"] == before["c"]
    assert "matmul.weight" in after
