"""What networks get without being told: presets, ranges for each width, layers that keep more bits, checked helpers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from cases import images, warmed_up
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import anybit
from anybit.errors import SpecError
from anybit.graph.view import Node
from anybit.models import build_model
from anybit.plan.build import PRESETS, Settings
from anybit.plan.checked import output_error, relative_error
from anybit.plan.codes import encode
from anybit.plan.observe import Calibration
from anybit.plan.points import Activation, Plan, Weight
from anybit.spec import Range

X = torch.rand(4, 3, 16, 16)


class Mobile(nn.Module):
    """A small network with everything that keeps more bits: a depthwise layer and a gate per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.deep, self.deep_norm = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8)
        self.squeeze, self.excite = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.wide, self.wide_norm = nn.Conv2d(8, 12, 1), nn.BatchNorm2d(12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem_norm(self.stem(x)))
        x = torch.relu(self.deep_norm(self.deep(x)))
        gate = torch.sigmoid(self.excite(torch.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))
        x = torch.relu(self.wide_norm(self.wide(x * gate)))
        return self.head(x.mean((2, 3)))


def mobile() -> nn.Module:
    torch.manual_seed(0)
    return warmed_up(Mobile(), images(3, 16, 16)).eval()


def test_layers_that_few_bits_hurt_most_keep_eight_and_say_why() -> None:
    net = anybit.prepare(mobile(), X, input_range=(0, 1))
    reasons = {w.name: w.because for w in net.plan.weights}
    assert reasons == {
        "stem.weight": "first layer",
        "deep.weight": "depthwise layer",
        "squeeze.weight": "squeeze-and-excite layer",
        "excite.weight": "squeeze-and-excite layer",
        "wide.weight": "",
        "head.weight": "last layer",
    }
    net.set_bits(weights=3, activations=3)
    widths = net.plan.widths(anybit.Bits(3, 3))
    assert {name: widths[name] for name in reasons} == {n: 8 if why else 3 for n, why in reasons.items()}
    assert "8 (depthwise layer)" in str(net.plan)
    alike = anybit.prepare(mobile(), X, input_range=(0, 1), sensitive="same")
    assert set(alike.plan.widths(anybit.Bits(3, 3)).values()) == {3, 8}  # 8: the input and what sums are made of
    assert not any(point.because for point in alike.plan.points)


def test_a_preset_fills_in_what_the_user_leaves_open() -> None:
    default = Settings.of("default", per_channel=None, symmetric=None)
    assert default == PRESETS["default"]
    paper = Settings.of("paper", helpers="all", sigmas=4.0)
    assert (paper.per_channel, paper.symmetric, paper.sigmas, paper.sensitive) == (False, True, 4.0, "same")
    assert paper.helpers == {"equalize", "bias", "sums", "clip"}
    assert Settings.of("default", helpers=()).helpers == frozenset()
    with pytest.raises(SpecError, match="a preset is one of default, paper; got 'best'"):
        anybit.prepare(mobile(), X, preset="best")
    with pytest.raises(SpecError, match="a calibration method is one of min-max, percentile, mse"):
        anybit.prepare(mobile(), X, method="median")


def test_channels_share_their_zero_at_eight_bits_and_have_their_own_below() -> None:
    net = anybit.prepare(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), X, input_range=(0, 1))
    (weight,) = net.plan.weights
    assert (weight.centred, weight.spec(8).symmetric, weight.spec(4).symmetric) == (True, True, False)
    # What a file of before says nothing about is as it was.
    assert not Weight("a", axis=0, symmetric=False).spec(8).symmetric


