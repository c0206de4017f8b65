"""`adopt`: a master out of somebody else's ONNX model, without PyTorch.

The same passes as for PyTorch networks decide everything; here the file is read, brought into line with what they did
to its view, and run for calibration.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from anybit.artifact.coverage import cast_values, coverage, table_rows
from anybit.artifact.feeding import Preprocessing
from anybit.artifact.header import STORES, Header
from anybit.artifact.inputs import inputs_of
from anybit.artifact.layers import apart
from anybit.artifact.made_up import made_up_inputs, pictures_of_bytes
from anybit.artifact.master import write_master
from anybit.artifact.model import OnnxModel, names_in
from anybit.artifact.plain import read_model_file
from anybit.artifact.runtime import batch_advice, compile_model, run_in_time, time_limit
from anybit.artifact.texts import words_of
from anybit.artifact.values import feed_of, kinds_of, shape_of
from anybit.artifact.widen import remembered, widened
from anybit.common.provenance import origin
from anybit.common.text import printable
from anybit.errors import DataError, FileError, SpecError
from anybit.graph.from_onnx import read_onnx
from anybit.graph.view import Graph
from anybit.plan.build import Built, Interval, Settings, build, joined, with_inputs
from anybit.plan.observe import Calibration
from anybit.plan.points import Plan

Feed = Mapping[str, Any]


def adopt(
    path: str | Path,
    out: str | Path,
    *,
    preset: str = "default",
    calibration: Iterable[Feed] | None = None,
    method: str | None = None,
    input_range: Interval | Mapping[str, Interval] | None = None,
    symmetric: bool | None = None,
    per_channel: bool | None = None,
    sigmas: float | None = None,
    sensitive: str | None = None,
    helpers: str | Iterable[str] | None = None,
    store: str = "fp32",
    preprocessing: Preprocessing | None = None,
    about: dict[str, Any] | None = None,
) -> Plan:
    """Write a master made of a plain ONNX model, and return its plan.

    Args:
        path: An ONNX model in floating point. Its data may lie in other files of the same folder, never outside.
        out: Where to write the master.
        calibration: Inputs by name, whose values set the ranges. Without them ranges come from normalization layers
            and, where those tell nothing, from inputs that are made up; the plan says which.
        preset: This and the settings up to `helpers` are those of `anybit.prepare`.
        method: How calibration sets a range.
        input_range: The interval of the network's input, which is then quantized too.
        symmetric: Grids with zero in the middle, instead of fitted to both ends. A hard-swish goes from -0.4 to 20: on
            a symmetric grid half of the codes would be wasted.
        per_channel: One scale per output channel of a weight, without which some networks go dead at 8 bits.
        sigmas: How many standard deviations around the mean a range from batch norm covers.
        sensitive: How layers that few bits hurt most are treated: "measured", "8-bit", "same" or "float". The default
            is "measured": 8 bits or more for the usual ones, and more bits for the points that cost the outputs most
            over a few of the inputs, for at most a tenth of the multiplications; the plan says which.
        helpers: What to do for accuracy without data: "equalize", "bias", "sums", "clip", or "all".
        store: How weights are stored: "fp32", "fp16" or "int8".
        preprocessing: How pictures become inputs; stored in the master, so that `anybit run` and others feed them so.
        about: What else a reader should know, ready for JSON.

    Raises:
        FileError: The file cannot be read, is quantized already, or has nothing to quantize.
    """
    if store not in STORES:
        raise SpecError(f"store must be one of {', '.join(STORES)}; got {store!r}")
    settings = Settings.of(
        preset, method=method, symmetric=symmetric, per_channel=per_channel, sigmas=sigmas, sensitive=sensitive,
        helpers=helpers,
    )  # fmt: skip
    model = read_model_file(Path(path))
    some: list[Feed] = []
    fed = {} if preprocessing is None else _fed_intervals(model, preprocessing)
    (plan, clipped), built = plans_for(model, settings, calibration, input_range, some, fed=fed, where=str(path))
    if some and settings.sensitive == "measured":
        plan = widened(apart(model, plan, Path(path)), clipped, built, some)
    found = coverage(model, plan, some[0] if some else None, where=str(path))
    if not found.weights:
        raise FileError(f"{path}: none of its weights can be quantized, {_why_none(model)}; nothing was written")
    known = {"adopted_from": Path(path).name, "origin": origin(), "quantized": found.to_dict()}
    if some and calibration is not None:
        known["shapes"] = {name: list(shape_of(x)) for name, x in some[0].items()}
    known |= {**(about or {}), **(preprocessing.to_about() if preprocessing else {})}
    write_master(out, model, Header(plan, store, known))
    return plan


def plans_for(
    model: OnnxModel,
    settings: Settings,
    calibration: Iterable[Feed] | None,
    input_range: Interval | Mapping[str, Interval] | None,
    some: list[Feed],
    *,
    fed: Mapping[str, Interval] | None = None,
    where: str,
) -> tuple[tuple[Plan, Plan], Built]:
    """Return the plan of a model, which changes with folding and equalizing, and what it was made of.

    A second plan clips wherever that lowers the error of a value at 8 bits. `some` gets a few of the inputs that were
    run; `fed` is where made-up ones lie.
    """
    graph = read_onnx(model.proto, {tensor.name: model.array(tensor) for tensor in model.graph.initializer})
    built = build(graph, settings)
    apply_changes(model, graph, built)
    plan = with_inputs(built.plan, input_range)
    if not plan.weights:
        raise FileError(f"{where}: has no weight that could be quantized; {_why_none(model)}")
    plans = (plan, plan)
    if calibration is not None:
        watch = Calibration(plan, settings.method, fed=built.fed)
        plans = _calibrated(model, watch, calibration, some, where=where)
    else:
        watch = Calibration(plan, settings.method, made_up=True)
        with contextlib.suppress(DataError):  # nothing that was made up runs: what is unknown stays in floating point
            ids, interval = table_rows(model), {**pictures_of_bytes(graph), **(fed or {}), **given_intervals(plan)}
            plans = _calibrated(model, watch, None, some, ids=ids, interval=interval, where=where)
    return (joined(plans[0], built.joined), joined(plans[1], built.joined)), built


def _why_none(model: OnnxModel) -> str:
    """Say what kept a file from having a single point."""
    kinds = dict.fromkeys(printable(node.op_type, 40) for node in model.graph.node if node.op_type != "Identity")
    most = ", ".join([*kinds][:4]) + (" and others" if len(kinds) > 4 else "")
    return f"convolutions, matrix products and recurrent cells with stored weights can be, and it has {most}"


def _fed_intervals(model: OnnxModel, how: Preprocessing) -> dict[str, Interval]:
    """Return where inputs lie that take pictures."""
    found = {}
    for value in inputs_of(model.graph):
        with contextlib.suppress(DataError):  # one that takes no pictures
            found[value.name] = value.settle(how).interval
    return found


def given_intervals(plan: Plan) -> dict[str, Interval]:
    """Return where the inputs lie that the user has said so of."""
    found = {a.place.removesuffix(".input"): a.ranges[0][1] for a in plan.activations if a.kind == "input" and a.ranges}
    return {name: (r.low, r.high) for name, r in found.items()}


def apply_changes(model: OnnxModel, graph: Graph, built: Built) -> None:
    """Bring a model into line with what passes did to its view, and give each bias of the plan a tensor of its own."""
    held = {tensor.name: tensor for tensor in model.graph.initializer}
    for name in graph.changed:
        array = np.ascontiguousarray(graph.constants[name], np.float32)
        if name in held:
            model.fill(held[name], array)
        else:
            model.graph.initializer.append(model.tensor(array, name))
    nodes = list(model.graph.node)
    makers = {value: node for node in nodes for value in node.output}
    for node, _ in graph.removed:
        before = makers[node.inputs[0]]  # a layer, or the sum behind it
        before.output[0] = node.output
        nodes.remove(node.origin)
        makers[node.output] = before
    for name, layer in built.layers.items():
        bias = built.places[name]
        if name != bias:
            model.graph.initializer.append(model.tensor(graph.constants[bias], name))
        maker = makers[layer.output]
        if maker.op_type == "MatMul":  # a bias that was not there before needs a sum behind the product
            inner = maker.output[0] = f"{layer.output}.product"
            nodes.insert(nodes.index(maker) + 1, _sum(inner, name, layer.output))
        else:
            _set_bias(maker, layer.origin, name)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    used = names_in(model.graph)
    model.set_initializers([tensor for tensor in model.graph.initializer if tensor.name in used])


def _sum(product: str, bias: str, output: str) -> NodeProto:
    return helper.make_node("Add", [product, bias], [output], name=f"{output}/Add")


def _set_bias(maker: NodeProto, layer: NodeProto, bias: str) -> None:
    """Let a layer add this tensor: as its third input, or in the sum behind it."""
    if maker.op_type == "Add" and layer.op_type == "MatMul":
        place = 1 if maker.input[0] == layer.output[0] else 0
        maker.input[place] = bias
    else:
        maker.input[:] = [*maker.input[:2], bias]


def _calibrated(
    model: OnnxModel,
    watch: Calibration,
    feeds: Iterable[Feed] | None,
    some: list[Feed],
    *,
    ids: int = 0,
    interval: Mapping[str, Interval] | None = None,
    where: str,
) -> tuple[Plan, Plan]:
    """Return the plan with the ranges that its values have over all inputs or some made-up ones, and one that clips."""
    watched = model.copy()
    del watched.graph.output[:]
    places = {a.place: a.name for a in watch.points}
    for place in places:
        watched.graph.output.append(helper.make_tensor_value_info(place, TensorProto.FLOAT, None))
    if not places:  # everything is inside of branches; what the inputs look like is worth knowing all the same
        with contextlib.suppress(DataError):
            some += [feed_of(feed, kinds_of(model.graph)) for feed in islice(feeds or (), 1)]
        return watch.both()
    engine = compile_model(watched, exact=False, threads=None, where=where)
    takes = kinds_of(model.graph)
    if feeds is None:
        whole, words, lie = cast_values(model), words_of(model.graph), interval or {}
        feeds = made_up_inputs(engine, takes, ids=ids, interval=lie, whole=whole, words=words, where=where)
    seen = False
    for feed in remembered(feeds, some):
        try:
            values = feed_of(feed, takes)
            found = run_in_time(engine, list(places), values, time_limit())
        except DataError as error:
            advice = batch_advice(str(error), feed)
            raise DataError(f"{where}: a calibration input cannot be run ({error}){advice}") from error
        watch.update(dict(zip(places.values(), found, strict=True)))
        seen = True
    if not seen:
        raise DataError("calibration saw no data; at least one input is expected")
    return watch.both()
