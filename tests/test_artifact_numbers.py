"""What the runtime computes is what the simulation computes.

Both put the same codes into the same sums. What is left is the rounding of float32 itself: the simulation adds
products in floating point where ONNX Runtime adds integers and multiplies once. That changes an output by about
1e-7 of its size, unless it carries an activation across the border between two codes; then one code differs by one,
and what follows from it. Where two classes get the same logit, either is a right prediction.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from cases import CASES
from onnx import TensorProto, helper
from test_artifact_session import at
from test_to_onnx import arrays, by_name, saved
from torch import nn

import anybit
from anybit.artifact.master import open_master
from anybit.artifact.runtime import compile_model, onnxruntime
from anybit.artifact.session import load
from anybit.data import load_dataset
from anybit.simulate.modules import Activation, executors
from anybit.spec import Bits

Array = np.ndarray[Any, Any]
WIDTHS = [(8, 8), (8, 4), (6, 6), (4, 8), (4, 4), (3, 8)]
N = 1000
TIE = 1e-5
"""Of the largest output: what float32 sums in another order can differ by."""


def compare(name: str, widths: list[tuple[int, int]], n: int, **options: Any) -> list[tuple[float, float, float]]:
    """Return for each width: the part of equal predictions, the part of outputs that differ, by how much at most."""
    case, net, path = saved(name, **options)
    session = load(path, threads=1)
    inputs, feed = arrays(case, session.inputs, n)
    results = []
    for weights, activations in widths:
        net.set_bits(weights=weights, activations=activations)
        session.set_bits(weights=weights, activations=activations)
        with torch.no_grad():
            want = by_name(case.run(net, inputs))
        got = session.run(feed)
        got = got if isinstance(got, dict) else {"output": got}
        worst = [(1.0, 0.0, 0.0)]
        for key, value in want.items():
            size = np.abs(value).max()
            apart = np.abs(got[key] - value).max(1) / size
            worst.append((agreement(got[key], value), float((apart > TIE).mean()), float(apart.max())))
        agrees, differs, most = zip(*worst, strict=True)
        results.append((min(agrees), max(differs), max(most)))
    return results


def agreement(got: Array, want: Array) -> float:
    """Return the part of equal predictions; where two classes have the same output, either is right."""
    chosen = np.take_along_axis(want, got.argmax(1)[:, None], 1)[:, 0]
    return float((chosen >= want.max(1) - TIE * np.abs(want).max()).mean())


@pytest.mark.parametrize("name", [case.name for case in CASES if case.name != "resnet18"])
def test_simulation_and_runtime_agree(name: str) -> None:
    widths = WIDTHS if name != "mobilenetv2" else [(8, 8), (4, 4)]  # it takes longer than all the others together
    for (weights, activations), (agree, differs, most) in zip(widths, compare(name, widths, N), strict=True):
        where = f"W{weights}A{activations}: {agree:.4f} agree, {differs:.4f} differ, by at most {most:.1e}"
        assert agree >= 0.999, where
        assert differs <= 0.25, where
        assert most <= 0.25, where


def test_a_trained_resnet_agrees_on_real_images(tmp_path: Path) -> None:
    """Untrained, its margins are as small as the step of a code, and which class is largest is up to the last digit.

    The pictures get a little noise, as a camera adds it: on a background of one single value all of its pixels meet the
    same sums, and where one of those lies on the border between two codes, they all do.
    """
    data = load_dataset("digits")
    torch.manual_seed(0)
    model, x, y = next(c for c in CASES if c.name == "resnet18").build(), large(data.train.x), data.train.y
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.3  # so few steps
    for part in torch.cat([torch.randperm(len(y)) for _ in range(3)])[:2560].split(64):
        F.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()
        optimizer.zero_grad()
    net = anybit.prepare(model.eval(), x[:2], calibration=[x[:256]], preset="paper")
    anybit.save(net, tmp_path / "model.onnx")
    session = load(tmp_path / "model.onnx", threads=1)
    images = torch.cat([large(data.test.x), x])[:N]
    images += 0.05 * torch.randn_like(images)
    assert len(images) == N
    for weights, activations in WIDTHS:
        net.set_bits(weights=weights, activations=activations)
        session.set_bits(weights=weights, activations=activations)
        with torch.no_grad():
            want = net(images).numpy()
        got = session.run(images.numpy())
        assert isinstance(got, np.ndarray)
        agree = agreement(got, want)
        assert agree >= 0.999, f"W{weights}A{activations}: {agree:.4f} agree"
        assert len(set(want.argmax(1))) > (5 if weights > 3 else 1)  # it has learned to tell classes apart


def large(x: torch.Tensor) -> torch.Tensor:
    """Digits of 8x8 pixels as pictures of 32x32 in three colours."""
    return F.interpolate(x, size=32, mode="nearest").expand(-1, 3, -1, -1).contiguous()


def test_what_differs_starts_with_a_code_on_the_border() -> None:
    case, net, path = saved("resnet18")
    master = open_master(path)
    model, exact = at(master, Bits(8, 8))
    makers = {value: node for node in model.graph.node for value in node.output}
    codes = {a.name: makers[a.place].input[0] for a in master.plan.activations}
    model.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.UINT8, None) for name in codes.values())
    engine = compile_model(model, exact=exact, threads=1, where=str(path))
    n = 200
    inputs, feed = arrays(case, master.inputs, n)
    got = dict(zip((value.name for value in engine.get_outputs()), engine.run(None, feed), strict=True))
    seen: dict[str, Any] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda module, args: seen.__setitem__(module.point.name, args[0].numpy().copy())
        )
        for module in executors(net.body).values()
        if isinstance(module, Activation)
    ]
    net.set_bits(weights=8, activations=8)
    with torch.no_grad():
        case.run(net, inputs)
    for hook in hooks:
        hook.remove()
    differed, checked = np.zeros(n, bool), 0
    for point in master.plan.activations:
        grid = point.grid(8)
        ratio = seen[point.name] / grid.scale
        offset = 128 if grid.low < 0 else 0
        steps = got[codes[point.name]].astype(int) - np.clip(np.rint(ratio), grid.low, grid.high).astype(int) - offset
        rows = (steps != 0).reshape(n, -1).any(1)
        for row in np.flatnonzero(rows & ~differed):
            where = steps[row] != 0
            to_border = np.abs(np.abs(ratio[row][where] % 1) - 0.5)
            assert np.abs(steps[row]).max() == 1
            assert to_border.max() < 1e-3  # of a code: a few units in the last place of a float32 of that size
            checked += 1
        differed |= rows
    assert differed.mean() < 0.2
    assert checked == differed.sum()


OTHER = [(32, 32), (32, 8), (32, 4), (8, 32), (4, 32), (2, 2), (5, 7), (12, 12), (16, 16), (16, 8), (8, 16)]


@pytest.mark.parametrize("name", ["small-conv", "functional", "transformer", "two-inputs"])
def test_other_widths_agree_too(name: str) -> None:
    for (weights, activations), (agree, differs, most) in zip(OTHER, compare(name, OTHER, 200), strict=True):
        where = f"W{weights}A{activations}: {agree:.4f} agree, {differs:.4f} differ, by at most {most:.1e}"
        assert agree >= 0.995, where
        if 8 < activations < 32:  # so fine a grid that float32 itself decides many codes
            assert most <= 0.02, where
        else:
            assert differs <= 0.02, where


@pytest.mark.parametrize(
    "options",
    [
        {"per_channel": True},
        {"symmetric": False},
        {"symmetric": False, "per_channel": True},
        {"helpers": ("bias", "sums", "clip")},
        {"helpers": "all", "per_channel": True},
        {"sensitive": "8-bit"},
        {"sensitive": "float"},
        {"method": "mse"},
    ],
    ids=str,
)
def test_every_setting_of_prepare_agrees(options: dict[str, Any]) -> None:
    widths = [*WIDTHS, (32, 8), (8, 32), (2, 8)]
    for (weights, activations), (agree, differs, most) in zip(
        widths, compare("functional", widths, 500, **options), strict=True
    ):
        where = f"W{weights}A{activations}: {agree:.4f} agree, {differs:.4f} differ, by at most {most:.1e}"
        assert agree >= 0.998, where
        assert differs <= 0.01, where


def test_layers_with_widths_of_their_own_agree() -> None:
    case, net, path = saved("functional")
    session = load(path, threads=1)
    inputs, feed = arrays(case, session.inputs, 200)
    results = []
    for layers in ({"head": (8, 8)}, {"*": (8, 8), "a": (32, 32)}, {"head": (32, 32)}, {"c": (3, 3)}):
        net.set_bits(weights=4, activations=6, layers=layers)
        session.set_bits(weights=4, activations=6, layers=layers)
        with torch.no_grad():
            want = case.run(net, inputs).numpy()
        results.append(want)
        np.testing.assert_allclose(session.run(feed), want, atol=1e-5 * np.abs(want).max())
    assert all(not np.allclose(a, b) for a, b in itertools.pairwise(results))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_few_bits_take_half_a_byte_where_the_zeros_of_channels_differ(bits: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3)).eval()
    with torch.no_grad():
        for layer in model[::2]:
            layer.weight += layer.weight.std() * torch.linspace(-3, 3, len(layer.weight)).reshape(-1, 1, 1, 1)
    x = torch.randn(4, 3, 10, 10)
    anybit.save(anybit.prepare(model, x, calibration=[x], sensitive="same"), tmp_path / "m.onnx")
    anybit.export(tmp_path / "m.onnx", tmp_path / "out.onnx", weights=bits, activations=8)
    held = {tensor.name: tensor for tensor in onnx.load(tmp_path / "out.onnx").graph.initializer}
    codes = [tensor for name, tensor in held.items() if name.endswith("weight.codes")]
    assert {tensor.data_type for tensor in codes} == {TensorProto.INT4}
    assert any(name.endswith("weight.offset") for name in held) == (bits == 4), "others fit as they are"
    session = anybit.load(tmp_path / "m.onnx", threads=1)
    session.set_bits(weights=bits, activations=8)
    alone = onnxruntime().InferenceSession(tmp_path / "out.onnx", providers=["CPUExecutionProvider"])
    (found,) = alone.run(None, {alone.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(found, session.run(x.numpy()), rtol=1e-4, atol=1e-5)
