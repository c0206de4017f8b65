"""The any-width objective: the quantized pass is what `prepare` makes, its gradient is right, nothing else changes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from together import script_together
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anybit.data import load_dataset
from anybit.errors import NonFiniteError, PenaltyError, RecipeError, SpecError
from anybit.models import build_model
from anybit.objectives.any_width import AnyWidth
from anybit.objectives.gradient import GradientPenalty
from anybit.objectives.kurtosis import KurtosisPenalty
from anybit.objectives.noise import UniformNoise
from anybit.plan.build import Settings
from anybit.plan.grid import Grid
from anybit.simulate.live import Live
from anybit.simulate.prepare import prepare
from anybit.simulate.rounding import fake_quantize, round_through
from anybit.spec import Bits
from anybit.train.loop import fit
from anybit.train.recipe import parse_recipe


class Net(nn.Module):
    """Two convolutions, one with batch norm, a sum, and a linear layer."""

    def __init__(self, *, norm: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3, padding=1, bias=not norm)
        self.norm: nn.Module = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.b = nn.Conv2d(4, 4, 1)
        self.second: nn.Module = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(4 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.a(x)))
        y = F.relu(self.second(self.b(y)) + y)
        return self.head(self.dropout(F.max_pool2d(y, 2)).flatten(1))


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(lambda t: F.relu(self.norm(self.a(t))), x, use_reentrant=False)
        y = F.relu(self.second(self.b(y)) + y)
        return self.head(F.max_pool2d(y, 2).flatten(1))


class Late(nn.Module):
    """A batch norm that cannot be folded, a grouped and a depthwise convolution, and two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm2d(4)
        self.a, self.n = nn.Conv2d(4, 8, 3, groups=2, bias=False), nn.BatchNorm2d(8)
        self.b, self.m = nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8, affine=False)
        self.up, self.k = nn.ConvTranspose2d(8, 4, 2, groups=2), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self.n(self.a(F.relu(self.first(x)))))
        y = F.hardswish(self.k(self.up(F.relu(self.m(self.b(y))))))
        y = y.mean((2, 3))
        return self.head(F.relu(self.head(y)))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.table(ids)).mean(1))


def batch(n: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, 8, 8, generator=generator), torch.randint(0, 5, (n,), generator=generator)


def used(model: nn.Module, *inputs: Tensor) -> nn.Module:
    """A model whose statistics and scales are not those it was born with."""
    model.train()
    with torch.no_grad():
        for x in inputs:
            model(x)
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(0.2 * torch.randn_like(p))
    return model


def closure_of(model: nn.Module, x: Tensor, y: Tensor, *, outputs: bool = True) -> Callable[[], Any]:
    def closure() -> Any:
        out = model(x)
        loss = F.cross_entropy(out, y)
        return (loss, out) if outputs else loss

    return closure


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def of_both(model: nn.Module, **options: Any) -> AnyWidth:
    fixed = {"strength": 0.5, "limit": math.inf}
    return AnyWidth(model, batch(2)[0], **{**fixed, **options})


def close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 1e-4) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=tolerance, atol=tolerance * float(value.abs().max() + 1e-6))


# The live network is what `prepare` makes

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "plain": (Net, (6, 3, 8, 8)),
    "late": (Late, (6, 4, 9, 9)),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "paper": {"preset": "paper"},
    "default": {"preset": "default", "helpers": ()},
    "equalized": {"preset": "default", "helpers": ("equalize",)},
    "clipped": {"preset": "paper", "helpers": ("equalize", "clip")},
}
WIDTHS = (Bits(), Bits(8, 8), Bits(6, 4), Bits(4, 8), Bits(3, 3), Bits(2, 32))


