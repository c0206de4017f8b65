"""Sizes that a graph hides: found out before it is loaded, or held by the limit on working memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

from anybit.artifact.bounds import LONGEST_TEXT, MOST_GROWTH, check_sizes
from anybit.artifact.check import MOST_NODES, MOST_PARTS
from anybit.artifact.model import OnnxModel
from anybit.artifact.plain import read_plain
from anybit.artifact.runtime import MEMORY_SETTING as SETTING
from anybit.artifact.runtime import memory_limit
from anybit.errors import FileError, SpecError

node = helper.make_node
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def model(nodes: list[NodeProto], constants: dict[str, Any], shape: list[Any]) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", FLOAT, shape)],
        [helper.make_tensor_value_info("y", FLOAT, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def check(nodes: list[NodeProto], constants: dict[str, Any], shape: list[Any]) -> None:
    check_sizes(model(nodes, constants, shape), [], where="m.onnx", strict=False)


def hidden(size: float, *make: NodeProto) -> tuple[list[NodeProto], dict[str, Any]]:
    """Return nodes that make a size out of its root; `make` gets it as "n" and makes "big"."""
    nodes = [node("Pow", ["root", "two"], ["p"]), node("Cast", ["p"], ["n"], to=INT64), *make]
    nodes += [node("ReduceSum", ["big"], ["s"], keepdims=0), node("Add", ["x", "s"], ["y"])]
    constants = {"root": np.float32([size**0.5]), "two": np.float32([2]), "zero": np.int64(0), "one": np.int64(1)}
    return nodes, constants


WAYS: dict[str, list[NodeProto]] = {
    "ConstantOfShape": [node("ConstantOfShape", ["n"], ["big"])],
    "Tile": [node("Tile", ["root", "n"], ["big"])],
    "Expand": [node("Expand", ["root", "n"], ["big"])],
    "Range": [
        node("Squeeze", ["n"], ["m"]),
        node("Range", ["zero", "m", "one"], ["r"]),
        node("Cast", ["r"], ["big"], to=FLOAT),
    ],
    "in two steps": [
        node("ConstantOfShape", ["n"], ["a"]),
        node("Shape", ["a"], ["b"]),
        node("Concat", ["b", "b"], ["c"], axis=0),
        node("ConstantOfShape", ["c"], ["big"]),
    ],
    "an outer product": [
        node("ConstantOfShape", ["n"], ["row"]),
        node("Unsqueeze", ["row", "axis"], ["column"]),
        node("Mul", ["row", "column"], ["big"]),
    ],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [["n", 4], [2, 4]])
def test_a_size_computed_from_constants_is_found_out(way: str, shape: list[Any]) -> None:
    nodes, constants = hidden(2**40 if way != "in two steps" and way != "an outer product" else 2**14, *WAYS[way])
    constants["axis"] = np.int64([1])
    with pytest.raises(FileError, match=r"^m\.onnx: .* would have the shape .*, computed from constants alone"):
        check(nodes, constants, shape)
    nodes, constants = hidden(50, *WAYS[way])
    check(nodes, {**constants, "axis": np.int64([1])}, shape)


def test_a_size_that_nobody_can_find_out_is_refused() -> None:
    """Thousands of numbers are not looked at: how many of them are not zero shows when they are."""
    nodes = [node("NonZero", ["long"], ["where"]), node("Tile", ["where", "twice"], ["b"])]
    end = [node("ReduceSum", ["b"], ["t"], keepdims=0), node("Cast", ["t"], ["f"], to=FLOAT)]
    constants = {"long": np.ones(9000), "twice": np.int64([1, 1])}
    with pytest.raises(FileError, match="cannot be found out before it is computed"):
        check([*nodes, *end, node("Add", ["x", "f"], ["y"])], constants, [2])


LARGE: dict[str, list[NodeProto]] = {
    "Add": [node("Add", ["column", "row"], ["big"])],
    "Where": [node("Where", ["yes", "column", "row"], ["big"])],
    "ConstantOfShape": [node("ConstantOfShape", ["sizes"], ["big"])],
    "Expand": [node("Expand", ["row", "sizes"], ["big"])],
    "Tile": [node("Tile", ["row", "times"], ["big"])],
    "Range": [node("Range", ["start", "end", "step"], ["big"])],
    "Gather": [node("Gather", ["row", "zeros"], ["big"])],
    "MatMul": [node("MatMul", ["column", "row"], ["big"])],
    "Concat": [
        node("Concat", ["row"] * 100, ["c"], axis=0),
        node("Concat", ["c"] * 100, ["big"], axis=0),
    ],
}


@pytest.mark.parametrize("way", LARGE)
def test_constants_are_not_computed_to_find_out_that_they_are_too_large(way: str, tmp_path: Path) -> None:
    ends = {"start": np.float32(0), "end": np.float32(1e8), "step": np.float32(1)}
    constants = {"column": np.ones((10_000, 1), np.float32), "row": np.ones((1, 10_000), np.float32), **ends}
    constants |= {"yes": np.ones((1, 1), bool), "sizes": np.int64([10_000, 10_000]), "times": np.int64([10_000, 1])}
    constants |= {"zeros": np.zeros(10_000, np.int64), "w": np.eye(4, dtype=np.float32)}
    end = [node("ReduceSum", ["big"], ["s"]), node("MatMul", ["x", "w"], ["a"]), node("Add", ["a", "s"], ["y"])]
    nodes = [*LARGE[way], *end]
    used = {name for n in nodes for name in n.input}
    path = tmp_path / "large.onnx"
    onnx.save(model(nodes, {name: value for name, value in constants.items() if name in used}, [2, 4]), path)
    tracemalloc.start()
    try:
        with pytest.raises(FileError, match="computed from constants alone"):
            read_plain(path)
        assert tracemalloc.get_traced_memory()[1] < 1e8
    finally:
        tracemalloc.stop()


TEXTS: dict[str, tuple[list[NodeProto], str]] = {
    "Expand": ([node("Expand", ["t", "sizes"], ["many"]), node("Equal", ["many", "t"], ["b"])], "constants alone"),
    "Tile": ([node("Tile", ["t", "sizes"], ["many"]), node("Equal", ["many", "t"], ["b"])], "constants alone"),
    "Gather": ([node("Gather", ["t", "zeros"], ["many"]), node("Equal", ["many", "t"], ["b"])], "constants alone"),
    "StringConcat": (
        [
            *(node("StringConcat", [f"t{i}" if i else "t"] * 2, [f"t{i + 1}"]) for i in range(40)),
            node("Equal", ["t40", "t"], ["b"]),
        ],
        "would be a text of 80000 bytes",
    ),
    "a text in a node": (
        [
            node("Constant", [], ["long"], value_string="x" * 100_000),
            node("Expand", ["long", "few"], ["many"]),
            node("Equal", ["many", "t"], ["b"]),
        ],
        "'long' would be a text of 100000 bytes",
    ),
    "a choice of the input": (
        [
            node("Greater", ["x", "zero"], ["c"]),
            node("Where", ["c", "t", "u"], ["v"]),
            node("Expand", ["v", "sizes"], ["many"]),
            node("Equal", ["many", "t"], ["b"]),
        ],
        r"'many' would have the shape \[1, 50000\]",
    ),
}


@pytest.mark.parametrize("way", TEXTS)
def test_texts_are_not_copied_a_million_times(way: str, tmp_path: Path) -> None:
    """What they say lies outside of the pool of working memory: 50,000 copies of 40 kB."""
    nodes, message = TEXTS[way]
    nodes = [*nodes, node("Cast", ["b"], ["f"], to=FLOAT), node("ReduceSum", ["f"], ["s"], keepdims=0)]
    nodes += [node("MatMul", ["x", "w"], ["a"]), node("Add", ["a", "s"], ["y"])]
    constants: dict[str, Any] = {name: np.array([name * 40_000], object) for name in ("t", "u")}
    constants |= {"sizes": np.int64([50_000]), "zeros": np.zeros(50_000, np.int64), "zero": np.float32(0)}
    constants |= {"w": np.ones((1, 1), np.float32), "few": np.int64([4000])}
    used = {name for n in nodes for name in n.input}
    path = tmp_path / "large.onnx"
    onnx.save(model(nodes, {name: value for name, value in constants.items() if name in used}, [1, 1]), path)
    with pytest.raises(FileError, match=message):
        read_plain(path)
    constants |= {"t": np.array(["t"], object), "u": np.array(["u"], object), "sizes": np.int64([3])}
    constants |= {"zeros": np.zeros(3, np.int64)}
    if way not in ("StringConcat", "a text in a node"):
        onnx.save(model(nodes, {name: value for name, value in constants.items() if name in used}, [1, 1]), path)
        assert read_plain(path).graph.output[0].name == "y"


def test_one_long_text_does_not_make_room_for_all() -> None:
    """An array of characters would have 64 kB for each entry, 500 MB in all; and not all bytes are text."""
    texts = [b"word"] * 2000 + [b"x" * LONGEST_TEXT, b"\xff"]
    tensor = TensorProto(name="t", dims=[2002], data_type=TensorProto.STRING, string_data=texts)
    tracemalloc.start()
    try:
        found = OnnxModel(onnx.ModelProto()).array(tensor)
        assert tracemalloc.get_traced_memory()[1] < 1e7
    finally:
        tracemalloc.stop()
    assert (found[0], len(found[2000]), found[2001]) == ("word", LONGEST_TEXT, "\ufffd")


TEXT, BOOL = TensorProto.STRING, TensorProto.BOOL


def joining(begin: str, first: str, second: str) -> list[NodeProto]:
    """Return a loop that joins two texts in every round; "s" is what it has, which it hands on as it is or as "t"."""
    out = [
        node("StringConcat", [first, second], ["t"]),
        node("Identity", ["go"], ["on"]),
        node("Identity", ["s"], ["u"]),
    ]
    ends = [helper.make_tensor_value_info(*v) for v in (("i", INT64, []), ("go", BOOL, []), ("s", TEXT, []))]
    made = [
        helper.make_tensor_value_info(*v)
        for v in (("on", BOOL, []), ("t" if "s" in (first, second) else "u", TEXT, []))
    ]
    made += [helper.make_tensor_value_info("t2", TEXT, [])]
    body = helper.make_graph([*out, node("Identity", ["t"], ["t2"])], "body", ends, made)
    nodes = [node("Loop", ["n", "", begin], ["long", "each"], body=body), node("Equal", ["each", "word"], ["b"])]
    return [
        *nodes,
        node("Cast", ["b"], ["f"], to=FLOAT),
        node("ReduceSum", ["f"], ["g"]),
        node("Add", ["x", "g"], ["y"]),
    ]


@pytest.mark.parametrize(("first", "second"), [("s", "s"), ("s", "word"), ("word", "s"), ("s", "unknown")])
@pytest.mark.parametrize("begin", ["word", "nothing"])
def test_text_does_not_grow_from_round_to_round(begin: str, first: str, second: str) -> None:
    constants = {"n": np.int64(40), "word": np.array("word", object), "nothing": np.array("", object)}
    with pytest.raises(FileError, match="text grows from round to round of a loop, and nobody knows how far; let"):
        check(joining(begin, first, second), constants, [2])  # of what is unknown, nobody tells that it is text


def test_text_may_be_put_together_in_every_round_anew() -> None:
    check(joining("word", "word", "word"), {"n": np.int64(40), "word": np.array("word", object)}, [2])
    long = np.array("word" * 12_000, object)
    with pytest.raises(FileError, match="'t' would be a text of 96000 bytes"):
        check(joining("word", "word", "word"), {"n": np.int64(40), "word": long}, [2])


def doubling() -> list[NodeProto]:
    """Return a loop that has twice as many texts after every round."""
    body = helper.make_graph(
        [node("Concat", ["s", "s"], ["t"], axis=0), node("Identity", ["go"], ["on"])],
        "body",
        [helper.make_tensor_value_info(*v) for v in (("i", INT64, []), ("go", BOOL, []), ("s", TEXT, None))],
        [helper.make_tensor_value_info(*v) for v in (("on", BOOL, []), ("t", TEXT, None))],
    )
    first = node("Slice", ["many", "zero", "one"], ["few"])
    nodes = [node("Loop", ["n", "", "words"], ["many"], body=body), first, node("Equal", ["few", "words"], ["b"])]
    return [*nodes, node("Cast", ["b"], ["f"], to=FLOAT), node("Add", ["x", "f"], ["y"])]


@pytest.mark.parametrize(("length", "taken"), [(60, True), (60_000, False)])
def test_a_loop_makes_no_more_than_a_few_bytes_of_text_for_each_entry(length: int, taken: bool) -> None:
    """The runtime's limit on memory counts entries, not what they say."""
    constants = {"n": np.int64(20), "words": np.array(["x" * length], object), "zero": np.int64([0])}
    constants["one"] = np.int64([1])
    with contextlib.nullcontext() if taken else pytest.raises(FileError, match="a loop makes texts of 60000 bytes"):
        check(doubling(), constants, [2])


