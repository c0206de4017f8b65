from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybit.quant.capture import capture
from anybit.quant.fold import fold_graph
from anybit.quant.moments import add, gaussian, propagate, through_function

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
