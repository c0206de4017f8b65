"""What rounding adds to the mean of a layer its bias takes back, with means from data, where outputs gain by it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from stranger_builder import Net
from torch import nn

import anybit
from anybit.plan.observe import Calibration, Channels
from anybit.plan.points import Activation, Bias, Plan, Weight, Widths
from anybit.plan.widen import least_off
from anybit.spec import FLOAT


def far_from_zero(folder: Path) -> tuple[Path, list[dict[str, np.ndarray]]]:
    """Write convolutions without normalization whose inputs have means that are large and differ by channel."""
    net = Net(5)
    feeds = [{"x": np.random.default_rng(i).normal(2.0, 1.0, (1, 3, 12, 12)).astype(np.float32)} for i in range(6)]
    y = net.input("x", feeds[0]["x"])
    for ins in (3, 16, 16, 16):
        shift = net.hold(np.linspace(-1, 6, 16, dtype=np.float32))
        y = net.node("Relu", net.node("Conv", y, net.weight(16, ins, 3, 3), shift))
    net.output(net.node("GlobalAveragePool", y))
    onnx.save(net.model(), folder / "plain.onnx")
    return folder / "plain.onnx", feeds


def error_at_four(path: Path, feeds: list[dict[str, np.ndarray]]) -> float:
    session = anybit.load(path)
    exact = [session.run(feed) for feed in feeds]
    session.set_bits(weights=4, activations=32)
    return float(np.mean([np.square(session.run(feed) - want).mean() for feed, want in zip(feeds, exact, strict=True)]))


def test_biases_are_corrected_with_means_from_data(tmp_path: Path) -> None:
    plain, feeds = far_from_zero(tmp_path)
    plan = anybit.adopt(plain, tmp_path / "with.onnx", calibration=feeds)
    other = anybit.adopt(plain, tmp_path / "without.onnx", calibration=feeds, helpers="sums")
    assert [bias.mean is not None for bias in plan.biases] == [False, True, True, True], (
        "an input has no place of its own"
    )
    assert not any(bias.mean for bias in other.biases)
    assert error_at_four(tmp_path / "with.onnx", feeds) < 0.5 * error_at_four(tmp_path / "without.onnx", feeds)


def test_prepare_corrects_with_the_same_means_as_adopt(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2, 2))
    with torch.no_grad():
        model[0].bias += 3
        model[2].bias += 3
    batches = [torch.randn(4, 3, 12, 12) for _ in range(3)]
    net = anybit.prepare(model.eval(), batches[0], calibration=batches)
    seen = {2: model[:2], 4: model[:4]}
    for index, stride in ((2, 1), (4, 4)):
        with torch.no_grad():
            want = torch.stack([seen[index](x).mean((0, 2, 3)) for x in batches]).mean(0) / stride
        mean = net.plan.bias(f"{index}.bias").mean
        assert mean is not None
        assert np.allclose(mean, want, rtol=1e-3)


def test_made_up_inputs_correct_nothing(tmp_path: Path) -> None:
    plain, _ = far_from_zero(tmp_path)
    assert not any(bias.mean for bias in anybit.adopt(plain, tmp_path / "m.onnx").biases)


def test_means_are_those_of_all_values_seen_along_the_channels() -> None:
    plan = Plan((Weight("w"), Activation("y", "activation")), (Bias("b", "w", "y"), Bias("c", "w", "y", mean=(7.0,))))
    watch = Calibration(plan, "min-max", fed={"b": Channels("y", -1), "c": Channels("y", -1)})
    watch.update({"y": np.array([[1.0, 2.0], [3.0, 4.0]])})
    watch.update({"y": np.array([[5.0, 3.0]])})
    assert [bias.mean for bias in watch.done().biases] == [(3.0, 3.0), (7.0,)], "what is known without data stays"


@pytest.mark.parametrize(("worse", "taken"), [(0.1, 1), (10.0, 0)])
def test_a_plan_is_taken_only_if_the_outputs_are_off_by_less(worse: float, taken: int) -> None:
    first = Plan((Weight("w"),), (Bias("b", "w"),))
    plans = [first, replace(first, biases=(Bias("b", "w", mean=(1.0,)),))]
    exact = np.array([1.0, -1.0])

    def run(plan: Plan):  # type: ignore[no-untyped-def]
        def outputs(widths: Widths) -> list[np.ndarray]:
            return [exact + (0 if widths["w"] == FLOAT else 0.1 * worse ** plans.index(plan))]

        return outputs

    assert least_off(plans, run) is plans[taken]
    assert least_off(plans[:1], run) is first


def test_means_that_batch_norm_tells_stay_whatever_data_say() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Sigmoid(), nn.Conv2d(8, 4, 1)
    )
    batches = [torch.randn(4, 3, 12, 12) for _ in range(3)]
    known = anybit.prepare(model.eval(), batches[0]).plan.bias("3.bias").mean
    assert known is not None
    assert anybit.prepare(model, batches[0], calibration=batches).plan.bias("3.bias").mean == known


@pytest.mark.parametrize(("far", "clipped"), [((1,), True), ((0, 5, 10, 15), False)])
def test_at_8_bits_rare_values_are_cut_off_only_if_the_outputs_gain(far: tuple[int, ...], clipped: bool) -> None:
    """The outputs are looked at for inputs 0, 5, 10 and 15."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(64, 64, 1), nn.ReLU(), nn.Conv2d(64, 8, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(64)[..., None, None])
        model[0].bias.zero_()
        usual = torch.linspace(0.05, 0.95, 64)  # what the last layer does not see, so that small errors count
        last = model[2].weight[..., 0, 0]
        last -= (last @ usual)[:, None] * usual / usual.square().sum()
    inputs = [usual[:, None, None] + 0.1 * torch.rand(1, 64, 20, 20) - 0.05 for _ in range(16)]
    for i in far:
        inputs[i][0, 0, 0, 0] = 1.25
    net = anybit.prepare(model, inputs[0], calibration=inputs)
    found = next(a for a in net.plan.activations if a.kind == "activation").range_at(8)
    assert found is not None
    assert found.high == pytest.approx(1.0 if clipped else 1.25, abs=0.02)
