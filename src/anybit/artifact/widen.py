"""More bits where a few inputs show that they are needed, for a master: ONNX Runtime runs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from anybit.artifact.coverage import counted, inside, products
from anybit.artifact.layers import complete
from anybit.artifact.master import Master
from anybit.artifact.model import OnnxModel
from anybit.artifact.output_error import outputs_at
from anybit.artifact.values import feed_of, kinds_of
from anybit.graph.from_onnx import read_onnx
from anybit.graph.onnx_nodes import used_by
from anybit.plan import widen
from anybit.plan.build import Built
from anybit.plan.numbers import Kept
from anybit.plan.points import Plan

Feed = Mapping[str, Any]
T = TypeVar("T")


def remembered(inputs: Iterable[T], some: list[T]) -> Iterator[T]:
    """Hand on inputs, and keep the first few.

    >>> some: list[int] = []
    >>> sum(remembered(range(100), some)), len(some)
    (4950, 16)
    """
    for given in inputs:
        if len(some) < widen.SEEN:
            some.append(given)
        yield given


def widened(master: Master, clipped: Plan, built: Built, feeds: Sequence[Feed]) -> Plan:
    """Return the plan of a master with more bits for the points whose rounding costs the outputs most.

    Args:
        master: The network, calibrated.
        clipped: Its plan with other ranges to try.
        built: What its plan was made of.
        feeds: Inputs that are ready to run.
    """
    model = complete(master)
    graph = read_onnx(model.proto, {tensor.name: model.array(tensor) for tensor in model.graph.initializer})
    counts = counted(model, products(graph), feeds[0], where=str(master.path)) | inside(graph)
    shown = [feeds[i] for i in widen.chosen(len(feeds), sum(counts.values()))]
    some = [feed_of(feed, kinds_of(master.graph.graph)) for feed in shown]
    judged = [*master.outputs, *(name for name in fed_to_loops(model) if name in graph.floating)]

    def run(plan: Plan) -> widen.Outputs:
        kept, other = Kept(2**28), replace(master, header=replace(master.header, plan=plan))
        return lambda widths: outputs_at(other, some, widths, kept, judged)

    plans = widen.ways(master.plan, clipped, built.fed)
    return widen.widened(graph, plans, built.joined, counts, run)


def fed_to_loops(model: OnnxModel) -> list[str]:
    """Return what loops read that is computed outside of them.

    What a loop makes of it says little by itself: one other letter, and all that follows is another text.
    """
    made = {name for node in model.graph.node for name in node.output}
    loops = [node for node in model.graph.node if node.op_type in ("Loop", "Scan")]
    return [name for name in dict.fromkeys(name for node in loops for name in used_by(node)) if name in made]
