"""The gradient penalty: double backward against first principles, two passes against double backward."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, Case
from oracles import finite_difference
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import anybit
from anybit.errors import NonFiniteError, PenaltyError, SpecError
from anybit.objectives.gradient import GradientPenalty
from anybit.objectives.record_replay import FirstPass, SecondPass
from anybit.objectives.two_pass import Shift, step_size

STRENGTHS = {"weights": (1e-3, 0.0), "activations": (0.0, 1e-3), "both": (1e-3, 1e-3)}


def grads(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.flatten().double() for t in tensors])


def penalty_gradient(model: nn.Module, closure: Callable[[], Tensor], **options: object) -> Tensor:
    """The gradient of the penalty alone: that of the objective less that of the loss, on the same random numbers."""
    results = []
    for step in (lambda: closure().backward(), lambda: GradientPenalty(model, **options).backward(closure)):  # type: ignore[arg-type]
        torch.manual_seed(7)
        model.zero_grad()
        step()
        results.append(flat(grads(model)))
    return results[1] - results[0]


class Smooth(nn.Module):
    """Two layers and a tanh: twice differentiable everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("kind", STRENGTHS)
def test_double_backward_is_the_gradient_of_the_objective_by_finite_differences(norm: str, kind: str) -> None:
    torch.manual_seed(0)
    model = Smooth().double()
    x, y = torch.randn(5, 3).double(), torch.tensor([0, 1, 0, 1, 1])
    weight, activation = (100 * s for s in STRENGTHS[kind])
    order = 1 if norm == "l1" else 2

    def objective() -> float:
        """The objective written out by hand, the activation's gradient taken through a leaf of its own."""
        hidden = torch.tanh(model.a(x))
        leaf = hidden.detach().requires_grad_()
        loss = F.cross_entropy(model.b(leaf), y)
        by_y = torch.autograd.grad(loss, leaf)[0].norm(p=order)
        full = F.cross_entropy(model.b(hidden), y)
        by_w = sum(g.norm(p=order) for g in torch.autograd.grad(full, [model.a.weight, model.b.weight]))
        return float((full + weight * by_w + activation * by_y).detach())

    want = finite_difference(objective, list(model.parameters()))
    penalty = GradientPenalty(model, norm=norm, weight=weight, activation=activation, engine="double-backward")  # type: ignore[arg-type]
    step = penalty.backward(lambda: F.cross_entropy(model(x), y))
    for parameter, expected in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-6, atol=1e-8)
    total = step.loss + weight * step.weight_norm + activation * (step.activation_norm or 0.0)
    assert total == pytest.approx(objective(), rel=1e-12)


