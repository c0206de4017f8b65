from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import anybit
from anybit.cli import main
from anybit.cli.main import PANELS
from anybit.errors import AnybitError, CaptureError, CheckpointError, FileError, RecipeError, SpecError
from anybit.pages.rows import read_rows
from anybit.task.checkpoint import FORMAT, read_checkpoint

VERBS = [verb for verbs in PANELS.values() for verb in verbs]

RECIPE = """
name = "tiny"
epochs = 1
[model]
name = "small-conv"
multiplier = 0.25
[data]
name = "digits"
batch = 128
[penalty]
weight = 1e-3
activation = 1e-3
"""

Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *words: object) -> tuple[int, str, str]:
    """Run a command in this process; return its exit code and what it printed."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    out, err = capsys.readouterr()
    code = stop.value.code
    return (0 if code is None else int(code)), out, err


def fails(capsys: Capture, *words: object, path: Path | str, match: str = "") -> str:
    """Check that a command ends with code 2 and one line on stderr that names the path."""
    code, _, err = run(capsys, *words)
    assert code == 2, err
    assert len(err.splitlines()) == 1, err
    assert err.startswith("error: ")
    assert str(path) in err
    assert match in err
    assert "Traceback" not in err
    return err


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder made by the command line itself."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "tiny.toml").write_text(RECIPE)
    with contextlib.suppress(SystemExit):
        main(["train", str(folder / "tiny.toml"), "--out", str(folder / "run")])
    return folder


def test_help_lists_the_verbs_and_each_has_help_with_an_example(capsys: Capture) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for verb in VERBS:
        assert f" {verb} " in out
        code, text, _ = run(capsys, verb, "--help")
        assert code == 0
        assert f"Example: anybit {verb}" in " ".join(text.split())
    assert "Exit codes" in out
    assert len(out.splitlines()) <= 48  # one screen
    places = [out.index(panel) for panel in PANELS]
    assert places == sorted(places)  # who starts, trains, integrates, researches


def test_search_prints_json(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "tiny.toml").write_text(RECIPE)
    words = ["search", tmp_path / "tiny.toml", "--vary", "optimizer.lr", "--values", "0.01,0.001", "--share", "0.2"]
    code, out, err = run(capsys, *words, "--storage", f"sqlite:///{tmp_path}/s.db", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["keys"] == ["optimizer.lr"]
    accuracies = dict(found["accuracies"])
    assert {0.01, 0.001} <= set(accuracies)
    assert accuracies[found["chosen"]] == max(accuracies.values())


def test_save_prints_json(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    words = ["save", trained / "run", "--out", tmp_path / "m.onnx", "--widths", "FP W4A8", "--store", "int8", "--json"]
    code, out, err = run(capsys, *words)
    assert code == 0, err
    found = json.loads(out)
    assert found["bytes"] == (tmp_path / "m.onnx").stat().st_size
    assert set(found["measured"]) == set(found["measured_from_fp32"]) == {"FP", "W4A8"}
    assert all(0 <= value <= 1 for value in found["measured"].values())


def test_version(capsys: Capture) -> None:
    assert run(capsys, "--version") == (0, f"anybit {anybit.__version__}\n", "")


@pytest.mark.parametrize("words", [["-m", "anybit", "--version"], ["-m", "anybit", "report", "nowhere/rows.json"]])
def test_python_m_anybit_is_the_same(words: list[str]) -> None:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120)
    if "--version" in words:
        assert (done.returncode, done.stdout, done.stderr) == (0, f"anybit {anybit.__version__}\n", "")
    else:
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "error: nowhere/rows.json: no such file; rows.json of a run is expected here\n"


def test_the_console_script_is_installed() -> None:
    script = Path(sys.executable).with_name("anybit")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"anybit {anybit.__version__}\n")


def test_a_word_that_is_no_verb_or_option(capsys: Capture) -> None:
    for words in (["fly"], ["train"], ["train", "--bogus"], ["sweep", "a", "b"], ["train", "x.toml", "--seed", "one"]):
        code, _, err = run(capsys, *words)
        assert code == 2
        assert "Traceback" not in err


def test_train_sweep_report(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    assert {p.name for p in (trained / "run").iterdir()} == {"model.safetensors", "run.json", "log.jsonl"}
    code, out, err = run(capsys, "train", trained / "tiny.toml", "--out", tmp_path / "run", "--seed", 5)
    assert (code, err) == (0, "")
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["seed"] == about["recipe"]["seed"] == 5
    accuracy = 100 * about["results"]["validation_accuracy"]
    assert out == f"validation accuracy {accuracy:.1f} %, in floating point\n" + (
        f"{tmp_path / 'run'}/: model.safetensors, run.json, log.jsonl\n"
    )

    rows = tmp_path / "rows.json"
    code, out, err = run(capsys, "sweep", tmp_path / "run", "--widths", "FP w8a8 4,32", "--out", rows)
    assert (code, err) == (0, "")
    file = read_rows(rows)
    assert [str(row.bits) for row in file.rows] == ["FP", "W8A8", "W4A32"]
    assert {(row.label, row.seed, row.n) for row in file.rows} == {("run", 5, 450)}
    assert {"commit", "machine", "versions", "date"} <= set(file.origin)
    for row in file.rows:
        assert f"{100 * row.accuracy:.1f}" in out

    code, out, err = run(capsys, "report", rows)
    assert (code, err) == (0, "")
    assert out == f"{tmp_path / 'report.html'}\n"
    text = (tmp_path / "report.html").read_text()
    assert f"{100 * file.rows[2].accuracy:.1f}" in text
    code, out, _ = run(capsys, "report", tmp_path, "--out", tmp_path / "pages" / "p.html")
    assert (code, out) == (0, f"{tmp_path / 'pages' / 'p.html'}\n")
    assert (tmp_path / "pages" / "p.html").read_text() == text


def test_sweep_prints_json_a_plan_and_takes_options(trained: Path, capsys: Capture) -> None:
    path = trained / "run" / "model.safetensors"
    code, out, _ = run(capsys, "sweep", path, "--widths", "FP W3A32", "--json", "--plan")
    assert code == 0
    plain = json.loads(out)
    assert [(row["weights"], row["activations"]) for row in plain] == [(32, 32), (3, 32)]
    assert plain[0]["kl"] == 0.0
    words = ["--no-per-channel", "--no-asymmetric", "--helpers", "none"]
    code, out, _ = run(capsys, "sweep", path, "--widths", "FP W3A32", "--json", *words)
    assert code == 0
    other = json.loads(out)
    assert other[0]["accuracy"] == plain[0]["accuracy"]
    assert other[1]["loss"] != plain[1]["loss"]
    code, out, _ = run(capsys, "sweep", path, "--widths", "FP", "--plan")
    assert code == 0
    assert "batch norm features.1" in out


def test_the_same_recipe_and_seed_give_the_same_checkpoint(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    run(capsys, "train", trained / "tiny.toml", "--out", tmp_path / "run")
    tensors, about = read_checkpoint(tmp_path / "run" / "model.safetensors")
    want, want_about = read_checkpoint(trained / "run" / "model.safetensors")
    assert about == want_about
    assert tensors.keys() == want.keys()
    assert all(torch.equal(tensors[name], want[name]) for name in want)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("epochs = 1", "epochs = one", "not valid TOML"),
        ("epochs = 1", "epoch = 1", "did you mean 'epochs'?"),
        ("epochs = 1", "epochs = 0", "epochs must be above zero"),
        ("multiplier = 0.25", 'multiplier = "thin"', "'model.multiplier' must be a number"),
        ('"small-conv"', '"small-cov"', "no model 'small-cov'"),
        ('"digits"', '"digit"', "did you mean 'digits'?"),
        ('"digits"', '"nowhere.npz"', "nowhere.npz: no such file"),
        ("batch = 128", "batch = 1", "gives batches of one example"),
        ("epochs = 1", "epochs = 1\ninit = 'gone.safetensors'", "gone.safetensors: no such file"),
    ],
)
def test_a_bad_recipe(old: str, new: str, message: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.replace(old, new))
    named = path if "gone" not in message else "gone.safetensors"
    fails(capsys, "train", path, "--out", tmp_path / "run", path=named, match=message)
    assert not (tmp_path / "run").exists()


def test_recipes_that_are_not_there(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "noise").write_bytes(bytes(range(256)))
    for name in ("missing.toml", "", "noise", "x" * 300):
        fails(capsys, "train", tmp_path / name, path=tmp_path / name)
    for verb in ("sweep", "report"):  # the system refuses to even look at such a name
        fails(capsys, verb, tmp_path / ("x" * 300), path=tmp_path)
    (tmp_path / "ok.toml").write_text(RECIPE)
    (tmp_path / "file").write_text("here")
    fails(capsys, "train", tmp_path / "ok.toml", "--out", tmp_path / "file", path=tmp_path / "file")
    fails(capsys, "train", tmp_path / "ok.toml", "--seed", -1, path="", match="seed must be zero or more")


def damaged(source: Path, target: Path, kind: str) -> Path:
    raw = source.read_bytes()
    tensors = safetensors.torch.load(raw)
    about: Any = {"model": {"name": "small-conv", "channels": 1, "classes": 10, "multiplier": 0.25}, "data": "digits"}
    if kind == "truncated":
        target.write_bytes(raw[:-50])
    elif kind == "empty":
        target.write_bytes(b"")
    elif kind == "text":
        target.write_text("not a checkpoint")
    elif kind == "pickle":
        torch.save(tensors, target)
    else:
        if kind == "nan":
            tensors["classifier.weight"][0, 0] = float("nan")
        elif kind == "shape":
            tensors["classifier.bias"] = torch.zeros(3)
        elif kind == "key":
            del tensors["classifier.bias"]
        elif kind == "model":
            about["model"]["multiplier"] = 1e12
        elif kind == "seed":
            about["seed"] = "three"
        safetensors.torch.save_file(tensors, target, metadata={"format": FORMAT, "about": json.dumps(about)})
    return target


@pytest.mark.parametrize(
    "kind", ["truncated", "empty", "text", "pickle", "nan", "shape", "key", "model", "seed", "missing", "folder"]
)
def test_a_bad_checkpoint(kind: str, trained: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "bad.safetensors"
    if kind == "folder":
        path.mkdir()
    elif kind != "missing":
        damaged(trained / "run" / "model.safetensors", path, kind)
    fails(capsys, "sweep", path, "--widths", "W8A8", path=path)


def test_a_header_without_data_set(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    path = damaged(trained / "run" / "model.safetensors", tmp_path / "model.safetensors", "whole")
    assert run(capsys, "sweep", path, "--widths", "W8A8")[0] == 0
    assert "did you mean 'digits'" in fails(capsys, "sweep", path, "--data", "digit", path="")


@pytest.mark.parametrize("widths", ["W1A1", "W4", "", "W8A8 W17A8", "8"])
def test_bad_widths(widths: str, trained: Path, capsys: Capture) -> None:
    err = fails(capsys, "sweep", trained / "run", "--widths", widths, path="")
    assert "width" in err or "must be 2 to 16" in err


def test_bad_data(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "mine.npz"
    x, y = np.random.default_rng(0).random((20, 1, 8, 8)), np.arange(20) % 10
    np.savez(path, x_train=x, y_train=y, x_test=x, y_test=y)
    words = ("sweep", trained / "run", "--widths", "W8A8", "--data", path)
    assert run(capsys, *words)[0] == 0
    raw = path.read_bytes()

    path.write_bytes(raw[: len(raw) // 2])
    fails(capsys, *words, path=path, match="not a whole .npz file")
    path.unlink()
    fails(capsys, *words, path=path, match="no such file")
    np.savez(path, x_train=x * np.nan, y_train=y, x_test=x, y_test=y)
    fails(capsys, *words, path=path, match="infinite or NaN")
    colour = np.repeat(x, 3, axis=1)
    np.savez(path, x_train=colour, y_train=y, x_test=colour, y_test=y)
    fails(capsys, *words, path=path, match="is for images of 1 channels")
    np.savez(path, x_train=x, y_train=y + 1, x_test=x, y_test=y)
    fails(capsys, *words, path=path, match="in 11 classes")


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"format": "anybit-rows/1", "rows": [], "notes": []}', "\x00"])
def test_bad_rows(text: str | None, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "rows.json"
    if text is not None:
        path.write_text(text)
    fails(capsys, "report", path, path=path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    ("words", "error"),
    [(["train", "gone"], RecipeError), (["sweep", "gone"], CheckpointError), (["report", "gone"], FileError)],
)
def test_with_debug_anywhere_the_exception_comes_through(words: list[str], error: type, place: int) -> None:
    with pytest.raises(error, match="gone: no such file"):
        main([*words[:place], "--debug", *words[place:]])


def test_an_error_with_a_list_of_problems_is_one_line_too(
    trained: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give_up(*args: object, **kwargs: object) -> None:
        raise CaptureError("cannot be captured", ["layer1: is odd", "layer2: is [red]even[/red]"])

    monkeypatch.setattr("anybit.task.task.prepare", give_up)
    code, _, err = run(capsys, "sweep", trained / "run")
    assert (code, err) == (2, "error: cannot be captured: layer1: is odd; layer2: is [red]even[/red]\n")


def test_long_messages_are_not_broken_into_lines(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / ("deep " * 40) / ("down " * 40) / "rows.json"
    fails(capsys, "report", path, path=path)


def test_a_bug_is_not_dressed_up_as_bad_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def bug(*args: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("anybit.cli.report.read_rows", bug)
    with pytest.raises(ZeroDivisionError):
        main(["report", str(tmp_path)])


def interrupt(*args: object, **kwargs: object) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_is_code_130(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture) -> None:
    monkeypatch.setattr("anybit.cli.report.read_rows", interrupt)
    code, out, err = run(capsys, "report", tmp_path)
    assert (code, out, err) == (130, "", "interrupted\n")
    with pytest.raises(KeyboardInterrupt):
        main(["--debug", "report", str(tmp_path)])


def test_ctrl_c_in_the_middle_of_training_keeps_the_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "tiny.toml").write_text(RECIPE)
    monkeypatch.setattr("anybit.train.loop.validate", interrupt)
    code, _, err = run(capsys, "train", tmp_path / "tiny.toml", "--out", tmp_path / "run")
    assert (code, err) == (130, "interrupted\n")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"run.json", "log.partial"}


def test_every_error_of_the_package_ends_with_code_2(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    found: list[type[AnybitError]] = [AnybitError]
    for kind in found:
        found += [k for k in kind.__subclasses__() if k.__module__ == "anybit.errors"]
    assert SpecError in found
    for kind in found:
        error = kind("a", "b", "c") if kind.__name__ == "MissingDependency" else kind("a mistake")
        monkeypatch.setattr("anybit.cli.report.read_rows", lambda path, error=error: (_ for _ in ()).throw(error))
        code, _, err = run(capsys, "report", ".")
        assert code == 2, kind
        assert err == f"error: {error}\n"


def test_no_colour_codes_outside_a_terminal(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "anybit", "report", str(tmp_path / "gone")]
    done = subprocess.run(words, capture_output=True, timeout=120, env={**os.environ, "TERM": "xterm-256color"})
    assert b"\x1b" not in done.stdout + done.stderr
