"""Graphs with control flow and with recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from stranger_builder import Cases, Net

LOOPS = Cases()


def branch(net: Net, name: str, value: str, before: int, after: int) -> onnx.GraphProto:
    """A subgraph with a weight of its own, which takes a value from outside."""
    inner = Net(int(net.rng.integers(1 << 30)))
    inner.count = 1000 + 100 * len(name)  # names of a subgraph must not be those around it
    y = inner.node("Relu", inner.node("Add", inner.dense(value, before, after), inner.weight(after)))
    inner.output(y)
    return inner.graph(name)


@LOOPS.add("an If with a layer in each branch, its condition an input")
def if_with_layers(net: Net) -> None:
    x = net.dense(net.x(4, 16), 16, 12)
    rate = net.input("sr", np.array(16000, np.int64))
    fast = net.node("Equal", rate, net.hold(np.array(16000, np.int64)))
    branches = {"then_branch": branch(net, "then", x, 12, 8), "else_branch": branch(net, "otherwise", x, 12, 8)}
    net.output(net.dense(net.node("If", fast, **branches), 8, 6))


@LOOPS.add("everything inside the branches of one If")
def if_around_everything(net: Net) -> None:
    x = net.x(4, 16)
    rate = net.input("sr", np.array(8000, np.int64))
    fast = net.node("Equal", rate, net.hold(np.array(16000, np.int64)))
    branches = {"then_branch": branch(net, "then", x, 16, 8), "else_branch": branch(net, "otherwise", x, 16, 8)}
    net.output(net.node("If", fast, **branches))


def made(net: Net, value: Any) -> str:
    """A constant that a node makes."""
    name: str = net.node("Constant", value=numpy_helper.from_array(value))
    return name


@LOOPS.add("an LSTM in both branches of an If inside an If, its gates put in order by Slice and Concat")
def lstm_in_nested_branches(net: Net) -> None:
    x = net.x(5, 2, 8)
    rate = net.input("sr", np.array(16000, np.int64))
    fast = net.node("Equal", rate, net.hold(np.array(16000, np.int64)))
    outer = Net(8)
    outer.count = 4000
    shared = [made(outer, outer.draw(48, size, spread=0.3)) for size in (10, 12)]
    y = outer.node("Relu", outer.dense(x, 8, 10))
    many = outer.node("Greater", rate, outer.hold(np.array(8000, np.int64)))
    inner = {}
    for number, way in enumerate(("then_branch", "else_branch")):
        cell = Net(9)
        cell.count = 5000 + 500 * number
        held = []
        for weight in shared:
            ends = [[made(cell, np.array([n])) for n in pair] for pair in ((0, 12), (36, 48), (12, 36))]
            parts = [cell.node("Slice", weight, *pair, made(cell, np.array([0]))) for pair in ends]
            held.append(cell.node("Unsqueeze", cell.node("Concat", *parts, axis=0), made(cell, np.array([0]))))
        last = cell.node("LSTM", y, *held, hidden_size=12, n=2)[1]
        cell.output(cell.node("Squeeze", last, made(cell, np.array([0]))))
        inner[way] = cell.graph(way)
    outer.output(outer.dense(outer.node("If", many, **inner), 12, 6))
    plain = Net(10)
    plain.count = 7000
    first = plain.node("ReduceMean", x, axes=[0], keepdims=0)
    plain.output(plain.dense(first, 8, 6))
    net.output(net.node("If", fast, then_branch=outer.graph("deep"), else_branch=plain.graph("flat")))


@LOOPS.add("a Loop with a layer inside and another weight from outside")
def loop_with_layers(net: Net) -> None:
    outer = net.weight_in(12, 12)
    start = net.node("Tanh", net.dense(net.x(4, 16), 16, 12))
    inner = Net(5)
    inner.count = 2000
    more = inner.node("Identity", "go_on")
    y = inner.node("Tanh", inner.node("Add", inner.node("MatMul", "state", outer), inner.dense("state", 12, 12)))
    inner.inputs = [
        helper.make_tensor_value_info("turn", TensorProto.INT64, []),
        helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
        helper.make_tensor_value_info("state", TensorProto.FLOAT, [4, 12]),
    ]
    inner.output(more, [], TensorProto.BOOL)
    inner.output(y, [4, 12])
    inner.output(inner.node("Identity", y), [4, 12])
    times, true = net.hold(np.array(3, np.int64)), net.hold(np.array(True))
    last, all_of_them = net.node("Loop", times, true, start, body=inner.graph("body"), n=2)
    net.output(net.dense(last, 12, 6))
    net.output(all_of_them)


@LOOPS.add("a Loop that reads a value of a layer outside, transposed, which feeds another layer outside too")
def loop_reads_what_is_turned(net: Net) -> None:
    x = net.node("Transpose", net.node("Relu", net.dense(net.x(4, 16), 16, 12)), perm=[1, 0])
    inner = Net(6)
    inner.count = 3000
    inner.inputs = [
        helper.make_tensor_value_info("turn", TensorProto.INT64, []),
        helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
        helper.make_tensor_value_info("state", TensorProto.FLOAT, [4]),
    ]
    inner.output(inner.node("Identity", "go_on"), [], TensorProto.BOOL)
    inner.output(inner.node("Tanh", inner.node("Add", "state", inner.node("Gather", x, "turn", axis=0))), [4])
    times, true = net.hold(np.array(12, np.int64)), net.hold(np.array(True))
    last = net.node("Loop", times, true, net.hold(np.zeros(4, np.float32)), body=inner.graph("body"))
    sides = net.node("ReduceSum", last)
    first = net.node("Slice", x, *(net.hold(np.array([n])) for n in (0, 6, 0)))
    net.output(net.node("Add", net.dense(first, 4, 6), sides))


# Recurrent layers

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def recurrent(net: Net, kind: str, x: str, inputs: int, hidden: int, *, both: bool = False, extra: Sequence[str] = (),
              **attributes: Any) -> list[str]:  # fmt: skip
    """A recurrent layer with a bias; returns the names of its outputs."""
    ways, gates = (2 if both else 1), GATES[kind] * hidden
    held = [net.hold(net.draw(ways, gates, size, spread=1 / np.sqrt(hidden))) for size in (inputs, hidden)]
    bias = net.hold(net.draw(ways, 2 * gates, spread=0.2))
    found: list[str] = net.node(
        kind, x, *held, bias, *extra, hidden_size=hidden, n=3 if kind == "LSTM" else 2,
        direction="bidirectional" if both else "forward", **attributes,
    )  # fmt: skip
    return found


def tail(net: Net, y: str, hidden: int, ways: int = 1) -> None:
    """From time, way, batch, hidden to a layer that every step goes through."""
    y = net.node("Transpose", net.probe(y), perm=[0, 2, 1, 3])
    y = net.node("Reshape", y, net.hold(np.array([0, 0, ways * hidden])))
    net.output(net.dense(y, ways * hidden, 6))


@LOOPS.add("an LSTM of fixed length")
def lstm(net: Net) -> None:
    tail(net, recurrent(net, "LSTM", net.x(7, 2, 8), 8, 12)[0], 12)


@LOOPS.add("an LSTM of free length that goes both ways")
def lstm_both_ways(net: Net) -> None:
    x = net.x(7, 2, 8, declared=["time", "batch", 8])
    tail(net, recurrent(net, "LSTM", x, 8, 12, both=True)[0], 12, 2)


@LOOPS.add("an LSTM whose state is an input and an output")
def lstm_with_state(net: Net) -> None:
    x = net.x(5, 1, 8, declared=["time", 1, 8])
    state = [net.input(name, net.draw(1, 1, 12, spread=0.5)) for name in ("h", "c")]
    y, h, c = recurrent(net, "LSTM", x, 8, 12, extra=["", *state])
    tail(net, y, 12)
    net.output(h)
    net.output(c)


@LOOPS.add("an LSTM with lengths, with peepholes and other functions than usual")
def lstm_with_everything(net: Net) -> None:
    lengths = net.input("lengths", np.array([7, 4], np.int32), ["batch"])
    x = net.x(7, 2, 8, declared=["time", "batch", 8])
    zero = net.hold(np.zeros((1, 2, 12), np.float32))
    extra = [lengths, zero, zero, net.hold(net.draw(1, 36, spread=0.2))]
    tail(net, recurrent(net, "LSTM", x, 8, 12, extra=extra, activations=["HardSigmoid", "Tanh", "Relu"])[0], 12)


@LOOPS.add("two LSTM layers with weights behind Transpose and Unsqueeze, behind convolutions")
def convolutions_and_lstm(net: Net) -> None:
    y = net.node("Relu", net.conv(net.x(1, 1, 8, 20, declared=[1, 1, 8, "width"]), 1, 4))
    y = net.node("MaxPool", y, kernel_shape=[8, 1], strides=[8, 1])
    y = net.node("Transpose", net.node("Squeeze", y, net.hold(np.array([2]))), perm=[2, 0, 1])
    for inputs in (4, 10):
        held = [net.node("Unsqueeze", net.node("Transpose", net.weight(n, 40), perm=[1, 0]), net.hold(np.array([0])))
                for n in (inputs, 10)]  # fmt: skip
        y = net.node("Squeeze", net.node("LSTM", y, *held, hidden_size=10), net.hold(np.array([1])))
    net.output(net.node("Softmax", net.dense(y, 10, 9), axis=-1))


@LOOPS.add("a GRU of free length, with the reset in front")
def gru(net: Net) -> None:
    tail(net, recurrent(net, "GRU", net.x(7, 2, 8, declared=["time", "batch", 8]), 8, 12)[0], 12)


@LOOPS.add("a GRU with the reset behind, both ways, only its last state used")
def gru_last_state(net: Net) -> None:
    _, last = recurrent(net, "GRU", net.x(7, 2, 8), 8, 12, both=True, linear_before_reset=1)
    y = net.node("Reshape", net.node("Transpose", net.probe(last), perm=[1, 0, 2]), net.hold(np.array([0, 24])))
    net.output(net.dense(y, 24, 6))


@LOOPS.add("a plain recurrent layer")
def rnn(net: Net) -> None:
    tail(net, recurrent(net, "RNN", net.x(7, 2, 8, declared=["time", "batch", 8]), 8, 12)[0], 12)
