"""How large the values of a stranger's graph may become, and where that is seen to.

A graph may hide a size: `Pow -> Cast -> ConstantOfShape` makes gigabytes out of eight bytes. Three rules together:

1. What follows from constants alone, ONNX Runtime computes while it loads the file. Here the small part of it (shapes,
   counts, indices) is computed first, step by step, until the sizes of all the rest are known. Together that may have
   16 million entries more than what it is made from; a size that cannot be found out this way is refused.
2. With every free size at one, no value may have more than 2**28 entries.
3. What hangs on the sizes or the values of the inputs is known only when they come: free sizes, `Shape -> Gather ->
   Concat -> Reshape`, `Resize`, lengths that a speech network predicts. All sessions of a process share one pool of
   working memory with a limit (`runtime.limit_memory`), and a run that asks for more fails with an error.

What texts say lies outside of that pool. So a value of text counts in the first two rules with the room of its longest
entry in place of each one, and no text may be put together that is longer than 64 kB, or than 64 bytes in a loop,
which may make any number of them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, TypeProto, numpy_helper

from anybit.artifact.model import OnnxModel, all_graphs, entry_type, set_nodes
from anybit.artifact.runtime import compile_model
from anybit.common.text import explaining, printable
from anybit.errors import FileError
from anybit.graph.onnx_nodes import subgraphs

MOST_ENTRIES = 2**28
MOST_GROWTH = 2**24
LONGEST_TEXT, SHORT_TEXT = 2**16, 64
LOOPS = ("Loop", "Scan")
_SMALL = 4096
_ROUNDS = 10
_RANDOM = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli"}
)
_NEVER_GROWING = frozenset({
    "Compress", "Identity", "NonZero", "Reshape", "Slice", "Split", "Squeeze", "TopK", "Transpose", "Unique",
    "Unsqueeze", "Optional", "SequenceConstruct", "SequenceEmpty", "SequenceInsert", "SplitToSequence",
})  # fmt: skip
"""Operators with at most a few times as many entries as they get, also where nobody knows how many.

