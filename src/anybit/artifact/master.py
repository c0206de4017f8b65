"""The master: an ONNX model in floating point that says where and how it may be quantized.

    write_master(path, model, header)   atomic; `header.store` says how the weights are stored
    open_master(path)                   checks everything, then hands out graph and weights apart

The file runs in any ONNX runtime as it is. With `store="fp16"` a Cast stands between each stored weight and the
graph, with `store="int8"` a DequantizeLinear; lower widths are then derived from the 8-bit codes. A master is one file,
unless it would pass 2 GB: then its tensors lie in a second one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from anybit.artifact import protobuf_scan
from anybit.artifact.check import check_axis, check_extras, check_model, check_names, check_tensor
from anybit.artifact.header import DIGEST, KEY, Data, Header, read_header, write_header
from anybit.artifact.model import Array as Numbers
from anybit.artifact.model import OnnxModel, is_finite, names_in, set_nodes
from anybit.artifact.storage import LIMIT, read_model, write_model
from anybit.artifact.weight_nodes import weight_nodes, weight_tensors
from anybit.common.text import quoted
from anybit.errors import FileError
from anybit.plan.codes import Codes, encode
from anybit.plan.extras import rebased
from anybit.plan.points import Bias, Plan, Weight
from anybit.spec import FLOAT

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Master:
    """An opened master: `model` is the graph without the weights that can be quantized, which are in `weights`."""

    path: Path
    header: Header
    model: OnnxModel
    weights: dict[str, Array]
    digest: str = ""

    @property
    def graph(self) -> onnx.ModelProto:
        """The model without its weights; other large tensors are in the model's arrays."""
        return self.model.proto

    @property
    def plan(self) -> Plan:
        """What is quantized, and how."""
        return self.header.plan

    @cached_property
    def tensors(self) -> dict[str, Array]:
        """The weights and biases of the plan in floating point, by name."""
        held = {tensor.name: tensor for tensor in self.model.graph.initializer}
        biases = {bias.name: np.asarray(self.model.array(held[bias.place])) for bias in self.plan.biases}
        return self.weights | biases

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the network's inputs."""
        return tuple(value.name for value in self.graph.graph.input)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the network's outputs."""
        return tuple(value.name for value in self.graph.graph.output)


# Writing


def write_master(path: str | Path, model: onnx.ModelProto | OnnxModel, header: Header, *, limit: int = LIMIT) -> Header:
    """Write a floating-point model whose initializers include every weight of the header; return what it says now.

    Args:
        path: Where to write; what cannot be opened again is not left behind.
        model: The model. The arrays of an `OnnxModel` are written from where they are, without a copy.
        header: What the graph does not say.
        limit: Bytes from which on the tensors go into a second file.
    """
    path = Path(path)
    whole = model if isinstance(model, OnnxModel) else OnnxModel(model)
    kept = stored(whole, header, where=str(path))
    header = _for_stored(header, whole, kept)
    text = write_header(header)

    def seal(file: BinaryIO, data: Data | None) -> None:
        text = write_header(replace(header, data=data))
        size = file.tell()
        digest = protobuf_scan.digest(file, protobuf_scan.scan(file, size), text)
        file.seek(size)
        file.write(protobuf_scan.entry(KEY, text) + protobuf_scan.entry(DIGEST, digest))

    def check(beside: Path) -> None:
        open_master(beside, named=path, hold=False)

    write_model(path, kept, seal, spare=len(text) + 1024, check=check, limit=limit)
    return header


def stored(model: OnnxModel, header: Header, *, where: str) -> OnnxModel:
    """Return a model with its weights as the header says they are stored."""
    weights = {weight.place: weight for weight in header.plan.weights} if header.store != "fp32" else {}
    out = model.copy()
    del out.proto.metadata_props[:]
    del out.graph.value_info[:]
    before: list[NodeProto] = []
    tensors: list[TensorProto] = []
    for tensor in model.graph.initializer:
        if tensor.name in weights:
            array = model.array(tensor).astype(np.float32, copy=False)
            node, parts = _store(weights[tensor.name], array, header.store, out, where=where)
            before.append(node)
            tensors += parts
        else:
            tensors.append(tensor)
    out.set_initializers(tensors)
    set_nodes(out.graph, [*before, *model.graph.node])
    return out


