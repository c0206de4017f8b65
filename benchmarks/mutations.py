"""Ways to break a file that know what is in it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import onnx
from google.protobuf.descriptor import FieldDescriptor
from onnx import TensorProto, helper, numpy_helper

Rng = np.random.Generator

VALUES: list[Any] = [
    None, True, -1, 0, 1, 2, 7, 99, 2**31, 2**62, 2**63, 10**30, 1e300, -0.5, 1e-320, "", "x" * 70_000, "nan", [], [[]],
    {}, {"": {}}, [1, 2], ["a"], [0.0, -1.0], "\x1b[2J\x07", "../x", "a.weight",
]  # fmt: skip


def pick(rng: Rng, options: Any) -> Any:
    return options[int(rng.integers(0, len(options)))]


def damaged(data: bytes, rng: Rng) -> bytes:
    """Change a few bytes: flip bits, write others, cut out, put in, repeat, cut off the end; often near the front."""
    out = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        if not out:
            break
        reach = len(out) if rng.random() < 0.5 else min(len(out), 4000)
        at, length = int(rng.integers(0, reach)), int(rng.integers(1, 9))
        match int(rng.integers(0, 7)):
            case 0 | 1:
                out[at] ^= 1 << int(rng.integers(0, 8))
            case 2:
                out[at : at + length] = rng.bytes(length)
            case 3:
                del out[at : at + length]
            case 4:
                out[at:at] = rng.bytes(length)
            case 5:
                out[at:at] = out[at : at + 8 * length]
            case _:
                del out[max(1, at) :]
    return bytes(out)


def changed(value: Any, rng: Rng) -> Any:
    """Replace, repeat or remove something deep in a JSON value."""
    if isinstance(value, dict | list) and value and rng.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = pick(rng, keys)
        chance = rng.random()
        if chance < 0.1:
            del value[key]
        elif chance < 0.2 and isinstance(value, list):
            value.append(copy.deepcopy(value[key]))
        else:
            value[key] = changed(value[key], rng)
        return value
    return pick(rng, VALUES)


# ONNX models

_TEXTS = FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES


def reshaped_graph(model: onnx.ModelProto, rng: Rng) -> onnx.ModelProto:
    """Return a model with a few fields changed, anywhere in its messages."""
    out = onnx.ModelProto()
    out.CopyFrom(model)
    for _ in range(int(rng.integers(1, 4))):
        message: Any = out.graph if rng.random() < 0.95 else out
        while True:
            fields = message.ListFields()
            if not fields:
                break
            field, value = pick(rng, fields)
            inside = field.type == FieldDescriptor.TYPE_MESSAGE
            if inside and rng.random() < 0.9:
                message = pick(rng, value) if field.is_repeated else value
                continue
            _change(message, field, value, rng)
            break
    return out


def _change(message: Any, field: FieldDescriptor, value: Any, rng: Rng) -> None:
    """Change one field: clear it, repeat an entry, or give it another value of its type."""
    chance = rng.random()
    if chance < 0.15:
        message.ClearField(field.name)
    elif field.is_repeated and chance < 0.5:
        at = int(rng.integers(0, len(value)))
        if chance < 0.3:
            del value[at]
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            value.add().CopyFrom(value[at])
        else:
            value.append(value[at])
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        message.ClearField(field.name)
    elif field.is_repeated:
        value[int(rng.integers(0, len(value)))] = _other(field, value[0], rng)
    else:
        setattr(message, field.name, _other(field, value, rng))


def _other(field: FieldDescriptor, value: Any, rng: Rng) -> Any:
    if field.type in _TEXTS:
        text = value if isinstance(value, bytes) else value.encode()
        if field.name == "raw_data" and len(text) >= 4 and rng.random() < 0.5:
            at = int(rng.integers(0, len(text) // 4)) * 4
            number = np.float32(pick(rng, [np.nan, np.inf, -np.inf, 3e38, 1e-40])).tobytes()
            return text[:at] + number + text[at + 4 :]
        names = [b"x", b"a.weight", b"relu", b"y", b"", b"\x1b[31m", b"n" * 5000, b"Loop", b"Pow", b"Tile", b"Expand"]
        found = pick(rng, names) if rng.random() < 0.7 else damaged(text or b"a", rng)
        return found if isinstance(value, bytes) else found.decode(errors="replace")
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return pick(rng, [0.0, -1.0, np.nan, np.inf, 1e30, 1e-40])
    if field.type == FieldDescriptor.TYPE_ENUM:
        return pick(rng, list(field.enum_type.values_by_number))
    wide = field.type in (FieldDescriptor.TYPE_INT64,)
    return pick(rng, [0, 1, 2, 3, -1, 5, 16, 255, 65536, 2**31 - 1, *([2**40, -(2**63), 2**63 - 1] if wide else [])])


def spliced(model: onnx.ModelProto, rng: Rng) -> onnx.ModelProto:
    """Return a model with a value whose size is hidden, added to one that the network computes."""
    out = onnx.ModelProto()
    out.CopyFrom(model)
    graph = out.graph
    at = int(rng.integers(1, len(graph.node) + 1))
    victims = [name for node in graph.node[:at] for name in node.output]
    size = pick(rng, [1, 4, 1000, 30_000, 10**6, 2**31, 2**40])
    names = [f"hidden.{i}" for i in range(9)]

    def constant(values: Any, kind: Any, name: str) -> str:
        graph.initializer.append(numpy_helper.from_array(np.array(values, kind), name))
        return name

    root = constant([float(size) ** 0.5], np.float32, names[0])
    two = constant([2.0], np.float32, names[1])
    nodes = [helper.make_node("Pow", [root, two], [names[2]])]
    if rng.random() < 0.3:  # the size hangs on what comes in
        nodes.append(helper.make_node("ReduceMax", [pick(rng, victims)], ["hidden.max"], keepdims=0))
        nodes.append(helper.make_node("Mul", [names[2], "hidden.max"], ["hidden.scaled"]))
        names[2] = "hidden.scaled"
    nodes.append(helper.make_node("Cast", [names[2]], [names[3]], to=TensorProto.INT64))
    match int(rng.integers(0, 4)):
        case 0:
            nodes.append(helper.make_node("ConstantOfShape", [names[3]], [names[4]]))
        case 1:
            nodes.append(helper.make_node("Tile", [root, names[3]], [names[4]]))
        case 2:
            nodes.append(helper.make_node("Expand", [root, names[3]], [names[4]]))
        case _:
            zero, one = constant(0, np.int64, names[5]), constant(1, np.int64, names[6])
            nodes.append(helper.make_node("Squeeze", [names[3]], [names[7]]))
            nodes.append(helper.make_node("Range", [zero, names[7], one], [names[8]]))
            nodes.append(helper.make_node("Cast", [names[8]], [names[4]], to=TensorProto.FLOAT))
    nodes.append(helper.make_node("ReduceSum", [names[4]], ["hidden.sum"], keepdims=0))
    victim = pick(rng, [name for name in graph.node[-1].input if not name.endswith(("weight", "bias"))] or victims)
    nodes.append(helper.make_node("Add", [victim, "hidden.sum"], ["hidden.end"]))
    last = graph.node[-1]
    last.input[:] = ["hidden.end" if name == victim else name for name in last.input]
    before = list(graph.node)[:-1]
    del graph.node[:]
    graph.node.extend([*before, *nodes, last])
    return out
