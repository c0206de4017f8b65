"""The penalties at the edges: inputs on a kink, counters, replaced parameters, overflow, frozen models, tables."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracles import finite_difference
from test_gradient import flat, grads, penalty_gradient
from test_loops import STRONG, Checkpointed, Net, NotCheckpointed, Stop, batch, close, loss_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anybit.errors import NonFiniteError, PenaltyError
from anybit.objectives.gradient import GradientPenalty
from anybit.objectives.kurtosis import KurtosisPenalty
from anybit.objectives.noise import UniformNoise
from anybit.objectives.orthogonal import OrthogonalPenalty

# Inputs exactly on a kink

TIES: dict[str, Callable[[Tensor], Tensor]] = {
    "abs": torch.abs,
    "abs in place": lambda x: (x * 1).abs_(),
    "abs, Python's": abs,
    "relu": F.relu,
    "relu6": F.relu6,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "prelu": lambda x: F.prelu(x, torch.tensor([0.3], dtype=x.dtype)),
    "threshold": lambda x: F.threshold(x, 0.0, -0.5),
    "selu": F.selu,
    "elu": lambda x: F.elu(x, 1.5),
    "hardtanh": lambda x: F.hardtanh(x, 0.0, 1.0),
    "hardsigmoid": lambda x: F.hardsigmoid(x - 3),
    "hardswish": lambda x: F.hardswish(x + 3),
    "softshrink": lambda x: F.softshrink(x + 0.5),
    "hardshrink": lambda x: F.hardshrink(x + 0.5),
    "clamp from below": lambda x: x.clamp(min=0.0),
    "clamp from above": lambda x: torch.clamp(x, max=0.0),
    "clamp to both sides": lambda x: x.clamp(0.0, 1.0),
    "clamp_min": lambda x: x.clamp_min(0.0),
    "clamp_max": lambda x: torch.clamp_max(x, 0.0),
    "clamp by tensors": lambda x: x.clamp(torch.zeros_like(x[:1]), 0.4 + torch.zeros_like(x[:1])),
    "maximum": lambda x: torch.maximum(x, 0.5 * x),
    "minimum": lambda x: torch.minimum(x, 0.5 * x),
    "max of two": lambda x: torch.max(x, 0.5 * x.flip(1)),
    "min of two": lambda x: torch.min(x, other=0.5 * x.flip(1)),
    "max of all": lambda x: x.max() + x.sum(),
    "max along": lambda x: x.max(1)[0],
    "min along": lambda x: x.min(dim=1, keepdim=True).values,
    "amax": lambda x: x.amax(1),
    "amin of two dimensions": lambda x: torch.amin(x.view(len(x), 3, -1), dim=(1, 2), keepdim=True),
    "amax of all": lambda x: x.amax() + x.mean(),
    "sort": lambda x: x.sort(1)[0] * torch.arange(x.shape[1]),
    "topk": lambda x: x.topk(2, dim=1)[0],
    "max_pool1d": lambda x: F.max_pool1d(x.unsqueeze(1), 3, 2),
    "max_pool2d": lambda x: F.max_pool2d(x.view(len(x), 1, 3, -1), 2, 1),
    "l1_loss": lambda x: F.l1_loss(x, torch.zeros_like(x), reduction="none"),
}


ONCE_ONLY = {"hardsigmoid": lambda x: F.hardtanh(x - 3, -3.0, 3.0) / 6 + 0.5}
"""The same functions for double backward, where PyTorch has no second derivative of its own."""


class Blank(nn.Module):
    """A layer whose bias is zero, as at the start of training, then one function: a blank example is on its kink.

    What the function passes back reaches the bias, whatever the example.
    """

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.function = nn.Linear(5, 6), function
        nn.init.zeros_(self.a.bias)
        self.mix, self.b = nn.Parameter(torch.tensor(0.7)), nn.Linear(6, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.atleast_2d(self.function(self.a(x)))
        out: Tensor = self.b(torch.tanh(y.flatten(1).sum(1, keepdim=True) * self.mix + self.a(x)))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", TIES)
def test_blank_examples_sit_on_every_kink_and_get_the_slope_of_double_backward(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Blank(TIES[name]).to(dtype)
    x = torch.randn(9, 5, dtype=dtype)
    x[::3] = 0.0
    y = torch.arange(9) % 4
    closure = lambda: F.cross_entropy(model(x), y)  # noqa: E731
    strengths = {"weight": 1e-2} if name in ONCE_ONLY else STRONG  # the other's outputs are other activations
    model.function = ONCE_ONLY.get(name, TIES[name])
    want = penalty_gradient(model, closure, **strengths, engine="double-backward")
    assert float(want.norm()) > 0
    model.function = TIES[name]
    close(penalty_gradient(model, closure, **strengths), want, 5e-3 if dtype == torch.float32 else 1e-5)


def test_a_plain_l1_loss_can_be_hit_exactly() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False)
    x = torch.randn(8, 4)
    x[0] = 0.0
    for reduction in ("mean", "sum"):
        closure = lambda reduction=reduction: F.l1_loss(torch.tanh(model(x)), torch.zeros(8, 3), reduction=reduction)  # noqa: E731
        want = penalty_gradient(model, closure, **STRONG, engine="double-backward")
        close(penalty_gradient(model, closure, **STRONG), want)


# Noise and gradient checkpointing


@pytest.mark.parametrize("penalized", [False, True], ids=["alone", "under the gradient penalty"])
def test_checkpointed_parts_see_the_same_noise_again(penalized: bool) -> None:
    results = []
    for kind in (NotCheckpointed, Checkpointed):
        torch.manual_seed(0)
        model = kind()
        penalty = UniformNoise(model, widths=(3,))
        whole = GradientPenalty(model, **STRONG) + penalty if penalized else penalty
        torch.manual_seed(1)
        whole.backward(loss_of(model))
        results.append(flat(grads(model)))
    close(results[1], results[0], 1e-3 if penalized else 1e-5)


def test_parts_that_run_again_without_the_graph_are_refused_under_noise() -> None:
    class Reentrant(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(lambda t: F.relu(self.a(t)), x.requires_grad_(), use_reentrant=True)
            return self.head(F.relu(self.b(F.max_pool2d(x, 2))).flatten(1))

    model = Reentrant()
    with pytest.raises(PenaltyError, match="use_reentrant=False"):
        UniformNoise(model, widths=(3,)).backward(loss_of(model))


class InPlace(Net):
    """A checkpointed part whose activation function writes into its input, and noise in front of dropout."""

    def __init__(self, again: bool) -> None:
        super().__init__(drop=0.3)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        part = lambda t: self.drop(F.relu_(self.norm(self.a(t))))  # noqa: E731
        x = checkpoint(part, x, use_reentrant=False) if self.again else part(x)
        return self.head(F.relu(self.b(F.max_pool2d(x, 2))).flatten(1))


def test_checkpointing_noise_and_dropout_together() -> None:
    results = []
    for again in (False, True):
        torch.manual_seed(0)
        model = InPlace(again)
        penalty = UniformNoise(model, widths=(3,))
        torch.manual_seed(1)
        penalty.backward(loss_of(model))
        results.append(flat(grads(model)))
    close(results[1], results[0], 1e-5)


# Every k-th step


@pytest.mark.parametrize("every", [1, 3])
def test_the_worst_case_at_every_kth_step_has_the_same_average(every: int) -> None:
    torch.manual_seed(0)
    model = Net(norm=False).double()
    x, y = batch()
    closure = lambda: F.cross_entropy(model(x.double()), y)  # noqa: E731
    closure().backward()
    plain = flat(grads(model))
    worst = plain + penalty_gradient(model, closure, weight=0.02, activation=0.01, objective="worst-case")
    penalty = GradientPenalty(model, weight=0.02, activation=0.01, objective="worst-case", every=every)
    model.zero_grad()
    for _ in range(every):
        penalty.backward(closure)
    torch.testing.assert_close(flat(grads(model)) / every, worst, rtol=1e-9, atol=1e-12)
    assert float((worst - plain).norm()) > 0.01 * float(plain.norm())


# Buffers and parameters that are replaced


class Counting(Net):
    """Counts its forward passes in a buffer that each of them replaces, and keeps a mean in one that it may lack."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(()))
        self.register_buffer("mean", None)
        self.n: Tensor
        self.mean: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        self.n = self.n + 1
        self.mean = x.mean() if self.mean is None else 0.9 * self.mean + 0.1 * x.mean()
        return super().forward(x)


