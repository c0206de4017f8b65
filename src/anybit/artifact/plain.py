"""Somebody else's ONNX file, read and brought into the form that a master has: constants as initializers, one opset."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper, version_converter
from onnx.inliner import inline_selected_functions

from anybit.artifact import protobuf_scan
from anybit.artifact.bounds import MOST_GROWTH
from anybit.artifact.check import NEWEST, OLDEST, bytes_of, check_length, check_model, tensors_of
from anybit.artifact.header import KEY
from anybit.artifact.model import LARGE, OnnxModel, all_graphs, location, names_in, set_nodes, shaped
from anybit.artifact.normalize import FOLDED, as_bytes, free_sizes, normalize
from anybit.artifact.products import spell_out
from anybit.artifact.upgrade import upgrade
from anybit.common.text import explaining
from anybit.errors import FileError
from anybit.graph.onnx_nodes import OPSET, computed, entries_of, outlined

Array = npt.NDArray[Any]


def read_plain(path: Path) -> onnx.ModelProto:
    """Read somebody's ONNX model for a look at it; large tensors have a name and a shape, and no numbers."""
    return read_model_file(path).proto


def read_model_file(path: Path) -> OnnxModel:
    """Read somebody's ONNX model and bring it into the form that a master has."""
    size = protobuf_scan.size_of(path, what="an ONNX model")
    _check_kind(path)
    model = OnnxModel(onnx.ModelProto())
    with explaining(FileError, f"{path}: is cut short or no ONNX file"):
        with path.open("rb") as file:
            protobuf_scan.check_cost(file, size)
        model.proto.ParseFromString(path.read_bytes())
    if any(entry.key == KEY for entry in model.proto.metadata_props):
        raise FileError(
            f"{path}: is a master already and runs at any width as it is; for other settings adopt the file that it "
            "was made of, and to fit widths to data use anybit reconstruct"
        )
    with explaining(FileError, f"{path}: cannot be read as an ONNX model, version {OPSET} of its operators"):
        check_length(model.graph, where=str(path))
        _load_external(model, path)
        normalize(model, where=str(path))
        model = _with_our_version(model)
        as_bytes(model.graph)
        _settle(model)
        _settle_casts(model)
        _fold_constants(model)
        if spell_out(model):
            _fold_constants(model)
        _split_directions(model)
    proto = model.proto
    proto.ir_version = 10
    del proto.metadata_props[:]
    check_model(model, {}, where=str(path))
    return model


KINDS = (
    (4, b"ORTM", "a model in ONNX Runtime's own format; adopt the .onnx file that it was made of"),
    (4, b"TFL3", "a TensorFlow Lite model; convert it to ONNX first"),
    (0, b"PK\x03\x04", "a zip archive, as PyTorch and Keras write them; export the model to ONNX first"),
    (0, b"\x89HDF", "an HDF5 file, as Keras writes it; convert the model to ONNX first"),
    (0, b"version https://git-lfs", "only a pointer of Git LFS; fetch the file itself with git lfs pull"),
    (0, b"<", "a web page or XML, no model; download the file itself"),
)
"""What people have instead of an ONNX file: where in it, which bytes, and what to do."""


def _check_kind(path: Path) -> None:
    """Refuse what is another kind of file by its name."""
    with path.open("rb") as file:
        head = file.read(64)
    for start, sign, what in KINDS:
        if head[start:].startswith(sign):
            raise FileError(f"{path}: is {what}")


def _with_our_version(model: OnnxModel) -> OnnxModel:
    """Return a model with the operators of this version; where that cannot be, it keeps its own."""
    upgrade(model)
    version = next((o.version for o in model.proto.opset_import if o.domain == ""), 0)
    nested = len(list(all_graphs(model.graph))) > 1  # where the converter does not go
    if version == OPSET or (nested and OLDEST <= version <= NEWEST):
        return model
    try:
        return _converted(model)
    except RuntimeError:
        if not OLDEST <= version <= NEWEST:
            raise
        return model


def _load_external(model: OnnxModel, path: Path) -> None:
    """Take data from other files, if those lie in the model's folder."""
    graph, folder = model.graph, path.parent.resolve()
    tensors = [tensor for inner in all_graphs(graph) for tensor in inner.initializer]
    tensors += [t for inner in all_graphs(graph) for n in inner.node for a in n.attribute for t in tensors_of(a)]
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
        model.fill(tensor, found)


def _converted(model: OnnxModel) -> OnnxModel:
    """Return a model with the operators of this version; the converter sees large tensors as inputs."""
    for tensor in model.graph.initializer:
        if len(tensor.raw_data) >= LARGE:  # the converter would copy it several times
            model.fill(tensor, model.array(tensor))
    rest, large = outlined(model.proto, lambda tensor: model.apart(tensor) is not None)
    rest.ir_version = 10  # before version 4 every initializer was an input too
    rest = _without_later(rest)
    proto = version_converter.convert_version(rest, OPSET)
    proto.graph.initializer.extend(large)
    return OnnxModel(proto, model.arrays)


def _without_later(model: onnx.ModelProto) -> onnx.ModelProto:
    """Spell out operators that came after this version, which the converter cannot do without."""
    later = [node for node in model.graph.node if node.domain == "" and not onnx.defs.has(node.op_type, OPSET)]
    if not later:
        return model
    version = next(o.version for o in model.opset_import if o.domain == "")
    for node in later:  # ONNX leaves out what a node does not say
        said = {attribute.name for attribute in node.attribute}
        usual = onnx.defs.get_schema(node.op_type, version).attributes.values()
        node.attribute.extend(a.default_value for a in usual if a.name not in said and a.default_value.name)
    held = (helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in model.graph.initializer)
    model.graph.value_info.extend(held)
    return inline_selected_functions(model, [("", node.op_type) for node in later], inline_schema_functions=True)


