"""`prepare` on whole architectures, and what it finds there."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from architectures import ARCHITECTURES, Architecture, UNet, block
from cases import CASES, Case, images, warmed_up
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import anybit
from anybit.errors import CaptureError, SpecError
from anybit.models import build_model
from anybit.simulate.capture import attention
from anybit.simulate.modules import Weight, executors
from anybit.simulate.network import QuantizedNetwork

EVERYTHING: list[Case | Architecture] = [*CASES, *ARCHITECTURES]


def prepared(case: Case | Architecture, model: nn.Module, **options: Any) -> QuantizedNetwork:
    data = None if case.data_free else [(case.inputs(8), None)]
    return anybit.prepare(model, case.inputs(2), calibration=data, **options, preset="paper")


def weights(net: QuantizedNetwork) -> dict[str, Weight]:
    return {name: module for name, module in executors(net.body).items() if isinstance(module, Weight)}


def kinds(net: QuantizedNetwork) -> list[str]:
    return [point.kind for point in net.plan.points]


def widths(net: QuantizedNetwork) -> dict[str, int]:
    """The width that each point runs at."""
    found = executors(net.body)
    return {point.name: found[point.name].bits for point in net.plan.points}


@pytest.mark.parametrize("case", ARCHITECTURES, ids=lambda c: c.name)
def test_an_architecture_is_taken_as_it_comes(case: Architecture) -> None:
    torch.manual_seed(0)
    model = case.build().eval()
    before = copy.deepcopy(model.state_dict())
    net = prepared(case, model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    for n in (1, 5):
        inputs = case.inputs(n)
        with torch.no_grad():
            want, got = (pytree.tree_leaves(case.run(m, inputs)) for m in (model, net))
        assert len(want) == len(got) > 0
        for a, b in zip(want, got, strict=True):
            assert float((a - b).abs().max()) <= 1e-5 * float(a.abs().max())
    net.set_bits(weights=8, activations=8)
    with torch.no_grad():
        rounded = pytree.tree_leaves(case.run(net, inputs))
    assert any(not torch.equal(a, b) for a, b in zip(got, rounded, strict=True))


def product_weights(model: nn.Module) -> set[str]:
    """The weights that a product must have, read off the modules instead of the graph."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d)
    return {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, kinds)}


class SeenOperands(TorchDispatchMode):
    """Notes the operands of every product that really runs, below all modules and graphs."""

    PRODUCTS = ("convolution", "mm", "bmm", "addmm", "baddbmm")

    def __init__(self) -> None:
        super().__init__()
        self.levels: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.PRODUCTS:
            operands = args[1:3] if name in ("addmm", "baddbmm") else args[:2]
            self.levels += [(name, len(x.unique())) for x in operands]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", EVERYTHING, ids=lambda c: c.name)
def test_every_product_multiplies_tensors_on_a_grid(case: Case | Architecture) -> None:
    torch.manual_seed(0)
    model = case.build().eval()
    net = prepared(case, model, **({"input_range": (-4.0, 4.0)} if case.data_free else {}))
    names = [point.name for point in net.plan.points]
    assert len(names) == len(set(names))
    unused = {"extra.weight"} if case.name == "two-inputs" else set()  # a head that the output does not use
    assert product_weights(model) - set(net.weights) <= unused
    net.set_bits(weights=2, activations=2)
    with torch.no_grad(), SeenOperands() as seen:
        case.run(net, case.inputs(32))
    assert seen.levels
    # Two bits are at most four levels; the input and what sums hand on keep eight, 256.
    assert max(count for _, count in seen.levels) <= 256, seen.levels
    assert sum(count <= 4 for _, count in seen.levels) >= len(seen.levels) / 2
    net.set_bits(weights=32, activations=32)
    with torch.no_grad(), SeenOperands() as exact:
        case.run(net, case.inputs(32))
    assert max(count for _, count in exact.levels) > 256  # so that the numbers above say something


def test_recurrent_weights_are_found_once_though_used_at_every_step() -> None:
    case = next(c for c in CASES if c.name == "recurrent")
    names = set(prepared(case, case.build().eval()).weights)
    assert {"lstm.weight_ih_l0", "lstm.weight_hh_l0", "gru.weight_ih_l0", "gru.weight_hh_l0", "head.weight"} == names


