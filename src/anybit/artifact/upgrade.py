"""Operators of this version where ONNX's own converter does not go: inside of branches and loops, and backwards.

Since version 13 most operators only learned about more types. A few took settings over from attributes to inputs, which
is written out here. What changed in another way leaves a file as it is: it then runs as well, but an old one holds no
numbers of 4 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, helper, numpy_helper

from anybit.artifact.check import NEWEST, OLDEST
from anybit.artifact.model import OnnxModel, all_graphs
from anybit.graph.onnx_nodes import OPSET

WIDER = frozenset({"Cast", "Pad", "ScatterElements", "Shape"})
"""Operators that got more settings since, and do the same as before without them."""


def upgrade(model: OnnxModel) -> None:
    """Bring a model to the operators of this version, if that is known to change nothing."""
    graph = model.graph
    own = next((entry for entry in model.proto.opset_import if entry.domain == ""), None)
    if own is None or not OLDEST <= own.version <= NEWEST or own.version == OPSET:
        return
    nodes = [node for part in all_graphs(graph) for node in part.node if node.domain == ""]
    changed = {kind for kind in {node.op_type for node in nodes} if not _same(kind, own.version)}
    if changed - WIDER - _REWRITTEN.keys():
        return
    for node in nodes:
        if node.op_type in changed and node.op_type in _REWRITTEN:
            _REWRITTEN[node.op_type](node, graph)
    own.version = OPSET


@cache
def _same(kind: str, version: int) -> bool:
    """Tell whether an operator takes the same inputs and settings as in this version."""
    if not onnx.defs.has(kind, OPSET):
        return False
    before, now = (onnx.defs.get_schema(kind, v) for v in (version, OPSET))
    return before.since_version == now.since_version or _taken(before) == _taken(now)


def _taken(schema: Any) -> tuple[Any, ...]:
    settings = {name: (a.type, a.required, str(a.default_value)) for name, a in schema.attributes.items()}
    return settings, *([(value.name, value.option) for value in values] for values in (schema.inputs, schema.outputs))


def _axes_as_input(node: NodeProto, graph: GraphProto) -> None:
    axes = next((a for a in node.attribute if a.name == "axes"), None)
    if axes is None:
        return
    # By what it holds: values of two branches may have the same name.
    name = f"anybit.axes.{'.'.join(map(str, axes.ints))}"
    if name not in {tensor.name for tensor in graph.initializer}:
        graph.initializer.append(numpy_helper.from_array(np.array(axes.ints, np.int64), name))
    node.input.append(name)
    node.attribute.remove(axes)


def _count_parts(node: NodeProto, graph: GraphProto) -> None:
    if len(node.input) < 2 or not node.input[1]:
        node.attribute.append(helper.make_attribute("num_outputs", len(node.output)))


_REWRITTEN: dict[str, Callable[[NodeProto, GraphProto], None]] = {
    **dict.fromkeys(
        (f"Reduce{kind}" for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")),
        _axes_as_input,
    ),
    "Split": _count_parts,
}
