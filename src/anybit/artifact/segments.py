"""A network run piece by piece: values that were computed once stay known, and the next piece begins with them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from anybit.artifact.master import Master
from anybit.artifact.model import set_nodes
from anybit.graph.onnx_nodes import used_by

Array = npt.NDArray[Any]
Feed = Mapping[str, Array]

MEMORY = 2**30
"""Bytes of values that are kept at most; pieces begin further up where values do not fit."""


def cut(master: Master, names: Iterable[str], known: Collection[str]) -> tuple[Master, set[str]]:
    """Return a master that computes some values from known ones, which are its inputs, and all names in use."""
    model = master.model.copy()
    nodes, used = _between(model.graph, names, known)
    set_nodes(model.graph, nodes)
    for node in model.graph.node:  # one may make what is known beside what is not
        node.output[:] = [_other(name, used) if name in known and name in used else name for name in node.output]
    given = {value.name: value for value in model.graph.input if value.name in used}
    fresh = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, None)
        for n in sorted(used.intersection(known))
        if n not in given
    ]
    inputs = [*given.values(), *fresh]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    return replace(master, model=model), used


def _other(name: str, used: Collection[str]) -> str:
    """Return a name that nothing uses."""
    while name in used:
        name += "'"
    return name


def _between(
    graph: onnx.GraphProto, names: Iterable[str], known: Collection[str]
) -> tuple[list[onnx.NodeProto], set[str]]:
    """Return the nodes that lead from known values to others, in order, and the names that they use."""
    used, nodes = set(names), []
    for node in reversed(graph.node):
        if any(value in used and value not in known for value in node.output):
            nodes.append(node)
            used.update(used_by(node))
    return nodes[::-1], used


def behind(graph: onnx.GraphProto, places: Collection[str]) -> dict[str, frozenset[str]]:
    """Return which of some weights each value of a graph depends on."""
    found = {place: frozenset([place]) for place in places}
    for node in graph.node:
        sources = [found[name] for name in used_by(node) if name in found]
        both = frozenset[str]().union(*sources)
        found |= dict.fromkeys(node.output, next((s for s in sources if s == both), both))  # most share one set
    return found


class Known:
    """For each input of a network the values that need not be computed again, no more of them than fit into memory."""

    def __init__(self, graph: onnx.GraphProto, feeds: Sequence[Feed]) -> None:
        self._graph, self.feeds = graph, feeds
        self._values: list[dict[str, Array]] = [{} for _ in feeds]
        self.names: set[str] = set()
        self.sizes: dict[str, int] = {}

    def __iter__(self) -> Iterator[dict[str, Array]]:
        for feed, values in zip(self.feeds, self._values, strict=True):
            yield {**feed, **values}

    def keep(self, index: int, values: Feed) -> None:
        """Keep values of one input; the first one decides which of them have room."""
        for name, value in values.items():
            if index == 0 and name not in self.names:
                size = value.nbytes * len(self.feeds)
                if sum(self.sizes.values()) + size > MEMORY:
                    continue
                self.sizes[name] = size
            if name in self.sizes:
                self._values[index][name] = value
        if index == len(self.feeds) - 1:
            self.names = set(self.sizes)

    def forget_all_but(self, names: Iterable[str]) -> None:
        """Drop what is not needed to compute some values."""
        _, used = _between(self._graph, names, self.names)
        for name in self.names - used:
            del self.sizes[name]
            for values in self._values:
                del values[name]
        self.names &= used
