"""Fill the view from an ONNX model whose constants are initializers. Values are called as in the file. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto

from anybit.graph import view
from anybit.graph.onnx_nodes import attributes, computed, outlined, subgraphs, used_by
from anybit.graph.view import Array, Follow, Graph, Node, Norm, Shape

Constants = Mapping[str, Array]


def read_onnx(proto: onnx.ModelProto, constants: dict[str, Array]) -> Graph:
    """Return the view of a model.

    Args:
        proto: The model; large initializers may be without their numbers.
        constants: All initializers, by name.
    """
    constants = {name: array for name, array in constants.items() if array.dtype.kind != "O"}  # text is never computed
    graph = Graph(constants=constants)
    graph.inputs = [value.name for value in proto.graph.input if value.name not in constants]
    graph.outputs = [value.name for value in proto.graph.output]
    kinds = _infer(proto, graph)
    graph.floating = {name for name, kind in kinds.items() if kind == TensorProto.FLOAT and name not in constants}
    graph.shapes |= {name: array.shape for name, array in constants.items()}
    sums = _sums_behind(proto.graph, constants)
    merged = {add.output[0] for add in sums.values()}
    for node in proto.graph.node:
        if node.output and node.output[0] not in merged:
            graph.nodes += _read(node, graph, sums)
    return graph


def _infer(proto: onnx.ModelProto, graph: Graph) -> dict[str, int]:
    """Note the shapes of all values as far as ONNX can tell, and return their types."""
    probe, _ = outlined(proto, lambda tensor: tensor.data_location == TensorProto.EXTERNAL)
    try:
        found = onnx.shape_inference.infer_shapes(probe, data_prop=True)
    except Exception:  # the C++ side raises what it likes; without shapes less can be followed
        found = probe
    kinds = {}
    for value in [*found.graph.input, *found.graph.value_info, *found.graph.output]:
        kind = value.type.tensor_type
        kinds[value.name] = kind.elem_type
        if kind.HasField("shape"):
            graph.shapes[value.name] = tuple(_size(dim) for dim in kind.shape.dim)
    return kinds


def _size(dim: Any) -> int | str | None:
    if dim.HasField("dim_value") and dim.dim_value > 0:
        return int(dim.dim_value)
    return str(dim.dim_param) if dim.dim_param else None


def _sums_behind(graph: onnx.GraphProto, constants: Constants) -> dict[str, NodeProto]:
    """Return for each product with a constant matrix the node that does nothing but add a vector to it."""
    users: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)
    outputs = {value.name for value in graph.output}
    found = {}
    for node in graph.node:
        if node.op_type != "MatMul" or constants.get(node.input[1], np.ones(1)).ndim != 2:
            continue
        (value,) = node.output
        if len(users.get(value, [])) != 1 or value in outputs:
            continue
        (add,) = users[value]
        vector = constants.get(added(add, value)) if add.op_type == "Add" else None
        if vector is not None and vector.shape == (constants[node.input[1]].shape[1],):
            found[value] = add
    return found


def added(add: NodeProto, value: str) -> str:
    """Return what a sum adds to a value."""
    return str(add.input[1] if add.input[0] == value else add.input[0])


def _read(node: NodeProto, graph: Graph, sums: dict[str, NodeProto]) -> list[Node]:
    """Return one operator as nodes of the view, one for each of its results."""
    values = [name for name in node.output if name]
    if node.domain not in ("", "ai.onnx"):
        return [_other(node, value) for value in values]
    if next(subgraphs(node), None) is not None:
        return [*_inside(node, graph, f"{values[0]}/", {}), *(_other(node, value) for value in values)]
    new = Node("other", used_by(node), values[0], values[0], node, name=node.op_type)
    reader = _READERS.get(node.op_type)
    if reader is None or not reader(node, new, graph):
        if node.op_type in _LAYERS:
            _LAYERS[node.op_type](node, new, graph, sums)
        elif not _read_pass(node, new, graph) and node.op_type == "Softmax":
            new.bounds = (0.0, 1.0)
    extra = [_other(node, value) for value in values[1:]]
    if new.kind != "other":  # the other results of a known operator
        for other in extra:
            other.inputs = [new.output]
    if node.op_type == "Split":
        for other in extra:
            other.kind, other.inputs, other.follow = new.kind, new.inputs, new.follow
    return [new, *extra]


def _other(node: NodeProto, value: str) -> Node:
    return Node("other", used_by(node), value, value, node, name=node.op_type)


def _inside(node: NodeProto, graph: Graph, prefix: str, outside: dict[str, list[str]]) -> list[Node]:
    """Return the layers inside branches and loops: their weights are rounded, what they are fed stays as it is.

    `outside` has the layers inside that values around them come from.
    """
    found = []
    for part in subgraphs(node):
        behind = dict(outside)
        for inner in part.node:
            before = list(dict.fromkeys(layer for name in used_by(inner) for layer in behind.get(name, ())))
            if inner.op_type in _LAYERS and inner.output:
                new = Node("other", [], prefix + inner.output[0], prefix + inner.output[0], inner, name=inner.op_type)
                _LAYERS[inner.op_type](inner, new, graph, {})
                weights = new.weights or [name for name in inner.input[1:2] if name in graph.constants]
                own = Node("inside", before, new.output, new.path, node, axis=new.axis, groups=new.groups)
                own.weights = weights
                found.append(own)
                before = [new.output] if weights else before
            nested = _inside(inner, graph, prefix, behind)
            found += nested
            before = [layer.output for layer in nested] or before
            behind |= dict.fromkeys(inner.output, before)
    return found


# Layers


def _conv(node: NodeProto, new: Node, graph: Graph, sums: dict[str, NodeProto]) -> None:
    given = attributes(node)
    new.kind, new.convolution = "layer", True
    new.transposed = node.op_type == "ConvTranspose"
    new.axis, new.groups = int(new.transposed), int(given.get("group", 1))
    new.stride = math.prod(given.get("strides", [1]))
    new.inputs = list(node.input[:3])


def _gemm(node: NodeProto, new: Node, graph: Graph, sums: dict[str, NodeProto]) -> None:
    given = attributes(node)
    if given.get("transA", 0) or given.get("alpha", 1.0) != 1.0 or given.get("beta", 1.0) != 1.0:
        return
    new.kind, new.axis, new.inputs = "layer", 0 if given.get("transB", 0) else 1, list(node.input[:3])


def _matmul(node: NodeProto, new: Node, graph: Graph, sums: dict[str, NodeProto]) -> None:
    weight = graph.constants.get(node.input[1])
    if weight is None or weight.ndim != 2:
        new.kind = "product"
        return
    new.kind, new.axis = "layer", 1
    if new.output in sums:
        add = sums[new.output]
        new.inputs.append(added(add, new.output))
        new.output = new.path = add.output[0]


def _recurrent(node: NodeProto, new: Node, graph: Graph, sums: dict[str, NodeProto]) -> None:
    new.kind, new.axis = "recurrent", 1
    parts = {made.output: made.inputs for made in graph.nodes if made.kind == "concat"}  # one for each direction
    found = [name for whole in node.input[1:3] for name in parts.get(whole, [whole])]
    new.inputs, new.weights = [node.input[0]], [name for name in found if name in graph.constants]
    kinds = attributes(node).get("activations", [])
    new.bounds = (-1.0, 1.0) if not kinds else None


_LAYERS: dict[str, Callable[[NodeProto, Node, Graph, dict[str, NodeProto]], None]] = {
    "Conv": _conv, "ConvTranspose": _conv, "Gemm": _gemm, "MatMul": _matmul,
    "LSTM": _recurrent, "GRU": _recurrent, "RNN": _recurrent,
}  # fmt: skip


# Functions of one value


FUNCTIONS = frozenset({
    "Relu", "LeakyRelu", "Elu", "Celu", "Selu", "ThresholdedRelu", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh",
    "Softplus", "Softsign", "Mish", "Gelu", "Erf", "Exp", "Neg", "Abs", "Sqrt", "Clip", "Pow",
})  # fmt: skip


def _function(node: NodeProto, new: Node, graph: Graph) -> bool:
    rest = [graph.constants.get(name) for name in node.input[1:] if name]
    settings = [array for array in rest if array is not None and array.size == 1]
    if len(settings) != len(rest):  # they are computed
        return False
    new.kind, new.inputs, new.function = "function", [node.input[0]], partial(_entry_by_entry, node, settings)
    new.fused, new.homogeneous = node.op_type in ("Relu", "Clip"), node.op_type in ("Relu", "LeakyRelu")
    new.bounds = view.saturation(new.function)
    new.name = "clamp" if node.op_type == "Clip" else new.name
    return True


def _entry_by_entry(node: NodeProto, settings: list[Array], x: Array) -> Array:
    """Return a function of each entry; where it has no value, that is zero."""
    names = [name for name in node.input if name]
    values = [x, *(array.astype(x.dtype) for array in settings)]
    return np.nan_to_num(computed(node, dict(zip(names, values, strict=True))))


def _arithmetic(node: NodeProto, new: Node, graph: Graph) -> bool:
    new.kind = node.op_type.lower()
    new.inputs = list(node.input[:2])
    return True


# Normalization


def _batch_norm(node: NodeProto, new: Node, graph: Graph) -> bool:
    if any(name not in graph.constants for name in node.input[1:5]):
        return False
    gamma, beta, mean, var = (np.asarray(graph.constants[name], np.float32) for name in node.input[1:5])
    new.kind, new.inputs = "norm", [node.input[0]]
    new.norm = Norm(gamma, beta, mean, var, float(attributes(node).get("epsilon", 1e-5)))
    return True


def _standard(node: NodeProto, new: Node, graph: Graph) -> bool:
    rank = graph.rank(node.input[0])
    last = node.op_type == "LayerNormalization"
    axis = int(attributes(node).get("axis", -1)) % max(rank, 1) if last else 1
    scale = graph.constants.get(node.input[1])
    shift = graph.constants.get(node.input[2]) if len(node.input) > 2 and node.input[2] else None
    if scale is None or not rank or (last and axis != rank - 1):
        return False
    new.kind, new.inputs = "standard", [node.input[0]]
    new.name = {"LayerNormalization": "layer norm", "InstanceNormalization": "instance norm"}.get(
        node.op_type, "group norm"
    )
    new.norm = Norm(scale.reshape(-1), np.zeros(scale.size) if shift is None else shift.reshape(-1), axis=axis)
    return True


def _slopes(node: NodeProto, new: Node, graph: Graph) -> bool:
    slope = graph.constants.get(node.input[1])
    if slope is None or sum(size != 1 for size in slope.shape) > 1:
        return False
    new.kind = "slopes"
    return True


def _concat(node: NodeProto, new: Node, graph: Graph) -> bool:
    rank = graph.rank(new.output)
    new.kind, new.axis = "concat", int(attributes(node).get("axis", 0)) % max(rank, 1)
    return True


def _table(node: NodeProto, new: Node, graph: Graph) -> bool:
    """Read a lookup in a constant: words or letters by their number. What a constant chooses is only cut out."""
    table = graph.constants.get(node.input[0])
    if table is None or table.ndim < 2 or table.dtype.kind != "f" or node.input[1] in graph.constants:
        return False
    if attributes(node).get("axis", 0) % table.ndim:
        return False
    new.kind, new.inputs, new.weights = "table", [node.input[1]], [node.input[0]]
    return True


_READERS: dict[str, Callable[[NodeProto, Node, Graph], bool]] = {
    **dict.fromkeys(FUNCTIONS, _function),
    **dict.fromkeys(("Add", "Sub", "Mul", "Div"), _arithmetic),
    "BatchNormalization": _batch_norm,
    **dict.fromkeys(("LayerNormalization", "InstanceNormalization", "GroupNormalization"), _standard),
    "PRelu": _slopes,
    "Concat": _concat,
    "Gather": _table,
}


# What hands values on, and averages


def _read_pass(node: NodeProto, new: Node, graph: Graph) -> bool:
    """Read an operator that hands values on as they are, or averages them."""
    found = _FOLLOW.get(node.op_type)
    if (
        found is None
        or not node.input
        or (new.inputs[0] not in graph.floating and new.inputs[0] not in graph.constants)
    ):
        return False
    rank = graph.rank(node.input[0])
    before, after = graph.shapes.get(node.input[0], ()), graph.shapes.get(new.output, ())
    given = _Given(attributes(node), list(node.input), graph.constants, rank, before, after)
    follow = found(given)
    if follow is None:
        return False
    linear = node.op_type == "Resize" and given.attributes.get("mode", b"nearest") != b"nearest"
    average = node.op_type in ("AveragePool", "GlobalAveragePool", "ReduceMean") or linear
    new.kind, new.inputs, new.follow = "average" if average else "pass", [node.input[0]], follow
    return True


@dataclass(frozen=True)
class _Given:
    """What is known of a node that hands values on."""

    attributes: dict[str, Any]
    inputs: list[str]
    constants: Constants
    rank: int
    before: Shape
    after: Shape

    def constant(self, index: int) -> Array | None:
        """Return an input if it is a constant."""
        return self.constants.get(self.inputs[index]) if len(self.inputs) > index else None

    def dims(self, values: Any) -> list[int]:
        """Return dimensions counted from the front."""
        return [int(d) % max(self.rank, 1) for d in np.asarray(values).reshape(-1)]


def _reduced(g: _Given) -> Follow | None:
    axes = g.constant(1) if len(g.inputs) > 1 and g.inputs[1] else g.attributes.get("axes")
    if axes is None:
        return lambda d: None
    return view.reduced(g.dims(axes), keep=bool(g.attributes.get("keepdims", 1)))


def _padded(g: _Given) -> Follow | None:
    pads, filling = g.constant(1), g.constant(2)
    mode = g.attributes.get("mode", b"constant")
    if mode == b"constant" and len(g.inputs) > 2 and g.inputs[2] and (filling is None or bool(np.any(filling))):
        return None
    if pads is None:
        return lambda d: None
    axes = g.dims(g.constant(3)) if len(g.inputs) > 3 and g.inputs[3] else list(range(len(pads) // 2))
    return view.except_for(axes[i % len(axes)] for i, width in enumerate(pads) if width)


def _gathered(g: _Given) -> Follow:
    (axis,) = g.dims([g.attributes.get("axis", 0)])
    index = g.constant(1)
    if index is not None and index.ndim == 0:
        return view.reduced([axis], keep=False)
    return view.except_for([axis]) if index is not None and index.ndim == 1 else (lambda d: None)


_FOLLOW: dict[str, Callable[[_Given], Follow | None]] = {
    **dict.fromkeys(("Identity", "Dropout"), lambda g: view.stays),
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), lambda g: view.reshaped(g.before, g.after)),
    "Transpose": lambda g: view.permuted(g.attributes.get("perm", range(g.rank)[::-1])),
    **dict.fromkeys(
        ("MaxPool", "GlobalMaxPool", "AveragePool", "GlobalAveragePool", "Resize"),
        lambda g: view.except_for(range(2, max(g.rank, 2))),
    ),
    "ReduceMean": _reduced,
    "Slice": lambda g: view.except_for(range(g.rank) if (axes := g.constant(3)) is None else g.dims(axes)),
    "Gather": _gathered,
    "Split": lambda g: view.except_for(g.dims([g.attributes.get("axis", 0)])),
    "Expand": lambda g: view.shifted(len(g.after) - g.rank) if g.after else None,
    "Pad": _padded,
    **dict.fromkeys(("Tile", "DepthToSpace", "SpaceToDepth"), lambda g: lambda d: None),
}
"""Where operators that hand values on, or average them, put each dimension."""