@pytest.mark.parametrize("engine", ["double-backward", "two-pass"])
def test_two_layers_worked_out_by_hand(engine: str) -> None:
    """L = (v · relu(w x))² / 2 with x = 2, w = 3, v = 0.5: y = 6, L = 4.5.

    ∂L/∂w = (v y)(v x) = 3, ∂L/∂v = (v y) y = 18, ∂L/∂y = (v y) v = 1.5, all positive.
    With y = w x and L = v² w² x² / 2, the objective is L + λ (v² w x² + v w² x²) + μ v² w x. So at this point
    ∂/∂w = 3 + λ (v² x² + 2 v w x²) + μ v² x = 3 + 13 λ + 0.5 μ,
    ∂/∂v = 18 + λ (2 v w x² + w² x²) + μ 2 v w x = 18 + 48 λ + 6 μ.
    """
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False)).double()
    nn.init.constant_(model[0].weight, 3.0)
    nn.init.constant_(model[2].weight, 0.5)
    x = torch.full((1, 1), 2.0, dtype=torch.float64)
    penalty = GradientPenalty(model, weight=0.1, activation=0.2, engine=engine)  # type: ignore[arg-type]
    step = penalty.backward(lambda: model(x).pow(2).sum() / 2)
    assert (step.loss, step.weight_norm, step.activation_norm) == (4.5, 21.0, 1.5)
    assert model[0].weight.grad.item() == pytest.approx(3 + 1.3 + 0.1, rel=1e-6)
    assert model[2].weight.grad.item() == pytest.approx(18 + 4.8 + 1.2, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_two_passes_agree_with_double_backward(case: Case, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = case.build().to(dtype).train()
    closure = case.closure(model, dtype=dtype)
    floor = 0.999 if dtype == torch.float32 else 0.9999
    with sdpa_kernel(SDPBackend.MATH):
        for kind, (weight, activation) in STRENGTHS.items():
            a, b = (
                penalty_gradient(model, closure, weight=weight, activation=activation, engine=engine)
                for engine in ("double-backward", "two-pass")
            )
            assert float(a.norm()) > 0, kind
            cosine, ratio = float(F.cosine_similarity(a, b, 0)), float(b.norm() / a.norm())
            assert cosine >= floor, (kind, cosine)
            assert abs(ratio - 1) <= (0.01 if dtype == torch.float32 else 0.001), (kind, ratio)


class Bottleneck(nn.Module):
    """Batch norm and ReLU in front of each convolution, and a sum around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        sizes, self.stride = (before, after // 4, after // 4, after), stride
        self.norms = nn.ModuleList(nn.BatchNorm2d(size) for size in sizes[:3])
        self.layers = nn.ModuleList(
            nn.Conv2d(sizes[i], sizes[i + 1], (1, 3, 1)[i], (1, stride, 1)[i], i % 2, bias=False) for i in range(3)
        )
        self.short = nn.Conv2d(before, after, 1, stride, bias=False) if stride > 1 or before != after else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](x))
        skip = x if self.short is None else self.short(y)
        y = self.layers[1](F.relu(self.norms[1](self.layers[0](y))))
        return self.layers[2](F.relu(self.norms[2](y))) + skip


class PreActivation(nn.Sequential):
    """A residual network of fifty layers with the activations in front, small."""

    def __init__(self) -> None:
        sizes, layers, before = ((32, 3), (64, 4), (128, 6), (256, 3)), [nn.Conv2d(3, 16, 3, 1, 1, bias=False)], 16
        for stage, (size, count) in enumerate(sizes):
            for block in range(count):
                layers.append(Bottleneck(before, size, 2 if stage and not block else 1))
                before = size
        layers += [nn.BatchNorm2d(before), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10)]
        super().__init__(*layers)


class Fire(nn.Module):
    """Squeeze, then two convolutions side by side."""

    def __init__(self, before: int, squeezed: int, after: int) -> None:
        super().__init__()
        self.squeeze, self.one = nn.Conv2d(before, squeezed, 1), nn.Conv2d(squeezed, after, 1)
        self.three = nn.Conv2d(squeezed, after, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        return torch.cat([F.relu(self.one(x)), F.relu(self.three(x))], 1)


def squeeze_net() -> nn.Module:
    sizes = ((16, 4, 8), (16, 4, 8), (16, 8, 16), (32, 8, 16), (32, 12, 24), (48, 12, 24))
    fires: list[nn.Module] = [Fire(*size) for size in sizes]
    fires.insert(2, nn.MaxPool2d(3, 2, 1))
    stem, head = [nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.MaxPool2d(3, 2)], [nn.Conv2d(48, 10, 1), nn.ReLU()]
    return nn.Sequential(*stem, *fires, *head, nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "n", "weight", "activation"),
    [(PreActivation, 8, 0.0, 1e-3), (PreActivation, 8, 1e-3, 1e-3), (squeeze_net, 32, 1e-3, 0.0)],
    ids=["pre-activation, activations", "pre-activation, both", "squeeze, weights"],
)
def test_untrained_networks_agree_within_a_hundredth(
    build: Callable[[], nn.Module], n: int, weight: float, activation: float
) -> None:
    """Large activations on which the smallest shift is lost; a loss that hardly depends on the weights."""
    torch.manual_seed(1)
    model = build()
    x, y = torch.randn(n, 3, 32, 32), torch.arange(n) % 10
    b = penalty_gradient(model, lambda: F.cross_entropy(model(x), y), weight=weight, activation=activation)
    exact, wide = copy.deepcopy(model).double(), x.double()
    a = penalty_gradient(
        exact,
        lambda: F.cross_entropy(exact(wide), y),
        weight=weight,
        activation=activation,
        engine="double-backward",
    )
    assert float(F.cosine_similarity(a, b, 0)) >= 0.999
    assert float(b.norm() / a.norm()) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("options", [{"norm": "l2"}, {"scale": "range"}], ids=["l2", "range"])
@pytest.mark.parametrize("name", ["small-conv", "functional", "resnet18", "kinks", "two-inputs"])
def test_the_variants_agree_too(name: str, options: dict[str, str]) -> None:
    torch.manual_seed(0)
    (case,) = [c for c in CASES if c.name == name]
    model = case.build().double().train()
    closure = case.closure(model, dtype=torch.float64)
    a, b = (
        penalty_gradient(model, closure, weight=1e-3, activation=1e-3, engine=engine, **options)
        for engine in ("double-backward", "two-pass")
    )
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(a.abs().max()))


def test_fused_attention_needs_no_double_backward() -> None:
    torch.manual_seed(0)
    (case,) = [c for c in CASES if c.name == "transformer"]
    model = case.build()
    closure = case.closure(model)
    fused = penalty_gradient(model, closure, weight=1e-3, activation=1e-3)
    with sdpa_kernel(SDPBackend.MATH):
        want = penalty_gradient(model, closure, weight=1e-3, activation=1e-3, engine="double-backward")
    assert float(F.cosine_similarity(fused, want, 0)) > 0.999


def test_live_kinks_are_what_the_replay_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the replay the same difference is mostly noise, so the agreement above is the replay's doing."""
    torch.manual_seed(0)
    (case,) = [c for c in CASES if c.name == "vgg-like"]
    model = case.build().train()
    closure = case.closure(model)
    want = penalty_gradient(model, closure, weight=1e-3, engine="double-backward")
    monkeypatch.setattr("anybit.objectives.record_replay.KINKS", {})
    live = penalty_gradient(model, closure, weight=1e-3)
    assert float(F.cosine_similarity(want, live, 0)) < 0.9


def test_worst_case_is_the_gradient_at_the_worst_point() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    closure = lambda: F.cross_entropy(model(x), y)  # noqa: E731
    closure().backward()
    with torch.no_grad():
        moved = [p + 0.05 * p.grad.sign() if p.dim() > 1 else p.clone() for p in model.parameters()]
    model.zero_grad()
    GradientPenalty(model, weight=0.05, objective="worst-case").backward(closure)
    got = grads(model)
    copy = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    copy.load_state_dict(dict(zip(model.state_dict(), moved, strict=True)))
    F.cross_entropy(copy(x), y).backward()
    for a, b in zip(got, grads(copy), strict=True):
        torch.testing.assert_close(a, b)


def test_worst_case_moves_activations_too() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU()).double()
    nn.init.constant_(model[0].weight, 3.0)
    x = torch.ones(1, 1, dtype=torch.float64)
    GradientPenalty(model, activation=0.5, objective="worst-case").backward(lambda: model(x).pow(2).sum())
    assert model[0].weight.grad.item() == 2 * (3.0 + 0.5)


def test_every_kth_step_is_k_times_as_strong_and_the_others_are_plain() -> None:
    torch.manual_seed(0)
    model = Smooth().double()
    x, y = torch.randn(5, 3).double(), torch.tensor([0, 1, 0, 1, 1])
    closure = lambda: F.cross_entropy(model(x), y)  # noqa: E731
    closure().backward()
    plain = flat(grads(model))
    strong = penalty_gradient(model, closure, weight=0.3, activation=0.3)
    penalty = GradientPenalty(model, weight=0.1, activation=0.1, every=3)
    for index in range(6):
        model.zero_grad()
        step = penalty.backward(closure)
        extra = flat(grads(model)) - plain
        if index % 3 == 0:
            torch.testing.assert_close(extra, strong, rtol=1e-5, atol=1e-8)
        else:
            assert float(extra.abs().max()) == 0.0
            assert step.activation_norm is None
    resumed = GradientPenalty(model, weight=0.1, activation=0.1, every=3)
    penalty.backward(closure)
    resumed.load_state_dict(penalty.state_dict())
    model.zero_grad()
    resumed.backward(closure)
    assert torch.equal(flat(grads(model)), plain)


def test_layers_by_pattern_and_factor() -> None:
    torch.manual_seed(0)
    model = Smooth().double()
    x, y = torch.randn(5, 3).double(), torch.tensor([0, 1, 0, 1, 1])
    closure = lambda: F.cross_entropy(model(x), y)  # noqa: E731
    whole = penalty_gradient(model, closure, weight=0.1, engine="double-backward")
    parts = [penalty_gradient(model, closure, weight=0.1, layers=name) for name in ("a", "b.weight")]
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-5, atol=1e-8)
    assert float(parts[0].norm()) > 0
    with pytest.raises(SpecError, match=r"no weight matches the pattern 'c\*'; the weights are a.weight"):
        GradientPenalty(model, weight=0.1, layers=["a", "c*"])
    penalty = GradientPenalty(model, weight=0.1)
    penalty.factor = 0.0
    model.zero_grad()
    closure().backward()
    want = flat(grads(model))
    model.zero_grad()
    penalty.backward(closure)
    assert torch.equal(flat(grads(model)), want)