@pytest.mark.parametrize("name", list(NETWORKS))
def test_the_live_network_is_what_prepare_makes(name: str) -> None:
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    x = torch.randn(shape)
    model = used(make(), x, 2 * x)
    live = Live(model, x, settings=[Settings.of(**s) for s in SETTINGS.values()], input_range=(-3.0, 3.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):  # the model moves on, and the live network with it
        model(x).square().mean().backward()
        optimizer.step()
    live.refresh()
    for number, options in enumerate(SETTINGS.values()):
        net = prepare(model, x, input_range=(-3.0, 3.0), **options)
        assert live.variants[number].plan.points == net.plan.points
        for bits in WIDTHS:
            net.set_bits(weights=bits.weights, activations=bits.activations)
            live.set_width(bits, number)
            with torch.no_grad():
                want, got = net(x), live(x)
            assert float((want - got).abs().max()) <= 2e-6 * float(want.abs().max()), (options, bits)


def test_a_live_network_without_batch_norm_takes_ranges_from_its_data() -> None:
    torch.manual_seed(0)
    x, _ = batch()
    model = Net(norm=False)
    live = Live(model, x, settings=[Settings.of("paper")], input_range=(-4.0, 4.0))
    live.look(x)
    net = prepare(model, x, preset="paper", calibration=[x], input_range=(-4.0, 4.0))
    for bits in WIDTHS:
        net.set_bits(weights=bits.weights, activations=bits.activations)
        live.set_width(bits)
        torch.testing.assert_close(live(x).detach(), net(x).detach(), rtol=1e-5, atol=1e-6)
    wide = live.variants[0].plan.activations[-1].ranges[0][1].high
    live.look(3 * x)
    later = live.variants[0].plan.activations[-1].ranges[0][1].high
    assert wide < later < 2 * wide  # a fifth of the way


def test_calls_by_name_and_by_position_are_the_same() -> None:
    torch.manual_seed(0)
    x, _ = batch()
    live = Live(used(Net(), x), x, settings=[Settings.of("paper")])
    live.set_width(Bits(4, 4))
    assert torch.equal(live(x), live(x=x))
    with pytest.raises(SpecError, match="must have the shape"):
        live(x[0])


@pytest.mark.parametrize(
    "norm",
    [nn.GroupNorm(2, 4), nn.GroupNorm(2, 4, affine=False), nn.InstanceNorm2d(4, affine=True)],
    ids=["group", "plain group", "instance"],
)
def test_a_live_network_follows_norms_over_one_example(norm: nn.Module) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.Conv2d(4, 3, 3)), torch.randn(2, 1, 8, 8)
    live = Live(model, x, settings=[Settings.of("paper")])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    live.refresh()
    want = {a.name: a.ranges for a in prepare(model, x, preset="paper").plan.activations}
    assert {a.name: a.ranges for a in live.variants[0].plan.activations} == want
    assert any(want.values())


def test_settings_that_a_live_network_cannot_follow_are_refused() -> None:
    with pytest.raises(SpecError, match="drop bias and sums"):
        Live(Net(), batch()[0], settings=[Settings.of("paper", helpers="all")])


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("layout", ["plain", "channels last", "with gaps"])
def test_rounding_in_one_go_is_rounding_step_by_step(layout: str, symmetric: bool) -> None:
    x = torch.randn(3, 6, 5, 5, generator=torch.Generator().manual_seed(0)) * 2
    x = x.contiguous(memory_format=torch.channels_last) if layout == "channels last" else x
    x = x[:, ::2] if layout == "with gaps" else x
    grid = Grid(
        torch.tensor(0.3), torch.tensor(0.0 if symmetric else 5.0), -7 if symmetric else 0, 7 if symmetric else 15
    )
    ends = tuple(float((end - grid.zero) * grid.scale) for end in (grid.low - 0.5, grid.high + 0.5))
    one, two = (x.clone().requires_grad_() for _ in range(2))
    got, want = round_through(one, grid, ends, centred=symmetric), fake_quantize(two, grid)
    assert torch.equal(got, want)
    weights = torch.randn_like(x)
    (got * weights).sum().backward()
    (want * weights).sum().backward()
    torch.testing.assert_close(one.grad, two.grad, rtol=1e-6, atol=1e-7)


