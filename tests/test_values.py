"""Files whose inputs and outputs are no plain tensors: optionals, maps, sequences of any shapes, and none at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from stranger_builder import Net
from test_artifact_cli import call

import anybit
from anybit.artifact.runtime import onnxruntime
from anybit.artifact.values import parts_of
from anybit.cli.adopt import adopt
from anybit.cli.bench import bench
from anybit.cli.run import run
from anybit.cli.serve import make_app
from anybit.cli.watch import watch
from anybit.errors import DataError, FileError

ML = "ai.onnx.ml"
RNG = np.random.default_rng(7)
Feeds = list[dict[str, Any]]
CASES: dict[str, Callable[[Net], Feeds]] = {}


def case(build: Callable[[Net], Feeds]) -> Callable[[Net], Feeds]:
    CASES[build.__name__] = build
    return build


def tensor(*shape: Any, kind: int = TensorProto.FLOAT) -> onnx.TypeProto:
    return helper.make_tensor_type_proto(kind, list(shape))


def optional(kind: onnx.TypeProto) -> onnx.TypeProto:
    return helper.make_optional_type_proto(kind)


def sequence(kind: onnx.TypeProto) -> onnx.TypeProto:
    return helper.make_sequence_type_proto(kind)


def mapping(key: int, value: int = TensorProto.FLOAT) -> onnx.TypeProto:
    return helper.make_map_type_proto(key, tensor(kind=value))


def takes(net: Net, name: str, kind: onnx.TypeProto) -> str:
    net.inputs.append(helper.make_value_info(name, kind))
    return name


def gives(net: Net, name: str, kind: onnx.TypeProto) -> None:
    net.outputs.append(helper.make_value_info(name, kind))


def rows(*shape: int) -> Any:
    return RNG.normal(size=shape).astype(np.float32)


def layers(net: Net, x: str, before: int = 8) -> str:
    return net.dense(net.node("Relu", net.dense(x, before, 12)), 12, 4)


@case
def an_optional_tensor(net: Net) -> Feeds:
    """What is there takes the place of x."""
    x, other = net.x(2, 8, declared=["n", 8]), takes(net, "other", optional(tensor("n", 8)))
    there = helper.make_graph(
        [helper.make_node("OptionalGetElement", [other], ["there"])], "there", [],
        [helper.make_tensor_value_info("there", TensorProto.FLOAT, None)],
    )  # fmt: skip
    not_there = helper.make_graph(
        [helper.make_node("Identity", [x], ["away"])], "not_there", [],
        [helper.make_tensor_value_info("away", TensorProto.FLOAT, None)],
    )  # fmt: skip
    has = net.node("OptionalHasElement", other)
    net.output(layers(net, net.node("If", has, then_branch=there, else_branch=not_there)))
    return [{"x": rows(2, 8), "other": None}, {"x": rows(2, 8), "other": rows(2, 8)}]


@case
def an_optional_sequence(net: Net) -> Feeds:
    parts = net.node("OptionalGetElement", takes(net, "xs", optional(sequence(tensor("n", 8)))))
    net.output(layers(net, net.node("ConcatFromSequence", parts, axis=0)))
    return [{"xs": [rows(2, 8), rows(3, 8)]}, {"xs": [rows(1, 8)]}]


@case
def optionals_out(net: Net) -> Feeds:
    y = layers(net, net.x(2, 8, declared=["n", 8]))
    gives(net, net.node("Optional", net.node("SequenceConstruct", y, "x")), optional(sequence(tensor())))
    gives(net, net.node("Optional", y), optional(tensor()))
    gives(net, net.node("Optional", type=tensor(2)), optional(tensor()))
    return [{"x": rows(2, 8)}]


@case
def a_map_from_names(net: Net) -> Feeds:
    words = ["red", "green", "blue", "black"]
    m = takes(net, "m", mapping(TensorProto.STRING))
    net.output(layers(net, net.node("DictVectorizer", m, domain=ML, string_vocabulary=words), 4))
    return [{"m": {"red": 1.0, "blue": -2.0}}, {"m": {"green": 0.5, "unknown": 3.0}}]


@case
def maps_from_numbers(net: Net) -> Feeds:
    m, k = takes(net, "m", mapping(TensorProto.INT64)), takes(net, "k", mapping(TensorProto.INT64))
    first = net.node("DictVectorizer", m, domain=ML, int64_vocabulary=[70, 90, 110, 130])
    other = net.node("CastMap", k, domain=ML, cast_to="TO_FLOAT", map_form="SPARSE", max_map=4)
    net.output(layers(net, net.node("Concat", first, other, axis=1)))
    return [{"m": {70: 1.0, 130: 2.0}, "k": {0: 3, 2: -1.0}}]


@case
def sequences_of_different_shapes(net: Net) -> Feeds:
    x = net.node("ConcatFromSequence", takes(net, "xs", sequence(tensor("n", 8))), axis=0)
    gives(net, net.node("SequenceConstruct", layers(net, x), x), sequence(tensor()))
    return [{"xs": [rows(2, 8), rows(3, 8)]}]


@case
def half_precision_in_a_sequence(net: Net) -> Feeds:
    x = net.node("ConcatFromSequence", takes(net, "xs", sequence(tensor("n", 8, kind=TensorProto.FLOAT16))), axis=0)
    gives(net, net.node("MatMul", x, net.hold(net.draw(8, 4).astype(np.float16))), tensor(kind=TensorProto.FLOAT16))
    return [{"xs": [rows(2, 8).astype(np.float16), rows(3, 8).astype(np.float16)]}]


@case
def no_input(net: Net) -> Feeds:
    net.output(layers(net, net.node("Constant", value=onnx.numpy_helper.from_array(rows(2, 8)))))
    return [{}]


@case
def not_a_number_in_a_tree(net: Net) -> Feeds:
    net.versions[ML], net.opset = 5, 18
    nothing, kind = float("nan"), TensorProto.FLOAT
    y = net.node(
        "TreeEnsemble", net.dense(net.x(2, 8, declared=["n", 8]), 8, 1), domain=ML, n_targets=4, aggregate_function=1,
        membership_values=helper.make_tensor("a", kind, [8], [1.2, 3.7, 8, 9, nothing, 12, 7, nothing]),
        nodes_modes=helper.make_tensor("b", TensorProto.UINT8, [3], [0, 6, 6]), nodes_featureids=[0, 0, 0],
        nodes_splits=helper.make_tensor("c", kind, [3], [11, 232344.0, nothing]), post_transform=0, tree_roots=[0],
        nodes_trueleafs=[0, 1, 1], nodes_truenodeids=[1, 0, 1], nodes_falseleafs=[1, 0, 1],
        nodes_falsenodeids=[2, 2, 3],
        leaf_targetids=[0, 1, 2, 3], leaf_weights=helper.make_tensor("d", kind, [4], [1, 10, 1000, 100]),
    )  # fmt: skip
    net.output(net.node("Add", y, net.dense("x", 8, 4)))
    return [{"x": rows(2, 8)}]


@case
def not_a_number_alone(net: Net) -> Feeds:
    x, zero = net.x(2, 8, declared=["n", 8]), net.hold(0.0)
    some = net.node("Where", net.node("Greater", x, zero), x, net.hold(np.float32(np.nan)))
    net.output(layers(net, net.node("Where", net.node("IsNaN", some), zero, some)))
    return [{"x": rows(2, 8)}]


@case
def text_joined_in_a_loop(net: Net) -> Feeds:
    """Each round makes a text of its own; the loop hands nothing on but its condition."""
    net.opset, net.ir = 20, 9
    words, mark = takes(net, "words", sequence(tensor(kind=TensorProto.STRING))), net.hold(np.array(["!"], object))
    nodes = [
        helper.make_node("SequenceAt", [words, "i"], ["word"]),
        helper.make_node("StringConcat", ["word", mark], ["loud"]),
        helper.make_node("Identity", ["go"], ["on"]),
    ]
    ends = [("i", TensorProto.INT64, []), ("go", TensorProto.BOOL, []), ("on", TensorProto.BOOL, [])]
    counter, go, on = (helper.make_tensor_value_info(*end) for end in ends)
    loud = helper.make_tensor_value_info("loud", TensorProto.STRING, None)
    body = helper.make_graph(nodes, "body", [counter, go], [on, loud])
    gives(net, net.node("Loop", net.node("SequenceLength", words), "", body=body), tensor(kind=TensorProto.STRING))
    net.output(layers(net, net.x(2, 8, declared=["n", 8])))
    some: Any = [np.array([word], object) for word in ("ant", "bee", "cat")]
    return [{"x": rows(2, 8), "words": some}, {"x": rows(2, 8), "words": some[1:]}]


def built(name: str, folder: Path) -> tuple[Path, Feeds]:
    net, path = Net(3), folder / "plain.onnx"
    feeds = CASES[name](net)
    onnx.save(net.model(), path)
    return path, feeds


def made_of(path: Path, feed: Mapping[str, Any]) -> dict[str, Any]:
    """What ONNX Runtime makes of a file as it is, in arrays."""
    session = onnxruntime().InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return arrays_of(dict(zip(names, session.run(None, dict(feed)), strict=True)))


def arrays_of(found: Mapping[str, Any]) -> dict[str, Any]:
    return {part: x for name, value in found.items() for part, x in parts_of(name, value).items()}


def off(found: Any, wanted: Any) -> float:
    assert found.shape == wanted.shape
    if found.dtype.kind == "O":
        return float((found != wanted).sum())
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("data", [True, False], ids=["with data", "without"])
def test_it_is_quantized_and_runs_as_it_did(name: str, data: bool, tmp_path: Path) -> None:
    plain, feeds = built(name, tmp_path)
    plan = anybit.adopt(plain, tmp_path / "m.onnx", calibration=feeds if data else None)
    assert plan.weights
    assert all(a.ranges for a in plan.activations if a.kind != "input"), "nothing that was made up ran"
    session = anybit.load(tmp_path / "m.onnx", threads=1)
    single = len(session.outputs) == 1
    for feed in feeds:
        wanted, errors = made_of(plain, feed), {}
        for bits in (32, 16, 8):
            session.set_bits(weights=bits, activations=max(bits, 16))
            found = session.run(feed)
            arrays = arrays_of({session.outputs[0]: found} if single else found)
            assert list(arrays) == list(wanted)
            errors[bits] = max(off(arrays[part], x) for part, x in wanted.items())
        assert errors[32] < 0.002
        assert data is False or (errors[16] < 0.002 and 1e-5 < errors[8] < 0.05)  # made-up ranges may be too narrow
    session.run(session.example())
    anybit.export(tmp_path / "m.onnx", tmp_path / "w8a16.onnx", weights=8, activations=16)
    exported = made_of(
        tmp_path / "w8a16.onnx", anybit.load(tmp_path / "m.onnx")._feed(feeds[-1])
    )  # halves are floats now
    assert all(off(exported[part], x) < 1e-4 for part, x in arrays.items())


@pytest.mark.parametrize("name", [n for n in CASES if not n.startswith("not_a")])
def test_every_verb_takes_it(name: str, tmp_path: Path) -> None:
    plain, feeds = built(name, tmp_path)
    (tmp_path / "mine.py").write_text(
        f"from stranger_builder import Net\nfrom test_values import CASES\nfeeds = CASES[{name!r}](Net(0))\n"
    )
    out, mine = tmp_path / "m.onnx", f"{tmp_path / 'mine.py'}:feeds"
    assert call(adopt, plain, "--out", out, "--calibrate", mine).output.startswith("quantized: 100% of the weights")
    given = [mine] if feeds[0] else []
    lines = call(run, out, *given, "--bits", "W8A8", "--out", tmp_path / "out", "--json").output.splitlines()
    assert len(lines) == len(feeds)
    wanted = made_of(plain, feeds[0])
    outputs = json.loads(lines[0])["outputs"]
    assert [(told["name"], tuple(np.load(told["file"]).shape)) for told in outputs] == [
        (part, x.shape) for part, x in wanted.items()
    ]
    record = call(bench, out, "--widths", "W8A8", "--rounds", "1", "--json", *(["--input", mine] if given else []))
    assert json.loads(record.output)["rows"][0]["latency"] > 0
    assert "W4A8" in call(watch, out, "--bits", "W4A8", "--times", "1").output
    anybit.reconstruct(out, feeds, ["W4A8"], out=tmp_path / "better.onnx")
    pytest.importorskip("PIL")
    page = make_app(out)
    assert page.about()["takes"]
    if not given:
        assert page.model.predict(b"", anybit.Bits(8, 8))["outputs"]


def adopted(name: str, folder: Path) -> tuple[anybit.Session, Feeds]:
    plain, feeds = built(name, folder)
    anybit.adopt(plain, folder / "m.onnx", calibration=feeds)
    return anybit.load(folder / "m.onnx", threads=1), feeds


def test_what_is_optional_may_be_left_out(tmp_path: Path) -> None:
    session, (without, there) = adopted("an_optional_tensor", tmp_path)
    left_out = session.run({"x": without["x"]})
    np.testing.assert_array_equal(left_out, session.run(without))
    both = {**without, "other": there["other"]}
    assert not np.array_equal(session.run(both), left_out)
    np.testing.assert_array_equal(session.run({**both, "other": there["other"].astype(np.float64)}), session.run(both))
    np.savez(tmp_path / "one.npz", x=without["x"][None])
    np.savez(tmp_path / "both.npz", x=without["x"][None], other=there["other"][None])
    for file, wanted in (("one", left_out), ("both", session.run(both))):
        call(run, tmp_path / "m.onnx", tmp_path / f"{file}.npz", "--bits", "FP", "--out", tmp_path / file)
        np.testing.assert_array_equal(np.load(tmp_path / file / "0000.npy"), wanted)
    with pytest.raises(DataError, match=r"the network takes x, other; got other$"):
        session.run(None)


WRONG = {
    "a_map_from_names": ({"m": 3.0}, {"m": {"red": "much"}}, {"m": None}),
    "maps_from_numbers": ({"m": {"red": 1.0}, "k": {}}, {"m": {}, "k": [1.0]}),
    "sequences_of_different_shapes": ({"xs": 3.0}, {"xs": [np.ones((2, 7))]}, {"xs": [["a"]]}, {"xs": None}),
    "an_optional_sequence": ({"xs": {"a": 1.0}}, {"xs": None}),
    "no_input": ({"x": 1.0}, np.ones(3)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_one_line(name: str, tmp_path: Path) -> None:
    session, _ = adopted(name, tmp_path)
    for given in WRONG[name]:
        with pytest.raises(DataError) as caught:
            session.run(given)
        assert "\n" not in str(caught.value)
        if isinstance(given, dict) and session.inputs:
            with pytest.raises(DataError, match="a calibration input cannot be run"):
                anybit.adopt(tmp_path / "plain.onnx", tmp_path / "n.onnx", calibration=[given])
            (tmp_path / "mine.py").write_text(f"from numpy import array, float32\nfeeds = [{given!r}]\n")
            with pytest.raises(DataError, match=r"mine\.py|cannot be run"):
                call(run, tmp_path / "m.onnx", f"{tmp_path / 'mine.py'}:feeds")


def test_no_file_holds_a_map(tmp_path: Path) -> None:
    adopted("a_map_from_names", tmp_path)
    np.save(tmp_path / "m.npy", np.ones(3))
    with pytest.raises(DataError, match=r"input 'm' \(any shape, map\(string,tensor\(float\)\)\) is read from no file"):
        call(run, tmp_path / "m.onnx", tmp_path / "m.npy")


@pytest.mark.parametrize("form", ["sparse_tensor_type", "opaque_type", "sequence_type", "optional_type", "map_type"])
def test_types_that_nobody_runs_are_refused_in_one_line(form: str, tmp_path: Path) -> None:
    plain, _ = built("not_a_number_alone", tmp_path)
    model = onnx.load(plain)
    getattr(model.graph.input[0].type, form).SetInParent()
    onnx.save(model, plain)
    with pytest.raises(FileError, match=r"plain\.onnx: 'x': must be a tensor of numbers or of text, or a sequence"):
        anybit.adopt(plain, tmp_path / "m.onnx")
