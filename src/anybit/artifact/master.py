"""The master: one ONNX file in floating point that says where and how it may be quantized.

    write_master(path, model, header)   atomic; `header.store` says how the weights are stored
    open_master(path)                   checks everything, then hands out graph and weights apart

The file runs in any ONNX runtime as it is. With `store="fp16"` a Cast stands between each stored weight and the
graph, with `store="int8"` a DequantizeLinear; lower widths are then derived from the 8-bit codes.
"""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from anybit.artifact import wire
from anybit.artifact.check import check_model, check_tensor
from anybit.artifact.codes import Codes, encode
from anybit.artifact.format import DIGEST, KEY, Bias, Header, Weight, read_header, write_header
from anybit.errors import FileError
from anybit.files import replacing

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Master:
    """An opened master: `graph` is the model without the weights that can be quantized, which are in `weights`."""

    path: Path
    header: Header
    graph: onnx.ModelProto
    weights: dict[str, Array]

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the network's inputs."""
        return tuple(value.name for value in self.graph.graph.input)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the network's outputs."""
        return tuple(value.name for value in self.graph.graph.output)


# Writing


def write_master(path: str | Path, model: onnx.ModelProto, header: Header) -> None:
    """Write a floating-point model whose initializers include every weight of the header."""
    path = Path(path)
    with replacing(path) as beside:
        beside.write_bytes(pack(model, header, where=str(path)))
        open_master(beside, named=path)  # what cannot be opened again is not left behind


def pack(model: onnx.ModelProto, header: Header, *, where: str) -> bytes:
    """Return the bytes of a master file."""
    stored = {weight.tensor: weight for weight in header.weights}
    out = onnx.ModelProto()
    out.CopyFrom(model)
    del out.metadata_props[:]
    del out.graph.value_info[:]
    del out.graph.initializer[:]
    before: list[NodeProto] = []
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if tensor.name in stored and header.store != "fp32":
            node, parts = _store(stored[tensor.name], array.astype(np.float32), header.store, where=where)
            before.append(node)
            out.graph.initializer.extend(parts)
        else:
            out.graph.initializer.append(numpy_helper.from_array(array, tensor.name))
    nodes = [*before, *model.graph.node]
    del out.graph.node[:]
    out.graph.node.extend(nodes)
    text = write_header(header)
    data: bytes = out.SerializeToString()
    if len(data) + len(text) > 2**31 - 2**16:
        raise FileError(f"{where}: not written, an ONNX file in one piece has less than 2 GB")
    file = io.BytesIO(data)
    return data + wire.entry(KEY, text) + wire.entry(DIGEST, wire.digest(file, wire.scan(file, len(data)), text))


def _store(weight: Weight, array: Array, store: str, *, where: str) -> tuple[NodeProto, list[TensorProto]]:
    """Return the node that makes a weight out of what is stored, and what is stored."""
    name = weight.tensor
    if store == "fp16":
        with np.errstate(over="ignore"):
            half = array.astype(np.float16)
        if not np.isfinite(half).all():
            raise FileError(f"{where}: not written, weight {name!r} does not fit in 16 bits; use store='fp32'")
        node = helper.make_node("Cast", [f"{name}.half"], [name], to=TensorProto.FLOAT)
        return node, [numpy_helper.from_array(half, f"{name}.half")]
    codes = encode(array, Weight(name, name, weight.axis, weight.symmetric), 8)
    (node,) = codes.nodes(name)
    return node, codes.tensors(name)


# Reading


def open_master(path: str | Path, *, named: str | Path | None = None) -> Master:
    """Open and check a master; every error names the file (as `named`, if given) and the field."""
    path = Path(path)
    where = str(named or path)
    header, data = _read(path, where)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except Exception as error:  # protobuf has several implementations, each with its own exception
        raise FileError(f"{where}: the graph cannot be parsed ({error})") from error
    del data
    others = [entry for entry in model.metadata_props if entry.key not in (KEY, DIGEST)]
    del model.metadata_props[:]  # what is made of this graph is no master
    model.metadata_props.extend(others)
    weights = _take_weights(model, header, where=where)
    check_model(model, {name: array.shape for name, array in weights.items()}, where=where)
    _check_points(model, header, weights, where=where)
    return Master(Path(named or path), header, model, weights)