# The gradient


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
        codes = torch.round(x / scale)
        ctx.save_for_backward((codes >= low) & (codes <= high), codes.clamp(low, high) - x / scale)
        return codes.clamp(low, high) * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        inside, error = ctx.saved_tensors  # a wider bin moves each value by its code, and what is inside stays put
        return grad * inside, (grad * error).sum(), None, None


def by_hand(model: Net, x: Tensor, bits: int) -> Tensor:
    """The quantized network of the paper's preset, written down: fold, round the weights, round the activations."""

    def weight(w: Tensor) -> tuple[Tensor, Tensor]:
        scale = w.abs().max() / (2 ** (bits - 1) - 1)
        return Rounded.apply(w, scale, -(2 ** (bits - 1)) + 1, 2 ** (bits - 1) - 1), scale.detach()

    def fold(layer: nn.Conv2d, norm: Any) -> tuple[Tensor, Tensor]:
        factor = norm.weight / torch.sqrt(norm.running_var + norm.eps)
        bias = 0 if layer.bias is None else layer.bias
        return layer.weight * factor.view(-1, 1, 1, 1), norm.bias + (bias - norm.running_mean) * factor

    def activation(y: Tensor, high: float) -> tuple[Tensor, Tensor]:
        scale = torch.tensor(high / (2**bits - 1))
        return Rounded.apply(F.relu(y), scale, 0, 2**bits - 1), scale

    def whole(bias: Tensor, unit: Tensor) -> Tensor:
        return bias + (torch.round(bias / unit) * unit - bias).detach()

    plan = prepare(model, x, preset="paper").plan
    high = {a.name: a.ranges[0][1].high for a in plan.activations if a.ranges}
    wide = [name for name, a in ((a.name, a) for a in plan.activations) if a.kind == "accumulator"]
    first, second = [a.name for a in plan.activations if a.kind == "activation"]
    (w, b), (v, c) = fold(model.a, model.norm), fold(model.b, model.second)
    (w, _), (v, v_scale), (u, u_scale) = weight(w), weight(v), weight(model.head.weight)
    y, unit = activation(F.conv2d(x, w, b, padding=1), high[first])
    out = F.conv2d(y, v, whole(c, unit * v_scale))
    for name in wide:  # what goes into the sum is stored with 8 bits
        ends = max(abs(plan.activation(name).ranges[0][1].low), high[name])
        scale = torch.tensor(ends / 127)
        out = Rounded.apply(out, scale, -127, 127)
    z, unit = activation(out + y, high[second])
    return F.linear(F.max_pool2d(z, 2).flatten(1), u, whole(model.head.bias, unit * u_scale))


@pytest.mark.parametrize("outputs", [True, False], ids=["from the float pass", "from the loss"])
def test_the_gradient_is_that_of_both_passes_by_hand(outputs: bool) -> None:
    torch.manual_seed(0)
    x, y = batch(16)
    model = used(Net(), x)
    twin = copy.deepcopy(model)
    objective = of_both(model, widths=["W4A4"], grids=["paper"])
    step = objective.backward(closure_of(model, x, y, outputs=outputs))
    out = twin(x)
    loss = F.cross_entropy(out, y)
    rounded = by_hand(twin, x, 4)
    further = F.cross_entropy(rounded, out.detach().softmax(1) if outputs else y)
    (loss + 0.5 * further).backward()
    assert step.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    assert step.terms["any-width"] == pytest.approx(float(further.detach()), rel=1e-5)
    close(gradients(model), gradients(twin))


def test_values_are_learned_relative_to_their_variance() -> None:
    torch.manual_seed(0)
    x, _ = batch(16)
    model = used(Net(), x).eval()
    objective = of_both(model, outputs="values", widths=["W4A4"], grids=["paper"])
    step = objective.backward(lambda: ((out := model(x)).square().mean(), out))
    with torch.no_grad():
        given, rounded = model(x), by_hand(model, x, 4)
    want = (rounded - given).square().mean() / given.var(correction=0)
    assert step.terms["any-width"] == pytest.approx(float(want), rel=1e-4)
    with pytest.raises(PenaltyError, match="say outputs='values'"):
        of_both(model).backward(lambda: (model(x).mean(), model(x)[:, :1]))


