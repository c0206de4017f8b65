"""The data-free helpers, put to work in a prepared network."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, Case, images, warmed_up
from grids import quantize_tensor
from torch import Tensor, nn

import anybit
from anybit.errors import SpecError
from anybit.models import build_model
from anybit.plan.grid import make_grid, min_max
from anybit.simulate.modules import Bias, executors
from anybit.simulate.network import QuantizedNetwork
from anybit.spec import QuantSpec

HELPERS = ["equalize", "bias", "sums", "clip", "all"]


def rounded_weights(net: QuantizedNetwork) -> list[tuple[Tensor, Tensor, QuantSpec]]:
    """Each weight in floating point, as it is rounded, and the grid's rule."""
    modules = executors(net.body)
    found = [(modules[point.name], point) for point in net.plan.weights]
    return [(module.master.detach(), module.value, point.spec(module.bits)) for module, point in found]


@pytest.mark.parametrize("helpers", HELPERS)
@pytest.mark.parametrize("case", [c for c in CASES if c.data_free], ids=lambda c: c.name)
def test_full_precision_is_the_original_with_every_helper(case: Case, helpers: str) -> None:
    torch.manual_seed(0)
    model = case.build().eval()
    net = anybit.prepare(model, case.inputs(2), helpers=helpers, preset="paper")
    inputs = case.inputs(3)
    with torch.no_grad():
        want = case.run(model, inputs)
        torch.testing.assert_close(case.run(net, inputs), want, rtol=1e-4, atol=1e-4)
        net.set_bits(weights=3, activations=4)
        case.run(net, inputs)
        net.set_bits(weights=32, activations=32)
        torch.testing.assert_close(case.run(net, inputs), want, rtol=1e-4, atol=1e-4)


def lopsided() -> nn.Module:
    """Channels of very different size, so that one scale per tensor serves most of them badly."""
    torch.manual_seed(0)
    model = build_model("small-conv", channels=1, classes=10, multiplier=0.5)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.copy_(torch.logspace(-1.0, 0.7, len(module.weight)))
                module.bias.normal_(0, 0.5)
    for _ in range(20):
        model(torch.rand(32, 1, 8, 8))
    return model.eval()


def error(model: nn.Module, helpers: object, *, bits: int = 4, **options: object) -> float:
    x = torch.rand(256, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    net = anybit.prepare(model, x[:2], input_range=(0, 1), helpers=helpers, **options, preset="paper")  # type: ignore[arg-type]
    net.set_bits(weights=bits, activations=32)
    with torch.no_grad():
        return float((net(x) - model(x)).square().mean() / model(x).var())


def test_equalization_takes_back_a_scale_that_moved_between_layers() -> None:
    """Multiply some channels and divide the next layer by as much: the same function, harder to quantize."""
    torch.manual_seed(0)
    model = warmed_up(build_model("small-conv", channels=1, classes=10, multiplier=0.5), images(1, 8, 8)).eval()
    easy = error(model, "equalize")
    modules = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.BatchNorm2d)]
    with torch.no_grad():
        for norm, layer in zip(modules[1::2], modules[2::2], strict=False):
            factor = torch.logspace(-1, 1, len(norm.weight))
            norm.weight.mul_(factor)
            norm.bias.mul_(factor)
            layer.weight.div_(factor.view(1, -1, 1, 1))
    assert error(model, ()) > 2 * easy
    assert error(model, "equalize") < 1.2 * easy


def test_sums_and_all_together_help_at_low_widths() -> None:
    model = lopsided()
    plain = error(model, (), bits=3)
    assert error(model, "sums", bits=3) < plain
    assert error(model, "all", bits=3) < 0.7 * plain
    assert error(model, ["equalize", "bias"], bits=3) < plain


@pytest.mark.parametrize("per_channel", [False, True])
def test_sums_in_the_network_are_what_the_rule_promises(per_channel: bool) -> None:
    net = anybit.prepare(lopsided(), torch.rand(2, 1, 8, 8), helpers="sums", per_channel=per_channel, preset="paper")
    net.set_bits(weights=4, activations=32)
    kept = [point.sums for point in net.plan.weights]
    assert any(kept)  # a layer keeps the helper where it lowers its error
    for master, rounded, spec in itertools.compress(rounded_weights(net), kept):
        scale = make_grid(*min_max(master, spec.axis), spec).scale
        units = ((rounded - master) / scale).double()
        assert float(units.abs().max()) < 1 + 1e-3
        assert float(units.flatten(1).sum(1).abs().max()) <= 0.5 + 1e-3
        nearest = ((quantize_tensor(master, spec) - master) / scale).double()
        assert float(nearest.flatten(1).sum(1).abs().max()) > 0.5  # so the promise says something