def _read(path: Path, where: str) -> tuple[Header, bytes]:
    size = wire.size_of(path, what="an ONNX master")
    try:
        with path.open("rb") as file:
            fields = wire.scan(file, size)
            texts = wire.metadata(file, fields)
            if KEY not in texts:
                raise FileError(
                    f"{where}: has no metadata {KEY!r}, so it is no master; "
                    "make one out of an ONNX model with: anybit adopt"
                )
            header = read_header(texts[KEY], where=where)
            if len([f for f in fields if f.number == wire.GRAPH]) != 1:
                raise FileError(f"{where}: must hold one graph")
            if texts.get(DIGEST) != wire.digest(file, fields, texts[KEY]):
                raise FileError(
                    f"{where}: {DIGEST} does not fit its contents; the file is damaged or was changed, get it again"
                )
            file.seek(0)
            return header, file.read(size)
    except OSError as error:
        raise FileError(f"{where}: cannot be read ({error.strerror or error})") from error
    except (ValueError, OverflowError) as error:
        raise FileError(f"{where}: is cut short or no ONNX file ({error})") from error


def _take_weights(model: onnx.ModelProto, header: Header, *, where: str) -> dict[str, Array]:
    """Take the weights of the header out of the graph, in floating point, with whatever made them."""
    held = {tensor.name: tensor for tensor in model.graph.initializer}
    made = {weight.tensor for weight in header.weights} if header.store != "fp32" else set()
    makers = {output: node for node in model.graph.node for output in node.output if output in made}
    weights: dict[str, Array] = {}
    used: set[str] = set()
    for i, weight in enumerate(header.weights):
        spot = f"{where}: weights[{i}]"
        parts = _parts(weight, header.store, makers.get(weight.tensor), spot)
        arrays = {part: _array(held, name, part, spot) for part, name in parts.items()}
        used |= set(parts.values())
        weights[weight.tensor] = _weight(weight, arrays, spot)
    rest = [tensor for tensor in model.graph.initializer if tensor.name not in used]
    nodes = [node for node in model.graph.node if not made.intersection(node.output)]
    del model.graph.initializer[:]
    model.graph.initializer.extend(rest)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return weights


def _parts(weight: Weight, store: str, maker: NodeProto | None, where: str) -> dict[str, str]:
    """Return the names of the initializers that a weight is stored in."""
    if store == "fp32":
        return {"float": weight.tensor}
    wanted = {"fp16": ("Cast", ("half",)), "int8": ("DequantizeLinear", ("codes", "scale", "zero"))}
    operator, names = wanted[store]
    if maker is None or maker.op_type != operator:
        raise FileError(f"{where}.tensor: {weight.tensor[:60]!r} must come from a {operator} node with store={store!r}")
    if list(maker.input) != [f"{weight.tensor}.{name}" for name in names]:
        raise FileError(f"{where}.tensor: {weight.tensor[:60]!r} is made from {list(maker.input)[:3]}")
    return dict(zip(names, maker.input, strict=True))


_KINDS = {
    "float": TensorProto.FLOAT, "half": TensorProto.FLOAT16, "codes": TensorProto.INT8, "scale": TensorProto.FLOAT,
    "zero": TensorProto.INT8,
}  # fmt: skip