def test_the_fewer_the_bits_the_narrower_the_range_without_data() -> None:
    """A normal value: all six standard deviations at 8 bits, two to three of them at 3."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8, affine=False), nn.Conv2d(8, 4, 1)).eval()
    net = anybit.prepare(model, X, input_range=(0, 1), sensitive="same")
    (point,) = [a for a in net.plan.activations if a.kind == "activation"]
    ends = {bits: found.high for bits in range(2, 9) if (found := point.range_at(bits)) is not None}
    assert ends[8] == pytest.approx(6, abs=0.01)
    assert 1.5 < ends[3] < 3.2
    assert sorted(ends.values()) == list(ends.values())
    x = np.random.default_rng(0).normal(size=200_000).astype(np.float32)
    for bits in (3, 4, 5):
        errors = {}
        for factor in (0.8, 1.0, 1.25):
            low, high = (factor * end for end in (point.range_at(bits).low, point.range_at(bits).high))  # type: ignore[union-attr]
            step = (high - low) / (2**bits - 1)
            errors[factor] = float(np.mean((np.clip(np.round((x - low) / step), 0, 2**bits - 1) * step + low - x) ** 2))
        assert min(errors, key=errors.__getitem__) == 1.0
    fixed = anybit.prepare(model, X, input_range=(0, 1), sigmas=6.0)
    assert [len(a.ranges) for a in fixed.plan.activations if a.kind == "activation"] == [1]


def test_the_default_does_better_than_the_paper_on_an_ordinary_network() -> None:
    torch.manual_seed(0)
    model = warmed_up(build_model("small-conv", channels=1, classes=10, multiplier=1.0), images(1, 8, 8)).eval()
    x = torch.randn(256, 1, 8, 8)
    with torch.no_grad():
        want = model(x)

    def error(bits: int, **settings: Any) -> float:
        net = anybit.prepare(model, x[:2], input_range=(-4, 4), **settings)
        net.set_bits(weights=bits, activations=bits)
        with torch.no_grad():
            return float((net(x) - want).norm() / want.norm())

    for bits in (3, 4):
        assert error(bits) < 0.7 * error(bits, preset="paper")
        assert error(bits) < error(bits, helpers=())


def test_an_error_that_all_points_one_way_costs_more_than_one_that_cancels() -> None:
    layer = Node("layer", [], "", "")
    one_way, cancels = np.full((1, 2, 3, 3), 0.1), np.full((1, 2, 3, 3), 0.1)
    cancels[..., ::2] *= -1
    assert output_error(one_way, layer, np.ones(2)) > 3 * output_error(cancels, layer, np.ones(2))
    quiet = output_error(one_way, layer, np.array([1.0, 0.0]))
    assert quiet < output_error(one_way, layer, np.ones(2)) / 2  # a channel that never moves costs nothing


def test_a_helper_stays_only_where_it_lowers_the_error() -> None:
    net = anybit.prepare(mobile(), X, input_range=(0, 1), helpers=("sums", "clip"), sensitive="same")
    plain = anybit.prepare(mobile(), X, input_range=(0, 1), helpers=(), sensitive="same")
    seen = set()
    for own, before in zip(net.plan.weights, plain.plan.weights, strict=True):
        weight = net.weights[own.name].detach().numpy()
        groups = 8 if own.name == "deep.weight" else 1
        layer = Node("layer", [], "", "", groups=groups)
        seen.add((own.sums, own.clip))
        # Here the spread of the inputs is taken as one; the pass knows it where a normalization tells.
        assert relative_error(weight, own, layer, np.ones(1)) <= 1.5 * relative_error(weight, before, layer, np.ones(1))
    assert seen - {(False, False)}


def test_equalization_that_would_cost_more_than_it_gains_is_left_out() -> None:
    """Every channel has a scale of its own already, and one channel carries values a hundred times smaller."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6)
    ).eval()
    with torch.no_grad():
        model[0].weight.mul_(torch.tensor([1.0, 1.0, 1.0, 0.01]).view(-1, 1, 1, 1))
        model[1].running_var.copy_(torch.tensor([1.0, 1.0, 1.0, 1e-4]))
    same = anybit.prepare(model, X, input_range=(0, 1), preset="paper", per_channel=True, helpers=())
    net = anybit.prepare(model, X, input_range=(0, 1), preset="paper", per_channel=True, helpers="equalize")
    for name in same.weights:
        torch.testing.assert_close(net.weights[name], same.weights[name], rtol=1e-3, atol=1e-6)


