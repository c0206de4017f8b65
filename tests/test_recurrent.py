"""Recurrent cells are one operator, whose length is free, in simulation and in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from stranger_builder import Net
from torch import Tensor, nn

import anybit

CELLS = [
    (nn.LSTM, {}),
    (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    (nn.GRU, {"num_layers": 2, "bias": False}),
    (nn.GRU, {"bidirectional": True, "batch_first": False}),
    (nn.RNN, {"nonlinearity": "relu"}),
]


class Tagger(nn.Module):
    def __init__(self, cell: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        options = {"batch_first": True, **options}
        self.cell = cell(6, 8, **options)
        self.head = nn.Linear(16 if options.get("bidirectional") else 8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0])


@pytest.mark.parametrize(("cell", "options"), CELLS)
def test_a_recurrent_network_runs_at_any_length_and_width(
    cell: type[nn.RNNBase], options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = Tagger(cell, **options).eval(), torch.randn(4, 12, 6)
    net = anybit.prepare(model, x, calibration=[x], preset="paper")
    anybit.save(net, tmp_path / "m.onnx")
    session = anybit.load(tmp_path / "m.onnx")
    assert session.plan == net.plan
    matrices = [name for name, p in model.named_parameters() if p.dim() == 2]
    assert sorted(w.name for w in net.plan.weights) == sorted(matrices)
    kinds = [node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node]
    assert kinds.count({nn.LSTM: "LSTM", nn.GRU: "GRU", nn.RNN: "RNN"}[cell]) == options.get("num_layers", 1)
    for shape in ((4, 12, 6), (3, 29, 6)):
        y = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(net(y), model(y))
            for bits in (8, 4):
                net.set_bits(weights=bits, activations=8)
                session.set_bits(weights=bits, activations=8)
                want = net(y).numpy()
                assert np.abs(want - model(y).numpy()).max() > 1e-4  # rounding has happened
                np.testing.assert_allclose(session.run(y.numpy()), want, atol=1e-5)
            net.set_bits(weights=32, activations=32)


def test_a_cell_trains_through_its_rounded_weights() -> None:
    torch.manual_seed(0)
    model, x = Tagger(nn.LSTM).eval(), torch.randn(4, 9, 6)
    net = anybit.prepare(model, x, calibration=[x], preset="paper").train()
    net.set_bits(weights=4, activations=4)
    net(x).square().mean().backward()
    grads = {name: weight.grad for name, weight in net.weights.items()}
    assert all(grad is not None and bool(grad.abs().sum() > 0) for grad in grads.values())


@pytest.mark.parametrize("both", [False, True], ids=["one way", "both ways"])
def test_only_the_first_of_its_layers_keeps_more_bits(both: bool) -> None:
    class Speaker(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRU(6, 8, 3, batch_first=True, bidirectional=both)
            self.head = nn.Linear(16 if both else 8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.cell(x)[0][:, -1])

    x = torch.randn(2, 9, 6)
    plan = anybit.prepare(Speaker().eval(), x, calibration=[x], sensitive="8-bit").plan
    wide = {weight.name for weight in plan.weights if weight.floor >= 8}
    first = {f"cell.weight_{kind}_l0{way}" for kind in ("ih", "hh") for way in ("", "_reverse")[: 1 + both]}
    assert wide == {*first, "head.weight"}
    assert len(plan.weights) == 7 + 6 * both


def test_each_direction_of_a_file_has_scales_of_its_own(tmp_path: Path) -> None:
    """Weights of both directions lie in one tensor; those of one may be far smaller, and would all round to zero."""
    net = Net(3)
    x = net.input("x", net.draw(7, 2, 8, spread=1.0))
    weights = [net.draw(2, 48, size) for size in (8, 12)]
    for weight in weights:
        weight[1] *= 0.02
    held = [net.hold(weight) for weight in weights]
    y = net.node("LSTM", x, *held, hidden_size=12, direction="bidirectional", n=3)[0]
    net.output(net.node("Slice", y, *(net.hold(np.array([v])) for v in (1, 2, 1))))
    onnx.save(net.model(), tmp_path / "plain.onnx")
    plan = anybit.adopt(tmp_path / "plain.onnx", tmp_path / "m.onnx", calibration=[net.feed], sensitive="same")
    names = [f"{name}_{way}" for name in held for way in ("forward", "reverse")]
    assert [weight.name for weight in plan.weights] == names
    assert all(weight.clip for weight in plan.weights)
    session = anybit.load(tmp_path / "m.onnx")
    exact = session.run(net.feed)
    session.set_bits(weights=4, activations=32)
    found = session.run(net.feed)
    assert np.square(found - exact).mean() < 0.02 * np.square(exact).mean()
