"""From a prepared network to one ONNX file: `save(net, "model.onnx")`.

`torch.onnx` translates the graph. Each quantization point goes through it as an operator of our own, which marks
the tensor it stands on; afterwards the marks are taken out and what they stood on is written into the header.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import NodeProto, helper
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from anybit.artifact.check import OPSET
from anybit.artifact.header import Header
from anybit.artifact.layers import apart
from anybit.artifact.master import Master, write_master
from anybit.artifact.model import LARGE, OnnxModel, location
from anybit.common.provenance import origin
from anybit.errors import MissingDependency, NetworkError, SpecError
from anybit.simulate.modules import Activation, Bias, Weight
from anybit.simulate.network import QuantizedNetwork
from anybit.simulate.recurrent import to_operators, translations
from anybit.simulate.signature import free_dims, output_names

BATCH = "batch"
"""What the free dimension is called in the file."""

_DOMAIN, _MARK = "anybit", "Mark"


@torch.library.custom_op("anybit::mark", mutates_args=())
def mark(x: Tensor, index: int) -> Tensor:
    """Do nothing, visibly: `index` counts the marked places of a network."""
    return x.clone()


@mark.register_fake
def _(x: Tensor, index: int) -> Tensor:
    return torch.empty_like(x)


def save(net: QuantizedNetwork, path: str | Path, *, store: str = "fp32", about: dict[str, Any] | None = None) -> None:
    """Write `net` as a master: one ONNX file that runs at any width, without PyTorch.

    Args:
        net: A prepared network; the width it runs at now does not matter.
        path: Where to write; the file is either complete or not there.
        store: How weights are stored: "fp32", "fp16", or "int8", from whose codes lower widths are then derived.
        about: What a reader should know, ready for JSON: how it was trained, what was measured.

    Raises:
        NetworkError: The network has an operator that ONNX cannot express.
    """
    if not isinstance(net, QuantizedNetwork):
        raise SpecError(f"save takes a network from anybit.prepare(model, example_input), got {type(net).__name__}")
    model = translate(net)
    write_master(path, model, Header(net.plan, store, {"origin": origin(), **(about or {})}))


def as_master(net: QuantizedNetwork) -> Master:
    """Return the network as a master that is nowhere on disk."""
    return apart(translate(net), net.plan, Path("the network"))


def translate(net: QuantizedNetwork) -> OnnxModel:
    """Return the network in float32 as an ONNX model, in which every point and bias of the plan has its name."""
    holders = [node for node in net.body.graph.nodes if node.op == "placeholder"]
    body, marked = _marked(net.body)
    model = _translate(body, holders)
    _name_outputs(model.proto, output_names(net.body, len(model.graph.output)))
    _tidy(model.proto)
    _take_marks(model.proto, marked)
    if any("anybit_free" in node.meta for node in holders):
        _free_outputs(model.proto)
    return model


# To the translator


def _marked(body: fx.GraphModule) -> tuple[fx.GraphModule, list[str]]:
    """Return the body in float32 with a mark in place of every point and bias, and the names they stand for."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(body.graph, {}))
    marked: list[str] = []
    for node in [node for node in graph.nodes if node.op == "call_module"]:
        module = body.get_submodule(str(node.target))
        assert isinstance(module, Weight | Activation | Bias)
        with graph.inserting_before(node):
            source = node.args[0] if node.args else graph.get_attr(f"{node.target}.master")
            marked.append(module.point.place)
            node.replace_all_uses_with(graph.call_function(torch.ops.anybit.mark.default, (source, len(marked) - 1)))
        graph.erase_node(node)
    graph.eliminate_dead_code()
    to_operators(graph)
    copied = fx.GraphModule(body, graph)
    floats = {p.dtype for p in copied.parameters()} | {b.dtype for b in copied.buffers()}
    if floats & {torch.float64, torch.float16, torch.bfloat16} or _device(copied).type != "cpu":
        copied = copy.deepcopy(copied).float().cpu()
        _retype(copied.graph)
        copied.recompile()
    return copied, marked


