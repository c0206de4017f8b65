"""Cross-layer equalization, after Nagel et al., "Data-Free Quantization" (2019).

A ReLU commutes with a positive factor, so channel c of a layer can be divided by s and the weights that read it in
the next layer multiplied by s: the network computes the same. With `s = sqrt(r1 / r2)`, for the largest weights r1
and r2 on either side, both become `sqrt(r1 r2)`, and a grid for a whole tensor no longer wastes its codes on the
few channels that are large.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from anybit.graph.view import Graph, Node, Norm

Array = npt.NDArray[np.float64]

ROUNDS = 200
"""In a chain each pair disturbs its neighbours; they settle long before this many rounds."""
SETTLED = 1e-6
"""Factors this close to one change nothing."""
UNSEEN = 2.0**-17
"""A channel below this part of its tensor's largest weight is zero on every grid up to 16 bits: as good as dead."""


@dataclass(frozen=True)
class Side:
    """How the channels between two layers lie in the weight of one of them: along its first or second dimension."""

    weight: str
    axis: int
    groups: int
    repeat: int = 1
    """Entries in a row that belong to one channel: the pixels that a flattened image had."""

    def largest(self, sizes: Array) -> Array:
        """Return the largest entry per channel of a matrix with the weight's first two dimensions."""
        if self.axis == 0:
            return np.asarray(sizes.max(1).reshape(-1, self.repeat).max(1))
        grouped = sizes.reshape(self.groups, -1, sizes.shape[1]).max(1)
        return np.asarray(grouped.reshape(-1, self.repeat).max(1))

    def spread(self, factors: Array, rows: int) -> Array:
        """Return one factor per channel as a matrix to multiply the weight's first two dimensions by."""
        each = factors.repeat(self.repeat)
        if self.axis == 0:
            return each[:, None]
        grouped = each.reshape(self.groups, 1, -1)
        return np.broadcast_to(grouped, (self.groups, rows // self.groups, grouped.shape[2])).reshape(rows, -1)


@dataclass(frozen=True)
class Pair:
    """Two layers in a row, and how the channels between them lie in either weight."""

    layer: Node | None
    written: Side
    read: Side

    @property
    def names(self) -> tuple[str, str]:
        """The two weights."""
        return self.written.weight, self.read.weight


def equalize(graph: Graph, known: dict[str, Norm], pairs: list[Pair]) -> None:
    """Equalize pairs of layers with only operators between them that commute with a positive factor.

    Batch-norm constants in `known` follow the channels they describe. Layers whose parameters are used elsewhere too
    are left alone, and channels that are (nearly) zero keep their scale.
    """
    factors = factors_of(graph, pairs)
    for name in dict.fromkeys(name for pair in pairs for name in pair.names):
        graph.scaled[name] = _total(name, graph.constants[name], pairs, factors)
    for name, factor in graph.scaled.items():
        graph.set_constant(name, graph.constants[name].astype(np.float64) * factor)
    for pair, factor in zip(pairs, factors, strict=True):
        assert pair.layer is not None
        bias = graph.bias(pair.layer)
        if bias is not None:
            graph.scaled[bias] = 1 / factor
            graph.set_constant(bias, graph.constants[bias].astype(np.float64) / factor)
        if pair.layer.output in known:
            norm = known[pair.layer.output]
            known[pair.layer.output] = replace(norm, gamma=norm.gamma / factor, beta=norm.beta / factor)


def factors_of(graph: Graph, pairs: list[Pair]) -> list[Array]:
    """Return what the channels of each pair are divided by."""
    names = dict.fromkeys(name for pair in pairs for name in pair.names)
    return balance({name: _sizes(graph.constants[name]) for name in names}, pairs)


def scaled(graph: Graph, name: str, pairs: list[Pair], factors: list[Array]) -> Array:
    """Return a weight with all its factors."""
    weight = graph.constants[name]
    return np.asarray(weight.astype(np.float64) * _total(name, weight, pairs, factors))


def balance(sizes: dict[str, Array], pairs: list[Pair]) -> list[Array]:
    """Return the factor of each pair's channels that makes both sides equally large, everywhere at once.

    One channel, 8 on one side and 2 on the other; halving the first makes both 4:

    >>> pair = Pair(None, Side("a", 0, 1), Side("b", 1, 1))
    >>> balance({"a": np.array([[8.0]]), "b": np.array([[2.0]])}, [pair])
    [array([2.])]
    """
    sizes = dict(sizes)
    ends = [(p.written.largest(sizes[p.written.weight]), p.read.largest(sizes[p.read.weight])) for p in pairs]
    alive = [_alive(one) & _alive(two) for one, two in ends]
    totals = [np.ones_like(one) for one, _ in ends]
    for _ in range(ROUNDS):
        change = 0.0
        for i, pair in enumerate(pairs):
            one, two = sizes[pair.written.weight], sizes[pair.read.weight]
            with np.errstate(divide="ignore", invalid="ignore"):
                factor = np.sqrt(pair.written.largest(one) / pair.read.largest(two))
            factor = np.where(alive[i], factor, 1.0)
            sizes[pair.written.weight] = one / pair.written.spread(factor, len(one))
            sizes[pair.read.weight] = two * pair.read.spread(factor, len(two))
            totals[i] = totals[i] * factor
            change = max(change, float(np.abs(np.log(factor)).max()))
        if change < SETTLED:
            break
    return totals


def find_pairs(graph: Graph) -> list[Pair]:
    """Return the pairs of layers that can trade a factor per channel, in the order of the network."""
    users = graph.users()

    def own(name: str | None) -> bool:
        """Tell whether a constant has one reader."""
        return name in graph.constants and len(users[name]) == 1

    pairs = []
    for layer in graph.nodes:
        if layer.kind != "layer" or (found := _reader(graph, layer, users)) is None:
            continue
        reader, repeat = found
        named = layer.inputs[2] if len(layer.inputs) > 2 else ""
        if own(layer.inputs[1]) and own(reader.inputs[1]) and (not named or own(named)):
            written = Side(layer.inputs[1], layer.axis, layer.groups)
            pairs.append(Pair(layer, written, Side(reader.inputs[1], 1 - reader.axis, reader.groups, repeat)))
    return pairs


def _reader(graph: Graph, layer: Node, users: dict[str, list[Node]]) -> tuple[Node, int] | None:
    """Follow a layer's output to the one layer that reads it; also return its features per channel."""
    place, repeat = _channels(graph, layer, layer.output), 1
    value = layer.output
    while place is not None and len(users.get(value, [])) == 1 and value not in graph.outputs:
        (user,) = users[value]
        if user.kind == "layer":
            fits = user.inputs[0] == value and _channels(graph, user, value) == place
            return (user, repeat) if fits else None
        if user.kind == "function":
            if not user.homogeneous:
                return None
        elif user.kind in ("pass", "average") and user.follow is not None:
            where = user.follow(place)
            if where is None or (repeat != 1 and where[1] != 1):
                return None
            place, repeat = where[0], repeat * where[1]
        else:
            return None
        value = user.output
    return None


def _channels(graph: Graph, layer: Node, value: str) -> int | None:
    """Return the dimension of a layer's input or output that its weight knows as channels."""
    rank, weight = graph.rank(value), graph.constants.get(layer.inputs[1])
    if weight is None:
        return None
    if layer.convolution:
        return 1 if rank == weight.ndim else None
    return rank - 1 if weight.ndim == 2 and rank else None


def _sizes(weight: npt.NDArray[Any]) -> Array:
    """Return the largest magnitude of each kernel: a factor per channel acts on it as on the kernel."""
    return np.asarray(np.abs(weight.astype(np.float64)).reshape(*weight.shape[:2], -1).max(2))


def _alive(sizes: Array) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = sizes > UNSEEN * sizes.max()
    return found


def _total(name: str, weight: npt.NDArray[Any], pairs: list[Pair], factors: list[Array]) -> Array:
    """Return all factors of a weight, one per kernel, shaped to broadcast."""
    total = np.ones(weight.shape[:2])
    for pair, factor in zip(pairs, factors, strict=True):
        if pair.written.weight == name:
            total = total / pair.written.spread(factor, len(weight))
        if pair.read.weight == name:
            total = total * pair.read.spread(factor, len(weight))
    return total.reshape(*weight.shape[:2], *[1] * (weight.ndim - 2))
