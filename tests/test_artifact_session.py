from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto, numpy_helper
from stranger_builder import Net
from stranger_graphs import CASES
from test_artifact_small import MODEL, PLAN, header_with, small_master, with_weights

from anybit.artifact.adopt import adopt
from anybit.artifact.export import NOTE, export
from anybit.artifact.master import Master, open_master, write_master
from anybit.artifact.model import OnnxModel
from anybit.artifact.quantized_graph import quantized_graph
from anybit.artifact.runtime import EXACT, onnxruntime
from anybit.artifact.session import Session, load
from anybit.artifact.weight_nodes import pack_int4, transposed, unsigned, with_one_zero
from anybit.errors import DataError, FileError, SpecError
from anybit.plan.codes import encode
from anybit.plan.grid import dequantize, min_max, quantize, weight_grid
from anybit.plan.points import Activation, Weight
from anybit.spec import Bits, Range

X = np.random.default_rng(0).normal(size=(16, 1, 6, 6)).astype(np.float32)

# Codes


@given(
    hnp.arrays(np.float32, hnp.array_shapes(min_dims=1, max_dims=4, max_side=5), elements=st.floats(-9, 9, width=32)),
    st.integers(2, 16), st.booleans(), st.none() | st.integers(0, 3),
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_codes_stand_for_the_values_of_the_grid(w: Any, bits: int, symmetric: bool, axis: int | None) -> None:
    axis = None if axis is None else axis % w.ndim
    how = Weight("w", axis=axis, symmetric=symmetric)
    grid = weight_grid(*min_max(w, axis), how.spec(bits))
    want = dequantize(quantize(w, grid), grid)
    codes = encode(w, how, bits)
    for form in (codes, with_one_zero(codes), unsigned(codes), unsigned(with_one_zero(codes))):
        np.testing.assert_array_equal(form.dequantized(), want)
    turned = transposed(codes, tuple(range(w.ndim))[::-1])
    np.testing.assert_array_equal(turned.dequantized(), want.T)
    assert len(set(with_one_zero(codes).zero.reshape(-1).tolist())) == 1 or bits > 8 or axis is None
    assert codes.values.itemsize == (1 if bits <= 8 else 2)


@given(hnp.arrays(np.int8, hnp.array_shapes(max_dims=3, max_side=7), elements=st.integers(-8, 7)))
@settings(max_examples=100, deadline=None)
def test_packed_codes_are_what_onnx_reads(values: Any) -> None:
    tensor = TensorProto(dims=values.shape, data_type=TensorProto.INT4, raw_data=pack_int4(values).tobytes())
    np.testing.assert_array_equal(numpy_helper.to_array(tensor).astype(np.int8), values)


# What ONNX Runtime makes of it


def at(master: Master, bits: Bits, *, packed: bool = False) -> tuple[OnnxModel, bool]:
    return quantized_graph(master, master.plan.at(bits, tensors=master.tensors), packed=packed)


def optimized(model: OnnxModel, folder: Path) -> Counter[str]:
    """Return the operators that are left when ONNX Runtime has fused what it can."""
    ort = onnxruntime()
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.log_severity_level = 3
    ort.InferenceSession(model.proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node)


def test_a_weight_in_floating_point_is_not_rounded_behind_ones_back(tmp_path: Path) -> None:
    master = open_master(small_master(tmp_path))
    for bits in (Bits(32, 8), Bits(32, 4)):
        model, exact = at(master, bits, packed=True)
        found = optimized(model, tmp_path)
        assert "QLinearConv" not in found
        assert not exact


def test_exact_sums_are_asked_for_where_they_could_overflow(tmp_path: Path) -> None:
    master = open_master(small_master(tmp_path))
    for bits, want in {(8, 8): True, (7, 8): False, (4, 8): False, (8, 32): False, (32, 8): False}.items():
        assert at(master, Bits(*bits))[1] is want
    narrow = header_with(points=PLAN.points[1:], biases=(replace(PLAN.biases[0], input=""), PLAN.biases[1]))
    write_master(tmp_path / "narrow.onnx", MODEL, narrow)
    master = open_master(tmp_path / "narrow.onnx")
    assert at(master, Bits(8, 8))[1]
    assert not at(master, Bits(8, 6))[1]


def test_a_function_is_left_out_only_where_the_grid_does_the_same(tmp_path: Path) -> None:
    for low, left in ((0.0, 0), (-9.0, 1)):  # a grid with negative codes does not cut them off
        plan = PLAN.with_ranges({"relu": ((32, Range(low, 9.0, "")),)})
        write_master(tmp_path / "m.onnx", MODEL, header_with(points=plan.points))
        master = open_master(tmp_path / "m.onnx")
        model, _ = at(master, Bits(8, 8))
        assert [node.op_type for node in model.graph.node].count("Relu") == left


def by_hand(x: Any, weights: int, activations: int) -> Any:
    """Compute the small network with whole numbers in float64."""
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in MODEL.graph.initializer}

    def snap(v: Any, low: float, high: float, bits: int, signed: bool) -> tuple[Any, float]:
        top = 2 ** (bits - 1) - 1 if signed else 2**bits - 1
        scale = float(np.float32(max(-low, high)) / np.float32(top))
        return np.clip(np.rint(v.astype(np.float32) / np.float32(scale)), -top if signed else 0, top), scale

    def weight(name: str) -> tuple[Any, float]:
        w = held[name]
        return snap(w, float(w.min()), float(w.max()), weights, True)

    q, sx = snap(x, -3.0, 3.0, max(8, activations), True)
    wa, sa = weight("a.weight")
    windows = np.lib.stride_tricks.sliding_window_view(q[:, 0], (3, 3), (1, 2))
    total = np.einsum("nijkl,okl->noij", windows, wa[:, 0]) + np.rint(held["a.bias"] / (sx * sa))[None, :, None, None]
    r, sr = snap(np.maximum(total, 0) * (sx * sa), 0.0, 9.0, activations, False)
    wb, sb = weight("b.weight")
    return (r.reshape(len(x), -1) @ wb.T + np.rint(held["b.bias"] / (sr * sb))) * (sr * sb)


