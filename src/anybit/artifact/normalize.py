"""Files as they are found in the wild, brought into one form before anything is decided about them.

What ONNX Runtime overlooks is put right here: free sizes written as 0 or -1, nodes out of order, wrong shapes, other
precisions, weights inside of branches and loops, names that ours would clash with. A file that is quantized already is
refused.
"""

from __future__ import annotations

import copy
from collections import ChainMap
from collections.abc import Mapping, Set

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, numpy_helper
from onnx.inliner import inline_local_functions

from anybit.artifact.model import OnnxModel, all_graphs, entry_type, set_nodes
from anybit.errors import FileError
from anybit.graph.onnx_nodes import OPSET, subgraphs, used_by

QUANTIZED = {
    "QLinearConv", "QLinearMatMul", "QLinearAdd", "QLinearMul", "QLinearSigmoid", "QLinearLeakyRelu", "QLinearConcat",
    "QLinearAveragePool", "QLinearGlobalAveragePool", "QGemm", "QAttention", "QEmbedLayerNormalization", "ConvInteger",
    "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "DynamicQuantizeLinear",
    "MatMulNBits", "QuantizeLinear",
}  # fmt: skip
"""Operators of files that are quantized already; weights that are only stored as whole numbers are fine."""

FOLDED = {
    "Identity", "Transpose", "Cast", "CastLike", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Concat", "Neg", "Sqrt",
    "DequantizeLinear",
    "Shape", "Slice", "Gather", "Expand", "ConstantOfShape", "Add", "Sub", "Mul", "Div",
    "Range", "Where", "Equal", "Tile", "Pow", "Exp", "Log", "Sin", "Cos", "Abs", "Reciprocal", "Clip", "Floor", "Ceil",
    "Min", "Max", "Less", "Greater", "Not", "Tanh", "Sigmoid", "Softmax", "MatMul", "Pad",
}  # fmt: skip
"""Operators that are done once, now, where all that comes in is constant: weights are found behind them."""


def normalize(model: OnnxModel, *, where: str) -> None:
    """Bring a model into one form."""
    proto = model.proto
    if proto.functions:
        proto.CopyFrom(inline_local_functions(proto))
    kinds = {node.op_type for part in all_graphs(proto.graph) for node in part.node}
    if found := sorted(kinds & QUANTIZED):
        raise FileError(f"{where}: is quantized already (it has {found[0]}); adopt the file in floating point")
    _as_tensors(proto.graph)
    used = {""}
    for part in all_graphs(proto.graph):
        del part.value_info[:]
        del part.quantization_annotation[:]
        if part is not proto.graph:  # stale here too; but of the counter of a loop the runtime wants to know it
            for value in (*part.input[1:], *part.output):
                if value.type.HasField("tensor_type"):
                    value.type.tensor_type.ClearField("shape")
        for node in part.node:
            if node.domain == "ai.onnx":
                node.domain = ""
            used.add(node.domain)
            if node.op_type == "Gemm" and not "".join(node.input[2:]):  # a factor of nothing; later there may be a bias
                factors = [attribute for attribute in node.attribute if attribute.name == "beta"]
                for factor in factors:
                    node.attribute.remove(factor)
    for node in (node for part in all_graphs(proto.graph) for node in part.node if node.op_type == "Loop"):
        if not "".join(node.input[1:2]):  # the runtime makes the condition itself
            for condition in (value for body in subgraphs(node) for value in body.input[1:2]):
                condition.type.tensor_type.shape.SetInParent()
    entries = {"": OPSET} | {("" if o.domain == "ai.onnx" else o.domain): o.version for o in proto.opset_import}
    del proto.opset_import[:]
    proto.opset_import.extend(onnx.helper.make_opsetid(d, v) for d, v in entries.items() if d in used)
    free_sizes(proto.graph)
    _sort(proto.graph)
    as_bytes(proto.graph)
    _in_float32(model)
    _rename(proto.graph)
    _hoist(proto.graph)


def as_bytes(graph: onnx.GraphProto) -> None:
    """Store all tensors as plain bytes; ONNX knows several ways, and each reader of files would have to."""
    for part in all_graphs(graph):
        for tensor in [*part.initializer, *(a.t for n in part.node for a in n.attribute if a.HasField("t"))]:
            plain = tensor.HasField("raw_data") or tensor.data_type == TensorProto.STRING  # text has but one way
            if tensor.data_location != TensorProto.EXTERNAL and not plain:
                tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))