def _for_stored(header: Header, model: OnnxModel, kept: OnnxModel) -> Header:
    """Return the header with what widths have of their own made for the weights as they are stored."""
    if header.store == "fp32" or not any(weight.rounded for weight in header.plan.weights):
        return header
    before = {tensor.name: tensor for tensor in model.graph.initializer}
    after = _take_weights(kept.copy(), header, where="", hold=True)
    points = list(header.plan.points)
    for i, point in enumerate(points):
        if isinstance(point, Weight) and point.rounded:
            old, new = np.asarray(model.array(before[point.place]), np.float32), after[point.name]
            held = (rounded for rounded in point.rounded if point.rounds(rounded) != FLOAT)
            own = (rebased(rounded, old, new, point.spec(point.rounds(rounded))) for rounded in held)
            points[i] = replace(point, rounded=tuple(own))
    return replace(header, plan=replace(header.plan, points=tuple(points)))


def _store(
    weight: Weight, array: Array, store: str, into: OnnxModel, *, where: str
) -> tuple[NodeProto, list[TensorProto]]:
    """Return the node that makes a weight out of what is stored, and what is stored."""
    name = weight.place
    if store == "fp16":
        with np.errstate(over="ignore"):
            half = array.astype(np.float16)
        if not is_finite(half):
            raise FileError(f"{where}: not written, weight {name!r} does not fit in 16 bits; use store='fp32'")
        node = helper.make_node("Cast", [f"{name}.half"], [name], to=TensorProto.FLOAT)
        return node, [into.tensor(half, f"{name}.half")]
    codes = encode(array, Weight(name, axis=weight.axis, symmetric=weight.symmetric), 8)
    (node,) = weight_nodes(codes, name)
    return node, weight_tensors(codes, name, into)


# Reading


def open_master(path: str | Path, *, named: str | Path | None = None, hold: bool = True) -> Master:
    """Open and check a master; every error names the file (as `named`, if given) and the field.

    Args:
        path: The master.
        named: What errors call it instead.
        hold: Whether to keep the weights. Without, they are read and checked one after the other, and are all zero.
    """
    path = Path(path)
    where = str(named or path)
    header, model = _read(path, where, hold=hold)
    texts = {entry.key: entry.value for entry in model.proto.metadata_props}
    others = {key: text for key, text in texts.items() if key not in (KEY, DIGEST)}
    helper.set_model_props(model.proto, others)  # what is made of this graph is no master
    check_names(model.graph, where=where)  # before weights are looked up by their names
    weights = _take_weights(model, header, where=where, hold=hold)
    places = {weight.place: weights[weight.name].shape for weight in header.plan.weights}
    check_model(model, places, where=where)
    _check_points(model, header, weights, where=where)
    return Master(Path(named or path), header, model, weights, texts[DIGEST])


def _read(path: Path, where: str, *, hold: bool) -> tuple[Header, OnnxModel]:
    size = protobuf_scan.size_of(path, what="an ONNX master")
    try:
        with path.open("rb") as file:
            fields = protobuf_scan.scan(file, size)
            texts = protobuf_scan.metadata(file, fields)
            if KEY not in texts:
                raise FileError(
                    f"{where}: has no metadata {KEY!r}, so it is no master; "
                    "make one out of an ONNX model with: anybit adopt"
                )
            header = read_header(texts[KEY], where=where)
            if len([f for f in fields if f.number == protobuf_scan.GRAPH]) != 1:
                raise FileError(f"{where}: must hold one graph")
            if texts.get(DIGEST) != protobuf_scan.digest(file, fields, texts[KEY]):
                raise FileError(
                    f"{where}: {DIGEST} does not fit its contents; the file is damaged or was changed, get it again"
                )
            protobuf_scan.check_cost(file, size)
            return header, read_model(file, fields, header.data, path=path, where=where, hold=hold)
    except OSError as error:
        raise FileError(f"{where}: cannot be read ({error.strerror or error})") from error
    except (ValueError, OverflowError) as error:
        raise FileError(f"{where}: is cut short or no ONNX file ({error})") from error