@pytest.mark.parametrize("bits", [(8, 8), (4, 4), (3, 8), (8, 2), (6, 6)], ids=str)
def test_the_result_is_what_one_would_compute_by_hand(bits: tuple[int, int], tmp_path: Path) -> None:
    session = load(small_master(tmp_path))
    session.set_bits(weights=bits[0], activations=bits[1])
    want = by_hand(X, *bits)
    assert np.mean(np.isclose(session.run(X), want, rtol=1e-4, atol=1e-4).all(1)) >= 15 / 16  # one tie is allowed


# Running


def test_any_number_type_and_batch_size(tmp_path: Path) -> None:
    session = load(small_master(tmp_path))
    session.set_bits(weights=8, activations=8)
    want = session.run(X)
    assert want.shape == (16, 3)
    assert want.dtype == np.float32
    for kind in (np.float64, np.float32, ">f4"):
        np.testing.assert_array_equal(session.run(X.astype(kind)), want)
    for turned in (np.ascontiguousarray(X[..., ::-1])[..., ::-1], np.asfortranarray(X)):
        assert not turned.flags.c_contiguous
        np.testing.assert_array_equal(session.run(turned), want)
    np.testing.assert_array_equal(session.run({"x": X.tolist()}), want)
    np.testing.assert_allclose(session.run(X.astype(np.float16)), want, atol=0.2)
    for n in (0, 1, 5):
        np.testing.assert_allclose(session.run(X[:n]), want[:n], rtol=1e-5, atol=1e-5)
    assert session.run(np.ones((2, 1, 6, 6), np.int64)).shape == (2, 3)


