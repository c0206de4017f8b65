"""Writing small ONNX graphs in a few lines each, as other people's tools would write them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = npt.NDArray[Any]
Shape = Sequence[int | str | None] | None


@dataclass(frozen=True)
class Case:
    """A graph, an input for it, and what is odd about it.

    `expect` is "taken" (quantized, close to floating point at W8A8), "nothing" (an error: there is no layer in it) or
    "quantized already" (an error that says so). `columns` are parts of the last axis of the first output that have
    to come close each for itself. An output called "probe" depends on the odd weight and on no other.
    """

    build: Callable[[], onnx.ModelProto]
    feed: Callable[[], dict[str, Array]]
    notes: str
    expect: str = "taken"
    columns: tuple[slice, ...] = (slice(None),)


class Net:
    """A graph on its way. Every method that makes a value returns its name."""

    def __init__(self, seed: int, *, opset: int = 17, ir: int = 8, ml: int = 1) -> None:
        self.rng = np.random.default_rng(seed)
        self.opset, self.ir = opset, ir
        self.versions = {"ai.onnx.ml": ml}
        self.nodes: list[onnx.NodeProto] = []
        self.held: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.noted: list[onnx.ValueInfoProto] = []
        self.functions: list[onnx.FunctionProto] = []
        self.feed: dict[str, Array] = {}
        self.count = 0

    def name(self, kind: str) -> str:
        self.count += 1
        return f"{kind}_{self.count}"

    def hold(self, value: npt.ArrayLike, name: str | None = None) -> str:
        """Add a constant of the file, in the type that it has (numbers of Python: float32 or int64)."""
        array = np.asarray(value)
        if array.dtype == np.float64 and not isinstance(value, np.ndarray):
            array = array.astype(np.float32)
        name = name or self.name("held")
        self.held.append(numpy_helper.from_array(array, name))
        return name

    def draw(self, *shape: int, dtype: Any = np.float32, mean: float = 0.0, spread: float | None = None) -> Array:
        """Return random numbers; those of a weight keep the size of what goes through it."""
        fan = int(np.prod(shape[1:])) if len(shape) > 1 else 1
        values = self.rng.normal(mean, spread or (1.4 / np.sqrt(fan) if fan > 1 else 0.3), shape)
        return values.astype(dtype)

    def weight(self, *shape: int, dtype: Any = np.float32) -> str:
        return self.hold(self.draw(*shape, dtype=dtype))

    def node(self, op: str, *inputs: str, n: int = 1, out: Sequence[str] | None = None, **attributes: Any) -> Any:
        """Add a node; return the name of its output, or a list of them if there are several."""
        domain = attributes.pop("domain", "")
        names = list(out) if out else [self.name(op.lower()) for _ in range(n)]
        self.nodes.append(helper.make_node(op, list(inputs), names, name=self.name("n"), domain=domain, **attributes))
        return names[0] if len(names) == 1 else names

    def input(self, name: str, value: Array, shape: Shape = ...) -> str:  # type: ignore[assignment]
        """Declare an input, with the shape of its sample unless another is given; `None` declares no shape."""
        self.feed[name] = value
        kind = TensorProto.STRING if value.dtype.kind == "U" else helper.np_dtype_to_tensor_dtype(value.dtype)
        declared = list(value.shape) if shape is ... else shape
        self.inputs.append(helper.make_tensor_value_info(name, kind, declared))
        return name

    def x(self, *shape: int, declared: Shape = ..., low: float = -2.0, high: float = 2.0) -> str:  # type: ignore[assignment]
        """Declare the input "x" with smooth random numbers."""
        return self.input("x", self.rng.uniform(low, high, shape).astype(np.float32), declared)

    def output(self, value: str, shape: Shape = None, kind: int = TensorProto.FLOAT) -> None:
        self.outputs.append(helper.make_tensor_value_info(value, kind, shape))

    def probe(self, value: str) -> str:
        """Make a value an output too, one that shows alone whether the weight in front of it is quantized."""
        self.output(self.node("Identity", value, out=["probe"]))
        return value

    def conv(self, x: str, before: int, after: int, size: int = 3, *, bias: bool = True, **attributes: Any) -> str:
        group = attributes.get("group", 1)
        held = [self.weight(after, before // group, size, size), *([self.weight(after)] if bias else [])]
        attributes.setdefault("pads", [size // 2] * 4)
        made: str = self.node("Conv", x, *held, **attributes)
        return made

    def norm(self, x: str, channels: int) -> str:
        """A batch norm as training leaves it."""
        held = [self.rng.uniform(0.6, 1.4, channels), self.rng.normal(0, 0.3, channels),
                self.rng.normal(0, 0.3, channels), self.rng.uniform(0.5, 1.5, channels)]  # fmt: skip
        made: str = self.node("BatchNormalization", x, *(self.hold(v.astype(np.float32)) for v in held))
        return made

    def dense(self, x: str, before: int, after: int) -> str:
        made: str = self.node("MatMul", x, self.weight_in(before, after))
        return made

    def weight_in(self, before: int, after: int) -> str:
        """A weight with the inputs in front, as MatMul wants it."""
        return self.hold(np.ascontiguousarray(self.draw(after, before).T))

    def head(self, x: str, channels: int, classes: int = 5) -> None:
        """The end of a classifier: mean over the picture and a layer."""
        pooled = self.node("GlobalAveragePool", x)
        flat = self.node("Flatten", pooled)
        self.output(self.node("Gemm", flat, self.weight(classes, channels), self.weight(classes), transB=1))

    def graph(self, name: str = "stranger") -> onnx.GraphProto:
        graph = helper.make_graph(self.nodes, name, self.inputs, self.outputs, self.held)
        graph.value_info.extend(self.noted)
        return graph

    def model(self) -> onnx.ModelProto:
        """Return the file, with every domain that its nodes use."""
        graph = self.graph()
        domains = {node.domain for node in self.nodes} | {f.domain for f in self.functions} | {"com.microsoft"}
        versions = [helper.make_opsetid("", self.opset)]
        versions += [helper.make_opsetid(domain, self.versions.get(domain, 1)) for domain in sorted(domains - {""})]
        model = helper.make_model(graph, opset_imports=versions, producer_name="stranger", functions=self.functions)
        model.ir_version = self.ir
        return model


class Cases(dict[str, Case]):
    """The table; `add` is a decorator for functions that write a graph into a `Net`."""

    def add(
        self, notes: str, *, expect: str = "taken", columns: tuple[slice, ...] = (slice(None),), **settings: int
    ) -> Callable[[Callable[[Net], None]], Callable[[Net], None]]:
        """Put a graph into the table under its function's name."""

        def put(write: Callable[[Net], None]) -> Callable[[Net], None]:
            def net() -> Net:
                made = Net(zlib.crc32(write.__name__.encode()), **settings)
                write(made)
                return made

            def build() -> onnx.ModelProto:
                made = net()
                return getattr(made, "finished", None) or made.model()

            self[write.__name__] = Case(build, lambda: net().feed, notes, expect, columns)
            return write

        return put
