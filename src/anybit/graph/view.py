"""A network as the passes see it: nodes of a few kinds, named values with shapes that may be free, constants.

A view, not a framework. Two readers fill it, `from_torch` and `from_onnx`; passes read it and change constants; whoever
owns the network then brings it into line (`Graph.changed`, `Graph.removed`, the bias of each layer). What a reader does
not know is of the kind "other": it stays in floating point.

    layer     inputs (x, weight[, bias]): convolutions, linear layers, products with a constant matrix
    product   inputs (a, b): a matrix product of two values, or with a constant that is no plain matrix
    add, mul  two values, or a value and a constant
    concat    several values along an axis
    function  of one value, entry by entry
    pass      hands values on as they are: reshaping, choosing, padding with zeros
    average   means of values: pooling, smooth resizing
    norm      batch norm, with constants
    standard  layer norm, group norm: an output of known mean and spread
    recurrent LSTM, GRU: a loop with weights
    inside    a layer inside a branch or a loop, of which only the weights matter
    table     rows of a constant, chosen by the input
    other     anything else
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Size = int | str | None
Shape = tuple[Size, ...]
Follow = Callable[[int], tuple[int, int] | None]
"""Tells where a dimension goes: its new place, and how many entries in a row belong to each of its indices."""


@dataclass(eq=False)
class Node:
    """One step of a network. `path` is what a person calls it, `origin` what the reader made it of."""

    kind: str
    inputs: list[str]
    output: str
    path: str
    origin: Any = None

    # layer, product
    axis: int = 0
    """Of a layer: the dimension of the weight that runs over output channels."""
    groups: int = 1
    convolution: bool = False
    transposed: bool = False
    stride: int = 1
    """Of a transposed convolution: of how many outputs one sees a given tap."""
    weights: list[str] = field(default_factory=list)
    """Of a recurrent cell: its weights, each with outputs along `axis`, those of its first layer in front. Of a table:
    itself."""
    depth: int = 1
    """Of a recurrent cell: how many layers it has."""

    # function
    function: Callable[[Array], Array] | None = None
    bounds: tuple[float, float] | None = None
    """The interval that the output stays in, whatever comes in."""
    fused: bool = False
    """Whether an accelerator applies it to a product's result before that is stored."""
    homogeneous: bool = False
    """Whether a positive factor can be taken through it."""

    # pass, average, concat
    follow: Follow | None = None

    # norm, standard
    norm: Norm | None = None
    name: str = ""
    """What the operator is called, for messages."""


@dataclass(frozen=True)
class Norm:
    """The constants of a normalization: `γ (x - μ) / sqrt(v + eps) + β` along dimension `axis`."""

    gamma: Array
    beta: Array
    mean: Array | None = None
    var: Array | None = None
    eps: float = 0.0
    axis: int = 1


@dataclass
class Graph:
    """A network's nodes in order, its constants, and what is known of the values between them."""

    nodes: list[Node] = field(default_factory=list)
    constants: dict[str, Array] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    floating: set[str] = field(default_factory=set)
    """The values that are floating-point tensors."""
    changed: set[str] = field(default_factory=set)
    """The constants that passes have replaced or added."""
    removed: list[tuple[Node, Node]] = field(default_factory=list)
    """Nodes that are folded away, each with the layer that now makes its output."""
    scaled: dict[str, Array] = field(default_factory=dict)
    """What equalizing multiplied constants by, shaped to broadcast."""

    def makers(self) -> dict[str, Node]:
        """Return the node that makes each value."""
        return {node.output: node for node in self.nodes}

    def users(self) -> dict[str, list[Node]]:
        """Return the nodes that use each value or constant, once for each time."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in [*node.inputs, *node.weights]:
                found.setdefault(name, []).append(node)
        return found

    def set_constant(self, name: str, value: Array) -> None:
        """Replace a constant, or add one."""
        old = self.constants.get(name)
        self.constants[name] = value if old is None else value.astype(old.dtype, copy=False)
        self.changed.add(name)

    def fresh(self, name: str) -> str:
        """Return a name that nothing has yet."""
        taken = {*self.constants, *self.shapes}
        return next(n for n in (name, *(f"{name}_{i}" for i in range(1, len(taken) + 2))) if n not in taken)

    def bias(self, node: Node) -> str | None:
        """Return the name of a layer's constant bias."""
        name = node.inputs[2] if len(node.inputs) > 2 else ""
        return name if name in self.constants else None

    def rank(self, value: str) -> int:
        """Return the number of dimensions, or 0 where nobody knows."""
        return len(self.shapes.get(value, ()))


def origins(graph: Graph, value: str, axis: int | None, makers: dict[str, Node]) -> Iterator[tuple[str, int | None]]:
    """Walk back to where values arise, through what hands them on, and follow one dimension on the way."""
    node = makers.get(value)
    if node is None:
        yield value, axis
    elif node.kind == "concat":
        for part in node.inputs:
            yield from origins(graph, part, None, makers)
    elif node.kind == "pass":
        yield from origins(graph, node.inputs[0], _before(graph, node, axis), makers)
    elif node.kind == "table":  # its rows are rounded already, each on a grid of its own
        yield node.weights[0], 0
    else:
        yield value, axis


