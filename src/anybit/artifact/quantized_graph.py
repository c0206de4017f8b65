"""A plan executed in ONNX: from the master to a quantized model at any width, with standard operators only.

Weights become `codes -> DequantizeLinear`, activations `QuantizeLinear -> Clip -> DequantizeLinear`. ONNX Runtime
fuses what stands between a DequantizeLinear and a QuantizeLinear into integer kernels if three things hold, and
each of them costs something here:

- activations are unsigned bytes: a grid with negative codes has its zero at code 128;
- grids narrower than 8 bits are cut by a Clip on the codes, not on the values;
- no activation function is left in front that the Clip already does (a ReLU, a ReLU6).

Where a layer's weight stays in floating point the opposite is wanted: between the two operators ONNX Runtime would
round that weight to 8 bits on its own. There, and beyond 8 bits, rounding is spelled out as Div, Round, Clip, Mul.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

from anybit.artifact.master import Master
from anybit.artifact.model import OnnxModel, all_graphs, set_nodes
from anybit.artifact.weight_nodes import (
    largest,
    transposed,
    unsigned,
    weight_nodes,
    weight_tensors,
    with_one_zero,
)
from anybit.graph.onnx_nodes import OPSET
from anybit.plan.codes import Codes
from anybit.plan.grid import Grid
from anybit.plan.numbers import Numbers

LAYERS = {"Conv", "ConvTranspose", "Gemm", "MatMul"}
"""Operators whose second input can be a weight."""

PASSING = {
    "Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "MaxPool", "Slice", "Gather", "Split",
    "Concat", "Expand", "Tile", "Pad", "DepthToSpace", "SpaceToDepth",
}  # fmt: skip
"""Operators that hand values on as they are; ONNX Runtime moves quantization through some of them."""

MIDDLE = 128
"""The byte that stands for zero in a grid with negative codes."""

SATURATES = 2**15
"""Processors without VNNI add two products in 16 bits, unless they are told not to."""


def quantized_graph(
    master: Master, numbers: Numbers, *, packed: bool, anywhere: bool = False
) -> tuple[OnnxModel, bool]:
    """Return the model at these numbers, and whether it needs exact sums (`session.x64quantprecision`).

    `packed` stores weights of up to 4 bits as INT4: half the size, a little slower to load. `anywhere` stores weights
    whose sums could saturate as unsigned bytes: the same numbers, exact on every processor without any option.
    """
    plan, model = master.plan, master.model.copy()
    graph = model.graph
    codes = {plan.weight(name).place: with_one_zero(numbers.codes(name)) for name in numbers.weights}
    grids = {plan.activation(name).place: numbers.grid(name) for name in numbers.activations}
    narrow = {plan.activation(name).place for name in numbers.activations if numbers.widths[name] <= 8}
    nodes = _biases(model, numbers)
    _transpose(graph, codes)
    new = next(o.version for o in model.proto.opset_import if o.domain == "") >= OPSET
    packed = packed and new
    # Before that version only bytes can be dequantized by one operator.
    bytewise = {name: found for name, found in codes.items() if new or found.values.dtype == np.int8}
    flow = Flow(model, bytewise, grids, narrow)
    saturates = bool(flow.saturating())
    if saturates and anywhere:
        wide = {weight for _, weight in flow.saturating()}
        codes = {name: unsigned(found) if name in wide else found for name, found in codes.items()}
        saturates = False
    elif saturates:
        # With that option ONNX Runtime makes signed bytes unsigned, and fails where two layers share them.
        uses = Counter(name for node in graph.node for name in node.input)
        codes = {name: unsigned(found) if uses[name] > 1 else found for name, found in codes.items()}
    for weight in plan.weights:
        name = weight.place
        if name not in codes:
            graph.initializer.append(model.tensor(master.weights[weight.name], name))
            continue
        graph.initializer.extend(weight_tensors(codes[name], name, model, packed=packed, fused=name in flow.fused))
        nodes += weight_nodes(codes[name], name, packed=packed, fused=name in flow.fused)
    for node in graph.node:
        nodes += _again_on_bytes(graph, node, flow)
        nodes += _with_points(graph, node, flow)
    set_nodes(graph, nodes)
    return model, saturates


class Flow:
    """Which layers multiply whole numbers, and where those come from.

    `whole` are the activations that become bytes and stay so up to the layers they feed, `fused` the weights of those
    layers, `inputs` the grid that each such layer's first input is on.
    """

    def __init__(self, model: OnnxModel, codes: dict[str, Codes], grids: dict[str, Grid], narrow: set[str]) -> None:
        self.codes, self.grids = codes, grids
        self._model = model
        graph = model.graph
        self._makers = {value: node for node in graph.node for value in node.output}
        self._held = {tensor.name: tensor for tensor in graph.initializer}
        layers = [node for node in graph.node if node.op_type in LAYERS]
        # A constant weight that is not in codes stays in floating point.
        floating = [node for node in layers if node.input[1] not in codes and node.input[1] not in self._makers]
        # ONNX Runtime moves bytes through operators that hand them on, and crashes where a branch or a loop reads them.
        inner = [v for part in all_graphs(graph) if part is not graph for node in part.node for v in node.input if v]
        self.whole = narrow.difference(*map(self._sources, [*(node.input[0] for node in floating), *inner]))
        self.inputs: dict[tuple[str, str], str] = {}
        for node in layers:
            sources = self._sources(node.input[0])
            same = len({(float(grids[v].scale), float(grids[v].zero), grids[v][2:]) for v in sources & self.whole}) == 1
            if node.input[1] in codes and sources <= self.whole and same:
                self.inputs[node.input[0], node.input[1]] = min(sources)
        self.fused = {weight for _, weight in self.inputs}

    def saturating(self) -> list[tuple[str, str]]:
        """Return the inputs and weights of layers in which the sum of two products could leave 16 bits."""
        return [
            layer
            for layer, source in self.inputs.items()
            if 2 * largest(self.codes[layer[1]]) * _highest_byte(self.grids[source]) >= SATURATES
        ]

    def _passes(self, node: NodeProto) -> bool:
        if node.op_type == "Pad" and len(node.input) > 2 and node.input[2]:
            filling = self._held.get(node.input[2])  # zero is on every grid, other numbers need not be
            return filling is not None and not self._model.array(filling).any()
        return node.op_type in PASSING

    def _sources(self, value: str) -> set[str]:
        """Return the values that a value is put together from unchanged, back to points or to whatever made them."""
        todo, found = [value], set()
        while todo:
            value = todo.pop()
            node = self._makers.get(value)
            if value in self.grids or node is None or not self._passes(node):
                found.add(value)
            else:
                todo += node.input if node.op_type == "Concat" else node.input[:1]
        return found


def _offset(grid: Grid) -> int:
    """Return what is added to a code to make it a byte."""
    return MIDDLE if grid.low < 0 else 0


def _highest_byte(grid: Grid) -> int:
    return grid.high + _offset(grid)


# Weights


def _transpose(graph: onnx.GraphProto, codes: dict[str, Codes]) -> None:
    """Turn codes around where the graph would turn the weight around: it keeps the two operators adjacent."""
    users: dict[str, list[NodeProto]] = {name: [] for name in codes}
    for node in graph.node:
        for name in users.keys() & set(node.input):
            users[name].append(node)
    turned: dict[str, str] = {}
    for name, nodes in users.items():
        perms = {tuple(a.ints) for node in nodes for a in node.attribute if node.op_type == "Transpose"}
        if len(perms) == 1 and all(node.op_type == "Transpose" for node in nodes):
            codes[name] = transposed(codes[name], perms.pop())
            turned |= {node.output[0]: name for node in nodes}
    kept = [node for node in graph.node if not turned.keys() & set(node.output)]
    for node in kept:
        node.input[:] = [turned.get(name, name) for name in node.input]
    set_nodes(graph, kept)


def _biases(model: OnnxModel, numbers: Numbers) -> list[NodeProto]:
    """Put the plan's biases into the graph, as whole numbers where they are that; return the nodes for it."""
    graph = model.graph
    held = {tensor.name: tensor for tensor in graph.initializer}
    nodes: list[NodeProto] = []
    for name in numbers.biases:
        place, bias = numbers.plan.bias(name).place, numbers.bias(name)
        if bias.codes is None or bias.unit is None:
            model.fill(held[place], bias.values)
            continue
        graph.initializer.append(model.tensor(bias.codes, f"{place}.codes"))
        graph.initializer.append(model.tensor(bias.unit, f"{place}.scale"))
        inputs = [f"{place}.codes", f"{place}.scale"]
        nodes.append(helper.make_node("DequantizeLinear", inputs, [place], name=f"{place}/DequantizeLinear", axis=0))
        graph.initializer.remove(held[place])
    return nodes


