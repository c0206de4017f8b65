"""`adopt`: a master out of somebody else's ONNX model, without PyTorch.

Batch norm is folded into the convolution in front, every layer with a constant weight becomes a weight point, and
what feeds those layers an activation point. Ranges come from calibration inputs or, where batch norm is still
there, from its parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper, version_converter

from anybit.artifact import protobuf_scan as wire
from anybit.artifact.bundle import Bundle, location, shaped
from anybit.artifact.check import OPSET, bytes_of, check_model, tensors_of
from anybit.artifact.format import STORES, Activation, Bias, Header, Weight
from anybit.artifact.master import write_master
from anybit.artifact.requantize import LAYERS, PASSING
from anybit.artifact.runtime import compile_model
from anybit.common.provenance import origin
from anybit.errors import DataError, FileError, RangeError, SpecError
from anybit.spec import FLOAT, Range

SIGMAS = 6.0
"""Standard deviations around the mean that a range from batch norm covers."""

HANDED_ON = PASSING - {"Concat", "Pad"}
"""Operators through which a range is followed back to where the values arise."""

Array = npt.NDArray[Any]
Feed = Mapping[str, Array]


def adopt(
    path: str | Path,
    out: str | Path,
    *,
    calibration: Iterable[Feed] | None = None,
    input_range: tuple[float, float] | None = None,
    per_channel: bool = False,
    store: str = "fp32",
    about: dict[str, Any] | None = None,
) -> None:
    """Write a master made of a plain ONNX model.

    Args:
        path: An ONNX model in floating point. Its data may lie in other files of the same folder, never outside.
        out: Where to write the master.
        calibration: Inputs by name, whose values set the ranges. Without them ranges come from batch norm.
        input_range: The interval of the network's input, which is then quantized too.
        per_channel: One scale per output channel of a weight.
        store: How weights are stored: "fp32", "fp16" or "int8".
        about: What a reader should know, ready for JSON.

    Raises:
        RangeError: Without calibration, for values that no batch norm reaches.
    """
    if store not in STORES:
        raise SpecError(f"store must be one of {', '.join(STORES)}; got {store!r}")
    model = read_bundle(Path(path))
    where = str(path)
    norms = fold_batch_norms(model)
    values = _points(model.graph)
    ranges: dict[str, Range] = {}
    if calibration is not None:
        ranges = calibrate(model, list(values), calibration, where=where)
    else:
        ranges = from_batch_norm(model.graph, norms)
    if input_range is not None:
        ranges.update(
            {value: Range(*input_range, "given by the user") for value, kind in values.items() if kind == "input"}
        )
    if missing := [value for value, kind in values.items() if kind == "activation" and value not in ranges]:
        raise RangeError(f"{where}: no batch norm tells the range of these values; pass calibration inputs", missing)
    weights = _weights(model.graph, per_channel=per_channel)
    activations = tuple(
        Activation(v, kind, v, ((FLOAT, ranges[v]),) if v in ranges else (), floor=2 if kind == "activation" else 8)
        for v, kind in values.items()
    )
    known = {"adopted_from": Path(path).name, "origin": origin(), **(about or {})}
    write_master(out, model, Header(weights, activations, _biases(model.graph, values), store, known))


# Reading


def read_plain(path: Path) -> onnx.ModelProto:
    """Read somebody's ONNX model for a look at it; large tensors have a name and a shape, and no numbers."""
    return read_bundle(path).model


