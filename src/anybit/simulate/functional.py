"""Graphs as `torch.export` writes them, made functional by rewriting a few operators.

`ExportedProgram.run_decompositions` does that for every network by tracing it again, which takes two thirds of the time
of a capture. Most networks have nothing for it but batch norm, dropout and functions in place.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, fx

from anybit.graph.from_torch import BATCH_NORM, FRESH, MIXING, PADDING, POOLING, RESHAPING, SPLITTING, aten
from anybit.simulate.recurrent import OPERATORS

PLAIN: set[Any] = {
    *FRESH, *MIXING, *PADDING, *POOLING, *RESHAPING, *SPLITTING, *OPERATORS.values(),
    aten.cat.default, aten.stack.default, aten.transpose.int, aten.permute.default, aten.t.default, aten.slice.Tensor,
    aten.select.int, aten.expand.default, aten.embedding.default, aten.prelu.default, aten.amax.default,
    aten.argmax.default, aten.max.dim, aten.sum.dim_IntList, aten.selu.default, aten.log.default, aten.rsqrt.default,
    aten.log_softmax.int, aten.zeros.default, aten.arange.default, aten.gt.Scalar, aten.ge.Scalar,
    aten.logical_not.default, aten.where.self, aten.masked_fill.Scalar,
    aten.maximum.default, aten.minimum.default, aten.rms_norm.default, aten.sym_size.int,
    operator.getitem, operator.add, operator.mul, operator.floordiv,
}  # fmt: skip
"""Operators that stay as they are."""
ELSEWHERE: dict[Any, Any] = {
    aten.relu_.default: aten.relu.default, aten.relu6_.default: aten.relu6.default,
    aten.hardtanh_.default: aten.hardtanh.default, aten.leaky_relu_.default: aten.leaky_relu.default,
    aten.silu_.default: aten.silu.default, aten.hardswish_.default: aten.hardswish.default,
    aten.hardsigmoid_.default: aten.hardsigmoid.default, aten.sigmoid_.default: aten.sigmoid.default,
    aten.add_.Tensor: aten.add.Tensor, aten.mul_.Tensor: aten.mul.Tensor,
}  # fmt: skip
"""Operators that write into their first input, with those that write elsewhere."""
DROPOUT: set[Any] = {aten.dropout.default, aten.dropout_.default, aten.feature_dropout.default}


def functional(module: fx.GraphModule) -> bool:
    """Make a captured graph functional, and tell whether that went; if not, it is of no use any more."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and not _rewritten(module.graph, node) and node.target not in PLAIN:
            return False
        if node.op == "call_module" and node.target != "_guards_fn":
            return False
    return True


def _rewritten(graph: fx.Graph, node: fx.Node) -> bool:
    """Put what is the same in evaluation, and functional, in place of an operator, if there is such a thing."""
    target, args = node.target, node.args
    if (target in DROPOUT and not args[2]) or target is aten.contiguous.default:
        new: Any = args[0]
    elif target is aten.batch_norm.default and not args[5]:
        x, gamma, beta, mean, var, _, momentum, eps, *_ = args
        source = _before(graph, node, BATCH_NORM, (x, gamma, beta, mean, var, momentum, eps))
        source.meta = {**node.meta, "val": (node.meta["val"],)}
        new, *_ = [_before(graph, node, operator.getitem, (source, i)) for i in range(3)]  # as tracing again names them
    elif target in ELSEWHERE and _nobody_elses(node):
        new = _before(graph, node, ELSEWHERE[target], args, node.kwargs)
    else:
        return False
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return True


def _before(graph: fx.Graph, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> fx.Node:
    name = getattr(target, "overloadpacket", target).__name__
    with graph.inserting_before(node):
        new = graph.create_node("call_function", target, args, kwargs, name=name)
    new.meta = dict(node.meta)
    return new


def _nobody_elses(node: fx.Node) -> bool:
    """Tell whether an operator writes into a tensor that is used nowhere else and is no part of another one."""
    into: Any = node.args[0]
    kinds = {arg.meta["val"].dtype for arg in node.all_input_nodes if isinstance(arg.meta.get("val"), Tensor)}
    if not isinstance(into, fx.Node) or len(into.users) > 1 or len(kinds) > 1:
        return False
    return into.target in FRESH or (into.target is operator.getitem and into.args[0].target is BATCH_NORM)  # type: ignore[union-attr]
