from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from anybit.quant.fold import fold_graph
from anybit.quant.moments import add, gaussian, multiply, propagate, through_function, through_layer
from torch import Tensor, nn

from anybit.simulate.capture import capture

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
    got = through_function(gaussian(mean, std, n=6, source="test"), function)
    y = function(mean + std * torch.randn(400_000, 6)).double()
    torch.testing.assert_close(got.mean, y.mean(0), rtol=0.02, atol=0.01)
    torch.testing.assert_close(got.var.sqrt(), y.std(0), rtol=0.02, atol=0.01)
    assert bool((got.low <= y.amin(0) + 2e-3).all())
    assert bool((got.high >= y.amax(0) - 2e-3).all())


def test_rectified_normal_in_closed_form() -> None:
    mean, std = torch.tensor([-1.0, 0.0, 0.5, 2.0]).double(), torch.tensor([0.5, 1.0, 2.0, 0.7]).double()
    got = through_function(gaussian(mean, std, n=8, source="test"), torch.relu)
    a = mean / std
    normal = torch.distributions.Normal(0.0, 1.0)
    density, share = normal.log_prob(a).exp(), normal.cdf(a)
    first = mean * share + std * density
    second = (mean**2 + std**2) * share + mean * std * density
    torch.testing.assert_close(got.mean, first, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(got.var, second - first**2, rtol=5e-3, atol=1e-4)


def test_sums_of_independent_tensors() -> None:
    torch.manual_seed(0)
    x = gaussian(torch.tensor([1.0, -2.0]), torch.tensor([0.5, 1.0]), n=6, source="x")
    y = through_function(gaussian(torch.tensor([0.0, 0.5]), torch.tensor([1.0, 2.0]), n=6, source="y"), torch.relu)
    total = add(x, y)
    draws = torch.tensor([1.0, -2.0]) + torch.tensor([0.5, 1.0]) * torch.randn(400_000, 2)
    draws += torch.relu(torch.tensor([0.0, 0.5]) + torch.tensor([1.0, 2.0]) * torch.randn(400_000, 2))
    torch.testing.assert_close(total.mean.float(), draws.mean(0), rtol=0.02, atol=0.01)
    torch.testing.assert_close(total.var.float(), draws.var(0), rtol=0.02, atol=0.01)
    assert bool((total.low.float() <= draws.amin(0)).all())
    assert bool((total.high.float() >= draws.amax(0)).all())


class Branches(nn.Module):
    """Everything that moments are carried through, behind two batch norms that really make Gaussians."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
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
        body = capture(model, torch.randn(2, 3, 8, 8))
        moments = propagate(body, fold_graph(body), n=6)
        samples = [model(torch.randn(512, 3, 8, 8) * 3 + 1) for _ in range(4)]
    (output,) = [n for n in body.graph.nodes if n.op == "output"]
    for index, node in enumerate(output.args[0]):
        values = torch.cat([s[index] for s in samples]).double()
        values = values.transpose(0, 1).flatten(1)
        known = moments[node]
        assert len(known.mean) == len(values), node
        assert bool((known.low - 1e-4 <= values.amin(1)).all()), node
        assert bool((known.high + 1e-4 >= values.amax(1)).all()), node
        # and not by being absurdly wide: at most three times what 2,048 images show, pooling by mean aside
        if index < 3:
            assert float((known.high - known.low).max()) < 3 * float((values.amax(1) - values.amin(1)).max())


def test_nothing_is_known_where_no_batch_norm_reaches() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3)).eval()
    body = capture(model, torch.randn(2, 1, 8, 8))
    assert propagate(body, fold_graph(body)) == {}


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
        body = capture(model, draw(2))
        moments = propagate(body, fold_graph(body), n=6)
        y = torch.cat([model(draw(500)) for _ in range(4)]).double()
    (output,) = [n for n in body.graph.nodes if n.op == "output"]
    known = moments[output.args[0][0]]
    assert known.source == "batch norm norm (estimated)"
    y = y.transpose(0, 1).flatten(1)
    inner = y if len(shape) == 1 or name in ("pointwise", "transposed, grouped") else None
    if inner is not None:  # no border: the mean is that of the samples
        torch.testing.assert_close(known.mean, inner.mean(1), rtol=0.05, atol=0.1)
        torch.testing.assert_close(known.var.sqrt(), inner.std(1), rtol=0.1, atol=0.05)
    assert bool((known.low - 1e-4 <= y.amin(1)).all())
    assert bool((known.high + 1e-4 >= y.amax(1)).all())


def test_the_estimate_never_exceeds_what_the_inputs_interval_allows() -> None:
    x = through_function(gaussian(torch.zeros(2), torch.ones(2), n=6, source="x"), F.relu6)
    wide = through_layer(x, torch.tensor([[10.0, -10.0]]), torch.tensor([1.0]), n=1000)
    assert (float(wide.low), float(wide.high)) == (-59.0, 61.0)


def test_products_of_independent_tensors() -> None:
    torch.manual_seed(0)
    x = gaussian(torch.tensor([1.0, -2.0]), torch.tensor([0.5, 1.0]), n=6, source="x")
    y = through_function(gaussian(torch.tensor([0.0, 0.5]), torch.tensor([1.0, 2.0]), n=6, source="y"), torch.sigmoid)
    product = multiply(x, y)
    a = torch.tensor([1.0, -2.0]) + torch.tensor([0.5, 1.0]) * torch.randn(400_000, 2)
    b = torch.sigmoid(torch.tensor([0.0, 0.5]) + torch.tensor([1.0, 2.0]) * torch.randn(400_000, 2))
    torch.testing.assert_close(product.mean.float(), (a * b).mean(0), rtol=0.02, atol=0.01)
    torch.testing.assert_close(product.var.float(), (a * b).var(0), rtol=0.02, atol=0.01)
    assert bool((product.low.float() <= (a * b).amin(0)).all())
    assert bool((product.high.float() >= (a * b).amax(0)).all())
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
    body = capture(Gates(), torch.randn(2, 3, 4, 4))
    moments = propagate(body, {}, n=6)
    (output,) = [n for n in body.graph.nodes if n.op == "output"]
    found = [moments.get(node) for node in output.args[0]]
    intervals = [None if m is None else (float(m.low), float(m.high)) for m in found]
    assert intervals == [
        (0, 1), (-1, 1), (0, 6), (-1, 1), (-2, 3), (-1, 0.5), None,
        (0, 1), (-1, 1), (0, 2), (0, 1), (-2, 2), (-1, 2), (0, 1), None, (-1, 2),
    ]  # fmt: skip
    assert all(bool(m.mean.isnan().all()) for m in found if m is not None)  # an interval says nothing about the mean


def test_an_unknown_mean_stops_at_the_next_layer() -> None:
    model = nn.Sequential(nn.Sigmoid(), nn.Conv2d(3, 4, 1)).eval()
    body = capture(model, torch.randn(2, 3, 4, 4))
    assert [str(node.target) for node in propagate(body, {})] == ["aten.sigmoid.default"]
