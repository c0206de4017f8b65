"""Cross-layer equalization, after Nagel et al., "Data-Free Quantization" (2019).

A ReLU commutes with a positive factor, so channel c of a layer can be divided by s and the weights that read it in
the next layer multiplied by s: the network computes the same. With `s = sqrt(r1 / r2)`, for the largest weights r1
and r2 on either side, both become `sqrt(r1 r2)`, and a grid for a whole tensor no longer wastes its codes on the
few channels that are large.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from anybit.quant.fold import BatchNorm
from anybit.quant.ops import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS, WEIGHTED, attribute, set_attribute

aten = torch.ops.aten

ELEMENTWISE = {aten.relu.default, aten.leaky_relu.default, aten.contiguous.default}
POOLING = {
    aten.max_pool1d.default: 1,
    aten.max_pool2d.default: 2,
    aten.max_pool3d.default: 3,
    aten.avg_pool1d.default: 1,
    aten.avg_pool2d.default: 2,
    aten.avg_pool3d.default: 3,
    aten.adaptive_avg_pool1d.default: 1,
    aten.adaptive_avg_pool2d.default: 2,
    aten.adaptive_avg_pool3d.default: 3,
    aten.adaptive_max_pool1d.default: 1,
    aten.adaptive_max_pool2d.default: 2,
    aten.adaptive_max_pool3d.default: 3,
}
"""Each with the number of dimensions that it pools over, the last ones."""
REDUCING = {aten.mean.dim, aten.amax.default}
RESHAPING = {
    aten.view.default,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}

ROUNDS = 200
"""In a chain each pair disturbs its neighbours; they settle long before this many rounds."""
SETTLED = 1e-6
"""Factors this close to one change nothing."""
UNSEEN = 2.0**-17
"""A channel below this part of its tensor's largest weight is zero on every grid up to 16 bits: as good as dead."""


