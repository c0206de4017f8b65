"""Batch-norm folding: `γ (Wx + b - μ) / σ + β` is `W'x + b'` with `W' = W γ/σ`, `b' = β + (b - μ) γ/σ`."""

from __future__ import annotations

from typing import Any

import numpy as np

from anybit.errors import FoldError
from anybit.graph.view import Graph, Node, Norm, scale_outputs


def folded(weight: Any, bias: Any, norm: Norm, *, axis: int = 0, groups: int = 1) -> tuple[Any, Any]:
    """Return weight and bias of the one layer that does what layer and batch norm did together.

    Numpy and torch arrays alike; with torch, gradients go through. `axis` is the dimension of `weight` that runs over
    output channels.

    >>> one = np.ones(1)
    >>> weight, bias = folded(np.array([[8.0]]), 0.0, Norm(gamma=one, beta=3 * one, mean=one, var=4 * one))
    >>> weight.tolist(), bias.tolist()
    ([[4.0]], [2.5])
    """
    assert norm.var is not None
    factor = norm.gamma / (norm.var + norm.eps) ** 0.5
    outs = weight.shape[axis] * (groups if axis == 1 else 1)
    if outs != len(factor):
        raise FoldError(f"a weight of shape {tuple(weight.shape)} has {outs} outputs, its batch norm has {len(factor)}")
    return scale_outputs(weight, factor, axis, groups), norm.beta + (bias - norm.mean) * factor


def fold(graph: Graph) -> dict[str, Norm]:
    """Fold every batch norm that directly follows a layer of its own; return what is known of each value it made.

    Where something else is in front (a concatenation, or a layer whose weight is used elsewhere too) the batch norm
    stays.
    """
    makers, users = graph.makers(), graph.users()
    known: dict[str, Norm] = {}
    for node in [n for n in graph.nodes if n.kind == "norm"]:
        norm = node.norm
        assert norm is not None
        known[node.output] = norm
        _check(node, norm)
        layer = makers.get(node.inputs[0])
        if layer is None or not _can_fold(graph, layer, users):
            continue
        old = graph.bias(layer)
        bias = graph.constants[old] if old is not None else np.zeros_like(norm.beta)
        try:
            weight, new = folded(graph.constants[layer.inputs[1]], bias, norm, axis=layer.axis, groups=layer.groups)
        except FoldError as error:
            raise FoldError(f"folding into {layer.path}: {error}") from error
        name = old if old is not None and len(users[old]) == 1 else graph.fresh(bias_name(layer.inputs[1]))
        graph.set_constant(layer.inputs[1], weight)
        graph.set_constant(name, new.astype(weight.dtype, copy=False))
        layer.inputs[2:] = [name]
        layer.output, layer.path = node.output, node.path
        graph.nodes.remove(node)
        graph.removed.append((node, layer))
        makers[layer.output] = layer
    return known


def bias_name(weight: str) -> str:
    """Return what the bias beside a weight is called.

    >>> bias_name("conv1.weight"), bias_name("w")
    ('conv1.bias', 'w.bias')
    """
    return f"{weight.removesuffix('weight')}bias" if weight.endswith("weight") else f"{weight}.bias"


def _can_fold(graph: Graph, layer: Node, users: dict[str, list[Node]]) -> bool:
    if layer.kind != "layer" or layer.inputs[1] not in graph.constants:
        return False
    if len(users[layer.output]) != 1 or layer.output in graph.outputs or len(users[layer.inputs[1]]) != 1:
        return False
    if len(layer.inputs) > 2 and layer.inputs[2] and graph.bias(layer) is None:
        return False
    # A linear layer's batch norm runs over dimension 1, which is the feature dimension only for (batch, feature).
    return layer.convolution or graph.rank(layer.output) == 2


def _check(node: Node, norm: Norm) -> None:
    parts = {"mean": norm.mean, "var": norm.var, "gamma": norm.gamma, "beta": norm.beta}
    if broken := [
        f"{node.path}: {k} is not finite" for k, v in parts.items() if v is not None and not np.isfinite(v).all()
    ]:
        raise FoldError("a batch norm with broken statistics cannot be folded", broken)
