"""Inputs that nobody brought: of which size they are, and what lies in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from stranger_builder import Net

from anybit.artifact.made_up import BYTES, CENTRED, made_up_inputs, pictures_of_bytes, sound
from anybit.artifact.texts import PLAIN, Words, words_of
from anybit.artifact.values import Kind
from anybit.graph.from_onnx import read_onnx


class Engine:
    """Says what it takes, and takes it."""

    def __init__(self, **inputs: tuple[str, Sequence[int | str]]) -> None:
        self.inputs = [Kind(name, f"tensor({kind})", [*shape]) for name, (kind, shape) in inputs.items()]

    def run(self, *given: Any) -> list[Any]:
        return []


def made(engine: Engine, **settings: Any) -> dict[str, Any]:
    return made_up_inputs(engine, engine.inputs, ids=50, interval={}, where="file", **settings)[0]


def test_floating_point_numbers_of_free_length_are_sound() -> None:
    feed = made(Engine(audio=("float", [1, "samples"]), fmin=("float", []), fmax=("float", [])))
    assert feed["audio"].shape == (1, 4096)
    assert (float(feed["fmin"]), float(feed["fmax"])) == (0.0, 8000.0)


def test_letters_stay_whole_numbers_whatever_their_type() -> None:
    engine = Engine(letters=("float", ["n", "length"]))
    feed = made(engine, whole={"letters"})
    assert feed["letters"].shape == (1, 32)
    assert feed["letters"].dtype == np.float32
    assert set(feed["letters"].ravel()) <= set(map(float, range(50)))
    assert len(set(feed["letters"].ravel())) > 5


def test_sound_falls_silent_and_is_loud_elsewhere() -> None:
    waves = [2 * sound((1, 8192), np.random.default_rng(seed)).ravel() - 1 for seed in range(8)]
    parts = [np.sqrt(np.square(wave.reshape(-1, 256)).mean(1)) for wave in waves]
    assert min(float(part.min()) for part in parts) < 1e-3
    assert max(float(part.max()) for part in parts) > 0.05


def test_what_another_network_made_is_no_sound() -> None:
    """A decoder: sound would leave most of the interval empty, and what it really gets fills it."""
    inputs = {"encoder_outputs": ("float", [1, "length", 256]), "hidden": ("float", [1, 1, 256])}
    feed = made(Engine(letter=("int32", [1, 1]), **inputs))
    assert all(np.ptp(np.quantile(feed[name], (0.01, 0.99))) > 0.5 for name in inputs)


class InFours(Engine):
    """Wants an input together with three mirror images."""

    def run(self, outputs: Any, feed: dict[str, Any], *given: Any) -> list[Any]:
        if any(len(value) % 4 for value in feed.values()):
            raise RuntimeError("cannot be reshaped")
        return []


def test_a_batch_is_tried_where_one_input_does_not_run() -> None:
    feed = made(InFours(picture=("float", ["a", 1, 32, 32]), spectrum=("float", ["b", 1, 1, 100])))
    assert feed["picture"].shape == (4, 1, 32, 32)
    assert feed["spectrum"].shape == (4, 1, 1, 100)


def taken_off(net: Net, bias: Any, seen: float = 1.0) -> dict[str, Any]:
    """Say where the pictures lie of a convolution with a bias, and a batch norm that has seen values of a size."""
    y = net.node("Conv", net.x(1, 3, 8, 8), net.hold(WEIGHT), net.hold(bias.astype(np.float32)))
    held = (np.ones(8), np.zeros(8), np.zeros(8), np.full(8, seen**2))
    y = net.node("BatchNormalization", net.node("LeakyRelu", y), *(net.hold(v.astype(np.float32)) for v in held))
    net.head(y, 8)
    model = net.model()
    return pictures_of_bytes(read_onnx(model, {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}))


WEIGHT = np.random.default_rng(0).normal(0.1, 0.3, (8, 3, 3, 3)).astype(np.float32)
SUMS, MOST = WEIGHT.sum((1, 2, 3)), np.abs(WEIGHT).sum((1, 2, 3))
SIGNS = np.array([1, -1] * 4)


@pytest.mark.parametrize(
    ("bias", "seen", "interval"),
    [
        (-0.5 * SUMS, 3.0, None),
        (-120 * SUMS, 3.0, BYTES),
        (20 * MOST * SIGNS, 3.0, CENTRED),
        (0 * SUMS, 1000.0, BYTES),
    ],
    ids=["0 to 1", "a bias against bright pictures", "a mean taken off", "a batch norm behind"],
)
def test_a_network_that_expects_large_numbers_takes_bytes(bias: Any, seen: float, interval: Any) -> None:
    assert taken_off(Net(0), bias, seen).get("x") == interval


# Text


def test_text_is_made_of_words_that_the_network_knows() -> None:
    engine = Engine(words=("string", ["n", "length"]), other=("string", [1]))
    feed = made(engine, words={"words": Words(("ant", "bee"))})
    assert feed["words"].shape == (1, 32)
    assert set(feed["words"].ravel()) == {"ant", "bee"}
    assert set(feed["other"].ravel()) <= set(PLAIN)
    assert made(Engine(sentence=("string", ["words"])))["sentence"].shape == (32,)


def text_net(*names: str) -> tuple[Net, list[str]]:
    net = Net(0, opset=20, ir=9, ml=4)
    return net, [net.input(name, np.array(["a"]), ["n"]) for name in names]


def test_each_input_gets_the_words_of_what_reads_it() -> None:
    net, (colour, size, split, number, plain) = text_net("colour", "size", "split", "number", "plain")
    net.node("LabelEncoder", colour, domain="ai.onnx.ml", keys_strings=["red", "blue"], values_int64s=[0, 1])
    clean = net.node("StringNormalizer", net.node("Identity", size), case_change_action="LOWER", stopwords=["oh"])
    net.node("Equal", clean, net.hold(np.array(["small", "large"], object)))
    parts, _ = net.node("StringSplit", split, delimiter=";", n=2)
    keys = helper.make_tensor("keys", TensorProto.STRING, [2], [b"x", b"y"])
    values = helper.make_tensor("values", TensorProto.INT64, [2], [0, 1])
    net.node("LabelEncoder", parts, domain="ai.onnx.ml", keys_tensor=keys, values_tensor=values)
    net.node("Cast", number, to=TensorProto.FLOAT)
    net.node("Identity", plain)
    found = words_of(net.graph())
    assert found["colour"].known == ("red", "blue")
    assert found["size"].known == ("small", "large")
    assert (found["split"].known, found["split"].between) == (("x", "y"), ";")
    assert [float(text) for text in found["number"].known] == [0, 1, 2, 3]
    assert {"red", "small", "oh", "x"} <= set(found["plain"].known)  # whatever the graph knows


def test_a_graph_without_words_and_one_with_a_million() -> None:
    net, (words,) = text_net("words")
    net.node("Identity", words)
    assert words_of(net.graph())["words"].known == PLAIN
    known = [f"w{i}" for i in range(30_000)]
    net.node("CategoryMapper", words, domain="ai.onnx.ml", cats_strings=[*known, "", "x" * 999], cats_int64s=[0])
    drawn = words_of(net.graph())["words"].known
    assert len(drawn) == 10_000
    assert set(drawn) <= set(known)
    assert words_of(Net(0).graph()) == {}
