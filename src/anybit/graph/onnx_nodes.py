"""What ONNX messages hold: attributes, branches and loop bodies, the names that a node uses; what one node makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper

from anybit.graph.view import Array

OPSET = 21
"""The operator set that networks are read and written in: the first with 4-bit and 16-bit quantization."""


def attributes(node: NodeProto) -> dict[str, Any]:
    """Return a node's attributes as plain values."""
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def subgraphs(node: NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs that a node holds: branches and loop bodies."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def used_by(node: NodeProto) -> list[str]:
    """Return what a node uses, its branches and loop bodies included."""
    names = [name for name in node.input if name]
    for graph in subgraphs(node):
        own = {name for n in graph.node for name in n.output} | {t.name for t in graph.initializer}
        own |= {value.name for value in graph.input}
        found = [name for n in graph.node for name in used_by(n)] + [value.name for value in graph.output]
        names += [name for name in dict.fromkeys(found) if name not in own]
    return names


def outlined(
    proto: onnx.ModelProto, is_large: Callable[[TensorProto], bool]
) -> tuple[onnx.ModelProto, list[TensorProto]]:
    """Return a model whose large initializers come in as inputs of the same type and shape, and those initializers."""
    large = [tensor for tensor in proto.graph.initializer if is_large(tensor)]
    names = {tensor.name for tensor in large}  # old files list weights among the inputs too
    out = onnx.ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import)
    out.graph.name = "graph"
    out.graph.node.extend(proto.graph.node)
    out.graph.output.extend(proto.graph.output)
    out.graph.initializer.extend(tensor for tensor in proto.graph.initializer if not is_large(tensor))
    out.graph.input.extend(value for value in proto.graph.input if value.name not in names)
    out.graph.input.extend(helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in large)
    return out, large


def computed(node: NodeProto, arrays: list[Array]) -> Array:
    """Return what one operator makes of constants, which stand for the inputs that it has."""
    from onnx.reference import ReferenceEvaluator

    names = [name for name in node.input if name]
    inputs = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
              for n, a in zip(names, arrays, strict=True)]  # fmt: skip
    graph = helper.make_graph([node], "constant", inputs, [helper.make_empty_tensor_value_info(node.output[0])])
    alone = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    (value,) = ReferenceEvaluator(alone).run(None, dict(zip(names, arrays, strict=True)))
    return np.asarray(value)