# Activations


def _again_on_bytes(graph: onnx.GraphProto, node: NodeProto, flow: Flow) -> list[NodeProto]:
    """Put what reaches a layer by way of a reshape or a concatenation on the grid that it is on already.

    It changes nothing, and shows ONNX Runtime that the layer multiplies whole numbers.
    """
    source = flow.inputs.get((node.input[0], node.input[1])) if node.op_type in LAYERS else None
    if source is None or node.input[0] in flow.whole:
        return []
    value, result = node.input[0], f"{node.input[0]}/{node.output[0]}"
    node.input[0] = result
    return _on_bytes(graph, result, value, flow.grids[source])


def _with_points(graph: onnx.GraphProto, node: NodeProto, flow: Flow) -> list[NodeProto]:
    """Return a node followed by the rounding of its outputs; a function that the rounding does anyway is left out."""
    grids, whole = flow.grids, flow.whole
    found = [value for value in node.output if value in grids]
    if not found:
        return [node]
    if len(node.output) == 1 and _is_done_by(grids[found[0]], node, graph):
        nodes, sources = [], {found[0]: node.input[0]}
    else:
        nodes, sources = [node], {value: f"{value}.exact" for value in found}
        node.output[:] = [sources.get(value, value) for value in node.output]
    for value, source in sources.items():
        nodes += (_on_bytes if value in whole else _spelled_out)(graph, value, source, grids[value])
    return nodes