def _device(module: fx.GraphModule) -> torch.device:
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def _retype(graph: fx.Graph) -> None:
    """Let constants that the network makes itself be of float32 and on the CPU, as the master is."""
    for node in graph.nodes:
        given = {k: v for k, v in node.kwargs.items() if isinstance(v, torch.dtype) and v.is_floating_point}
        places = {k: v for k, v in node.kwargs.items() if isinstance(v, torch.device)}
        node.kwargs = {
            **node.kwargs, **dict.fromkeys(given, torch.float32), **dict.fromkeys(places, torch.device("cpu"))
        }  # fmt: skip


def _example(node: fx.Node) -> Tensor:
    """Return an input of the right shape and type: the translator looks at nothing else."""
    value = node.meta["val"]
    kind = torch.float32 if value.is_floating_point() else value.dtype
    sizes = [size if isinstance(size, int) else max(2, int(size.node.hint)) for size in value.shape]
    return torch.zeros(sizes, dtype=kind)


def _translate(body: fx.GraphModule, holders: list[fx.Node]) -> OnnxModel:
    """Translate with the sizes free that the captured network leaves free.

    Sizes that were captured as numbers, and found to work at others, are only called free in the file.
    """
    example = tuple(_example(node) for node in holders)
    symbolic = [{d for d, n in enumerate(node.meta["val"].shape) if not is_concrete_int(n)} for node in holders]
    free = tuple(dict.fromkeys(dims, torch.export.Dim.AUTO) or None for dims in symbolic)
    table: dict[Any, Callable[..., Any]] = {torch.ops.anybit.mark.default: _mark_in_onnx(), **translations()}
    with torch.no_grad(), _quietly():
        try:
            program = torch.onnx.export(
                torch.export.export(body, example, dynamic_shapes=free),
                dynamo=True,
                opset_version=OPSET,
                input_names=[node.name for node in holders],
                custom_translation_table=table,
                verbose=False,
            )
        except Exception as error:  # whatever part of PyTorch gave up
            text = str(error.__cause__ or error).strip()
            raise NetworkError("this network cannot be written as ONNX", [text.splitlines()[0][:300]]) from error
    assert program is not None
    model = _model(program)
    for value, node in zip(model.graph.input, holders, strict=True):
        for d, dim in enumerate(value.type.tensor_type.shape.dim):
            if d in free_dims(node) and not dim.dim_param:
                dim.dim_param = f"{node.name}_{d}"
    return model


def _model(program: torch.onnx.ONNXProgram) -> OnnxModel:
    """Return what the translator made, with large weights where they are: in the network's own memory."""
    from onnx_ir import ExternalTensor, Shape

    model = OnnxModel(onnx.ModelProto())
    for name, value in program.model.graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and tensor.nbytes >= LARGE:
            stub = model.tensor(tensor.numpy(), name)
            value.const_value = ExternalTensor(
                location(stub), 0, tensor.nbytes, tensor.dtype, shape=Shape(tensor.numpy().shape), name=name
            )
    model.proto.CopyFrom(program.model_proto)
    return model


def _mark_in_onnx() -> Callable[..., Any]:
    try:
        from onnxscript import values
    except ModuleNotFoundError as error:
        raise MissingDependency("onnxscript", "torch", "anybit.save") from error
    schema = onnx.defs.OpSchema
    operator = values.Op(
        values.Opset(_DOMAIN, 1),
        _MARK,
        schema(
            _MARK,
            _DOMAIN,
            1,
            inputs=[schema.FormalParameter("x", "T")],
            outputs=[schema.FormalParameter("y", "T")],
            type_constraints=[("T", ["tensor(float)"], "")],
            attributes=[schema.Attribute("index", schema.AttrType.INT)],
        ),
    )
    return lambda x, index: operator(x, index=index)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep what the translator says about itself from the user's terminal; what matters is raised."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


# From the translator


def _name_outputs(model: onnx.ModelProto, names: list[str]) -> None:
    """Give the outputs their names; whatever had one of them before gets another."""
    old = [value.name for value in model.graph.output]
    swap = {name: f"{name}__inner" for name in names} | dict(zip(old, names, strict=True))
    inputs = {value.name for value in model.graph.input}
    for name in inputs.intersection(swap):
        if name not in old:
            raise NetworkError(f"an input and an output are both called {name!r}; rename one of them")
    _rename(model, swap)
    for value, name in zip(model.graph.output, names, strict=True):
        value.name = name


