from __future__ import annotations

import copy
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from test_artifact_small import HEADER, MODEL, header_with, packed, small_master, with_weights, write

from anybit.artifact import protobuf_scan
from anybit.artifact.header import DIGEST, KEY, Header, read_header, write_header
from anybit.artifact.master import open_master, write_master
from anybit.artifact.runtime import onnxruntime
from anybit.errors import FileError, SpecError
from anybit.plan.points import Activation, Bias, Left, Plan, Weight
from anybit.spec import Bits, Range

# The header


ranges = st.tuples(st.floats(-1e6, 0), st.floats(0, 1e6), st.text(max_size=5)).map(lambda t: Range(*t))
names = st.text(max_size=4)
sizes = st.lists(st.none() | st.integers(0, 9) | st.text(max_size=3), max_size=4).map(tuple)
floors = st.sampled_from([2, 8, 32])
weights = st.builds(
    Weight, names, names, st.lists(st.integers(0, 9), max_size=4).map(tuple), st.none() | st.integers(0, 3),
    st.booleans(), st.booleans(), floors, names, st.booleans(), st.booleans(), st.integers(0, 3), st.integers(1, 9),
)  # fmt: skip
activations = st.builds(
    Activation, names, st.sampled_from(["activation", "input", "accumulator"]), names, sizes,
    st.dictionaries(st.sampled_from([2, 4, 8, 32]), ranges).map(lambda d: tuple(d.items())), st.booleans(), floors,
    names,
)  # fmt: skip
means = st.none() | st.lists(st.floats(-1e9, 1e9)).map(tuple)
lefts = st.builds(Left, names, names)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Return any plan: points and biases of different names, biases of weights that are there."""
    points = draw(st.lists(weights | activations, max_size=6, unique_by=lambda p: p.name))
    layers, inputs = ([p.name for p in points if isinstance(p, kind)] for kind in (Weight, Activation))
    taken = {p.name for p in points}
    biases = st.builds(
        Bias, names.filter(lambda n: n not in taken), st.sampled_from(layers or [""]), st.sampled_from(["", *inputs]),
        names, means,
    )  # fmt: skip
    found = draw(st.lists(biases, max_size=3, unique_by=lambda b: b.name)) if layers else []
    return Plan(tuple(points), tuple(found), tuple(draw(st.lists(lefts, max_size=2))))


@given(plans())
@settings(max_examples=150, deadline=None)
def test_a_header_comes_back_as_it_was(plan: Plan) -> None:
    try:
        header = Header(plan, "fp16", {"λ": [1, {"x": None}]})
    except SpecError:
        return  # two points at one place
    assert read_header(write_header(header), where="f") == header


def changed(path: str, value: Any) -> str:
    """Return the small master's header with one field replaced; `path` is like `plan.points.0.ranges`."""
    values = json.loads(write_header(HEADER))
    *way, last = [int(word) if word.isdigit() else word for word in path.split(".")]
    spot = values
    for word in way:
        spot = spot[word]
    if value is ...:
        del spot[last]
    else:
        spot[last] = value
    return json.dumps(values)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("version", 6, "version is 6, this anybit reads up to 5; update"),
        ("version", 2, "unknown field 'plan'"),
        ("version", 0, "version must be a whole number from 1 on"),
        ("data", {"file": "x", "bytes": 1}, "data: field 'sha256' is missing"),
        ("data", {"file": "x", "bytes": 1, "sha256": "0" * 64}, "its second file x is missing"),
        ("version", "1", "version must be a whole number"),
        ("version", True, "version must be a whole number"),
        ("version", ..., "version must be a whole number"),
        ("store", "fp8", "store must be one of fp32, fp16, int8"),
        ("store", ["fp32"], "store must be one of"),
        ("about", [], "about must be a JSON object"),
        ("about", ..., "field 'about' is missing"),
        ("more", 1, "unknown field 'more'"),
        ("plan", [], "plan: a plan must be a JSON object"),
        ("plan.more", 1, "plan: unknown field 'more'"),
        ("plan.left", ..., "plan: field 'left' is missing"),
        ("plan.left", [{"name": "q"}], r"left\[0\]: field 'reason' is missing"),
        ("plan.points", {}, "points must be a list"),
        ("plan.points.1", 3, r"points\[1\] must be a JSON object"),
        ("plan.points.1.name", ..., r"points\[1\]: field 'name' is missing"),
        ("plan.points.1.tensor", 3, r"points\[1\].tensor must be a text"),
        ("plan.points.1.symmetric", 1, r"points\[1\].symmetric must be true or false"),
        ("plan.points.1.axis", -1, r"points\[1\].axis must be a whole number from 0 on"),
        ("plan.points.1.axis", 9, r"weight 'a.weight'.axis: must be 0 to 3, got 9"),
        ("plan.points.1.channels", 9, r"weight 'a.weight'.channels: must be 0 to 3, got 9"),
        ("plan.points.1.shape", [4, 1, 3], r"shape is \[4, 1, 3\] in the header, and \[4, 1, 3, 3\] in the graph"),
        ("plan.points.1.shape", [-1], r"points\[1\].shape must be a list of sizes"),
        ("plan.points.1.groups", 0, r"points\[1\].groups must be a whole number from 1 on"),
        ("plan.points.1.floor", 33, r"points\[1\].floor: bits must be 2 to 16"),
        ("plan.points.1.color", "red", r"points\[1\]: unknown field 'color'"),
        ("plan.points.1.tensor", "gone", r"weight 'a.weight'.tensor: the graph holds no tensor 'gone'"),
        ("plan.points.3.tensor", "a.weight", "tensor or value 'a.weight' is listed twice"),
        ("plan.points.3.name", "a.weight", "name 'a.weight' is listed twice"),
        ("plan.points.2.value", "gone", r"activation 'relu': no node makes 'gone'"),
        ("plan.points.2.value", "x_", "the tensor or value 'x_' is listed twice"),
        ("plan.points.2.kind", "input layer", "kind must be one of"),
        ("plan.points.2.kind", "weight", r"points\[2\]: unknown field 'ranges'"),
        ("plan.points.2.kind", ..., r"points\[2\]: field 'kind' is missing"),
        ("plan.points.2.ranges", [[32, 1.0, -1.0, ""]], r"points\[2\].ranges: a range goes from low to high"),
        ("plan.points.2.ranges", [[32, 0.0, float("nan"), ""]], r"points\[2\].ranges must be a list of"),
        ("plan.points.2.ranges", [[32, 0.0, float("inf"), ""]], r"points\[2\].ranges must be a list of"),
        ("plan.points.2.ranges", [[32, 0.0, 10**400, ""]], r"points\[2\].ranges must be a list of"),
        ("plan.points.2.ranges", [[32, 0.0]], r"points\[2\].ranges must be a list of"),
        ("plan.points.2.ranges", [[1, 0.0, 1.0, ""]], r"points\[2\].ranges: bits must be 2 to 16"),
        ("plan.points.2.ranges", [[4, 0.0, 1.0, ""]] * 2, r"points\[2\].ranges: a width is listed twice"),
        ("plan.biases.0.tensor", "gone", r"biases\[0\].tensor: 'gone' must be a tensor of the graph with 4 numbers"),
        ("plan.biases.0.name", "b.bias", "the name 'b.bias' is listed twice"),
        ("plan.biases.0.tensor", "b.bias", r"'b.bias' is listed twice"),
        ("plan.biases.0.weight", "b.weight", r"'a.bias' must be a tensor of the graph with 3 numbers"),
        ("plan.biases.0.weight", "gone", r"biases\[0\].weight: 'gone' is not the name of a weight"),
        ("plan.biases.0.input", "gone", r"biases\[0\].input: 'gone' is not the name of an activation"),
        ("plan.biases.0.input", "b.weight", r"biases\[0\].input: 'b.weight' is not the name of an activation"),
        ("plan.points.1.groups", 3, r"biases\[0\].weight: 3 groups do not divide"),
        ("plan.biases.0.mean", [1.0, 2.0], r"biases\[0\].mean: must be 1 numbers, got 2"),
        ("plan.biases.0.mean", [None], r"biases\[0\].mean must be a list of finite numbers"),
    ],
)
def test_a_wrong_field_is_named(path: str, value: Any, message: str, tmp_path: Path) -> None:
    file = write(tmp_path / "m.onnx", text=changed(path, value))
    with pytest.raises(FileError, match=message) as caught:
        open_master(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "[" * 100_000, '"x"', "null", "1e999", '{"version": 1' + "0" * 5000 + "}"]
)
def test_a_header_that_is_no_header(text: str, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"m\.onnx: (metadata 'anybit'|version)"):
        open_master(write(tmp_path / "m.onnx", text=text))


