"""How much of an adopted network is quantized: which part of its weights and of its multiplications, and what is not.

Multiplications are counted on one input that the network really runs, since sizes may be free: only shapes are asked
for, so nothing is kept. What happens inside branches and loops is not seen from outside and not counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy.typing as npt
from onnx import NodeProto, TensorProto, helper

from anybit.artifact.made_up import made_up_inputs
from anybit.artifact.model import OnnxModel, all_graphs
from anybit.artifact.runtime import compile_model, run_in_time, time_limit
from anybit.artifact.texts import words_of
from anybit.artifact.values import feed_of, kinds_of
from anybit.common.text import printable
from anybit.errors import DataError
from anybit.graph.from_onnx import read_onnx
from anybit.graph.onnx_nodes import attributes
from anybit.graph.view import Graph, Node, origins
from anybit.plan.points import Plan, Weight
from anybit.plan.sites import PRODUCTS
from anybit.plan.spectra import SPECTRUM
from anybit.plan.widen import MEASURED, SUM, units_of
from anybit.spec import FLOAT, NARROWEST

Array = npt.NDArray[Any]
Shapes = Mapping[str, tuple[int, ...]]

FEW = 0.5
"""Below this part of the weights little is gained, and a warning says so."""


REASONS = (MEASURED, SUM, SPECTRUM)
"""Why activations keep more bits, where that is worth telling."""


@dataclass(frozen=True)
class Coverage:
    """Which part of a network's weights and multiplications is quantized; the latter is None where nothing ran.

    `wide` is the part of the multiplications in layers that never go to the narrowest width, `measured` that of layers
    which keep more bits because a measurement said so, there with those inside branches and loops. `floating` has the
    reasons why weights are not quantized, each with its part of the weights.
    """

    weights: float
    multiplications: float | None
    wide: float | None = None
    measured: float | None = None
    floating: tuple[tuple[str, float], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {**asdict(self), "floating": [list(entry) for entry in self.floating]}


def coverage(model: OnnxModel, plan: Plan, feed: Mapping[str, Array] | None, *, where: str) -> Coverage:
    """Count what a plan quantizes in a model.

    Args:
        model: The model with its weights, as it is stored.
        plan: What is quantized.
        feed: One input; one is made up if it is not given.
        where: The file, for errors.
    """
    places = {weight.place for weight in plan.weights}
    sizes = {
        t.name: math.prod(t.dims)
        for part in all_graphs(model.graph)
        for t in part.initializer
        if t.data_type in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
        and (len(t.dims) > 1 or t.name in places)
    }
    total = sum(sizes.values())
    reasons: Counter[str] = Counter()
    users = _users(model)
    for name in sizes.keys() - places:
        reasons[_why(users.get(name, []))] += sizes[name]
    rounded = sum(size for name, size in sizes.items() if name in places)
    graph = read_onnx(model.proto, {tensor.name: model.array(tensor) for tensor in model.graph.initializer})
    nodes = products(graph)
    counts = counted(model, nodes, feed, where=where)
    all_of_them = sum(counts.values())
    done = sum(count for node, count in counts.items() if _is_quantized(graph, node, plan))
    floored = {weight.place for weight in plan.weights if weight.floor > NARROWEST}
    wide = sum(count for node, count in counts.items() if floored & {*node.inputs, *node.weights})
    each = {node.output: count for node, count in (counts | inside(graph)).items()}
    kept = {point.name for point in plan.points if point.because == MEASURED}
    wider = (unit.products for unit in units_of(graph, plan, (), counts) if kept.intersection(unit.names))
    measured = sum(each[output] for output in frozenset().union(*wider))
    return Coverage(
        rounded / total if total else 0.0,
        done / all_of_them if all_of_them else None,
        wide / all_of_them if all_of_them else None,
        measured / sum(each.values()) if all_of_them else None,
        tuple((reason, size / total) for reason, size in reasons.most_common()),
    )


def products(graph: Graph) -> list[Node]:
    """Return the products whose multiplications can be counted from outside."""
    return [node for node in graph.nodes if node.kind in PRODUCTS and node.kind != "inside"]


def inside(graph: Graph) -> dict[Node, int]:
    """Return the products inside branches and loops; nobody sees how often they run, so every weight counts once."""
    found = [node for node in graph.nodes if node.kind == "inside"]
    return {node: sum(graph.constants[name].size for name in node.weights) for node in found}


def _users(model: OnnxModel) -> dict[str, list[str]]:
    """Return the operators that use each value."""
    found: dict[str, list[str]] = {}
    for part in all_graphs(model.graph):
        for node in part.node:
            for name in node.input:
                found.setdefault(name, []).append(node.op_type)
    return found


def _why(operators: Sequence[str]) -> str:
    """Say why a tensor that these operators use is not rounded."""
    kinds = ", ".join(sorted(set(operators))) or "no operator"
    if set(operators) <= {"Gather", "GatherND", "GatherElements"}:
        return f"tables that something is looked up in ({kinds})"
    return f"tensors that {kinds} use{'s'[: len(set(operators)) < 2]}"


def _is_quantized(graph: Graph, node: Node, plan: Plan) -> bool:
    """Tell whether both sides of a product are on grids; the network's input may stay as it comes."""
    weights = {weight.place for weight in plan.weights if weight.floor < FLOAT}
    ranged = {a.place for a in plan.activations if a.ranges and a.floor < FLOAT} | set(graph.inputs)
    makers = graph.makers()
    operands = [*node.inputs[: 1 if node.weights else 2], *node.weights]
    sources = {source for operand in operands for source, _ in origins(graph, operand, None, makers)}
    return all(source in (weights if source in graph.constants else ranged) for source in sources)


