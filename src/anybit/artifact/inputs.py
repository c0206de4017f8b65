"""Inputs that people have: pictures, arrays, and functions that make them, turned into what a network's inputs want.

    images/                 a picture or a folder of them, through the network's preprocessing
    x.npy, x.npz            arrays of any number type, or of strings; the keys of an archive are the names of inputs
    file.py:examples        a function (or a list) that yields arrays, or dicts of arrays by name
    name=WHAT               any of these, or a number, for one of several inputs

The first dimension of an array counts examples, which are fed one by one, unless the file calls it a sequence; an array
with one dimension more than the input has holds whole inputs. Everything may come from strangers, but for functions,
which are the user's own code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from anybit.artifact.arrays import read_array, read_arrays
from anybit.artifact.feeding import Preprocessing
from anybit.artifact.model import entry_type
from anybit.artifact.pictures import PICTURES, read_picture
from anybit.artifact.texts import as_text
from anybit.artifact.values import OPTIONAL, TYPES, as_input, as_value, type_name
from anybit.common.named import by_name, is_code
from anybit.common.text import printable
from anybit.errors import AnybitError, DataError
from anybit.plan.points import Plan

Array = npt.NDArray[Any]
Feed = dict[str, Any]
Read = tuple[str, Callable[[], Array]]
"""One example of one input: what it is called, and what reads it."""

T = TypeVar("T")


@dataclass(frozen=True)
class Input:
    """An input of a network: its name, the kind of numbers it takes (or text), and its shape, 0 where a size is free.

    `usual` is the shape that the network was captured with, where that is known. A `row` is a sequence along its first
    dimension, which then counts no examples. What is no tensor has a `form`, its type as the runtime calls it; kind and
    shape are then those of an array that could hold it.
    """

    name: str
    kind: np.dtype[Any] | None
    shape: tuple[int, ...] | None
    usual: tuple[int, ...] = ()
    row: bool = False
    form: str = ""

    def settle(self, how: Preprocessing) -> Preprocessing:
        """Return how pictures are fed to this input; a size that neither says is that of the capture."""
        return how.settled((not how.size and self.usual) or self.shape or ())

    def __str__(self) -> str:
        sizes = " x ".join(str(size) if size else "any" for size in self.shape or ()) or "one number"
        sizes = "one text" if self.is_text and self.shape == () else sizes
        kind = self.form or ("text" if self.is_text else self.kind)
        return f"input {self.name!r} ({'any shape' if self.shape is None else sizes}, {kind})"

    @property
    def is_text(self) -> bool:
        """Whether it takes text."""
        return self.kind is not None and self.kind.kind == "O"

    @property
    def is_optional(self) -> bool:
        """Whether it may be left out."""
        return self.form.startswith(OPTIONAL)


def inputs_of(graph: onnx.GraphProto, plan: Plan | None = None) -> tuple[Input, ...]:
    """Return the inputs of a graph that are not stored in it; the plan knows the shapes they were captured with."""
    held = {tensor.name for tensor in graph.initializer}
    captured = {a.name: a.shape for a in (plan.activations if plan else ()) if a.kind == "input"}
    found = []
    for value in graph.input:
        tensor, form = entry_type(value.type).tensor_type, type_name(value.type)
        known = tensor.elem_type in _KINDS and "map(" not in form
        kind = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type)) if known else None
        shape = tuple(max(0, dim.dim_value) for dim in tensor.shape.dim) if tensor.HasField("shape") else None
        shape = None if "map(" in form else (0, *shape) if "seq(" in form and shape is not None else shape
        if value.name in held:
            continue
        usual = tuple(size if isinstance(size, int) else 0 for size in captured.get(value.name, ()))
        usual = tuple(a or b for a, b in zip(shape or (), usual, strict=False))
        usual = usual if len(usual) == len(shape or ()) else shape or ()
        first = next(iter(tensor.shape.dim), None)
        row = first is not None and bool(_ROW.search(first.dim_param)) and "seq(" not in form
        found.append(Input(value.name, kind, shape, usual, row, "" if form in TYPES else form))
    return tuple(found)


_ROW = re.compile("seq|length|time|frame|token", re.IGNORECASE)
"""In the names of free sizes: what runs along a sequence."""

_KINDS = {
    TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BOOL, TensorProto.INT8, TensorProto.INT16,
    TensorProto.INT32, TensorProto.INT64, TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64,
    TensorProto.STRING,
}  # fmt: skip


def read_feeds(
    whats: Sequence[str], inputs: Sequence[Input], how: Preprocessing, *, limit: int | None = None
) -> Iterator[tuple[str, Feed]]:
    """Yield examples, each with what it is called and one value for every input, ready to run.

    Args:
        whats: What to read, as the top of this file says; several for one input follow each other.
        inputs: What the network takes.
        how: What is done to pictures.
        limit: How many examples at most; they are then taken evenly.

    Raises:
        DataError: Something is missing, cannot be read, or does not fit; at the latest when its turn comes.
    """
    if not inputs:
        yield "no input", {}
        return
    if not whats:
        raise DataError("no inputs are given; name a folder of pictures, an .npy or .npz file, or file.py:function")
    named = [split_name(what, inputs) for what in whats]
    if all(name is None for name, _ in named):
        feeds: list[tuple[str, Callable[[], Feed]]] = []
        for _, what in named:
            if (made := _function(what)) is not None:
                yield from _made(made, what, inputs, limit)
            else:
                feeds += _whole(what, inputs, how)
        for label, read in evenly(feeds, limit):
            yield label, in_form(read(), inputs)
        return
    if any(name is None for name, _ in named):
        raise DataError(f"some inputs are given by name and some are not; name each as {inputs[0].name}=WHAT")
    yield from _joined([(str(name), what) for name, what in named], inputs, how, limit)


def in_form(feed: Mapping[str, Array], inputs: Sequence[Input]) -> Feed:
    """Return arrays as what inputs take that are no tensors."""
    return {v.name: as_value(feed.get(v.name), v.form) if v.form else feed[v.name] for v in inputs}


def split_name(what: str, inputs: Sequence[Input]) -> tuple[str | None, str]:
    """Return the input that is named in front of a "=", if one is, and the rest."""
    name, equals, rest = what.rpartition("=")
    if not equals or Path(what).exists():
        return None, what
    if name not in {value.name for value in inputs}:
        names = ", ".join(value.name for value in inputs)
        raise DataError(f"{printable(what, 80)}: the network has no input {printable(name, 40)!r}; it has {names}")
    return name, rest


def evenly(values: Sequence[T], limit: int | None) -> Sequence[T]:
    """Return at most so many of the values, spread evenly.

    >>> evenly("abcdefgh", 4)
    ['a', 'c', 'e', 'g']
    """
    if limit is None or len(values) <= limit:
        return values
    return [values[i * len(values) // limit] for i in range(limit)]


def _whole(what: str, inputs: Sequence[Input], how: Preprocessing) -> list[tuple[str, Callable[[], Feed]]]:
    """Return examples of all inputs together, out of files."""
    found: list[tuple[str, Callable[[], Feed]]] = []
    for path in find_files(Path(what)):
        if path.suffix.lower() == ".npz":
            parts = {value.name: read for value, read in _archive(path, inputs)}
            found += (
                _zipped(parts, str(path)) if len(inputs) > 1 else [_alone(inputs[0], r) for r in parts.popitem()[1]]
            )
            continue
        if len(inputs) != 1:
            names = ", ".join(value.name for value in inputs)
            raise DataError(
                f"{path}: the network has {len(inputs)} inputs ({names}); use an .npz file with these keys or name=WHAT"
            )
        found += [_alone(inputs[0], read) for read in _file(path, inputs[0], how)]
    return found


def _alone(value: Input, read: Read) -> tuple[str, Callable[[], Feed]]:
    return read[0], lambda: {value.name: read[1]()}


def _joined(
    named: list[tuple[str, str]], inputs: Sequence[Input], how: Preprocessing, limit: int | None
) -> Iterator[tuple[str, Feed]]:
    """Yield examples of inputs that come from a place each."""
    given = [value for value in inputs if value.name in {name for name, _ in named}]
    if missing := [value.name for value in inputs if value not in given and not value.is_optional]:
        raise DataError(f"input {missing[0]!r} is missing; give it as {missing[0]}=WHAT")
    parts: dict[str, list[Read]] = {}
    for value in given:
        reads: list[Read] = []
        for what in (what for name, what in named if name == value.name):
            made = _function(what)
            if _number(what) is not None and not Path(what).exists():
                reads.append((what, _filled(value, _number(what))))
            elif made is not None:
                reads += [(label, _given(feed[value.name])) for label, feed in _made(made, what, [value], limit)]
            else:
                reads += [read for path in find_files(Path(what)) for read in _file(path, value, how)]
        parts[value.name] = reads
    for label, read in evenly(_zipped(parts, " and ".join(what for _, what in named)), limit):
        yield label, in_form(read(), inputs)


def _given(array: Array) -> Callable[[], Array]:
    return lambda: array


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _filled(value: Input, number: float | None) -> Callable[[], Array]:
    shape = tuple(max(1, size) for size in value.shape or ())
    return lambda: converted(np.full(shape, number), value, str(number))


def _zipped(parts: dict[str, list[Read]], where: str) -> list[tuple[str, Callable[[], Feed]]]:
    """Join the examples of several inputs; one alone goes with all the others."""
    count = max(map(len, parts.values()))
    if wrong := [f"{name} {len(reads)}" for name, reads in parts.items() if len(reads) not in (1, count)]:
        raise DataError(f"{where}: inputs must have as many examples each, or one; got {count} of one and {wrong[0]}")

    def feed(i: int) -> Callable[[], Feed]:
        return lambda: {name: reads[i if len(reads) > 1 else 0][1]() for name, reads in parts.items()}

    longest = max(parts.values(), key=len)
    return [(longest[i][0], feed(i)) for i in range(count)]


# Files


def find_files(path: Path) -> list[Path]:
    """Return the pictures and arrays in a folder, sorted by name, or the one file that `path` is."""
    endings = {*PICTURES, ".npy", ".npz"}
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; pictures, .npy, .npz, or file.py:function are expected here")
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    found = [p for p in files if p.suffix.lower() in endings]
    if not found:
        raise DataError(f"{path}: holds no picture ({', '.join(sorted(PICTURES))}) and no .npy or .npz file")
    return found


def _file(path: Path, value: Input, how: Preprocessing) -> list[Read]:
    """Return the examples of one input in one file."""
    if path.suffix.lower() == ".npz":
        ((_, reads),) = _archive(path, [value])
        return reads
    if path.suffix.lower() == ".npy":
        return examples(read_array(path), value, str(path))
    return [(str(path), lambda: _picture(path, value, how))]


def _archive(path: Path, inputs: Sequence[Input]) -> Iterator[tuple[Input, list[Read]]]:
    """Yield each input with its examples in an .npz file; for a lone input, keys may be anything."""
    arrays = read_arrays(path)
    names = {value.name for value in inputs if not value.is_optional or value.name in arrays}
    if len(inputs) == 1 and not names & set(arrays):
        yield (
            inputs[0],
            [r for key in arrays for r in examples(arrays[key], inputs[0], f"{path}: {printable(key, 40)}")],
        )
        return
    if missing := sorted(names - set(arrays)) or [value.name for value in inputs if not names]:
        held = ", ".join(printable(key, 40) for key in list(arrays)[:9])
        raise DataError(f"{path}: has no array {missing[0]!r}; its keys must be the names of the inputs, got {held}")
    for value in (value for value in inputs if value.name in names):
        yield value, examples(arrays[value.name], value, f"{path}: {value.name}")


def examples(array: Array, value: Input, where: str) -> list[Read]:
    """Return the examples in an array: along its first dimension, or the array itself where it is one input."""
    rank = array.ndim if value.shape is None else len(value.shape)
    first = 0 if not value.shape else value.shape[0]
    if array.ndim == rank + 1:
        parts: list[Any] = [np.s_[i] for i in range(len(array))]
    elif array.ndim == rank and rank > 0 and value.shape is not None and (rank > 1 or first) and not value.row:
        step = max(1, first)
        parts = [np.s_[i : i + step] for i in range(0, len(array), step)]
    else:
        parts = [np.s_[...] if array.ndim == rank else None]
    if not parts or array.size == 0 or not _fits(array[parts[-1]].shape, value.shape):
        raise DataError(f"{where}: does not fit {value}; got {list(array.shape)} {printable(array.dtype, 40)}")

    def read(part: Any) -> Callable[[], Array]:
        return lambda: converted(array[part], value, where)

    names = [where] if len(parts) == 1 else [f"{where}[{i}]" for i in range(len(parts))]
    return [(name, read(part)) for name, part in zip(names, parts, strict=True)]


def _fits(found: Sequence[int], shape: Sequence[int] | None) -> bool:
    """Tell whether a shape is the one that is wanted, in which 0 stands for any size."""
    if shape is None:
        return True
    return len(found) == len(shape) and all(size in (0, own) for size, own in zip(shape, found, strict=True))


def converted(array: Array, value: Input, where: str) -> Array:
    """Return numbers in the type that an input takes, if none of them changes by it but for rounding; text as it is."""
    if value.kind is None:
        raise DataError(f"{value} is read from no file; name a function that yields it, file.py:function")
    if value.is_text:
        try:
            return as_text(array)
        except TypeError as error:
            advice = "save an array of strings, such as np.array(['a', 'b'])"
            raise DataError(f"{where}: text is expected, got {printable(error, 60)}; {advice}") from error
    if array.dtype.kind not in "fiub":
        raise DataError(f"{where}: numbers are expected, got {printable(array.dtype, 40)}")
    low, high = float(array.min()), float(array.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise DataError(f"{where}: has NaN or infinite entries; save finite numbers")
    if value.kind.kind == "f":
        most = float(np.finfo(value.kind).max)
        ends, whole = (-most, most), True
    else:
        ends = (0, 1) if value.kind.kind == "b" else (np.iinfo(value.kind).min, np.iinfo(value.kind).max)
        whole = array.dtype.kind != "f" or bool((array == np.rint(array)).all())
    if not whole or low < ends[0] or high > ends[1]:
        got = f"{low:g} to {high:g}" if whole else "fractions"
        raise DataError(f"{where}: input {value.name!r} takes {value.kind}, from {ends[0]:g} to {ends[1]:g}; got {got}")
    return np.asarray(array, value.kind, order="C")  # np.ascontiguousarray would make one number a list


def _picture(path: Path, value: Input, how: Preprocessing) -> Array:
    try:
        return fed(how, read_picture(path), value)
    except (DataError, OSError) as error:
        raise DataError(f"{path}: {printable(getattr(error, 'strerror', None) or error, 300)}") from error


def fed(how: Preprocessing, picture: Any, value: Input) -> Array:
    """Return a picture as one input of a network."""
    try:
        settled = value.settle(how)
    except DataError as error:
        raise DataError(f"the network {error}") from error
    if value.kind is None or value.kind.kind in "bO":
        raise DataError(f"{value} takes no pictures; use .npy files")
    if value.kind.kind == "f":
        return settled(picture).astype(value.kind, copy=False)
    if settled.scale != "0-255" or settled.mean != (0.0,) or settled.std != (1.0,):
        raise DataError(f"{value} takes whole numbers; say --preprocess 0-255")
    return settled(picture).astype(value.kind)


# Functions


def _function(what: str) -> Any:
    """Return the function, or list, that `module:name` or `file.py:name` stands for; None for anything else."""
    if Path(what).exists() or not is_code(what):
        return None
    return by_name(what)


def _made(source: Any, what: str, inputs: Sequence[Input], limit: int | None) -> Iterator[tuple[str, Feed]]:
    """Yield what the user's own code makes: whole inputs."""
    try:
        values: Iterable[Any] = source() if callable(source) else source
        for i, value in enumerate(islice(values, limit)):
            yield f"{what}[{i}]", _as_feed(value, inputs, f"{what}[{i}]")
    except AnybitError:
        raise
    except Exception as error:
        raise DataError(f"{what}: raised {type(error).__name__}: {printable(error, 200)}") from error


def _as_feed(value: Any, inputs: Sequence[Input], where: str) -> Feed:
    names = [entry.name for entry in inputs]
    given = value if isinstance(value, Mapping) else {names[0]: value} if len(names) == 1 else {}
    text = isinstance(value, str) and inputs[0].is_text
    needed = {entry.name for entry in inputs if not entry.is_optional}
    if not needed <= set(given) or (isinstance(value, str | bytes | tuple) and not text):
        got = f"a dict of {', '.join(map(str, value))}" if isinstance(value, Mapping) else f"a {type(value).__name__}"
        wanted = f"a dict of {', '.join(names)}" + (" or an array" if len(names) == 1 else "")
        raise DataError(f"{where}: must be {wanted}, got {printable(got, 120)}")
    found = {}
    for entry in inputs:
        if entry.form:
            found[entry.name] = as_input(given.get(entry.name), f"{where}: {entry.name}", entry.form)
            continue
        array = np.asarray(given[entry.name])
        if entry.shape and array.ndim == len(entry.shape) - 1:
            array = array[None]
        if array.size == 0 or not _fits(array.shape, entry.shape):
            raise DataError(f"{where}: does not fit {entry}; got {list(array.shape)}")
        found[entry.name] = converted(array, entry, where)
    return found