def test_widths_follow_bits_floors_ranges_and_patterns() -> None:
    low = Range(0.0, 1.0, "")
    plan = Plan(
        (
            Weight("a.weight"),
            Weight("b.weight", floor=8),
            Weight("c.weight", floor=32),
            Activation("x", "input", ranges=((32, low),), floor=8),
            Activation("y", "activation", ranges=((32, low),)),
            Activation("z", "activation"),
            Activation("v", "activation", ranges=((4, low),)),
        ),
    )
    want = {"a.weight": 4, "b.weight": 8, "c.weight": 32, "x": 8, "y": 5, "z": 32, "v": 32}
    assert plan.widths(Bits(4, 5)) == want
    assert plan.widths(Bits(4, 4))["v"] == 4
    got = plan.widths(Bits(4, 4), {"*": (6, 6), "a": (3, 3), "y": (2, 2)})
    assert got == {"a.weight": 3, "b.weight": 8, "c.weight": 32, "x": 8, "y": 2, "z": 32, "v": 32}
    with pytest.raises(SpecError, match="no point matches the pattern 'q'"):
        plan.widths(Bits(4, 4), {"q": (2, 2)})
    with pytest.raises(SpecError, match=r"pair \(weights, activations\)"):
        plan.widths(Bits(4, 4), {"a": 2})  # type: ignore[dict-item]


