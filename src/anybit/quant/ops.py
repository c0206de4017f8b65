"""What the captured operators are to quantization: which have weights, which only pass values along."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

aten = torch.ops.aten

FORWARD_CONVOLUTIONS = {aten.conv1d.default, aten.conv2d.default, aten.conv3d.default}
TRANSPOSED_CONVOLUTIONS = {
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
}
CONVOLUTIONS = FORWARD_CONVOLUTIONS | TRANSPOSED_CONVOLUTIONS
WEIGHTED = CONVOLUTIONS | {aten.linear.default}
"""Operators called as (input, weight, bias, ...): what an integer accelerator runs in integers."""

RESHAPING = {
    aten.view.default,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.permute.default,
    aten.transpose.int,
    aten.expand.default,
    aten.contiguous.default,
}
CHOOSING = {
    aten.max_pool1d.default,
    aten.max_pool2d.default,
    aten.max_pool3d.default,
    aten.adaptive_max_pool2d.default,
    aten.slice.Tensor,
    aten.select.int,
}
TRANSPARENT = RESHAPING | CHOOSING
"""Operators whose every output is one of their inputs: quantizing before or after them is the same."""

AVERAGING = {
    aten.avg_pool1d.default,
    aten.avg_pool2d.default,
    aten.avg_pool3d.default,
    aten.adaptive_avg_pool1d.default,
    aten.adaptive_avg_pool2d.default,
    aten.adaptive_avg_pool3d.default,
    aten.mean.dim,
}
ELEMENTWISE = {
    aten.relu.default,
    aten.relu6.default,
    aten.hardtanh.default,
    aten.clamp.default,
    aten.clamp_min.default,
    aten.leaky_relu.default,
    aten.elu.default,
    aten.gelu.default,
    aten.silu.default,
    aten.mish.default,
    aten.hardswish.default,
    aten.hardsigmoid.default,
    aten.sigmoid.default,
    aten.tanh.default,
    aten.softplus.default,
}
"""Functions of one value, so that the range of the output follows from that of the input."""


SCALAR_ARITHMETIC = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}
"""With a plain number as second operand, these are functions of one value too."""


def output_axis(layer: fx.Node) -> int:
    """Return the dimension of a layer's weight that runs over its output channels."""
    return 1 if layer.target in TRANSPOSED_CONVOLUTIONS else 0


def attribute(module: fx.GraphModule, node: fx.Node) -> Tensor:
    """Return the parameter or buffer that a `get_attr` node names."""
    owner, _, name = str(node.target).rpartition(".")
    value = getattr(module.get_submodule(owner), name)
    assert isinstance(value, Tensor)
    return value


def set_attribute(module: fx.GraphModule, target: str, value: nn.Parameter) -> None:
    """Put a parameter at a dotted path, in place of whatever was there."""
    owner, _, name = target.rpartition(".")
    setattr(module.get_submodule(owner), name, value)
