"""Graphs that take text, say text, or hand values around in sequences."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper
from stranger_builder import Cases, Net

TEXTS = Cases()
ML = "ai.onnx.ml"
WORDS = ["ant", "bee", "cat", "dog", "eel", "été"]


def vectors(net: Net, words: str) -> str:
    """From words to the mean of their vectors; what is no word has a vector too."""
    numbers = list(range(1, len(WORDS) + 1))
    ids = net.node("LabelEncoder", words, domain=ML, keys_strings=WORDS, values_int64s=numbers, default_int64=0)
    table = net.hold(net.draw(len(WORDS) + 1, 8, spread=1.0))
    mean: str = net.node("ReduceMean", net.node("Gather", table, ids), axes=[1], keepdims=0)
    return mean


@TEXTS.add("words as text, looked up by number in a table of vectors", ml=3)
def text_in(net: Net) -> None:
    words = net.input("words", np.array([["ant", "cat", "bee"], ["eel", "yak", "été"]]), ["n", "length"])
    net.output(net.dense(net.node("Relu", net.dense(vectors(net, words), 8, 12)), 12, 4))


@TEXTS.add("a classifier that takes text and numbers and says the names of classes, with their scores", ml=3)
def text_in_and_out(net: Net) -> None:
    words = net.input("words", np.array([["ant", "cat", "bee"], ["eel", "yak", "été"]]), ["n", "length"])
    both = net.node("Concat", vectors(net, words), net.x(2, 6, declared=["n", 6]), axis=1)
    scores = net.node("Softmax", net.dense(net.node("Relu", net.dense(both, 14, 12)), 12, 3), axis=1)
    best = net.node("ArgMax", scores, axis=1, keepdims=0)
    names = {"keys_int64s": [0, 1, 2], "values_strings": ["good", "bad\x1b[2J", "ugly"]}
    net.output(net.node("LabelEncoder", best, domain=ML, **names), None, TensorProto.STRING)
    net.output(scores)


@TEXTS.add("sentences that are counted by word, lower case or not, without stop words")
def sentence_counted(net: Net) -> None:
    words = net.input("sentence", np.array(["The", "Cat", "and", "dog", "cat"]), ["words"])
    words = net.node("StringNormalizer", words, case_change_action="LOWER", locale="C", stopwords=["the", "and"])
    counts = net.node(
        "TfIdfVectorizer", words, mode="TF", min_gram_length=1, max_gram_length=1, max_skip_count=0,
        ngram_counts=[0], ngram_indexes=list(range(6)), pool_strings=WORDS,
    )  # fmt: skip
    row = net.node("Reshape", counts, net.hold(np.array([1, 6])))
    net.output(net.dense(net.node("Relu", net.dense(row, 6, 12)), 12, 4))


@TEXTS.add("text compared with constants of text, in an initializer and in nodes", opset=19, ir=9)
def text_constants(net: Net) -> None:
    words = net.input("words", np.array([["ant"], ["dog"], ["yak"]]), ["n", 1])
    some = net.node("Constant", value_strings=WORDS[3:])
    known = net.node("Concat", net.hold(np.array(WORDS[:3], object)), some, axis=0)
    same = net.node("Cast", net.node("Equal", words, known), to=TensorProto.FLOAT)
    net.output(net.dense(net.node("Relu", net.dense(same, 6, 12)), 12, 4))


@TEXTS.add("numbers in, text out and nothing else", ml=3)
def text_out(net: Net) -> None:
    y = net.dense(net.node("Relu", net.dense(net.x(4, 16, declared=["n", 16]), 16, 12)), 12, 3)
    best = net.node("ArgMax", net.probe(y), axis=1, keepdims=0)
    names = {"keys_int64s": [0, 1, 2], "values_strings": ["red", "green", "blue"]}
    net.output(net.node("LabelEncoder", best, domain=ML, **names), None, TensorProto.STRING)


@TEXTS.add("a sequence of tensors inside, which begins empty, and an optional value")
def sequence_inside(net: Net) -> None:
    x = net.x(4, 16)
    list_ = net.node("SequenceInsert", net.node("SequenceEmpty"), net.node("Relu", net.dense(x, 16, 6)))
    list_ = net.node("SequenceInsert", list_, net.node("OptionalGetElement", net.node("Optional", x)))
    net.output(net.dense(net.node("ConcatFromSequence", list_, axis=1), 22, 5))


@TEXTS.add("a sequence of tensors as output")
def sequence_out(net: Net) -> None:
    y = net.dense(net.node("Relu", net.dense(net.x(4, 16, declared=["n", 16]), 16, 12)), 12, 6)
    parts = net.node("SplitToSequence", y, net.hold(np.array([2, 4])), axis=1)
    net.outputs.append(helper.make_tensor_sequence_value_info(parts, TensorProto.FLOAT, None))