# The file


def test_a_master_comes_back_bit_for_bit(tmp_path: Path) -> None:
    master = open_master(small_master(tmp_path))
    assert master.header == HEADER
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in MODEL.graph.initializer}
    assert master.weights.keys() == {"a.weight", "b.weight"}
    for name, array in master.weights.items():
        np.testing.assert_array_equal(array, held[name])
    assert master.inputs == ("x",)
    assert master.outputs == ("y",)


@pytest.mark.parametrize(("store", "size", "most"), [("fp16", 0.5, 1e-3), ("int8", 0.25, 4e-3)])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("axis", [None, 0])
def test_weights_can_be_stored_in_fewer_bytes(
    store: str, size: float, most: float, symmetric: bool, axis: int | None, tmp_path: Path
) -> None:
    header = header_with(store=store, points=with_weights(axis=axis, symmetric=symmetric))
    write_master(tmp_path / "m.onnx", MODEL, header)
    master, exact = open_master(tmp_path / "m.onnx"), open_master(small_master(tmp_path / "full"))
    for name, array in master.weights.items():
        np.testing.assert_allclose(array, exact.weights[name], atol=2 * most * np.abs(exact.weights[name]).max())
        assert not np.array_equal(array, exact.weights[name])
    assert master.graph == exact.graph
    stored = {t.name: len(t.raw_data) for t in onnx.load(tmp_path / "m.onnx").graph.initializer}
    part = {"fp16": "half", "int8": "codes"}[store]
    assert stored[f"a.weight.{part}"] == size * exact.weights["a.weight"].nbytes
    ort = onnxruntime()
    x = np.random.default_rng(0).normal(size=(3, 1, 6, 6)).astype(np.float32)
    results = [
        ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
        for path in (tmp_path / "m.onnx", tmp_path / "full" / "small.onnx")
    ]
    np.testing.assert_allclose(results[0], results[1], atol=8 * most * np.abs(results[1]).max())