def test_text_is_taken_in_every_form_that_python_has(tmp_path: Path) -> None:
    onnx.save(CASES["text_in"].build(), tmp_path / "plain.onnx")
    adopt(tmp_path / "plain.onnx", tmp_path / "m.onnx")
    session = load(tmp_path / "m.onnx")
    session.set_bits(weights=4, activations=8)
    words = [["ant", "été"], ["yak", "bee"]]
    want = session.run(np.array(words))
    assert want.shape == (2, 4)
    assert not np.allclose(want, session.run([["bee", "été"], ["yak", "ant"]]), atol=1e-3)
    for same in (words, np.array(words, object), {"words": np.array(words).T.copy().T}):
        np.testing.assert_array_equal(session.run(same), want)
    feed = session.example()
    assert set(feed["words"].ravel()) <= {"ant", "bee", "cat", "dog", "eel", "été"}
    for wrong, got in (
        (np.ones((1, 2)), "float64"),
        ([["ant", None]], "objects that are no strings"),
        ([[b"a"]], "S1"),
    ):
        with pytest.raises(DataError, match=rf"input 'words' takes text; got .*{got}"):
            session.run(wrong)
    with pytest.raises(DataError, match=r"input 'words' has the shape N x N; got \[1\]"):
        session.run(["ant"])


def test_a_master_with_many_long_words_opens(tmp_path: Path) -> None:
    """More than a megabyte of text is no large array, and has a field for each word."""
    net = Net(0, opset=19, ir=9)
    words = [f"{i:099d}" for i in range(11_000)]
    held = net.hold(np.array(words, object))
    same = net.node("Cast", net.node("Equal", net.input("words", np.array([["a"]]), ["n", 1]), held), to=1)
    net.output(net.dense(net.node("ReduceSum", same, net.hold(np.array([1]))), 1, 3))
    onnx.save(net.model(), tmp_path / "plain.onnx")
    adopt(tmp_path / "plain.onnx", tmp_path / "m.onnx")
    session = load(tmp_path / "m.onnx")
    found = session.run([[words[7]], ["7"]])
    assert np.abs(found[0]).max() > 1e-3
    assert np.abs(found[1]).max() == 0
    kept = [t for t in onnx.load(tmp_path / "m.onnx").graph.initializer if t.data_type == TensorProto.STRING]
    assert [list(tensor.string_data) for tensor in kept] == [[word.encode() for word in words]]


def test_inputs_that_do_not_fit_are_explained(tmp_path: Path) -> None:
    session = load(small_master(tmp_path))
    with pytest.raises(DataError, match=r"has the shape N x 1 x 6 x 6; got \[16, 1, 6, 5\]"):
        session.run(X[..., :5])
    with pytest.raises(DataError, match=r"got \[1, 6, 6\]"):
        session.run(X[0])
    with pytest.raises(DataError, match="takes x; got z"):
        session.run({"z": X})
    with pytest.raises(DataError, match=r"takes numbers of type tensor\(float\)"):
        session.run(np.array([["a"]]))
    with pytest.raises(DataError, match="takes numbers"):
        session.run([[1.0], [1.0, 2.0]])
    with pytest.raises(DataError, match="takes numbers"):
        session.run(X.astype(np.complex64))


def test_a_width_that_makes_no_sense_changes_nothing(tmp_path: Path) -> None:
    session = load(small_master(tmp_path))
    session.set_bits(weights=4, activations=4)
    want = session.run(X)
    with pytest.raises(SpecError, match="weights must be 2 to 16"):
        session.set_bits(weights=1, activations=4)
    with pytest.raises(SpecError, match="no point matches"):
        session.set_bits(weights=8, activations=8, layers={"zzz": (2, 2)})
    assert session.bits == Bits(4, 4)
    np.testing.assert_array_equal(session.run(X), want)
    with pytest.raises(SpecError, match="threads"):
        load(tmp_path / "small.onnx", threads=0)
    with pytest.raises(SpecError, match="keep"):
        load(tmp_path / "small.onnx", keep=0)


