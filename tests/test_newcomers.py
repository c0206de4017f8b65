"""What people try first and get wrong: each mistake is answered by one sentence."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import anybit
from anybit.errors import CaptureError, DataError, PenaltyError, SpecError


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("engine", ["two-pass", "double-backward"])
def test_a_closure_that_runs_backward_itself(engine: str) -> None:
    model, x = network(), torch.randn(6, 4)
    penalty = anybit.GradientPenalty(model, weight=1e-3, engine=engine)  # type: ignore[arg-type]

    def closure() -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with pytest.raises(PenaltyError, match=r"the closure runs backward\(\) itself; let it return the loss"):
        penalty.backward(closure)


def test_a_penalty_of_another_model_warns() -> None:
    penalty, other = anybit.GradientPenalty(network(), weight=1e-3), network()
    x = torch.randn(6, 4)
    with pytest.warns(UserWarning, match="build it from the model that the closure runs"):
        step = penalty.backward(lambda: other(x).square().mean())
    assert step.weight_norm == 0


def test_a_raw_model_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"save takes a network from anybit.prepare\(.*\), got Sequential"):
        anybit.save(network(), tmp_path / "m.onnx")  # type: ignore[arg-type]
    assert not (tmp_path / "m.onnx").exists()


def test_a_script_module_and_one_number_for_a_range() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.trace(network().eval(), torch.randn(2, 4))
    with pytest.raises(CaptureError, match="a ScriptModule has no Python code to capture"):
        anybit.prepare(script, torch.randn(2, 4))
    with pytest.raises(SpecError, match=r"input_range is a pair of numbers \(low, high\)"):
        anybit.prepare(network().eval(), torch.randn(2, 4), input_range=1.0)  # type: ignore[arg-type]


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * 2 if x.sum() > 0 else x)


def test_a_branch_on_data_is_said_without_a_dump(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError, match=r"it branches on the values of a tensor; use torch.where"):
        anybit.prepare(Branch(), torch.randn(2, 4))
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_a_network_in_the_place_of_rows(tmp_path: Path) -> None:
    net = anybit.prepare(network().eval(), torch.randn(2, 4), input_range=(-4.0, 4.0))
    with pytest.raises(SpecError, match=r"report takes rows, or net= and loader= by name to measure them; got Quant"):
        anybit.report(net, tmp_path / "report.html")  # type: ignore[arg-type]


def test_widths_in_the_ways_that_people_write_them(tmp_path: Path) -> None:
    x = torch.randn(6, 4)
    net = anybit.prepare(network().eval(), x, input_range=(-4.0, 4.0))
    anybit.save(net, tmp_path / "m.onnx")
    for switch in (net, anybit.load(tmp_path / "m.onnx")):
        switch.set_bits(weights=4, activations=8)
        switch.set_bits("W3A8")
        assert str(switch.bits) == "W3A8"
        switch.set_bits((4, 4))
        assert str(switch.bits) == "W4A4"
        with pytest.raises(SpecError, match=r'widths are a pair .* such as \(8, 8\) or "W8A8"; got 4'):
            switch.set_bits(4)  # type: ignore[arg-type]
        for wrong in ({"weights": 4}, {"activations": 4}, {}):
            with pytest.raises(SpecError, match='widths are "W4A8", or weights=4 and activations=8, both of them'):
                switch.set_bits(**wrong)
        with pytest.raises(SpecError, match="both of them"):
            switch.set_bits("W4A8", weights=4)
        assert str(switch.bits) == "W4A4"


def test_a_sweep_without_widths_and_loaders_that_it_cannot_go_through() -> None:
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    net = anybit.prepare(network().eval(), x, input_range=(-4.0, 4.0))
    rows = anybit.sweep(net, [(x, y)])
    assert [str(row.bits) for row in rows] == ["FP", "W8A8", "W4A8", "W4A4"]
    assert anybit.sweep(net, [(x, y)], widths="FP,W8A8, W4A8 W4A4") == rows
    with pytest.raises(DataError, match="the loader can be gone through once only; pass a list of batches"):
        anybit.sweep(net, (batch for batch in [(x, y)]))
    with pytest.raises(SpecError, match=r"sweep takes a network from anybit.prepare\(.*\), got Sequential"):
        anybit.sweep(network(), [(x, y)])  # type: ignore[arg-type]
    with pytest.raises(DataError, match="prepared with inputs without names: prepare it with such a dict"):
        anybit.sweep(net, [{"a": x, "b": x, "label": y}])
