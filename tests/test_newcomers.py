"""What people try first and get wrong: each mistake is answered by one sentence."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import anybit
from anybit.errors import CaptureError, PenaltyError, SpecError


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
