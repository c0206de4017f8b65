"""Fill the view from a graph that `torch.export` captured. Values are called as the graph's nodes are."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from anybit.graph import view
from anybit.graph.view import Array, Follow, Graph, Node, Norm, Shape

aten = torch.ops.aten

CONVOLUTIONS = {
    aten.conv1d.default, aten.conv2d.default, aten.conv3d.default,
    aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding,
}  # fmt: skip
TRANSPOSED = {aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input}
PRODUCTS: dict[object, tuple[int, int]] = {
    aten.matmul.default: (0, 1), aten.mm.default: (0, 1), aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2), aten.baddbmm.default: (1, 2),
}  # fmt: skip
"""Matrix products, with the positions of the two tensors they multiply."""
RECURRENT: dict[object, str] = {
    aten.lstm.input: "LSTM", aten.gru.input: "GRU", aten.rnn_tanh.input: "RNN", aten.rnn_relu.input: "RNN",
}  # fmt: skip
BATCH_NORM = aten._native_batch_norm_legit_no_training.default

RESHAPING = {
    aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
}  # fmt: skip
SAME = {aten.contiguous.default, aten.expand.default, aten.clone.default, aten.detach.default}
POOLING = {
    aten.max_pool1d.default: 1, aten.max_pool2d.default: 2, aten.max_pool3d.default: 3,
    aten.adaptive_max_pool1d.default: 1, aten.adaptive_max_pool2d.default: 2, aten.adaptive_max_pool3d.default: 3,
    aten.upsample_nearest1d.vec: 1, aten.upsample_nearest2d.vec: 2, aten.upsample_nearest3d.vec: 3,
}  # fmt: skip
"""Operators that choose among the entries of the last dimensions, with how many of them."""
AVERAGING = {
    aten.avg_pool1d.default: 1, aten.avg_pool2d.default: 2, aten.avg_pool3d.default: 3,
    aten.adaptive_avg_pool1d.default: 1, aten.adaptive_avg_pool2d.default: 2, aten.adaptive_avg_pool3d.default: 3,
    aten.upsample_linear1d.vec: 1, aten.upsample_bilinear2d.vec: 2,
}  # fmt: skip
MIXING = {
    aten.index_select.default, aten.repeat.default, aten.repeat_interleave.self_int, aten.roll.default,
    aten.flip.default, aten.pixel_shuffle.default, aten.pixel_unshuffle.default, aten.channel_shuffle.default,
}  # fmt: skip
"""Operators that hand on values and put them elsewhere, perhaps in another channel."""
SPLITTING = {aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int}
"""Operators that return several pieces of their input."""
PADDING = {aten.pad.default, aten.constant_pad_nd.default}

FUSED = {aten.relu.default, aten.relu6.default, aten.hardtanh.default, aten.clamp.default, aten.clamp_min.default}
"""Functions that an accelerator applies to a product's result before it is stored."""
HOMOGENEOUS = {aten.relu.default, aten.leaky_relu.default}
FUNCTIONS = FUSED | HOMOGENEOUS | {
    aten.elu.default, aten.gelu.default, aten.silu.default, aten.mish.default, aten.hardswish.default,
    aten.hardsigmoid.default, aten.sigmoid.default, aten.tanh.default, aten.softplus.default, aten.neg.default,
    aten.abs.default, aten.rsub.Scalar, aten.pow.Tensor_Scalar, aten.exp.default, aten.sqrt.default, aten.erf.default,
    aten.threshold.default, aten.log_sigmoid.default,
}  # fmt: skip
"""Functions of one value, so that the range of the output follows from that of the input."""
ARITHMETIC: dict[object, str] = {
    aten.add.Tensor: "add", aten.sub.Tensor: "sub", aten.mul.Tensor: "mul", aten.div.Tensor: "div",
}  # fmt: skip
SOFTMAX = {aten.softmax.int, aten._softmax.default}
STANDARD: dict[object, str] = {
    aten.layer_norm.default: "layer norm", aten.group_norm.default: "group norm",
    aten.instance_norm.default: "instance norm",
}  # fmt: skip
"""Normalizations by the mean and spread of the example itself."""
FRESH = {
    *CONVOLUTIONS, *TRANSPOSED, *PRODUCTS, *AVERAGING, *FUNCTIONS, *ARITHMETIC, aten.linear.default, aten.mean.dim,
    *STANDARD, *SOFTMAX,
}  # fmt: skip
"""Operators that return a tensor of their own, which nobody else holds."""