def test_strength_zero_measures_and_changes_nothing() -> None:
    torch.manual_seed(0)
    model = Smooth()
    x, y = torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1])
    closure = lambda: F.cross_entropy(model(x), y)  # noqa: E731
    strong = GradientPenalty(model, weight=0.1, activation=0.1, engine="double-backward").backward(closure)
    model.zero_grad()
    step = GradientPenalty(model, weight=0.0).backward(closure)
    got = grads(model)
    model.zero_grad()
    closure().backward()
    assert all(torch.equal(a, b) for a, b in zip(got, grads(model), strict=True))
    assert step.weight_norm == pytest.approx(strong.weight_norm, rel=1e-5)
    assert step.activation_norm == pytest.approx(strong.activation_norm, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "l3"}, "norm must be one of l1, l2; got 'l3'"),
        ({"engine": "triple"}, "engine must be one of"),
        ({"objective": "best"}, "objective must be one of"),
        ({"scale": "max"}, "scale must be one of"),
        ({"weight": -1.0}, "weight is a strength of zero or more, or 'auto'; got -1.0"),
        ({"activation": math.nan}, "activation is a strength of zero or more"),
        ({"every": 0}, "every is a whole number of steps"),
        ({"objective": "worst-case", "engine": "double-backward"}, "drop engine='double-backward'"),
    ],
)
def test_bad_settings(options: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message.replace("(", r"\(")):
        GradientPenalty(nn.Linear(2, 2), **options)  # type: ignore[arg-type]