def free_sizes(graph: onnx.GraphProto) -> None:
    """Give free sizes names; outputs lose their shapes, which are often stale and follow from the rest."""
    for value in graph.input:
        for d, dim in enumerate(entry_type(value.type).tensor_type.shape.dim):
            if dim.dim_value < 1 and not dim.dim_param:
                dim.dim_param = f"{value.name}_{d}"
    for value in graph.output:
        if entry_type(value.type).HasField("tensor_type"):
            entry_type(value.type).tensor_type.ClearField("shape")


def _as_tensors(graph: onnx.GraphProto) -> None:
    """Let scores that are handed out as a list of dictionaries, class by class, be the tensor that they are made of."""
    for node in graph.node:
        if node.op_type == "ZipMap":
            for value in graph.output:
                if value.name == node.output[0]:
                    value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, TensorProto.FLOAT, None))
            node.CopyFrom(onnx.helper.make_node("Identity", node.input[:1], node.output[:1], name=node.name))


def _sort(graph: onnx.GraphProto) -> None:
    """Put nodes behind those that they need."""
    known = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer} | {""}
    made = {name for node in graph.node for name in node.output}
    left, ordered = list(graph.node), []
    while left:
        ready: list[NodeProto] = []
        waiting: list[NodeProto] = []
        for node in left:
            needs = made.intersection(used_by(node))
            (ready if needs <= known else waiting).append(node)
            if needs <= known:
                known.update(node.output)
        if not ready:  # a circle: whoever runs it will say so
            return
        ordered += ready
        left = waiting
    if [n.output[:] for n in ordered] != [n.output[:] for n in graph.node]:
        set_nodes(graph, ordered)


def _in_float32(model: OnnxModel) -> None:
    """Turn half precision into float32, which a master computes in, and double precision where layers have it."""
    parts = list(all_graphs(model.graph))
    kinds = {TensorProto.FLOAT16, *([TensorProto.DOUBLE] if _doubles(parts) else [])}
    full = TensorProto.FLOAT
    for part in parts:
        stated = [attribute.tp for node in part.node for attribute in node.attribute if attribute.HasField("tp")]
        for kind in [entry_type(kind) for kind in (*(value.type for value in (*part.input, *part.output)), *stated)]:
            if kind.HasField("tensor_type") and kind.tensor_type.elem_type in kinds:
                kind.tensor_type.elem_type = full
        for tensor in part.initializer:
            if tensor.data_type in kinds:
                array, own = model.array(tensor).astype(np.float32), part is model.graph
                tensor.CopyFrom((model.tensor if own else numpy_helper.from_array)(array, tensor.name))
        for attribute in (attribute for node in part.node for attribute in node.attribute):
            if attribute.name in ("to", "dtype") and attribute.i in kinds:
                attribute.i = full
            if attribute.HasField("t") and attribute.t.data_type in kinds:
                array = numpy_helper.to_array(attribute.t).astype(np.float32)
                attribute.t.CopyFrom(numpy_helper.from_array(array, attribute.t.name))


LAYERS = {"Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum", "LSTM", "GRU", "RNN"}


def _doubles(parts: list[onnx.GraphProto]) -> bool:
    """Tell whether some layer has a weight in double precision."""
    nodes = [node for part in parts for node in part.node]
    held = [tensor for part in parts for tensor in part.initializer]
    held += [a.t for node in nodes if node.op_type == "Constant" for a in node.attribute if a.HasField("t")]
    return any(t.data_type == TensorProto.DOUBLE and t.dims for t in held) and any(n.op_type in LAYERS for n in nodes)