def read_torch(module: fx.GraphModule) -> Graph:
    """Return the view of a captured network."""
    graph = Graph()
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            graph.shapes[value_name(node)] = _shape(value)
            if value.is_floating_point() and node.op != "get_attr":
                graph.floating.add(value_name(node))
        if node.op == "get_attr" and isinstance(value, Tensor):
            graph.constants[str(node.target)] = to_numpy(attribute(module, str(node.target)))
        elif node.op == "placeholder":
            graph.inputs.append(node.name)
        elif node.op == "output":
            graph.outputs = [value_name(n) for n in node.all_input_nodes]
        elif node.op == "call_function" and not _hidden(node):
            graph.nodes.append(_read(module, node, graph))
    _name_sizes(module, graph)
    return graph


def _name_sizes(module: fx.GraphModule, graph: Graph) -> None:
    """Call free sizes what a person would: N for the batch, else the input and its dimension."""
    names: dict[str, str] = {}
    for node in [node for node in module.graph.nodes if node.op == "placeholder"]:
        value = node.meta.get("val")
        for d, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if not is_concrete_int(size):
                names.setdefault(str(size), "N" if d == 0 else f"{node.name}_{d}")

    def named(size: Any) -> Any:
        return re.sub(r"\bs\d+\b", lambda m: names.get(m[0], m[0]), size) if isinstance(size, str) else size

    graph.shapes = {name: tuple(named(size) for size in shape) for name, shape in graph.shapes.items()}


def _hidden(node: fx.Node) -> bool:
    """Tell whether only what is taken out of a result matters, or only sizes are computed."""
    several = {*SPLITTING, BATCH_NORM, *POOLING, aten.max_pool2d_with_indices.default}
    value = node.meta.get("val")
    return isinstance(value, int | torch.SymInt) or (node.target in several and not isinstance(value, Tensor))


def attribute(module: fx.GraphModule, target: str) -> Tensor:
    """Return the parameter or buffer at a dotted path."""
    owner, _, name = target.rpartition(".")
    value = getattr(module.get_submodule(owner), name)
    assert isinstance(value, Tensor)
    return value


def to_numpy(x: Tensor) -> Array:
    """Return a tensor's numbers: as they are in float32 and float64, shorter formats widened to float32."""
    x = x.detach()
    if x.is_floating_point() and x.dtype not in (torch.float32, torch.float64):
        x = x.float()
    return np.asarray(x.cpu().numpy())