def test_weights_that_do_not_fit_in_16_bits_are_not_written(tmp_path: Path) -> None:
    model = copy.deepcopy(MODEL)
    replace_tensor(model, "a.weight", np.full((4, 1, 3, 3), 1e5, np.float32))
    with pytest.raises(FileError, match="does not fit in 16 bits"):
        write_master(tmp_path / "m.onnx", model, header_with(store="fp16"))
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_opened_again_is_not_written(tmp_path: Path) -> None:
    model = copy.deepcopy(MODEL)
    replace_tensor(model, "a.weight", np.full((4, 1, 3, 3), np.nan, np.float32))
    small_master(tmp_path)
    before = (tmp_path / "small.onnx").read_bytes()
    with pytest.raises(FileError, match=r"small\.onnx: weight 'a\.weight': tensor 'a\.weight': has NaN"):
        write_master(tmp_path / "small.onnx", model, HEADER)
    assert [path.name for path in tmp_path.iterdir()] == ["small.onnx"]
    assert (tmp_path / "small.onnx").read_bytes() == before
    with pytest.raises(FileError, match="must fit in JSON"):
        write_master(tmp_path / "small.onnx", MODEL, header_with(about={"x": float("nan")}))


# Files from strangers


def replace_tensor(model: onnx.ModelProto, name: str, array: np.ndarray[Any, Any]) -> None:
    for tensor in model.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(numpy_helper.from_array(array, name))


def tensor_of(model: onnx.ModelProto, name: str) -> TensorProto:
    return next(t for t in model.graph.initializer if t.name == name)


def node_of(model: onnx.ModelProto, kind: str) -> onnx.NodeProto:
    return next(n for n in model.graph.node if n.op_type == kind)


def attribute_of(model: onnx.ModelProto, kind: str, name: str) -> onnx.AttributeProto:
    return next(a for a in node_of(model, kind).attribute if a.name == name)


def set_dims(tensor: TensorProto, *dims: int) -> None:
    del tensor.dims[:]
    tensor.dims.extend(dims)


def external(model: onnx.ModelProto, where: str) -> None:
    tensor = tensor_of(model, "b.bias")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=where)
    tensor.ClearField("raw_data")


def bomb(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.array([2**20, 2**20]), "huge"))
    model.graph.node.append(helper.make_node("ConstantOfShape", ["huge"], ["bomb"]))


