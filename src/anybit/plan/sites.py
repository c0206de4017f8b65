"""Where a network is quantized: weights and tables, the values that feed a product, what convolutions hand to sums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from anybit.graph.view import Graph, Node, by_output, origins

PRODUCTS = ("layer", "product", "recurrent", "inside")
LINEAR = ("layer", "add", "sub", "pass", "average", "concat", "norm")


@dataclass
class Sites:
    """The constants and values to quantize, each with the products that it feeds."""

    weights: dict[str, list[Node]] = field(default_factory=dict)
    axes: dict[str, set[int | None]] = field(default_factory=dict)
    """For each weight the dimensions that run over output channels, one for each of its uses."""
    activations: dict[str, list[Node]] = field(default_factory=dict)
    accumulators: set[str] = field(default_factory=set)
    joined: list[list[str]] = field(default_factory=list)
    """Activations that meet in a concatenation and therefore share one grid."""

    def axis(self, weight: str) -> int | None:
        """Return the dimension that may get scales of its own, where all uses of a weight agree on one."""
        axes = self.axes[weight]
        return next(iter(axes)) if len(axes) == 1 else None


def find_sites(graph: Graph) -> Sites:
    """Return where a network is quantized.

    An activation is taken at the place where its values arise, before pooling by maximum, reshaping and
    concatenation, so that a value that feeds several layers is quantized once.
    """
    sites, makers, coming = Sites(), graph.makers(), _coming_in(graph)
    for node in graph.nodes:
        # What is always looked up at the same places, such as positions, is a constant that happens to lie in a table.
        if node.kind not in PRODUCTS and not (node.kind == "table" and node.inputs[0] in coming):
            continue
        for operand, axis in _operands(graph, node):
            found = list(dict.fromkeys(origins(graph, operand, axis, makers)))
            for origin, own in found:
                if origin in graph.constants:
                    if graph.constants[origin].dtype.kind == "f" and graph.constants[origin].size:
                        sites.weights.setdefault(origin, []).append(node)
                        sites.axes.setdefault(origin, set()).add(own)
                elif origin in graph.floating:
                    sites.activations.setdefault(origin, []).append(node)
            group = list(dict.fromkeys(origin for origin, _ in found if origin in sites.activations))
            if len(group) > 1:
                sites.joined.append(group)
    sites.joined = _merged(sites.joined)
    sites.accumulators = set(_accumulators(graph, sites, graph.users()))
    return sites


def _coming_in(graph: Graph) -> set[str]:
    """Return the values that depend on what comes into a network, not only on its size."""
    found = set(graph.inputs)
    for node in graph.nodes:
        if node.name not in ("Shape", "Size") and any(name in found for name in node.inputs):
            found.add(node.output)
    return found


def _operands(graph: Graph, node: Node) -> Iterator[tuple[str, int | None]]:
    """Yield what a product multiplies, each with the dimension that survives as output channels, were it a weight."""
    if node.kind in ("recurrent", "inside", "table"):
        yield from ((value, None) for value in node.inputs[:1] if node.kind == "recurrent")
        yield from ((weight, node.axis) for weight in node.weights)
        return
    for position, operand in enumerate(node.inputs[:2]):
        if node.kind == "layer":
            yield operand, node.axis if position else None
        else:
            # A batch of matrices has no one dimension for its output channels.
            yield operand, None if graph.rank(operand) != 2 else position


def sensitive(graph: Graph) -> dict[Node, str]:
    """Return the products that few bits hurt most for what they cost, each with the reason.

    They have few weights or few multiplications, and nothing after them averages their errors out.
    """
    before = _without_others(graph.nodes, lambda node: [*node.inputs], lambda node: [node.output])
    behind = _without_others(graph.nodes[::-1], lambda node: [node.output], lambda node: [*node.inputs])
    depthwise = [n for n in graph.nodes if n.kind == "layer" and n.groups > 1 and _one_input(graph, n)]
    found = dict.fromkeys(depthwise, "depthwise layer") | dict.fromkeys(_gates(graph), "squeeze-and-excite layer")
    found |= dict.fromkeys(behind, "last layer") | dict.fromkeys(before, "first layer")
    return found | dict.fromkeys(before & behind, "first and last layer")


def inner_weights(cell: Node, reason: str) -> list[str]:
    """Return the weights of a recurrent cell of several layers that are not in the one which a reason is about.

    >>> cell = Node("recurrent", [], "y", "y", weights=["a", "b", "c", "d"], depth=2)
    >>> inner_weights(cell, "first layer"), inner_weights(cell, "first and last layer")
    (['c', 'd'], [])
    """
    each = len(cell.weights) // cell.depth
    return cell.weights[each * ("first" in reason) : len(cell.weights) - each * ("last" in reason)]


def signals(graph: Graph) -> set[str]:
    """Return what is still the signal itself in networks for sound and other measurements.

    A picture comes in 8 bits. Samples of sound have 16, and so have their filtered parts and their spectrum: what
    products with constants make of them, and functions of that, up to the first product after such a function.
    """
    bent = {name: False for name in graph.inputs if name in graph.floating and 0 < graph.rank(name) < 4}
    for node in graph.nodes:
        before = [bent[name] for name in node.inputs if name in bent]
        # A window or a rotation: by numbers that do not come from the signal.
        scaled = len(before) == 1 and (node.kind == "mul" or (node.kind == "div" and node.inputs[0] in bent))
        if before and not (node.kind in PRODUCTS and any(before)):
            bent[node.output] = any(before) or not (scaled or node.kind in LINEAR)
    return set(bent)


def _one_input(graph: Graph, layer: Node) -> bool:
    """Tell whether every output of a grouped layer sees one input channel."""
    weight = graph.constants.get(layer.inputs[1])
    return weight is not None and by_output(weight, layer.axis, layer.groups).shape[1] == 1


def _gates(graph: Graph) -> set[Node]:
    """Return the layers that make one factor per channel out of an image's means, which the image is multiplied by."""
    path: dict[str, frozenset[Node]] = {}  # values that come from means, with the layers on the way
    found: set[Node] = set()
    for node in graph.nodes:
        means = [path[name] for name in node.inputs if name in path]
        if node.kind == "average" and _collapses(graph, node):
            path[node.output] = frozenset()
        elif node.kind == "mul" and means and any(n not in path and n not in graph.constants for n in node.inputs):
            found |= means[0]
        elif means and node.kind in ("layer", "function", "pass", "add", "mul", "div", "norm"):
            path[node.output] = frozenset().union(*means, [node] if node.kind == "layer" else [])
    return found