def _array(held: dict[str, TensorProto], name: str, part: str, where: str) -> NDArray[Any]:
    tensor = held.get(name)
    if tensor is None:
        raise FileError(f"{where}.tensor: the graph holds no tensor {name[:60]!r}")
    spot = f"{where}: tensor {name[:60]!r}"
    check_tensor(tensor, where=spot)
    if tensor.data_type != _KINDS[part]:
        raise FileError(f"{spot}: data_type must be {_KINDS[part]}, got {tensor.data_type}")
    array = numpy_helper.to_array(tensor)
    if not np.isfinite(array).all():
        raise FileError(f"{spot}: has infinite entries")
    return array


def _weight(weight: Weight, arrays: dict[str, NDArray[Any]], where: str) -> Array:
    """Return a weight in floating point, and see that it fits what the header says."""
    main = next(iter(arrays.values()))
    if main.size == 0:
        raise FileError(f"{where}.tensor: {weight.tensor[:60]!r} is empty")
    if weight.axis is not None and not 0 <= weight.axis < main.ndim:
        raise FileError(f"{where}.axis: must be 0 to {main.ndim - 1}, got {weight.axis}")
    if "codes" not in arrays:
        return np.asarray(main, np.float32)
    shape = () if weight.axis is None else (main.shape[weight.axis],)
    scale, zero = arrays["scale"], arrays["zero"]
    if scale.shape != shape or zero.shape != shape:
        raise FileError(f"{where}.tensor: {weight.tensor[:60]!r} needs scales of shape {shape}, got {scale.shape}")
    if not (scale > 0).all():
        raise FileError(f"{where}.tensor: the scale of {weight.tensor[:60]!r} must be above zero")
    with np.errstate(over="ignore"):
        value = Codes(main, scale, zero, weight.axis, 8).dequantized()
    if not np.isfinite(value).all():
        raise FileError(f"{where}.tensor: the scale of {weight.tensor[:60]!r} is too large")
    return value


def _check_points(model: onnx.ModelProto, header: Header, weights: dict[str, Array], *, where: str) -> None:
    """See that the header and the graph speak of the same things."""
    graph = model.graph
    made = {output for node in graph.node for output in node.output if output}
    used = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    held = {tensor.name: tensor for tensor in graph.initializer}
    for i, activation in enumerate(header.activations):
        if activation.value not in made:
            raise FileError(f"{where}: activations[{i}].value: no node makes {activation.value[:60]!r}")
    for i, weight in enumerate(header.weights):
        if weight.tensor not in used:
            raise FileError(f"{where}: weights[{i}].tensor: no node uses {weight.tensor[:60]!r}")
    values = {activation.value for activation in header.activations}
    for i, bias in enumerate(header.biases):
        if bias.value is not None and bias.value not in values:
            raise FileError(f"{where}: biases[{i}].value: {bias.value[:60]!r} is not the value of an activation")
        _check_bias(bias, held.get(bias.tensor), weights.get(bias.weight), where=f"{where}: biases[{i}]")
    names = [*weights, *held, *made, *(value.name for value in graph.input)]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise FileError(f"{where}: {twice[0][:60]!r} is made twice")


def _check_bias(bias: Bias, tensor: TensorProto | None, weight: Array | None, *, where: str) -> None:
    if weight is None or weight.ndim < 2:
        raise FileError(f"{where}.weight: {bias.weight[:60]!r} is not the tensor of a layer's weight")
    first, second = weight.shape[:2]
    outputs, inputs = (second * bias.groups, first) if bias.transposed else (first, second * bias.groups)
    if tensor is None or tensor.data_type != TensorProto.FLOAT or list(tensor.dims) != [outputs]:
        raise FileError(f"{where}.tensor: {bias.tensor[:60]!r} must be a tensor of the graph with {outputs} numbers")
    if outputs % bias.groups or inputs % bias.groups:
        raise FileError(f"{where}.groups: {bias.groups} does not divide {outputs} outputs and {inputs} inputs")
    if bias.mean is not None and len(bias.mean) != inputs:
        raise FileError(f"{where}.mean: must be {inputs} numbers, got {len(bias.mean)}")