def sounding(tmp_path: Any) -> Any:
    """A file for sound: a spectrum by a convolution, its size, and a layer that reads it."""
    rng = np.random.default_rng(0)
    basis, weight = rng.normal(size=(16, 1, 32)).astype(np.float32), rng.normal(size=(4, 16, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "basis"], ["spectrum"], strides=[16]),
        helper.make_node("Abs", ["spectrum"], ["size"]),
        helper.make_node("Conv", ["size", "weight"], ["hidden"]),
        helper.make_node("Relu", ["hidden"], ["bent"]),
        helper.make_node("Conv", ["bent", "last"], ["y"]),
    ]
    values = {"basis": basis, "weight": weight, "last": rng.normal(size=(2, 4, 1)).astype(np.float32)}
    graph = helper.make_graph(
        nodes, "sound",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 1, 512])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in values.items()],
    )  # fmt: skip
    path = tmp_path / "sound.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_a_signal_is_not_rounded_below_what_it_came_as(tmp_path: Any) -> None:
    rng = np.random.default_rng(1)
    feeds = [{"x": rng.normal(size=(1, 1, 512)).astype(np.float32)} for _ in range(4)]
    plan = anybit.adopt(sounding(tmp_path), tmp_path / "m.onnx", calibration=feeds, sensitive="8-bit")
    because = {a.name: a.because for a in plan.activations}
    assert {name for name, why in because.items() if why == "signal"} >= {"x", "size"}
    assert because["bent"] != "signal"
    widths = plan.widths(anybit.Bits(8, 8))
    assert (widths["x"], widths["size"], widths["bent"]) == (32, 16, 8)
    asked = anybit.adopt(sounding(tmp_path), tmp_path / "m.onnx", calibration=feeds, input_range=(-4, 4))
    assert asked.widths(anybit.Bits(8, 8))["x"] == 8


def test_made_up_inputs_leave_room_and_replace_what_means_nothing(tmp_path: Any) -> None:
    plan = anybit.adopt(sounding(tmp_path), tmp_path / "m.onnx")
    points = {a.name: a for a in plan.activations}
    found = points["bent"].ranges[0][1]
    assert found.source == "made-up inputs"
    assert points["x"].ranges == ()
    narrow = points["bent"].range_at(4)
    assert narrow is not None
    assert narrow.high < found.high


def test_the_range_of_a_layer_norm_reaches_as_far_as_made_up_inputs() -> None:
    known = Activation(
        "y", "activation", ranges=((32, Range(-3.0, 3.0, "layer norm n")), (4, Range(-2.0, 2.0, "layer norm n")))
    )
    other = replace(known, name="z", ranges=((32, Range(-3.0, 3.0, "batch norm b")),))
    watch = Calibration(Plan((known, other)), "min-max", made_up=True)
    watch.update({name: np.array([-1.0, 20.0], np.float32) for name in "yz"})
    found = {a.name: dict(a.ranges) for a in watch.done().activations}
    assert [str(found["y"][bits]) for bits in (32, 4)] == ["[-3, 20]", "[-2, 2]"]
    assert str(found["z"][32]) == "[-3, 3]"


def test_made_up_inputs_never_cut_off_what_a_function_may_reach() -> None:
    known = Activation("y", "activation", ranges=((32, Range(0.0, 1.0, "softmax stays inside")),))
    watch = Calibration(Plan((known,)), "mse", made_up=True)
    watch.update({"y": np.linspace(0, 0.05, 500, dtype=np.float32)})
    found = dict(watch.done().activations[0].ranges)
    assert str(found[32]) == "[0, 1]"
    assert found[4].high < 0.1  # few bits are not spent on what was never seen


def test_a_product_with_a_gate_is_as_uncertain_as_its_other_factor() -> None:
    source = "batch norm b (estimated), HardSigmoid stays inside"
    known = Activation("y", "activation", ranges=((32, Range(-2.0, 7e6, source)),))
    watch = Calibration(Plan((known,)), "mse", made_up=True)
    watch.update({"y": np.linspace(-1, 3, 500, dtype=np.float32)})
    assert str(dict(watch.done().activations[0].ranges)[32]) == "[-2, 6]"


def test_rounding_that_keeps_sums_is_for_layers_only() -> None:
    torch.manual_seed(0)

    class Heard(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.cell(x)[0])

    net = anybit.prepare(Heard().eval(), torch.randn(2, 5, 8), calibration=[torch.randn(4, 5, 8)])
    cells = [w for w in net.plan.weights if w.name.startswith("cell")]
    assert cells
    assert not any(w.sums for w in cells)
    for point in cells:  # the nearest code is at most half a step away
        weight = net.weights[point.name].detach().numpy()
        codes = encode(weight, Weight(point.name, axis=point.axis, symmetric=False), 4)
        assert float(np.abs(codes.error(weight)).max()) <= 0.51 * float(codes.scale.max())