@pytest.mark.parametrize("kind", ["two-pass", "noise", "kurtosis", "check"])
def test_a_buffer_that_the_forward_pass_replaces_moves_once(kind: str) -> None:
    torch.manual_seed(0)
    model, plain = Counting(), Counting()
    closure = loss_of(model)
    for count in range(1, 4):
        if kind == "check":
            GradientPenalty(model, **STRONG).check(closure)
            assert float(model.n) == 0
            assert model.mean is None
            continue
        penalty = {
            "two-pass": lambda: GradientPenalty(model, **STRONG),
            "noise": lambda: UniformNoise(model),
            "kurtosis": lambda: KurtosisPenalty(model, strength=0.1),
        }[kind]()
        penalty.backward(closure)
        loss_of(plain)()
        assert float(model.n) == count
        assert torch.equal(model.mean, plain.mean)


@pytest.mark.parametrize("kind", ["gradient", "double-backward", "kurtosis", "orthogonal", "noise"])
def test_parameters_that_are_replaced_later_are_the_ones_that_count(kind: str) -> None:
    make: dict[str, Callable[[nn.Module], Any]] = {
        "gradient": lambda m: GradientPenalty(m, **STRONG),
        "double-backward": lambda m: GradientPenalty(m, **STRONG, engine="double-backward"),
        "kurtosis": lambda m: KurtosisPenalty(m, strength=0.5),
        "orthogonal": lambda m: OrthogonalPenalty(m, strength=0.5),
        "noise": lambda m: UniformNoise(m, widths=(2,), activations=False),
    }
    results = []
    for late in (False, True):
        torch.manual_seed(0)
        model = Net()
        penalty = make[kind](model)
        if late:  # a step on the old ones, so that whatever is remembered is remembered
            penalty.backward(loss_of(model))
        torch.manual_seed(1)
        for layer in (model.a, model.b, model.head):
            layer.weight = nn.Parameter(torch.randn_like(layer.weight) / 4)
        model.norm = nn.BatchNorm2d(6)
        nn.init.constant_(model.norm.weight, 3.0)
        model.zero_grad()
        penalty = penalty if late else make[kind](model)
        torch.manual_seed(2)
        penalty.backward(loss_of(model))
        results.append(flat(grads(model)))
    close(results[1], results[0], 1e-4)


