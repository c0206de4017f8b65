"""Rounding, ranges and biases that are fitted to data: each step against a slow truth, then whole networks."""

from __future__ import annotations

import copy
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import anybit
from anybit.artifact.layers import layers_of
from anybit.artifact.master import open_master
from anybit.errors import DataError, FileError, SpecError
from anybit.plan.codes import encode
from anybit.plan.extras import Rounded, Shift, pack, rebased, unpack, unpack_ranks
from anybit.plan.grid import Grid, quantize
from anybit.plan.points import Weight
from anybit.plan.reconstruct import Seen, descend, feed_back, grouped, round_weight
from anybit.spec import Bits, QuantSpec

WIDTHS = [(3, 8), (4, 4)]


def error(net: Any, x: Tensor, bits: tuple[int, int]) -> float:
    """Return the mean squared error of a network's output at a width."""
    with torch.no_grad():
        net.set_bits(weights=32, activations=32)
        want = net(x)
        net.set_bits(weights=bits[0], activations=bits[1])
        return float((net(x) - want).square().mean() / want.square().mean())


class Layers(nn.Module):
    """Every kind of layer: strided, dilated, grouped, depthwise, transposed, of one dimension, in a row, a cell."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.wide = nn.Conv2d(8, 8, 3, padding=2, dilation=2)
        self.apart = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.halves = nn.Conv2d(8, 8, 3, padding=(0, 1), groups=2)
        self.up = nn.ConvTranspose2d(8, 6, 3, stride=2, padding=1, output_padding=1, groups=2)
        self.line = nn.Conv1d(6, 10, 3, padding=1)
        self.cell = nn.LSTM(10, 7, batch_first=True, bidirectional=True)
        self.last = nn.Linear(14, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.wide(F.relu(self.first(x))))
        x = F.relu(self.up(F.relu(self.halves(F.relu(self.apart(x))))))
        x = F.relu(self.line(x.mean(2)))
        return self.last(self.cell(x.transpose(1, 2))[0])


@pytest.fixture(scope="module")
def data() -> Tensor:
    return torch.randn(96, 3, 12, 12, generator=torch.Generator().manual_seed(1)).cumsum(3) / 2


@pytest.fixture(scope="module")
def model(data: Tensor) -> nn.Module:
    torch.manual_seed(0)
    return Layers().eval()


def prepared(model: nn.Module, data: Tensor, **options: Any) -> Any:
    ways = {"method": "mse", "symmetric": False, "per_channel": True, "sensitive": "same", "helpers": ()}
    options = ways | options
    return anybit.prepare(model, data[:2], calibration=[data[:64]], **options)


@pytest.fixture(scope="module")
def fitted_once(model: nn.Module, data: Tensor) -> Any:
    net = prepared(model, data)
    anybit.reconstruct(net, [data[:64]], [(3, 8)])
    return net


@pytest.fixture
def fitted(fitted_once: Any) -> Any:
    """A network whose W3A8 is fitted, for one test."""
    return copy.deepcopy(fitted_once)


# Rows


def test_kernels_times_rows_are_what_a_layer_makes(model: nn.Module, data: Tensor) -> None:
    net = prepared(model, data)
    found = layers_of(net.as_master())
    wanted: dict[str, Tensor] = {}
    given: dict[str, Tensor] = {}
    for name, layer in model.named_children():

        def note(m: Any, x: Any, y: Any, name: str = name) -> None:
            given[f"{name}.weight"], wanted[f"{name}.weight"] = x[0], y

        layer.register_forward_hook(note)
    with torch.no_grad():
        model(data[:3])
    checked = 0
    for layer in found:
        name = layer.weight.name
        if name not in wanted:
            continue
        (use,) = layer.uses
        rows = use.rows(given[name].numpy(), layer.weight.shape, 10**9, 0)
        kernels = grouped(net.weights[name].detach().numpy(), layer.weight)
        made = np.einsum("gok,grk->rgo", kernels, rows).reshape(rows.shape[1], -1)
        owner = model.get_submodule(name.removesuffix(".weight"))
        out = wanted[name] - owner.bias.view(-1, *[1] * (wanted[name].ndim - 2 if use.node.convolution else 0))
        want = (out.movedim(1, -1) if use.node.convolution else out).reshape(-1, made.shape[1])
        assert np.abs(made - want.detach().numpy()).max() < 1e-4, name
        checked += 1
    assert checked == 7
    assert [layer.weight.name for layer in found if layer.uses[0].recurrent] == [
        f"cell.weight_{kind}_l0{way}" for kind in ("ih", "hh") for way in ("", "_reverse")
    ]


# Codes


def problem(seed: int, *, outs: int = 3, ins: int = 3, groups: int = 1, rows: int = 64) -> tuple[Any, Any, Seen]:
    draw = np.random.default_rng(seed)
    weight = draw.normal(size=(outs * groups, ins)).astype(np.float32)
    x = (draw.normal(size=(groups, rows, ins)) @ draw.normal(size=(groups, ins, ins))).astype(np.float32)
    seen = Seen()
    seen.add(x, x)
    return weight, x, seen


@given(st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_no_single_code_can_be_better_once_nothing_moves(seed: int) -> None:
    weight, _, seen = problem(seed)
    h = Seen.of([seen], centred=False).damped()
    grid = Grid(np.abs(weight).max(1)[None, :, None] / 3, np.zeros((1, 3, 1), np.float32), -3, 3)
    target = weight[None]

    def cost(codes: Any) -> Any:
        error = (codes - grid.zero) * grid.scale - target
        return np.einsum("gok,gkl,gol->go", error, h, error)

    codes = feed_back(target, grid, h)
    first = cost(codes)
    for _ in range(50):
        descend(codes, target, grid, h)
    found = cost(codes)
    assert (found <= first * (1 + 1e-4) + 1e-6).all()
    for i, step in itertools.product(range(3), (-1, 1)):
        moved = codes.copy()
        moved[..., i] = np.clip(moved[..., i] + step, -3, 3)
        assert (cost(moved) >= found * (1 - 1e-4) - 1e-6).all()
    best = np.min(
        [cost(np.float32(all_codes)[None, None]) for all_codes in itertools.product(range(-3, 4), repeat=3)], 0
    )
    assert (found >= best * (1 - 1e-4) - 1e-6).all()


def test_of_correlated_inputs_much_less_error_is_left() -> None:
    ratios = []
    for seed in range(10):
        weight, _, seen = problem(seed, outs=16, ins=24, rows=512)
        found = round_weight(weight, Weight("w", axis=0, shape=weight.shape), 3, Seen.of([seen], centred=False))
        ratios.append(found.after / found.before)
    assert np.mean(ratios) < 0.5


@pytest.mark.parametrize("centred", [True, False])
def test_sums_are_those_of_the_rows_and_what_is_chance_is_taken_off(centred: bool) -> None:
    draw = np.random.default_rng(3)
    x = (draw.normal(size=(2, 48, 5)) @ draw.normal(size=(2, 5, 5)) + 4).astype(np.float32)
    y = (x + draw.normal(size=x.shape) / 5 + 0.5).astype(np.float32)
    seen = Seen()
    for at in range(0, 48, 16):
        seen.add(x[:, at : at + 16], y[:, at : at + 16])
    found = Seen.of([seen], centred=centred)
    for group in range(2):
        rows, off = x[group].astype(np.float64), (y - x)[group].astype(np.float64)
        about = rows - x[group, :16].mean(0)  # pieces are compared about the mean of the first rows
        pieces = [about[at : at + 4].T @ about[at : at + 4] for at in range(0, 48, 4)]
        assert seen.pieces == len(pieces)
        whole, chance, common = sum(pieces), 0.0, 0.0
        for i, j in itertools.permutations(range(5), 2):
            scale = whole[i, i] * whole[j, j]
            chance += np.var([piece[i, j] for piece in pieces], ddof=1) * len(pieces) / scale
            common += whole[i, j] ** 2 / scale
        sure = 1 - chance / common
        assert 0.2 < sure < 1
        assert float(seen.doubt()[group, 0, 0]) == pytest.approx(1 - sure, abs=1e-3)
        near, far = rows - rows.mean(0), off - off.mean(0)
        h, cross = near.T @ near, far.T @ near
        h = np.where(np.eye(5, dtype=bool), h, sure * h)
        cross = sure * cross
        if not centred:
            h = h + 48 * np.outer(rows.mean(0), rows.mean(0))
            cross = cross + 48 * np.outer(off.mean(0), rows.mean(0))
        assert np.abs(found.h[group] - h).max() < 1e-3 * np.abs(h).max()
        assert np.abs(found.cross[group] - cross).max() < 1e-3 * np.abs(h).max()
        weight, other = draw.normal(size=(2, 2, 1, 5)).astype(np.float32)
        wanted = weight[0] @ y[group].mean(0) - other[0] @ x[group].mean(0)
        both = (np.concatenate([w, w]) for w in (weight[:1], other[:1]))
        assert np.allclose(seen.shift(*both)[group], wanted, atol=1e-3)


def test_few_rows_of_unrelated_inputs_change_next_to_nothing() -> None:
    draw = np.random.default_rng(0)
    weight = draw.normal(size=(16, 64)).astype(np.float32)
    how = Weight("w", axis=0, shape=weight.shape)
    errors = {}
    for count in (8, 4096):
        seen = Seen()
        x = draw.normal(size=(1, count, 64)).astype(np.float32)
        seen.add(x, x)
        found = round_weight(weight, how, 3, Seen.of([seen], centred=True))
        other = draw.normal(size=(4096, 64)) @ (found.grid.scale * (found.codes - found.grid.zero) - weight).T
        errors[count] = float(np.square(other).mean())
    assert errors[8] < 1.1 * errors[4096]  # without doubt of so few rows it would be nearly twice as much


@given(st.integers(0, 10**6), st.integers(2, 8), st.booleans())
@settings(max_examples=50, deadline=None)
def test_unpacking_gives_back_what_was_packed(seed: int, bits: int, symmetric: bool) -> None:
    draw = np.random.default_rng(seed)
    weight = draw.normal(size=(3, 5)).astype(np.float32)
    spec = QuantSpec(bits, symmetric, axis=0)
    low, high = spec.levels
    zero = np.float32(draw.integers(low, high + 1, (3, 1)) if not symmetric else np.zeros((3, 1)))
    grid = Grid(np.abs(draw.normal(size=(3, 1))).astype(np.float32) + np.float32(0.01), zero, low, high)
    near = quantize(weight, grid)
    codes = np.clip(near + draw.integers(-5, 6, weight.shape), low, high)
    packed = pack(weight, codes, grid, Bits(bits, 8))
    assert np.array_equal(unpack(packed, weight, packed.grid(2, spec)), codes)
    half = weight.astype(np.float16).astype(np.float32)
    other = rebased(packed, weight, half, spec)
    assert np.array_equal(unpack(other, half, grid), codes)


def test_a_weight_takes_about_a_bit_a_width() -> None:
    weight, _, seen = problem(0, outs=64, ins=96)
    how = Weight("w", axis=0, shape=weight.shape)
    found = round_weight(weight, how, 3, Seen.of([seen], centred=True))
    own = pack(weight, found.codes, found.grid, Bits(3, 8))
    assert len(own.ranks) * 8 < 1.5 * weight.size
    assert np.array_equal(encode(weight, how, 3, own=own).values, found.codes.astype(np.int8))


def test_bytes_that_are_no_ranks_are_refused_and_bombs_stay_small() -> None:
    import zlib

    for data in (b"", b"abc", zlib.compress(b"\0" * 3), zlib.compress(b"\0" * 10**7), zlib.compress(b"\0" * 2) + b"x"):
        with pytest.raises(SpecError, match="ranks of a rounded weight"):
            unpack_ranks(data, 16)
    assert unpack_ranks(zlib.compress(b"\x80\0"), 16).tolist() == [1, *[0] * 15]


# Networks


@pytest.mark.parametrize(
    "options",
    [{}, {"per_channel": False, "symmetric": True}, {"helpers": "all"}, {"method": "min-max"}],
    ids=["channel", "tensor", "helpers", "min-max"],
)
def test_fitted_widths_have_less_error_on_other_inputs(
    model: nn.Module, data: Tensor, options: dict[str, Any], tmp_path: Path
) -> None:
    net = prepared(model, data, **options)
    before = [error(net, data[64:], bits) for bits in WIDTHS]
    net.set_bits(weights=5, activations=6)
    untouched = {name: net.numbers().codes(name).values for name in net.weights}
    plan = anybit.reconstruct(net, [data[:64]], widths=WIDTHS)
    assert plan is net.plan
    after = [error(net, data[64:], bits) for bits in WIDTHS]
    assert all(new < 0.8 * old for old, new in zip(before, after, strict=True)), (before, after)
    net.set_bits(weights=5, activations=6)
    assert all(np.array_equal(net.numbers().codes(n).values, v) for n, v in untouched.items())
    assert "rounding of its own at W3A8: 11 of 11 weights" in str(plan)
    # Ranges that inputs have told for each width stay.
    assert ("reconstruction" in plan.table(plan.widths(anybit.Bits(4, 4)))) == ("method" in options)
    anybit.save(net, tmp_path / "net.onnx")
    session = anybit.load(tmp_path / "net.onnx", threads=1)
    assert session.plan == plan
    for weights, activations in WIDTHS:
        net.set_bits(weights=weights, activations=activations)
        session.set_bits(weights=weights, activations=activations)
        with torch.no_grad():
            want = net(data[:4]).numpy()
        far = np.abs(session.run(data[:4].numpy()) - want) > 1e-4 * np.abs(want).max()
        assert far.mean() < 0.1


def outputs(net: Any, x: Tensor, pairs: Any, **options: Any) -> dict[Any, Tensor]:
    found = {}
    for pair in pairs:
        net.set_bits(pair, **options)
        with torch.no_grad():
            found[pair] = net(x)
    return found


def test_each_pair_is_fitted_as_if_alone_and_no_other_one_changes(model: nn.Module, data: Tensor) -> None:
    # Some layers keep 8 bits, and so have the same widths at several pairs.
    net = prepared(model, data, sensitive="8-bit")
    names = [weight.name for weight in net.plan.weights]
    floors = dict.fromkeys(names[-3:], 8)
    points = (replace(p, floor=floors[p.name]) if p.name in floors else p for p in net.plan.points)
    net.plan = replace(net.plan, points=tuple(points))
    pairs, others = ["W4A8", "W4A4", "W3A4", "W8A8"], ["W8A6", "W5A8", "W2A8", "W4A6"]
    alone = {}
    for pair in pairs:
        one = copy.deepcopy(net)
        anybit.reconstruct(one, [data[:64]], [pair])
        alone |= outputs(one, data[64:], [pair])
    before = outputs(net, data[64:], others)
    anybit.reconstruct(net, [data[:64]], pairs)
    for found, want in ((outputs(net, data[64:], pairs), alone), (outputs(net, data[64:], others), before)):
        assert all(torch.equal(found[pair], want[pair]) for pair in want)
    assert not torch.equal(outputs(net, data[64:], ["W4A8"])["W4A8"], outputs(net, data[64:], ["W8A8"])["W8A8"])
    anybit.reconstruct(net, [data[:64]], ["W4A4"])  # again, in the place of what was there
    again = outputs(net, data[64:], pairs)
    assert all(torch.equal(again[pair], alone[pair]) for pair in pairs)
    assert {r.pair for w in net.plan.weights for r in w.rounded} == {Bits.parse(pair) for pair in pairs}
    assert all(len(w.rounded) == len(pairs) for w in net.plan.weights)


@pytest.mark.parametrize("store", ["fp32", "int8"])
def test_a_fitted_layer_that_is_put_in_floating_point_later_is_saved(fitted: Any, store: str, tmp_path: Path) -> None:
    net = fitted
    points = (replace(p, floor=32) if p.name == "wide.weight" else p for p in net.plan.points)
    net.plan = replace(net.plan, points=tuple(points))
    anybit.save(net, tmp_path / "net.onnx", store=store)
    session = anybit.load(tmp_path / "net.onnx")
    session.set_bits("W3A8")
    assert session.master.plan.at(Bits(3, 8), tensors={}).widths["wide.weight"] == 32


def test_a_layer_with_a_width_of_its_own_has_what_was_fitted_for_that(model: nn.Module, data: Tensor) -> None:
    net = prepared(model, data)
    anybit.reconstruct(net, [data[:64]], ["W3A8"])
    names = [weight.name for weight in net.plan.weights]
    net.set_bits("W3A8")
    codes = {name: net.numbers().codes(name).values for name in names}
    net.set_bits("W8A8", layers={names[1]: (3, 8), names[2]: (3, 4)})
    numbers = net.numbers()
    assert np.array_equal(numbers.codes(names[1]).values, codes[names[1]])
    plain = encode(net.weights[names[2]].detach().numpy(), net.plan.weight(names[2]), 3)
    assert np.array_equal(numbers.codes(names[2]).values, plain.values)
    assert not np.array_equal(plain.values, codes[names[2]])


@pytest.mark.parametrize("store", ["fp32", "fp16", "int8"])
def test_a_master_is_fitted_without_its_network(model: nn.Module, data: Tensor, store: str, tmp_path: Path) -> None:
    path, out = tmp_path / "net.onnx", tmp_path / "fitted.onnx"
    net = prepared(model, data)
    anybit.save(net, path, store=store)
    plan = anybit.reconstruct(path, [{"x": data[:64].numpy()}], [(3, 8)], out=out)
    assert not any(w.rounded for w in open_master(path).plan.weights)
    assert open_master(out).plan == plan
    assert all(w.rounded for w in plan.weights)
    assert out.stat().st_size < path.stat().st_size + 12_000
    found = []
    for file in (path, out):
        session = anybit.load(file, threads=1)
        want = session.run(data[64:].numpy())
        session.set_bits(weights=3, activations=8)
        found.append(float(np.square(session.run(data[64:].numpy()) - want).mean()))
    assert found[1] < 0.8 * found[0]


@pytest.mark.parametrize("store", ["fp16", "int8"])
def test_weights_stored_in_fewer_bits_keep_the_codes(fitted: Any, store: str, tmp_path: Path) -> None:
    net = fitted
    anybit.save(net, tmp_path / "net.onnx", store=store)
    net.set_bits(weights=3, activations=8)
    master = open_master(tmp_path / "net.onnx")
    others = master.plan.at(anybit.Bits(3, 8), tensors=master.tensors)
    for name in net.weights:
        assert np.array_equal(net.numbers().codes(name).values, others.codes(name).values), name


def test_weights_that_change_are_rounded_to_nearest_again(fitted: Any, data: Tensor) -> None:
    net = fitted
    net.set_bits(weights=3, activations=8)
    name = "wide.weight"
    before = net.numbers().codes(name).values
    with torch.no_grad():
        net.weights[name].mul_(1.0625)
    plain = encode(net.weights[name].detach().numpy(), net.plan.weight(name), 3)
    net(data[:2])
    assert np.array_equal(net.numbers().codes(name).values, plain.values)
    assert not np.array_equal(plain.values, before)


def test_bad_requests_are_refused_and_change_nothing(model: nn.Module, data: Tensor, tmp_path: Path) -> None:
    net = prepared(model, data)
    plan = net.plan
    with pytest.raises(DataError, match="saw no data"):
        anybit.reconstruct(net, [], [(4, 8)])
    with pytest.raises(SpecError, match=r"widths=\[\(4, 8\)\]"):
        anybit.reconstruct(net, [data], [(32, 8)])
    with pytest.raises(SpecError, match=r"anybit\.save"):
        anybit.reconstruct(net, [data], [(4, 8)], out=tmp_path / "x.onnx")
    with pytest.raises(DataError, match="cannot be run"):
        anybit.reconstruct(net, [data[:, :2]], [(4, 8)])
    anybit.save(net, tmp_path / "net.onnx")
    before = (tmp_path / "net.onnx").read_bytes()
    with pytest.raises(DataError, match="takes x; got y"):
        anybit.reconstruct(tmp_path / "net.onnx", [{"y": data.numpy()}], [(4, 8)])
    assert (tmp_path / "net.onnx").read_bytes() == before
    assert net.plan == plan


# Files from strangers


def spoiled(own: Rounded, kind: str) -> Rounded:
    ones = np.ones(len(own.scale) // 4, "<f4")
    return {
        "scales": lambda: replace(own, scale=own.scale + b"\0" * 4, zero=own.zero + b"\0" * 4),
        "negative": lambda: replace(own, scale=(-ones).tobytes()),
        "nan": lambda: replace(own, scale=(ones * np.nan).tobytes()),
        "zero": lambda: replace(own, zero=(ones * 1e9).tobytes()),
        "half": lambda: replace(own, zero=(ones * 0.5).tobytes()),
        "ranks": lambda: replace(own, ranks=b"abc"),
    }[kind]()


@pytest.mark.parametrize("kind", ["scales", "negative", "nan", "zero", "half", "ranks", "shift"])
def test_a_file_whose_extras_do_not_fit_is_refused(fitted: Any, kind: str, tmp_path: Path) -> None:
    net = fitted
    if kind == "shift":
        biases = (replace(net.plan.biases[0], shifts=(Shift(3, 8, b"\0" * 8),)), *net.plan.biases[1:])
        net.plan = replace(net.plan, biases=biases)
    else:
        points = [
            replace(p, rounded=(spoiled(p.rounded[0], kind),)) if p.name == "wide.weight" else p
            for p in net.plan.points
        ]
        net._plan = replace(net.plan, points=tuple(points))
    with pytest.raises(FileError, match=r"wide\.weight': rounded at W3A8|a shift must be"):
        anybit.save(net, tmp_path / "net.onnx")
    assert not (tmp_path / "net.onnx").exists()


def test_extras_of_the_wrong_form_are_refused() -> None:
    from anybit.plan.text import plan_from_values, plan_to_values

    plan = anybit.artifact.master.Plan((Weight("a", rounded=(Rounded(3, 8, 7),)),))  # type: ignore[attr-defined]
    values = plan_to_values(plan)
    assert plan_from_values(values, where="x") == plan
    for bad in ([[3, 8, 7]], [[3, 8, -1, "", "", ""]], [[3, 8, 7, "!", "", ""]], [[1, 8, 7, "", "", ""]],
                [[3, 1, 7, "", "", ""]], [[3, 8, 7, "", "", ""]] * 2, [[3, 8, 7, "AAAA", "", ""]], "x"):  # fmt: skip
        values["points"][0]["rounded"] = bad
        with pytest.raises(FileError, match=r"points\[0\]\.rounded|points\[0\]: "):
            plan_from_values(values, where="x")


def test_what_older_files_say_of_single_layers_is_left_out(fitted: Any) -> None:
    from anybit.artifact.header import Header, read_header, write_header

    values = json.loads(write_header(Header(fitted.plan)))
    for entry in (*values["plan"]["points"], *values["plan"]["biases"]):
        for key in {"rounded", "shifts"} & entry.keys():
            entry[key] = [row[:1] + row[2:] if key == "rounded" else row for row in entry[key]]
    plan = read_header(json.dumps(values | {"version": 4}), where="x").plan
    assert [p.name for p in plan.points] == [p.name for p in fitted.plan.points]
    assert not any(w.rounded for w in plan.weights)
    assert not any(bias.shifts for bias in plan.biases)
    for odd in ({"points": 3}, {"points": [3], "biases": {}}, 7):
        with pytest.raises(FileError, match="x: plan"):
            read_header(json.dumps(values | {"version": 4, "plan": odd}), where="x")
