"""Simulation, master and exported file have the same codes, scales and biases, bit for bit, at every width."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from cases import CASES, Case, images, warmed_up
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import numpy_helper
from torch import Tensor, nn

import anybit
from anybit.artifact.master import Master, open_master
from anybit.plan.codes import Codes
from anybit.plan.numbers import Numbers
from anybit.simulate.modules import executors
from anybit.simulate.network import QuantizedNetwork

WIDTHS = [*range(2, 17)]
Array = NDArray[Any]


def in_file(path: Path) -> dict[str, Array]:
    """Return the constants of an exported file, whole numbers as wide ones."""
    arrays = {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    return {n: a if a.dtype == np.float32 else a.astype(np.int64) for n, a in arrays.items()}


def turned(master: Master, place: str) -> tuple[int, ...] | None:
    """Return how the file turns a weight around once and for all, where its only users would at every call."""
    users = [node for node in master.model.graph.node if place in node.input]
    if not users or any(node.op_type != "Transpose" for node in users):
        return None
    (perm,) = {tuple(node.attribute[0].ints) for node in users}
    return perm


def centred(codes: Codes) -> Array:
    return codes.values.astype(np.int64) - codes.along_axis(codes.zero).astype(np.int64)


def same(a: Array, b: Array) -> bool:
    """Tell whether two arrays have the same bits, whatever dimensions of size one they have."""
    kind = np.float32 if a.dtype == np.float32 else np.int64
    return a.ravel().astype(kind).tobytes() == b.ravel().astype(kind).tobytes()


def check_weights(numbers: Numbers, others: Numbers, net: QuantizedNetwork, master: Master, file: Any) -> None:
    assert numbers.weights == others.weights
    modules = executors(net.body)
    for name in numbers.weights:
        found, again = numbers.codes(name), others.codes(name)
        assert (found.axis, found.bits, found.values.dtype) == (again.axis, again.bits, again.values.dtype), name
        for part in ("values", "scale", "zero"):
            assert same(getattr(found, part), getattr(again, part)), (name, part)
        value = torch.from_numpy(found.dequantized()).to(modules[name].master.dtype)
        assert torch.equal(modules[name].value, value), name
        place = net.plan.weight(name).place
        perm = turned(master, place)
        want = centred(found) if perm is None else centred(found).transpose(perm)
        stored = file[f"{place}.codes"]
        assert stored.shape == want.shape, name
        stored = stored.astype(np.int64) + file.get(f"{place}.offset", np.zeros(1, np.int64))
        # One zero, or one for each index of the axis, in whichever form the graph needs it.
        zero = file[f"{place}.zero"].astype(np.int64)
        if zero.ndim == 1 and zero.size > 1:
            axis = found.axis if perm is None else perm.index(found.axis)
            zero = zero.reshape([-1 if d == axis else 1 for d in range(want.ndim)])
        elif zero.ndim == want.ndim and perm is not None:
            zero = zero.reshape([n if n == want.shape[d] else 1 for d, n in enumerate(zero.shape)])
        assert np.array_equal(stored - zero, want), name
        assert file[f"{place}.scale"].dtype == np.float32
        assert same(file[f"{place}.scale"], found.scale), name


def check_biases(numbers: Numbers, others: Numbers, net: QuantizedNetwork, file: dict[str, Array]) -> None:
    assert numbers.biases == others.biases
    modules = executors(net.body)
    for name in numbers.biases:
        found, again = numbers.bias(name), others.bias(name)
        assert same(found.values, again.values), name
        assert (found.codes is None) == (again.codes is None)
        master = modules[name].master
        assert torch.equal(modules[name].value, torch.from_numpy(found.values).to(master.dtype)), name
        place = net.plan.bias(name).place
        if found.codes is None or found.unit is None:
            assert same(file[place], found.values), name
            continue
        assert place not in file
        assert same(file[f"{place}.codes"], found.codes), name
        assert same(file[f"{place}.scale"], found.unit), name
        assert same(found.codes, again.codes), name  # type: ignore[arg-type]


def check_grids(numbers: Numbers, others: Numbers, net: QuantizedNetwork, file: dict[str, Array]) -> None:
    assert numbers.activations == others.activations
    modules = executors(net.body)
    for name in numbers.activations:
        found, again = numbers.grid(name), others.grid(name)
        assert found[2:] == again[2:]
        for a, b in zip(found[:2], again[:2], strict=True):
            assert same(np.asarray(a), np.asarray(b)), name
        used = modules[name].grid(torch.device("cpu"))
        assert (float(used.scale), float(used.zero), *used[2:]) == (float(found.scale), float(found.zero), *found[2:])
        place = net.plan.activation(name).place
        assert same(file[f"{place}.scale"], np.asarray(found.scale)), name
        if f"{place}.zero" in file:
            assert int(file[f"{place}.zero"]) == int(found.zero) + (128 if found.low < 0 else 0), name
        else:
            ends = [float(file[f"{place}.{end}"]) for end in ("low", "high")]
            assert ends == [found.low - float(found.zero), found.high - float(found.zero)], name


def check(net: QuantizedNetwork, folder: Path, widths: list[int]) -> None:
    """Compare the three at these widths, with activations at another width now and then."""
    path, out = folder / "master.onnx", folder / "out.onnx"
    anybit.save(net, path)
    master = open_master(path)
    assert master.plan == net.plan
    for bits in widths:
        activations = bits if bits % 3 else 8
        net.set_bits(weights=bits, activations=activations)
        anybit.export(path, out, weights=bits, activations=activations)
        numbers = net.numbers()
        others = master.plan.at(anybit.Bits(bits, activations), tensors=master.tensors)
        assert numbers.widths == others.widths
        file = in_file(out)
        check_weights(numbers, others, net, master, file)
        check_biases(numbers, others, net, file)
        check_grids(numbers, others, net, file)


# The shared table

QUICK = [c for c in CASES if c.name not in ("vgg-like", "resnet18", "mobilenetv2", "kinks")]
WAYS: list[dict[str, Any]] = [
    {"per_channel": True},
    {},
    {"per_channel": True, "symmetric": False, "helpers": "all"},
    {"symmetric": False},
    {"helpers": "all"},
    {"per_channel": True, "helpers": ["sums", "bias"]},
    {"per_channel": True, "symmetric": False},
    {"per_channel": True},
]


@pytest.mark.parametrize(("case", "way"), [*zip(QUICK, WAYS, strict=True)], ids=[c.name for c in QUICK])
def test_the_table_has_one_set_of_numbers(case: Case, way: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = [(case.inputs(8), None)]
    net = anybit.prepare(case.build().eval(), case.inputs(2), calibration=data, **way, preset="paper")
    check(net, tmp_path, WIDTHS)


LARGE: list[tuple[str, dict[str, Any], list[int]]] = [
    ("vgg-like", {"per_channel": True, "helpers": "all"}, [2, 5, 8, 16]),
    ("resnet18", {"per_channel": True, "symmetric": False}, [3, 4, 12]),
    ("mobilenetv2", {"symmetric": False, "helpers": ["equalize", "bias"]}, [4, 9]),
    ("kinks", {"per_channel": True, "helpers": ["clip", "sums"]}, WIDTHS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way", "widths"), LARGE, ids=[name for name, *_ in LARGE])
def test_large_networks_have_one_set_of_numbers(
    name: str, way: dict[str, Any], widths: list[int], tmp_path: Path
) -> None:
    (case,) = [c for c in CASES if c.name == name]
    torch.manual_seed(0)
    net = anybit.prepare(case.build().eval(), case.inputs(2), calibration=[(case.inputs(4), None)], **way,
                         preset="paper")  # fmt: skip
    check(net, tmp_path, widths)


def test_every_network_of_the_table_is_compared() -> None:
    assert {case.name for case in CASES} == {case.name for case in QUICK} | {name for name, *_ in LARGE}


@pytest.mark.parametrize(("case", "way"), [*zip(QUICK, WAYS, strict=True)], ids=[c.name for c in QUICK])
def test_the_table_has_one_set_of_numbers_where_widths_are_fitted_to_data(
    case: Case, way: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    data = case.inputs(8)
    net = anybit.prepare(case.build().eval(), case.inputs(2), calibration=[(data, None)], sensitive="same", **way)
    fitted = [(4, 4), (3, 8), (8, 8), (2, 2)]
    anybit.reconstruct(net, [data], fitted)
    assert any(own.ranks for weight in net.plan.weights for own in weight.rounded)
    check(net, tmp_path, [2, 3, 4, 5, 8, 12])


# Drawn networks


class Drawn(nn.Module):
    """Convolutions of every kind behind each other, one layer used twice, one weight in two layers."""

    def __init__(self, kinds: list[str], channels: int, groups: int) -> None:
        super().__init__()
        c = channels
        make = {
            "plain": lambda: nn.Conv2d(c, c, 3, padding=1),
            "grouped": lambda: nn.Conv2d(c, c, 3, padding=1, groups=groups, bias=False),
            "depthwise": lambda: nn.Conv2d(c, c, 3, padding=1, groups=c, bias=False),
            "transposed": lambda: nn.ConvTranspose2d(c, c, 2, stride=2, groups=groups),
            "twice": lambda: nn.Conv2d(c, c, 1),
            "shared": lambda: nn.Conv2d(c, c, 1),
        }
        self.kinds = kinds
        self.stem = nn.Conv2d(1, c, 3, padding=1)
        self.layers = nn.ModuleList(make[kind]() for kind in kinds)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for _ in range(len(kinds) + 1))
        self.one, self.other, self.head = nn.Linear(c, c), nn.Linear(c, c), nn.Linear(c, 3)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norms[0](self.stem(x)))
        for kind, layer, norm in zip(self.kinds, self.layers, self.norms[1:], strict=True):
            y = F.relu(norm(layer(layer(x) if kind == "twice" else x)))
            # What one activation feeds: a sum, and the next layer.
            x = F.max_pool2d(y, 2) if kind == "transposed" else x + y if kind == "shared" else y
        x = x.mean((2, 3))
        return self.head(F.relu(self.other(F.relu(self.one(x)))))


def odd_channels(model: Drawn, faint: float, factor: float) -> None:
    """Give the first channels of each norm no weight, or nearly none, with a bias of one; and layers other sizes."""
    with torch.no_grad():
        for layer in model.layers:
            layer.weight.mul_(factor)
        for norm in model.norms:
            norm.weight[0], norm.bias[0] = faint, 1.0
            norm.weight[1], norm.bias[1] = 0.0, -0.5


networks = st.fixed_dictionaries(
    {
        "kinds": st.lists(
            st.sampled_from(["plain", "grouped", "depthwise", "transposed", "twice", "shared"]), min_size=1, max_size=3
        ),
        "groups": st.sampled_from([1, 2]),
        "faint": st.sampled_from([0.0, 1e-12, -1e-12, 1e-3]),
        "factor": st.sampled_from([1e-8, 2.0**-6, 1.0, 2.0**6, 1e8]),
        "dtype": st.sampled_from([torch.float16, torch.bfloat16, torch.float64, torch.float32]),
    }
).filter(lambda n: n["dtype"] != torch.float16 or 1e-3 < n["factor"] < 1e3)
EXTREME = {"kinds": ["plain", "twice", "transposed"], "groups": 2, "faint": 1e-12, "dtype": torch.float32}
EVERYTHING = {"symmetric": False, "per_channel": True, "helpers": "all", "sensitive": "same"}
ways = st.fixed_dictionaries(
    {
        "symmetric": st.booleans(),
        "per_channel": st.booleans(),
        "helpers": st.sampled_from(["all", (), ("sums",), ("bias", "equalize"), ("clip", "bias")]),
        "sensitive": st.sampled_from(["same", "8-bit", "float"]),
    }
)


def drawn(settings: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model = Drawn(settings["kinds"], channels=4, groups=settings["groups"])
    warmed_up(model, images(1, 8, 8), rounds=2)
    odd_channels(model, settings["faint"], settings["factor"])
    with torch.no_grad():
        for _ in range(5):
            model(torch.randn(16, 1, 8, 8))
    return model.eval().to(settings["dtype"])


@given(networks, ways, st.integers(0, 2))
@example({**EXTREME, "factor": 1e8}, EVERYTHING, 0)
@example({**EXTREME, "factor": 1e-8}, {**EVERYTHING, "symmetric": True, "per_channel": False}, 1)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_drawn_networks_have_one_set_of_numbers(
    tmp_path_factory: pytest.TempPathFactory, network: dict[str, Any], way: dict[str, Any], first: int
) -> None:
    model = drawn(network)
    assume(all(bool(b.isfinite().all()) for b in model.buffers()))  # float16 ends at 65504: "twice" squares the factor
    data = [torch.randn(8, 1, 8, 8, dtype=network["dtype"])]
    net = anybit.prepare(
        model, torch.randn(2, 1, 8, 8, dtype=network["dtype"]), calibration=data, **way, preset="paper"
    )
    check(net, tmp_path_factory.mktemp("drawn"), WIDTHS[first::3])


@pytest.mark.parametrize(
    ("dtype", "way"),
    [
        (torch.float16, {"per_channel": True, "helpers": "all"}),
        (torch.bfloat16, {"symmetric": False, "per_channel": True}),
        (torch.float64, {"helpers": ("sums", "bias")}),
    ],
    ids=str,
)
def test_other_types_have_one_set_of_numbers_at_every_width(
    dtype: torch.dtype, way: dict[str, Any], tmp_path: Path
) -> None:
    how = {"kinds": ["transposed", "twice", "grouped"], "groups": 2, "faint": 1e-12, "factor": 1.0, "dtype": dtype}
    net = anybit.prepare(drawn(how), torch.randn(2, 1, 8, 8, dtype=dtype), input_range=(-4, 4),
                         calibration=[torch.randn(8, 1, 8, 8, dtype=dtype)], **way, preset="paper")  # fmt: skip
    check(net, tmp_path, WIDTHS)
    for bits in (12, 16):
        net.set_bits(weights=bits, activations=bits)
        for name in net.weights:
            value = executors(net.body)[name].value
            assert value.dtype == dtype
            assert int(value.unique().numel()) > 8, (name, bits)  # far from all zero
            master = net.weights[name].detach().double()
            assert float((value.double() - master).abs().max()) < 0.01 * float(value.abs().max())


@pytest.fixture(params=[1e-12, 0.0, 1e-30], ids=str)
def faint(request: pytest.FixtureRequest) -> float:
    return float(request.param)


@pytest.mark.parametrize("per_channel", [True, False])
def test_a_channel_of_nearly_no_weight_keeps_its_bias(faint: float, per_channel: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 3, 1)
    with torch.no_grad():
        layer.weight[1] = faint
        layer.bias.copy_(torch.tensor([0.3, 1.0, -0.2]))
    x = torch.rand(4, 2, 3, 3)
    net = anybit.prepare(layer.eval(), x, input_range=(0, 1), per_channel=per_channel, preset="paper")
    anybit.save(net, tmp_path / "net.onnx")
    session = anybit.load(tmp_path / "net.onnx")
    for bits in (2, 4, 8, 12, 16):
        net.set_bits(weights=bits, activations=8)
        session.set_bits(weights=bits, activations=8)
        with torch.no_grad():
            simulated = net(x).numpy()
        ran = session.run(x.numpy())
        for found in (simulated, ran):
            assert np.abs(found[:, 1] - 1.0).max() < (2e-3 if per_channel else 5e-3)
        assert np.abs(simulated - ran).max() < 1e-5
