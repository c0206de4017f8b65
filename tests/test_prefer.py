from __future__ import annotations

import json
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from test_artifact_small import HEADER, MODEL, header_with, small_master, with_weights

from anybit.artifact import prefer, runtime, session
from anybit.artifact.answers import Loss
from anybit.artifact.bench import Gain, verdict
from anybit.artifact.master import open_master, write_master
from anybit.artifact.model import OnnxModel
from anybit.artifact.prefer import ASKED, WEIGHTS, Notes, fastest, forms, interleaved
from anybit.artifact.quantized_graph import quantized_graph
from anybit.artifact.runtime import EXACT, compile_model, onnxruntime, sums_saturate
from anybit.artifact.session import load
from anybit.errors import DataError, SpecError
from anybit.spec import FLOAT, Bits

X = np.random.default_rng(0).normal(size=(16, 1, 6, 6)).astype(np.float32)


@pytest.fixture(autouse=True)
def _no_cache_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# The choice


@given(st.integers(5, 9).flatmap(lambda n: st.lists(st.lists(st.floats(1e-6, 1), min_size=n, max_size=n), min_size=2)))
@settings(max_examples=100, deadline=None)
def test_the_fastest_takes_least_of_those_that_surely_beat_floating_point(taken: list[list[float]]) -> None:
    times = {WEIGHTS: taken[0]} | {str(i): runs for i, runs in enumerate(taken[1:])}
    chosen = fastest(times)
    sure = {form for form, runs in times.items() if np.mean(np.less(runs, taken[0])) >= 0.75} | {WEIGHTS}
    assert chosen in sure
    assert all(np.median(times[chosen]) <= np.median(times[form]) for form in sure)


def test_a_form_that_is_slower_is_not_chosen_by_chance() -> None:
    random, wrong = np.random.default_rng(0), 0
    for _ in range(500):  # five rounds, each time off by a tenth; the others take a twentieth longer
        runs = 1.0 + 0.1 * random.standard_normal((5, 5)) + 0.05 * (np.arange(5) > 0)[:, None]
        wrong += fastest(dict(zip((WEIGHTS, *"abcd"), runs.tolist(), strict=True))) != WEIGHTS
    assert wrong < 0.3 * 500  # by the median alone: 0.52


def test_runs_are_timed_in_turns_by_the_clock_that_is_given() -> None:
    now, order = [0.0], []

    def run(name: str, seconds: float) -> None:
        order.append(name)
        now[0] += seconds

    runs = {"slow": lambda: run("slow", 3.0), "fast": lambda: run("fast", 1.0)}
    assert interleaved(runs, rounds=2, clock=lambda: now[0]) == {"slow": [3.0, 3.0], "fast": [1.0, 1.0]}
    assert [sorted(order[i : i + 2]) for i in (0, 2, 4)] == [["fast", "slow"]] * 3  # the first time warms up
    assert len(interleaved(runs, rounds=99, seconds=0, clock=lambda: now[0])["slow"]) == prefer.FEWEST


def test_each_form_is_timed_after_every_other_one() -> None:
    order: list[str] = []
    interleaved({name: lambda name=name: order.append(name) for name in "abc"}, rounds=50)
    assert {*pairwise(order[3:])} == {(a, b) for a in "abc" for b in "abc"}


def test_forms_differ_in_activations_only(tmp_path: Path) -> None:
    master = open_master(small_master(tmp_path))
    numbers = master.plan.at(Bits(4, 8), tensors=master.tensors)
    found = forms(master, numbers)
    assert next(iter(found)) == ASKED
    assert found[ASKED].widths == numbers.widths
    assert set(found[WEIGHTS].widths.values()) == {4, FLOAT}
    for form in found.values():
        assert all(form.widths[w.name] == 4 for w in master.plan.weights)
        assert all(form.widths[a.name] in (8, FLOAT) for a in master.plan.activations)
    assert len({tuple(form.widths.values()) for form in found.values()}) == len(found)
    assert list(forms(master, master.plan.at(Bits(4, FLOAT), tensors=master.tensors))) == [ASKED]


def test_a_large_master_is_not_held_in_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    master = open_master(small_master(tmp_path))
    monkeypatch.setattr(prefer, "LARGE", 100)
    assert list(forms(master, master.plan.at(Bits(4, 8), tensors=master.tensors))) == [ASKED, WEIGHTS]


# The session