def _is_done_by(grid: Grid, node: NodeProto, graph: onnx.GraphProto) -> bool:
    """Tell whether a node only cuts off what the grid cuts off too."""
    least, most = (float((code - grid.zero) * grid.scale) for code in (grid.low, grid.high))
    if node.op_type == "Relu":
        return least >= 0
    if node.op_type != "Clip":
        return False
    held = {tensor.name: tensor for tensor in graph.initializer}
    bounds = [-np.inf, np.inf]
    for i, name in enumerate(node.input[1:3]):
        if name and (name not in held or math.prod(held[name].dims) != 1):
            return False
        if name:
            bounds[i] = float(numpy_helper.to_array(held[name]))
    slack = 1e-6 * (most - least)  # six bits' worth of scale times its highest code may round to a bit above six
    return bounds[0] <= least + slack and most - slack <= bounds[1]


def _on_bytes(graph: onnx.GraphProto, value: str, source: str, grid: Grid) -> list[NodeProto]:
    """Return the operators that put a value on a grid of at most 8 bits: to bytes and back."""
    offset = _offset(grid)
    scale = _constant(graph, f"{value}.scale", grid.scale.astype(np.float32))
    zero = _constant(graph, f"{value}.zero", np.asarray(grid.zero + offset, np.uint8))
    steps = [("QuantizeLinear", [scale, zero])]
    ends = grid.low + offset, grid.high + offset
    if ends != (0, 255):
        bounds = [np.asarray(end, np.uint8) for end in ends]
        names = [_constant(graph, f"{value}.{end}", b) for end, b in zip(("low", "high"), bounds, strict=True)]
        steps.append(("Clip", names))
    return _chain([*steps, ("DequantizeLinear", [scale, zero])], source, value)


def _spelled_out(graph: onnx.GraphProto, value: str, source: str, grid: Grid) -> list[NodeProto]:
    """Return the operators that put a value on a grid in floating point."""
    scale = _constant(graph, f"{value}.scale", grid.scale.astype(np.float32))
    bounds = [np.asarray(end - grid.zero, np.float32) for end in (grid.low, grid.high)]
    names = [_constant(graph, f"{value}.{end}", b) for end, b in zip(("low", "high"), bounds, strict=True)]
    return _chain([("Div", [scale]), ("Round", []), ("Clip", names), ("Mul", [scale])], source, value)


def _chain(steps: list[tuple[str, list[str]]], source: str, result: str) -> list[NodeProto]:
    names = [source, *(f"{result}.{i}" for i in range(1, len(steps))), result]
    return [
        helper.make_node(operator, [names[i], *more], [names[i + 1]], name=f"{result}/{operator}")
        for i, (operator, more) in enumerate(steps)
    ]


def _constant(graph: onnx.GraphProto, name: str, value: np.ndarray[Any, Any]) -> str:
    graph.initializer.append(numpy_helper.from_array(value, name))
    return name
