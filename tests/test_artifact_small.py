"""A master made by hand, small enough to check everything about it."""

from __future__ import annotations

import dataclasses
import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from anybit.artifact import protobuf_scan
from anybit.artifact.header import DIGEST, KEY, Header, write_header
from anybit.artifact.master import write_master
from anybit.artifact.session import load
from anybit.plan.points import Activation, Bias, Plan, Point, Weight
from anybit.spec import Range


def _model() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    tensors = {
        "a.weight": rng.normal(size=(4, 1, 3, 3)),
        "a.bias": rng.normal(size=4),
        "b.weight": rng.normal(size=(3, 64)),
        "b.bias": rng.normal(size=3),
    }
    nodes = [
        helper.make_node("Identity", ["x"], ["x_"], name="in"),
        helper.make_node(
            "Conv", ["x_", "a.weight", "a.bias"], ["conv"], name="conv", group=1, kernel_shape=[3, 3],
            strides=[1, 1], pads=[0, 0, 0, 0], dilations=[1, 1],
        ),
        helper.make_node("Relu", ["conv"], ["relu"], name="relu"),
        helper.make_node("Flatten", ["relu"], ["flat"], name="flat", axis=1),
        helper.make_node("Gemm", ["flat", "b.weight", "b.bias"], ["y"], name="gemm", transB=1),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 1, 6, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in tensors.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


MODEL = _model()
PLAN = Plan(
    points=(
        Activation("x", "input", "x_", ranges=((32, Range(-3.0, 3.0, "given")),), floor=8),
        Weight("a.weight"),
        Activation("relu", "activation", ranges=((32, Range(0.0, 9.0, "guessed")),)),
        Weight("b.weight"),
    ),
    biases=(Bias("a.bias", "a.weight", "x"), Bias("b.bias", "b.weight", "relu")),
)
HEADER = Header(PLAN, about={"by": "hand"})


def header_with(**changes: Any) -> Header:
    """Return the header with other fields; those of the plan may be among them."""
    ours = {key: changes.pop(key) for key in ("points", "biases", "left") if key in changes}
    return dataclasses.replace(HEADER, plan=dataclasses.replace(PLAN, **ours), **changes)


def with_weights(**changes: Any) -> tuple[Point, ...]:
    """Return the points of the plan, its weights changed."""
    return tuple(dataclasses.replace(p, **changes) if isinstance(p, Weight) else p for p in PLAN.points)


def small_master(folder: Path) -> Path:
    write_master(folder / "small.onnx", MODEL, HEADER)
    return folder / "small.onnx"


def packed(header: Header) -> bytes:
    """Return the bytes of a master."""
    with tempfile.TemporaryDirectory() as folder:
        write_master(Path(folder) / "m.onnx", MODEL, header)
        return (Path(folder) / "m.onnx").read_bytes()


def write(path: Path, *, model: onnx.ModelProto = MODEL, text: str | None = None) -> Path:
    """Write a master with a digest that fits, whatever it holds."""
    data = model.SerializeToString()
    text = write_header(HEADER) if text is None else text
    file = io.BytesIO(data)
    seal = protobuf_scan.digest(file, protobuf_scan.scan(file, len(data)), text)
    path.write_bytes(data + protobuf_scan.entry(KEY, text) + protobuf_scan.entry(DIGEST, seal))
    return path


def test_the_small_master_is_one(tmp_path: Path) -> None:
    assert packed(HEADER) == small_master(tmp_path).read_bytes()
    assert write(tmp_path / "other.onnx").read_bytes() == small_master(tmp_path).read_bytes()
    assert load(tmp_path / "other.onnx").run(np.zeros((2, 1, 6, 6))).shape == (2, 3)