def test_long_gradients_are_cut_to_a_multiple_of_the_usual_length() -> None:
    torch.manual_seed(0)
    x, y = batch(16)
    model = used(Net(), x)
    plain = copy.deepcopy(model)
    closure_of(plain, x, y, outputs=False)().backward()
    length = math.sqrt(sum(float(g.square().sum()) for g in gradients(plain).values()))
    of_both(model, limit=0.01, strength=1.0).backward(closure_of(model, x, y))
    added = {name: g - gradients(plain)[name] for name, g in gradients(model).items()}
    assert math.sqrt(sum(float(g.square().sum()) for g in added.values())) == pytest.approx(0.01 * length, rel=1e-3)


# State is sacred


def test_nothing_but_gradients_changes() -> None:
    torch.manual_seed(0)
    x, y = batch(16)
    model = used(Net(dropout=0.5), x)
    twin = copy.deepcopy(model)
    objective = of_both(model)
    for p in (*model.parameters(), *twin.parameters()):
        p.grad = torch.ones_like(p)
    torch.manual_seed(1)
    closure_of(twin, x, y, outputs=False)().backward()
    after = torch.get_rng_state()
    torch.manual_seed(1)
    objective.backward(closure_of(model, x, y))
    assert torch.equal(torch.get_rng_state(), after)
    assert "forward" not in model.__dict__
    for (name, a), b in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert model.training
    plain = gradients(twin)
    assert any(not torch.equal(g, plain[name]) for name, g in gradients(model).items())


def test_a_strength_of_zero_is_a_plain_step() -> None:
    torch.manual_seed(0)
    x, y = batch(16)
    model = used(Net(), x)
    twin = copy.deepcopy(model)
    of_both(model, strength=0.0).backward(closure_of(model, x, y))
    closure_of(twin, x, y, outputs=False)().backward()
    close(gradients(model), gradients(twin), 0.0)


def test_a_failing_pass_changes_no_gradient() -> None:
    torch.manual_seed(0)
    x, y = batch(16)
    model = used(Net(), x)
    objective = of_both(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    calls: list[int] = []

    def breaks() -> Any:
        calls.append(1)
        out = model(x) * (math.inf if len(calls) > 1 else 1.0)
        return F.cross_entropy(out, y)

    with pytest.raises(NonFiniteError, match="the quantized network's loss"):
        objective.backward(breaks)
    assert len(calls) == 2
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    assert "forward" not in model.__dict__
    other = Net()
    with pytest.raises(PenaltyError, match="does not call the model that AnyWidth was built for"):
        objective.backward(closure_of(other, x, y))


# In any loop


def test_a_batch_in_parts_is_the_batch() -> None:
    torch.manual_seed(0)
    x, y = batch(16)
    model = Net(norm=False)
    twin = copy.deepcopy(model)
    options = {"widths": ["W4A8"], "grids": ["paper"], "input_range": (-4.0, 4.0)}
    whole, parts = of_both(model, **options), of_both(twin, **options)
    for objective in (whole, parts):
        objective.live.look(x)
        objective.live.every = 10**9
    whole.backward(closure_of(model, x, y))

    def part(keep: slice) -> Callable[[], Any]:
        def closure() -> Any:
            out = twin(x[keep])
            return F.cross_entropy(out, y[keep]) * (len(y[keep]) / 16), out

        return closure

    parts.live._passes = whole.live._passes = 1
    parts.backward([part(slice(0, 10)), part(slice(10, 16))])
    close(gradients(twin), gradients(model), 1e-4)


@pytest.mark.parametrize("outside", [False, True], ids=["autocast inside", "autocast outside"])
def test_bfloat16_autocast(outside: bool) -> None:
    torch.manual_seed(0)
    x, y = batch(64)
    model = used(Net(), x)
    twin = copy.deepcopy(model)
    of_both(twin, widths=["W8A8"]).backward(closure_of(twin, x, y))

    def mixed() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    def closure() -> Any:
        with contextlib.nullcontext() if outside else mixed():
            return closure_of(model, x, y)()

    with mixed() if outside else contextlib.nullcontext():
        of_both(model, widths=["W8A8"]).backward(closure)
    got, want = (torch.cat([g.flatten() for g in gradients(m).values()]) for m in (model, twin))
    assert float(F.cosine_similarity(got, want, 0)) > 0.99


def test_checkpointed_models() -> None:
    torch.manual_seed(0)
    x, y = batch(16)
    model = used(Net(), x)
    same = Checkpointed()
    same.load_state_dict(model.state_dict())
    for m in (model.eval(), same.eval()):  # in training mode the second run moves the statistics once more, by itself
        of_both(m, widths=["W3A8"]).backward(closure_of(m, x, y))
    close(gradients(same), gradients(model))


@pytest.mark.slow
def test_compiled_models() -> None:
    torch.manual_seed(0)
    x, y = batch(16)
    model = used(Net(), x)
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, backend="aot_eager")
    closure_of(compiled, x, y)()[0].backward()
    twin.zero_grad()
    twin.load_state_dict(model.state_dict())
    objectives = of_both(model), of_both(compiled)
    for _ in range(2):
        objectives[0].backward(closure_of(model, x, y))
        objectives[1].backward(closure_of(compiled, x, y))
    close(gradients(twin), gradients(model))


