"""Products that are written in an unusual way, spelled out with the operators that layers are made of.

A Gemm may turn its first operand, multiply by numbers and add a matrix; an Einsum may do what a MatMul does. What of it
concerns constants alone is computed once, when constants are folded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import NodeProto, helper

from anybit.artifact.model import OnnxModel, set_nodes
from anybit.graph.onnx_nodes import attributes

Shapes = Mapping[str, tuple[int, ...]]


def spell_out(model: OnnxModel) -> bool:
    """Write unusual products of a graph in the usual way; return whether there were any."""
    shapes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    nodes: list[NodeProto] = []
    found = False
    for node in model.graph.node:
        new, kind = _Spelled(node, model), _KINDS.get(node.op_type)
        changed = kind is not None and not node.domain and kind(node, shapes, new)
        nodes += new.nodes if changed else [node]
        found |= changed
    if found:
        set_nodes(model.graph, nodes)
    return found


class _Spelled:
    """The nodes that take the place of one."""

    def __init__(self, node: NodeProto, model: OnnxModel) -> None:
        self.of, self.model = node, model
        self.nodes: list[NodeProto] = []

    def constant(self, value: object) -> str:
        """Store a constant; return its name."""
        name = f"{self.of.output[0]}_{len(self.model.graph.initializer)}_constant"
        self.model.graph.initializer.append(self.model.tensor(np.asarray(value), name))
        return name

    def add(self, kind: str, *inputs: str, **settings: Any) -> str:
        """Add a node; return what it makes."""
        name = f"{self.of.output[0]}_{len(self.nodes)}_{kind}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name=name, **settings))
        return name

    def turned(self, x: str, order: Sequence[int]) -> str:
        """Put dimensions into another order."""
        return x if list(order) == sorted(order) else self.add("Transpose", x, perm=list(order))

    def shaped(self, x: str, sizes: Iterable[int]) -> str:
        """Give a value other dimensions; 0 is what it has in that place."""
        return self.add("Reshape", x, self.constant(np.array(list(sizes), np.int64)))

    def done(self) -> bool:
        """Let the last node make what the old one made."""
        self.nodes[-1].output[:] = self.of.output
        self.nodes[-1].name = self.of.name or self.nodes[-1].name
        return True


def _gemm(node: NodeProto, shapes: Shapes, new: _Spelled) -> bool:
    given = attributes(node)
    turned, factor, share = (given.get(name, usual) for name, usual in (("transA", 0), ("alpha", 1.0), ("beta", 1.0)))
    a, b, *rest = node.input
    bias = "".join(rest)
    behind = int(not given.get("transB", 0))
    sizes = shapes[b][behind : behind + 1] if b in shapes else None
    if not turned and factor == 1.0 == share and (bias not in shapes or shapes[bias] == sizes):
        return False
    if turned:
        a = new.turned(a, (1, 0))
    if factor != 1.0:
        number = new.constant(np.float32(factor))
        a, b = (a, new.add("Mul", b, number)) if b in shapes else (new.add("Mul", a, number), b)
    if bias and share != 1.0:
        bias = new.add("Mul", bias, new.constant(np.float32(share)))
    own = shapes.get(rest[0], ()) if bias else ()
    row = bool(bias) and rest[0] in shapes and sizes is not None and math.prod(own[:-1]) == 1
    if row and sizes is not None:  # one row for all, or one number
        bias = new.add("Expand", new.shaped(bias, (-1,)), new.constant(np.array(sizes, np.int64)))
    product = new.add("Gemm", a, b, *([bias] if row else []), transB=1 - behind)
    if bias and not row:
        new.add("Add", product, bias)
    return new.done()


def _einsum(node: NodeProto, shapes: Shapes, new: _Spelled) -> bool:
    equation = attributes(node)["equation"].decode().replace(" ", "")
    terms, arrow, out = equation.partition("->")
    if not arrow or "." in terms or len(node.input) != 2 or (node.input[0] in shapes) == (node.input[1] in shapes):
        return False
    (x, mine), (w, its) = sorted(zip(node.input, terms.split(","), strict=True), key=lambda pair: pair[0] in shapes)
    summed = [letter for letter in mine if letter in its]
    kept, made = ([letter for letter in out if letter in term] for term in (mine, its))
    plain = all(len(set(term)) == len(term) for term in (mine, its, out)) and not {*kept} & {*made}
    if not (plain and summed and {*mine} == {*kept, *summed} and {*its} == {*made, *summed}):
        return False
    sizes = dict(zip(its, shapes[w], strict=True))
    x = new.turned(x, [mine.index(letter) for letter in (*kept, *summed)])
    x = x if len(summed) == 1 else new.shaped(x, [0] * len(kept) + [-1])
    w = new.turned(w, [its.index(letter) for letter in (*summed, *made)])
    both = [math.prod(sizes[letter] for letter in part) for part in (summed, made)]
    y = new.add("MatMul", x, w if len(its) == 2 else new.shaped(w, both))
    y = y if len(made) == 1 else new.shaped(y, [0] * len(kept) + [sizes[letter] for letter in made])
    new.turned(y, [(*kept, *made).index(letter) for letter in out])
    return new.done()


_KINDS: dict[str, Callable[[NodeProto, Shapes, _Spelled], bool]] = {"Gemm": _gemm, "Einsum": _einsum}