def test_nothing_to_penalize() -> None:
    with pytest.raises(PenaltyError, match="no weight of two or more dimensions"):
        GradientPenalty(nn.BatchNorm1d(2), weight=0.1)
    model = nn.Linear(2, 2)
    with pytest.raises(PenaltyError, match="nothing to check"):
        GradientPenalty(model, weight=0.0).check(lambda: model(torch.ones(1, 2)).sum())


@pytest.mark.parametrize("engine", ["double-backward", "two-pass"])
def test_bad_losses_are_refused_and_gradients_stay(engine: str) -> None:
    model = nn.Linear(2, 2)
    penalty = GradientPenalty(model, weight=0.1, engine=engine)  # type: ignore[arg-type]
    model.weight.grad = torch.ones(2, 2)
    x = torch.ones(1, 2)
    for closure, error, message in (
        (lambda: 3.0, PenaltyError, "one number in a tensor; got float"),
        (lambda: model(x), PenaltyError, r"got shape \(1, 2\)"),
        (lambda: model(x).detach().sum(), PenaltyError, "has no gradient"),
        (lambda: model(x).sum() * math.nan, NonFiniteError, "the loss is nan"),
        (lambda: model(x).sum() / 0.0, NonFiniteError, "the loss is"),
        (lambda: model(x).sum().abs().clamp(min=0).sqrt() * 0 + (model(x) * 0).sum().sqrt(), NonFiniteError, "norm is"),
    ):
        with pytest.raises(error, match=message):
            penalty.backward(closure)
        assert torch.equal(model.weight.grad, torch.ones(2, 2))


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    before = {k: v.clone() for k, v in model.state_dict().items()}
    random = torch.get_rng_state()
    kept = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    yield
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    for p, grad in zip(model.parameters(), kept, strict=True):
        assert (p.grad is None) == (grad is None)
        assert grad is None or torch.equal(p.grad, grad)


