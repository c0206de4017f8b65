"""The integrator's way from the shell, for graphs of the shapes that are met in the wild: adopt, run, watch, bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from stranger_builder import Net
from stranger_graphs import CASES
from test_artifact_cli import call
from test_stranger_graphs import TAKEN, distance, floats, saved

import anybit
from anybit.artifact import made_up
from anybit.artifact.answers import answers, losses, outputs_of, scores_of
from anybit.artifact.coverage import Coverage, coverage, multiplications
from anybit.artifact.feeding import Preprocessing
from anybit.artifact.master import open_master
from anybit.artifact.plain import read_model_file
from anybit.artifact.runtime import TooSlow, compile_model, onnxruntime, run_in_time, time_limit
from anybit.cli.adopt import adopt
from anybit.cli.bench import bench
from anybit.cli.reconstruct import reconstruct
from anybit.cli.run import run
from anybit.cli.watch import watch
from anybit.errors import AnybitError, DataError, FileError, SpecError
from anybit.graph.view import Node
from anybit.plan.widen import Unit, with_floors
from anybit.spec import Bits


def archive(name: str, folder: Path) -> Path:
    """Write an example of a case to an .npz file: one whole input for each key, in another type where that fits."""
    path = folder / "inputs.npz"
    whole = name == "no_shape"  # nobody knows how many dimensions it takes, so an array is one input
    feed = {key: np.asarray(x) if whole else np.asarray(x)[None] for key, x in CASES[name].feed().items()}
    np.savez(path, **{key: x.astype(np.float64) if x.dtype.kind == "f" else x for key, x in feed.items()})
    return path


@pytest.mark.parametrize("name", TAKEN)
def test_from_a_strangers_file_to_its_answers(name: str, tmp_path: Path) -> None:
    plain, inputs, out = saved(name, tmp_path), archive(name, tmp_path), tmp_path / "m.onnx"
    said = call(adopt, plain, "--out", out, "--calibrate", inputs).output
    assert said.startswith("quantized: ")
    assert " of the weights" in said
    result = call(run, out, "--input", inputs, "--policy", "fixed", "--bits", "FP", "--out", tmp_path / "out", "--json")
    answer = json.loads(result.output)
    wanted = floats(plain, CASES[name].feed())
    assert [output["name"] for output in answer["outputs"]] == list(wanted)
    for output, (_, array) in zip(answer["outputs"], wanted.items(), strict=True):
        found = np.load(output["file"])
        assert output["shape"] == list(found.shape) == list(array.shape)
        assert distance(found, array) < 0.01  # the runtime rounds some weights of plain files itself


SHAPES = {
    "several inputs": "lstm_with_state", "a free size": "symbolic_sizes", "integer inputs": "words_in",
    "one number": "scalars_in", "a branch": "if_with_layers", "text in and out": "text_in_and_out",
    "a list as output": "sequence_out",
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES.values(), ids=SHAPES)
def test_the_other_verbs_take_it_too(name: str, tmp_path: Path) -> None:
    plain, inputs, out = saved(name, tmp_path), archive(name, tmp_path), tmp_path / "m.onnx"
    call(adopt, plain, "--out", out, "--calibrate", inputs)
    assert "W4A8" in call(watch, out, "--bits", "W4A8", "--times", "1").output
    record = json.loads(call(bench, out, "--widths", "W8A8", "--rounds", "1", "--input", inputs, "--json").output)
    (row,) = record["rows"]
    assert record["inputs"] == 1
    assert row["latency"] > 0
    assert {loss["output"] for loss in row["losses"]} == set(floats(plain, CASES[name].feed()))
    assert all(loss["error"] is None or loss["error"] < 0.2 for loss in row["losses"])


def test_bits_are_what_runs(tmp_path: Path) -> None:
    plain, inputs, out = saved("ordinary", tmp_path), archive("ordinary", tmp_path), tmp_path / "m.onnx"
    call(adopt, plain, "--out", out, "--calibrate", inputs)
    said = json.loads(call(run, out, "--input", inputs, "--bits", "W4A4", "--out", tmp_path, "--json").output)
    assert said["bits"] == "W4A4"
    session = anybit.load(out)
    session.set_bits(weights=4, activations=4)
    assert np.array_equal(np.load(tmp_path / "0000.npy"), session.run(CASES["ordinary"].feed()))


# Text


def test_what_a_network_says_in_words_is_told_without_control_characters(tmp_path: Path) -> None:
    plain, inputs, out = saved("text_in_and_out", tmp_path), archive("text_in_and_out", tmp_path), tmp_path / "m.onnx"
    call(adopt, plain, "--out", out, "--calibrate", inputs)
    wanted = next(iter(floats(plain, CASES["text_in_and_out"].feed()).values()))
    shown = [str(text).replace("\x1b", " ") for text in wanted]
    line = call(run, out, inputs, "--bits", "FP").output
    assert f"{wanted.size}, {', '.join(map(repr, shown))}; softmax" in line
    assert "\x1b" not in line
    said = json.loads(call(run, out, inputs, "--bits", "FP", "--json", "--out", tmp_path / "out").output)
    name, scores = said["outputs"]
    assert (name["text"], name["low"], name["high"]) == (shown, None, None)
    assert "text" not in scores
    held = np.load(name["file"], allow_pickle=False)
    assert held.dtype.kind == "U"
    assert held.tolist() == wanted.tolist()


def test_long_texts_are_cut_where_they_are_told() -> None:
    (answer,) = answers({"y": np.array([["x" * 10**6] * 99], object)})
    assert len(str(answer)) < 600
    assert str(answer).startswith("y: 1 x 99, 'xxx")
    assert str(answer).endswith("x', ...")


def test_texts_are_decisions(tmp_path: Path) -> None:
    """At two bits some classes are others; what is told is the part of examples that keep their name."""
    path = saved("text_out", tmp_path)
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.normal(size=(1, 16)).astype(np.float32)} for _ in range(40)]
    anybit.adopt(path, tmp_path / "m.onnx", calibration=feeds[:8], sensitive="same")
    session = anybit.load(tmp_path / "m.onnx", threads=1)
    lost = losses(session, [Bits(2, 2)], feeds)
    truth, found = ([], [])  # type: ignore[var-annotated]
    for bits, said in ((32, truth), (2, found)):
        session.set_bits(weights=bits, activations=bits)
        said += [session.run(feed)[session.outputs[-1]].item() for feed in feeds]
    assert set(truth) <= {"red", "green", "blue"}
    same = sum(a == b for a, b in zip(truth, found, strict=True)) / 40
    assert 0 < same < 1
    assert lost[Bits(2, 2)][-1].same == pytest.approx(same)
    assert lost[Bits(2, 2)][-1].error is None
    assert lost[Bits()][-1].same == 1


def test_exported_and_reconstructed_text_runs_as_it_did(tmp_path: Path) -> None:
    plain, inputs, out = saved("text_in_and_out", tmp_path), archive("text_in_and_out", tmp_path), tmp_path / "m.onnx"
    call(adopt, plain, "--out", out, "--calibrate", inputs)
    feed = CASES["text_in_and_out"].feed()
    for master in (out, tmp_path / "better.onnx"):
        anybit.export(master, tmp_path / "w4a4.onnx", weights=4, activations=4)
        session = anybit.load(master)
        session.set_bits(weights=4, activations=4)
        for name, wanted in session.run(feed).items():
            found = floats(tmp_path / "w4a4.onnx", feed)[name]
            assert distance(found, wanted) < 1e-5
        call(reconstruct, out, "--calibrate", inputs, "--bits", "W4A4", "--out", tmp_path / "better.onnx")
    assert set(anybit.allocate(out, [feed], budget=8).layers) == {
        weight.name for weight in open_master(out).plan.weights
    }


def test_text_of_ones_own_calibrates(tmp_path: Path) -> None:
    plain, out = saved("text_in", tmp_path), tmp_path / "m.onnx"
    (tmp_path / "mine.py").write_text("def sentences():\n    yield ['ant', 'yak']\n    yield 'bee cat dog'.split()\n")
    said = call(adopt, plain, "--out", out, "--calibrate", f"{tmp_path / 'mine.py'}:sentences").output
    assert "from your inputs" in said
    for wrong in (np.ones((1, 3)), np.array([[b"ant"]]), np.array([["ant", None]])):
        np.save(tmp_path / "wrong.npy", wrong)
        with pytest.raises(DataError, match=r"wrong\.npy: .*text is expected, got|Python objects in dtype"):
            call(adopt, plain, "--out", out, "--calibrate", tmp_path / "wrong.npy")
    with pytest.raises(DataError, match=r"cannot be run \(input 'words' takes tensor\(string\); this is none \(int64"):
        anybit.adopt(plain, out, calibration=[{"words": np.array([[1, 2]])}])


def test_characters_that_are_none_do_not_crash_the_runtime(tmp_path: Path) -> None:
    """ONNX Runtime reads them as they come, and ends the process."""
    plain, out = saved("text_in", tmp_path), tmp_path / "m.onnx"
    call(adopt, plain, "--out", out)
    for code in (0x110000, 0xFFFFFFFF, 0xD800):
        words = np.array([[code]], np.uint32).view("U1")
        np.save(tmp_path / "words.npy", words)
        with pytest.raises(DataError, match="text is expected, got characters that no alphabet has"):
            call(run, out, tmp_path / "words.npy")
        with pytest.raises(DataError, match="takes text; got characters that no alphabet has"):
            anybit.load(out).run(words)


@pytest.mark.parametrize("shape", [["n", 8], None])
def test_a_sequence_comes_in_as_one_array(shape: list[Any] | None, tmp_path: Path) -> None:
    net = Net(0)
    net.inputs.append(helper.make_tensor_sequence_value_info("xs", TensorProto.FLOAT, shape))
    net.output(net.dense(net.node("ConcatFromSequence", "xs", axis=0), 8, 4))
    onnx.save(net.model(), tmp_path / "plain.onnx")
    parts = [np.full((2, 8), i, np.float32) for i in (1, 2, 3)]
    (want,) = onnxruntime().InferenceSession(tmp_path / "plain.onnx").run(None, {"xs": parts})
    np.save(tmp_path / "xs.npy", np.stack(parts)[None])
    said = call(adopt, tmp_path / "plain.onnx", "--out", tmp_path / "m.onnx").output
    assert ("1 from made-up inputs" in said) is (shape is not None)
    call(adopt, tmp_path / "plain.onnx", "--out", tmp_path / "m.onnx", "--calibrate", tmp_path / "xs.npy")
    session = anybit.load(tmp_path / "m.onnx")
    for given in (parts, np.stack(parts)):
        np.testing.assert_array_equal(session.run(given), want)
    session.set_bits("W8A8")
    assert 0 < np.abs(session.run(parts) - want).max() < 0.02 * np.abs(want).max()


# How much is quantized


def test_all_of_a_plain_network_is_quantized(tmp_path: Path) -> None:
    plain, out = saved("ordinary", tmp_path), tmp_path / "m.onnx"
    said = call(adopt, plain, "--out", out, "--calibrate", archive("ordinary", tmp_path)).output
    found = Coverage(**open_master(out).header.about["quantized"])
    assert (found.weights, found.multiplications, found.floating) == (1.0, 1.0, [])
    assert said.splitlines()[0].startswith("quantized: 100% of the weights (")
    assert "and 100% of the multiplications" in said
    assert "from your inputs" in said
    without = call(adopt, plain, "--out", tmp_path / "free.onnx").output
    assert "from the network itself" in without


def test_layers_that_keep_more_bits_are_named(tmp_path: Path) -> None:
    plain, inputs = saved("ordinary", tmp_path), archive("ordinary", tmp_path)
    said = call(adopt, plain, "--out", tmp_path / "m.onnx", "--calibrate", inputs).output
    wide = [weight for weight in open_master(tmp_path / "m.onnx").plan.weights if weight.floor == 8]
    assert wide
    for weight in wide:
        assert f"({weight.because}): " in said
        assert weight.name in said
    assert said.splitlines()[-2].startswith("these have ")
    for flags in (("--sensitive", "same"), ("--preset", "paper")):
        same = call(adopt, plain, "--out", tmp_path / "m.onnx", "--calibrate", inputs, *flags).output
        assert "kept" not in same
    assert all(weight.axis is None for weight in open_master(tmp_path / "m.onnx").plan.weights)


def test_made_up_inputs_lie_where_pictures_would(tmp_path: Path) -> None:
    """Bytes of 0 to 255 make values far larger than what lies between 0 and 1."""
    net = Net(1)
    net.head(net.node("Relu", net.conv(net.x(1, 3, 16, 16), 3, 6, bias=False)), 6)
    onnx.save(net.model(), tmp_path / "plain.onnx")
    highest = {}
    for name in ("0-1", "0-255"):
        call(adopt, tmp_path / "plain.onnx", "--out", tmp_path / "m.onnx", "--preprocess", name)
        plan = open_master(tmp_path / "m.onnx").plan
        highest[name] = max(a.ranges[0][1].high for a in plan.activations if a.ranges)
    assert highest["0-255"] / highest["0-1"] == pytest.approx(255, rel=0.01)


def table_and_layer(operator: str = "Gather") -> onnx.ModelProto:
    """A table of 100 x 8 numbers and a layer of 8 x 8."""
    net = Net(0)
    ids = net.input("ids", np.array([[1, 2, 3]]), ["n", "length"])
    where = ids if operator == "Gather" else net.node("Unsqueeze", ids, net.hold(np.array([2])))
    net.output(net.dense(net.node("Tanh", net.node(operator, net.hold(net.draw(100, 8)), where)), 8, 8))
    return net.model()


def test_what_stays_in_floating_point_is_told_and_warned_of(tmp_path: Path) -> None:
    onnx.save(table_and_layer("GatherND"), tmp_path / "plain.onnx")
    said = call(adopt, tmp_path / "plain.onnx", "--out", tmp_path / "m.onnx").output
    assert "quantized: 7% of the weights (1 tensor) and 100% of the multiplications" in said
    assert "warning: less than half of the weights" in said
    assert "stays in floating point: 93% of the weights, tables that something is looked up in (GatherND)" in said
    assert "ranges: 1 from " in said


def test_a_table_of_words_is_quantized_and_keeps_eight_bits(tmp_path: Path) -> None:
    onnx.save(table_and_layer(), tmp_path / "plain.onnx")
    said = call(adopt, tmp_path / "plain.onnx", "--out", tmp_path / "m.onnx").output
    assert "quantized: 100% of the weights (2 tensors) and 100% of the multiplications" in said
    assert "kept at 8 bits or more (lookup table): " in said
    (table,) = (weight for weight in open_master(tmp_path / "m.onnx").plan.weights if weight.shape == (100, 8))
    assert (table.axis, table.floor, table.because) == (0, 8, "lookup table")
    session = anybit.load(tmp_path / "m.onnx")
    ids = np.arange(100)[None]
    exact = session.run(ids)
    session.set_bits(weights=4, activations=8)
    assert np.abs(session.run(ids) - exact).max() < 0.02 * np.abs(exact).max()
    anybit.export(tmp_path / "m.onnx", tmp_path / "w4a8.onnx", weights=4, activations=8)
    stored = {t.name: t.data_type for t in onnx.load(tmp_path / "w4a8.onnx").graph.initializer if t.dims == [100, 8]}
    assert list(stored.values()) == [TensorProto.INT8]


def test_that_nothing_made_up_runs_is_told(tmp_path: Path) -> None:
    net = Net(0)
    y = net.dense(net.x(3, 7, declared=["n", "width"]), 7, 8)
    net.output(net.dense(net.node("Relu", y), 8, 5))
    onnx.save(net.model(), tmp_path / "plain.onnx")
    said = call(adopt, tmp_path / "plain.onnx", "--out", tmp_path / "m.onnx").output
    assert "warning: nothing that was made up as an input runs; --calibrate with a few real ones" in said
    assert "branches" not in said


def test_nothing_is_written_where_nothing_can_be_quantized(tmp_path: Path) -> None:
    for name in ("no_layer", "no_weight"):
        with pytest.raises(FileError, match=r"no weight|none of its weights"):
            call(adopt, saved(name, tmp_path), "--out", tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()


DEPTHWISE = Node("layer", ["x", "w"], "y", "y", convolution=True, groups=4)
TRANSPOSED = Node("layer", ["x", "w"], "y", "y", convolution=True, transposed=True)
COUNTED = {
    "depthwise": (DEPTHWISE, {"x": (2, 4, 8, 8), "w": (4, 1, 3, 3), "y": (2, 4, 6, 6)}, 2 * 4 * 36 * 9),
    "transposed": (TRANSPOSED, {"x": (1, 4, 5, 5), "w": (4, 3, 2, 2), "y": (1, 3, 10, 10)}, 4 * 25 * 12),
    "linear": (Node("layer", ["x", "w"], "y", "y"), {"x": (7, 5), "w": (5, 3), "y": (7, 3)}, 7 * 5 * 3),
    "of two values": (
        Node("product", ["a", "b"], "y", "y"), {"a": (2, 7, 5), "b": (2, 5, 3), "y": (2, 7, 3)}, 2 * 7 * 5 * 3,
    ),
    "recurrent": (
        Node("recurrent", ["x"], "y", "y", weights=["w", "r"]),
        {"x": (9, 1, 4), "w": (1, 12, 4), "r": (1, 12, 3), "y": (9, 1, 1, 3)}, 9 * (48 + 36),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTED)
def test_multiplications_are_counted(name: str) -> None:
    node, shapes, count = COUNTED[name]
    assert multiplications(node, shapes) == count


def test_a_layer_that_is_not_in_the_plan_is_not_counted_as_quantized(tmp_path: Path) -> None:
    """Two layers with 16 times 24 and 24 times 8 multiplications; the plan loses the first one."""
    net = Net(0)
    net.output(net.dense(net.node("Relu", net.dense(net.x(1, 16), 16, 24)), 24, 8))
    onnx.save(net.model(), tmp_path / "plain.onnx")
    plan = anybit.adopt(tmp_path / "plain.onnx", tmp_path / "m.onnx", calibration=[net.feed])
    model = read_model_file(tmp_path / "plain.onnx")
    first, _ = plan.weights
    less = type(plan)(tuple(point for point in plan.points if point != first))
    found = coverage(model, less, net.feed, where="plain")
    assert found.weights == pytest.approx(24 * 8 / (24 * 8 + 16 * 24))
    assert found.multiplications == pytest.approx(24 * 8 / (24 * 8 + 16 * 24))
    assert found.floating == (("tensors that MatMul uses", pytest.approx(1 - found.weights)),)
    assert coverage(model, plan, {"x": np.zeros(3)}, where="plain").multiplications is None  # it does not run


def test_what_was_measured_is_told_as_a_part_of_what_the_measurement_counted(tmp_path: Path) -> None:
    """That includes layers inside of branches, where every weight counts once."""
    onnx.save(CASES["if_with_layers"].build(), tmp_path / "plain.onnx")
    feed = CASES["if_with_layers"].feed()
    plan = anybit.adopt(tmp_path / "plain.onnx", tmp_path / "m.onnx", calibration=[feed], sensitive="same")
    model = read_model_file(tmp_path / "plain.onnx")
    last = Unit((plan.weights[-1].name,), frozenset())
    found = coverage(model, with_floors(plan, [last], 8), feed, where="plain")
    outside = {"first": 4 * 16 * 12, "last": 4 * 8 * 6}  # of four examples
    assert found.measured == outside["last"] / (sum(outside.values()) + 2 * 12 * 8)


# How much is lost


def scores(softmax: bool) -> tuple[onnx.ModelProto, dict[str, Any]]:
    net = Net(3)
    y = net.dense(net.node("Relu", net.dense(net.x(1, 16, declared=["n", 16]), 16, 24)), 24, 8)
    net.output(net.node("Softmax", y, axis=-1) if softmax else y)
    return net.model(), net.feed


@pytest.mark.parametrize("softmax", [True, False])
def test_losses_are_those_of_the_outputs(tmp_path: Path, softmax: bool) -> None:
    model, _ = scores(softmax)
    onnx.save(model, tmp_path / "plain.onnx")
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.normal(size=(1, 16)).astype(np.float32)} for _ in range(40)]
    anybit.adopt(tmp_path / "plain.onnx", tmp_path / "m.onnx", calibration=feeds[:8], sensitive="same")
    session = anybit.load(tmp_path / "m.onnx", threads=1)
    found = losses(session, [Bits(8, 8), Bits(2, 2)], feeds)
    assert list(found) == [Bits(), Bits(8, 8), Bits(2, 2)]
    truth = np.concatenate([floats(tmp_path / "plain.onnx", feed)[session.outputs[0]] for feed in feeds])
    for bits, ((loss),) in found.items():
        session.set_bits(weights=bits.weights, activations=bits.activations)
        got = np.concatenate([session.run(feed) for feed in feeds])
        assert loss.n == 40
        assert loss.same == pytest.approx((got.argmax(1) == truth.argmax(1)).mean())
        assert loss.error == pytest.approx(np.linalg.norm(got - truth) / np.linalg.norm(truth), abs=1e-4)
    assert found[Bits()][0].same == 1.0
    assert found[Bits(2, 2)][0].error > 5 * found[Bits(8, 8)][0].error  # type: ignore[operator]
    outputs, _ = outputs_of(session, feeds[0])
    assert scores_of(outputs) == (set(session.outputs) if softmax else set())


def test_labels_make_scores_of_an_output(tmp_path: Path) -> None:
    model, feed = scores(softmax=False)
    onnx.save(model, tmp_path / "plain.onnx")
    np.save(tmp_path / "x.npy", feed["x"])
    (tmp_path / "labels.txt").write_text("\n".join(f"animal {i}" for i in range(8)) + "\n")
    words = (tmp_path / "plain.onnx", "--out", tmp_path / "m.onnx", "--calibrate", tmp_path / "x.npy")
    call(adopt, *words, "--labels", tmp_path / "labels.txt")
    said = json.loads(call(run, tmp_path / "m.onnx", "--input", tmp_path / "x.npy", "--bits", "W8A8", "--json").output)
    assert said["label"] == f"animal {said['class']}"
    call(adopt, *words)
    plain = call(run, tmp_path / "m.onnx", "--input", tmp_path / "x.npy", "--bits", "W8A8").output
    assert "1 x 8, from " in plain
    for content, message in ((b"", "is empty"), (b"\xff\xfe", "cannot be read as a text file")):
        (tmp_path / "labels.txt").write_bytes(content)
        with pytest.raises(DataError, match=message):
            call(adopt, *words, "--labels", tmp_path / "labels.txt")


# Pictures


def test_pictures_are_fed_the_same_way_by_all(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    from anybit.cli.serve import make_app

    net = Net(1)
    net.head(net.node("Relu", net.conv(net.x(1, 3, 16, 16, declared=["n", 3, "h", "w"]), 3, 6)), 6)
    onnx.save(net.model(), tmp_path / "plain.onnx")
    pixels = np.random.default_rng(0).integers(0, 256, (40, 30, 3), np.uint8)
    image.fromarray(pixels).save(tmp_path / "a.png")
    flags = ("--preprocess", "imagenet-bgr", "--size", "16", "--calibrate", tmp_path / "a.png")
    call(adopt, tmp_path / "plain.onnx", "--out", tmp_path / "m.onnx", *flags)
    session = anybit.load(tmp_path / "m.onnx")
    how = session.feeding
    assert (how.size, how.channels, how.resize) == ((16, 16), "bgr", "crop")
    want = session.run(how.settled((0, 3, 0, 0))(image.fromarray(pixels)))
    said = call(run, tmp_path / "m.onnx", "--input", tmp_path / "a.png", "--bits", "FP", "--out", tmp_path).output
    assert said.startswith("FP ")
    assert np.array_equal(np.load(tmp_path / "0000.npy"), want)
    shown = make_app(tmp_path / "m.onnx").model.predict((tmp_path / "a.png").read_bytes(), Bits())
    (answer,) = answers({session.outputs[0]: want})
    assert shown["outputs"] == [str(answer)]
    assert shown["size"] == (16, 16)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--preprocess", "imagent"), "did you mean 'imagenet'"),
        (("--size", "a"), "HEIGHTxWIDTH"),
        (("--channels", "rbg"), "--channels is one of rgb, bgr, grey; got 'rbg'"),
        (("--scale", "1"), "--scale is one of"),
        (("--calibrate", "gone"), "no such file or folder"),
        (("--helpers", "magic"), "a helper is one of"),
        (("--store", "int2"), "store must be one of"),
    ],
)
def test_wrong_flags_get_a_sentence_and_nothing_is_written(
    flags: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(AnybitError, match=message):
        call(adopt, saved("ordinary", tmp_path), "--out", tmp_path / "m.onnx", *flags)
    assert not (tmp_path / "m.onnx").exists()


# Loops without an end


def endless() -> onnx.ModelProto:
    net = Net(0)
    x = net.dense(net.x(1, 4), 4, 4)
    inner = Net(1)
    inner.count = 500
    more = inner.node("Identity", "go_on")
    y = inner.node("Tanh", "state")
    inner.inputs = [
        helper.make_tensor_value_info("turn", TensorProto.INT64, []),
        helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
        helper.make_tensor_value_info("state", TensorProto.FLOAT, [1, 4]),
    ]
    inner.output(more, [], TensorProto.BOOL)
    inner.output(y, [1, 4])
    net.output(net.dense(net.node("Loop", "", net.hold(np.array(True)), x, body=inner.graph("body")), 4, 4))
    return net.model()


def test_a_run_without_an_end_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(endless(), tmp_path / "plain.onnx")
    np.save(tmp_path / "x.npy", np.ones((1, 4)))
    monkeypatch.setenv("ANYBIT_SECONDS", "0.3")
    with pytest.raises(DataError, match=r"a calibration input cannot be run \(a run took more than 0.3 s"):
        call(adopt, tmp_path / "plain.onnx", "--out", tmp_path / "m.onnx", "--calibrate", tmp_path / "x.npy")
    assert not (tmp_path / "m.onnx").exists()
    monkeypatch.setattr(made_up, "SECONDS", 0.3)
    call(adopt, tmp_path / "plain.onnx", "--out", tmp_path / "m.onnx")  # what cannot be seen stays in floating point
    engine = compile_model(read_model_file(tmp_path / "plain.onnx"), exact=False, threads=1, where="plain")
    with pytest.raises(TooSlow, match="ANYBIT_SECONDS sets another limit"):
        run_in_time(engine, None, {"x": np.ones((1, 4), np.float32)}, 0.2)
    for text in ("soon", "0", "-1", "nan", "1e9"):
        monkeypatch.setenv("ANYBIT_SECONDS", text)
        with pytest.raises(SpecError, match="must be a number of seconds"):
            time_limit()


def test_a_run_in_time_is_not_stopped(tmp_path: Path) -> None:
    engine = compile_model(read_model_file(saved("ordinary", tmp_path)), exact=False, threads=1, where="plain")
    feed = CASES["ordinary"].feed()
    (found,) = run_in_time(engine, None, feed, 60.0)
    (wanted,) = floats(tmp_path / "plain.onnx", feed).values()
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(DataError, match=r"(?i)invalid|unexpected|rank"):
        run_in_time(engine, None, {name: x[0] for name, x in feed.items()}, 60.0)


def test_the_size_of_calibration_is_remembered(tmp_path: Path) -> None:
    net = Net(1)
    net.head(net.node("Relu", net.conv(net.x(1, 3, 24, 40, declared=["n", 3, "h", "w"]), 3, 6)), 6)
    onnx.save(net.model(), tmp_path / "plain.onnx")
    anybit.adopt(tmp_path / "plain.onnx", tmp_path / "m.onnx", calibration=[net.feed], preprocessing=Preprocessing())
    assert anybit.load(tmp_path / "m.onnx").example()["x"].shape == (1, 3, 24, 40)


def test_a_network_that_takes_pairs_says_how_to_hand_them_over(tmp_path: Path) -> None:
    net = Net(4)
    x = net.input("x", net.draw(2, 4), ["batch", 4])
    net.output(net.dense(net.node("Relu", net.dense(net.node("Reshape", x, net.hold(np.array([-1, 8]))), 8, 6)), 6, 3))
    onnx.save(net.model(), tmp_path / "plain.onnx")
    pairs = net.draw(3, 2, 4)
    np.save(tmp_path / "alone.npy", pairs.reshape(6, 4))
    np.save(tmp_path / "pairs.npy", pairs)
    words, advice = (tmp_path / "plain.onnx", "--out", tmp_path / "m.onnx", "--calibrate"), "further dimension in front"
    with pytest.raises(DataError, match=advice):
        call(adopt, *words, tmp_path / "alone.npy")
    call(adopt, *words, tmp_path / "pairs.npy")
    assert call(run, tmp_path / "m.onnx", tmp_path / "pairs.npy").output.count("pairs.npy") == 3
    with pytest.raises(DataError, match=advice):
        call(run, tmp_path / "m.onnx", tmp_path / "alone.npy")
