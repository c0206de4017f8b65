"""Operators of this version inside of branches, where ONNX's own converter does not go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import anybit
from anybit.artifact.plain import read_model_file
from anybit.artifact.runtime import onnxruntime

Array = np.ndarray[Any, Any]


def branched(version: int, more: list[onnx.NodeProto] | None = None) -> onnx.ModelProto:
    """An If whose branch pads, cuts in two, averages, casts, asks for a shape, and multiplies by a weight."""
    rng = np.random.default_rng(0)
    held = {
        "pads": np.array([0, 1, 0, 1]), "spare": np.ones(3, np.float32), "w": rng.normal(size=(5, 40)),
        "v": rng.normal(size=(40, 3)), "u": rng.normal(size=(3, 3)),
    }  # fmt: skip
    nodes = [
        helper.make_node("Pad", ["x", "pads"], ["padded"]),
        helper.make_node("Split", ["padded"], ["left", "right"], axis=1),
        helper.make_node("ReduceMean", ["right"], ["mean"], axes=[1], keepdims=1),
        helper.make_node("ReduceMax", ["left"], ["most"], keepdims=0),
        helper.make_node("Shape", ["left"], ["sizes"]),
        helper.make_node("Cast", ["sizes"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("ReduceProd", ["numbers"], ["count"], axes=[0], keepdims=0),
        helper.make_node("Add", ["left", "mean"], ["a"]),
        helper.make_node("Sub", ["a", "most"], ["b"]),
        helper.make_node("Div", ["b", "count"], ["c"]),
        helper.make_node("MatMul", ["c", "w"], ["d"]),
        helper.make_node("Relu", ["d"], ["e"]),
        helper.make_node("MatMul", ["e", "v"], ["f"]),
        helper.make_node("Relu", ["f"], ["g"]),
        helper.make_node("MatMul", ["g", "u"], ["yes"]),
        *(more or []),
    ]
    held_here = [
        numpy_helper.from_array(array.astype(np.float32) if array.ndim > 1 else array, name)
        for name, array in held.items()
    ]
    out = helper.make_tensor_value_info("yes", TensorProto.FLOAT, None)
    then = helper.make_graph(nodes, "then", [], [out], held_here)
    zero = numpy_helper.from_array(np.zeros((2, 3), np.float32), "zero")
    no = helper.make_tensor_value_info("no", TensorProto.FLOAT, None)
    other = helper.make_graph([helper.make_node("Identity", ["zero"], ["no"])], "else", [], [no], [zero])
    graph = helper.make_graph(
        [helper.make_node("If", ["take"], ["y"], then_branch=then, else_branch=other)],
        "graph",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 8]),
            helper.make_tensor_value_info("take", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=8)


def version_of(model: onnx.ModelProto) -> int:
    return next(entry.version for entry in model.opset_import if entry.domain == "")


def ran(model: onnx.ModelProto, feed: dict[str, Array]) -> Array:
    session = onnxruntime().InferenceSession(model.SerializeToString())
    return np.asarray(session.run(None, feed)[0])


FEED = {"x": np.random.default_rng(1).normal(size=(2, 8)).astype(np.float32), "take": np.array(True)}


@pytest.mark.parametrize("version", [13, 16, 17])
def test_branches_do_the_same_with_newer_operators(version: int, tmp_path: Path) -> None:
    plain = branched(version)
    onnx.save(plain, tmp_path / "plain.onnx")
    model = read_model_file(tmp_path / "plain.onnx")
    assert version_of(model.proto) == 21
    np.testing.assert_array_equal(ran(model.proto, FEED), ran(plain, FEED))
    assert b"spare" not in model.proto.SerializeToString()  # ONNX Runtime would complain of it at each start


@pytest.mark.parametrize("take", [True, False])
def test_values_of_two_branches_may_have_the_same_name(take: bool, tmp_path: Path) -> None:
    plain = branched(16)
    branches = {a.name: a.g for a in plain.graph.node[0].attribute}
    own = helper.make_node("ReduceMean", ["x"], ["mean"], axes=[0], keepdims=1)  # over another axis than the other one
    repeat = numpy_helper.from_array(np.array([2, 8]), "repeat")
    grown = helper.make_node("Expand", ["mean", "repeat"], ["no"])
    other = branches["else_branch"]
    del other.node[:], other.initializer[:]
    other.node.extend([own, grown])
    other.initializer.append(repeat)
    onnx.save(plain, tmp_path / "plain.onnx")
    model = read_model_file(tmp_path / "plain.onnx")
    assert version_of(model.proto) == 21
    feed = {**FEED, "take": np.array(take)}
    np.testing.assert_array_equal(ran(model.proto, feed), ran(plain, feed))


def test_four_bits_take_half_a_byte_there(tmp_path: Path) -> None:
    onnx.save(branched(16), tmp_path / "plain.onnx")
    anybit.adopt(tmp_path / "plain.onnx", tmp_path / "m.onnx", sensitive="same")
    anybit.export(tmp_path / "m.onnx", tmp_path / "w4.onnx", weights=4, activations=32)
    stored = onnx.load(tmp_path / "w4.onnx").graph.initializer
    assert sum(t.data_type == TensorProto.INT4 for t in stored) == 3
    session = anybit.load(tmp_path / "m.onnx")
    session.set_bits(weights=4, activations=32)
    want = session.run(FEED)
    np.testing.assert_allclose(ran(onnx.load(tmp_path / "w4.onnx"), FEED), want, rtol=1e-5, atol=1e-6)


def test_what_means_something_else_leaves_a_file_as_it_is(tmp_path: Path) -> None:
    scales = helper.make_node("Constant", [], ["scales"], value_floats=[1.0, 2.0])
    plain = branched(16, [scales, helper.make_node("Resize", ["a", "", "scales"], ["larger"], mode="nearest")])
    onnx.save(plain, tmp_path / "plain.onnx")
    model = read_model_file(tmp_path / "plain.onnx")
    assert version_of(model.proto) == 16
    np.testing.assert_array_equal(ran(model.proto, FEED), ran(plain, FEED))