def _rename(model: onnx.ModelProto, swap: dict[str, str]) -> None:
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [swap.get(name, name) for name in names]
    for tensor in model.graph.initializer:
        tensor.name = swap.get(tensor.name, tensor.name)


def _tidy(model: onnx.ModelProto) -> None:
    """Drop what describes the machine the file was made on, and call the free dimension what it is."""
    for node in model.graph.node:
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
    for tensor in model.graph.initializer:
        tensor.ClearField("metadata_props")
        tensor.ClearField("doc_string")
    for field in ("metadata_props", "doc_string", "value_info"):
        model.graph.ClearField(field)
    for value in [*model.graph.input, *model.graph.output]:
        value.ClearField("metadata_props")
        for i, dim in enumerate(value.type.tensor_type.shape.dim):
            if not dim.HasField("dim_value"):
                dim.dim_param = BATCH if i == 0 else dim.dim_param
    model.ClearField("functions")
    model.ClearField("metadata_props")
    model.producer_name = "anybit"
    model.graph.name = "network"
    kept = [entry for entry in model.opset_import if entry.domain == ""]
    del model.opset_import[:]
    model.opset_import.extend(kept)


def _free_outputs(proto: onnx.ModelProto) -> None:
    """Leave those sizes of the outputs open that follow the sizes of the pictures."""
    for value in proto.graph.output:
        for d, dim in enumerate(value.type.tensor_type.shape.dim):
            if d and dim.HasField("dim_value"):
                dim.dim_param = f"{value.name}_{d}"
    found = {value.name: value for value in onnx.shape_inference.infer_shapes(proto).graph.output}
    for value in proto.graph.output:
        value.CopyFrom(found[value.name])


def _take_marks(proto: onnx.ModelProto, marked: list[str]) -> None:
    """Take the marks out and give the tensor that each stood on the name of its point."""
    graph = proto.graph
    held = {tensor.name: tensor for tensor in graph.initializer}
    fixed = {value.name for value in [*graph.input, *graph.output]}
    uses = Counter(name for node in graph.node for name in node.input) + Counter(v.name for v in graph.output)
    swap: dict[str, str] = {}
    nodes: list[NodeProto] = []
    names: dict[str, str] = {}
    for node in graph.node:
        if node.domain != _DOMAIN:
            nodes.append(node)
            continue
        (source,), (result,), index = node.input, node.output, node.attribute[0].i
        source = swap.get(source, source)
        if source in held:
            place = _own_tensor(graph, held[source], index, uses[source])
        elif source in fixed or source in names or result in fixed or uses[source] > 1:
            # The point needs a value of its own: one that a node makes and only the point's users see.
            place = result if result in fixed else f"{source}.{index}"
            nodes.append(helper.make_node("Identity", [source], [place]))
        else:
            place = source
        swap[result] = names[place] = place
        names[place] = marked[index]
    del graph.node[:]
    graph.node.extend(nodes)
    _rename(proto, swap)
    _claim(proto, names, fixed)


def _claim(proto: onnx.ModelProto, names: dict[str, str], fixed: set[str]) -> None:
    """Rename tensors as the plan calls them; whatever had one of those names before gets another.

    An output of the network keeps its name: the point on it gets a node of its own in front.
    """
    graph = proto.graph
    for place in [place for place in names if place in fixed]:
        inner = f"{place}__point"
        _rename(proto, {place: inner})
        graph.node.append(helper.make_node("Identity", [inner], [place]))
        names[inner] = names.pop(place)
    wanted = set(names.values())
    if clash := wanted & fixed:
        for name in sorted(clash):
            raise NetworkError(
                f"a point and an input or output are both called {name!r}; rename the module or the input"
            )
    taken = {tensor.name for tensor in graph.initializer} | {o for node in graph.node for o in node.output}
    _rename(proto, {name: f"{name}__other" for name in taken & wanted if name not in names} | names)


def _own_tensor(graph: onnx.GraphProto, tensor: onnx.TensorProto, index: int, uses: int) -> str:
    """Return the name of an initializer that only this mark stands on: a copy, where equal ones were merged."""
    if uses == 1:
        return tensor.name
    own = graph.initializer.add()
    own.CopyFrom(tensor)
    own.name = f"{tensor.name}.{index}"
    return str(own.name)
