"""What a few runs tell a plan: which points need more bits, and ranges where nothing else tells them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from anybit.artifact.coverage import multiplications, products
from anybit.artifact.made_up import COUNT, drawn
from anybit.graph.from_torch import value_name
from anybit.graph.view import Graph, Node
from anybit.plan.build import Built, Interval
from anybit.plan.points import Plan, Widths
from anybit.plan.widen import SEEN, Array, Outputs, as_one, chosen, ways, widened
from anybit.simulate.capture import call_arguments, moved_to
from anybit.simulate.network import QuantizedNetwork

aten = torch.ops.aten
Call = tuple[tuple[Any, ...], dict[str, Any]]


def calls_of(loader: Iterable[Any], network: QuantizedNetwork, some: list[Call]) -> Iterator[Call]:
    """Yield how the network is called with each batch, and keep the first few inputs, one by one where that goes.

    The loader yields inputs, or pairs of inputs and targets; inputs are a tensor, a tuple of them, or a dict by name.
    """
    for batch in loader:
        call = call_arguments(batch[0] if isinstance(batch, tuple | list) else batch)
        yield call
        if not _free(network):
            some += [call] * (len(some) < SEEN)
            continue
        for i in range(min(SEEN - len(some), *(len(x) for x in _tensors(call)))):
            some.append(pytree.tree_map_only(Tensor, operator.itemgetter(slice(i, i + 1)), call))


def _tensors(call: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor)]


def _free(network: QuantizedNetwork) -> bool:
    """Tell whether the network takes any number of inputs at once."""
    return all(shape is None or shape[:1] == (None,) for shape in network.takes.shapes.values())


@torch.no_grad()
def with_more_bits(network: QuantizedNetwork, clipped: Plan, graph: Graph, built: Built, some: list[Call]) -> Plan:
    """Return the plan of a network, or one `clipped`, with more bits for points whose rounding costs outputs most."""
    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    counts = _counts(network.body, graph)
    calls = [moved_to(device, some[i]) for i in chosen(len(some), sum(counts.values()))]
    if _free(network) and len({tuple(x.shape for x in _tensors(call)) for call in calls}) == 1:
        calls = [pytree.tree_map(lambda *xs: torch.cat(xs) if isinstance(xs[0], Tensor) else xs[0], *calls)]

    def outputs(widths: Widths) -> list[Array]:
        network.execute(widths)
        made = [[_array(x) for x in _tensors(network(*args, **kwargs))] for args, kwargs in calls]
        return [as_one(parts) for parts in zip(*made, strict=True)]

    def run(plan: Plan) -> Outputs:
        network.plan = plan
        return outputs

    return widened(graph, ways(network.plan, clipped, built.fed), built.joined, counts, run)


def _array(x: Tensor) -> Array:
    return (x.float() if x.is_floating_point() else x).cpu().numpy()


def _counts(body: fx.GraphModule, graph: Graph) -> dict[Node, int]:
    """Return the multiplications of each product for one input of the size that was captured."""
    shapes = {name: constant.shape for name, constant in graph.constants.items()}
    made = {value_name(node): node for node in body.graph.nodes}
    # What a folded layer hands on is called like the batch norm that is gone.
    made |= {node.output: node.origin for node in graph.nodes if isinstance(node.origin, fx.Node)}
    for name, node in made.items():
        value = node.meta.get("val")
        value = value[0] if isinstance(value, tuple | list) and value else value  # a recurrent cell's states come along
        if isinstance(value, Tensor):
            sizes = [size if isinstance(size, int) else size.node.hint for size in value.shape]
            shapes |= {name: tuple(map(int, sizes))} if None not in sizes else {}
    firsts = [shapes[n.name][0] for n in body.graph.nodes if n.op == "placeholder" and shapes.get(n.name)]
    batch = max([1, *firsts])
    known = [node for node in products(graph) if {*node.inputs[:2], *node.weights, node.output} <= shapes.keys()]
    return {node: multiplications(node, shapes) // batch for node in known}


def made_up_calls(body: fx.GraphModule, example: Call, interval: Mapping[str, Interval]) -> Iterator[Call]:
    """Yield the example and some calls like it: numbers and what is looked up in a table are drawn, the rest stays."""
    leaves, spec = pytree.tree_flatten(example)
    holders = [node for node in body.graph.nodes if node.op == "placeholder"]
    yield example
    for seed in range(COUNT if len(leaves) == len(holders) else 0):
        rng = np.random.default_rng(seed)
        yield pytree.tree_unflatten(
            [_like(leaf, node, interval, rng) for leaf, node in zip(leaves, holders, strict=True)], spec
        )


def _like(leaf: Any, holder: fx.Node, interval: Mapping[str, Interval], rng: np.random.Generator) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.is_floating_point() and bool(leaf.isfinite().all()):  # else it is a mask
        low, high = interval.get(holder.name) or _between(leaf)
        return torch.from_numpy(low + (high - low) * drawn(tuple(leaf.shape), rng, holder.name)).to(leaf)
    tables = [user.args[0] for user in holder.users if user.target is aten.embedding.default and user.args[1] is holder]
    rows = [int(table.meta["val"].shape[0]) for table in tables if isinstance(table, fx.Node)]
    return torch.from_numpy(rng.integers(0, min(rows), tuple(leaf.shape))).to(leaf) if rows else leaf


def _between(leaf: Tensor) -> Interval:
    """Return where the numbers of an example lie; one that says nothing, such as zeros, is taken for any."""
    low, high = (float(end) for end in leaf.aminmax()) if leaf.numel() else (0.0, 0.0)
    return (low, high) if low < high else (-1.0, 1.0)