@dataclass(frozen=True)
class Side:
    """How the channels between two layers lie in the weight of one of them."""

    weight: str
    axis: int
    groups: int
    repeat: int = 1
    """Entries in a row that belong to one channel: the pixels that a flattened image had."""

    def largest(self, sizes: Tensor) -> Tensor:
        """Return the largest entry per channel of a matrix with the weight's first two dimensions."""
        if self.axis == 0:
            return sizes.amax(1)
        grouped = sizes.view(self.groups, -1, sizes.shape[1]).amax(1)
        return grouped.reshape(-1, self.repeat).amax(1)

    def spread(self, factors: Tensor, rows: int) -> Tensor:
        """Return one factor per channel as a matrix to multiply the weight's first two dimensions by."""
        if self.axis == 0:
            return factors[:, None]
        grouped = factors.repeat_interleave(self.repeat).view(self.groups, 1, -1)
        return grouped.expand(-1, rows // self.groups, -1).reshape(rows, -1)


@dataclass(frozen=True)
class Pair:
    """Two layers in a row, and how the channels between them lie in either weight."""

    layer: fx.Node
    written: Side
    read: Side


@torch.no_grad()
def equalize(module: fx.GraphModule, known: dict[fx.Node, BatchNorm]) -> list[tuple[str, str]]:
    """Equalize every pair of layers with only operators between them that commute with a positive factor.

    Parameters are replaced, never written into. Batch-norm constants in `known` follow the channels they describe.
    Layers whose parameters are used elsewhere too are left alone, and channels that are (nearly) zero keep their scale.

    Returns:
        The names of the two weights of each pair.
    """
    pairs = find_pairs(module)
    weights = {side.weight: _parameter(module, side.weight) for pair in pairs for side in (pair.written, pair.read)}
    factors = balance({name: _sizes(weight) for name, weight in weights.items()}, pairs)
    for name, weight in weights.items():
        _replace(module, name, weight.double() * _total(name, weight, pairs, factors))
    for pair, factor in zip(pairs, factors, strict=True):
        bias = _argument(pair.layer, 2)
        if bias is not None:
            _replace(module, str(bias.target), attribute(module, bias).double() / factor)
        if pair.layer in known:
            norm = known[pair.layer]
            gamma, beta = ((t.double() / factor).to(t.dtype) for t in (norm.gamma, norm.beta))
            known[pair.layer] = norm._replace(gamma=gamma, beta=beta)
    return [(pair.written.weight, pair.read.weight) for pair in pairs]


def balance(sizes: dict[str, Tensor], pairs: list[Pair]) -> list[Tensor]:
    """Return the factor of each pair's channels that makes both sides equally large, everywhere at once.

    One channel, 8 on one side and 2 on the other; halving the first makes both 4:

    >>> pair = Pair(fx.Graph().placeholder("x"), Side("a", 0, 1), Side("b", 1, 1))
    >>> balance({"a": torch.tensor([[8.0]]), "b": torch.tensor([[2.0]])}, [pair])
    [tensor([2.])]
    """
    sizes = dict(sizes)
    ends = [(p.written.largest(sizes[p.written.weight]), p.read.largest(sizes[p.read.weight])) for p in pairs]
    alive = [_alive(one) & _alive(two) for one, two in ends]
    totals = [torch.ones_like(one) for one, _ in ends]
    for _ in range(ROUNDS):
        change = 0.0
        for i, pair in enumerate(pairs):
            one, two = sizes[pair.written.weight], sizes[pair.read.weight]
            factor = torch.sqrt(pair.written.largest(one) / pair.read.largest(two))
            factor = torch.where(alive[i], factor, torch.ones_like(factor))
            sizes[pair.written.weight] = one / pair.written.spread(factor, len(one))
            sizes[pair.read.weight] = two * pair.read.spread(factor, len(two))
            totals[i] = totals[i] * factor
            change = max(change, float(factor.log().abs().max()))
        if change < SETTLED:
            break
    return totals


def find_pairs(module: fx.GraphModule) -> list[Pair]:
    """Return the pairs of layers that can trade a factor per channel, in the order of the network."""
    uses = Counter[int]()
    for node in module.graph.nodes:
        if node.op == "get_attr" and isinstance(node.meta.get("val"), Tensor):
            uses[id(attribute(module, node))] += len(node.users)

    def own(node: fx.Node | None) -> bool:
        """Tell whether a parameter has one reader, under whatever name."""
        return node is not None and node.op == "get_attr" and uses[id(attribute(module, node))] == 1

    pairs = []
    for layer in module.graph.nodes:
        if layer.target not in WEIGHTED or (found := _reader(layer)) is None:
            continue
        reader, repeat = found
        bias = _argument(layer, 2)
        if own(_argument(layer, 1)) and own(_argument(reader, 1)) and (bias is None or own(bias)):
            pairs.append(Pair(layer, _side(layer, output=True), _side(reader, output=False, repeat=repeat)))
    return pairs


def _reader(layer: fx.Node) -> tuple[fx.Node, int] | None:
    """Follow a layer's output to the one layer that reads it; also return its features per channel."""
    dim, repeat = _channel_dimension(layer, layer), 1
    node = layer
    while dim is not None and len(node.users) == 1:
        (user,) = node.users
        if user.target in WEIGHTED:
            fits = user.args[0] is node and _channel_dimension(user, node) == dim
            return (user, repeat) if fits else None
        if user.target not in ELEMENTWISE:
            if repeat != 1:
                return None
            dim, repeat = _follow(node, user, dim)
        node = user
    return None


def _follow(node: fx.Node, user: fx.Node, dim: int) -> tuple[int | None, int]:
    """Return where the channels of `node` are in `user`, or `None`, and how many entries each takes in a row."""
    target: Any = user.target
    if target is operator.getitem:  # pooling that also returns where the maximum was
        return dim, 1
    before = node.meta["val"].shape
    if target in POOLING:
        return (dim if dim == 1 and len(before) == POOLING[target] + 2 else None), 1
    if target in REDUCING:
        return _reduced(user, dim, len(before)), 1
    if target is aten.pad.default:
        return (dim if _pads_with_zeros(user, dim, len(before)) else None), 1
    if target in RESHAPING and dim == 1:
        return _reshaped(before, user.meta["val"].shape)
    return None, 1


def _reduced(node: fx.Node, dim: int, rank: int) -> int | None:
    dims = node.args[1] if len(node.args) > 1 else None
    if not isinstance(dims, list | tuple) or not dims or node.kwargs:
        return None
    gone = {int(d) % rank for d in dims}
    keeps = len(node.args) > 2 and bool(node.args[2])
    if dim in gone:
        return None
    return dim if keeps else dim - sum(d < dim for d in gone)


def _pads_with_zeros(node: fx.Node, dim: int, rank: int) -> bool:
    """Tell whether padding adds zeros, or copies of what is there, and no channels."""
    widths = node.args[1]
    assert isinstance(widths, list | tuple)
    mode = node.args[2] if len(node.args) > 2 else "constant"
    value = node.args[3] if len(node.args) > 3 else None
    across = 2 * (rank - 1 - dim)  # from the last dimension to the first, two widths each
    return not node.kwargs and not any(widths[across : across + 2]) and (mode != "constant" or not value)


def _reshaped(before: torch.Size, after: torch.Size) -> tuple[int | None, int]:
    if len(after) < 2 or before[0] != after[0]:
        return None, 1
    if before[1] == after[1]:
        return 1, 1
    return (1, math.prod(before[2:])) if len(after) == 2 else (None, 1)


def _channel_dimension(layer: fx.Node, tensor: fx.Node) -> int | None:
    """Return the dimension of a layer's input or output that its weight knows as channels."""
    rank, weight = len(tensor.meta["val"].shape), _argument(layer, 1)
    if weight is None or layer.kwargs:
        return None
    if layer.target in CONVOLUTIONS:
        return 1 if rank == len(weight.meta["val"].shape) else None
    return rank - 1 if len(weight.meta["val"].shape) == 2 else None


def _side(layer: fx.Node, *, output: bool, repeat: int = 1) -> Side:
    groups = layer.args[6] if layer.target in CONVOLUTIONS and len(layer.args) > 6 else 1
    first = output != (layer.target in TRANSPOSED_CONVOLUTIONS)
    return Side(str(_argument(layer, 1).target), 0 if first else 1, int(groups), repeat)  # type: ignore


def _argument(layer: fx.Node, index: int) -> fx.Node | None:
    value = layer.args[index] if len(layer.args) > index else None
    return value if isinstance(value, fx.Node) else None


def _sizes(weight: Tensor) -> Tensor:
    """Return the largest magnitude of each kernel: a factor per channel acts on it as on the kernel."""
    return weight.detach().double().abs().flatten(2).amax(2) if weight.dim() > 2 else weight.detach().double().abs()


def _alive(sizes: Tensor) -> Tensor:
    return sizes > UNSEEN * sizes.max()


def _total(name: str, weight: Tensor, pairs: list[Pair], factors: list[Tensor]) -> Tensor:
    """Return all factors of a weight, one per kernel, shaped to broadcast."""
    total = torch.ones(weight.shape[:2], dtype=torch.float64, device=weight.device)
    for pair, factor in zip(pairs, factors, strict=True):
        if pair.written.weight == name:
            total = total / pair.written.spread(factor, len(weight))
        if pair.read.weight == name:
            total = total * pair.read.spread(factor, len(weight))
    return total.view(*weight.shape[:2], *[1] * (weight.dim() - 2))


def _parameter(module: fx.GraphModule, name: str) -> Tensor:
    owner, _, last = name.rpartition(".")
    value = getattr(module.get_submodule(owner), last)
    assert isinstance(value, Tensor)
    return value


def _replace(module: fx.GraphModule, name: str, value: Tensor) -> None:
    old = _parameter(module, name)
    set_attribute(module, name, nn.Parameter(value.to(old.dtype), old.requires_grad))