def with_times(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> list[set[str]]:
    """Let each form take so long; return the list of what was measured."""
    measured: list[set[str]] = []

    def timed(runs: Any, **_: Any) -> Any:
        measured.append(set(runs))
        for run in runs.values():
            run()
        return {form: [seconds.get(form, 1.0)] * 3 for form in runs}

    monkeypatch.setattr(session, "interleaved", timed)
    return measured


def test_the_form_that_takes_least_is_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small_master(tmp_path)
    plain = load(path)
    for form, (weights, activations) in {ASKED: (4, 8), WEIGHTS: (4, 32)}.items():
        (tmp_path / "small.onnx.speed.json").unlink(missing_ok=True)
        measured = with_times(monkeypatch, {form: 0.5})
        quick = load(path, prefer="speed")
        quick.set_bits(weights=4, activations=8)
        assert (quick.form, quick.bits, len(measured)) == (form, Bits(4, 8), 1)
        plain.set_bits(weights=weights, activations=activations)
        np.testing.assert_array_equal(quick.run(X), plain.run(X))
        quick.set_bits(weights=4, activations=8, prefer="widths")
        assert quick.form == ASKED


def test_measured_for_real_it_is_one_of_the_forms_and_not_further_from_floating_point(tmp_path: Path) -> None:
    path = small_master(tmp_path)
    found = load(path, threads=1)
    exact = found.run(X)
    found.set_bits(weights=8, activations=8)
    asked = np.abs(found.run(X) - exact).max()
    found.set_bits(weights=8, activations=8, prefer="speed")
    quick = np.abs(found.run(X) - exact).max()
    (kept,) = json.loads((tmp_path / "small.onnx.speed.json").read_text())["seconds"].values()
    (times,) = kept.values()
    assert found.form == fastest(times)
    assert quick <= 1.5 * asked + 1e-6  # rounding of weights and activations may cancel by chance


def test_an_unknown_preference_changes_nothing(tmp_path: Path) -> None:
    path = small_master(tmp_path)
    with pytest.raises(SpecError, match="prefer must be one of widths, speed; got 'size'"):
        load(path, prefer="size")
    found = load(path)
    with pytest.raises(SpecError, match="got 'fast'"):
        found.set_bits(weights=4, activations=4, prefer="fast")
    assert found.bits == Bits()


def test_without_an_input_to_measure_with_activations_stay_in_floating_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = load(small_master(tmp_path))

    def refuse() -> Any:
        raise DataError("none")

    monkeypatch.setattr(found, "example", refuse)
    found.set_bits(weights=4, activations=8, prefer="speed")
    assert found.form == WEIGHTS
    assert not list(tmp_path.glob("*.json"))


def test_switching_is_safe_while_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small_master(tmp_path)
    with_times(monkeypatch, {WEIGHTS: 0.5})
    found = load(path, keep=1)  # every switch compiles
    plain = load(path)
    wanted = {}
    for bits, activations in ((Bits(4, 8), 32), (Bits(8, 8), 32), (Bits(), 32)):
        plain.set_bits(weights=bits.weights, activations=activations)
        wanted[bits] = plain.run(X)
    over, wrong = threading.Event(), []

    def keep_running() -> None:
        while not over.is_set():
            result, bits = found.run_with_bits(X)
            if not np.array_equal(result, wanted[bits]):
                wrong.append(bits)

    threads = [threading.Thread(target=keep_running) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(30):
        bits = list(wanted)[i % 3]
        found.set_bits(weights=bits.weights, activations=bits.activations, prefer="speed")
    over.set()
    for thread in threads:
        thread.join()
    assert not wrong


# The note


def test_what_was_measured_once_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small_master(tmp_path)
    measured = with_times(monkeypatch, {WEIGHTS: 0.5})

    def choose(**options: Any) -> str:
        found = load(path, prefer="speed", **options)
        found.set_bits(weights=4, activations=8)
        return found.form

    assert [choose(), choose()] == [WEIGHTS] * 2
    assert len(measured) == 1
    choose(threads=1)
    assert len(measured) == 2
    monkeypatch.setattr(prefer, "cpu_name", lambda: "another processor")
    choose()
    assert len(measured) == 3
    monkeypatch.undo()
    measured = with_times(monkeypatch, {ASKED: 0.5})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert choose() == WEIGHTS  # what was known stays known
    write_master(path, MODEL, replace(HEADER, about={"another": "file"}))
    assert (choose(), len(measured)) == (ASKED, 1)


@pytest.mark.parametrize(
    "damage",
    ["", "no JSON", "[]", "{}", '{"version": 1}', "null", '{"version": 1, "digest": "x", "seconds": 3}'],
)
def test_a_damaged_note_is_measured_again(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, note = small_master(tmp_path), tmp_path / "small.onnx.speed.json"
    measured = with_times(monkeypatch, {WEIGHTS: 0.5})
    note.write_text(damage)
    load(path).set_bits(weights=4, activations=8, prefer="speed")
    assert len(measured) == 1
    assert json.loads(note.read_text())["digest"] == open_master(path).digest


@pytest.mark.parametrize("bad", [[], [0.0], ["1"], [True], None, [-1.0]])
def test_times_that_are_none_are_measured_again(bad: Any, tmp_path: Path) -> None:
    master = open_master(small_master(tmp_path))
    notes, widths = Notes(master, 1), {"a": 4}
    notes.write(widths, {ASKED: [1.0], WEIGHTS: [2.0]})
    assert notes.read(widths, [WEIGHTS, ASKED]) == {ASKED: [1.0], WEIGHTS: [2.0]}
    assert notes.read(widths, [ASKED]) is None  # other forms than today's
    assert notes.read({"a": 3}, [WEIGHTS, ASKED]) is None
    notes.write(widths, {ASKED: [1.0], WEIGHTS: bad})
    assert notes.read(widths, [WEIGHTS, ASKED]) is None


def test_where_the_folder_cannot_be_written_the_note_goes_to_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = open_master(small_master(tmp_path))
    (tmp_path / "small.onnx.speed.json").mkdir()  # nobody can write a file there, not even root
    notes, times = Notes(master, None), {ASKED: [1.0]}
    notes.write({"a": 4}, times)
    assert notes.read({"a": 4}, times) == times
    assert [path.parent.name for path in tmp_path.rglob("*.speed.json") if path.is_file()] == ["anybit"]
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/nowhere")
    notes = Notes(master, None)
    notes.write({"a": 4}, times)  # nowhere at all: no error, and nothing known
    assert notes.read({"a": 4}, times) is None


# What makes integer kernels pay


def test_eight_bits_fuse_with_grids_that_are_fitted_to_both_ends(tmp_path: Path) -> None:
    points = tuple(
        replace(p, axis=0, symmetric=False, centred=True) if hasattr(p, "axis") else replace(p, symmetric=False)
        for p in with_weights()
    )
    write_master(tmp_path / "m.onnx", MODEL, header_with(points=points))
    master = open_master(tmp_path / "m.onnx")
    for bits in (Bits(8, 8), Bits(7, 8), Bits(4, 8)):
        codes = [master.plan.at(bits, tensors=master.tensors).codes(w.name) for w in master.plan.weights]
        assert all(found.values.dtype == np.int8 for found in codes)
        model, _ = quantized_graph(master, master.plan.at(bits, tensors=master.tensors), packed=False)
        options = onnxruntime().SessionOptions()
        options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "fused.onnx"), 3
        onnxruntime().InferenceSession(model.proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        kinds = {node.op_type for node in onnx.load(tmp_path / "fused.onnx").graph.node}
        assert {"QLinearConv", "QGemm"} <= kinds


@pytest.mark.parametrize("saturates", [True, False])
def test_exact_sums_are_asked_for_only_where_they_would_saturate(
    saturates: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "sums_saturate", lambda: saturates)
    found = load(small_master(tmp_path))
    for weights, wanted in ((8, saturates), (7, False)):
        found.set_bits(weights=weights, activations=8)
        options = found._now.engine.get_session_options()
        if wanted:
            assert options.get_session_config_entry(EXACT) == "1"
        else:
            with pytest.raises(RuntimeError, match="does not have configuration"):
                options.get_session_config_entry(EXACT)


def test_the_processor_is_asked_with_the_largest_bytes() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 256, (9, 64), np.uint8), rng.integers(-127, 128, (64, 8), np.int8)
    a[0], b[:, 0] = 255, 127
    nodes = [helper.make_node("MatMulInteger", ["a", "b"], ["y"])]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("a", TensorProto.UINT8, [9, 64])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, [9, 8])], [numpy_helper.from_array(b, "b")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    engine = compile_model(OnnxModel(model), exact=False, threads=1, where="")
    exact = np.array_equal(engine.run(None, {"a": a})[0], a.astype(int) @ b.astype(int))
    assert exact is not sums_saturate()


# What bench says at its end


def gain(weights: int, activations: int, seconds: float, **more: Any) -> Gain:
    over = (4.0 / seconds, 3.5 / seconds, 4.5 / seconds)
    return Gain(weights, activations, 1, 1, seconds, 1.0, over, **more)


def test_bench_says_what_is_fastest_and_what_it_costs() -> None:
    fp = gain(32, 32, 4.0)
    text = verdict([fp, gain(8, 8, 2.0, losses=(Loss("y", 9, 0.985, 0.1),)), gain(4, 8, 3.0)])
    assert text.startswith("W8A8 is fastest here: 2000.00 ms, 2.00 times as fast as floating point (1.75 to 2.25)")
    assert text.endswith("98.5% of its decisions are those of floating point.")
    assert "10.0% away" in verdict([fp, gain(8, 8, 2.0, losses=(Loss("y", 9, None, 0.1),))])
    both = (Loss("features", 9, None, 0.5), Loss("lengths", 9, 1.0, None))
    assert "100.0% of its decisions" in (text := verdict([fp, gain(8, 8, 2.0, losses=both)]))
    assert "50.0% away" in text, "a length that is right says nothing about what is that long"
    assert "--input" in verdict([fp, gain(8, 8, 2.0)])
    assert verdict([fp, gain(8, 8, 5.0)], prefer="speed") == "FP is fastest here: 4000.00 ms."
    assert "With --prefer speed" in verdict([fp, gain(8, 8, 5.0)])
    assert "With --prefer speed" not in verdict([fp, gain(8, 8, 2.0)]) + verdict([fp])
    assert "Take 7 bits" not in verdict([fp, gain(8, 8, 2.0), gain(7, 8, 1.95)])
    assert "Take 7 bits instead of 8 for the weights: 1.50 times" in verdict([fp, gain(8, 8, 3.0), gain(7, 8, 2.0)])