ATTACKS: dict[str, tuple[Callable[[onnx.ModelProto], Any], str]] = {
    "outside": (lambda m: external(m, "../../secret.bin"), "'b.bias': its data lie in another file"),
    "absolute": (lambda m: external(m, "/tmp/secret.bin"), "'b.bias': its data lie in another file"),
    "beside": (lambda m: external(m, "data.bin"), "'b.bias': its data lie in another file"),
    "huge shape": (lambda m: set_dims(tensor_of(m, "a.weight"), 2**40, 2**20), "is absurd"),
    "negative shape": (lambda m: set_dims(tensor_of(m, "a.weight"), -4, -9), "is absurd"),
    "other shape": (lambda m: set_dims(tensor_of(m, "a.weight"), 4, 1, 3, 4), "needs 192 bytes"),
    "infinite": (lambda m: replace_tensor(m, "a.weight", np.full((4, 1, 3, 3), np.inf, np.float32)), "infinite"),
    "not a number": (lambda m: replace_tensor(m, "b.bias", np.full(3, np.nan, np.float32)), "'b.bias': has NaN"),
    "other type": (lambda m: replace_tensor(m, "a.weight", np.ones((4, 1, 3, 3))), "data_type must be 1, got 11"),
    "unknown type": (lambda m: setattr(tensor_of(m, "a.weight"), "data_type", 77), "data_type 77 is none"),
    "text": (lambda m: setattr(tensor_of(m, "b.bias"), "data_type", TensorProto.STRING), "needs 3 texts"),
    "empty weight": (lambda m: replace_tensor(m, "a.weight", np.ones((0, 1, 3, 3), np.float32)), "is empty"),
    "no groups": (lambda m: setattr(attribute_of(m, "Conv", "group"), "i", 0), "group must be 1 to 65536"),
    "strides": (lambda m: attribute_of(m, "Conv", "strides").ints.__setitem__(0, 0), "strides must be 1 to 65536"),
    "padding": (lambda m: attribute_of(m, "Conv", "pads").ints.__setitem__(0, 2**40), "pads must be 0 to 65536"),
    "custom": (lambda m: setattr(node_of(m, "Relu"), "domain", "evil"), "operator of domain 'evil'"),
    "unknown operator": (lambda m: setattr(node_of(m, "Relu"), "op_type", "Hack"), "no valid ONNX"),
    "bomb": (bomb, r"'bomb' would have the shape \[1048576, 1048576\]"),
    "cycle": (lambda m: node_of(m, "Conv").input.__setitem__(0, "y"), "no valid ONNX"),
    "twice": (lambda m: node_of(m, "Relu").output.__setitem__(0, "x"), "no valid ONNX|made twice"),
    "no outputs": (lambda m: m.graph.ClearField("output"), "a network has outputs"),
    "opset": (lambda m: setattr(m.opset_import[0], "version", 99), "opset_import must be"),
    "functions": (lambda m: m.functions.add(name="f"), "functions is not empty"),
    "training": (lambda m: m.training_info.add(), "training_info is not empty"),
    "sparse": (lambda m: m.graph.sparse_initializer.add(), "sparse_initializer is not empty"),
    "sequence": (lambda m: m.graph.input[0].type.sequence_type.SetInParent(), "'x': must be a tensor of numbers"),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_graph_that_means_harm_is_refused_quickly(attack: str, tmp_path: Path) -> None:
    change, message = ATTACKS[attack]
    model = copy.deepcopy(MODEL)
    change(model)
    file = write(tmp_path / "m.onnx", model=model)
    with pytest.raises(FileError, match=message) as caught:
        open_master(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("scale", np.float32(-1), "must be above zero"),
        ("scale", np.float32(0), "must be above zero"),
        ("scale", np.float32(1e38), "is too large"),
        ("scale", np.ones(2, np.float32), r"needs scales of shape \(\), got \(2,\)"),
        ("codes", np.ones((4, 1, 3, 3), np.int16), "data_type must be 3, got 5"),
    ],
)
def test_stored_codes_are_checked(part: str, value: Any, message: str, tmp_path: Path) -> None:
    header = header_with(store="int8")
    model = onnx.load_model_from_string(packed(header))
    del model.metadata_props[:]
    replace_tensor(model, f"a.weight.{part}", np.asarray(value))
    with pytest.raises(FileError, match=message):
        open_master(write(tmp_path / "m.onnx", model=model, text=write_header(header)))


def test_a_damaged_file_is_noticed_wherever_the_damage_is(tmp_path: Path) -> None:
    data = small_master(tmp_path).read_bytes()
    file = tmp_path / "damaged.onnx"
    for position in range(0, len(data), 7):
        broken = bytearray(data)
        broken[position] ^= 0x10
        file.write_bytes(broken)
        with pytest.raises(FileError, match=r"damaged\.onnx"):
            open_master(file)