HONEST: dict[str, Callable[[], tuple[list[NodeProto], dict[str, Any], list[Any]]]] = {
    "a reshape by the batch": lambda: (
        [
            node("Shape", ["x"], ["s"]),
            node("Gather", ["s", "zero"], ["n"], axis=0),
            node("Concat", ["n", "rest"], ["w"], axis=0),
            node("Reshape", ["x", "w"], ["y"]),
        ],
        {"zero": np.int64([0]), "rest": np.int64([-1])},
        ["n", 3, "h", "w"],
    ),
    "twice the size": lambda: (
        [
            node("Shape", ["x"], ["s"]),
            node("Cast", ["s"], ["f"], to=FLOAT),
            node("Mul", ["f", "scale"], ["g"]),
            node("Floor", ["g"], ["h"]),
            node("Cast", ["h"], ["sizes"], to=INT64),
            node("Resize", ["x", "", "", "sizes"], ["y"], mode="nearest"),
        ],
        {"scale": np.float32([1, 1, 2, 2])},
        [1, 3, "h", "w"],
    ),
    "a mask as long as the input": lambda: (
        [
            node("Shape", ["x"], ["s"], start=1, end=2),
            node("Squeeze", ["s"], ["n"]),
            node("Range", ["zero", "n", "one"], ["r"]),
            node("Cast", ["r"], ["f"], to=FLOAT),
            node("Expand", ["f", "t"], ["e"]),
            node("Shape", ["x"], ["t"]),
            node("Add", ["x", "e"], ["y"]),
        ],
        {"zero": np.int64(0), "one": np.int64(1)},
        ["n", "length"],
    ),
    "a table of positions": lambda: (
        [node("Tile", ["small", "many"], ["table"]), node("MatMul", ["x", "table"], ["y"])],
        {"small": np.ones((64, 1), np.float32), "many": np.int64([1, 512])},
        ["n", 64],
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_what_honest_files_do_is_taken(name: str) -> None:
    nodes, constants, shape = HONEST[name]()
    if name.startswith("a mask"):
        nodes[4], nodes[5] = nodes[5], nodes[4]
    check(nodes, constants, shape)


def test_a_value_of_absurd_size_at_batch_one() -> None:
    with pytest.raises(FileError, match="would have the shape"):
        check([node("MatMul", ["x", "x"], ["z"]), node("Expand", ["z", "to"], ["y"])], {"to": [2**15, 2**15]}, [1, 1])
    assert MOST_GROWTH < 2**30


RUN = """
import sys
from pathlib import Path
import numpy as np, onnx
from anybit.artifact.check import MOST_NODES
from anybit.artifact.plain import read_plain
from anybit.artifact.model import OnnxModel
from anybit.artifact.runtime import compile_model, memory_advice

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))

model = OnnxModel(onnx.load(sys.argv[1]))
session = compile_model(model, exact=False, threads=1, where="m.onnx", optimize=False)
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
before = status("VmRSS")
for value in (100.0, 1e9, 100.0):
    try:
        print(session.run(None, {"x": np.array([value], np.float32)})[0][0])
    except Exception as error:
        print(memory_advice(str(error)))
print((status("VmHWM") - before) // 1024)
"""


def test_a_size_computed_from_the_input_meets_the_limit_on_working_memory(tmp_path: Path) -> None:
    nodes = [
        node("Cast", ["x"], ["n"], to=INT64), node("ConstantOfShape", ["n"], ["big"]),
        node("ReduceSum", ["big"], ["s"], keepdims=0), node("Add", ["x", "s"], ["y"]),
    ]  # fmt: skip
    check(nodes, {}, [1])
    onnx.save(model(nodes, {}, [1]), tmp_path / "m.onnx")
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path / "m.onnx")], env={**os.environ, SETTING: "0.25"}, capture_output=True,
        text=True, timeout=280,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    first, second, third, rise = done.stdout.splitlines()
    assert (float(first), float(third)) == (100, 100)
    assert second.startswith("; it wants more than 0.25 GB to work with: take smaller batches")
    assert int(rise) < 300  # it asks for 4,000 MB