def read_bundle(path: Path) -> Bundle:
    """Read somebody's ONNX model and bring it into the form that a master has."""
    size = wire.size_of(path, what="an ONNX model")
    bundle = Bundle(onnx.ModelProto())
    try:
        with path.open("rb") as file:
            wire.check_cost(file, size)
        bundle.model.ParseFromString(path.read_bytes())
        _load_external(bundle, path)
        if [o.version for o in bundle.model.opset_import if o.domain in ("", "ai.onnx")] != [OPSET]:
            bundle = _converted(bundle)
        _settle(bundle)
    except FileError:
        raise
    except Exception as error:  # the C++ side raises what it likes
        reason = " ".join(str(error).split())[:200]
        raise FileError(
            f"{path}: cannot be read as an ONNX model, version {OPSET} of its operators ({reason})"
        ) from error
    model = bundle.model
    kept = [entry for entry in model.opset_import if entry.domain == ""]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    model.ir_version = 10
    del model.metadata_props[:]
    check_model(bundle, {}, where=str(path))
    if not any(node.op_type in LAYERS for node in model.graph.node):
        raise FileError(f"{path}: has no layer to quantize; {', '.join(sorted(LAYERS))} are known")
    return bundle


def _load_external(bundle: Bundle, path: Path) -> None:
    """Take data from other files, if those lie in the model's folder."""
    graph, folder = bundle.graph, path.parent.resolve()
    for node in graph.node:
        if any(a.graphs or a.HasField("g") for a in node.attribute):
            raise FileError(f"{path}: node {node.name[:60]!r} has a subgraph; control flow is not supported")
    tensors = [*graph.initializer, *(t for n in graph.node for a in n.attribute for t in tensors_of(a))]
    files: dict[Path, Array] = {}
    for tensor in tensors:
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        spot = f"{path}: tensor {tensor.name[:60]!r}"
        target = (folder / location(tensor)).resolve()
        if not location(tensor) or not target.is_relative_to(folder) or not target.is_file():
            raise FileError(f"{spot}: its data lie outside the folder, at {location(tensor)[:80]!r}")
        if target not in files:
            files[target] = np.memmap(target, np.uint8, "r")
        start = int(next((entry.value for entry in tensor.external_data if entry.key == "offset"), 0))
        length = bytes_of(tensor, where=spot)
        if start < 0 or start + length > len(files[target]):
            raise FileError(f"{spot}: needs {length} bytes from byte {start} on, {target.name} ends before")
        found = np.require(shaped(files[target][start : start + length], tensor), requirements="A")
        bundle.fill(tensor, found)


def _converted(bundle: Bundle) -> Bundle:
    """Return a model with the operators of this version; the converter sees large tensors as inputs."""
    large = [tensor for tensor in bundle.graph.initializer if bundle.apart(tensor) is not None]
    rest = Bundle(bundle.copy().model)
    rest.set_initializers([tensor for tensor in bundle.graph.initializer if bundle.apart(tensor) is None])
    listed = {value.name for value in rest.graph.input}
    rest.graph.input.extend(
        helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        for tensor in large
        if tensor.name not in listed
    )
    model = version_converter.convert_version(rest.model, OPSET)
    model.graph.initializer.extend(large)
    return Bundle(model, bundle.arrays)


def _settle(bundle: Bundle) -> None:
    """Make constants initializers, and put an Identity behind every input, so that nodes make all values."""
    graph = bundle.graph
    held = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in held]  # old models list weights as inputs too
    nodes, swap = [], {}
    for value in inputs:
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            swap[value.name] = f"{value.name}.input"
            nodes.append(helper.make_node("Identity", [value.name], [swap[value.name]], name=f"{value.name}/Identity"))
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            tensor = graph.initializer.add()
            tensor.CopyFrom(node.attribute[0].t)
            tensor.name = node.output[0]
            continue
        node.input[:] = [swap.get(name, name) for name in node.input]
        nodes.append(node)
    bundle.set_initializers([bundle.tensor(bundle.array(tensor), tensor.name) for tensor in graph.initializer])
    del graph.value_info[:]
    del graph.input[:]
    graph.input.extend(inputs)
    del graph.node[:]
    graph.node.extend(nodes)


# Batch norm