def _rename(graph: onnx.GraphProto) -> None:
    """Let no name be another one with a dot and more behind it: what rounding adds is named after its value like that.

    Older PyTorch writes `result` beside `result.3`. Inputs and outputs keep their names, which belong to the user.
    """
    parts = list(all_graphs(graph))
    known = {name for part in parts for node in part.node for name in (*node.input, *node.output) if name}
    fixed = {value.name for value in (*graph.input, *graph.output)}
    known |= fixed | {tensor.name for part in parts for tensor in part.initializer}
    lengths, taken = sorted({len(name) for name in known}), known | {name.partition(".")[0] for name in known}
    new: dict[str, str] = {}
    for name in sorted(known):
        dots = (i for i in lengths if i < len(name) and name[i] == ".") if "." in name else ()
        before = (name[:i] for i in dots if name[:i] in known)
        for old in before if name in fixed else [name] * any(before):
            if old not in fixed and old not in new:
                new[old] = old.replace(".", "_")
                while new[old] in taken:
                    new[old] += f"_{len(new)}"
                taken.add(new[old])
    for part in parts if new else ():
        for thing in (*part.initializer, *part.input, *part.output):
            thing.name = new.get(thing.name, thing.name)
        for node in part.node:
            for names in (node.input, node.output):
                names[:] = [new.get(name, name) for name in names]


def _hoist(graph: onnx.GraphProto) -> None:
    """Move the weights of branches and loop bodies, and what is made of them alone, into the graph around them.

    There they can be rounded.
    """
    taken = {t.name for t in graph.initializer} | {v.name for v in graph.input}
    taken |= {name for part in all_graphs(graph) for node in part.node for name in node.output}
    outside = {t.name for t in graph.initializer}
    front: list[NodeProto] = []
    start = ChainMap(_numbers(graph))
    parts = [(part, start) for node in graph.node for part in subgraphs(node)]
    for count, (part, outer) in enumerate(parts, 1):  # which grows on the way
        numbers = outer.new_child(_numbers(part))
        moved = _of_weights(part, outside, numbers)
        gone = {node.output[0] for node in moved}
        needed = {name for node in moved for name in node.input if name in numbers} - gone  # go along, and stay
        names = {}
        for name in [*(t.name for t in part.initializer), *needed, *gone]:
            names[name] = name if name not in taken else f"{name}.{count}"
        taken.update(names.values())
        outside.update(names.values())
        for tensor in part.initializer:
            graph.initializer.add().CopyFrom(tensor)
            graph.initializer[-1].name = names[tensor.name]
        del part.initializer[:]
        for node in (*(numbers[name] for name in sorted(needed)), *moved):
            front.append(NodeProto())
            front[-1].CopyFrom(node)
            _call(front[-1], names)
        set_nodes(part, [node for node in part.node if node.output[0] not in gone])
        left = {name: new for name, new in names.items() if name not in needed}
        for inner in all_graphs(part):
            for node in inner.node:
                _call(node, left)
            for value in inner.output:
                value.name = left.get(value.name, value.name)
        parts += [(inner, numbers) for node in part.node for inner in subgraphs(node)]
    if front:
        set_nodes(graph, [*front, *graph.node])


def _call(node: NodeProto, names: dict[str, str]) -> None:
    """Give what a node takes and makes other names."""
    for each in (node.input, node.output):
        each[:] = [names.get(name, name) for name in each]


def _numbers(part: onnx.GraphProto) -> dict[str, NodeProto]:
    """Return copies of the constants of a graph, by name."""
    return {n.output[0]: copy.deepcopy(n) for n in part.node if n.op_type == "Constant" and not _is_weight(n)}


def _of_weights(part: onnx.GraphProto, outside: Set[str], numbers: Mapping[str, NodeProto]) -> list[NodeProto]:
    """Return the nodes of a branch or loop body that hold weights, or make them of weights and other constants."""
    ends = {value.name for value in (*part.input, *part.output)}
    weights = {t.name for t in part.initializer if len(t.dims) > 1}
    fixed = {"", *(t.name for t in part.initializer)}
    found = []
    for node in part.node:
        made = node.op_type in FOLDED and not node.domain and ends.isdisjoint((*node.input, *node.output))
        made = made and all(name in fixed or name in outside or name in numbers for name in node.input)
        made = made and any(name in weights or name in outside for name in node.input)
        if made or (node.op_type == "Constant" and _is_weight(node)):
            fixed.update(node.output)
            weights.update(node.output)
            found.append(node)
    return found


def _is_weight(node: NodeProto) -> bool:
    found = node.attribute and node.attribute[0].HasField("t") and node.attribute[0].t
    return bool(found) and found.data_type == TensorProto.FLOAT and len(found.dims) > 1