def test_frozen_parts_stay_without_gradients() -> None:
    torch.manual_seed(0)
    x, y = batch(16)
    model = used(Net(), x)
    for p in (*model.a.parameters(), *model.norm.parameters()):
        p.requires_grad_(False)
    of_both(model).backward(closure_of(model, x, y))
    assert gradients(model).keys() == {"b.weight", "b.bias", "second.weight", "second.bias", "head.weight", "head.bias"}


def test_transformers_learn() -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 11, (12, 7))
    target = ids[:, 0] % 3
    model = Transformer()
    objective = AnyWidth(model, ids, strength=0.5, widths=["W4A8"])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        step = objective.backward(closure_of(model, ids, target))
        optimizer.step()
        optimizer.zero_grad()
        losses.append((step.loss, step.terms["any-width"]))
    assert losses[-1][0] < 0.5 * losses[0][0]
    assert losses[-1][1] < losses[0][1]


def test_it_adds_up_with_the_other_penalties() -> None:
    torch.manual_seed(0)
    x, y = batch(16)
    start = used(Net(), x)
    makers: dict[str, Callable[[nn.Module], Any]] = {
        "width": of_both,
        "gradient": lambda m: GradientPenalty(m, weight=1e-2, activation=1e-2),
        "kurtosis": lambda m: KurtosisPenalty(m, strength=0.1),
    }
    alone = {}
    for name, make in makers.items():
        model = copy.deepcopy(start)
        make(model).backward(closure_of(model, x, y))
        alone[name] = gradients(model)
    plain = copy.deepcopy(start)
    closure_of(plain, x, y)()[0].backward()
    model = copy.deepcopy(start)
    total = makers["gradient"](model) + makers["kurtosis"](model) + makers["width"](model)
    step = total.backward(closure_of(model, x, y))
    assert step.terms.keys() == {"any-width", "strength", "kurtosis"}
    want = {n: sum(g[n] for g in alone.values()) - 2 * p for n, p in gradients(plain).items()}
    close(gradients(model), want, 2e-3)
    again = copy.deepcopy(start)
    (of_both(again) + UniformNoise(again)).backward(closure_of(again, x, y))
    assert gradients(again).keys() == gradients(plain).keys()


