"""From a prepared network to one ONNX file: `save(net, "model.onnx")`.

`torch.onnx` translates the graph. Each quantization point goes through it as an operator of our own, which marks
the tensor it stands on; afterwards the marks are taken out and what they stood on is written into the header.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import NodeProto, helper
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from anybit.artifact.bundle import LARGE, Bundle, location
from anybit.artifact.check import OPSET
from anybit.artifact.format import Activation, Bias, Header, Weight
from anybit.artifact.master import write_master
from anybit.common.provenance import origin
from anybit.errors import MissingDependency, NetworkError
from anybit.quant.network import QuantizedNetwork
from anybit.quant.points import ActivationPoint, Point, WeightPoint
from anybit.quant.whole_bias import LayerBias, layer_biases

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
    model, header = translate(net)
    write_master(path, model, replace(header, store=store, about={**header.about, **(about or {})}))


def translate(net: QuantizedNetwork) -> tuple[Bundle, Header]:
    """Return what a master is made of: the network in floating point, and the header that lists its points."""
    model, names, biases = lower(net)
    weights = [_weight(point, names[point]) for point in net.points if isinstance(point, WeightPoint)]
    activations = [_activation(point, names[point]) for point in net.points if isinstance(point, ActivationPoint)]
    found = tuple(_bias(layer, tensor, names) for layer, tensor in biases)
    return model, Header(tuple(weights), tuple(activations), found, about={"origin": origin()})


def lower(net: QuantizedNetwork) -> tuple[Bundle, dict[Point, str], list[tuple[LayerBias, str]]]:
    """Return the network in floating point as an ONNX model, and the tensors that points and biases stand on."""
    holders = [node for node in net.body.graph.nodes if node.op == "placeholder"]
    kinds = (torch.float64, torch.float16, torch.bfloat16)
    if wrong := [
        f"input {node.name} is {node.meta['val'].dtype}" for node in holders if node.meta["val"].dtype in kinds
    ]:
        raise NetworkError("a master computes in float32; call model.float() before prepare", wrong)
    found = layer_biases(net.body)
    body, marked = _marked(net.body, found)
    bundle = _translate(body, tuple(_example(node) for node in holders), [node.name for node in holders])
    model = bundle.model
    _name_outputs(model, _output_names(net.body, len(model.graph.output)))
    _tidy(model)
    wanted = {i: _tensor_name(m) for i, m in enumerate(marked) if not isinstance(m, ActivationPoint)}
    places = _take_marks(model, wanted)
    points = {m: places[i] for i, m in enumerate(marked) if isinstance(m, Point)}
    return bundle, points, [(m, places[i]) for i, m in enumerate(marked) if isinstance(m, LayerBias)]


def _tensor_name(what: Point | LayerBias) -> str:
    if isinstance(what, Point):
        return what.name
    weight = what.weight.name
    return f"{weight.removesuffix('weight')}bias" if weight.endswith("weight") else f"{weight}.bias"


def _weight(point: WeightPoint, tensor: str) -> Weight:
    spec, rule = point.spec, point.rule
    return Weight(
        point.name, tensor, spec.axis, spec.symmetric, point.floor, rule.sums, rule.clip, rule.channels, rule.groups
    )  # fmt: skip


def _activation(point: ActivationPoint, value: str) -> Activation:
    ranges = [(bits, found) for bits in point.own_widths if (found := point.range_at(bits)) is not None]
    return Activation(point.name, point.kind, value, tuple(ranges), point.spec.symmetric, point.floor)


def _bias(layer: LayerBias, tensor: str, names: dict[Point, str]) -> Bias:
    value = None if layer.source is None else names[layer.source]
    mean = None if layer.corrected is None else tuple(layer.corrected.mean.double().tolist())
    return Bias(tensor, names[layer.weight], value, mean, layer.groups, layer.transposed)


# To the translator


def _marked(body: fx.GraphModule, biases: list[LayerBias]) -> tuple[fx.GraphModule, list[Point | LayerBias]]:
    """Return the body with a mark in place of every point and on every bias, and what the marks stand for."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(body.graph, copies))
    marked: list[Point | LayerBias] = []

    def put(source: fx.Node, what: Point | LayerBias) -> fx.Node:
        marked.append(what)
        return graph.call_function(torch.ops.anybit.mark.default, (source, len(marked) - 1))

    for layer in biases:
        with graph.inserting_before(copies[layer.layer]):
            target = str(layer.bias.target)
            tensor = graph.get_attr(target if layer.bias.op == "get_attr" else f"{target}.master")
            copies[layer.layer].update_arg(2, put(tensor, layer))
    for node in [node for node in graph.nodes if node.op == "call_module"]:
        point = body.get_submodule(str(node.target))
        if isinstance(point, Point):
            with graph.inserting_before(node):
                source = node.args[0] if node.args else graph.get_attr(f"{node.target}.master")
                node.replace_all_uses_with(put(source, point))
        graph.erase_node(node)
    graph.eliminate_dead_code()
    return fx.GraphModule(body, graph), marked


