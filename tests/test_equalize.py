from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import CASES, Case
from grids import quantize_tensor
from torch import Tensor, fx, nn
from views import applied, viewed

from anybit.graph.from_torch import read_torch
from anybit.graph.view import Graph, Norm
from anybit.plan.equalize import Pair, Side, balance, equalize, find_pairs
from anybit.plan.fold import fold
from anybit.plan.moments import propagate
from anybit.spec import QuantSpec

tree_map_only = torch.utils._pytree.tree_map_only


def all_pairs(graph: Graph, known: dict[str, Norm]) -> list[tuple[str, str]]:
    """Equalize whatever can be, and say what that was."""
    pairs = find_pairs(graph)
    equalize(graph, known, pairs)
    return [pair.names for pair in pairs]


def uneven(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give the parameters of each layer channels of very different size, in float64."""
    torch.manual_seed(seed)
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            size = torch.logspace(-2, 2, parameter.shape[0], dtype=torch.float64)[torch.randperm(parameter.shape[0])]
            parameter.copy_(torch.randn_like(parameter) * size.view(-1, *[1] * (parameter.dim() - 1)))
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
    return model


def folded(model: nn.Module, example: Any) -> tuple[fx.GraphModule, Graph, dict[str, Norm]]:
    """A captured network without batch norms that can be folded, its view, and what batch norm says of values."""
    body, graph = viewed(model, example)
    known = fold(graph)
    carriers = {norm.output: layer.origin.name for norm, layer in graph.removed}
    return body, read_torch(applied(body, graph)), {carriers.get(name, name): norm for name, norm in known.items()}


def weight_of(body: fx.GraphModule, name: str) -> Tensor:
    value = body.get_parameter(name)
    assert isinstance(value, Tensor)
    return value


class Chain(nn.Module):
    """Layers `a`, `b` and perhaps more, with a function of one's own between."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def two(between: Callable[[Tensor], Tensor], a: nn.Module, b: nn.Module) -> Chain:
    return Chain(lambda m, x: m.b(between(m.a(x))), a=a, b=b)


def conv(inputs: int, outputs: int, size: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, **options)


IMAGE, SEQUENCE = (2, 3, 10, 10), (2, 5, 6)
AB = [("a.weight", "b.weight")]

PAIRED: dict[str, tuple[nn.Module, tuple[int, ...], list[tuple[str, str]]]] = {
    "relu": (two(F.relu, conv(3, 4), conv(4, 5)), IMAGE, AB),
    "nothing between": (two(lambda x: x, conv(3, 4), conv(4, 5)), IMAGE, AB),
    "no bias": (two(F.relu, conv(3, 4, bias=False), conv(4, 5)), IMAGE, AB),
    "leaky relu": (two(lambda x: F.leaky_relu(x, 0.2), conv(3, 4), conv(4, 5)), IMAGE, AB),
    "max pooling": (two(lambda x: F.max_pool2d(F.relu(x), 3, 2, 1), conv(3, 4), conv(4, 5)), IMAGE, AB),
    "average pooling": (two(lambda x: F.avg_pool2d(x, 3, padding=1), conv(3, 4), conv(4, 5, 1)), IMAGE, AB),
    "adaptive pooling": (two(lambda x: F.adaptive_avg_pool2d(x, 3), conv(3, 4), conv(4, 5)), IMAGE, AB),
    "adaptive max pooling": (two(lambda x: F.adaptive_max_pool2d(x, 3), conv(3, 4), conv(4, 5)), IMAGE, AB),
    "zero padding": (two(lambda x: F.pad(x, (1, 2, 0, 1)), conv(3, 4), conv(4, 5)), IMAGE, AB),
    "reflection": (two(F.relu, conv(3, 4), conv(4, 5, padding=1, padding_mode="reflect")), IMAGE, AB),
    "mean over space": (two(lambda x: F.relu(x).mean((2, 3)), conv(3, 4), nn.Linear(4, 5)), IMAGE, AB),
    "mean that keeps dimensions": (two(lambda x: x.mean((-1, -2), True), conv(3, 4), conv(4, 5, 1)), IMAGE, AB),
    "maximum over space": (two(lambda x: x.amax((2, 3)), conv(3, 4), nn.Linear(4, 5)), IMAGE, AB),
    "flatten": (two(lambda x: F.relu(x).flatten(1), conv(3, 4, 8), nn.Linear(36, 5)), IMAGE, AB),
    "relu after flatten": (two(lambda x: F.relu(x.flatten(1)), conv(3, 4, 8), nn.Linear(36, 5)), IMAGE, AB),
    "one pixel": (two(lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1), conv(3, 4), nn.Linear(4, 5)), IMAGE, AB),
    "flattened, then pixels": (two(lambda x: x.flatten(1).unsqueeze(2), conv(3, 4, 8), nn.Conv1d(36, 5, 1)), IMAGE, AB),
    "channels moved": (two(lambda x: x.permute(0, 2, 3, 1), conv(3, 4), nn.Linear(4, 5)), IMAGE, AB),
    "squeeze": (two(lambda x: x.mean(3, True).squeeze(3).mean(2), conv(3, 4), nn.Linear(4, 5)), IMAGE, AB),
    "linear to image": (two(lambda x: x.unsqueeze(2).unsqueeze(3), nn.Linear(6, 4), conv(4, 5, 1)), (2, 6), AB),
    "linear": (two(F.relu, nn.Linear(6, 4), nn.Linear(4, 5)), (2, 6), AB),
    "linear on sequences": (two(F.relu, nn.Linear(6, 4), nn.Linear(4, 3)), SEQUENCE, AB),
    "mean of a sequence": (two(lambda x: F.relu(x).mean(1), nn.Linear(6, 4), nn.Linear(4, 3)), SEQUENCE, AB),
    "mean of a sequence, kept": (two(lambda x: x.mean(1, True), nn.Linear(6, 4), nn.Linear(4, 3)), SEQUENCE, AB),
    "padded sequence": (two(lambda x: F.pad(x, (0, 0, 1, 1)), nn.Linear(6, 4), nn.Linear(4, 3)), SEQUENCE, AB),
    "conv1d": (two(lambda x: F.max_pool1d(x, 2), nn.Conv1d(5, 4, 1), nn.Conv1d(4, 3, 3)), SEQUENCE, AB),
    "conv3d": (two(lambda x: F.avg_pool3d(x, 2), nn.Conv3d(1, 4, 2), nn.Conv3d(4, 3, 1)), (2, 1, 5, 5, 5), AB),
    "groups written": (two(F.relu, conv(3, 6, groups=3), conv(6, 4)), IMAGE, AB),
    "groups read": (two(F.relu, conv(3, 6), conv(6, 4, groups=2)), IMAGE, AB),
    "groups": (two(F.relu, conv(3, 6, groups=3), conv(6, 4, groups=2)), IMAGE, AB),
    "transposed written": (two(F.relu, nn.ConvTranspose2d(3, 4, 3), conv(4, 5)), IMAGE, AB),
    "transposed read": (two(F.relu, conv(3, 4), nn.ConvTranspose2d(4, 5, 2, 2)), IMAGE, AB),
    "transposed groups written": (two(F.relu, nn.ConvTranspose2d(3, 6, 3, groups=3), conv(6, 5)), IMAGE, AB),
    "transposed groups read": (two(F.relu, conv(3, 6), nn.ConvTranspose2d(6, 4, 3, groups=2)), IMAGE, AB),
    "depthwise chain": (
        nn.Sequential(conv(3, 8), nn.ReLU(), conv(8, 8, groups=8), nn.ReLU(), conv(8, 4, 1), nn.ReLU(), conv(4, 2, 1)),
        IMAGE,
        [("0.weight", "2.weight"), ("2.weight", "4.weight"), ("4.weight", "6.weight")],
    ),
    "batch norm": (
        nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.ReLU(), conv(4, 5, bias=False), nn.BatchNorm2d(5)),
        IMAGE,
        [("0.weight", "3.weight")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRED)
def test_the_function_stays_and_both_sides_become_equally_large(name: str) -> None:
    model, shape, names = PAIRED[name]
    model = uneven(copy.deepcopy(model))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    pointers = {key: value.data_ptr() for key, value in model.state_dict().items()}
    x = torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        want = model(x)
        body, graph, known = folded(model, x)
        old = {weight: weight_of(body, weight) for weight in {w for pair in names for w in pair}}
        kept = {weight: value.clone() for weight, value in old.items()}
        assert all_pairs(graph, known) == names
        got = applied(body, graph)(x)
    assert float((got - want).abs().max()) <= 1e-10 * float(want.abs().max())
    for pair in find_pairs(graph):
        ends = [side.largest(_sizes(graph, side.weight)) for side in (pair.written, pair.read)]
        np.testing.assert_allclose(ends[0], ends[1], rtol=1e-5, atol=0)
    # Nothing was written into: not the user's parameters, not those that folding had made.
    for weight, value in old.items():
        new = weight_of(body, weight)
        assert isinstance(new, nn.Parameter)
        assert new.data_ptr() != value.data_ptr()
        assert not torch.allclose(new, value, rtol=1e-3)
        assert torch.equal(value, kept[weight])
    for key, state in model.state_dict().items():
        assert torch.equal(state, before[key])
        assert state.data_ptr() == pointers[key]


def _sizes(graph: Graph, name: str) -> Any:
    weight = np.abs(graph.constants[name])
    return weight.reshape(*weight.shape[:2], -1).max(2)


def _twice(m: Any, x: Tensor) -> Tensor:
    y = F.relu(m.a(x))
    return m.b(y) + y.mean()


def _shared(m: Any, x: Tensor) -> Tensor:
    return m.b(F.relu(m.a(F.relu(m.a(x)))))


def _read_twice(m: Any, x: Tensor) -> Tensor:
    return m.b(F.relu(m.a(x))) + m.b(x)


def _as_bias(m: Any, x: Tensor) -> Tensor:
    return F.linear(x.mean((2, 3)), m.b.weight, m.a(x).mean((0, 2, 3)))


def _without_batch(m: Any, x: Tensor) -> Tensor:
    return m.b(F.relu(m.a(x.mean(0)))) + 0 * x[:, :1, :6, :6]


def _returned(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    return m.b(F.relu(y)), y


def _residual(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    return m.b(F.relu(m.c(x) + y))


ALONE: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "relu6": (two(F.relu6, conv(3, 4), conv(4, 5)), IMAGE),
    "hardswish": (two(F.hardswish, conv(3, 4), conv(4, 5)), IMAGE),
    "gelu": (two(F.gelu, nn.Linear(6, 4), nn.Linear(4, 5)), (2, 6)),
    "silu": (two(F.silu, conv(3, 4), conv(4, 5)), IMAGE),
    "a clamp": (two(lambda x: x.clamp(min=-0.5), conv(3, 4), conv(4, 5)), IMAGE),
    "a constant added": (two(lambda x: F.relu(x + 1), conv(3, 4), conv(4, 5)), IMAGE),
    "padding with ones": (two(lambda x: F.pad(x, (1, 1), value=1.0), conv(3, 4), conv(4, 5)), IMAGE),
    "padding of channels": (two(lambda x: F.pad(x, (0, 0, 0, 0, 1, 1)), conv(3, 4), conv(6, 5)), IMAGE),
    "a sum": (Chain(_residual, a=conv(3, 4), b=conv(4, 5), c=conv(3, 4)), IMAGE),
    "a concatenation": (two(lambda x: torch.cat([x, x], 1), conv(3, 4), conv(8, 5)), IMAGE),
    "two readers": (Chain(_twice, a=conv(3, 4), b=conv(4, 5)), IMAGE),
    "the output too": (Chain(_returned, a=conv(3, 4), b=conv(4, 5)), IMAGE),
    "one layer used twice": (Chain(_shared, a=conv(3, 3), b=conv(3, 5)), IMAGE),
    "a reader used twice": (Chain(_read_twice, a=conv(3, 3, padding=1), b=conv(3, 5)), IMAGE),
    "read as a bias": (Chain(_as_bias, a=conv(3, 4), b=nn.Linear(3, 4)), IMAGE),
    "no batch": (Chain(_without_batch, a=conv(3, 4), b=conv(4, 1)), IMAGE),
    "half images": (two(lambda x: x.reshape(-1, 4, 8, 4), conv(3, 4), conv(4, 5)), IMAGE),
    "features taken apart": (two(lambda x: x.reshape(-1, 5, 2, 2), nn.Linear(6, 4), conv(5, 3, 1)), SEQUENCE),
    "channels pooled": (two(lambda x: F.max_pool2d(x, 2), nn.Conv1d(5, 4, 1), nn.Conv1d(2, 3, 1)), SEQUENCE),
    "mean over channels": (two(lambda x: x.mean(1, True), conv(3, 4), conv(1, 5)), IMAGE),
    "channels moved away": (two(lambda x: x.permute(0, 2, 1, 3), conv(3, 4), nn.Linear(8, 5)), IMAGE),
    "channels mixed": (two(lambda x: x.reshape(-1, 8, 4, 8), conv(3, 4), conv(8, 5)), IMAGE),
    "pixels read as channels": (two(lambda x: F.relu(x), conv(3, 4), nn.Linear(8, 5)), IMAGE),
    "a batch read as channels": (two(lambda x: x.reshape(-1, 8, 8), conv(3, 4), nn.Linear(8, 5)), IMAGE),
    "a sequence pooled crosswise": (two(lambda x: F.max_pool1d(x, 2), nn.Linear(6, 8), nn.Linear(4, 5)), SEQUENCE),
    "a sequence read as channels": (two(F.relu, nn.Linear(6, 5), nn.Conv1d(5, 3, 1)), SEQUENCE),
    "features cut": (two(lambda x: x[:, :2], conv(3, 4), conv(2, 5)), IMAGE),
    "all averaged": (two(lambda x: x.mean((1, 2, 3))[:, None], conv(3, 4), nn.Linear(1, 5)), IMAGE),
    "a batch norm in front": (nn.Sequential(conv(3, 4), nn.ReLU(), nn.BatchNorm2d(4), conv(4, 5)), IMAGE),
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_what_does_not_commute_is_left_alone(name: str) -> None:
    model, shape = ALONE[name]
    model = uneven(copy.deepcopy(model))
    x = torch.randn(shape, dtype=torch.float64)
    _, graph, known = folded(model, x)
    before = dict(graph.constants)
    constants = dict(known)
    assert all_pairs(graph, known) == []
    assert graph.changed == set()
    assert all(value is before[key] for key, value in graph.constants.items())
    assert known == constants


def test_tied_weights_and_shared_biases_stay_tied() -> None:
    layers = nn.Sequential(conv(4, 4), nn.ReLU(), conv(4, 4), nn.ReLU(), conv(4, 4), nn.ReLU(), conv(4, 4))
    x = torch.randn(2, 4, 12, 12, dtype=torch.float64)
    tied = copy.deepcopy(layers)
    tied[2].weight = tied[0].weight
    _, graph, known = folded(uneven(tied), x)
    assert all_pairs(graph, known) == [("4.weight", "6.weight")]
    shared = copy.deepcopy(layers)
    shared[4].bias = shared[2].bias
    _, graph, known = folded(uneven(shared), x)
    assert all_pairs(graph, known) == [("0.weight", "2.weight")]


def test_a_weight_that_is_computed_is_left_alone() -> None:
    layers = {"a": nn.Linear(6, 4), "b": nn.Linear(4, 5)}
    model = Chain(lambda m, x: m.b(F.relu(F.linear(x, m.a.weight.exp(), m.a.bias))), **layers)
    _, graph, known = folded(uneven(model), torch.randn(2, 6, dtype=torch.float64))
    assert all_pairs(graph, known) == []


PRECISIONS = [(torch.float32, 1e-5), (torch.float64, 1e-10)]
QUICK = ("small-conv", "vgg-like", "functional", "max-pool", "average-pool", "dropout")
TABLE = [(c, *p) for c, p in itertools.product(CASES, PRECISIONS) if p[0] == torch.float32 or c.name in QUICK]


@pytest.mark.parametrize(("case", "dtype", "tolerance"), TABLE, ids=[f"{case.name}-{p}" for case, p, _ in TABLE])
def test_no_network_computes_anything_else(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    model = case.build().eval().to(dtype)
    inputs = tree_map_only(Tensor, lambda t: t.to(dtype), case.inputs(4))
    with torch.no_grad():
        body, graph, known = folded(model, inputs)
        want = torch.utils._pytree.tree_leaves(case.run(body, inputs))
        pairs = all_pairs(graph, known)
        got = torch.utils._pytree.tree_leaves(case.run(applied(body, graph), inputs))
        found = find_pairs(graph)
        again = balance({name: _sizes(graph, name) for p in found for name in (p.written.weight, p.read.weight)}, found)
    for a, b in zip(want, got, strict=True):
        assert float((a - b).abs().max()) <= tolerance * float(a.abs().max())
        assert b.dtype == dtype
    for factor in again:  # doing it twice changes nothing
        np.testing.assert_allclose(factor, 1, rtol=0, atol=1e-4)
    expected = {"small-conv": 7, "vgg-like": 7, "resnet18": 8, "mobilenetv2": 1, "functional": 1, "max-pool": 2,
                "average-pool": 2, "dropout": 1}  # fmt: skip
    assert len(pairs) == expected.get(case.name, 0)


def test_long_chains_settle() -> None:
    layers = [layer for _ in range(12) for layer in (nn.Linear(16, 16), nn.ReLU())]
    model = uneven(nn.Sequential(*layers))
    x = torch.randn(4, 16, dtype=torch.float64)
    with torch.no_grad():
        want = model(x)
        body, graph, known = folded(model, x)
        assert len(all_pairs(graph, known)) == 11
        assert float((applied(body, graph)(x) - want).abs().max()) <= 1e-10 * float(want.abs().max())
    for pair in find_pairs(graph):
        ends = [side.largest(_sizes(graph, side.weight)) for side in (pair.written, pair.read)]
        np.testing.assert_allclose(ends[0], ends[1], rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [0.0, 1e-9])
def test_dead_channels_keep_their_scale(size: float) -> None:
    model = uneven(two(F.relu, conv(3, 6), conv(6, 5)))
    with torch.no_grad():
        model.get_parameter("a.weight")[1] *= size
        model.get_parameter("b.weight")[:, 4] *= size
    x = torch.randn(IMAGE, dtype=torch.float64)
    body, graph, known = folded(model, x)
    old, bias = weight_of(body, "a.weight").clone(), weight_of(body, "a.bias").clone()
    with torch.no_grad():
        want = body(x)
        all_pairs(graph, known)
        assert float((applied(body, graph)(x) - want).abs().max()) <= 1e-10 * float(want.abs().max())
    same = [torch.equal(a, b) for a, b in zip(old, weight_of(body, "a.weight"), strict=True)]
    assert same == [False, True, False, False, True, False]
    assert torch.isfinite(weight_of(body, "b.weight")).all()
    assert (weight_of(body, "a.bias") == bias).tolist() == same


def test_weights_that_are_not_finite_do_not_spread() -> None:
    model = uneven(two(F.relu, conv(3, 4), conv(4, 5)))
    with torch.no_grad():
        model.get_parameter("a.weight")[2, 0, 0, 0] = float("inf")
    _, graph, known = folded(model, torch.randn(IMAGE, dtype=torch.float64))
    all_pairs(graph, known)
    assert np.isfinite(graph.constants["b.weight"]).all()
    assert not np.isnan(graph.constants["a.weight"]).any()


def test_what_batch_norm_says_of_a_channel_follows_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        conv(3, 6), nn.BatchNorm2d(6, momentum=1.0), nn.ReLU(), conv(6, 4), nn.BatchNorm2d(4, momentum=1.0), nn.ReLU(),
        conv(4, 5), nn.BatchNorm2d(5, momentum=1.0),
    )  # fmt: skip
    model = uneven(model)
    x = torch.randn(16, 3, 10, 10, dtype=torch.float64)
    model.train()
    with torch.no_grad():
        for _ in range(3):
            model(x)  # running statistics become those of this batch
    model.eval()
    body, graph, known = folded(model, x)
    gammas = {name: norm.gamma.copy() for name, norm in known.items()}
    assert all_pairs(graph, known) == [("0.weight", "3.weight"), ("3.weight", "6.weight")]
    with torch.no_grad():
        values = _values(applied(body, graph), x)
    assert len(known) == 3
    for name, norm in known.items():
        value = values[name]
        mean, std = value.mean((0, 2, 3)).numpy(), value.std((0, 2, 3)).numpy()
        assert (np.abs(mean - norm.beta) <= 0.02 * np.abs(norm.gamma)).all()
        assert (np.abs(std - np.abs(norm.gamma)) <= 0.02 * np.abs(norm.gamma)).all()
    changed = [not np.allclose(known[name].gamma, gamma, rtol=0.1) for name, gamma in gammas.items()]
    assert changed == [True, True, False]
    # So that the ranges without data are those of the equalized network.
    moments = propagate(graph, known)
    for name in known:
        assert (values[name].amax((0, 2, 3)).numpy() <= moments[name].high + 1e-9).all()


def _values(body: fx.GraphModule, x: Tensor) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            values[n.name] = super().run_node(n)
            return values[n.name]

    Recorder(body).run(x)
    return values


def test_a_grid_for_the_whole_tensor_errs_less() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(conv(3, 16), nn.ReLU(), conv(16, 16), nn.ReLU(), conv(16, 8)).double()
    factors = torch.logspace(-1, 1, 16).view(-1, 1, 1, 1)
    with torch.no_grad():
        for one, following in ((0, 2), (2, 4)):
            model.get_parameter(f"{one}.weight").mul_(factors)
            model.get_parameter(f"{one}.bias").mul_(factors.view(-1))
            model.get_parameter(f"{following}.weight").div_(factors.view(1, -1, 1, 1))
    x = torch.randn(4, 3, 12, 12, dtype=torch.float64)
    body, graph, known = folded(model, x)

    def error() -> float:
        rounded = {name: quantize_tensor(p, QuantSpec(4)) if p.dim() > 1 else p for name, p in body.named_parameters()}
        with torch.no_grad():
            return float((torch.func.functional_call(body, rounded, x) - model(x)).norm() / model(x).norm())

    before = error()
    all_pairs(graph, known)
    applied(body, graph)
    assert error() < 0.5 * before


def test_the_sides_of_a_weight() -> None:
    sizes = np.arange(12.0).reshape(4, 3)
    assert Side("w", 0, 1).largest(sizes).tolist() == [2, 5, 8, 11]
    assert Side("w", 1, 1).largest(sizes).tolist() == [9, 10, 11]
    assert Side("w", 1, 2).largest(sizes).tolist() == [3, 4, 5, 9, 10, 11]
    assert Side("w", 1, 1, repeat=3).largest(sizes).tolist() == [11]
    for side, n in ((Side("w", 0, 1), 4), (Side("w", 1, 1), 3), (Side("w", 1, 2), 6), (Side("w", 1, 1, repeat=3), 1)):
        for channel, factor in itertools.product(range(n), (2.0, 0.5)):
            factors = np.ones(n)
            factors[channel] = factor
            want = side.largest(sizes + 1) * factors
            assert np.array_equal(side.largest((sizes + 1) * side.spread(factors, 4)), want)


def test_balance_leaves_its_input_alone() -> None:
    sizes = {"a": np.array([[8.0], [1.0]]), "b": np.array([[2.0, 1.0]])}
    pair = Pair(None, Side("a", 0, 1), Side("b", 1, 1))
    assert balance(sizes, [pair])[0].tolist() == [2.0, 1.0]
    assert sizes["a"].tolist() == [[8.0], [1.0]]