A sequence is never stored as a constant, so what is inserted into one is inserted when the network runs.
"""

Outside = tuple[str, int, tuple[int, ...]]
"""Name, type and shape of a constant that is not in the graph."""


def check_sizes(model: onnx.ModelProto, outside: Iterable[Outside], *, where: str, strict: bool) -> None:
    """Refuse a graph whose constants would unfold to absurd sizes (rule 1) or whose values are absurd (rule 2).

    Args:
        model: The model. It is changed: small constants take the place of the nodes that compute them.
        outside: The constants that it uses and that are not in it; their values are not looked at.
        where: The file, for errors.
        strict: Whether the shapes of all values must follow from those of the inputs.
    """
    constants = {name: math.prod(shape) for name, _, shape in outside}
    dims = [d for v in model.graph.input if v.name not in constants for d in entry_type(v.type).tensor_type.shape.dim]
    free = [d for d in dims if not d.HasField("dim_value") or d.dim_value < 1]
    for dim in free:  # some write a free size as 0 or -1
        dim.ClearField("dim_value")
    _take_constants(model.graph)
    shapes, texts = _settled(model, where=where, strict=strict)
    rooms = _rooms(model.graph, texts, where=where)
    _check_constants(model.graph, shapes, constants, rooms, where=where)
    for dim in free:
        dim.dim_value = 1
    with contextlib.suppress(FileError):  # not every network works at sizes of one; then those above are taken
        shapes, _ = _settled(model, where=where, strict=strict)
    for name, sizes in shapes.items():
        if _entries(sizes) * rooms.get(name, 1) > MOST_ENTRIES:
            raise FileError(f"{where}: {printable(name, 60)!r} would have the shape {list(sizes[:8])}")


Sizes = tuple[int | None, ...]


def _settled(model: onnx.ModelProto, *, where: str, strict: bool) -> tuple[dict[str, Sizes], set[str]]:
    """Compute small constants until no more sizes come to light; return the sizes of all values, and what is text."""
    shapes, texts = _shapes(model, where=where, strict=strict)
    for _ in range(_ROUNDS):
        if not _fold(model, shapes, texts, where=where):
            break
        shapes, texts = _shapes(model, where=where, strict=strict)
    return shapes, texts


def _shapes(model: onnx.ModelProto, *, where: str, strict: bool) -> tuple[dict[str, Sizes], set[str]]:
    """Return the sizes of all values that have a known number of dimensions, a free one as None; and what is text."""
    # Without ONNX's own propagation of data, which unfolds any range to its full length.
    with explaining(FileError, f"{where}: the graph is no valid ONNX"):
        try:
            graph = onnx.shape_inference.infer_shapes(model, check_type=strict, strict_mode=strict).graph
        except onnx.shape_inference.InferenceError:  # ONNX is wrong about some operators that the runtime takes
            graph = onnx.shape_inference.infer_shapes(model).graph
    values = [*graph.input, *graph.value_info, *graph.output]
    found = {v.name: _sizes(v.type) for v in values}
    found |= {t.name: tuple(t.dims) for t in graph.initializer}
    texts = {v.name for v in values if v.type.tensor_type.elem_type == TensorProto.STRING}
    return {name: sizes for name, sizes in found.items() if sizes is not None}, texts


def _sizes(kind: TypeProto) -> Sizes | None:
    if not kind.tensor_type.HasField("shape"):
        return None
    return tuple(
        d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else None for d in kind.tensor_type.shape.dim
    )


def _entries(sizes: Sizes) -> int:
    return math.prod(1 if size is None else size for size in sizes)


def _is_small(sizes: Sizes | None) -> bool:
    return sizes is not None and None not in sizes and 0 <= _entries(sizes) <= _SMALL


def _rooms(graph: GraphProto, texts: set[str], *, where: str) -> dict[str, int]:
    """Return for each value of text that comes in or is made how much room an entry takes, in numbers of four bytes.

    As with free sizes, what comes in has a length of one.
    """
    held = {tensor.name for tensor in graph.initializer}
    longest = _lengths(graph, dict.fromkeys((v.name for v in graph.input if v.name in texts), 1), texts, where=where)
    return {name: 8 + length // 4 for name, length in longest.items() if name in texts and name not in held}


def _lengths(graph: GraphProto, known: Mapping[str, int], texts: set[str] | None, *, where: str) -> dict[str, int]:
    """Return the length of the longest entry of each text; where nobody knows what is one, of everything."""
    held = {t.name: max(map(len, t.string_data), default=0) for t in graph.initializer if t.string_data}
    longest = {**known, **held}
    for node in graph.node:
        said = [longest[name] for name in node.input if name in longest]
        own = [len(raw) for a in node.attribute for raw in (a.s, *a.strings, *a.t.string_data)]
        if node.op_type in LOOPS or any(inner.op_type == "StringConcat" for inner in _inside(node)):
            own += [length for part in subgraphs(node) for length in _lengths_out(node, part, longest, where=where)]
        joined = sum(longest.get(name, 1) for name in node.input) if node.op_type == "StringConcat" else 0
        length = max([joined, *said, *own])
        # Of other domains nobody tells types.
        made = [name for name in node.output if texts is None or name in texts or (said and node.domain)]
        if made and length > LONGEST_TEXT:
            raise FileError(f"{where}: {printable(made[0], 60)!r} would be a text of {length} bytes")
        longest |= dict.fromkeys(made, length)
    return longest


def _lengths_out(node: NodeProto, part: GraphProto, outside: Mapping[str, int], *, where: str) -> list[int]:
    """Return the lengths of what a branch or loop body hands out; refuse what grows from one round to the next."""
    taken = {own.name: max(1, outside.get(name, 1)) for own, name in zip(part.input, node.input, strict=False)}
    first = 2 if node.op_type == "Loop" else 0  # the number of the round and a condition come in, a condition goes out
    scanned = sum(attribute.i for attribute in node.attribute if attribute.name == "num_scan_inputs")
    states = part.input[first : len(part.input) - scanned] if node.op_type in LOOPS else []
    grown, made = dict[str, int](), dict[str, int]()
    for _ in range(2):  # the first round may begin with nothing
        made = _lengths(part, {**outside, **taken}, None, where=where)
        handed = {own.name: made.get(out.name, 0) for own, out in zip(states, part.output[first // 2 :], strict=False)}
        grown = {name: length for name, length in handed.items() if length > taken.get(name, 1)}
        taken |= grown
    if grown:
        advice = "let the graph put it together outside"
        raise FileError(f"{where}: text grows from round to round of a loop, and nobody knows how far; {advice}")
    long = max((made[name] for inner in part.node for name in inner.output if name in made), default=0)
    if node.op_type in LOOPS and long > SHORT_TEXT:
        advice = f"nobody knows of how many; at most {SHORT_TEXT} are taken there"
        raise FileError(f"{where}: a loop makes texts of {long} bytes, and {advice}")
    return [made.get(out.name, 0) for out in part.output]


def _inside(node: NodeProto) -> Iterator[NodeProto]:
    """Yield the nodes of branches and loop bodies."""
    for graph in subgraphs(node):
        yield from (inner for part in all_graphs(graph) for inner in part.node)


def _take_constants(graph: GraphProto) -> None:
    """Make the Constant nodes initializers."""
    kept = []
    for node in graph.node:
        if node.op_type == "Constant" and [a.name for a in node.attribute] == ["value"]:
            graph.initializer.add().CopyFrom(node.attribute[0].t)
            graph.initializer[-1].name = node.output[0]
        else:
            kept.append(node)
    set_nodes(graph, kept)


def _fold(model: onnx.ModelProto, shapes: Mapping[str, Sizes], texts: set[str], *, where: str) -> bool:
    """Replace nodes that make small constants by what they make; return whether there were any.

    Text stays out of it: a few entries may be long.
    """
    graph = model.graph
    held = {
        t.name: t
        for t in graph.initializer
        if not (t.data_location == TensorProto.EXTERNAL or t.string_data) and _is_small(tuple(t.dims))
    }
    made: dict[str, Any] = {}
    nodes: list[NodeProto] = []
    known = set(held)
    for node in graph.node:
        if node.op_type == "Shape" and (sizes := shapes.get(node.input[0])) is not None and None not in sizes:
            ends = {a.name: a.i for a in node.attribute}
            made[node.output[0]] = np.array(sizes, np.int64)[slice(ends.get("start"), ends.get("end"))]
        elif _is_fixed(node) and all(name in known for name in node.input if name):
            if not all(_is_small(shapes.get(name)) and name not in texts for name in node.output if name):
                continue
            nodes.append(node)
            known.update(node.output)
    if nodes:
        made |= _computed(model, nodes, held, where=where)
    kept = [node for node in graph.node if not made.keys() & set(node.output)]
    if len(kept) == len(graph.node):
        return False
    set_nodes(graph, kept)
    graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in made.items())
    return True


def _is_fixed(node: NodeProto) -> bool:
    """Tell whether a node makes the same of the same constants every time."""
    graphs = (AttributeProto.GRAPH, AttributeProto.GRAPHS)
    return bool(node.output) and node.op_type not in _RANDOM and all(a.type not in graphs for a in node.attribute)


def _computed(
    model: onnx.ModelProto, nodes: list[NodeProto], held: Mapping[str, TensorProto], *, where: str
) -> dict[str, Any]:
    """Let ONNX Runtime compute some constants, each of them small."""
    names = [name for node in nodes for name in node.output if name]
    used = {name for node in nodes for name in node.input}
    part = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    part.graph.name = "constants"
    part.graph.node.extend(nodes)
    part.graph.initializer.extend(tensor for name, tensor in held.items() if name in used)
    part.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    engine = compile_model(OnnxModel(part), exact=False, threads=1, where=where, optimize=False)
    with explaining(FileError, f"{where}: its constants cannot be computed"):
        return dict(zip(names, engine.run(None, {}), strict=True))


def _check_constants(
    graph: GraphProto, shapes: Mapping[str, Sizes], held: Mapping[str, int], rooms: Mapping[str, int], *, where: str
) -> None:
    """Refuse what would grow while the file is loaded."""
    sizes: dict[str, int | None] = {**held, **{t.name: _room(t) for t in graph.initializer}}
    growth = 0
    for node in graph.node:
        if not _is_fixed(node) or not all(name in sizes for name in node.input if name):
            continue
        before = sum(sizes[name] or 0 for name in {*node.input} - {""})  # each once, however often it is used
        for name in filter(None, node.output):
            found = shapes.get(name)
            sizes[name] = None if found is None or None in found else _entries(found) * rooms.get(name, 1)
            if sizes[name] is None and node.op_type not in _NEVER_GROWING:
                raise FileError(
                    f"{where}: the size of {printable(name, 60)!r}, which {printable(node.op_type, 40)} computes from "
                    "constants, cannot be found out before it is computed; fold constants before you save the model"
                )
            growth += max(0, (sizes[name] or 0) - before)
            if growth > MOST_GROWTH:
                raise FileError(
                    f"{where}: {printable(name, 60)!r} would have the shape {list(found or ())[:8]}, computed from "
                    f"constants alone; at most {MOST_GROWTH:,} entries may be"
                )


def _room(tensor: TensorProto) -> int:
    """Return how many numbers of four bytes a constant counts as."""
    return int(math.prod(tensor.dims)) + sum(8 + len(text) // 4 for text in tensor.string_data)
