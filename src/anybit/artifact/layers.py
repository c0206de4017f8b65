"""The layers of a master whose rounding can be fitted to data, and the rows that their inputs are made of.

Left out, and rounded to nearest, are weights inside branches and loops, products of a batch of matrices, and whatever
else uses a weight in another way than as a product with rows of its input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from anybit.artifact.header import Header
from anybit.artifact.master import Master
from anybit.artifact.model import OnnxModel
from anybit.graph.from_onnx import read_onnx
from anybit.graph.onnx_nodes import attributes
from anybit.graph.view import Graph, Node, origins
from anybit.plan.points import Bias, Plan, Weight
from anybit.plan.windows import Windows

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Use:
    """One layer that uses a weight: where its input is, how it goes over it, and the name of its bias."""

    value: str
    node: Node
    points: tuple[str, ...] = ()
    bias: str = ""
    direction: int = 0
    """Of a recurrent cell."""

    @property
    def recurrent(self) -> bool:
        """Whether a recurrent cell uses the weight."""
        return self.node.kind == "recurrent"

    def rows(self, x: Array, shape: tuple[int, ...], most: int, seed: int) -> Array:
        """Return rows of an input for a weight of some shape; the same ones for the same seed."""
        draw = np.random.default_rng(seed)
        if not self.recurrent:
            return windows_of(self.node, shape, x.shape[2:]).rows(x, most, draw)
        directions = range(self.direction, self.direction + (shape[0] if len(shape) == 3 else 1))
        if x.ndim == 4:  # what the cell made, (step, direction, sequence, state), is what it gets next
            return np.concatenate([Windows().rows(x[:, d], most, np.random.default_rng(seed)) for d in directions])
        return np.repeat(Windows().rows(x, most, draw), len(directions), axis=0)


@dataclass(frozen=True, eq=False)
class Layer:
    """A weight and the layers that use it."""

    weight: Weight
    uses: list[Use]

    @property
    def stacked(self) -> bool:
        """Whether the weight is a stack of matrices, one for each direction of a recurrent cell."""
        return self.uses[0].recurrent and len(self.weight.shape) == 3


def complete(master: Master) -> OnnxModel:
    """Return the model of a master with its weights in it, in floating point."""
    model = master.model.copy()
    for weight in master.plan.weights:
        model.graph.initializer.append(model.tensor(master.weights[weight.name], weight.place))
    return model


def apart(model: OnnxModel, plan: Plan, path: Path) -> Master:
    """Return a model with its weights in it as a master that is nowhere on disk."""
    rest = model.copy()
    held = {tensor.name: tensor for tensor in rest.graph.initializer}
    weights = {weight.name: rest.array(held[weight.place]).astype(np.float32) for weight in plan.weights}
    places = {weight.place for weight in plan.weights}
    rest.set_initializers([tensor for tensor in rest.graph.initializer if tensor.name not in places])
    return Master(path, Header(plan), rest, weights)


def layers_of(master: Master) -> list[Layer]:
    """Return the weights that can be reconstructed, in the order of the network."""
    model = complete(master)
    graph = read_onnx(model.proto, {tensor.name: model.array(tensor) for tensor in model.graph.initializer})
    makers = graph.makers()
    weights = {weight.place: weight for weight in master.plan.weights}
    points = {a.place: a.name for a in master.plan.activations}
    found: dict[str, list[Use | None]] = {}
    for node in graph.nodes:
        if node.kind in ("pass", "concat"):  # what they hand on is used elsewhere
            continue
        for position, place, direction in _constants(graph, node, makers):
            if place in weights:
                fed = bool(node.inputs) and node.inputs[0] not in graph.constants  # a branch may take nothing
                suits = fed and _is_product(graph, node, weights[place], position)
                use = _use(graph, node, position, points, makers, direction) if suits else None
                found.setdefault(place, []).append(use)
    layers = []
    for place, uses in found.items():
        own = [bias for bias in master.plan.biases if bias.weight == weights[place].name]
        known = [use for use in uses if use is not None]
        if len(known) == len(uses):
            layers.append(Layer(weights[place], [_with_bias(use, graph, own, len(uses)) for use in known]))
    return layers


def _constants(graph: Graph, node: Node, makers: dict[str, Node]) -> Iterator[tuple[int, str, int]]:
    """Yield the constants that a node uses, each with the input that it comes by and its place among those there."""
    inputs = node.origin.input if node.kind == "recurrent" else [*node.inputs, *node.weights]
    for position, name in enumerate(inputs):
        places = dict.fromkeys(place for place, _ in origins(graph, name, None, makers) if place in graph.constants)
        yield from ((position, place, direction) for direction, place in enumerate(places))


def _use(
    graph: Graph, node: Node, position: int, points: dict[str, str], makers: dict[str, Node], direction: int
) -> Use:
    if node.kind == "recurrent" and position == 2:
        return Use(node.output, node, direction=direction)
    sources = tuple(points[v] for v, _ in origins(graph, node.inputs[0], None, makers) if v in points)
    return Use(node.inputs[0], node, sources, direction=direction)


def _with_bias(use: Use, graph: Graph, biases: list[Bias], uses: int) -> Use:
    """Return a use with the name of the bias that is added behind it, as far as it is plain which one that is."""
    place = graph.bias(use.node) if use.node.kind == "layer" else None
    found = [bias.name for bias in biases if bias.place == place or (place is None and uses == 1)]
    return replace(use, bias=found[0]) if len(found) == 1 and not use.recurrent else use


def _is_product(graph: Graph, node: Node, weight: Weight, position: int) -> bool:
    """Tell whether a node is a layer whose output is a product of a weight and rows of its input."""
    if node.kind == "recurrent":
        return position in (1, 2) and weight.channels == len(weight.shape) - 2 and bool(node.origin.output[0])
    if position != 1:
        return False
    if node.kind == "layer" and node.inputs[1] == weight.place:
        given = attributes(node.origin)
        pads = given.get("auto_pad", b"NOTSET")
        odd = node.transposed and (pads not in (b"NOTSET", b"VALID") or given.get("output_shape"))
        return not odd and weight.channels == node.axis and weight.groups == node.groups
    # A matrix that is turned around on its way.
    ins = weight.shape[1 - weight.channels] if len(weight.shape) == 2 and weight.channels < 2 else None
    shape = graph.shapes.get(node.inputs[0], ())
    return node.kind == "product" and weight.axis != 1 - weight.channels and bool(shape) and shape[-1] == ins


def windows_of(node: Node, shape: tuple[int, ...], size: tuple[int, ...]) -> Windows:
    """Return how a layer with a weight of some shape goes over an input of some size."""
    if not node.convolution:
        return Windows()
    given, rank = attributes(node.origin), len(shape) - 2
    kernel = shape[2:]
    ones = [1] * rank
    strides, dilations = tuple(given.get("strides", ones)), tuple(given.get("dilations", ones))
    pads = list(given.get("pads", [0] * 2 * rank))
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    if given.get("auto_pad", b"NOTSET") in (b"SAME_UPPER", b"SAME_LOWER"):
        both = [max((-(-n // s) - 1) * s + r - n, 0) for n, s, r in zip(size, strides, reach, strict=True)]
        less, more = [n // 2 for n in both], [n - n // 2 for n in both]
        pads = [*less, *more] if given["auto_pad"] == b"SAME_UPPER" else [*more, *less]
    if not node.transposed:
        return Windows(kernel, strides, dilations, tuple(pads[:rank]), tuple(pads[rank:]), (), node.groups)
    begin = tuple(r - 1 - p for r, p in zip(reach, pads[:rank], strict=True))
    extra = given.get("output_padding", [0] * rank)
    end = tuple(r - 1 - p + e for r, p, e in zip(reach, pads[rank:], extra, strict=True))
    return Windows(kernel, tuple(ones), dilations, begin, end, strides, node.groups)