def _take_weights(model: OnnxModel, header: Header, *, where: str, hold: bool) -> dict[str, Array]:
    """Take the weights of the header out of the graph, in floating point, with whatever made them."""
    graph = model.graph
    held = {tensor.name: tensor for tensor in graph.initializer}
    made = {weight.place for weight in header.plan.weights} if header.store != "fp32" else set()
    makers = {output: node for node in graph.node for output in node.output if output in made}
    weights: dict[str, Array] = {}
    used: set[str] = set()
    for weight in header.plan.weights:
        spot = f"{where}: weight {weight.name[:60]!r}"
        parts = _parts(weight, header.store, makers.get(weight.place), spot)
        used |= set(parts.values())
        weights[weight.name] = _checked(weight, model, held, parts, spot, hold=hold)
    set_nodes(graph, [node for node in graph.node if not made.intersection(node.output)])
    model.set_initializers([tensor for tensor in graph.initializer if tensor.name not in used])
    return weights


def _checked(
    weight: Weight, model: OnnxModel, held: dict[str, TensorProto], parts: dict[str, str], where: str, *, hold: bool
) -> Array:
    """Return a weight in floating point, or zeros of its shape that take no memory."""
    arrays = {part: _array(model, held.get(name), name, part, where) for part, name in parts.items()}
    found = _weight(weight, arrays, where)
    return found if hold else np.broadcast_to(np.float32(0), found.shape)


def _parts(weight: Weight, store: str, maker: NodeProto | None, where: str) -> dict[str, str]:
    """Return the names of the initializers that a weight is stored in."""
    if store == "fp32":
        return {"float": weight.place}
    wanted = {"fp16": ("Cast", ("half",)), "int8": ("DequantizeLinear", ("codes", "scale", "zero"))}
    operator, names = wanted[store]
    if maker is None or maker.op_type != operator:
        raise FileError(f"{where}.tensor: {weight.place[:60]!r} must come from a {operator} node with store={store!r}")
    if list(maker.input) != [f"{weight.place}.{name}" for name in names]:
        raise FileError(f"{where}.tensor: {weight.place[:60]!r} is made from {quoted(list(maker.input))}")
    return dict(zip(names, maker.input, strict=True))


_KINDS = {
    "float": TensorProto.FLOAT, "half": TensorProto.FLOAT16, "codes": TensorProto.INT8, "scale": TensorProto.FLOAT,
    "zero": TensorProto.INT8,
}  # fmt: skip


def _array(model: OnnxModel, tensor: TensorProto | None, name: str, part: str, where: str) -> Numbers:
    if tensor is None:
        raise FileError(f"{where}.tensor: the graph holds no tensor {name[:60]!r}")
    spot = f"{where}: tensor {name[:60]!r}"
    apart = model.apart(tensor)
    check_tensor(tensor, apart, where=spot)
    if tensor.data_type != _KINDS[part]:
        raise FileError(f"{spot}: data_type must be {_KINDS[part]}, got {tensor.data_type}")
    array = numpy_helper.to_array(tensor) if apart is None else apart
    if not is_finite(array):
        raise FileError(f"{spot}: has infinite entries")
    return array


