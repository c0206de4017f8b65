"""A model whose large tensors lie beside it, in arrays.

Protobuf copies whatever it is given, and a message has less than 2 GB. So a large initializer keeps its name, type and
shape in the graph, and its numbers stay where they are: in the memory of the network that is saved, or in a file.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from anybit.graph.onnx_nodes import subgraphs

Array = NDArray[Any]
Load = Callable[[], Array]

LARGE = 2**20
"""Bytes from which on numbers stay outside of the graph."""

_numbers = itertools.count()


@dataclass(frozen=True)
class OnnxModel:
    """A model, and the numbers of its large initializers by the key that each has in place of a file's name.

    `later` are those that are read each time that somebody looks at them.
    """

    proto: onnx.ModelProto
    arrays: dict[str, Array] = field(default_factory=dict)
    later: dict[str, Load] = field(default_factory=dict)

    @property
    def graph(self) -> onnx.GraphProto:
        """The graph of the model."""
        return self.proto.graph

    @property
    def nbytes(self) -> int:
        """How many bytes the model takes, with its large tensors."""
        return int(self.proto.ByteSize()) + sum(array.nbytes for array in self.arrays.values())

    def copy(self) -> OnnxModel:
        """Return a model with a graph of its own and the same arrays."""
        proto = onnx.ModelProto()
        proto.CopyFrom(self.proto)
        return OnnxModel(proto, dict(self.arrays))

    def tensor(self, array: Array, name: str) -> TensorProto:
        """Return an array as an initializer, which belongs into this model's graph.

        >>> model = OnnxModel(onnx.ModelProto())
        >>> few, many = model.tensor(np.ones(2), "few"), model.tensor(np.ones(2**18), "many")
        >>> len(few.raw_data), len(many.raw_data), [a.nbytes for a in model.arrays.values()]
        (16, 0, [2097152])
        """
        tensor = TensorProto(name=name, dims=array.shape, data_type=helper.np_dtype_to_tensor_dtype(array.dtype))
        self.fill(tensor, array)
        return tensor

    def fill(self, tensor: TensorProto, array: Array) -> None:
        """Give a tensor its numbers, in place of what it had: inside if they are few, else outside of the graph."""
        del tensor.external_data[:]
        tensor.ClearField("data_location")
        if array.nbytes < LARGE:
            tensor.raw_data = array.tobytes()
            return
        self.arrays[_put_outside(tensor)] = np.ascontiguousarray(array)

    def fill_later(self, tensor: TensorProto, load: Load) -> None:
        """Say where the numbers of a large tensor come from, without reading them."""
        self.later[_put_outside(tensor)] = load

    def apart(self, tensor: TensorProto) -> Array | None:
        """Return the numbers of a tensor if they lie outside of it, as they are stored."""
        if tensor.data_location != TensorProto.EXTERNAL:
            return None
        load = self.later.get(location(tensor))
        return self.arrays.get(location(tensor)) if load is None else load()

    def array(self, tensor: TensorProto) -> Array:
        """Return the numbers of a tensor, wherever they are; or its texts, as Python strings."""
        if tensor.data_type == TensorProto.STRING:  # ONNX would give each entry as much room as the longest one needs
            texts = np.empty(len(tensor.string_data), object)
            texts[:] = [text.decode("utf-8", "replace") for text in tensor.string_data]
            return texts.reshape(tuple(tensor.dims))
        apart = self.apart(tensor)
        return numpy_helper.to_array(tensor) if apart is None else apart

    def set_initializers(self, tensors: list[TensorProto]) -> None:
        """Replace the initializers, and drop the numbers of those that are gone."""
        del self.graph.initializer[:]
        self.graph.initializer.extend(tensors)
        used = {location(t) for t in self.graph.initializer if t.data_location == TensorProto.EXTERNAL}
        for key in self.arrays.keys() - used:
            del self.arrays[key]


def _put_outside(tensor: TensorProto) -> str:
    """Let a tensor have its numbers outside; return the key that it names."""
    key = f"#{next(_numbers)}"
    tensor.ClearField("raw_data")
    del tensor.external_data[:]
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=key)
    return key


def location(tensor: TensorProto) -> str:
    """Return where the numbers of a tensor lie, as it says itself; nothing if they are in the tensor."""
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def shaped(data: Array, tensor: TensorProto) -> Array:
    """Return bytes as the array that a tensor says they are; the caller has seen that the length fits.

    >>> tensor = TensorProto(dims=[2], data_type=TensorProto.FLOAT)
    >>> shaped(np.frombuffer(bytes.fromhex("0000803f00000040"), np.uint8), tensor).tolist()
    [1.0, 2.0]
    """
    kind = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
    return data.view(kind.newbyteorder("<")).reshape(tuple(tensor.dims))


def has_nan(array: Array) -> bool:
    """Tell whether an array has an entry that is not a number; the smallest entry tells, and takes no memory.

    >>> has_nan(np.array([1.0, np.nan])), has_nan(np.array([1.0, np.inf])), has_nan(np.ones(0))
    (True, False, False)
    """
    return array.dtype.kind == "f" and array.size > 0 and math.isnan(array.min())


def is_finite(array: Array) -> bool:
    """Tell whether all entries are finite; texts are not."""
    return array.dtype.kind != "O" and (array.size == 0 or (math.isfinite(array.min()) and math.isfinite(array.max())))


def set_nodes(graph: onnx.GraphProto, nodes: Iterable[NodeProto]) -> None:
    """Replace the nodes of a graph, by some of its own or by others."""
    kept = list(nodes)
    del graph.node[:]
    graph.node.extend(kept)


def all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and all graphs inside it: branches and loop bodies."""
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from all_graphs(inner)


def entry_type(kind: onnx.TypeProto) -> onnx.TypeProto:
    """Return the type of the tensors that a value of some type is made of: of a sequence, say, that of its entries."""
    inner = {"sequence_type": "elem_type", "optional_type": "elem_type", "map_type": "value_type"}
    form = kind.WhichOneof("value")
    return entry_type(getattr(getattr(kind, form), inner[form])) if form in inner else kind


def names_in(graph: onnx.GraphProto) -> set[str]:
    """Return the names that the nodes of a graph use, also those inside branches and loops."""
    inner = {value.name for part in all_graphs(graph) if part is not graph for value in part.output}
    return inner | {name for part in all_graphs(graph) for node in part.node for name in node.input}