def test_a_file_that_is_cut_short_says_so(tmp_path: Path) -> None:
    data = small_master(tmp_path).read_bytes()
    file = tmp_path / "short.onnx"
    for length in (1, 2, 50, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:length])
        with pytest.raises(FileError, match=r"short\.onnx: (is cut short|has no metadata)"):
            open_master(file)


def test_no_file_a_folder_an_empty_file_a_pipe_and_another_onnx_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no such file"):
        open_master(tmp_path / "gone.onnx")
    with pytest.raises(FileError, match="is a folder"):
        open_master(tmp_path)
    (tmp_path / "empty.onnx").touch()
    with pytest.raises(FileError, match="is empty"):
        open_master(tmp_path / "empty.onnx")
    os.mkfifo(tmp_path / "pipe.onnx")
    with pytest.raises(FileError, match="no plain file"):
        open_master(tmp_path / "pipe.onnx")
    onnx.save(MODEL, tmp_path / "plain.onnx")
    with pytest.raises(FileError, match=r"has no metadata 'anybit'.*anybit adopt"):
        open_master(tmp_path / "plain.onnx")


def test_two_graphs_in_one_file_are_refused(tmp_path: Path) -> None:
    data = small_master(tmp_path).read_bytes()
    graph = MODEL.graph.SerializeToString()
    (tmp_path / "two.onnx").write_bytes(data + b"\x3a" + protobuf_scan.varint(len(graph)) + graph)
    with pytest.raises(FileError, match="must hold one graph"):
        open_master(tmp_path / "two.onnx")
    (tmp_path / "twice.onnx").write_bytes(data + protobuf_scan.entry(KEY, "{}"))
    with pytest.raises(FileError, match="metadata 'anybit' is there twice"):
        open_master(tmp_path / "twice.onnx")
    (tmp_path / "none.onnx").write_bytes(packed(HEADER).replace(DIGEST.encode(), b"anybit.digesT"))
    with pytest.raises(FileError, match="does not fit its contents"):
        open_master(tmp_path / "none.onnx")


def test_other_tools_may_add_metadata_of_their_own(tmp_path: Path) -> None:
    model = onnx.load(small_master(tmp_path))
    model.metadata_props.add(key="author", value="somebody")
    model.doc_string = "hello"
    onnx.save(model, tmp_path / "touched.onnx")
    assert open_master(tmp_path / "touched.onnx").header == HEADER


def test_a_huge_file_that_is_no_master_costs_neither_time_nor_memory(tmp_path: Path) -> None:
    file = tmp_path / "huge.onnx"
    with file.open("wb") as stream:
        stream.write(b"\x3a" + protobuf_scan.varint(2**30))
        stream.truncate(2**30 + 6)  # a hole: no bytes on disk
    code = f"""
from pathlib import Path
from anybit.artifact.master import open_master
from anybit.errors import FileError
def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
before = status("VmRSS")
try:
    open_master({str(file)!r})
except FileError as error:
    print(error)
print((status("VmHWM") - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    message, megabytes = done.stdout.splitlines()
    assert "has no metadata" in message
    assert int(megabytes) < 50


# The outermost layer


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        fields = protobuf_scan.scan(io.BytesIO(data), len(data))
        protobuf_scan.metadata(io.BytesIO(data), fields)
    except ValueError:
        return
    assert all(field.is_number or field.end <= len(data) for field in fields)


@given(st.lists(st.tuples(st.text(), st.text()), max_size=5, unique_by=lambda pair: pair[0]))
@settings(max_examples=100, deadline=None)
def test_metadata_entries_are_those_of_protobuf(pairs: list[tuple[str, str]]) -> None:
    data = MODEL.SerializeToString() + b"".join(protobuf_scan.entry(key, value) for key, value in pairs)
    model = onnx.load_model_from_string(data)
    assert [(entry.key, entry.value) for entry in model.metadata_props] == pairs
    assert protobuf_scan.metadata(io.BytesIO(data), protobuf_scan.scan(io.BytesIO(data), len(data))) == dict(pairs)