def test_going_back_to_a_width_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import anybit.artifact.session as module

    compiled = []
    real = module.compile_model
    monkeypatch.setattr(module, "compile_model", lambda *a, **k: compiled.append(1) or real(*a, **k))
    session = Session(open_master(small_master(tmp_path)), keep=2)
    assert len(compiled) == 1
    session.set_bits(weights=8, activations=8)
    session.set_bits(weights=32, activations=32)
    session.set_bits(weights=8, activations=8)
    assert len(compiled) == 2
    session.set_bits(weights=4, activations=4)  # drops floating point, the one not used for longest
    session.set_bits(weights=8, activations=8)
    assert len(compiled) == 3
    session.set_bits(weights=32, activations=32)
    assert len(compiled) == 4
    session.set_bits(weights=8, activations=8, layers={"a": (8, 8)})
    assert len(compiled) == 4  # the same widths, said in another way


def test_a_network_with_nothing_to_quantize_runs_too(tmp_path: Path) -> None:
    import torch

    import anybit

    anybit.save(anybit.prepare(torch.nn.ReLU(), torch.zeros(2, 3)), tmp_path / "relu.onnx")
    session = load(tmp_path / "relu.onnx")
    for bits in (32, 4):
        session.set_bits(weights=bits, activations=bits)
        assert session.run(np.float32([[-1, 0, 2]])).tolist() == [[0, 0, 2]]


def test_each_run_sees_one_width_whole_whoever_switches(tmp_path: Path) -> None:
    session = load(small_master(tmp_path), threads=1, keep=3)
    pairs = [Bits(8, 8), Bits(4, 4), Bits(2, 2), Bits(6, 8)]
    x = X[:2]
    want = {}
    for bits in pairs:
        session.set_bits(weights=bits.weights, activations=bits.activations)
        want[bits] = session.run(x)
    assert len({value.tobytes() for value in want.values()}) == len(pairs)
    served: list[tuple[Bits, bool]] = []
    stop = threading.Event()

    def runs() -> None:
        for _ in range(600):
            got, bits = session.run_with_bits(x)
            served.append((bits, np.array_equal(got, want[bits])))

    def switches() -> None:
        i = 0
        while not stop.is_set():
            i += 1
            bits = pairs[i * 7 % 4 if i % 5 else i % 2]
            session.set_bits(weights=bits.weights, activations=bits.activations)

    workers = [threading.Thread(target=runs) for _ in range(8)]
    switcher = threading.Thread(target=switches)
    for thread in [*workers, switcher]:
        thread.start()
    for thread in workers:
        thread.join()
    stop.set()
    switcher.join()
    assert len(served) == 8 * 600
    assert all(right for _, right in served)
    assert len({bits for bits, _ in served}) > 1


def test_a_graph_that_onnx_runtime_refuses_names_the_file(tmp_path: Path) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(MODEL)
    points = (*PLAN.points, Activation("shape", "activation", ranges=((32, Range(0.0, 9.0, "")),)))
    model.graph.node.insert(0, onnx.helper.make_node("Shape", ["x"], ["shape"]))
    write_master(tmp_path / "m.onnx", model, header_with(points=points))
    session = load(tmp_path / "m.onnx")
    with pytest.raises(FileError, match=r"m\.onnx: ONNX Runtime does not take this graph"):
        session.set_bits(weights=8, activations=8)
    assert session.bits == Bits()


# Exporting


def test_the_note_says_what_another_runtime_must_set(tmp_path: Path) -> None:
    path = small_master(tmp_path)
    found = {}
    for signed in (True, False):
        for bits in (Bits(8, 8), Bits(4, 8)):
            export(path, tmp_path / "out.onnx", weights=bits.weights, activations=bits.activations, signed=signed)
            note = {e.key: e.value for e in onnx.load(tmp_path / "out.onnx").metadata_props}[NOTE]
            found[signed, bits] = json.loads(note)["session_options"]
    assert found.pop((True, Bits(8, 8))) == {EXACT: "1"}
    assert list(found.values()) == [{}] * 3