def fold_batch_norms(bundle: Bundle) -> dict[str, tuple[Array, Array]]:
    """Fold every batch norm that alone follows a convolution; return beta and gamma of each value that has them."""
    graph = bundle.graph
    held = {tensor.name: tensor for tensor in graph.initializer}
    uses = Counter(name for node in graph.node for name in node.input) + Counter(v.name for v in graph.output)
    makers = {value: node for node in graph.node for value in node.output}
    norms: dict[str, tuple[Array, Array]] = {}
    kept = []
    for node in graph.node:
        kept.append(node)
        if node.op_type != "BatchNormalization" or any(name not in held for name in node.input[1:5]):
            continue
        gamma, beta, mean, var = (bundle.array(held[name]).astype(np.float32) for name in node.input[1:5])
        norms[node.output[0]] = beta, gamma
        layer = makers.get(node.input[0])
        if layer is None or layer.op_type != "Conv" or layer.input[1] not in held:
            continue
        if uses[layer.output[0]] != 1 or uses[layer.input[1]] != 1:
            continue
        eps = next((a.f for a in node.attribute if a.name == "epsilon"), 1e-5)
        factor = gamma / np.sqrt(var + np.float32(eps))
        weight = bundle.array(held[layer.input[1]])
        has_bias = len(layer.input) > 2 and bool(layer.input[2])
        old = bundle.array(held[layer.input[2]]) if has_bias else np.zeros_like(mean)
        bundle.fill(held[layer.input[1]], weight * factor.reshape(-1, *[1] * (weight.ndim - 1)))
        bias = f"{layer.input[1]}.bias"
        graph.initializer.append(bundle.tensor(np.asarray(beta + (old - mean) * factor, np.float32), bias))
        layer.input[:] = [*layer.input[:2], bias]
        layer.output[0] = node.output[0]
        kept.pop()
    del graph.node[:]
    graph.node.extend(kept)
    used = {name for node in kept for name in node.input}
    bundle.set_initializers([tensor for tensor in graph.initializer if tensor.name in used])
    return norms


def from_batch_norm(graph: onnx.GraphProto, norms: dict[str, tuple[Array, Array]]) -> dict[str, Range]:
    """Return the interval of every value that some batch norm reaches, through functions of one value and sums."""
    held = {tensor.name: tensor for tensor in graph.initializer}
    ends: dict[str, tuple[float, float]] = {}
    for node in graph.node:
        name = node.output[0] if node.output else ""
        if name in norms:
            beta, gamma = norms[name]
            reach = SIGMAS * np.abs(gamma)
            ends[name] = float((beta - reach).min()), float((beta + reach).max())
            continue
        known = [ends[value] for value in node.input if value in ends]
        if node.op_type == "Relu" and known:
            ends[name] = max(0.0, known[0][0]), max(0.0, known[0][1])
        elif node.op_type == "Clip" and known and all(not v or v in held for v in node.input[1:]):
            low, high = known[0]
            bounds = [float(numpy_helper.to_array(held[v])) if v else None for v in [*node.input[1:], "", ""][:2]]
            least = low if bounds[0] is None else bounds[0]
            most = high if bounds[1] is None else bounds[1]
            ends[name] = min(max(low, least), most), min(max(high, least), most)
        elif node.op_type == "Add" and len(known) == 2:
            ends[name] = known[0][0] + known[1][0], known[0][1] + known[1][1]
        elif node.op_type in (PASSING | {"AveragePool", "GlobalAveragePool", "ReduceMean"}) - {"Concat"} and known:
            ends[name] = known[0]
        elif node.op_type == "Concat" and len(known) == len(node.input):
            ends[name] = min(low for low, _ in known), max(high for _, high in known)
    return {name: Range(low, high, "batch norm") for name, (low, high) in ends.items()}


# Points