def module_path(node: fx.Node) -> str:
    """Return the path of the user's module that a node came from, or the node's own name."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return paths[-1] if paths and paths[-1] else str(node.name)


def value_name(node: fx.Node) -> str:
    """Return what the value of a captured node is called in the view."""
    return str(node.target) if node.op == "get_attr" else node.name


def _shape(value: Tensor) -> Shape:
    return tuple(int(size) if is_concrete_int(size) else str(size) for size in value.shape)


def _read(module: fx.GraphModule, node: fx.Node, graph: Graph) -> Node:
    """Return one operator as a node of the view."""
    target: Any = node.target
    path, name = module_path(node), str(target).partition(".")[2].partition(".")[0].lstrip("_") or str(target)
    inputs = [value_name(arg) for arg in node.args if isinstance(arg, fx.Node)]
    new = Node("other", [value_name(arg) for arg in node.all_input_nodes], node.name, path, node, name=name)
    if target in CONVOLUTIONS or target in TRANSPOSED or target is aten.linear.default:
        _read_layer(node, new)
    elif target in PRODUCTS:
        new.kind, new.inputs = "product", [value_name(node.args[i]) for i in PRODUCTS[target]]  # type: ignore[arg-type]
    elif target in RECURRENT:
        _read_recurrent(node, new)
    elif target is aten.embedding.default and inputs[0] in graph.constants:
        new.kind, new.inputs, new.weights = "table", inputs[1:2], inputs[:1]
    elif target is operator.getitem:
        _read_item(module, node, new)
    elif target is aten.cat.default:
        new.kind = "concat"
        new.axis = _dim(node.args[1] if len(node.args) > 1 else 0, _rank(node))
        parts: Any = node.args[0]
        new.inputs = [value_name(part) for part in parts]
    elif target in ARITHMETIC and node.kwargs.get("alpha", 1) == 1:
        _read_arithmetic(node, new)
    elif target in FUNCTIONS and len(inputs) == 1:
        new.kind, new.function = "function", _function(node)
        new.fused, new.homogeneous = target in FUSED, target in HOMOGENEOUS
        new.bounds = view.saturation(new.function)
    elif target in STANDARD:
        _read_standard(module, node, new)
    elif target is aten.prelu.default:
        new.kind = "slopes"
    elif (follow := _follow(node)) is not None:
        average = target in AVERAGING or target is aten.mean.dim
        new.kind, new.follow, new.inputs = "average" if average else "pass", follow, inputs[:1]
    elif target in SOFTMAX:
        new.bounds = (0.0, 1.0)
    return new


def _read_layer(node: fx.Node, new: Node) -> None:
    new.kind = "layer"
    new.inputs = [value_name(arg) for arg in node.args[:3] if isinstance(arg, fx.Node)]
    new.convolution = node.target is not aten.linear.default
    new.transposed = node.target in TRANSPOSED
    new.axis = 1 if new.transposed else 0
    if new.convolution and len(node.args) > 6:
        new.groups = int(node.args[6])  # type: ignore[arg-type]
    if new.transposed:
        new.stride = math.prod(node.args[3] if len(node.args) > 3 else [1])  # type: ignore[arg-type]


def _read_recurrent(node: fx.Node, new: Node) -> None:
    new.kind, new.name = "recurrent", RECURRENT[node.target]
    parameters: Any = node.args[2]
    new.inputs = [value_name(node.args[0])]  # type: ignore[arg-type]
    new.weights = [value_name(p) for p in parameters if p.meta["val"].dim() == 2]
    new.depth = int(node.args[4])  # type: ignore[arg-type]


def _read_item(module: fx.GraphModule, node: fx.Node, new: Node) -> None:
    """Read one of several results: a piece of a tensor, a normalized tensor, the output of a recurrent cell."""
    source, index = node.args
    assert isinstance(source, fx.Node)
    target: Any = source.target
    if target in SPLITTING and isinstance(source.args[0], fx.Node):
        at = 1 if target is aten.unbind.int else 2
        place = _dim(source.args[at] if len(source.args) > at else 0, _rank(source.args[0]))
        gone = view.reduced([place], keep=False) if target is aten.unbind.int else view.except_for([place])
        new.kind, new.inputs, new.follow = "pass", [value_name(source.args[0])], gone
    elif target is BATCH_NORM and index == 0:
        new.kind, new.inputs = "norm", [value_name(source.args[0])]  # type: ignore[arg-type]
        new.path, new.norm = module_path(source), _batch_norm(module, source)
    elif target in RECURRENT and index == 0:
        new.bounds = (-1.0, 1.0) if target is not aten.rnn_relu.input else None
        new.name = RECURRENT[target]
    elif target in POOLING or target is aten.max_pool2d_with_indices.default:
        new.follow = _spatial(POOLING.get(target, 2), _rank(node)) if index == 0 else None
        new.kind, new.inputs = ("pass" if index == 0 else "other"), [value_name(source.args[0])]  # type: ignore[arg-type]


def _constant(module: fx.GraphModule, arg: Any, size: int, filling: float = 0.0) -> Array:
    """Return the numbers of a parameter or buffer, or those that stand for one that is not there."""
    if isinstance(arg, fx.Node) and arg.op == "get_attr":
        return to_numpy(attribute(module, str(arg.target)))
    return np.full(size, filling, np.float32)


def _batch_norm(module: fx.GraphModule, node: fx.Node) -> Norm:
    _, gamma, beta, mean, var, _, eps = node.args
    size = mean.meta["val"].numel()  # type: ignore[union-attr]
    scale, shift = _constant(module, gamma, size, 1.0), _constant(module, beta, size)
    return Norm(scale, shift, _constant(module, mean, size), _constant(module, var, size), float(eps))  # type: ignore[arg-type]


def _read_standard(module: fx.GraphModule, node: fx.Node, new: Node) -> None:
    """Read a group norm, an instance norm, or a layer norm over one dimension: over several, channels are lost."""
    last, instance = node.target is aten.layer_norm.default, node.target is aten.instance_norm.default
    shape, rank = node.meta["val"].shape, _rank(node)
    axis = rank - 1 if last else 1
    over: Any = node.args[1]
    if (last and len(over) != 1) or not is_concrete_int(shape[axis]) or (instance and not node.args[5]):
        return
    given = zip((*(node.args[1:3] if instance else node.args[2:4]), None, None), (1.0, 0.0), strict=False)
    gamma, beta = (_constant(module, arg, int(shape[axis]), filling) for arg, filling in given)
    new.kind, new.name, new.norm = "standard", STANDARD[node.target], Norm(gamma, beta, axis=axis)
    new.inputs = new.inputs[:1]


def _read_arithmetic(node: fx.Node, new: Node) -> None:
    """Read a sum or product: of two tensors, or with a number, which makes it a function of one value."""
    kind, (first, second) = ARITHMETIC[node.target], node.args[:2]
    if isinstance(first, fx.Node) and isinstance(second, fx.Node):
        new.kind, new.inputs = kind, [value_name(first), value_name(second)]
    elif isinstance(first, fx.Node) and isinstance(second, int | float):
        new.kind, new.function = "function", _function(node)


def _function(node: fx.Node) -> Callable[[Array], Array]:
    target: Any = node.target
    rest, named = node.args[1:], dict(node.kwargs)
    return lambda x: target(torch.from_numpy(np.ascontiguousarray(x)), *rest, **named).numpy()


def _rank(node: Any) -> int:
    return len(node.meta["val"].shape)


def _dim(d: Any, rank: int) -> int:
    return int(d) % max(rank, 1)


def _spatial(count: int, rank: int) -> Follow:
    return view.except_for(range(rank - count, rank))


def _follow(node: fx.Node) -> Follow | None:
    """Return where an operator that hands values on, or averages them, puts each dimension."""
    target: Any = node.target
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not isinstance(source.meta.get("val"), Tensor):
        return None
    if not isinstance(node.meta.get("val"), Tensor):
        return None
    rank = _rank(source)
    if target in SAME:
        return view.stays if _rank(node) == rank else view.shifted(_rank(node) - rank)
    if target in RESHAPING:
        return view.reshaped(_shape(source.meta["val"]), _shape(node.meta["val"]))
    if target in POOLING or target in AVERAGING:
        return _spatial((POOLING | AVERAGING)[target], rank)
    if target in MIXING:
        return lambda d: None
    if target in PADDING:
        return _padding(node, rank)
    found = _TURNS.get(target)
    return None if found is None else found(node.args[1:], rank)


def _swapped(args: Any, rank: int) -> Follow:
    order = list(range(rank))
    a, b = (_dim(d, rank) for d in args[:2])
    order[a], order[b] = order[b], order[a]
    return view.permuted(order)


def _moved(args: Any, rank: int) -> Follow:
    order = [d for d in range(rank) if d != _dim(args[0], rank)]
    order.insert(_dim(args[1], rank), _dim(args[0], rank))
    return view.permuted(order)


def _averaged(args: Any, rank: int) -> Follow | None:
    if not args or not args[0]:  # all of them
        return lambda d: None
    return view.reduced([_dim(d, rank) for d in args[0]], keep=bool(len(args) > 1 and args[1]))


_TURNS: dict[object, Callable[[Any, int], Follow | None]] = {
    aten.permute.default: lambda args, rank: view.permuted(_dim(d, rank) for d in args[0]),
    aten.transpose.int: _swapped,
    aten.t.default: lambda args, rank: view.permuted(range(rank)[::-1]),
    aten.movedim.int: _moved,
    aten.slice.Tensor: lambda args, rank: view.except_for([_dim(args[0] if args else 0, rank)]),
    aten.select.int: lambda args, rank: view.reduced([_dim(args[0], rank)], keep=False),
    aten.mean.dim: _averaged,
    aten.amax.default: _averaged,
    aten.amin.default: _averaged,
}


def _padding(node: fx.Node, rank: int) -> Follow | None:
    """Follow padding that adds nothing that is not on every grid: zeros, or copies of what is there."""
    widths: Any = node.args[1]
    if node.target is aten.constant_pad_nd.default:
        zeros = len(node.args) < 3 or node.args[2] == 0
    else:
        mode = node.args[2] if len(node.args) > 2 else "constant"
        value = node.args[3] if len(node.args) > 3 else None
        zeros = mode != "constant" or value is None or value == 0
    padded = [rank - 1 - i // 2 for i, width in enumerate(widths) if not isinstance(width, int) or width]
    return view.except_for(padded) if zeros else None
