"""From a prepared network to one ONNX file: `save(net, "model.onnx")`.

`torch.onnx` translates the graph. Each quantization point goes through it as an operator of our own, which marks
the tensor it stands on; afterwards the marks are taken out and what they stood on is written into the header.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from anybit.artifact.header import Header
from anybit.artifact.layers import apart
from anybit.artifact.master import Master, write_master
from anybit.artifact.model import LARGE, OnnxModel, location
from anybit.common.provenance import origin
from anybit.errors import MissingDependency, NetworkError, SpecError
from anybit.graph.onnx_nodes import OPSET
from anybit.simulate.capture import quietly
from anybit.simulate.modules import Activation, Bias, Weight
from anybit.simulate.network import QuantizedNetwork
from anybit.simulate.recurrent import to_operators, translations
from anybit.simulate.signature import free_dims, output_names

if TYPE_CHECKING:
    from onnx_ir import Graph, Value

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
    program = _translate(body, holders)
    graph = program.model.graph
    _name_outputs(graph, output_names(net.body, len(graph.outputs)))
    _take_marks(graph, marked)
    model = _model(program)
    _tidy(model.proto)
    _free_inputs(model.proto, holders)
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
    held = [*copied.parameters(), *copied.buffers()]
    others = {torch.float64, torch.float16, torch.bfloat16}
    if any(t.dtype in others or t.device.type != "cpu" for t in held):
        copied = copy.deepcopy(copied).float().cpu()
        _retype(copied.graph)
        copied.recompile()
    return copied, marked


def _retype(graph: fx.Graph) -> None:
    """Let constants that the network makes itself be of float32 and on the CPU, as the master is."""
    for node in graph.nodes:
        for key, value in node.kwargs.items():
            if isinstance(value, torch.device):
                node.update_kwarg(key, torch.device("cpu"))
            elif isinstance(value, torch.dtype) and value.is_floating_point:
                node.update_kwarg(key, torch.float32)


def _example(node: fx.Node) -> Tensor:
    """Return an input of the right shape and type: the translator looks at nothing else."""
    value = node.meta["val"]
    kind = torch.float32 if value.is_floating_point() else value.dtype
    sizes = [size if isinstance(size, int) else max(2, int(size.node.hint)) for size in value.shape]
    return torch.zeros(sizes, dtype=kind)


def _translate(body: fx.GraphModule, holders: list[fx.Node]) -> torch.onnx.ONNXProgram:
    """Translate with the sizes free that the captured network leaves free."""
    example = tuple(_example(node) for node in holders)
    symbolic = [{d for d, n in enumerate(node.meta["val"].shape) if not is_concrete_int(n)} for node in holders]
    free = tuple(dict.fromkeys(dims, torch.export.Dim.AUTO) or None for dims in symbolic)
    table: dict[Any, Callable[..., Any]] = {torch.ops.anybit.mark.default: _mark_in_onnx(), **translations()}
    with torch.no_grad(), quietly("torch.onnx"):
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
    return program


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


# From the translator


def _name_outputs(graph: Graph, names: list[str]) -> None:
    """Give the outputs their names; whatever had one of them before gets another."""
    for value in graph.inputs:
        if value.name in names and not value.is_graph_output():
            raise NetworkError(f"an input and an output are both called {value.name!r}; rename one of them")
    for value in _made(graph):
        if value.name in names:
            value.name = f"{value.name}__inner"
    for value, name in zip(graph.outputs, names, strict=True):
        value.name = name


def _made(graph: Graph) -> list[Value]:
    """Return all values that nodes make or the graph holds."""
    return [*graph.initializers.values(), *(value for node in graph for value in node.outputs)]


def _take_marks(graph: Graph, marked: list[str]) -> None:
    """Take the marks out and give the value that each stood on, and only it, the name of its point."""
    import onnx_ir as ir

    points: dict[str, Value] = {}
    for node in [node for node in graph if node.domain == _DOMAIN]:
        source, (result,), index = node.inputs[0], node.outputs, node.attributes["index"].as_int()
        assert source is not None
        ends = source.is_graph_input() or source.is_graph_output() or result.is_graph_output()
        own = source
        if ends or len(source.uses()) > 1 or source in points.values():
            own = ir.Value(name=f"{source.name}.{index}", type=source.type, shape=source.shape)
            if source.const_value is not None:  # the translator has merged equal ones
                own.const_value = ir.tensor(source.const_value.numpy(), name=own.name)
                graph.register_initializer(own)
            else:
                graph.insert_before(node, ir.Node("", "Identity", [source], outputs=[own]))
        for user, place in tuple(result.uses()):
            user.replace_input_with(place, own)
        if result.is_graph_output():  # it keeps its name, behind the point
            node.replace_input_with(0, own)
            node.domain, node.op_type = "", "Identity"
            node.attributes.clear()
        else:
            graph.remove(node, safe=True)
        points[marked[index]] = own
    for value in (*graph.inputs, *graph.outputs):
        if value.name in points:
            raise NetworkError(
                f"a point and an input or output are both called {value.name!r}; rename the module or the input"
            )
    for value in _made(graph):
        if value.name in points:
            value.name = f"{value.name}__other"
    for name, value in points.items():
        value.name = name


def _tidy(model: onnx.ModelProto) -> None:
    """Drop what describes the machine the file was made on, and call the free dimension what it is."""
    for part in (*model.graph.node, *model.graph.initializer):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
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


def _free_inputs(proto: onnx.ModelProto, holders: list[fx.Node]) -> None:
    """Call those sizes of the inputs free that were captured as numbers, and found to work at others."""
    for value, node in zip(proto.graph.input, holders, strict=True):
        for d, dim in enumerate(value.type.tensor_type.shape.dim):
            if d in free_dims(node) and not dim.dim_param:
                dim.dim_param = f"{node.name}_{d}"


def _free_outputs(proto: onnx.ModelProto) -> None:
    """Leave those sizes of the outputs open that follow the sizes of the pictures."""
    for value in proto.graph.output:
        for d, dim in enumerate(value.type.tensor_type.shape.dim):
            if d and dim.HasField("dim_value"):
                dim.dim_param = f"{value.name}_{d}"
    found = {value.name: value for value in onnx.shape_inference.infer_shapes(proto).graph.output}
    for value in proto.graph.output:
        value.CopyFrom(found[value.name])
