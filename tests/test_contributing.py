"""The samples of CONTRIBUTING.md, run as they stand."""

from __future__ import annotations

import doctest
import re
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybit
from anybit.models import MODELS, build_model
from anybit.plan.observe import OBSERVERS

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def sample(path: str) -> types.ModuleType:
    """Make a module of the block that says it belongs at `path`."""
    (code,) = [block for block in BLOCKS if block.startswith(f"# {path}\n")]
    module = types.ModuleType(Path(path).stem)
    exec(compile(code, path, "exec"), module.__dict__)
    return module


def line(start: str) -> str:
    (code,) = [block for block in BLOCKS if block.lstrip().startswith(start)]
    return code.strip()


def test_the_regularizer() -> None:
    module = sample("src/anybit/objectives/outliers.py")
    assert doctest.testmod(module) == (0, 1)
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 3).double(), torch.randn(8, 4).double(), torch.arange(8) % 3
    names = {"GradientPenalty": anybit.GradientPenalty, "OutlierPenalty": module.OutlierPenalty, "F": F}
    scope = {**names, "model": model, "x": x, "y": y}
    exec(line("penalty ="), scope)
    ratio = module.outlier_ratio(model.weight)
    assert scope["step"].terms["outliers"] == pytest.approx(float(ratio.detach()))
    with_both = model.weight.grad
    model.weight.grad = None
    anybit.GradientPenalty(model, weight=2e-3).backward(lambda: F.cross_entropy(model(x), y))
    (own,) = torch.autograd.grad(1e-4 * ratio, model.weight)
    torch.testing.assert_close(with_both, model.weight.grad + own)


def test_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sample("src/anybit/models/plain.py")
    for name, build in eval("{" + line('"plain"') + "}", module.__dict__).items():
        monkeypatch.setitem(MODELS, name, build)
    model = build_model("plain", channels=1, classes=10, multiplier=0.5).eval()
    net = anybit.prepare(model, torch.rand(2, 1, 8, 8), input_range=(0, 1), preset="paper")
    net.set_bits(weights=4, activations=4)
    assert net(torch.rand(3, 1, 8, 8)).shape == (3, 10)


def test_the_range_setter(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sample("src/anybit/plan/sigmas.py")
    scope = {"FourSigmas": module.FourSigmas, "MinMax": OBSERVERS["min-max"], "Observer": module.Observer}
    exec(line("OBSERVERS"), scope)
    for name, observer in scope["OBSERVERS"].items():
        monkeypatch.setitem(OBSERVERS, name, observer)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.randn(500, 4)
    net = anybit.prepare(model, x[:2], calibration=x.split(100), method="four-sigmas", preset="paper")
    (entry,) = [a for a in net.plan.activations if a.kind == "input"]
    found = entry.range_at(8)
    assert found is not None
    assert found.source == "calibration, four-sigmas"
    assert found.low == pytest.approx(float(x.mean() - 4 * x.std(correction=0)), rel=1e-5)
    assert found.high == pytest.approx(float(x.mean() + 4 * x.std(correction=0)), rel=1e-5)


def test_what_make_offers_is_what_the_makefile_has() -> None:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^make (\w+)", TEXT, re.MULTILINE))
    assert {"setup", "check", "test", "demo", "bench"} <= targets
    assert targets <= set(re.findall(r"^(\w+):", makefile, re.MULTILINE))