class Products(nn.Module):
    """Matrix products written in every way, with constants on either side."""

    def __init__(self) -> None:
        super().__init__()
        self.right = nn.Parameter(torch.randn(6, 5))
        self.left = nn.Parameter(torch.randn(4, 3))
        self.mixed = nn.Parameter(torch.randn(5, 7))
        self.added = nn.Parameter(torch.randn(8, 7))
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:  # (n, 3, 6)
        x = self.left @ (x @ self.right)
        x = torch.einsum("ntd,dk->ntk", torch.relu(x), self.mixed)
        return torch.addmm(self.bias, x.mean(1), self.added.t())


def test_matrix_products_with_constants_are_weights_with_the_right_channels() -> None:
    torch.manual_seed(0)
    net = anybit.prepare(
        Products(), torch.randn(2, 3, 6), calibration=[torch.randn(8, 3, 6)], per_channel=True, preset="paper"
    )
    axes = {point.name: point.axis for point in net.plan.weights}
    assert axes == {"right": 1, "left": 0, "mixed": None, "added": 0}
    assert kinds(net).count("weight") == 4
    assert kinds(net).count("input") == 1
    net.set_bits(weights=2, activations=32)
    with torch.no_grad():
        rounded = weights(net)["right"]()
    assert all(len(column.unique()) <= 3 for column in rounded.T)
    assert len(rounded.abs().amax(0).unique()) == 5


