"""Does a helper help? The error that rounding a weight leaves in its layer's output, expected without data.

With an error D in the weights and inputs x of standard deviation s per channel, the output is off by the sum of D·x.
Its mean is taken back by the bias; what is left depends on how alike the inputs are. Neighbouring pixels of a channel
are (`TAPS`), channels hardly (`CHANNELS`). So errors that cancel within a kernel cost less than their squares say, and
errors that all point the same way, as those of clipping do, cost more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from anybit.graph.view import Graph, Node, by_output
from anybit.plan.codes import encode
from anybit.plan.equalize import Pair, factors_of, find_pairs, scaled
from anybit.plan.moments import Moments
from anybit.plan.points import Weight

Array = npt.NDArray[Any]

TAPS, CHANNELS = 0.6, 0.05
"""Correlation of what the taps of one kernel see, and of different channels."""
TRIED = (2, 3, 4)
"""Widths at which helpers are compared; at 8 bits none matters."""


def output_error(error: Array, layer: Node, spread: Array) -> float:
    """Return the expected square of a layer's output if its weight were this error, added up over its channels.

    >>> layer = Node("layer", [], "", "")
    >>> [round(output_error(np.array([[d]]), layer, np.ones(1)), 2) for d in ([1.0, -1.0], [1.0, 1.0])]
    [0.8, 3.2]
    """
    kernel = by_output(np.asarray(error, np.float32), layer.axis, layer.groups)
    _, ins, taps = kernel.shape
    each = np.broadcast_to(spread, (layer.groups * ins,)).reshape(layer.groups, 1, ins).astype(np.float32)
    sums = kernel.sum(2).reshape(layer.groups, -1, ins) * each
    squares = np.einsum("oit,oit->oi", kernel, kernel).reshape(sums.shape) * each**2
    near, far = (TAPS if taps > 1 else 1.0), CHANNELS
    of_taps = (1 - near) * squares.sum() if taps > 1 else 0.0
    return float(of_taps + (near - far) * (sums**2).sum() + far * (sums.sum(2) ** 2).sum())


def input_of(graph: Graph, layer: Node, moments: dict[str, Moments]) -> Moments | None:
    """Return what is known of a layer's input, channel by channel."""
    x = moments.get(layer.inputs[0])
    weight = graph.constants[layer.inputs[1]]
    ins = by_output(weight, layer.axis, layer.groups).shape[1] * layer.groups
    place = 1 if layer.convolution else graph.rank(layer.inputs[0]) - 1
    fits = x is not None and x.sure and x.axis == place and len(x.var) == ins and x.var.any()
    return x if fits else None


def spread_of(x: Moments | None) -> Array:
    """Return the standard deviation of each channel, or one for all where nobody knows."""
    return np.ones(1) if x is None else np.sqrt(np.maximum(x.var, 0.0))


def worth_equalizing(graph: Graph, moments: dict[str, Moments], how: Callable[[Node], Weight]) -> list[Pair]:
    """Return the pairs of layers whose errors, of weights and of what flows between them, fall by equalization."""
    pairs = find_pairs(graph)
    layers = {n.inputs[1]: n for n in graph.nodes if n.kind == "layer"}
    inputs = {name: input_of(graph, layers[name], moments) for pair in pairs for name in pair.names}

    def error(name: str, weight: Array, factor: Array) -> float:
        layer, x = layers[name], inputs[name]
        found = relative_error(weight, how(layer), layer, spread_of(x) / factor)
        if x is not None:
            step = float(np.max(np.maximum(np.abs(x.low), np.abs(x.high)) / factor))
            noise = output_error(weight, layer, np.ones(1)) * step**2 / 12
            found += noise * sum(4.0**-bits for bits in TRIED) / output_error(weight, layer, spread_of(x) / factor)
        return found

    before = {name: error(name, graph.constants[name], np.ones(1)) for name in inputs}
    while pairs:
        factors = factors_of(graph, pairs)
        own = {p.read.weight: f.repeat(p.read.repeat) for p, f in zip(pairs, factors, strict=True)}
        after = {n: error(n, scaled(graph, n, pairs, factors), own.get(n, np.ones(1))) for p in pairs for n in p.names}
        kept = [p for p in pairs if sum(after[n] for n in p.names) < sum(before[n] for n in p.names)]
        if len(kept) == len(pairs):
            break
        pairs = kept
    return pairs


def relative_error(weight: Array, how: Weight, layer: Node, spread: Array) -> float:
    """Return what rounding leaves in a layer's output, as a part of that output; over the widths that are tried."""
    exact = np.ascontiguousarray(weight, np.float32)
    signal = output_error(exact, layer, spread)
    errors = (output_error(encode(exact, how, bits).error(exact), layer, spread) for bits in TRIED)
    return sum(errors) / signal if signal else 0.0
