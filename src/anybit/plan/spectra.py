"""Values whose logarithm is taken: they differ by orders of magnitude, and small ones count as much as large ones.

The power of a sound, say, goes from 1e-12 to 1000. A grid with even steps makes zero of nearly all of that, at 16 bits
too, and its logarithm turns zero into a large error.
"""

from __future__ import annotations

from anybit.graph.view import Graph, Node, origins

SPECTRUM = "in front of a logarithm"
"""Why a value stays in floating point."""

LOGARITHMS = frozenset({"log", "log2", "log10", "log1p"})
SQUARES = frozenset({"Pow", "Abs", "ReduceSumSquare", "ReduceL1", "ReduceL2", "pow", "abs", "square"})
"""Operators that make magnitudes of signed numbers."""
KEEPING = SQUARES | {"Sqrt", "ReduceSum", "ReduceMax", "Max", "Sum", "Where", "clamp", "sqrt", "sum"}
"""Operators that leave small magnitudes small, next to the kinds below."""
KINDS = ("add", "sub", "mul", "div", "pass", "average", "concat")


def spectra(graph: Graph) -> set[str]:
    """Return the magnitudes that a product turns into others which a logarithm sees, and sums on the way there."""
    makers = graph.makers()
    todo = [name for node in graph.nodes if node.name.lower() in LOGARITHMS for name in node.inputs]
    seen: set[str] = set()
    found: set[str] = set()
    while todo:
        value = todo.pop()
        node = makers.get(value)
        if node is None or value in seen:
            continue
        seen.add(value)
        if node.kind in ("layer", "product"):
            operands = [name for name in node.inputs[:2] if name not in graph.constants]
            powers = {v for name in operands for v, _ in origins(graph, name, None, makers) if _is_power(v, makers)}
            found |= powers
            todo += operands if powers else []
        elif _keeps(node):
            todo += node.inputs
    return found | seen


def _keeps(node: Node) -> bool:
    return node.kind in KINDS or node.name in KEEPING


def _is_power(value: str, makers: dict[str, Node]) -> bool:
    """Tell whether a value is made of squares or other magnitudes, with no product after those."""
    todo, seen = [value], set()
    while todo:
        value = todo.pop()
        node = makers.get(value)
        if node is None or value in seen:
            continue
        seen.add(value)
        if node.name in SQUARES or (node.kind == "mul" and len(set(node.inputs)) == 1):
            return True
        todo += node.inputs if _keeps(node) else []
    return False
