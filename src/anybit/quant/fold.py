"""Batch-norm folding: `γ (Wx + b - μ) / σ + β` is `W'x + b'` with `W' = W γ/σ`, `b' = β + (b - μ) γ/σ`."""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn

from anybit.errors import FoldError
from anybit.quant.capture import module_path
from anybit.quant.ops import (
    CONVOLUTIONS,
    TRANSPOSED_CONVOLUTIONS,
    WEIGHTED,
    attribute,
    groups_of,
    output_axis,
    set_attribute,
)


class BatchNorm(NamedTuple):
    """The constants of one batch norm in evaluation mode: `γ (x - μ) / sqrt(v + eps) + β`."""

    mean: Tensor
    var: Tensor
    gamma: Tensor
    beta: Tensor
    eps: float


def fold_batch_norm(weight: Tensor, bias: Tensor | None, norm: BatchNorm, *, axis: int = 0) -> tuple[Tensor, Tensor]:
    """Return weight and bias of the one layer that does what layer and batch norm did together.

    `axis` is the dimension of `weight` that runs over output channels.

    >>> one = torch.ones(1)
    >>> norm = BatchNorm(mean=one, var=4 * one, gamma=one, beta=3 * one, eps=0.0)
    >>> fold_batch_norm(torch.tensor([[8.0]]), None, norm)
    (tensor([[4.]]), tensor([2.5000]))
    """
    factor = norm.gamma / torch.sqrt(norm.var + norm.eps)
    if weight.shape[axis] != factor.numel():
        raise FoldError(
            f"a weight of shape {tuple(weight.shape)} has {weight.shape[axis]} output channels, "
            f"its batch norm has {factor.numel()}"
        )
    shape = [1] * weight.dim()
    shape[axis] = -1
    old = torch.zeros_like(norm.mean) if bias is None else bias
    return weight * factor.view(shape), norm.beta + (old - norm.mean) * factor


def read_batch_norm(module: fx.GraphModule, node: fx.Node) -> BatchNorm:
    """Return the constants of a captured batch-norm node; a missing scale is one, a missing shift zero."""
    path = module_path(node)
    _, gamma, beta, mean, var, _, eps = node.args
    assert isinstance(mean, fx.Node)
    assert isinstance(var, fx.Node)
    mean_, var_ = attribute(module, mean), attribute(module, var)
    gamma_ = attribute(module, gamma) if isinstance(gamma, fx.Node) else torch.ones_like(mean_)
    beta_ = attribute(module, beta) if isinstance(beta, fx.Node) else torch.zeros_like(mean_)
    norm = BatchNorm(mean_, var_, gamma_, beta_, float(eps))  # type: ignore[arg-type]
    broken = [
        f"{path}: {name} is not finite" for name, t in zip(norm._fields, norm[:4], strict=False)
        if not bool(torch.isfinite(t).all())
    ]  # fmt: skip
    if broken:
        raise FoldError("a batch norm with broken statistics cannot be folded", broken)
    return norm


@torch.no_grad()
def fold_graph(module: fx.GraphModule) -> dict[fx.Node, BatchNorm]:
    """Fold every batch norm that directly follows a layer of its own; return what is known of each output.

    The keys are the nodes that now carry a batch norm's output: the layer it was folded into, or the batch norm
    itself where something else is in front (a concatenation, or a layer whose weight is used elsewhere too).
    """
    known: dict[fx.Node, BatchNorm] = {}
    for node in list(module.graph.nodes):
        if node.target is not torch.ops.aten._native_batch_norm_legit_no_training.default:
            continue
        norm = read_batch_norm(module, node)
        outputs = [user for user in node.users if user.target is operator.getitem]
        result = outputs[0]
        layer = node.args[0]
        if isinstance(layer, fx.Node) and _can_fold(layer):
            _fold_into(module, layer, norm)
            result.replace_all_uses_with(layer)
            layer.meta["anybit_after"] = module_path(node)
            module.graph.erase_node(result)
            module.graph.erase_node(node)
            known[layer] = norm
        else:
            known[result] = norm
    module.graph.eliminate_dead_code()
    module.delete_all_unused_submodules()
    module.recompile()
    return known


def _can_fold(layer: fx.Node) -> bool:
    if layer.target not in WEIGHTED or len(layer.users) != 1:
        return False
    weight = layer.args[1]
    if not isinstance(weight, fx.Node) or weight.op != "get_attr" or len(weight.users) != 1:
        return False
    bias = layer.args[2] if len(layer.args) > 2 else None
    if layer.target in TRANSPOSED_CONVOLUTIONS and groups_of(layer) != 1:
        return False  # groups: the weight's axis 1 runs over the channels of one group only
    # A linear layer's batch norm runs over dimension 1, which is the feature dimension only for (batch, feature).
    return (bias is None or isinstance(bias, fx.Node)) and (
        layer.target in CONVOLUTIONS or layer.meta["val"].dim() == 2
    )


def _fold_into(module: fx.GraphModule, layer: fx.Node, norm: BatchNorm) -> None:
    weight = layer.args[1]
    bias = layer.args[2] if len(layer.args) > 2 else None
    assert isinstance(weight, fx.Node)
    old = attribute(module, bias) if isinstance(bias, fx.Node) else None
    try:
        new_weight, new_bias = fold_batch_norm(attribute(module, weight), old, norm, axis=output_axis(layer))
    except FoldError as error:
        raise FoldError(f"folding into {module_path(layer)}: {error}") from error
    name = str(weight.target)
    set_attribute(module, name, nn.Parameter(new_weight))
    bias_name = f"{name.rpartition('.')[0]}.bias".lstrip(".") if name.endswith("weight") else f"{name}_bias"
    set_attribute(module, bias_name, nn.Parameter(new_bias))
    with module.graph.inserting_before(layer):
        bias_node = module.graph.get_attr(bias_name)
    bias_node.meta["val"] = new_bias
    layer.args = (layer.args[0], weight, bias_node, *layer.args[3:])