def test_clipping_lowers_the_error_of_each_weight() -> None:
    net = anybit.prepare(lopsided(), torch.rand(2, 1, 8, 8), helpers="clip", preset="paper")
    net.set_bits(weights=3, activations=32)
    better = 0
    for master, rounded, spec in rounded_weights(net):
        clipped = float((rounded - master).square().sum())
        plain = float((quantize_tensor(master, spec) - master).square().sum())
        assert clipped <= plain * 1.0001
        better += clipped < 0.95 * plain
        assert float(rounded.abs().max()) <= float(master.abs().max()) * 1.0001
    assert better > 3
    assert str(net.plan).count("weights, per tensor, clipped") == len(net.plan.weights)


class Gaussian(nn.Module):
    """A batch norm that makes real Gaussians, rectified, into a layer: here the mean of the input is exactly known."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm2d(6), layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.relu(self.norm(x)))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(6, 5, 3),
        nn.Conv2d(6, 5, 3, bias=False),
        nn.Conv2d(6, 6, 3, groups=6),
        nn.Conv2d(6, 4, 1, groups=2),
        nn.ConvTranspose2d(6, 4, 1, groups=2),
        nn.ConvTranspose2d(6, 4, 2, stride=2),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)),
    ],
    ids=["convolution", "no-bias", "depthwise", "grouped", "transposed", "strided", "linear"],
)
def test_bias_correction_takes_back_the_shift_of_the_mean(layer: nn.Module) -> None:
    torch.manual_seed(0)
    model = Gaussian(layer).eval()
    with torch.no_grad():
        model.norm.weight.uniform_(0.5, 2.0)
        model.norm.bias.uniform_(0.0, 2.0)
    x = torch.randn(3000, 6, 6, 6)
    shifts = {}
    for helpers in ((), "bias"):
        net = anybit.prepare(model, x[:2], helpers=helpers, preset="paper")  # type: ignore[arg-type]
        net.set_bits(weights=3, activations=32)
        with torch.no_grad():
            moved = (net(x) - model(x)).transpose(0, 1).flatten(1).mean(1)
        shifts[helpers] = float(moved.abs().max())
    assert shifts["bias"] < 0.1 * shifts[()]


def test_bias_correction_is_left_out_where_no_mean_is_known() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 2))
    net = anybit.prepare(model, torch.randn(2, 4), helpers="bias", calibration=[torch.randn(9, 4)], preset="paper")
    assert [bias.mean for bias in net.plan.biases] == [None, None]


def test_helpers_are_chosen_by_name() -> None:
    model = lopsided()
    for wrong in ("equalise", ["bias", "magic"], ["all", "bias"]):
        with pytest.raises(SpecError, match="a helper is one of equalize, bias, sums, clip, or all"):
            anybit.prepare(model, torch.rand(2, 1, 8, 8), helpers=wrong, preset="paper")


def test_training_with_helpers_sees_each_new_weight() -> None:
    net = anybit.prepare(lopsided(), torch.rand(2, 1, 8, 8), input_range=(0, 1), helpers="all", preset="paper")
    net.set_bits(weights=3, activations=4)
    x, y = torch.rand(16, 1, 8, 8), torch.arange(16) % 10
    before = F.cross_entropy(net(x), y)
    before.backward()
    assert all(w.grad is not None and bool((w.grad != 0).any()) for w in net.weights.values())
    torch.optim.SGD(net.parameters(), lr=0.05).step()
    with torch.no_grad():
        after = net(x)
    assert not torch.equal(F.cross_entropy(after, y), before)
    torch.testing.assert_close(net(x).detach(), after, rtol=0, atol=0)


def test_tied_weights_with_helpers() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.BatchNorm1d(6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(F.relu(self.layer(F.relu(self.norm(x)))))

    torch.manual_seed(0)
    model = warmed_up(Twice(), images(6)).eval()
    net = anybit.prepare(model, torch.randn(2, 6), helpers="all", preset="paper")
    x = torch.randn(5, 6)
    torch.testing.assert_close(net(x), model(x), rtol=1e-5, atol=1e-5)
    assert len(net.weights) == 1
    biases = [m.master for m in net.modules() if isinstance(m, Bias)]
    assert len(biases) == 2
    # Behind a layer without normalization nobody knows the mean well enough.
    assert [bias.mean is not None for bias in net.plan.biases] == [True, False]
    assert biases[0] is biases[1]
