from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import typer
from test_artifact_adopt import with_norm
from test_artifact_small import MODEL, header_with, small_master
from test_feeding import read_one
from typer.testing import CliRunner, Result

from anybit.artifact.bench import bench as measure_gains
from anybit.artifact.bench import footprint, steps_of
from anybit.artifact.feeding import Preprocessing
from anybit.artifact.inputs import Input, find_files, read_feeds
from anybit.artifact.master import open_master, write_master
from anybit.artifact.session import load
from anybit.cli.adopt import adopt
from anybit.cli.bench import bench
from anybit.cli.export import export
from anybit.cli.reconstruct import reconstruct
from anybit.cli.run import find_policy, run
from anybit.cli.watch import watch
from anybit.errors import AnybitError, DataError, SpecError
from anybit.policy import Reading
from anybit.spec import Bits

Command = Callable[..., None]


def call(command: Command, *words: object) -> Result:
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def master(tmp_path: Path) -> Path:
    return small_master(tmp_path)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "pictures"
    (folder / "more").mkdir(parents=True)
    rng = np.random.default_rng(0)
    image.fromarray(rng.integers(0, 256, (6, 6), np.uint8)).save(folder / "a.png")
    image.fromarray(rng.integers(0, 256, (20, 9, 3), np.uint8)).save(folder / "more" / "b.jpg")
    np.save(folder / "c.npy", rng.normal(size=(2, 1, 6, 6)))
    np.save(folder / "d.npy", rng.normal(size=(1, 6, 6)))
    (folder / "notes.txt").write_text("not for reading")
    return folder


def test_export_says_how_small_it_got(master: Path, tmp_path: Path) -> None:
    said = call(export, master, tmp_path / "out.onnx", "--bits", "w4a8").output
    assert "W4A8" in said
    assert onnx.load(tmp_path / "out.onnx").graph.node
    with pytest.raises(SpecError, match="looks like W4A8"):
        call(export, master, tmp_path / "other.onnx", "--bits", "four")
    assert not (tmp_path / "other.onnx").exists()


