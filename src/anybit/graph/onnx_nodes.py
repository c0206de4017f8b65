"""What ONNX messages hold: attributes, branches and loop bodies, the names that a node uses; what one node makes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

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


def computed(node: NodeProto, feed: Mapping[str, Array]) -> Array:
    """Return what one operator makes of constants, by name."""
    from onnx.reference import ReferenceEvaluator

    with np.errstate(all="ignore"):  # a quotient that is thrown away afterwards may be 0 / 0
        (value,) = ReferenceEvaluator(_alone(node, feed)).run(None, dict(feed))
    return np.asarray(value)


def entries_of(node: NodeProto, feed: Mapping[str, Array]) -> int | None:
    """Return how many entries `computed` would return, without computing them, or None where that cannot be told.

    >>> entries_of(helper.make_node("Add", ["a", "b"], ["c"]), {"a": np.ones((5, 1)), "b": np.ones((1, 7))})
    35
    """
    model = _alone(node, feed)
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in feed.items() if a.size <= _SHAPE)
    try:
        kind = onnx.shape_inference.infer_shapes(model).graph.output[0].type.tensor_type
    except Exception:  # the C++ side raises what it likes
        return None
    sizes = [d.dim_value for d in kind.shape.dim if d.HasField("dim_value")]
    return math.prod(sizes) if kind.HasField("shape") and len(sizes) == len(kind.shape.dim) else None


_SHAPE = 64
"""Arrays with so many entries may be shapes, counts or axes."""


def _alone(node: NodeProto, feed: Mapping[str, Array]) -> onnx.ModelProto:
    inputs = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
              for n, a in feed.items()]  # fmt: skip
    graph = helper.make_graph([node], "constant", inputs, [helper.make_empty_tensor_value_info(node.output[0])])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