def _settle(model: OnnxModel) -> None:
    """Make constants initializers, and put an Identity behind every input, so that nodes make all values."""
    graph = model.graph
    held = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in held]  # old models list weights as inputs too
    nodes, swap = [], {}
    for value in inputs:
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            swap[value.name] = f"{value.name}.input"
            nodes.append(helper.make_node("Identity", [value.name], [swap[value.name]], name=f"{value.name}/Identity"))
    for node in graph.node:
        if node.op_type == "Constant" and (constant := _constant(node)) is not None:
            graph.initializer.add().CopyFrom(constant)
            continue
        for names in (node.input, node.output):
            names[:] = [swap.get(name, name) for name in names]
        nodes.append(node)
    texts = [tensor for tensor in graph.initializer if tensor.data_type == TensorProto.STRING]
    numbers = [tensor for tensor in graph.initializer if tensor.data_type != TensorProto.STRING]
    model.set_initializers(
        [*(model.tensor(model.array(tensor), swap.get(tensor.name, tensor.name)) for tensor in numbers), *texts]
    )
    del graph.value_info[:]
    del graph.input[:]
    graph.input.extend(inputs)
    free_sizes(graph)
    set_nodes(graph, nodes)


_NUMBERS = {"value_int": np.int64, "value_ints": np.int64, "value_float": np.float32, "value_floats": np.float32}


def _constant(node: NodeProto) -> TensorProto | None:
    """Return what a Constant node makes as a tensor, in whichever way it is written there; texts are none."""
    tensor = TensorProto()
    attribute = node.attribute[0]
    if attribute.name == "value":
        tensor.CopyFrom(attribute.t)
    elif attribute.name in _NUMBERS:
        value = helper.get_attribute_value(attribute)
        tensor.CopyFrom(numpy_helper.from_array(np.asarray(value, _NUMBERS[attribute.name])))
    else:
        return None
    tensor.name = node.output[0]
    return tensor


def _settle_casts(model: OnnxModel) -> None:
    """Let a constant that is cast to the type of some value be cast to that type by its name."""
    casts = [node for node in model.graph.node if node.op_type == "CastLike"]
    if not casts:
        return
    graph = onnx.shape_inference.infer_shapes(model.proto).graph
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.input)}
    for node in casts:
        if kinds.get(node.input[1]):
            node.op_type = "Cast"
            del node.attribute[:]
            node.attribute.append(helper.make_attribute("to", kinds[node.input[1]]))
            del node.input[1:]


def _fold_constants(model: OnnxModel) -> None:
    """Compute what depends on constants alone and stands between a stored tensor and its use."""
    held = {tensor.name: tensor for tensor in model.graph.initializer if tensor.data_type != TensorProto.STRING}
    outputs = {value.name for value in model.graph.output}
    kept, room = [], MOST_GROWTH
    folded = FOLDED if model.graph.input else FOLDED - {"MatMul"}  # layers too are of constants alone then
    made: dict[tuple[str, tuple[int, ...], bytes], str] = {}
    same: dict[str, str] = {}  # branches often make the same of a weight that they share
    for node in model.graph.node:
        node.input[:] = [same.get(name, name) for name in node.input]
        names = [name for name in node.input if name]
        known = node.op_type in folded and names and all(name in held for name in names)
        arrays = {name: model.array(held[name]) for name in names} if known else {}
        known = known and len(node.output) == 1 and node.output[0] not in outputs
        entries = entries_of(node, arrays) if known else None
        room -= max(0, entries - sum(array.size for array in arrays.values())) if entries is not None else 0
        if entries is None or room < 0:  # what is too large is refused by whoever looks at sizes
            kept.append(node)
            continue
        value = np.asarray(computed(node, arrays), order="C")  # a number stays without dimensions
        first = made.setdefault((value.dtype.str, value.shape, sha256(value.tobytes()).digest()), node.output[0])
        if first != node.output[0]:
            same[node.output[0]] = first
            continue
        tensor = model.tensor(value, node.output[0])
        model.graph.initializer.append(tensor)
        held[tensor.name] = model.graph.initializer[-1]
    set_nodes(model.graph, kept)
    for node in (node for part in all_graphs(model.graph) for node in part.node if same):
        node.input[:] = [same.get(name, name) for name in node.input]
    used = names_in(model.graph) | outputs
    model.set_initializers([tensor for tensor in model.graph.initializer if tensor.name in used])
    for part in [part for part in all_graphs(model.graph) if part is not model.graph]:
        used = names_in(part) | {value.name for value in part.output}
        for tensor in [tensor for tensor in part.initializer if tensor.name not in used]:
            part.initializer.remove(tensor)


def _split_directions(model: OnnxModel) -> None:
    """Let each direction of a recurrent cell have weights of its own, as in PyTorch: they need scales of their own."""
    held = {tensor.name: tensor for tensor in model.graph.initializer}
    cells = [n for part in all_graphs(model.graph) for n in part.node if n.op_type in ("LSTM", "GRU", "RNN")]
    names = dict.fromkeys(name for node in cells for name in node.input[1:3] if name in held)
    joins = []
    for name in [name for name in names if held[name].dims[:1] == [2]]:
        parts = [f"{name}_{direction}" for direction in ("forward", "reverse")]
        array = model.array(held.pop(name))
        for part, own in zip(parts, array, strict=True):
            held[part] = model.tensor(own[None], part)
        joins.append(helper.make_node("Concat", parts, [name], name=f"{name}/Concat", axis=0))
    model.set_initializers(list(held.values()))
    set_nodes(model.graph, [*joins, *model.graph.node])