@pytest.mark.parametrize("text", ["x", "-1", "0", "nan", "inf"])
def test_the_limit_is_a_number_of_gigabytes(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, text)
    with pytest.raises(SpecError, match=f"{SETTING} must be a number of gigabytes such as 4, got"):
        memory_limit()
    monkeypatch.setenv(SETTING, "1.5")
    assert memory_limit() == 1.5 * 2**30


READ = """
import sys, time
from pathlib import Path
from anybit.artifact.plain import read_model_file
from anybit.errors import FileError

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))

warm, path = map(Path, sys.argv[1:])
read_model_file(warm)
Path("/proc/self/clear_refs").write_text("5")
before, start = status("VmRSS"), time.process_time()
try:
    read_model_file(path)
    end = "read"
except FileError as error:
    end = "refused"
print(end, time.process_time() - start, 1024 * (status("VmHWM") - before))
"""


def heavy(path: Path, version: int, kind: type[np.floating[Any]], last: float = 0.0) -> None:
    """Write a model with two matrices of 8 million entries each."""
    weight = np.random.default_rng(0).standard_normal((2896, 2896), np.float32).astype(kind)
    weight[-1, -1] = last
    nodes = [node("MatMul", ["x", "a"], ["h"]), node("Relu", ["h"], ["r"]), node("MatMul", ["r", "b"], ["y"])]
    made = model(nodes, {"a": weight, "b": weight}, ["n", 2896])
    made.opset_import[0].version = version
    for value in (*made.graph.input, *made.graph.output):
        value.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    onnx.save(made, path)