def _example(node: fx.Node) -> Tensor:
    """Return an input of the right shape and type: the translator looks at nothing else."""
    value = node.meta["val"]
    return torch.zeros([size if isinstance(size, int) else 3 for size in value.shape], dtype=value.dtype)


def _translate(body: fx.GraphModule, example: tuple[Tensor, ...], names: list[str]) -> Bundle:
    free = tuple({0: torch.export.Dim.AUTO} if x.dim() else None for x in example)
    table: dict[Callable[..., Any], Callable[..., Any]] = {torch.ops.anybit.mark.default: _mark_in_onnx()}
    with torch.no_grad(), _quietly():
        try:
            program = torch.onnx.export(
                torch.export.export(body, example, dynamic_shapes=free),
                dynamo=True,
                opset_version=OPSET,
                input_names=names,
                custom_translation_table=table,
                verbose=False,
            )
        except Exception as error:  # whatever part of PyTorch gave up
            text = str(error.__cause__ or error).strip()
            raise NetworkError("this network cannot be written as ONNX", [text.splitlines()[0][:300]]) from error
    assert program is not None
    return _bundle(program)


def _bundle(program: torch.onnx.ONNXProgram) -> Bundle:
    """Return what the translator made, with large weights where they are: in the network's own memory."""
    from onnx_ir import ExternalTensor, Shape

    bundle = Bundle(onnx.ModelProto())
    for name, value in program.model.graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and tensor.nbytes >= LARGE:
            stub = bundle.tensor(tensor.numpy(), name)
            value.const_value = ExternalTensor(
                location(stub), 0, tensor.nbytes, tensor.dtype, shape=Shape(tensor.numpy().shape), name=name
            )
    bundle.model.CopyFrom(program.model_proto)
    return bundle


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


def _output_names(body: fx.GraphModule, count: int) -> list[str]:
    """Return a name for each output: its key in a dict, or its number."""
    spec = getattr(getattr(body.graph._codegen, "pytree_info", None), "out_spec", None)
    if count == 1 and (spec is None or spec.is_leaf()):
        return ["output"]
    paths = pytree.tree_flatten_with_path(pytree.tree_unflatten([0] * count, spec))[0] if spec is not None else []
    keys = ["_".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path) for path, _ in paths]
    names = [key if not key.isdigit() else f"output_{key}" for key in keys]
    return names if len(set(names)) == count else [f"output_{i}" for i in range(count)]


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


def _take_marks(model: onnx.ModelProto, wanted: dict[int, str]) -> dict[int, str]:
    """Take the marks out and return the tensor that each stood on; initializers get the names that are `wanted`."""
    graph = model.graph
    held = {tensor.name: tensor for tensor in graph.initializer}
    inputs = {value.name for value in graph.input}
    outputs = {value.name for value in graph.output}
    uses = Counter(name for node in graph.node for name in node.input) + Counter(outputs)
    places: dict[int, str] = {}
    swap: dict[str, str] = {}
    nodes: list[NodeProto] = []
    for node in graph.node:
        if node.domain != _DOMAIN:
            nodes.append(node)
            continue
        (source,), (result,), index = node.input, node.output, node.attribute[0].i
        source = swap.get(source, source)
        if source in held:
            places[index] = swap[result] = _own_tensor(graph, held[source], index, uses[source])
        elif source in inputs or result in outputs or uses[source] > 1:
            # The point needs a value of its own: one that a node makes and only the point's users see.
            places[index] = swap[result] = result if result in outputs else f"{source}.{index}"
            nodes.append(helper.make_node("Identity", [source], [places[index]]))
        else:
            places[index] = swap[result] = source
    del graph.node[:]
    graph.node.extend(nodes)
    _rename(model, swap)
    taken = {tensor.name for tensor in graph.initializer} | {o for node in graph.node for o in node.output} | inputs
    for index, name in wanted.items():
        if name not in taken:
            _rename(model, {places[index]: name})
            places[index] = name
            taken.add(name)
    return places


def _own_tensor(graph: onnx.GraphProto, tensor: onnx.TensorProto, index: int, uses: int) -> str:
    """Return the name of an initializer that only this mark stands on: a copy, where equal ones were merged."""
    if uses == 1:
        return tensor.name
    copy = graph.initializer.add()
    copy.CopyFrom(tensor)
    copy.name = f"{tensor.name}.{index}"
    return str(copy.name)