@pytest.mark.parametrize("bits", [Bits(8, 8), Bits(8, 4), Bits(7, 8), Bits(5, 8)], ids=str)
@pytest.mark.parametrize("signed", [True, False])
def test_no_pair_of_products_of_an_export_saturates_unless_asked_for(bits: Bits, signed: bool, tmp_path: Path) -> None:
    path = small_master(tmp_path)
    export(path, tmp_path / "out.onnx", weights=bits.weights, activations=bits.activations, signed=signed)
    held = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "out.onnx").graph.initializer}
    codes = {name: array for name, array in held.items() if name.endswith("weight.codes")}
    assert codes
    # Without VNNI two products of an unsigned and a signed byte are added in 16 bits; of two unsigned ones in 32.
    most = 2 ** min(8, bits.activations) - 1
    worst = max(2 * most * int(np.abs(c.astype(int)).max()) for c in codes.values() if c.dtype == np.int8) if any(
        c.dtype == np.int8 for c in codes.values()
    ) else 0  # fmt: skip
    assert (worst >= 2**15) == (signed and bits == Bits(8, 8))


def test_unsigned_bytes_are_the_same_numbers(tmp_path: Path) -> None:
    path = small_master(tmp_path)
    weights = []
    for signed in (True, False):
        export(path, tmp_path / "out.onnx", weights=8, activations=8, signed=signed)
        held = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "out.onnx").graph.initializer}
        names = [name.removesuffix(".codes") for name in held if name.endswith("weight.codes")]
        weights.append({n: held[f"{n}.codes"].astype(int) - held[f"{n}.zero"].astype(int).max() for n in names})
    signed_ones, unsigned_ones = weights
    assert signed_ones.keys() == unsigned_ones.keys() != set()
    assert all(np.array_equal(signed_ones[name], unsigned_ones[name]) for name in signed_ones)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8, 9, 16])
@pytest.mark.parametrize("symmetric", [True, False])
def test_weights_are_stored_as_small_as_they_can_be(bits: int, symmetric: bool, tmp_path: Path) -> None:
    write_master(tmp_path / "m.onnx", MODEL, header_with(points=with_weights(symmetric=symmetric)))
    export(tmp_path / "m.onnx", tmp_path / "out.onnx", weights=bits, activations=8)
    held = {tensor.name: tensor for tensor in onnx.load(tmp_path / "out.onnx").graph.initializer}
    codes = held["b.weight.codes"]
    kind = TensorProto.INT4 if bits <= 4 else TensorProto.INT8 if bits < 8 else TensorProto.INT16
    kinds = {kind} if bits != 8 else {TensorProto.UINT8, TensorProto.INT8}
    assert codes.data_type in kinds
    assert len(codes.raw_data) == 3 * 64 * {TensorProto.INT4: 0.5, TensorProto.INT16: 2}.get(codes.data_type, 1)
    values = numpy_helper.to_array(codes).astype(int)
    assert values.max() - values.min() <= 2**bits - 1 - symmetric
    assert "b.weight" not in held


def test_an_export_is_written_at_once_or_not_at_all(tmp_path: Path) -> None:
    path = small_master(tmp_path)
    with pytest.raises(SpecError, match="weights must be"):
        export(path, tmp_path / "out.onnx", weights=1, activations=8)
    with pytest.raises(FileError, match="cannot make this folder"):
        export(path, path / "out.onnx", weights=4, activations=8)
    assert [p.name for p in tmp_path.iterdir()] == ["small.onnx"]


# Without PyTorch


WITHOUT_TORCH = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "onnxscript", "sklearn", "safetensors"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
import os
import numpy as np
from anybit.artifact.session import load
from anybit.artifact.export import export
session = load(sys.argv[1])
for weights, activations in ((8, 8), (4, 4), (32, 32)):
    session.set_bits(weights=weights, activations=activations)
    print(session.bits, session.run(np.ones((2, 1, 6, 6))).round(3).tolist()[0])
export(sys.argv[1], sys.argv[2], weights=4, activations=8)
print(os.environ["ORT_DISABLE_TELEMETRY"], "torch" in sys.modules)
"""


def test_none_of_this_needs_torch(tmp_path: Path) -> None:
    path = small_master(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(path), str(tmp_path / "out.onnx")], capture_output=True, text=True
    )
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["W8A8", "W4A4", "FP", "1"]
    assert lines[-1] == "1 False"
    assert (tmp_path / "out.onnx").exists()