def long_graph(path: Path, count: int) -> None:
    onnx.save(model([node("Relu", ["x"], [f"y{i}" if i else "y"]) for i in range(count)], {}, ["n", 4]), path)


def many_branches(path: Path, count: int) -> None:
    """A chain of nodes with two branches each, and a layer in every one."""
    nodes, value = [node("Greater", ["n", "n"], ["c"])], "x"
    for i in range(count // 2):
        last = "y" if i == count // 2 - 1 else f"if{i}"
        branches = {}
        for way in ("then", "else"):
            made = helper.make_tensor_value_info(f"{way}{i}", FLOAT, None)
            graph = helper.make_graph([node("MatMul", [value, "w"], [made.name])], made.name, [], [made])
            branches[f"{way}_branch"] = graph
        nodes.append(node("If", ["c"], [last], **branches))
        value = last
    onnx.save(model(nodes, {"n": np.float32(1), "w": np.eye(4, dtype=np.float32)}, ["n", 4]), path)


def many_texts(path: Path, *, folded: bool) -> None:
    """A hundred thousand texts, one of which is as long as may be: an array with room for it would take 25 GB."""
    texts = np.array([f"word{i}" for i in range(100_000)], object)
    texts[7] = "x" * LONGEST_TEXT
    words = [node("Identity", ["texts"], ["words"])] if folded else []
    name = "words" if folded else "texts"
    nodes = [node("Gather", [name, "i"], ["one"]), node("Equal", ["one", name], ["same"])]
    nodes += [node("Cast", ["same"], ["f"], to=FLOAT), node("ReduceSum", ["f"], ["s"], keepdims=0)]
    made = model([*words, *nodes, node("Mul", ["x", "s"], ["y"])], {"texts": texts}, ["n", 4])
    made.graph.input.append(helper.make_tensor_value_info("i", INT64, [1]))
    onnx.save(made, path)


FILES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "large": ("read", lambda path: heavy(path, 21, np.float32)),
    "large, operators of an older version": ("read", lambda path: heavy(path, 17, np.float32)),
    "large, half precision": ("read", lambda path: heavy(path, 21, np.float16)),
    "large, not a number": ("refused", lambda path: heavy(path, 21, np.float32, np.nan)),
    "nothing but zeros": ("refused", lambda path: path.write_bytes(bytes(2**25)) and None),
    "as many nodes as may be": ("read", lambda path: long_graph(path, MOST_NODES - 1)),  # an input is one more
    "more": ("refused", lambda path: long_graph(path, MOST_NODES + 1)),
    "as many branches as may be": ("read", lambda path: many_branches(path, MOST_PARTS)),
    "more branches": ("refused", lambda path: many_branches(path, MOST_PARTS + 2)),
    "texts": ("read", lambda path: many_texts(path, folded=False)),
    "texts that are copied": ("refused", lambda path: many_texts(path, folded=True)),
}


@pytest.mark.parametrize("name", FILES)
def test_reading_a_file_costs_no_more_than_its_size(name: str, tmp_path: Path) -> None:
    wanted, write = FILES[name]
    warm, path = tmp_path / "warm.onnx", tmp_path / "m.onnx"
    long_graph(warm, 2)
    write(path)
    done = subprocess.run(
        [sys.executable, "-c", READ, str(warm), str(path)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    end, seconds, rise = done.stdout.split()
    size = path.stat().st_size
    assert end == wanted
    assert float(rise) < 200e6 + 3 * size
    # Of a processor that has nothing else to do; one that others share takes up to three times as long.
    assert float(seconds) < 3 * (1 + 2 * size / 100e6)
