from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from views import viewed

from anybit.errors import RangeError
from anybit.plan.build import Settings, build, check_ranges
from anybit.plan.fold import fold
from anybit.plan.moments import Moments, add, gaussian, multiply, propagate, through_function, through_layer


def of_arrays(function: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """A torch function as one of numpy arrays."""
    return lambda x: function(torch.from_numpy(x)).numpy()


def outputs(model: nn.Module, example: Any, *, n: float = 6) -> list[Moments | None]:
    """What is known of each output of a network without data."""
    _, graph = viewed(model, example)
    known = fold(graph)
    moments = propagate(graph, known, n=n)
    return [moments.get(value) for value in graph.outputs]


def the_output(model: nn.Module, example: Any) -> Moments:
    (found,) = outputs(model, example)
    assert found is not None
    return found


def assert_close(got: Any, want: Tensor, **tolerance: float) -> None:
    np.testing.assert_allclose(got, want.numpy(), **tolerance)


FUNCTIONS = {
    "relu": torch.relu,
    "relu6": F.relu6,
    "leaky": F.leaky_relu,
    "hard-swish": F.hardswish,
    "silu": F.silu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_moments_of_a_function_match_sampling(name: str) -> None:
    torch.manual_seed(0)
    function = FUNCTIONS[name]
    mean = torch.tensor([-2.0, -0.5, 0.0, 0.7, 3.0, 1.0])
    std = torch.tensor([1.0, 0.3, 2.0, 1.0, 5.0, 0.0])
    got = through_function(gaussian(mean, std, n=6, source="test"), of_arrays(function))
    y = function(mean + std * torch.randn(400_000, 6)).double()
    assert_close(got.mean, y.mean(0), rtol=0.02, atol=0.01)
    assert_close(np.sqrt(got.var), y.std(0), rtol=0.02, atol=0.01)
    assert (got.low <= y.amin(0).numpy() + 2e-3).all()
    assert (got.high >= y.amax(0).numpy() - 2e-3).all()


def test_rectified_normal_in_closed_form() -> None:
    mean, std = torch.tensor([-1.0, 0.0, 0.5, 2.0]).double(), torch.tensor([0.5, 1.0, 2.0, 0.7]).double()
    got = through_function(gaussian(mean, std, n=8, source="test"), of_arrays(torch.relu))
    a = mean / std
    normal = torch.distributions.Normal(0.0, 1.0)
    density, share = normal.log_prob(a).exp(), normal.cdf(a)
    first = mean * share + std * density
    second = (mean**2 + std**2) * share + mean * std * density
    assert_close(got.mean, first, rtol=1e-3, atol=1e-4)
    assert_close(got.var, second - first**2, rtol=5e-3, atol=1e-4)


def test_sums_of_independent_tensors() -> None:
    torch.manual_seed(0)
    x = gaussian(torch.tensor([1.0, -2.0]), torch.tensor([0.5, 1.0]), n=6, source="x")
    y = through_function(
        gaussian(torch.tensor([0.0, 0.5]), torch.tensor([1.0, 2.0]), n=6, source="y"), of_arrays(torch.relu)
    )
    total = add(x, y)
    draws = torch.tensor([1.0, -2.0]) + torch.tensor([0.5, 1.0]) * torch.randn(400_000, 2)
    draws += torch.relu(torch.tensor([0.0, 0.5]) + torch.tensor([1.0, 2.0]) * torch.randn(400_000, 2))
    assert_close(total.mean, draws.mean(0), rtol=0.02, atol=0.01)
    assert_close(total.var, draws.var(0), rtol=0.02, atol=0.01)
    assert (total.low <= draws.amin(0).numpy()).all()
    assert (total.high >= draws.amax(0).numpy()).all()


class Branches(nn.Module):
    """Everything that moments are carried through, behind two batch norms that really make Gaussians."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.register_buffer("picture", torch.zeros(8, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x + self.picture  # so that no other size of image will do, and how many features there are is known
        a, b = self.one(x), self.two(x.flip(0))
        total = F.relu(a) + b
        joined = torch.cat([F.relu6(a), total], 1)
        pooled = F.max_pool2d(joined, 2)
        return total, joined, pooled, F.avg_pool2d(pooled, 2).flatten(1), joined.mean((2, 3)), a.flatten(1)


def test_analytic_ranges_cover_what_sampling_says() -> None:
    torch.manual_seed(0)
    model = Branches().train()
    with torch.no_grad():
        for norm in (model.one, model.two):
            norm.weight.copy_(torch.tensor([0.3, 1.0, 2.0]))
            norm.bias.copy_(torch.tensor([-1.0, 0.0, 2.0]))
        for _ in range(50):
            model(torch.randn(64, 3, 8, 8) * 3 + 1)
        model.eval()
        found = outputs(model, torch.randn(2, 3, 8, 8))
        samples = [model(torch.randn(512, 3, 8, 8) * 3 + 1) for _ in range(4)]
    for index, known in enumerate(found):
        values = torch.cat([s[index] for s in samples]).double()
        values = values.transpose(0, 1).flatten(1)
        assert known is not None
        assert len(known.mean) == len(values), index
        assert known.axis == 1
        assert (known.low - 1e-4 <= values.amin(1).numpy()).all(), index
        assert (known.high + 1e-4 >= values.amax(1).numpy()).all(), index
        # and not by being absurdly wide: at most three times what 2,048 images show, pooling by mean aside
        if index < 3:
            assert float((known.high - known.low).max()) < 3 * float((values.amax(1) - values.amin(1)).max())


def test_nothing_is_known_where_no_batch_norm_reaches() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3)).eval()
    _, graph = viewed(model, torch.randn(2, 1, 8, 8))
    assert propagate(graph, fold(graph)) == {}


LAYERS = {
    "linear": (nn.Linear(6, 4), (6,)),
    "convolution": (nn.Conv2d(6, 4, 3, padding=1), (6, 8, 8)),
    "pointwise": (nn.Conv2d(6, 4, 1, bias=False), (6, 8, 8)),
    "depthwise": (nn.Conv2d(6, 6, 3, padding=1, groups=6), (6, 8, 8)),
    "grouped": (nn.Conv2d(6, 4, 3, groups=2), (6, 8, 8)),
    "transposed": (nn.ConvTranspose2d(6, 4, 2, stride=2), (6, 8, 8)),
    "transposed, grouped": (nn.ConvTranspose2d(6, 4, 1, groups=2), (6, 8, 8)),
}


class Behind(nn.Module):
    """A layer without batch norm, behind a rectified one with."""

    def __init__(self, layer: nn.Module, dims: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6) if dims == 1 else nn.BatchNorm2d(6)
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.relu(self.norm(x)))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("smooth", [False, True])
def test_layers_without_batch_norm_are_estimated_and_covered(name: str, smooth: bool) -> None:
    torch.manual_seed(0)
    layer, shape = LAYERS[name]
    model = Behind(layer, len(shape)).eval()

    def draw(n: int) -> Tensor:
        if not smooth or len(shape) == 1:
            return torch.randn(n, *shape)
        return torch.randn(n, 6, 1, 1).expand(n, *shape)  # neighbours that are all alike: the worst case

    with torch.no_grad():
        model.norm.weight.uniform_(0.2, 2.0)
        model.norm.bias.normal_()
        known = the_output(model, draw(2))
        y = torch.cat([model(draw(500)) for _ in range(4)]).double()
    assert known.source == "batch norm norm (estimated)"
    y = y.transpose(0, 1).flatten(1)
    inner = y if len(shape) == 1 or name in ("pointwise", "transposed, grouped") else None
    if inner is not None:  # no border: the mean is that of the samples
        assert_close(known.mean, inner.mean(1), rtol=0.05, atol=0.1)
        assert_close(np.sqrt(known.var), inner.std(1), rtol=0.1, atol=0.05)
    assert (known.low - 1e-4 <= y.amin(1).numpy()).all()
    assert (known.high + 1e-4 >= y.amax(1).numpy()).all()


def test_the_estimate_never_exceeds_what_the_inputs_interval_allows() -> None:
    x = through_function(gaussian(np.zeros(2), np.ones(2), n=6, source="x"), of_arrays(F.relu6))
    wide = through_layer(x, np.array([[10.0, -10.0]]), np.array([1.0]), n=1000)
    assert (wide.low.item(), wide.high.item()) == (-59.0, 61.0)


def test_products_of_independent_tensors() -> None:
    torch.manual_seed(0)
    x = gaussian(torch.tensor([1.0, -2.0]), torch.tensor([0.5, 1.0]), n=6, source="x")
    y = through_function(
        gaussian(torch.tensor([0.0, 0.5]), torch.tensor([1.0, 2.0]), n=6, source="y"), of_arrays(torch.sigmoid)
    )
    product = multiply(x, y)
    a = torch.tensor([1.0, -2.0]) + torch.tensor([0.5, 1.0]) * torch.randn(400_000, 2)
    b = torch.sigmoid(torch.tensor([0.0, 0.5]) + torch.tensor([1.0, 2.0]) * torch.randn(400_000, 2))
    assert_close(product.mean, (a * b).mean(0), rtol=0.02, atol=0.01)
    assert_close(product.var, (a * b).var(0), rtol=0.02, atol=0.01)
    assert (product.low <= (a * b).amin(0).numpy()).all()
    assert (product.high >= (a * b).amax(0).numpy()).all()
    assert product.source == "x, y"


class Gates(nn.Module):
    """Functions that bound their output by themselves, and what is made of them."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        gate, both = torch.sigmoid(x), torch.tanh(x)
        return (
            gate, both, F.relu6(x), F.hardtanh(x), F.hardtanh(x, -2.0, 3.0), x.clamp(-1.0, 0.5), x.clamp(min=0.0),
            torch.softmax(x, 1), gate * both, gate + gate, gate * gate, both + both, gate + both, 1 - gate,
            x.clamp(max=2), gate - both,
        )  # fmt: skip


def test_bounded_functions_need_no_batch_norm() -> None:
    found = outputs(Gates(), torch.randn(2, 3, 4, 4))
    intervals = [None if m is None else (m.low.item(), m.high.item()) for m in found]
    assert intervals == [
        (0, 1), (-1, 1), (0, 6), (-1, 1), (-2, 3), (-1, 0.5), None,
        (0, 1), (-1, 1), (0, 2), (0, 1), (-2, 2), (-1, 2), (0, 1), None, (-1, 2),
    ]  # fmt: skip
    assert all(np.isnan(m.mean).all() for m in found if m is not None)  # an interval says nothing about the mean


def test_an_unknown_mean_stops_at_the_next_layer() -> None:
    model = nn.Sequential(nn.Sigmoid(), nn.Conv2d(3, 4, 1)).eval()
    _, graph = viewed(model, torch.randn(2, 3, 4, 4))
    assert list(propagate(graph, {})) == [graph.nodes[0].output]
    assert graph.nodes[0].name == "sigmoid"


# One value used more than once


class Written(nn.Module):
    """A batch norm and then one function, as its operator or written out."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.function = nn.BatchNorm2d(5), function
        with torch.no_grad():
            self.norm.weight.copy_(torch.tensor([0.3, 1.0, 2.0, 4.0, 0.0]))
            self.norm.bias.copy_(torch.tensor([-2.0, 0.0, 1.0, 3.0, 0.7]))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.norm(x))


PAIRS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "silu": (F.silu, lambda x: x * torch.sigmoid(x)),
    "silu turned": (F.silu, lambda x: torch.sigmoid(x) * x),
    "hard swish": (F.hardswish, lambda x: x * F.relu6(x + 3) / 6),
    "mish": (F.mish, lambda x: x * torch.tanh(F.softplus(x))),
    "gelu": (F.gelu, lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5))),
    "gelu by tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    ),
    "square": (lambda x: x**2, lambda x: x * x),
    "nothing": (lambda x: x * 0.0, lambda x: x - x),
    "relu": (F.relu, lambda x: (x + x.abs()) / 2),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_function_written_out_is_as_exact_as_its_operator(name: str) -> None:
    torch.manual_seed(0)
    one, two = (Written(function).eval() for function in PAIRS[name])
    x = torch.randn(2000, 5, 4, 4)
    first, second = the_output(one, x[:2]), the_output(two, x[:2])
    for part in ("mean", "var", "low", "high"):
        np.testing.assert_allclose(getattr(second, part), getattr(first, part), rtol=1e-6, atol=1e-6)
    assert (first.source, first.axis) == (second.source, second.axis) == ("batch norm norm", 1)
    with torch.no_grad():
        y = two(x).transpose(0, 1).flatten(1).double()
    assert_close(second.mean, y.mean(1), rtol=0.03, atol=0.03)
    assert (second.low <= y.amin(1).numpy() + 2e-3).all()
    assert (second.high >= y.amax(1).numpy() - 2e-3).all()


class SqueezeExcite(nn.Module):
    """A value times a gate that is made of its own means: neither is a function of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x * torch.sigmoid(self.fc(F.adaptive_avg_pool2d(x, 1)))


def test_a_gate_of_other_values_is_taken_as_independent() -> None:
    torch.manual_seed(0)
    model = SqueezeExcite().eval()
    found = the_output(model, torch.randn(2, 4, 6, 6))
    with torch.no_grad():
        y = model(torch.randn(500, 4, 6, 6)).transpose(0, 1).flatten(1).double()
    assert (found.low <= y.amin(1).numpy()).all()
    assert (found.high >= y.amax(1).numpy()).all()
    assert float(found.high.max()) <= 6.0 + 1e-4  # a gate is at most one


# Layer norm


class Standard(nn.Module):
    """A layer norm and what follows it in a transformer's second half."""

    def __init__(self, affine: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16, elementwise_affine=affine)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        if affine:
            with torch.no_grad():
                self.norm.weight.uniform_(0.3, 2.0)
                self.norm.bias.normal_()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        return y, self.down(F.gelu(self.up(y)))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(7, 16), (16,), (3, 5, 16)])
