"""Weights that a network computes from its parameters in every pass, as weight norm does: they become parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from anybit.graph.from_torch import CONVOLUTIONS, PRODUCTS, RESHAPING, SAME, TRANSPOSED, attribute, module_path

aten = torch.ops.aten

LAYERS = {*CONVOLUTIONS, *TRANSPOSED, aten.linear.default}
TURNING = {*RESHAPING, *SAME, aten.transpose.int, aten.permute.default, aten.t.default}
"""What leaves the numbers of a weight as they are: it stays the parameter that it was."""


@torch.no_grad()
def fold_constants(body: fx.GraphModule) -> None:
    """Compute once what layers and products get that depends on no input."""
    fixed = _fixed(body.graph)
    for node in list(body.graph.nodes):
        kinds = dict.fromkeys(PRODUCTS.get(node.target, ()), "weight")
        if node.target in LAYERS:
            kinds = {1: "weight", 2: "bias"}
        for place, kind in kinds.items():
            given = node.args[place] if place < len(node.args) else None
            if isinstance(given, fx.Node) and fixed.get(given):
                _hold(body, given, f"{module_path(node)}.{kind}", _value(body, given))
    body.graph.eliminate_dead_code()
    body.recompile()


def _fixed(graph: fx.Graph) -> dict[fx.Node, bool]:
    """Return the nodes that depend on parameters only, and whether they are more than a parameter turned around."""
    found: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            found[node] = False
        elif node.op == "call_function" and node.all_input_nodes and all(n in found for n in node.all_input_nodes):
            found[node] = node.target not in TURNING or any(found[n] for n in node.all_input_nodes)
    return found


def _value(body: fx.GraphModule, node: fx.Node) -> Tensor:
    """Return what a node that depends on parameters only computes."""
    known: dict[fx.Node, Any] = {}
    todo = [node]
    while todo:
        now = todo[-1]
        missing = [n for n in now.all_input_nodes if n not in known]
        if missing:
            todo += missing
            continue
        todo.pop()
        if now.op == "get_attr":
            known[now] = attribute(body, str(now.target))
        else:
            args, kwargs = fx.node.map_arg((now.args, now.kwargs), known.__getitem__)
            known[now] = now.target(*args, **kwargs)  # type: ignore[operator]
    found = known[node]
    assert isinstance(found, Tensor)
    return found


def _hold(body: fx.GraphModule, node: fx.Node, name: str, value: Tensor) -> None:
    """Give the network a parameter of this value, and let it stand in place of the node."""
    taken = {name for name, _ in body.named_parameters()} | {name for name, _ in body.named_buffers()}
    while name in taken:
        name += "_"
    owner: nn.Module = body
    *path, last = name.split(".")
    for part in path:
        if part not in dict(owner.named_children()):
            owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    learns = any(p.requires_grad for p in body.parameters())
    owner.register_parameter(last, nn.Parameter(value.clone().contiguous(), learns))
    with body.graph.inserting_before(node):
        inner = body.graph.get_attr(name)
    inner.meta |= {"val": attribute(body, name), "nn_module_stack": node.meta.get("nn_module_stack", {})}
    node.replace_all_uses_with(inner)