def _before(graph: Graph, node: Node, axis: int | None) -> int | None:
    """Return the dimension of a node's input that becomes `axis` of its output."""
    if axis is None or node.follow is None:
        return None
    rank = graph.rank(node.inputs[0])
    return next((d for d in range(rank) if node.follow(d) == (axis, 1)), None)


def saturation(function: Callable[[Array], Array]) -> tuple[float, float] | None:
    """Return the interval that a function keeps its output in, whatever comes in: it is flat far out on either side.

    >>> saturation(np.tanh), saturation(lambda x: np.maximum(x, 0))
    ((-1.0, 1.0), None)
    """
    low, left, right, high = function(np.array([-1e30, -1e20, 1e20, 1e30], np.float32)).tolist()
    return (low, high) if low == left and right == high and abs(low) + abs(high) < 1e20 else None


# Where a dimension goes


def stays(d: int) -> tuple[int, int]:
    """Every dimension stays where it is."""
    return d, 1


def shifted(by: int) -> Follow:
    """There are so many more dimensions in front."""
    return lambda d: (d + by, 1)


def permuted(perm: Iterable[int]) -> Follow:
    """Dimension `perm[i]` goes to place i.

    >>> permuted([0, 2, 1])(1)
    (2, 1)
    """
    order = list(perm)
    return lambda d: (order.index(d), 1) if d in order else None


def except_for(dims: Iterable[int]) -> Follow:
    """All dimensions stay but those in which entries are chosen, added or moved."""
    gone = set(dims)
    return lambda d: None if d in gone else (d, 1)


def reduced(dims: Iterable[int], *, keep: bool) -> Follow:
    """Some dimensions vanish, or are left with one entry.

    >>> reduced([2, 3], keep=False)(1), reduced([0], keep=False)(1)
    ((1, 1), (0, 1))
    """
    gone = set(dims)
    return lambda d: None if d in gone else (d if keep else d - sum(g < d for g in gone), 1)


def reshaped(before: Shape, after: Shape) -> Follow:
    """Entries keep their order and get another shape.

    >>> reshaped(("N", 8, 4, 4), ("N", 128))(1), reshaped(("N", 8, 1, 1), ("N", 8))(1), reshaped((2, 6), (2, 3, 2))(1)
    ((1, 16), (1, 1), None)
    """
    # A size that nobody knows is the same on both sides if it is the only one and all others multiply to the same.
    same = before.count(None) == after.count(None) == 1 and _count(before) == _count(after)
    before, after = (
        tuple(("?" if same else f"? {side} {i}") if size is None else size for i, size in enumerate(shape))
        for side, shape in (("before", before), ("after", after))
    )

    def follow(d: int) -> tuple[int, int] | None:
        if d >= len(before):  # nobody knows the shape
            return None
        front, own, inner = _count(before[:d]), before[d], _count(before[d:])
        for place in range(len(after)):
            if _count(after[:place]) != front:
                continue
            if after[place] == own:
                return place, 1
            if (after[place], ()) == inner:
                return place, _count(before[d + 1 :])[0]
        return None

    return follow


def _count(sizes: Shape) -> tuple[int, tuple[str, ...]]:
    """Return a product of sizes in a form that can be compared: numbers multiplied, free sizes by name."""
    return math.prod(s for s in sizes if isinstance(s, int)), tuple(
        sorted(str(s) for s in sizes if not isinstance(s, int))
    )


# Weights


def by_output(weight: Array, axis: int, groups: int) -> Array:
    """Return a weight as (output channel, input channel of its group, tap).

    >>> by_output(np.arange(4).reshape(2, 2), 1, 1)[:, :, 0].tolist()
    [[0, 2], [1, 3]]
    """
    if axis == 0:
        return weight.reshape(weight.shape[0], weight.shape[1] if weight.ndim > 1 else 1, -1)
    ins, outs = weight.shape[:2]
    grouped = weight.reshape(groups, ins // groups, outs, -1).swapaxes(1, 2)
    return grouped.reshape(groups * outs, ins // groups, -1)


def scale_outputs(weight: Any, factor: Any, axis: int, groups: int) -> Any:
    """Multiply each output channel of a weight by its factor; for numpy and torch arrays alike.

    >>> scale_outputs(np.ones((2, 2)), np.array([1.0, 3.0]), 1, 1).tolist()
    [[1.0, 3.0], [1.0, 3.0]]
    """
    if axis == 0:
        return weight * factor.reshape(-1, *[1] * (weight.ndim - 1))
    ins, outs = weight.shape[:2]
    parts = weight.reshape(groups, ins // groups, outs, -1) * factor.reshape(groups, 1, outs, 1)
    return parts.reshape(weight.shape)
