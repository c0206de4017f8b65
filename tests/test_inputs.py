"""What people have as inputs: files, archives, functions, by name or not, and what is refused in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from anybit.artifact.feeding import PRESETS, Preprocessing
from anybit.artifact.inputs import Input, converted, evenly, examples, inputs_of, read_feeds
from anybit.errors import AnybitError, DataError

FLOAT, INT32, INT64 = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.int64)
PICTURE = Input("image", FLOAT, (0, 3, 8, 8))
SPEECH = [Input("input", FLOAT, (0, 0)), Input("state", FLOAT, (2, 0, 4)), Input("sr", INT64, ())]


def read(*whats: object, takes: Sequence[Input], limit: int | None = None) -> list[tuple[str, dict[str, Any]]]:
    return list(read_feeds([str(what) for what in whats], takes, Preprocessing(), limit=limit))


# Arrays


@pytest.mark.parametrize(
    ("shape", "found", "count", "each"),
    [
        ((0, 5), (7, 5), 7, (1, 5)),
        ((0, 5), (5,), 1, (1, 5)),
        ((0, 5), (3, 2, 5), 3, (2, 5)),
        ((4, 5), (8, 5), 2, (4, 5)),
        ((2, 0, 4), (2, 1, 4), 1, (2, 1, 4)),
        ((2, 0, 4), (6, 2, 1, 4), 6, (2, 1, 4)),
        ((0,), (9,), 1, (9,)),
        ((0,), (3, 9), 3, (9,)),
        ((1,), (3,), 3, (1,)),
        ((), (), 1, ()),
        ((), (3,), 3, ()),
        (None, (3, 4), 1, (3, 4)),
    ],
)
def test_the_first_dimension_counts_examples(
    shape: tuple[int, ...] | None, found: tuple[int, ...], count: int, each: tuple[int, ...]
) -> None:
    array = np.arange(np.prod(found, dtype=int)).reshape(found)
    got = [read() for _, read in examples(array, Input("x", FLOAT, shape), "a.npy")]
    assert (len(got), {x.shape for x in got}) == (count, {each})
    assert np.array_equal(np.concatenate([x.ravel() for x in got]), array.ravel())


@pytest.mark.parametrize(("first", "count"), [("seq_len", 1), ("num_frames", 1), ("batch_size", 7), ("N", 7)])
def test_a_sequence_is_one_example(first: str, count: int) -> None:
    """Windows of one sound, say, with a state that goes on from one to the next."""
    x, h = (helper.make_tensor_value_info(n, 1, shape) for n, shape in (("x", [first, 5]), ("h", [1, 1, 3])))
    windows, state = inputs_of(helper.make_graph([], "g", [x, h], []))
    assert len(examples(np.zeros((7, 5)), windows, "a.npy")) == count
    assert len(examples(np.zeros((2, 7, 5)), windows, "a.npy")) == 2
    assert len(examples(np.zeros((1, 1, 3)), state, "a.npy")) == 1


@pytest.mark.parametrize(("shape", "found"), [((0, 5), (7, 4)), ((4, 5), (6, 5)), ((0, 5), (0, 5)), ((0, 5), ())])
def test_arrays_of_another_shape_are_refused(shape: tuple[int, ...], found: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=r"a\.npy: does not fit input 'x' "):
        examples(np.zeros(found), Input("x", FLOAT, shape), "a.npy")


NUMBERS = [np.float16, np.float32, np.float64, np.int8, np.uint8, np.int32, np.int64, np.uint16, np.bool_]


@given(
    have=st.sampled_from(NUMBERS), want=st.sampled_from(NUMBERS), values=st.lists(st.integers(0, 1), min_size=1),
)  # fmt: skip
def test_any_number_type_becomes_any_other(have: Any, want: Any, values: list[int]) -> None:
    got = converted(np.array(values, have), Input("x", np.dtype(want), (0,)), "a.npy")
    assert got.dtype == want
    assert got.tolist() == values


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        ([0.5], INT32, "takes int32.*got fractions"),
        ([3e9], INT32, "takes int32, from -2.*e.09 to .*got 3e.09 to 3e.09"),
        ([-1], np.dtype(np.uint8), "takes uint8, from 0 to 255; got -1 to -1"),
        ([2], np.dtype(np.bool_), "takes bool, from 0 to 1; got 2 to 2"),
        ([1e300], FLOAT, "takes float32, from .*; got 1e.300"),
        ([np.nan], FLOAT, "NaN or infinite"),
        ([np.inf], INT32, "NaN or infinite"),
        ([1j], FLOAT, "numbers are expected, got complex128"),
        (["a"], FLOAT, "numbers are expected"),
    ],
)
def test_numbers_that_would_change_are_refused(values: list[Any], kind: np.dtype[Any], message: str) -> None:
    with pytest.raises(DataError, match=f"^a.npy: .*{message}"):
        converted(np.array(values), Input("x", kind, (0,)), "a.npy")


def test_values_of_a_type_that_nothing_is_read_as() -> None:
    with pytest.raises(DataError, match="is read from no file; name a function"):
        converted(np.zeros(1), Input("x", None, (0,)), "a.npy")


# Archives and several inputs


def test_the_keys_of_an_archive_are_the_inputs(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, input=np.ones((3, 16)), state=np.zeros((2, 1, 4)), sr=16000.0, more=np.zeros(2))
    found = read(path, takes=SPEECH)
    assert len(found) == 3
    for _, feed in found:
        assert {name: (x.shape, x.dtype) for name, x in feed.items()} == {
            "input": ((1, 16), FLOAT), "state": ((2, 1, 4), FLOAT), "sr": ((), INT64),
        }  # fmt: skip
        assert feed["sr"] == 16000
    np.savez(path, input=np.ones((3, 16)), sr=1)
    with pytest.raises(DataError, match=r"a\.npz: has no array 'state'; .* got input, sr"):
        read(path, takes=SPEECH)
    np.savez(path, input=np.ones((3, 16)), state=np.zeros((2, 1, 4)), sr=[1, 2])
    with pytest.raises(DataError, match="as many examples each, or one; got 3 of one and sr 2"):
        read(path, takes=SPEECH)


def test_an_archive_for_one_input_may_have_any_keys_and_sizes(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", *(np.ones((1, n)) for n in (4, 9, 2)))
    found = read(tmp_path / "a.npz", takes=[Input("x", FLOAT, (0, 0))])
    assert [feed["x"].shape for _, feed in found] == [(1, 4), (1, 9), (1, 2)]


def test_inputs_by_name(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(6).reshape(3, 2))
    np.save(tmp_path / "b=c.npy", np.arange(6).reshape(3, 2))
    found = read(f"input={tmp_path / 'a.npy'}", "state=0.5", "sr=16000", takes=SPEECH)
    assert [feed["input"].tolist() for _, feed in found] == [[[0, 1]], [[2, 3]], [[4, 5]]]
    assert all(feed["state"].tolist() == np.full((2, 1, 4), 0.5).tolist() and feed["sr"] == 16000 for _, feed in found)
    assert len(read(tmp_path / "b=c.npy", takes=SPEECH[:1])) == 3  # a file may be called so
    for whats, message in {
        ("input=1", "sr=1"): "input 'state' is missing; give it as state=WHAT",
        ("inputs=1",): "no input 'inputs'; it has input, state, sr",
        ("input=1", "gone.npy"): "some inputs are given by name and some are not",
        (str(tmp_path / "a.npy"),): r"the network has 3 inputs \(input, state, sr\); use an .npz file",
        ("input=1", "state=0", "sr=0.5"): "'sr' takes int64.*fractions",
    }.items():
        with pytest.raises(DataError, match=message):
            read(*whats, takes=SPEECH)
    with pytest.raises(DataError, match="no inputs are given"):
        read(takes=SPEECH)


# Functions


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "my_examples.py"
    path.write_text(
        "import numpy as np\n"
        "def endless():\n    while True:\n"
        "        yield {'input': np.ones((1, 3)), 'state': np.zeros((2, 1, 4)), 'sr': 8000}\n"
        "def plain():\n    for n in (3, 5):\n        yield np.ones(n)\n"
        "def broken():\n    yield {'input': np.ones((1, 3))}\n"
        "def pairs():\n    yield np.ones(3), 1\n"
        "def boom():\n    raise RuntimeError('no\\nsuch disk')\n"
        "def empty():\n    return []\n"
        "some = [np.ones((2, 3))]\n"
        "seven = 7\n"
    )
    monkeypatch.chdir(tmp_path)
    return path


def test_functions_make_inputs(code: Path) -> None:
    found = read(f"{code}:endless", takes=SPEECH, limit=4)
    assert [label for label, _ in found] == [f"{code}:endless[{i}]" for i in range(4)]
    assert found[0][1]["sr"].dtype == INT64
    lone = SPEECH[:1]
    assert [feed["input"].shape for _, feed in read("my_examples:plain", takes=lone)] == [(1, 3), (1, 5)]
    assert [feed["input"].shape for _, feed in read("my_examples.py:some", takes=lone)] == [(2, 3)]
    named = read("input=my_examples:plain", "state=0", "sr=1", takes=SPEECH)
    assert [feed["input"].shape for _, feed in named] == [(1, 3), (1, 5)]
    assert read("my_examples:empty", takes=lone) == []


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("my_examples:broken", "must be a dict of input, state, sr, got a dict of input"),
        ("my_examples:plain", "must be a dict of input, state, sr, got a ndarray"),
        ("my_examples:boom", "raised RuntimeError: no such disk"),
        ("my_examples:gone", "my_examples has no 'gone'"),
        ("my_examples:seven", "raised TypeError"),
        ("nowhere:f", "there is no module 'nowhere' here"),
        ("nowhere.py:f", r"nowhere\.py: no such file"),
    ],
)
def test_functions_that_do_not_work(code: Path, what: str, message: str) -> None:
    with pytest.raises(AnybitError, match=message) as caught:
        read(what, takes=SPEECH)
    assert len(str(caught.value).splitlines()) == 1


def test_a_pair_with_a_label_is_no_input(code: Path) -> None:
    with pytest.raises(DataError, match="must be a dict of input or an array, got a tuple"):
        read("my_examples:pairs", takes=SPEECH[:1])


# Text

TEXT = Input("words", np.dtype(object), (0, 0))


def test_text_is_read_as_it_is(tmp_path: Path) -> None:
    words = np.array([["ant", "été"], ["\U0001f600", ""]])
    np.save(tmp_path / "a.npy", words)
    np.savez(tmp_path / "b.npz", words=words, sr=np.array(8000))
    np.save(tmp_path / "c.npy", words.astype(words.dtype.newbyteorder(">")))
    for what, takes in (("a.npy", [TEXT]), ("b.npz", [TEXT, SPEECH[2]]), ("c.npy", [TEXT])):
        found = [feed["words"] for _, feed in read(tmp_path / what, takes=takes)]
        assert [x.tolist() for x in found] == [[row] for row in words.tolist()]
        assert {x.dtype.kind for x in found} == {"O"}
    assert str(TEXT) == "input 'words' (any x any, text)"
    assert str(Input("word", np.dtype(object), ())) == "input 'word' (one text, text)"


def test_text_of_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "def words():\n    yield 'ant'\n    yield ['bee', 'cat']\n    yield {'words': [['dog']]}\n"
    (tmp_path / "my_words.py").write_text(code + "def numbers():\n    yield [[1, 2]]\n")
    what = tmp_path / "my_words.py"
    row = Input("words", np.dtype(object), (0,))
    assert [feed["words"].tolist() for _, feed in read(f"{what}:words", takes=[row], limit=2)] == [
        ["ant"],
        ["bee", "cat"],
    ]
    with pytest.raises(DataError, match="text is expected, got int64"):
        read(f"{what}:numbers", takes=[TEXT])
    with pytest.raises(DataError, match="must be a dict of x or an array, got a str"):
        read(f"{what}:words", takes=[Input("x", FLOAT, (0,))])


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones((1, 2)), r"a\.npy: text is expected, got float64; save an array of strings, such as np\.array"),
        (np.array([[b"ant"]]), r"a\.npy: text is expected, got \|S3"),
        (np.array([["ant", None]]), "Python objects in dtype"),
        (np.array([[0x110000]], np.uint32).view("U1"), "text is expected, got characters that no alphabet has"),
        (np.array([["\ud800"]]), "text is expected, got characters that no alphabet has"),
    ],
)
def test_what_is_no_text(array: Any, message: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(DataError, match=message) as caught:
        read(tmp_path / "a.npy", takes=[TEXT])
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(DataError, match="numbers are expected, got <U3"):
        converted(np.array(["ant"]), Input("x", FLOAT, (0,)), "a.npy")


# Pictures


def test_pictures_for_one_of_several_inputs(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for i in range(5):
        image.new("RGB", (9, 9), (0, 0, 50 * i)).save(tmp_path / f"{i}.png")
    takes = [PICTURE, Input("size", INT64, (2,))]
    np.save(tmp_path.parent / "size.npy", [[8, 8]])
    found = read(f"image={tmp_path}", f"size={tmp_path.parent / 'size.npy'}", takes=takes, limit=3)
    assert [Path(label).name for label, _ in found] == ["0.png", "1.png", "3.png"]
    assert found[1][1]["image"].shape == (1, 3, 8, 8)
    assert found[1][1]["size"].tolist() == [8, 8]


def test_pictures_for_inputs_of_whole_numbers(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (8, 8), (1, 2, 255)).save(tmp_path / "a.png")
    takes = [Input("image", np.dtype(np.uint8), (0, 8, 8, 3))]
    ((_, feed),) = read_feeds([str(tmp_path)], takes, PRESETS["0-255"])
    assert feed["image"].dtype == np.uint8
    assert feed["image"][0, 0, 0].tolist() == [1, 2, 255]
    with pytest.raises(DataError, match="takes whole numbers; say --preprocess 0-255"):
        read(tmp_path, takes=takes)
    with pytest.raises(DataError, match=r"a\.png: the network takes inputs of shape any x 7, which no picture has"):
        read(tmp_path, takes=[Input("x", FLOAT, (0, 7))])


@given(st.lists(st.integers(), max_size=30), st.integers(1, 40))
def test_at_most_so_many_are_taken(values: list[int], limit: int) -> None:
    found = list(evenly(values, limit))
    assert len(found) == min(limit, len(values))
    assert found[:1] == values[:1]
