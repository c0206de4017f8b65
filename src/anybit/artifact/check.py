"""What a graph from a stranger must satisfy before ONNX Runtime may see it.

One operator domain, no subgraphs (a loop may never end), no data in files that nobody checked, every tensor as long as
its shape says, attributes that a kernel can divide by, no value made twice, finite biases, and no intermediate tensor
of absurd size (see `bounds`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, NodeProto, TensorProto, TypeProto

from anybit.artifact.bounds import LONGEST_TEXT, check_sizes
from anybit.artifact.model import Array, OnnxModel, all_graphs, entry_type, has_nan, is_finite
from anybit.common.text import explaining, printable, quoted
from anybit.errors import FileError, SpecError
from anybit.graph.onnx_nodes import OPSET, outlined, subgraphs
from anybit.plan.extras import decompress
from anybit.plan.points import Bias, Weight
from anybit.spec import FLOAT

OLDEST = 13
"""The oldest that a master may have: the first with scales per channel. Files with branches or loops keep their own."""

NEWEST = max(OPSET, onnx.defs.onnx_opset_version())
"""The newest: files keep what came later and cannot be said in other words."""

DOMAINS = {"", "ai.onnx", "ai.onnx.ml", "com.microsoft"}
"""The domains of operators that ONNX Runtime brings along."""

_DEEPEST = 4
MOST_NODES, MOST_PARTS = 15_000, 1_000
"""Nodes in all, and branches and loop bodies."""
_LONG = 4096
"""Bytes from which on only the shape of a tensor is looked at."""
_LARGEST = 2**16
"""Strides, paddings, kernels and groups of real networks are far below."""

_LENGTHS: dict[int, int] = {
    TensorProto.FLOAT: 4, TensorProto.UINT8: 1, TensorProto.INT8: 1, TensorProto.UINT16: 2, TensorProto.INT16: 2,
    TensorProto.INT32: 4, TensorProto.INT64: 8, TensorProto.BOOL: 1, TensorProto.FLOAT16: 2, TensorProto.DOUBLE: 8,
    TensorProto.UINT32: 4, TensorProto.UINT64: 8,
}  # fmt: skip
_FLOATS: dict[int, type[np.floating[Any]]] = {
    TensorProto.FLOAT: np.float32, TensorProto.FLOAT16: np.float16, TensorProto.DOUBLE: np.float64,
}  # fmt: skip
_POSITIVE = {"strides", "dilations", "kernel_shape", "group", "hidden_size", "num_heads", "blocksize"}
_NOT_NEGATIVE = {"pads", "output_padding"}


def check_model(model: OnnxModel, shapes: dict[str, tuple[int, ...]], *, where: str) -> None:
    """Refuse a model that could do harm; `shapes` are those of float tensors that the graph uses but does not hold."""
    proto = model.proto
    versions = {o.domain: o.version for o in proto.opset_import}
    standard = OLDEST <= versions.get("", 0) <= NEWEST
    if not standard or len(versions) != len(proto.opset_import) or not versions.keys() <= DOMAINS:
        wanted = f"the standard operators, version {OLDEST} to {NEWEST}"
        raise FileError(f"{where}: opset_import must be {wanted}, and those of ONNX Runtime; got {quoted(versions)}")
    for name in ("functions", "training_info"):
        if getattr(proto, name):
            raise FileError(f"{where}: {name} is not empty; a master has none")
    graph = proto.graph
    check_names(graph, where=where)
    for name in ("sparse_initializer", "quantization_annotation"):
        if getattr(graph, name):
            raise FileError(f"{where}: graph.{name} is not empty; a master has none")
    check_length(graph, where=where)
    for i, node in enumerate(graph.node):
        check_node(node, where=f"{where}: node {i} ({node.op_type[:40]})")
    for tensor in graph.initializer:
        check_tensor(tensor, model.apart(tensor), where=f"{where}: tensor {tensor.name[:60]!r}")
    _check_biases(model, where=where)
    for value in (*graph.input, *graph.output):
        _check_type(entry_type(value.type), where=f"{where}: {value.name[:60]!r}")
    if not graph.output:
        raise FileError(f"{where}: a network has outputs")
    _check_sizes(proto, shapes, where=where)


def check_length(graph: onnx.GraphProto, *, where: str) -> None:
    """Refuse a graph of more nodes than can be looked at in a second; the largest networks have some thousand."""
    parts = list(islice(all_graphs(graph), MOST_PARTS + 2))
    if len(parts) > MOST_PARTS + 1:
        raise FileError(f"{where}: more than {MOST_PARTS} branches and loop bodies; fewer are expected")
    if (nodes := sum(len(part.node) for part in parts)) > MOST_NODES:
        raise FileError(f"{where}: {nodes} nodes; at most {MOST_NODES} are expected")


def check_names(graph: onnx.GraphProto, *, where: str) -> None:
    """Refuse a graph that makes a value twice: of a weight listed twice, each reader would take another one."""
    inputs = [value.name for value in graph.input]
    made = [tensor.name for tensor in graph.initializer] + [name for node in graph.node for name in node.output if name]
    # Old files list weights among the inputs too.
    for names in (inputs, made, [name for node in graph.node for name in node.output] + inputs):
        if twice := [name for name, count in Counter(names).items() if count > 1 and name]:
            raise FileError(f"{where}: {printable(twice[0], 60)!r} is made twice")


def check_axis(axis: int | None, dimensions: int, *, where: str) -> None:
    """Refuse a number of a dimension that a tensor does not have."""
    if axis is not None and not 0 <= axis < dimensions:
        raise FileError(f"{where}: must be 0 to {dimensions - 1}, got {axis}")


def check_extras(weight: Weight, biases: Iterable[Bias], shape: tuple[int, ...], outputs: int, *, where: str) -> None:
    """Refuse what a width has of its own if it does not fit the weight and its biases."""
    scales = 1 if weight.axis is None else shape[weight.axis]
    for rounded in weight.rounded:
        spot = f"{where}: weight {weight.name[:60]!r}: rounded at {rounded.pair}"
        if not rounded.scale or weight.rounds(rounded) == FLOAT:
            continue
        if len(rounded.scale) != 4 * scales:
            raise FileError(f"{spot}: {scales} scales are expected, got {len(rounded.scale) // 4}")
        grid = rounded.grid(len(shape), weight.spec(weight.rounds(rounded)))
        with np.errstate(invalid="ignore"):
            whole = (grid.zero == np.rint(grid.zero)) & (grid.zero >= grid.low) & (grid.zero <= grid.high)
        if not (is_finite(grid.scale) and (grid.scale >= np.finfo(np.float32).tiny).all() and whole.all()):
            raise FileError(f"{spot}: scales must be above zero, and zeros codes of the grid")
        try:
            decompress(rounded.ranks, math.prod(shape))
        except SpecError as error:
            raise FileError(f"{spot}: {error}") from error
    for bias in biases:
        for shift in bias.shifts:
            if len(shift.values) != 4 * outputs or not is_finite(shift.array()):
                raise FileError(f"{where}: bias {bias.name[:60]!r}: a shift must be {outputs} finite numbers")


def _check_biases(model: OnnxModel, *, where: str) -> None:
    """Refuse biases of layers that are not finite: whatever a layer gets, nothing would come of it."""
    held = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        for name in node.input[_BIASES.get(node.op_type, 99) :][:1]:
            if name in held and not is_finite(model.array(held[name])):
                raise FileError(f"{where}: {printable(name, 60)!r}, a bias of {node.op_type}, has infinite entries")


_BIASES = {"Conv": 2, "ConvTranspose": 2, "Gemm": 2, "LSTM": 3, "GRU": 3, "RNN": 3, "LayerNormalization": 2}
"""Which input of a layer is its bias."""


def check_node(node: NodeProto, *, where: str, depth: int = 0) -> None:
    """Refuse operators of unknown domains, deep nesting, and attributes that no layer has; subgraphs are gone into."""
    if node.domain not in DOMAINS:
        raise FileError(f"{where}: operator of domain {node.domain[:40]!r}; ONNX Runtime has none of that")
    for graph in subgraphs(node):
        if depth >= _DEEPEST:
            raise FileError(f"{where}: subgraphs lie more than {_DEEPEST} deep in each other")
        for i, inner in enumerate(graph.node):
            check_node(inner, where=f"{where}: node {i} ({inner.op_type[:40]})", depth=depth + 1)
        for tensor in graph.initializer:
            check_tensor(tensor, None, where=f"{where}: tensor {tensor.name[:60]!r}")
    for attribute in node.attribute:
        if attribute.HasField("sparse_tensor") or attribute.sparse_tensors or attribute.ref_attr_name:
            raise FileError(f"{where}: attribute {attribute.name[:40]!r} is of a kind that is not supported")
        for tensor in tensors_of(attribute):
            check_tensor(tensor, None, where=f"{where}: attribute {attribute.name[:40]!r}", marks=True)
        values = [attribute.i, *attribute.ints] if attribute.type == AttributeProto.INT else list(attribute.ints)
        least = 1 if attribute.name in _POSITIVE else 0 if attribute.name in _NOT_NEGATIVE else None
        if least is not None and not all(least <= v <= _LARGEST for v in values):
            raise FileError(f"{where}: {attribute.name} must be {least} to {_LARGEST}, got {values[:8]}")


def tensors_of(attribute: AttributeProto) -> Iterator[TensorProto]:
    """Yield the tensors that an attribute holds."""
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors


def check_tensor(tensor: TensorProto, apart: Array | None, *, where: str, marks: bool = False) -> None:
    """Refuse unknown types, data of another length than the shape says, and what is not a number.

    Args:
        tensor: The tensor.
        apart: Its numbers, if somebody has checked where they lie and taken them from there.
        where: The file and the place in it.
        marks: Whether NaN may be among others, as the mark of what is missing; one that stands alone always is.
    """
    if apart is None and (tensor.data_location == TensorProto.EXTERNAL or tensor.external_data):
        raise FileError(f"{where}: its data lie in another file, which the header does not name")
    if tensor.data_type == TensorProto.STRING:
        _check_text(tensor, where=where)
        return
    wanted = bytes_of(tensor, where=where)
    found = len(tensor.raw_data) if apart is None else apart.nbytes
    if tensor.HasField("segment") or found != wanted:
        raise FileError(f"{where}: shape {list(tensor.dims)[:8]} needs {wanted} bytes in raw_data, there are {found}")
    kind = _FLOATS.get(tensor.data_type) if math.prod(tensor.dims) > 1 and not marks else None
    if kind is not None and has_nan(np.frombuffer(tensor.raw_data, kind) if apart is None else apart):
        raise FileError(f"{where}: has NaN entries; save the model with finite numbers")


def _check_text(tensor: TensorProto, *, where: str) -> None:
    count = entries(tensor.dims, where=where)
    if len(tensor.string_data) != count or tensor.raw_data or tensor.HasField("segment"):
        found = len(tensor.string_data)
        raise FileError(f"{where}: shape {list(tensor.dims)[:8]} needs {count} texts in string_data, there are {found}")
    if (longest := max(map(len, tensor.string_data), default=0)) > LONGEST_TEXT:
        raise FileError(f"{where}: has a text of {longest} bytes; at most {LONGEST_TEXT} are expected")


def bytes_of(tensor: TensorProto, *, where: str) -> int:
    """Return how many bytes a tensor of this type and shape has, or say that there is no such tensor."""
    if tensor.data_type not in _LENGTHS:
        raise FileError(f"{where}: data_type {tensor.data_type} is none that a master holds")
    return entries(tensor.dims, where=where) * _LENGTHS[tensor.data_type]


def entries(dims: Iterable[int], *, where: str) -> int:
    """Return how many entries a tensor of this shape has, or say that the shape is absurd."""
    sizes = list(dims)
    if any(d < 0 for d in sizes) or len(sizes) > 16 or math.prod(sizes) > 2**31:
        raise FileError(f"{where}: shape {sizes[:8]} is absurd")
    return math.prod(sizes)


def _check_type(kind: TypeProto, *, where: str) -> None:
    if kind.tensor_type.elem_type not in {*_LENGTHS, TensorProto.STRING}:
        made = "must be a tensor of numbers or of text, or a sequence, map or optional of them"
        raise FileError(f"{where}: {made}; let the graph make it of those")
    entries([d.dim_value for d in kind.tensor_type.shape.dim], where=where)


def _check_sizes(model: onnx.ModelProto, shapes: dict[str, tuple[int, ...]], *, where: str) -> None:
    """Let ONNX check the graph, and see that its values stay within bounds."""
    # What is long or lies outside of the graph comes in as an input of the same type and shape.
    probe, large = outlined(model, lambda t: t.data_location == TensorProto.EXTERNAL or len(t.raw_data) > _LONG)
    outside: list[tuple[str, int, tuple[int, ...]]] = [(n, TensorProto.FLOAT, shape) for n, shape in shapes.items()]
    probe.graph.input.extend(onnx.helper.make_tensor_value_info(*value) for value in outside)
    outside += [(tensor.name, tensor.data_type, tuple(tensor.dims)) for tensor in large]

    # The shapes of other domains' operators, and of what comes out of branches and loops, nobody infers.
    strict = not any(node.domain or next(subgraphs(node), None) is not None for node in model.graph.node)
    ends = [entry_type(value.type).tensor_type for value in [*probe.graph.input, *probe.graph.output]]
    shapeless = [kind for kind in ends if not kind.HasField("shape")]
    for kind in shapeless:  # the checker wants shapes that some files lack, and looks no further
        kind.shape.SetInParent()
    with explaining(FileError, f"{where}: the graph is no valid ONNX"):
        onnx.checker.check_model(probe)
    for kind in shapeless:
        kind.ClearField("shape")
    check_sizes(probe, outside, where=where, strict=strict)
