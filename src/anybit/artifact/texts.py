"""Text as input, as output and inside of a graph: arrays of strings, and the words that a graph itself knows.

On the way to the network text lies in arrays of Python strings: ONNX Runtime crashes on arrays of characters that are
none, as a stranger's .npy file may hold them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import NodeProto, TensorProto

from anybit.artifact.model import all_graphs, entry_type
from anybit.errors import DataError
from anybit.graph.onnx_nodes import attributes

Array = npt.NDArray[Any]

TEXT = "tensor(string)"
"""What ONNX Runtime calls text."""

MOST_BYTES = 2**30
"""A file of text has as many characters for each entry as the longest one."""

MOST_WORDS, LONGEST_WORD, SENTENCE = 10_000, 200, 12
"""Of the words of a graph, how many are drawn from and how long; and how many make up a text that is cut into words."""

NO_CHARACTERS = "characters that no alphabet has"

PLAIN = ("a", "the", "one", "2", "word", "Text")
"""What is drawn from where a graph knows no word."""
NUMBERS = ("0", "1", "2", "3")
"""The same where numbers are meant."""


def as_text(x: npt.ArrayLike) -> Array:
    """Return text as an array of Python strings.

    >>> as_text([["a", "bc"]]).tolist(), as_text("a").shape
    ([['a', 'bc']], ())

    Raises:
        TypeError: These are no strings, or some that are no text.
    """
    array = np.asarray(x)
    if array.dtype.kind == "U":
        codes = np.frombuffer(array.tobytes(), np.dtype(np.uint32).newbyteorder(array.dtype.byteorder))
        if codes.size and codes.max() > sys.maxunicode:
            raise TypeError(NO_CHARACTERS)
        array = array.astype(object)
    if array.dtype.kind != "O":
        raise TypeError(str(array.dtype))
    if not all(isinstance(text, str) for text in array.flat):
        raise TypeError("objects that are no strings")
    try:
        "".join(array.flat).encode()
    except UnicodeEncodeError:  # halves of characters
        raise TypeError(NO_CHARACTERS) from None
    return array


def storable(array: Array) -> Array:
    """Return an array in a form that files hold without pickle: text as characters, all else as it is.

    >>> storable(np.array(["a", "bc"], object)).dtype.str[1:], storable(np.ones(2)).dtype.str[1:]
    ('U2', 'f8')
    """
    if array.dtype.kind != "O":
        return array
    longest = max((len(text) for text in array.flat), default=0)
    if 4 * longest * array.size > MOST_BYTES:
        raise DataError(f"{array.size} texts of up to {longest} characters are too long for a file")
    return array.astype(np.str_)


# Words


class Words:
    """What the texts of one input are made up of: one word each, or several with something between them."""

    def __init__(self, known: tuple[str, ...] = PLAIN, between: str = "") -> None:
        self.known, self.between = known, between

    def draw(self, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
        """Return made-up texts.

        >>> Words(("a",)).draw((1, 2), np.random.default_rng(0)).tolist()
        [['a', 'a']]
        >>> Words(("a",), ",").draw((1,), np.random.default_rng(0)).tolist()
        ['a,a,a,a,a,a,a,a,a,a,a,a']
        """
        words = np.array(self.known, object)
        if not self.between:
            return np.asarray(words[rng.integers(0, len(words), shape)], object)
        several = words[rng.integers(0, len(words), (*shape, SENTENCE))]
        return np.asarray(np.apply_along_axis(self.between.join, -1, several), object)


ENDS: dict[str, tuple[str, ...]] = {
    "LabelEncoder": ("keys_", "classes_strings"), "CategoryMapper": ("cats_strings",), "Equal": (), "Cast": (),
    "OneHotEncoder": ("cats_strings",), "TfIdfVectorizer": ("pool_strings",),
    "DictVectorizer": ("string_vocabulary", "int64_vocabulary"),
}  # fmt: skip
"""Operators that make something else of text, and how attributes begin that tell which words they know."""

CUTTING = {"StringSplit": "delimiter", "Tokenizer": "separators"}
"""Operators that cut a text into words, and the attribute that says where."""


def words_of(graph: onnx.GraphProto) -> dict[str, Words]:
    """Return for each text input the words that the graph can tell apart there, all that it knows, or plain ones.

    Those of a map are its keys.
    """
    held = {tensor.name: tensor for part in all_graphs(graph) for tensor in part.initializer}
    kinds = {v.name: v.type.map_type.key_type or entry_type(v.type).tensor_type.elem_type for v in graph.input}
    maps = {v.name for v in graph.input if v.type.HasField("map_type")}
    inputs = [n for n, kind in kinds.items() if (kind == TensorProto.STRING or n in maps) and n not in held]
    if not inputs:
        return {}
    texts = {name: t for name, t in held.items() if t.data_type == TensorProto.STRING}
    every = tuple(_few(word for node in graph.node for word in _words_in(node, ("",), texts)))
    usual = {name: every or PLAIN if kinds[name] == TensorProto.STRING else NUMBERS for name in inputs}
    return {name: _words_at(graph, name, texts, usual[name]) for name in inputs}


def _words_at(graph: onnx.GraphProto, name: str, texts: Mapping[str, TensorProto], usual: tuple[str, ...]) -> Words:
    reached, between, found = {name}, "", list[str]()
    for node in graph.node:
        if reached.isdisjoint(node.input):
            continue
        if node.op_type in ("Cast", "CastMap"):  # to a number, most likely
            found += NUMBERS
        elif node.op_type in ENDS:
            found += _words_in(node, ENDS[node.op_type], texts)
        else:
            reached.update(node.output)
        if node.op_type in CUTTING:
            between = _separator(attributes(node).get(CUTTING[node.op_type]))
    return Words(tuple(_few(iter(found))) or usual, between)


def _separator(given: Any) -> str:
    """Return what stands between words, as an operator says it: a text, several, or nothing for blanks."""
    first = given[0] if isinstance(given, list) and given else given
    return first.decode("utf-8", "ignore") if isinstance(first, bytes) and first else " "


def _words_in(node: NodeProto, starts: tuple[str, ...], texts: Mapping[str, TensorProto]) -> Iterator[str]:
    """Yield the words that a node holds in attributes of these names, or gets from constants."""
    for attribute in node.attribute:
        if attribute.name.startswith(starts):
            tensor = attribute.t if attribute.HasField("t") else TensorProto()
            yield from map(str, attribute.ints if attribute.name == "int64_vocabulary" else ())
            yield from (raw.decode("utf-8", "ignore") for raw in (*attribute.strings, *tensor.string_data))
    for name in node.input:
        yield from (raw.decode("utf-8", "ignore") for raw in texts.get(name, TensorProto()).string_data)


def _few(words: Iterator[str]) -> list[str]:
    """Return some of the words, spread evenly, each once."""
    known = list(dict.fromkeys(word for word in words if 0 < len(word) <= LONGEST_WORD))
    return known[:: -(-len(known) // MOST_WORDS)] if known else []