class Tied(nn.Module):
    """A language model whose output layer is its embedding table, and one layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.twice = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.twice(torch.relu(self.twice(self.table(tokens)))))


def test_tied_weights_stay_tied() -> None:
    torch.manual_seed(0)
    model = Tied()
    tokens = torch.randint(0, 11, (4, 5))
    net = anybit.prepare(model, tokens, calibration=[tokens], preset="paper")
    assert len(net.weights) == 2
    (table,) = (weight for weight in net.weights.values() if tuple(weight.shape) == (11, 8))
    assert sum(p.numel() for p in net.parameters()) == sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        table.mul_(2.0)
        model.table.weight.mul_(2.0)
        torch.testing.assert_close(net(tokens), model(tokens))


def test_a_table_is_rounded_row_by_row_in_network_and_file_alike(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 11, (4, 5))
    net = anybit.prepare(Tied(), tokens, calibration=[tokens])
    (table,) = (point for point in net.plan.weights if point.shape == (11, 8))
    assert (table.axis, table.floor, table.because) == (0, 8, "lookup table")
    anybit.save(net, tmp_path / "m.onnx")
    session = anybit.load(tmp_path / "m.onnx")
    exact = net(tokens).detach().numpy()
    for bits in ({"weights": 8, "activations": 8}, {"weights": 4, "activations": 32}):
        net.set_bits(**bits)
        session.set_bits(**bits)
        rounded = weights(net)[table.name]().detach()
        assert not torch.equal(rounded, net.weights[table.name])
        assert all(len(set(row.tolist())) > 4 for row in rounded)  # 8 bits, whatever the others have
        got = net(tokens).detach().numpy()
        np.testing.assert_allclose(session.run(tokens.numpy()), got, atol=1e-5)
        assert np.abs(got - exact).max() > 0


def test_what_meets_in_a_concatenation_shares_one_grid() -> None:
    torch.manual_seed(0)
    net = anybit.prepare(warmed_up(UNet(), images(3, 16, 16)).eval(), torch.randn(2, 3, 16, 16), preset="paper")
    ranges = {point.name: point.range_at(32) for point in net.plan.activations if point.kind == "activation"}
    assert ranges["one.2"] == ranges["four.2"]
    assert ranges["two.2"] == ranges["relu_3"]
    assert ranges["one.2"] != ranges["two.2"]
    # Each tensor is rounded once: no second point behind the concatenation.
    assert kinds(net).count("activation") == 6


class Attends(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        masked = {} if self.options.get("is_causal") else {"attn_mask": mask}
        return F.scaled_dot_product_attention(q, k, k, **masked, **self.options)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}])
@pytest.mark.parametrize("boolean", [True, False])
def test_attention_written_out_is_attention(options: dict[str, Any], boolean: bool) -> None:
    torch.manual_seed(0)
    heads = 4 if options.get("enable_gqa") else 2
    q, k = torch.randn(3, heads, 5, 8), torch.randn(3, 2, 5, 8)
    mask = torch.rand(3, 1, 5, 5) > 0.3 if boolean else torch.randn(3, 1, 5, 5)
    mask = mask | torch.eye(5, dtype=torch.bool) if boolean else mask
    model = Attends(**options)
    given = {} if options.get("is_causal") else {"attn_mask": mask}
    torch.testing.assert_close(attention(q, k, k, **given, **options), model(q, k, mask))
    net = anybit.prepare(model, (q, k, mask), calibration=[((q, k, mask), None)], preset="paper")
    torch.testing.assert_close(net(q, k, mask), model(q, k, mask))
    # The value, the scaled query and key, the softmax.
    assert sorted(kinds(net)) == ["activation", "activation", "activation", "input"]


def small() -> nn.Module:
    torch.manual_seed(0)
    return warmed_up(build_model("small-conv", channels=1, classes=10, multiplier=0.5), images(1, 8, 8)).eval()


X = torch.rand(4, 1, 8, 8)


@pytest.mark.parametrize(("sensitive", "floor"), [("same", 3), ("8-bit", 8), ("float", 32)])
def test_first_and_last_layers_can_be_spared(sensitive: Any, floor: int) -> None:
    net = anybit.prepare(small(), X, input_range=(0, 1), sensitive=sensitive, preset="paper")
    net.set_bits(weights=3, activations=3)

    def bits(kind: str) -> list[int]:
        return [widths(net)[point.name] for point in net.plan.points if point.kind == kind]

    assert bits("weight") == [floor, *[3] * (len(bits("weight")) - 2), floor]
    assert bits("activation") == [*[3] * (len(bits("activation")) - 1), floor]
    assert set(bits("input")) == {max(8, floor)}
    net.set_bits(weights=16, activations=16)
    assert bits("weight")[0] == max(16, floor)
    net.set_bits(weights=32, activations=32)
    assert set(widths(net).values()) == {32}


def test_how_sensitive_layers_are_treated_is_a_known_word() -> None:
    with pytest.raises(SpecError, match="sensitive is one of same, 8-bit, measured, float"):
        anybit.prepare(small(), X, sensitive="first", preset="paper")  # type: ignore[arg-type]


def test_layers_get_widths_of_their_own_by_pattern() -> None:
    net = anybit.prepare(small(), X, input_range=(0, 1), preset="paper")
    first = next(iter(net.weights))
    net.set_bits(weights=4, activations=5, layers={"features.*": (6, 7), first: anybit.Bits(2, 2)})
    for point in net.plan.points:
        bits = widths(net)[point.name]
        if point.name == first:
            assert bits == 2
        elif point.name.startswith("features."):
            assert bits == (6 if point.kind == "weight" else max(7, point.floor))
        elif point.kind in ("weight", "activation"):
            assert bits == (4 if point.kind == "weight" else 5)
    layer = first.removesuffix(".weight")
    with net.at(weights=8, activations=8, layers={layer: (3, 3)}):
        assert widths(net)[first] == 3
        assert net.layers == {layer: anybit.Bits(3, 3)}
    assert widths(net)[first] == 2
    assert net.bits == anybit.Bits(4, 5)
    net.set_bits(weights=4, activations=5)
    assert {module.bits for module in weights(net).values()} == {4}
    assert net.layers == {}


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"nothing.*": (4, 4)}, "no point matches the pattern 'nothing"),
        ({"features.*": (1, 4)}, "must be 2 to 16"),
        ({"features.*": 4}, r"are a pair \(weights, activations\)"),
        ({"features.*": (4, 4, 4)}, r"are a pair \(weights, activations\)"),
    ],
)
def test_bad_layers_change_nothing(layers: Any, message: str) -> None:
    net = anybit.prepare(small(), X, input_range=(0, 1), preset="paper")
    net.set_bits(weights=4, activations=4, layers={"features.*": (3, 3)})
    before = widths(net)
    want = net(X)
    with pytest.raises(SpecError, match=message):
        net.set_bits(weights=8, activations=8, layers=layers)
    assert widths(net) == before
    assert torch.equal(net(X), want)
    assert net.bits == anybit.Bits(4, 4)


def test_input_ranges_by_name() -> None:
    case = next(c for c in CASES if c.name == "two-inputs")
    model = case.build().eval()
    ranges = {"picture": (0.0, 1.0)}
    net = anybit.prepare(
        model, case.inputs(2), calibration=[(case.inputs(8), None)], input_range=ranges, preset="paper"
    )
    found = {point.name: point.range_at(32) for point in net.plan.activations if point.kind == "input"}
    assert found["picture"] is not None
    assert (found["picture"].low, found["picture"].high) == (0.0, 1.0)
    assert found["features"] is not None
    assert found["features"].source == "calibration, min-max"
    with pytest.raises(SpecError, match="no input 'image' feeds a layer; those that do are picture, features"):
        anybit.prepare(model, case.inputs(2), input_range={"image": (0, 1)}, preset="paper")


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if bool(x.sum() > 0) else -x


class Counts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * int(x.abs().max().item())


class Leaves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(x.detach().numpy() * 2)


class Many(nn.Module):
    """Several modules that cannot be captured, one inside another, and good ones between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.inner = nn.Sequential(nn.Linear(4, 4), Branches(), nn.ReLU())
        self.count = Counts()
        self.good = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.leaves = Leaves()

    def forward(self, x: Tensor) -> Tensor:
        return self.leaves(self.good(self.count(self.inner(self.stem(x)))))