@pytest.mark.parametrize("name", ["small-conv", "dropout", "transformer", "kinks"])
def test_check_measures_agreement_and_leaves_no_trace(name: str) -> None:
    torch.manual_seed(0)
    (case,) = [c for c in CASES if c.name == name]
    model = case.build().train()
    closure = case.closure(model)
    model(*case.inputs(4)).sum().backward()
    penalty = GradientPenalty(model, weight=1e-3, activation=1e-3)
    with unchanged(model):
        result = penalty.check(closure)
    assert result.trusted
    assert result.cosine > 0.999
    assert "trust it" in str(result)
    assert result.reference == ("a central difference" if name == "transformer" else "double backward")


class HiddenKink(nn.Module):
    """A ReLU that PyTorch does not show as one."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, torch.zeros_like(x))


def test_check_warns_of_kinks_it_cannot_see() -> None:
    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (nn.Linear(64, 64), nn.BatchNorm1d(64), HiddenKink())]
    model = nn.Sequential(*layers, nn.Linear(64, 5))
    x, y = torch.randn(256, 64), torch.arange(256) % 5
    result = GradientPenalty(model, weight=1e-3).check(lambda: F.cross_entropy(model(x), y))
    assert not result.trusted
    assert "do not trust it" in str(result)


def test_step_size_follows_scale_and_format() -> None:
    shifts = [Shift(amount=1e-3, size=1.0, norm=50.0), Shift(amount=1e-3, size=0.05, norm=200.0)]
    single, double = (step_size(shifts, 2.0, torch.finfo(t).eps) for t in (torch.float32, torch.float64))
    assert single / double == pytest.approx(math.sqrt(2.0**29), rel=0.5)  # up to the rounding to a power of two
    assert math.log2(single * 1e-3) == pytest.approx(round(math.log2(single * 1e-3)), abs=1e-9)
    larger = [Shift(amount=1e-2, size=s.size, norm=s.norm) for s in shifts]
    assert step_size(larger, 2.0, 2.0**-23) == pytest.approx(single / 10)  # the shift itself stays the same
    assert step_size([], 2.0, 2.0**-23) == 1.0
    tiny_loss = step_size(shifts, 1e-12, 2.0**-23)
    least = 4 * 2.0**-23 * 1.0 / 1e-3  # no shift is lost in the last digits
    assert 0.7 < tiny_loss / least < 1.5


FUNCTIONS = {
    "relu": F.relu,
    "relu in place": F.relu_,
    "relu method": Tensor.relu,
    "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, -0.3, 0.4),
    "hardtanh in place": lambda x: F.hardtanh_(x, -0.3, 0.4),
    "clamp": lambda x: x.clamp(max=0.2),
    "clamp by name": lambda x: torch.clamp(x, min=-0.1),
    "clamp_min": lambda x: x.clamp_min(0.1),
    "leaky": lambda x: F.leaky_relu(x, 0.2),
    "leaky in place": lambda x: F.leaky_relu(x, 0.2, inplace=True),
    "prelu": lambda x: F.prelu(x, torch.tensor([0.3], dtype=x.dtype)),
    "prelu per channel": lambda x: F.prelu(x, torch.linspace(-0.5, 0.5, x.shape[1], dtype=x.dtype)),
    "threshold": lambda x: F.threshold(x, 0.1, 2.0),
    "selu": F.selu,
    "hardswish": F.hardswish,
    "hardswish in place": lambda x: F.hardswish(x, inplace=True),
    "hardsigmoid": F.hardsigmoid,
    "abs": torch.abs,
    "max along": lambda x: x.max(1)[0],
    "min along, kept": lambda x: torch.min(x, dim=1, keepdim=True).values,
    "max of all": torch.max,
    "maximum": lambda x: torch.maximum(x, 0.5 * x.flip(0)),
    "minimum of two": lambda x: torch.min(x, 0.5 * x.flip(0)),
    "max pool 1d": lambda x: F.max_pool1d(x.flatten(2), 3, 2),
    "max pool 2d": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max pool with indices": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "max pool, torch's own": lambda x: torch.max_pool2d(x, 2),
    "max pool 3d": lambda x: F.max_pool3d(x.unsqueeze(2), (1, 2, 2)),
    "adaptive max pool": lambda x: F.adaptive_max_pool2d(x, 2),
}


LAYOUTS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_replayed_kink_is_the_function_on_its_own_side(name: str, layout: str) -> None:
    """On the same input: same value, same slope, same layout. On another: the linear (or smooth) piece goes on."""
    torch.manual_seed(0)
    function = FUNCTIONS[name]
    x = (3 * torch.randn(4, 3, 6, 6, dtype=torch.float64)).to(memory_format=LAYOUTS[layout]).requires_grad_()
    first = FirstPass("l1", directions=False, kinks=True)
    with first:
        want = function(x * 1.0)
    with SecondPass(first, {}):
        got = function(x * 1.0)
    assert len(first.calls) == 1
    torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14)
    weights = torch.randn_like(want)
    slopes = [torch.autograd.grad((out * weights).sum(), x)[0] for out in (want, got)]
    assert got.stride() == want.stride()
    assert slopes[1].stride() in (slopes[0].stride(), x.stride())
    # PyTorch keeps the sixth in hard-sigmoid's slope in single precision.
    close = 1e-7 if name == "hardsigmoid" else 1e-12
    torch.testing.assert_close(slopes[0], slopes[1], rtol=close, atol=close)
    with torch.no_grad():
        moved = x + 0.5 * torch.randn_like(x)
    moved.requires_grad_()
    with SecondPass(first, {}):
        elsewhere = function(moved * 1.0)
    if name not in ("selu", "hardswish", "hardswish in place"):  # the others are linear in pieces
        slope = torch.autograd.grad((elsewhere * weights).sum(), moved)[0]
        torch.testing.assert_close(slope, slopes[0], rtol=close, atol=close)
        assert not torch.equal(elsewhere, want)


def test_a_closure_that_goes_another_way_is_noticed() -> None:
    model = nn.Linear(2, 2)
    calls: list[int] = []

    def closure() -> Tensor:
        calls.append(1)
        out = model(torch.ones(1, 2))
        return (torch.relu(out) if len(calls) == 1 else torch.tanh(out)).sum()

    with pytest.raises(PenaltyError, match="took another way"):
        GradientPenalty(model, weight=0.1, activation=0.1).backward(closure)
    assert model.weight.grad is None


def test_the_two_lines_of_the_readme() -> None:
    model, data = nn.Linear(2, 2), torch.randn(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    penalty = anybit.GradientPenalty(model, norm="l1", weight=2e-3, activation=2e-3, engine="two-pass")
    before = model.weight.detach().clone()
    step = penalty.backward(lambda: F.cross_entropy(model(data), torch.zeros(8, dtype=torch.long)))
    optimizer.step()
    optimizer.zero_grad()
    assert isinstance(step.loss, float)
    assert not torch.equal(before, model.weight)