def counted(
    model: OnnxModel, nodes: Sequence[Node], feed: Mapping[str, Array] | None, *, where: str
) -> dict[Node, int]:
    """Return how many multiplications each product takes, or nothing where no input runs."""
    probe = model.copy()
    held = {tensor.name for tensor in model.graph.initializer}
    names = {name for node in nodes for name in (*node.inputs[:2], *node.weights, node.output) if name not in held}
    del probe.graph.output[:]
    wanted = sorted(names)
    for i, name in enumerate(wanted):
        probe.graph.node.append(helper.make_node("Shape", [name], [f"anybit.shape.{i}"]))
        probe.graph.output.append(helper.make_tensor_value_info(f"anybit.shape.{i}", TensorProto.INT64, None))
    if not wanted:
        return {}
    try:
        engine = compile_model(probe, exact=False, threads=None, where=where)
        ids, whole = table_rows(model), cast_values(model)
        words, takes = words_of(model.graph), kinds_of(model.graph)
        given = feed or made_up_inputs(engine, takes, ids=ids, interval={}, whole=whole, words=words, where=where)[0]
        found = run_in_time(engine, None, feed_of(given, takes), time_limit())
    except DataError:
        return {}
    shapes: dict[str, tuple[int, ...]] = dict(zip(wanted, (tuple(map(int, shape)) for shape in found), strict=True))
    shapes |= {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    return {node: multiplications(node, shapes) for node in nodes}


def multiplications(node: Node, shapes: Shapes) -> int:
    """Return how many multiplications a product takes.

    >>> conv = Node("layer", ["x", "w"], "y", "y", convolution=True)
    >>> multiplications(conv, {"x": (1, 3, 8, 8), "w": (4, 3, 3, 3), "y": (1, 4, 6, 6)})
    3888
    """
    first, out = shapes[node.inputs[0]], math.prod(shapes[node.output])
    if node.kind == "recurrent":
        return math.prod(first[:2]) * sum(math.prod(shapes[name]) for name in node.weights)
    if node.convolution:
        weight = shapes[node.inputs[1]]
        each = math.prod(weight) // max(1, weight[0])
        return (math.prod(first) if node.transposed else out) * each
    across = attributes(node.origin).get("transA", 0) if isinstance(node.origin, NodeProto) else 0
    return out * (first[-2] if across and len(first) > 1 else first[-1] if first else 1)


def table_rows(model: OnnxModel) -> int:
    """Return how many rows the smallest table has that something is looked up in, or a guess where there is none."""
    dims = {
        t.name: t.dims
        for t in model.graph.initializer
        if len(t.dims) > 1 and t.data_type in (TensorProto.FLOAT, TensorProto.FLOAT16)
    }
    tables = [dims[node.input[0]][0] for node in model.graph.node if node.op_type == "Gather" and node.input[0] in dims]
    return min(tables, default=10)


def cast_values(model: OnnxModel) -> set[str]:
    """Return what is made a whole number: letters or other names for things, even where their type is another one."""
    kinds = {TensorProto.INT32, TensorProto.INT64}
    return {n.input[0] for n in model.graph.node if n.op_type == "Cast" and n.attribute[0].i in kinds}


def summary(plan: Plan, found: Coverage) -> list[str]:
    """Say in a few lines what of a network is quantized, what is not, and where the ranges came from."""
    counted = found.multiplications
    of_all = "" if counted is None else f" and {_percent(counted)} of the multiplications"
    tensors = f"{len(plan.weights)} tensor{'s'[: len(plan.weights) != 1]}"
    lines = [f"quantized: {_percent(found.weights)} of the weights ({tensors}){of_all}"]
    if counted is None and any(not a.ranges and a.kind != "input" for a in plan.activations):
        lines.append("warning: nothing that was made up as an input runs; --calibrate with a few real ones")
    elif counted is None:
        lines.append("multiplications inside branches and loops are not counted, and there are no others")
    if found.weights < FEW:
        lines.append("warning: less than half of the weights are quantized, so little is gained")
    elif counted is not None and counted < FEW:
        lines.append("warning: less than half of the multiplications are quantized, so it hardly gets faster")
    lines += _ranges(plan)
    lines += [f"stays in floating point: {_percent(part)} of the weights, {why}" for why, part in found.floating[:4]]
    left = Counter(entry.reason for entry in plan.left)
    lines += [f"stays in floating point: {reason} ({_times(count)})" for reason, count in left.most_common(4)]
    return lines + _wide(plan, found)


def _wide(plan: Plan, found: Coverage) -> list[str]:
    """Say which layers keep more bits than the others, and why."""
    wide = [p for p in plan.points if (isinstance(p, Weight) and p.floor > NARROWEST) or p.because in REASONS]
    lines = []
    for floor, because in dict.fromkeys((point.floor, point.because) for point in wide):
        names = [point.name for point in wide if (point.floor, point.because) == (floor, because)]
        at = "in floating point" if floor == FLOAT else f"at {floor} bits or more"
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        shown = ", ".join(printable(name, 50) for name in names[:3])
        lines.append(f"kept {at}{f' ({because})' if because else ''}: {shown}{more}")
    lines += [f"these have {_percent(found.wide)} of the multiplications"] if wide and found.wide is not None else []
    if found.measured:
        lines.append(f"those with much of the measured error have {_percent(found.measured)} of them, at most 10%")
    return lines


def _ranges(plan: Plan) -> list[str]:
    """Say how sure the ranges are."""
    words = {"calibration": "your inputs", "made-up": "made-up inputs", "given": "what you said"}
    named = [a.ranges[0][1].source for a in plan.activations if a.ranges]
    sources = Counter(next((w for k, w in words.items() if k in source), "the network itself") for source in named)
    unknown = [a.name for a in plan.activations if not a.ranges and a.kind != "input"]
    lines = [f"ranges: {', '.join(f'{n} from {name}' for name, n in sources.items()) or 'none'}"]
    if sources["made-up inputs"]:
        lines.append("ranges from made-up inputs are a guess; --calibrate with a few real ones makes them sure")
    if unknown:
        lines.append(
            f"without a range, so in floating point: {len(unknown)} values, such as {printable(unknown[0], 60)}"
        )
    return lines


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _percent(share: float) -> str:
    """Return a part of a whole; only all of it is 100% and only none of it is 0%.

    >>> _percent(0.25), _percent(0.9999), _percent(0.0001), _percent(1.0)
    ('25%', 'over 99%', 'under 1%', '100%')
    """
    rounded = round(100 * share)
    if rounded in (0, 100) and share not in (0, 1):
        return "over 99%" if rounded else "under 1%"
    return f"{rounded}%"
