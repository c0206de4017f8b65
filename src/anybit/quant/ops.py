"""What the captured operators are to quantization: which have weights, which only pass values along."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx, nn

aten = torch.ops.aten

FORWARD_CONVOLUTIONS = {
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.conv1d.padding,
    aten.conv2d.padding,
    aten.conv3d.padding,
}
TRANSPOSED_CONVOLUTIONS = {
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
}
CONVOLUTIONS = FORWARD_CONVOLUTIONS | TRANSPOSED_CONVOLUTIONS
WEIGHTED = CONVOLUTIONS | {aten.linear.default}
"""Operators called as (input, weight, bias, ...)."""

OPERANDS: dict[object, tuple[int, int]] = {
    **dict.fromkeys(WEIGHTED, (0, 1)),
    aten.matmul.default: (0, 1),
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.baddbmm.default: (1, 2),
}
"""The products: what an integer accelerator runs in integers, with the positions of the two tensors it multiplies."""

RESHAPING = {
    aten.view.default,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.movedim.int,
    aten.expand.default,
    aten.contiguous.default,
}
SPLITTING = {aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int}
"""Operators that return several pieces of their input."""

CHOOSING = {
    aten.max_pool1d.default,
    aten.max_pool2d.default,
    aten.max_pool3d.default,
    aten.adaptive_max_pool2d.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.index_select.default,
    aten.repeat.default,
    aten.repeat_interleave.self_int,
    aten.roll.default,
    aten.flip.default,
    aten.pixel_shuffle.default,
    aten.pixel_unshuffle.default,
    aten.channel_shuffle.default,
    aten.upsample_nearest1d.vec,
    aten.upsample_nearest2d.vec,
    aten.upsample_nearest3d.vec,
}
TRANSPARENT = RESHAPING | CHOOSING
"""Operators whose every output is one of their inputs: quantizing before or after them is the same."""

PADDING = {aten.pad.default, aten.constant_pad_nd.default}

AVERAGING = {
    aten.avg_pool1d.default,
    aten.avg_pool2d.default,
    aten.avg_pool3d.default,
    aten.adaptive_avg_pool1d.default,
    aten.adaptive_avg_pool2d.default,
    aten.adaptive_avg_pool3d.default,
    aten.mean.dim,
    aten.upsample_linear1d.vec,
    aten.upsample_bilinear2d.vec,
}
FUSED = {aten.relu.default, aten.relu6.default, aten.hardtanh.default, aten.clamp.default, aten.clamp_min.default}
"""Functions that an accelerator applies to a product's result before it is stored."""

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
    aten.neg.default,
    aten.abs.default,
    aten.rsub.Scalar,
    aten.pow.Tensor_Scalar,
}
"""Functions of one value, so that the range of the output follows from that of the input."""


SCALAR_ARITHMETIC = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}
"""With a plain number as second operand, these are functions of one value too."""


BOUNDED: dict[object, tuple[float, float]] = {
    aten.sigmoid.default: (0.0, 1.0),
    aten.hardsigmoid.default: (0.0, 1.0),
    aten.softmax.int: (0.0, 1.0),
    aten._softmax.default: (0.0, 1.0),
    aten.tanh.default: (-1.0, 1.0),
    aten.relu6.default: (0.0, 6.0),
}
"""Functions whose output stays inside an interval whatever comes in."""


FRESH = set(OPERANDS) | AVERAGING | ELEMENTWISE | SCALAR_ARITHMETIC
"""Operators that return a tensor of their own, which nobody else holds."""


def passed_on(node: fx.Node) -> fx.Node | None:
    """Return the tensor whose values a node passes on unchanged, or `None` where it makes new ones."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if node.target is operator.getitem:
        return source.args[0] if source.target in SPLITTING and isinstance(source.args[0], fx.Node) else None
    if node.target in PADDING:
        return source if _pads_with_zero(node) else None
    return source if node.target in TRANSPARENT else None


def _pads_with_zero(node: fx.Node) -> bool:
    """Tell whether padding adds nothing that is not on every grid: zeros, or copies of what is there."""
    if node.target is aten.constant_pad_nd.default:
        return bool(len(node.args) < 3 or node.args[2] == 0)
    mode = node.args[2] if len(node.args) > 2 else "constant"
    value = node.args[3] if len(node.args) > 3 else None
    return bool(mode != "constant" or value is None or value == 0)


def output_axis(layer: fx.Node) -> int:
    """Return the dimension of a layer's weight that runs over its output channels."""
    return 1 if layer.target in TRANSPOSED_CONVOLUTIONS else 0


def groups_of(layer: fx.Node) -> int:
    """Return the number of groups of a convolution; one for any other product."""
    groups = layer.args[6] if layer.target in CONVOLUTIONS and len(layer.args) > 6 else 1
    assert isinstance(groups, int)
    return groups


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


def delete_attribute(module: fx.GraphModule, target: str) -> None:
    """Take away the parameter or buffer at a dotted path."""
    owner, _, name = target.rpartition(".")
    delattr(module.get_submodule(owner), name)