def _weights(graph: onnx.GraphProto, *, per_channel: bool) -> tuple[Weight, ...]:
    held = {tensor.name for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT}
    axes: dict[str, set[int]] = {}
    for node in graph.node:
        if node.op_type in LAYERS and node.input[1] in held:
            axes.setdefault(node.input[1], set()).add(_output_axis(node))
    return tuple(
        Weight(name, name, next(iter(found)) if per_channel and len(found) == 1 else None, channels=min(found))
        for name, found in axes.items()
    )


def _output_axis(node: NodeProto) -> int:
    turned = any(a.name == "transB" and a.i for a in node.attribute)
    return 0 if node.op_type == "Conv" or turned else 1


def _points(graph: onnx.GraphProto) -> dict[str, str]:
    """Return the values to quantize, in the order of the graph, and the kind of each."""
    makers = {value: node for node in graph.node for value in node.output}
    users: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)
    held = {tensor.name for tensor in graph.initializer}
    inputs = {value.name for value in graph.input}
    feeding: set[str] = set()
    for node in graph.node:
        if node.op_type in LAYERS and node.input[1] in held:
            value = node.input[0]
            while value in makers and makers[value].op_type in HANDED_ON and makers[value].input[0] in makers:
                value = makers[value].input[0]
            feeding.add(value)
    ends: set[str] = set()
    for node in graph.node:
        if node.op_type == "Conv":
            value = node.output[0]
            while value not in feeding and [n.op_type for n in users.get(value, [])] in (["Relu"], ["Clip"]):
                value = users[value][0].output[0]
            if value not in feeding and value in users:
                ends.add(value)
    found = {}
    for value, node in makers.items():
        if value in feeding:
            found[value] = "input" if node.op_type == "Identity" and node.input[0] in inputs else "activation"
        elif value in ends:
            found[value] = "accumulator"
    return found


def _biases(graph: onnx.GraphProto, points: Mapping[str, str]) -> tuple[Bias, ...]:
    held = {tensor.name: tensor for tensor in graph.initializer}
    makers = {value: node for node in graph.node for value in node.output}
    uses = Counter(name for node in graph.node for name in node.input)
    found = []
    for node in graph.node:
        if node.op_type not in ("Conv", "Gemm") or len(node.input) < 3 or node.input[1] not in held:
            continue
        bias, value = node.input[2], node.input[0]
        while value not in points and value in makers and makers[value].op_type in HANDED_ON:
            value = makers[value].input[0]
        if bias not in held or uses[bias] != 1 or value not in points or _output_axis(node) != 0:
            continue
        groups = next((a.i for a in node.attribute if a.name == "group"), 1)
        if list(held[bias].dims) == [held[node.input[1]].dims[0]]:
            found.append(Bias(bias, node.input[1], value, groups=groups))
    return tuple(found)


def calibrate(model: Bundle, values: list[str], feeds: Iterable[Feed], *, where: str) -> dict[str, Range]:
    """Return the smallest and largest entry of each value over all inputs."""
    watched = model.copy()
    del watched.graph.output[:]
    for value in values:
        for operator in ("ReduceMin", "ReduceMax"):
            name = f"{value}.{operator}"
            watched.graph.node.append(helper.make_node(operator, [value], [name], name=name, keepdims=0))
            watched.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, []))
    engine = compile_model(watched, exact=False, threads=None, where=where)
    ends: Array | None = None
    for feed in feeds:
        try:
            found = np.array(engine.run(None, dict(feed)), np.float64).reshape(-1, 2)
        except Exception as error:  # ONNX Runtime has no common base for its exceptions
            reason = " ".join(str(error).split())[:200]
            raise DataError(f"{where}: a calibration input cannot be run ({reason})") from error
        if ends is None:
            ends = found
        ends = np.stack([np.minimum(ends[:, 0], found[:, 0]), np.maximum(ends[:, 1], found[:, 1])], 1)
    if ends is None:
        raise DataError("calibration saw no data; at least one input is expected")
    return {v: Range(low, high, "calibration, min-max") for v, (low, high) in zip(values, ends.tolist(), strict=True)}