def _weight(weight: Weight, arrays: dict[str, Numbers], where: str) -> Array:
    """Return a weight in floating point, and see that it fits what the header says."""
    main = next(iter(arrays.values()))
    if main.size == 0:
        raise FileError(f"{where}.tensor: {weight.place[:60]!r} is empty")
    check_axis(weight.axis, main.ndim, where=f"{where}.axis")
    check_axis(weight.channels, max(1, main.ndim), where=f"{where}.channels")
    if weight.sums and (weight.channels > min(1, main.ndim - 1) or main.shape[0] % weight.groups):
        raise FileError(f"{where}: channels and groups do not fit the shape {list(main.shape)[:8]}")
    if "codes" not in arrays:
        return np.asarray(main, np.float32)
    shape = () if weight.axis is None else (main.shape[weight.axis],)
    scale, zero = arrays["scale"], arrays["zero"]
    if scale.shape != shape or zero.shape != shape:
        raise FileError(f"{where}.tensor: {weight.place[:60]!r} needs scales of shape {shape}, got {scale.shape}")
    if not (scale > 0).all():
        raise FileError(f"{where}.tensor: the scale of {weight.place[:60]!r} must be above zero")
    with np.errstate(over="ignore"):
        value = Codes(main, scale, zero, weight.axis, 8).dequantized()
    if not is_finite(value):
        raise FileError(f"{where}.tensor: the scale of {weight.place[:60]!r} is too large")
    return value


def _check_points(model: OnnxModel, header: Header, weights: dict[str, Array], *, where: str) -> None:
    """See that the header and the graph speak of the same things."""
    graph = model.graph
    made = {output for node in graph.node for output in node.output if output}
    used = names_in(graph) | {value.name for value in graph.output}
    held = {tensor.name: tensor for tensor in graph.initializer}
    plan = header.plan
    for activation in plan.activations:
        if activation.place not in made:
            raise FileError(f"{where}: activation {activation.name[:60]!r}: no node makes {activation.place[:60]!r}")
    for weight in plan.weights:
        if weight.place not in used:
            raise FileError(f"{where}: weight {weight.name[:60]!r}: no node uses {weight.place[:60]!r}")
        if weight.shape and weight.shape != weights[weight.name].shape:
            raise FileError(
                f"{where}: weight {weight.name[:60]!r}: shape is {list(weight.shape)[:8]} in the header, and "
                f"{list(weights[weight.name].shape)[:8]} in the graph"
            )
    for i, bias in enumerate(plan.biases):
        point = plan.weight(bias.weight)
        _check_bias(bias, point, held.get(bias.place), weights[bias.weight], model, where=f"{where}: biases[{i}]")
    for weight in plan.weights:
        shape = weights[weight.name].shape
        own = [bias for bias in plan.biases if bias.weight == weight.name]
        outputs = shape[weight.channels] * (weight.groups if weight.channels == 1 else 1) if own else 0
        check_extras(weight, own, shape, outputs, where=where)
    names = [*(weight.place for weight in plan.weights), *held, *made, *(value.name for value in graph.input)]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise FileError(f"{where}: {twice[0][:60]!r} is made twice")


def _check_bias(
    bias: Bias, point: Weight, tensor: TensorProto | None, weight: Array, model: OnnxModel, *, where: str
) -> None:
    if weight.ndim < 2:
        raise FileError(f"{where}.weight: {bias.weight[:60]!r} is not the tensor of a layer's weight")
    if point.channels > 1:
        raise FileError(f"{where}.weight: channels of {bias.weight[:60]!r} must be 0 or 1, got {point.channels}")
    outputs = weight.shape[point.channels] * (point.groups if point.channels == 1 else 1)
    inputs = weight.shape[1 - point.channels] * (point.groups if point.channels == 0 else 1)
    if tensor is None or tensor.data_type != TensorProto.FLOAT or list(tensor.dims) != [outputs]:
        raise FileError(f"{where}.tensor: {bias.place[:60]!r} must be a tensor of the graph with {outputs} numbers")
    if not is_finite(model.array(tensor)):
        raise FileError(f"{where}.tensor: {bias.place[:60]!r} has infinite entries")
    if outputs % point.groups or inputs % point.groups:
        raise FileError(f"{where}.weight: {point.groups} groups do not divide {outputs} outputs and {inputs} inputs")
    if bias.mean is not None and len(bias.mean) != inputs:
        raise FileError(f"{where}.mean: must be {inputs} numbers, got {len(bias.mean)}")
