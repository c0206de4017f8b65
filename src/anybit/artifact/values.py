"""Values of every type that ONNX has, as Python has them: the one place that knows how they go in and what comes out.

A tensor is an array, of Python strings where it is text. A sequence is a list of arrays, which may differ in shape; one
array, whose first dimension runs over them, is taken too. A map is a dict of numbers. What is optional is any of these,
or None, which is also what an input gets that is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, TypeProto

from anybit.artifact.model import entry_type
from anybit.artifact.texts import SENTENCE, TEXT, as_text
from anybit.common.text import printable
from anybit.errors import DataError

Array = npt.NDArray[Any]

TYPES = {
    "tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16,
    "tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(int16)": np.int16, "tensor(int8)": np.int8,
    "tensor(uint64)": np.uint64, "tensor(uint32)": np.uint32, "tensor(uint16)": np.uint16, "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_, TEXT: np.object_,
}  # fmt: skip
"""What numpy calls the types of tensors."""

OPTIONAL = "optional("
_FORMS: dict[str, tuple[type, ...]] = {"seq": (list, tuple, np.ndarray), "map": (Mapping,)}


class Kind(NamedTuple):
    """An input: its name, its type as ONNX Runtime calls it, and the shape of an array that holds it."""

    name: str
    type: str
    shape: list[int | str | None]

    @property
    def tensor(self) -> str:
        """The type of the tensors that it is made of."""
        return self.type[self.type.rindex("tensor(") :].rstrip(")") + ")"


def kinds_of(graph: onnx.GraphProto) -> list[Kind]:
    """Return the inputs of a graph, whose free sizes have names."""
    found = []
    for value in graph.input:
        kind, dims = type_name(value.type), entry_type(value.type).tensor_type.shape.dim
        shape = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in dims]
        entries: list[int | str | None] = [f"{value.name}_number"] * ("seq(" in kind) + [SENTENCE] * ("map(" in kind)
        found.append(Kind(value.name, kind, [*entries, *shape]))
    return found


def type_name(kind: TypeProto) -> str:
    """Return what ONNX Runtime calls a type.

    >>> type_name(onnx.helper.make_optional_type_proto(onnx.helper.make_tensor_type_proto(TensorProto.FLOAT, [1])))
    'optional(tensor(float))'
    """
    form = kind.WhichOneof("value")
    if form == "map_type":
        return f"map({_plain(kind.map_type.key_type)},{type_name(kind.map_type.value_type)})"
    if form == "tensor_type" or form is None:
        return f"tensor({_plain(kind.tensor_type.elem_type)})"
    name = {"sequence_type": "seq", "optional_type": "optional"}.get(form, form)
    return f"{name}({type_name(getattr(kind, form).elem_type)})"


def _plain(number: int) -> str:
    return str(TensorProto.DataType.Name(number)).lower()


def as_array(x: Any, kind: str) -> Array:
    """Return an array in the type of a tensor."""
    return as_text(x) if kind == TEXT else np.asarray(x, TYPES[kind])


def as_value(x: Any, kind: str, tensor: Callable[[Any, str], Array] = as_array) -> Any:
    """Return a value in the type that an input of ONNX Runtime has; `tensor` makes the arrays.

    >>> as_value([1], "tensor(float)").dtype, as_value(["a"], "tensor(string)").tolist()
    (dtype('float32'), ['a'])
    >>> as_value([[1], [2, 3]], "seq(tensor(int64))"), as_value(None, "optional(tensor(float))")
    ([array([1]), array([2, 3])], None)
    >>> as_value({"a": 1}, "map(string,tensor(float))")
    {'a': 1.0}

    Raises:
        TypeError, ValueError, KeyError, OverflowError: It cannot be.
    """
    form, _, inner = kind[:-1].partition("(")
    if form == "optional":
        return None if x is None else as_value(x, inner, tensor)
    if form in _FORMS and not isinstance(x, _FORMS[form]):
        raise TypeError(f"it is a {type(x).__name__}")
    if form == "seq":
        return [as_value(entry, inner, tensor) for entry in x]
    if form == "map":
        key, _, value = inner.partition(",")
        return {(str if key == "string" else int)(name): as_array(v, value).item() for name, v in x.items()}
    return tensor(x, kind)


def as_input(x: Any, name: str, kind: str, tensor: Callable[[Any, str], Array] = as_array) -> Any:
    """Return the value of an input, or say what it takes."""
    try:
        return as_value(x, kind, tensor)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise DataError(f"input {name!r} takes {kind}; this is none ({printable(error, 80)})") from None


def feed_of(given: Mapping[str, Any], inputs: Sequence[Kind]) -> dict[str, Any]:
    """Return values for all inputs, ready to run; an optional one may be missing."""
    if any(value.name not in given and not value.type.startswith(OPTIONAL) for value in inputs):
        names = ", ".join(value.name for value in inputs)
        raise DataError(f"the network takes {names}; got {printable(', '.join(map(str, given)) or 'nothing', 120)}")
    return {value.name: as_input(given.get(value.name), value.name, value.type) for value in inputs}


def shape_of(x: Any) -> tuple[int, ...]:
    """Return the shape of an array that holds a value, if one can: of a list, the first entry tells the rest.

    >>> shape_of([np.ones(2), np.ones(3)]), shape_of(None)
    ((2, 2), ())
    """
    return (len(x), *np.shape(x[0])) if isinstance(x, list) and x else np.shape(x)


def parts_of(name: str, value: Any) -> dict[str, Array]:
    """Return the arrays that a value is made of, each under a name; of a dict its numbers, of None an empty text.

    >>> parts_of("b", [np.ones(1), np.ones(3)]).keys(), parts_of("c", {"x": 1.0, "y": 2.0})
    (dict_keys(['b[0]', 'b[1]']), {'c': array([1., 2.])})
    """
    if isinstance(value, list):
        return {n: x for i, entry in enumerate(value) for n, x in parts_of(f"{name}[{i}]", entry).items()}
    if isinstance(value, dict):
        return {name: np.array(list(value.values()))}
    return {name: np.zeros(0, object) if value is None else value}