def test_layer_norm_gives_ranges(shape: tuple[int, ...], affine: bool) -> None:
    torch.manual_seed(0)
    model = Standard(affine).eval()
    first, second = outputs(model, torch.randn(2, *shape))
    assert first is not None
    assert second is not None
    assert (first.source, second.source) == ("layer norm norm", "layer norm norm (estimated)")
    assert first.axis == second.axis == len(shape)
    gamma = model.norm.weight.detach().double() if affine else torch.ones(16, dtype=torch.float64)
    beta = model.norm.bias.detach().double() if affine else torch.zeros(16, dtype=torch.float64)
    assert_close(first.mean, beta)
    assert_close(first.high, beta + 6 * gamma.abs())
    with torch.no_grad():
        for known, values in zip((first, second), model(torch.randn(500, *shape) * 9 + 4), strict=True):
            y = values.flatten(0, -2)
            assert (known.low <= y.amin(0).numpy() + 1e-4).all()
            assert (known.high >= y.amax(0).numpy() - 1e-4).all()


def _normed(norm: nn.Module, after: nn.Module) -> nn.Sequential:
    with torch.no_grad():
        for parameter in (*norm.parameters(), *after.parameters()):
            parameter.uniform_(0.3, 1.5)
    return nn.Sequential(norm, after).eval()