def test_a_gradient_scaler_scales_both_passes() -> None:
    class Twice:
        def scale(self, outputs: Tensor) -> Tensor:
            return outputs * 2

    torch.manual_seed(0)
    x, y = batch(16)
    model = used(Net(), x)
    twin = copy.deepcopy(model)
    of_both(model, limit=0.5).backward(closure_of(model, x, y))
    of_both(twin, limit=0.5).backward(closure_of(twin, x, y), scaler=Twice())
    close(gradients(twin), {name: 2 * g for name, g in gradients(model).items()})


@pytest.mark.parametrize("norm", [True, False], ids=["batch norm", "no batch norm"])
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(norm: bool) -> None:
    torch.manual_seed(0)
    x, y = batch(16)
    model = used(Net(norm=norm), x)
    objective = AnyWidth(model, x, strength=0.5, every=3)

    def run(steps: int, network: nn.Module, own: AnyWidth) -> None:
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
        for _ in range(steps):
            own.backward(closure_of(network, x, y))
            optimizer.step()
            optimizer.zero_grad()

    run(2, model, objective)
    twin = copy.deepcopy(model)
    other = AnyWidth(twin, x, strength=0.5, every=3)
    other.load_state_dict(json.loads(json.dumps(objective.state_dict())))
    run(4, model, objective)
    run(4, twin, other)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strength": -1.0}, "strength is a strength of zero or more"),
        ({"outputs": "pixels"}, "outputs are classes or values"),
        ({"widths": []}, "a pair of widths"),
        ({"limit": 0.0}, "limit is above zero"),
        ({"loss": 0.0}, "a part of the loss above zero"),
        ({"grids": ["best"]}, "a preset is one of"),
    ],
)
def test_bad_settings_get_a_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        AnyWidth(Net(), batch()[0], **options)


# Several processes

WORKER = """
import sys, torch, torch.distributed as dist
from test_any_width import Net, batch, closure_of, gradients, of_both, used
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x, y = batch(16)
inner = used(Net(), x).eval()
model = DistributedDataParallel(inner)
objective = of_both(model, widths=["W3A8"])
x, y = x[rank::world], y[rank::world]
with model.no_sync():
    objective.backward(closure_of(model, x, y))
objective.backward(closure_of(model, x, y))
if rank == 0:
    torch.save(gradients(inner), {out!r})
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_give_the_gradient_of_one(tmp_path: Path) -> None:
    """Half the batch each, with statistics that stay: the mean over the halves is the gradient of the batch."""
    script_together(tmp_path, WORKER.format(out=str(tmp_path / "out.pt")))
    torch.manual_seed(0)
    x, y = batch(16)
    model = used(Net(), x).eval()
    objective = of_both(model, widths=["W3A8"])
    for _ in range(2):
        objective.backward(closure_of(model, x, y))
    close(torch.load(tmp_path / "out.pt", weights_only=True), gradients(model), 1e-3)


# In a recipe


def test_a_recipe_trains_for_any_width() -> None:
    data = load_dataset("digits")
    few = dataclasses.replace(data, train=data.train.first(4 * 64))
    recipe = parse_recipe(
        {
            "name": "a",
            "epochs": 2,
            "model": {"name": "small-conv", "multiplier": 0.25},
            "data": {"name": "digits", "batch": 64, "augment": False},
            "penalty": {"any_width": True, "any_width_strength": 0.5, "start": 1},
        }
    )
    model = build_model(name="small-conv", channels=1, classes=10, multiplier=0.25)
    rows: list[dict[str, Any]] = []
    fit(model, recipe, few, log=lambda **row: rows.append(row))
    assert [row["penalized"] for row in rows] == [False] * 4 + [True] * 4
    assert all(0 < row["any-width"] < 10 and row["strength"] == 0.5 for row in rows[4:])
    assert recipe.changed({}) == recipe
    with pytest.raises(RecipeError, match="any_width_strength must be zero or more"):
        recipe.changed({"penalty.any_width_strength": -1.0})