@pytest.mark.parametrize("kind", ["gradient", "kurtosis"])
def test_a_penalty_of_another_model_says_so_and_harms_nothing(kind: str) -> None:
    torch.manual_seed(0)
    model, other = Net(), Net()
    closure = loss_of(model)
    closure().backward()
    want = flat(grads(model))
    model.zero_grad()
    penalty = GradientPenalty(other, **STRONG) if kind == "gradient" else KurtosisPenalty(other, strength=0.1)
    with pytest.warns(UserWarning, match="does not reach any weight of the model that this penalty was built for"):
        penalty.backward(closure)
    assert torch.equal(flat(grads(model)), want)


# What is not finite


class Overflow(torch.autograd.Function):
    """The identity, whose gradient is what it is told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return torch.full_like(grads[0], ctx.value), None


def overflowing(model: nn.Module, bias: Tensor, which: int) -> Callable[[], Tensor]:
    """A loss that adds a bias behind the model, whose gradient alone is infinite, in one of the passes."""
    x, y = batch()
    calls: list[int] = []

    def closure() -> Tensor:
        calls.append(1)
        out = model(x) * 1.0
        return F.cross_entropy(out, y) + (Overflow.apply(bias, math.inf).sum() * 0 if len(calls) == which else 0.0)

    return closure


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "with a scaler"])
@pytest.mark.parametrize("which", [1, 2], ids=["first pass", "second pass"])
@pytest.mark.parametrize("engine", ["two-pass", "double-backward"])
def test_an_infinite_gradient_of_a_bias_is_noticed(engine: str, which: int, scaled: bool) -> None:
    if engine == "double-backward" and which == 2:
        return  # it has one
    torch.manual_seed(0)
    model = Net()
    GradientPenalty(model, weight=0.0).backward(loss_of(model, seed=3))
    before = flat(grads(model))
    kept = [p.grad for p in model.parameters()]
    penalty = GradientPenalty(model, **STRONG, engine=engine)  # type: ignore[arg-type]
    closure = overflowing(model, model.a.bias, which)
    if scaled:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        penalty.backward(closure, scaler=scaler)
        assert not bool(torch.isfinite(model.a.bias.grad).all())  # which the scaler sees, and skips the step
        return
    with pytest.raises(NonFiniteError, match="gradient of some parameter is not finite; no gradient was changed"):
        penalty.backward(closure)
    assert torch.equal(flat(grads(model)), before)
    assert all(a is b.grad for a, b in zip(kept, model.parameters(), strict=True))


@pytest.mark.parametrize("driver", [False, True], ids=["alone", "in a sum"])
def test_a_penalty_on_the_weights_that_is_not_finite_changes_no_gradient(driver: bool) -> None:
    torch.manual_seed(0)
    model = Net()
    loss_of(model)().backward()
    before = flat(grads(model))
    unused = nn.ModuleDict({"net": model, "unused": nn.Linear(3, 3)})
    nn.init.constant_(unused["unused"].weight, math.nan)
    penalty = KurtosisPenalty(unused, strength=1.0)
    whole = GradientPenalty(model, **STRONG) + penalty if driver else penalty
    with pytest.raises(NonFiniteError, match="the kurtosis penalty is nan; no gradient was changed"):
        whole.backward(loss_of(model))
    assert torch.equal(flat(grads(model)), before)
    assert unused["unused"].weight.grad is None


# Frozen models, and what is not a weight


@pytest.mark.parametrize("engine", ["two-pass", "double-backward"])
def test_a_frozen_model_gets_a_sentence(engine: str) -> None:
    torch.manual_seed(0)
    model, head = Net().requires_grad_(False), nn.Linear(4, 4)
    x, y = batch()
    closure = lambda: F.cross_entropy(head(model(x)), y)  # noqa: E731
    penalty = GradientPenalty(model, **STRONG, engine=engine)  # type: ignore[arg-type]
    with pytest.raises(PenaltyError, match="every parameter of Net is frozen, so a penalty can change nothing; build"):
        penalty.backward(closure)
    assert head.weight.grad is None
    step = GradientPenalty(model, weight=0.0).backward(closure)  # measuring is fine
    assert step.weight_norm == 0
    assert head.weight.grad is not None


class Attention(nn.Module):
    """Attention with a table of biases by relative position, layer scale, a learned token and a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(6, 8))
        self.bias_table = nn.Parameter(torch.randn(11, 2))
        self.scale = nn.Parameter(torch.ones(6, 8))
        self.gamma = nn.Parameter(torch.ones(2, 1, 1))
        self.projection = nn.Parameter(torch.randn(8, 8) / 3)
        self.mask = nn.Parameter(torch.randn(8, 8) / 3)
        self.norm = nn.LayerNorm((6, 8))
        index = torch.arange(6)
        self.register_buffer("index", index[:, None] - index[None, :] + 5)
        self.index: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions) * self.scale
        q, k, v = self.qkv(x).view(len(x), 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
        bias = self.bias_table[self.index].permute(2, 0, 1) * self.gamma
        x = ((q @ k.transpose(2, 3) + bias).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.head(F.gelu(x @ self.projection.T @ (self.mask * (self.mask > 0))).mean(1))


MATRICES = ["projection", "mask", "qkv.weight", "head.weight"]


@pytest.mark.parametrize("kind", ["two-pass", "double-backward", "kurtosis", "noise"])
def test_only_what_is_multiplied_is_a_weight(kind: str) -> None:
    torch.manual_seed(0)
    model = Attention()
    x, y = torch.randn(7, 5, 8), torch.arange(7) % 4
    calls: list[int] = []

    def closure() -> Tensor:
        calls.append(1)
        return F.cross_entropy(model(x), y)

    if kind == "noise":
        seen: list[list[bool]] = []
        start = {name: p.detach().clone() for name, p in model.named_parameters()}

        def look() -> Tensor:
            seen.append([torch.equal(p, start[name]) for name, p in model.named_parameters()])
            return closure()

        UniformNoise(model, widths=(3,), activations=False).backward(look)
        moved = [name for name, same in zip(start, seen[-1], strict=True) if not same]
        assert sorted(moved) == sorted(MATRICES)
        return
    penalty: Any = KurtosisPenalty(model, strength=0.1)
    if kind != "kurtosis":
        penalty = GradientPenalty(model, weight=1e-2, engine=kind)  # type: ignore[arg-type]
    step = penalty.backward(closure)
    passes = len(calls)
    assert sorted(penalty.weights) == sorted(MATRICES)
    penalty.backward(closure)
    assert passes - (len(calls) - passes) == 1  # one look, once
    if kind != "kurtosis":
        model.zero_grad()
        closure().backward()
        want = sum(float(dict(model.named_parameters())[name].grad.abs().sum()) for name in MATRICES)
        assert step.weight_norm == pytest.approx(want, rel=1e-5)


def test_weights_behind_parametrizations_are_found() -> None:
    """Against finite differences: PyTorch's double backward of weight normalization is wrong."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.ReLU(), nn.Linear(5, 3)).double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    closure = lambda: F.cross_entropy(model(x), y)  # noqa: E731
    penalty = GradientPenalty(model, weight=1e-2)
    penalty.backward(closure)
    names = ["0.parametrizations.weight.original1", "2.weight"]
    assert list(penalty.weights) == names

    def objective() -> float:
        gradients = torch.autograd.grad(closure(), [dict(model.named_parameters())[name] for name in names])
        return 1e-2 * float(sum(g.abs().sum() for g in gradients))

    want = flat(finite_difference(objective, list(model.parameters())))
    close(penalty_gradient(model, closure, weight=1e-2), want, 1e-5)


# Short formats of products


@pytest.fixture
def tf32() -> Iterator[None]:
    """A loop that has switched on short products for speed."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("fails", [False, True])
def test_products_keep_all_digits_during_the_two_passes(fails: bool) -> None:
    model = Net()
    libraries = [torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.mkldnn.matmul]
    before = [library.fp32_precision for library in libraries]
    seen: list[list[str]] = []
    x, y = batch()

    def closure() -> Tensor:
        seen.append([library.fp32_precision for library in libraries])
        if fails and len(seen) == 2:
            raise Stop
        return F.cross_entropy(model(x), y)

    with pytest.raises(Stop) if fails else contextlib.nullcontext():
        GradientPenalty(model, **STRONG).backward(closure)
    assert before[0] == "tf32"
    assert seen == [["ieee"] * 3] * 2
    assert [library.fp32_precision for library in libraries] == before
    seen.clear()
    GradientPenalty(model, weight=0.0).backward(closure)
    assert seen == [before]  # without a difference there is nothing to lose