def test_all_reasons_are_listed_each_with_its_module_and_what_to_do() -> None:
    model = Many()
    with pytest.raises(CaptureError) as caught:
        anybit.prepare(model, torch.rand(4, 4), preset="paper")
    problems = {p.partition(":")[0]: p for p in caught.value.problems}
    assert set(problems) == {"inner.1", "count", "leaves"}
    assert "torch.where" in problems["inner.1"]
    assert ".item()" in problems["count"]
    assert "numpy" in problems["leaves"]
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert all(not module._forward_hooks for module in model.modules())
    model(torch.rand(4, 4))


class OwnFault(nn.Module):
    """A parent with a fault of its own around a child with another."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Branches()

    def forward(self, x: Tensor) -> Tensor:
        x = self.child(x)
        return x + 1 if bool(x.mean() > 0.5) else x


def test_a_parent_is_blamed_only_for_its_own_faults() -> None:
    with pytest.raises(CaptureError) as caught:
        anybit.prepare(nn.Sequential(nn.Linear(4, 4), OwnFault()), torch.rand(4, 4), preset="paper")
    assert [p.partition(":")[0] for p in caught.value.problems] == ["1.child", "1"]


def test_an_example_that_the_model_cannot_take_is_said_so() -> None:
    with pytest.raises(CaptureError, match="itself fails on the example input"):
        anybit.prepare(small(), torch.rand(2, 3, 8, 8), preset="paper")


def test_the_cache_keeps_what_fits_and_always_what_is_in_use() -> None:
    net = anybit.prepare(small(), X, input_range=(0, 1), preset="paper")
    size = sum(weight.numel() * 4 for weight in net.weights.values())
    first = {}
    for bits in (2, 3, 4, 5):
        net.set_bits(weights=bits, activations=8)
        first[bits] = [module.value for module in weights(net).values()]
    assert 4 * size < net._kept.nbytes < 6 * size  # the rounded weights, and their codes of a byte
    net.set_bits(weights=2, activations=8)
    assert all(a is module.value for a, module in zip(first[2], weights(net).values(), strict=True))
    net._kept.limit = 3 * size
    net.set_bits(weights=6, activations=8)
    assert size < net._kept.nbytes <= 3 * size
    net._kept.limit = 0
    for bits in (7, 8):
        net.set_bits(weights=bits, activations=8)
        assert net._kept.nbytes == 0
        assert all(module.value is not None for module in weights(net).values())
    used = [module.value for module in weights(net).values()]
    net.set_bits(weights=8, activations=4)
    assert all(a is module.value for a, module in zip(used, weights(net).values(), strict=True))


def test_a_copy_has_a_cache_of_its_own_and_moving_to_another_dtype_is_seen() -> None:
    net = anybit.prepare(small(), X, input_range=(0, 1), preset="paper")
    net.set_bits(weights=4, activations=4)
    with torch.no_grad():
        want = net(X)
        other = copy.deepcopy(net)
        for parameter in other.parameters():
            parameter.mul_(0.5)
        other.set_bits(weights=4, activations=4)
        assert not torch.equal(other(X), want)
        assert torch.equal(net(X), want)
        double = copy.deepcopy(net).double()
        assert double(X.double()).dtype is torch.float64
        torch.testing.assert_close(double(X.double()).float(), want, rtol=1e-3, atol=1e-3)


def test_the_users_input_is_never_written_into() -> None:
    model = nn.Sequential(block(1, 4, activation=nn.ReLU()), nn.Flatten(), nn.Linear(256, 3))
    net = anybit.prepare(warmed_up(model, images(1, 8, 8)).eval(), X, input_range=(0, 0.5), preset="paper")
    net.set_bits(weights=4, activations=4)
    x = X.clone()
    with torch.no_grad():
        assert torch.equal(net(x), net(x))
    assert torch.equal(x, X)


def test_with_and_without_gradients_the_numbers_are_the_same() -> None:
    for options in ({}, {"symmetric": False}, {"per_channel": True}, {"helpers": "all"}):
        net = anybit.prepare(small(), X, input_range=(0, 1), **options, preset="paper")  # type: ignore[arg-type]
        net.set_bits(weights=4, activations=5)
        with torch.no_grad():
            want = net(X)
        torch.testing.assert_close(net(X).detach(), want, rtol=0, atol=0)


def test_convolutions_padded_by_name_are_folded_and_quantized() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding="same", bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    layers += [nn.Conv2d(8, 8, 3, padding="same", groups=8), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()]
    model = warmed_up(nn.Sequential(*layers, nn.Linear(8 * 64, 3)), images(3, 8, 8)).eval()
    x = torch.randn(2, 3, 8, 8)
    net = anybit.prepare(model, x, helpers="all", preset="paper")
    torch.testing.assert_close(net(x), model(x), rtol=1e-5, atol=1e-5)
    assert set(net.weights) == {"0.weight", "3.weight", "7.weight"}
    assert not any("batch_norm" in str(node.target) for node in net.body.graph.nodes)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (
            (torch.rand(2, 3, 8, 8),),
            {},
            r"argument 1 must have the shape \(N, 1, N, N\), got \(2, 3, 8, 8\): the network fixes dimension 1 at 1",
        ),
        ((torch.rand(8, 8),), {}, r"argument 1 must have the shape"),
        (("image",), {}, "argument 1 must be a tensor of shape .*, got str"),
        ((), {}, "called as in its example, with argument 1 of shape .*; got nothing"),
        ((X, X), {}, "called as in its example"),
        ((), {"x": X}, "called as in its example"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    net = anybit.prepare(small(), X, preset="paper")
    net.set_bits(weights=4, activations=4)
    want = net(X)
    with pytest.raises(SpecError, match=message):
        net(*args, **kwargs)
    assert torch.equal(net(X), want)


class Optional(nn.Module):
    """Arguments that are not tensors, nested ones, and keywords in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, pair: tuple[Tensor, Tensor], mask: Tensor | None = None, *, flag: bool = False) -> Tensor:
        y = self.layer(pair[0]) + pair[1]
        return y * 2 if flag else y


def test_flags_and_nested_inputs_are_taken() -> None:
    model = Optional()
    pair = (torch.randn(3, 4), torch.randn(3, 4))
    net = anybit.prepare(model, {"pair": pair, "mask": None, "flag": True}, input_range=(-3, 3), preset="paper")
    new = (torch.randn(5, 4), torch.randn(5, 4))
    torch.testing.assert_close(net(flag=True, mask=None, pair=new), model(new, flag=True))
    with pytest.raises(SpecError, match=r"pair\[1\] must have the shape \(N, 4\)"):
        net(pair=(new[0], torch.randn(5, 3)), mask=None, flag=True)