def test_reconstruct_fits_the_widths_that_are_named(master: Path, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(64, 1, 6, 6)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    said = call(
        reconstruct, master, "--calibrate", tmp_path / "x.npy", "--bits", "W2A8,W3A8", "--out", tmp_path / "b.onnx"
    )
    assert "W2A8 W3A8 fitted to 64 inputs" in said.output

    def error(path: Path, weights: int) -> float:
        session = load(path)
        exact = np.asarray(session.run(x))
        session.set_bits(weights=weights, activations=8)
        return float(np.square(np.asarray(session.run(x)) - exact).mean())

    assert error(tmp_path / "b.onnx", 2) < 0.9 * error(master, 2)
    assert error(tmp_path / "b.onnx", 4) == error(master, 4)  # a width that was not named
    before = master.read_bytes()
    with pytest.raises(SpecError, match="say --calibrate WHAT"):
        call(reconstruct, master)
    with pytest.raises(SpecError, match="widths of 2 to 16 bits"):
        call(reconstruct, master, "--calibrate", tmp_path / "x.npy", "--bits", "FP")
    assert master.read_bytes() == before


# Inputs


def test_files_become_examples_of_the_right_shape(pictures: Path) -> None:
    assert [path.name for path in find_files(pictures)] == ["a.png", "c.npy", "d.npy", "b.jpg"]
    takes, how = [Input("x", np.dtype(np.float32), (0, 1, 6, 6))], Preprocessing(mean=(0.5,), std=(0.25,))
    arrays = {Path(label).name: feed["x"] for label, feed in read_feeds([str(pictures)], takes, how)}
    assert list(arrays) == ["a.png", "c.npy[0]", "c.npy[1]", "d.npy", "b.jpg"]
    assert all(x.shape == (1, 1, 6, 6) and x.dtype == np.float32 for x in arrays.values())
    pixels = np.random.default_rng(0).integers(0, 256, (6, 6), np.uint8)
    np.testing.assert_allclose(arrays["a.png"][0, 0], (pixels / 255 - 0.5) / 0.25, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(arrays["d.npy"][0], np.load(pictures / "d.npy").astype(np.float32))
    colour = read_one(pictures / "more" / "b.jpg", (3, 4, 8), mean=(0.0, 0.0, 1.0), std=(1.0, 1.0, 1.0))
    assert colour.shape == (1, 3, 4, 8)
    assert colour[0, 2].max() <= 0 <= colour[0, 0].min()


def test_files_that_do_not_fit_are_named(pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\nxxxx")
    np.save(tmp_path / "odd.npy", np.zeros((3, 3)))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    problems = {
        "bad.png": "is no picture",
        "odd.npy": r"any x 1 x 6 x 6, float32\); got \[3, 3\]",
        "objects.npy": "numpy",
    }
    for name, message in problems.items():
        with pytest.raises(DataError, match=f"{name}.*{message}"):
            read_one(tmp_path / name, (1, 6, 6))
    with pytest.raises(DataError, match="which no picture has"):
        read_one(pictures / "a.png", (5,))
    with pytest.raises(DataError, match="no such file"):
        find_files(tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no picture"):
        find_files(tmp_path / "empty")


# Running


def lines(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.output.splitlines()]


def test_run_prints_which_width_served_each_file(master: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    charges = iter([80.0, 40.0, 40.0, 10.0, 21.0])
    monkeypatch.setattr("anybit.cli.run.read_machine", lambda: Reading(next(charges), on_mains=False))
    got = lines(call(run, master, "--input", pictures, "--steps", "20:W4A4 50:W8A8", "--json"))
    assert [Path(line["file"]).name for line in got] == ["a.png", "c.npy[0]", "c.npy[1]", "d.npy", "b.jpg"]
    assert [line["bits"] for line in got] == ["FP", "W8A8", "W8A8", "W4A4", "W4A4"]
    session = load(master)
    session.set_bits(weights=4, activations=4)
    (said,) = got[3]["outputs"]
    want = session.run(read_one(pictures / "d.npy", (1, 6, 6)))
    assert (said["name"], said["shape"]) == ("y", [1, 3])
    assert (said["low"], said["high"]) == (float(want.min()), float(want.max()))
    assert "class" not in got[3]  # nobody said that these are scores of classes


def test_run_on_a_machine_without_a_battery(master: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anybit.cli.run.read_machine", Reading)
    said = call(run, master, "--input", pictures / "a.png").output
    assert said.startswith("FP ")
    assert call(run, master, "--input", pictures / "a.png", "--bits", "W3A3").output[:4] == "W3A3"
    assert call(run, master, "--input", pictures / "a.png", "--policy", "power").output[:3] == "FP "


def test_run_takes_files_as_a_shell_lists_them(master: Path, pictures: Path) -> None:
    said = call(run, master, pictures / "a.png", pictures / "d.npy", "--bits", "W4A8", "--input", pictures / "c.npy")
    assert [Path(line.split()[-1]).name for line in said.output.splitlines()] == [
        "a.png",
        "d.npy",
        "c.npy[0]",
        "c.npy[1]",
    ]


def test_a_fixed_width_does_not_ask_the_machine(master: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Reading:
        raise AssertionError("asked")

    monkeypatch.setattr("anybit.cli.run.read_machine", nobody)
    said = call(run, master, "--input", pictures / "a.png", "--policy", "fixed", "--bits", "W4A8", "--json")
    assert [line["bits"] for line in lines(said)] == ["W4A8"]
    with pytest.raises(AssertionError, match="asked"):
        call(run, master, "--input", pictures / "a.png", "--policy", "battery")


def test_names_and_normalization_come_from_the_master(tmp_path: Path, pictures: Path) -> None:
    about = {"classes": ["cat", "dog", "cow"], "input": {"mean": [0.5], "std": [0.2]}}
    write_master(tmp_path / "m.onnx", MODEL, header_with(about=about))
    (line,) = lines(call(run, tmp_path / "m.onnx", "--input", pictures / "a.png", "--policy", "fixed", "--json"))
    session = load(tmp_path / "m.onnx")
    session.set_bits(weights=8, activations=8)
    best = int(session.run(read_one(pictures / "a.png", (1, 6, 6), mean=(0.5,), std=(0.2,))).argmax())
    assert (line["class"], line["label"]) == (best, about["classes"][best])  # type: ignore[index]
    for broken in ({"mean": "x"}, {"std": [0]}, {"mean": [1, 2]}, [], {"scale": 1}):
        write_master(tmp_path / "m.onnx", MODEL, header_with(about={"input": broken}))
        with pytest.raises(DataError, match=r"about\.input"):
            call(run, tmp_path / "m.onnx", "--input", pictures / "a.png")


def test_policies_have_names(master: Path) -> None:
    session = load(master)

    def find(name: str, bits: str | None = None, steps: str = "") -> Any:
        return find_policy(name, session, bits=bits, steps=steps, milliseconds=1e6)

    assert find("latency")(Reading()) is not None
    assert find("power", "W4A4")(Reading(5, on_mains=False)) == Bits(4, 4)
    assert find("fixed", "W4A4")(Reading()) == Bits(4, 4)
    for name, settings, message in (
        ("solar", {}, "battery, power, latency, fixed; got 'solar'"),
        ("battery", {"bits": "W4A4"}, "policy battery chooses the widths itself"),
        ("fixed", {"steps": "20:W4A4"}, "--steps is for policy battery"),
    ):
        with pytest.raises(SpecError, match=message):
            find(name, **settings)  # type: ignore[arg-type]


def test_watch_looks_as_often_as_asked(master: Path) -> None:
    said = call(watch, master, "--times", "2", "--every", "0", "--policy", "fixed", "--bits", "W4A8").output
    assert "W4A8" in said
    assert "ms per run" in said


# Measuring


@pytest.mark.parametrize(("longest", "batch"), [(30.0, 32), (0.0, 1)])
def test_bench_times_no_batch_that_takes_too_long(
    longest: float, batch: int, master: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anybit.artifact.bench.LONGEST", longest)
    (gain,) = measure_gains(load(master, threads=1), [Bits()], rounds=1)
    assert gain.batch == batch


def test_bench_measures_every_width(master: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 1, 6, 6)).astype(np.float32)
    session = load(master, threads=1)
    y = session.run(x).argmax(1)
    widths, steps = [Bits(), Bits(8, 8), Bits(2, 2), Bits(8, 8)], itertools.count()
    gains = measure_gains(session, widths, rounds=2, data=(x, y), on_step=lambda: next(steps))
    assert next(steps) == steps_of(widths[:3], rounds=2)
    assert [Bits(g.weights, g.activations) for g in gains] == [Bits(), Bits(8, 8), Bits(2, 2)]
    assert gains[0].accuracy == 1.0
    assert gains[1].accuracy is not None
    assert gains[2].accuracy is not None
    assert gains[2].accuracy < gains[1].accuracy <= 1.0
    assert all(g.latency > 0 and g.throughput > 0 and g.resident_bytes > 0 and g.n == 100 for g in gains)
    assert {name: array.shape for name, array in session.example().items()} == {"x": (1, 1, 6, 6)}
    size, _ = footprint(master, Bits(4, 8), {"x": x[:1]})
    call(export, master, tmp_path / "out.onnx", "--bits", "W4A8")
    assert size == (tmp_path / "out.onnx").stat().st_size


def test_bench_prints_and_writes(master: Path, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    said = call(bench, master, "--widths", "FP W4A4", "--rounds", "1", "--out", out).output
    assert "W4A4" in said
    record = json.loads(out.read_text())
    assert [(row["weights"], row["accuracy"]) for row in record["rows"]] == [(32, None), (4, None)]
    assert {"commit", "machine"} <= record["origin"].keys()
    assert json.loads(call(bench, master, "--widths", "W4A4", "--rounds", "1", "--json").output)["threads"] == 1


def test_bench_tells_the_accuracy_on_test_data(master: Path, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(9, 1, 6, 6)).astype(np.float32)
    y = np.asarray(load(master).run(x)).argmax(1)
    y[0] = (y[0] + 1) % 3
    np.savez(tmp_path / "mine.npz", x_test=x, y_test=y)
    words = ["--widths", "FP", "--rounds", "1", "--data", tmp_path / "mine.npz", "--json"]
    assert json.loads(call(bench, master, *words).output)["rows"][0]["accuracy"] == pytest.approx(8 / 9)


# Adopting


def test_adopt_from_pictures_and_from_batch_norm(pictures: Path, tmp_path: Path) -> None:
    onnx.save(with_norm(), tmp_path / "other.onnx")
    call(
        adopt,
        tmp_path / "other.onnx",
        "--out",
        tmp_path / "a.onnx",
        "--calibrate",
        pictures,
        "--mean",
        "0.5",
        "--std",
        "0.25",
    )
    first = open_master(tmp_path / "a.onnx").header
    assert first.about["input"] == {"mean": [0.5], "std": [0.25]}
    assert first.about["quantized"]["weights"] == 1.0
    assert all("calibration" in r.source for a in first.plan.activations for _, r in a.ranges)
    call(adopt, tmp_path / "other.onnx", "--out", tmp_path / "b.onnx", "--store", "int8")
    second = open_master(tmp_path / "b.onnx").header
    assert second.store == "int8"
    assert {r.source for a in second.plan.activations for _, r in a.ranges} == {"batch norm normed"}
    with pytest.raises(SpecError, match="one number or three"):
        call(adopt, tmp_path / "other.onnx", "--mean", "x")
    for flag, text in (("--mean", "1 2"), ("--mean", ""), ("--std", "0")):
        with pytest.raises(SpecError, match=r"one number( above 0)? or three"):
            call(adopt, tmp_path / "other.onnx", flag, text)
    with pytest.raises(AnybitError, match="no such file"):
        call(adopt, tmp_path / "gone.onnx")


# Saving


def test_save_from_a_checkpoint_measures_and_tells(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    from anybit.cli.save import save
    from anybit.models import build_model
    from anybit.task.checkpoint import save_checkpoint

    shape = {"name": "small-conv", "channels": 1, "classes": 10, "multiplier": 0.25}
    model = build_model(**shape)  # type: ignore[arg-type]
    about = {"model": shape, "data": "digits", "seed": 0}
    save_checkpoint(tmp_path / "run" / "model.safetensors", model, about)
    out = tmp_path / "m.onnx"
    said = call(save, tmp_path / "run", "--out", out, "--store", "int8", "--widths", "W8A8 W3A3").output
    assert "from 8-bit codes" in said
    header = open_master(out).header
    assert header.store == "int8"
    assert header.about["training"] == about
    assert header.about["measured"].keys() == header.about["measured_from_fp32"].keys() == {"W8A8", "W3A3"}
    assert header.about["classes"] == [str(i) for i in range(10)]
    assert header.about["input"] == {"size": [8, 8], "channels": "grey"}
