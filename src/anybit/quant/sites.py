"""Where a network is quantized: the weights, the tensors that feed a product, and what convolutions hand to sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from anybit.quant.capture import module_path
from anybit.quant.ops import FORWARD_CONVOLUTIONS, FUSED, OPERANDS, TRANSPOSED_CONVOLUTIONS, WEIGHTED, passed_on

aten = torch.ops.aten


@dataclass
class Sites:
    """The nodes to quantize, each with the products that it feeds."""

    weights: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    axes: dict[fx.Node, set[int | None]] = field(default_factory=dict)
    """For each weight the dimensions that run over output channels, one for each of its uses."""
    activations: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    accumulators: set[fx.Node] = field(default_factory=set)
    joined: list[list[fx.Node]] = field(default_factory=list)
    """Activations that meet in a concatenation and therefore share one grid."""

    def axis(self, weight: fx.Node) -> int | None:
        """Return the dimension that may get scales of its own, where all uses of a weight agree on one."""
        axes = self.axes[weight]
        return next(iter(axes)) if len(axes) == 1 else None


def find_sites(module: fx.GraphModule) -> Sites:
    """Return where `module` is quantized.

    An activation is taken at the place where its values arise, before pooling by maximum, reshaping and
    concatenation, so that a tensor that feeds several layers is quantized once.
    """
    sites = Sites()
    for layer in module.graph.nodes:
        if layer.target not in OPERANDS:
            continue
        for position in OPERANDS[layer.target]:
            operand = layer.args[position]
            origins = list(dict.fromkeys(_origins(operand, _output_axis(layer, position))))
            for origin, axis in origins:
                if not _is_float(origin):
                    continue
                if origin.op == "get_attr":
                    sites.weights.setdefault(origin, []).append(layer)
                    sites.axes.setdefault(origin, set()).add(axis)
                else:
                    sites.activations.setdefault(origin, []).append(layer)
            group = list(dict.fromkeys(origin for origin, _ in origins if origin in sites.activations))
            if len(group) > 1:
                sites.joined.append(group)
    sites.joined = _merged(sites.joined)
    sites.accumulators = set(_accumulators(module, sites))
    return sites


def ends_of(module: fx.GraphModule) -> set[fx.Node]:
    """Return the first and the last products: those with no other product in front of them or behind them."""
    nodes = list(module.graph.nodes)
    return _without_others(nodes, lambda node: node.all_input_nodes) | _without_others(
        nodes[::-1], lambda node: list(node.users)
    )


def point_name(node: fx.Node, taken: set[str]) -> str:
    """Return a name that a person recognizes: the module's path, numbered where one module is used often."""
    stem = str(node.target) if node.op in ("get_attr", "placeholder") else module_path(node)
    stem = str(node.meta.get("anybit_after", stem))
    name, count = stem, 1
    while name in taken:
        count += 1
        name = f"{stem}:{count}"
    taken.add(name)
    return name


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return node.op == "get_attr" or (isinstance(value, torch.Tensor) and value.is_floating_point())


def _output_axis(layer: fx.Node, position: int) -> int | None:
    """Return the dimension of an operand that survives as the output's channels, were it a weight."""
    if layer.target in WEIGHTED:
        return 1 if layer.target in TRANSPOSED_CONVOLUTIONS else 0
    dims = layer.args[position].meta["val"].dim()  # type: ignore[union-attr]
    first = position == OPERANDS[layer.target][0]
    # A batch of matrices has no one dimension for its output channels.
    return None if dims != 2 else (0 if first else 1)


def _origins(node: object, axis: int | None) -> Iterator[tuple[fx.Node, int | None]]:
    """Walk back to where the values of an operand arise, and follow one of its dimensions on the way."""
    if not isinstance(node, fx.Node):
        return
    if node.target is aten.cat.default:
        parts = node.args[0]
        for part in parts if isinstance(parts, list | tuple) else ():
            yield from _origins(part, None)
    elif (source := passed_on(node)) is not None:
        yield from _origins(source, _axis_before(node, axis))
    else:
        yield node, axis


def _axis_before(node: fx.Node, axis: int | None) -> int | None:
    if axis is None:
        return None
    dims: int = node.meta["val"].dim()
    if node.target is aten.t.default:
        return 1 - axis if dims == 2 else axis
    if node.target is aten.transpose.int:
        a, b = (int(d) % dims for d in node.args[1:3])  # type: ignore[arg-type]
        return {a: b, b: a}.get(axis, axis)
    if node.target is aten.permute.default:
        order: Any = node.args[1]
        return int(order[axis]) % dims
    return None


def _merged(groups: list[list[fx.Node]]) -> list[list[fx.Node]]:
    """Join the groups that share a node."""
    merged: list[dict[fx.Node, None]] = []
    for group in groups:
        new = dict.fromkeys(group)
        apart = []
        for other in merged:
            if new.keys() & other.keys():
                new = {**other, **new}
            else:
                apart.append(other)
        merged = [*apart, new]
    return [list(group) for group in merged]


def _accumulators(module: fx.GraphModule, sites: Sites) -> Iterator[fx.Node]:
    """Yield what convolutions leave in memory without feeding a product: the operands of sums and averages.

    An accelerator stores these as integers too, wide enough not to matter.
    """
    for layer in module.graph.nodes:
        if layer.target not in FORWARD_CONVOLUTIONS:
            continue
        tail = layer
        while tail not in sites.activations and len(tail.users) == 1 and next(iter(tail.users)).target in FUSED:
            tail = next(iter(tail.users))
        if tail not in sites.activations and not _leaves(tail):
            yield tail


def _leaves(node: fx.Node) -> bool:
    """Tell whether a value goes straight out of the network, reshaped at most."""
    return all(user.op == "output" or (passed_on(user) is not None and _leaves(user)) for user in node.users)


def _without_others(nodes: Iterable[fx.Node], sources: Callable[[fx.Node], list[fx.Node]]) -> set[fx.Node]:
    """Return the products that no other one comes before, with `sources` telling what comes before a node."""
    behind: set[fx.Node] = set()
    found = set()
    for node in nodes:
        product = node.target in OPERANDS
        after = any(source in behind for source in sources(node))
        if product and not after:
            found.add(node)
        if product or after:
            behind.add(node)
    return found