def _collapses(graph: Graph, node: Node) -> bool:
    """Tell whether an average leaves one number per channel."""
    before, after = graph.rank(node.inputs[0]), graph.shapes.get(node.output, ())
    return before > 2 and (len(after) == 2 or (len(after) == before and all(size == 1 for size in after[2:])))


def _without_others(nodes: Iterable[Node], reads, writes) -> set[Node]:  # type: ignore[no-untyped-def]
    """Return the products that no other one comes before, going through the nodes in this order."""
    marked: set[str] = set()
    found = set()
    for node in nodes:
        product = node.kind in PRODUCTS
        after = any(name in marked for name in reads(node))
        if product and not after:
            found.add(node)
        if product or after:
            marked.update(writes(node))
    return found


def _merged(groups: list[list[str]]) -> list[list[str]]:
    """Join the groups that share a value."""
    merged: list[dict[str, None]] = []
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


def _accumulators(graph: Graph, sites: Sites, users: dict[str, list[Node]]) -> Iterator[str]:
    """Yield what convolutions leave in memory without feeding a product: the operands of sums and averages.

    An accelerator stores these as integers too, wide enough not to matter.
    """
    for layer in graph.nodes:
        if layer.kind != "layer" or not layer.convolution or layer.transposed:
            continue
        tail = layer.output
        while tail not in sites.activations and tail not in graph.outputs and len(users.get(tail, [])) == 1:
            (user,) = users[tail]
            if not (user.kind == "function" and user.fused):
                break
            tail = user.output
        if tail not in sites.activations and not _leaves(graph, tail, users):
            yield tail


def _leaves(graph: Graph, value: str, users: dict[str, list[Node]]) -> bool:
    """Tell whether a value goes straight out of the network, reshaped at most."""
    return all(user.kind == "pass" and _leaves(graph, user.output, users) for user in users.get(value, []))