@pytest.mark.parametrize("after", [nn.Identity(), nn.ReLU(), nn.SiLU(), nn.PReLU(), nn.PReLU(8)], ids=str)
@pytest.mark.parametrize(
    "norm", [nn.GroupNorm(2, 8), nn.GroupNorm(1, 8), nn.InstanceNorm2d(8, affine=True), nn.InstanceNorm2d(8)], ids=str
)
def test_group_and_instance_norm_give_ranges(norm: nn.Module, after: nn.Module) -> None:
    torch.manual_seed(0)
    model = _normed(norm, after)
    known = the_output(model, torch.randn(2, 8, 6, 6))
    assert known.source == ("group norm 0" if isinstance(norm, nn.GroupNorm) else "instance norm 0")
    with torch.no_grad():
        y = model(torch.randn(400, 8, 6, 6) * 7 - 3).transpose(0, 1).flatten(1)
    assert_close(known.mean, y.mean(1), atol=0.03)
    assert_close(np.sqrt(known.var), y.std(1), rtol=0.05)
    assert (known.low <= y.amin(1).numpy() + 1e-4).all()
    assert (known.high >= y.amax(1).numpy() - 1e-4).all()


def test_slopes_of_channels_that_are_not_told_apart_give_an_interval() -> None:
    model = nn.Sequential(nn.BatchNorm2d(4), nn.Flatten(2), nn.Flatten(0, 1), nn.PReLU()).eval()
    one = the_output(model, torch.randn(2, 4, 3, 3))
    assert (one.low.min(), one.high.max()) == (-1.5, 6.0)
    bare = nn.Sequential(nn.BatchNorm1d(6), nn.Unflatten(1, (2, 3)), nn.PReLU(2)).eval()
    with torch.no_grad():
        bare[2].weight.copy_(torch.tensor([0.5, -0.5]))
    pooled = the_output(bare, torch.randn(2, 6))
    assert (pooled.low.min(), pooled.high.max()) == (-3.0, 6.0)


def test_an_instance_norm_with_running_statistics_says_nothing() -> None:
    norm = nn.InstanceNorm2d(4, track_running_stats=True).eval()
    assert outputs(norm, torch.randn(2, 4, 3, 3)) == [None]


def test_the_feed_forward_half_of_a_transformer_needs_no_data() -> None:
    _, graph = viewed(Standard(), torch.randn(2, 7, 16))
    plan = build(graph, Settings()).plan
    check_ranges(plan, advice="none")
    assert [a.ranges[0][1].source for a in plan.activations if a.kind == "activation"] == [
        "layer norm norm",
        "layer norm norm (estimated)",
    ]
    bare = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2))
    with pytest.raises(RangeError, match="no normalization"):
        check_ranges(build(viewed(bare, torch.randn(2, 16))[1], Settings()).plan, advice="none")


def test_a_layer_norm_over_several_dimensions_says_nothing() -> None:
    assert outputs(nn.LayerNorm((4, 6)), torch.randn(2, 4, 6)) == [None]
