from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import typer
from PIL import Image
from typer.testing import CliRunner

from anybit.data import Dataset, Split, load_dataset
from anybit.errors import FileError, RecipeError, SpecError
from anybit.spec import Bits, Row
from anybit.task.checkpoint import load_model, read_checkpoint
from anybit.train.recipe import Recipe, load_recipe
from anybit.train.search import Found, Knob
from paper import starts, tables
from paper import table as module
from paper.rows import (
    CONVERGED_ROWS,
    DRAWN,
    IMAGENET_ROWS,
    IMAGENET_WIDTHS,
    PAPER_COST,
    PAPER_WIDTHS,
    ROWS,
    VARIANTS,
    WIDTHS,
    TableRow,
    paper_numbers,
)
from paper.show import Cell, accuracy_at, accuracy_rows, cell, cost, favoured, spoken, table_text, write_table
from paper.table import command, run_table
from paper.tables import RECIPES, SETTINGS, Job, Setting, Table, find_table, read_entries, same_recipe

RECIPE = """
name = "tiny-{part}"
epochs = 1
[model]
name = "small-conv"
multiplier = 0.25
[data]
name = "digits"
batch = 64
augment = false
[optimizer]
lr = 0.05
"""

NONE, LESS, STRAIGHT = (row for row in ROWS if row.name in ("none", "kurtosis", "ste-4-4"))
BOTH = TableRow("both", "Both", {"penalty.noise": 1.0}, takes=("kurtosis",))
SHARED = TableRow("kurtosis", "Kurtosis", knob=Knob(("penalty.kurtosis",), (0.001, 0.003)))
SMALL = {"per-tensor": Setting(widths=(Bits(), Bits(4, 4)))}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    """A small table on some digits; searches are answered at once."""
    data = load_dataset("digits")
    small = dataclasses.replace(data, train=Split(data.train.x[:128], data.train.y[:128]))
    monkeypatch.setattr(module, "load_dataset", lambda name, code: small)
    monkeypatch.setattr(module, "search", answer)
    folder = tmp_path / "recipes" / "laptop"
    folder.mkdir(parents=True)
    for network in ("one", "two"):
        for part in ("base", "tune"):
            (folder / f"{network}-{part}.toml").write_text(RECIPE.format(part=f"{network}-{part}"))
    return Table(
        networks=("one", "two"),
        rows=(NONE, LESS, BOTH, STRAIGHT),
        settings=SMALL,
        recipes=tmp_path / "recipes",
        runs=tmp_path / "runs",
        results=tmp_path / "results",
    )


def answer(recipe: Recipe, data: Dataset, knob: Knob, *, on_trial: Any, **more: Any) -> Found:
    asked.append((recipe.name, knob.keys, recipe.seed))
    told.append(more["known"])
    on_trial(0.002, 0.9)
    return Found(knob.keys, knob.aim, 0.002, {0.0: 0.9, 0.002: 0.9, 0.1: 0.1}, 0.005, 1, 1 / 3)


asked: list[tuple[str, tuple[str, ...], int]] = []
told: list[dict[float, float]] = []
"""For each search, what it was told of trials made before."""


def measure_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capturing a network takes a second: where it does not matter, the accuracy is read off the weights."""

    def sweep(net: Any, loader: Any, *, widths: Any, label: str) -> list[Row]:
        accuracy = float(net.classifier.bias.detach().square().mean())
        return [Row(label, 0, b.weights, b.activations, accuracy, 1.0, len(loader)) for b in widths]

    monkeypatch.setattr(module, "quantized", lambda model, data, **options: model)
    monkeypatch.setattr(module.anybit, "sweep", sweep)


@pytest.fixture
def measured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_at_once(monkeypatch)


def run(table: Table, *, network: str = "one", seed: int = 0, rows: Any = None, again: bool = False) -> list[str]:
    asked.clear()
    said: list[str] = []
    run_table(table, networks=[network], seeds=[seed], rows=rows or table.rows, again=again, say=said.append)
    return said


def trained(said: list[str]) -> list[str]:
    return [line.rpartition(" ")[2] for line in said if ": training" in line and "base" not in line]


# Running


def test_every_row_is_trained_from_the_same_start_and_measured(table: Table) -> None:
    said = run(table)
    assert said[0] == "one, seed 0: training the base network"
    assert trained(said) == ["none", "kurtosis", "both", "ste-4-4"]
    entries = read_entries(table.file)
    assert [entry["row"] for entry in entries] == ["none", "kurtosis", "both", "ste-4-4"]
    start = str(table.runs / "tiny-one-base-0" / "model.safetensors")
    for entry in entries:
        assert (entry["network"], entry["seed"]) == ("one", 0)
        assert (entry["recipe"]["init"], entry["recipe"]["epochs"]) == (start, 1)
        assert {kind: len(times) for kind, times in entry["epoch_seconds"].items()} == {"wall": 1, "processor": 1}
        assert entry["trained"]["commit"]
        assert entry["measured"]["machine"]["cpu"]
        for split, n in (("test", 450), ("validation", 250)):
            rows = entry["settings"]["per-tensor"][split]
            assert [(row["weights"], row["activations"]) for row in rows] == [(32, 32), (4, 4)]
            assert {row["n"] for row in rows} == {n}
        checked = entry["settings"]["per-tensor"]["validation"][0]["accuracy"]
        assert checked == pytest.approx(entry["validation"]["validation_accuracy"], abs=0.005)
    none, less, both, straight = (entry["recipe"] for entry in entries)
    assert (none["penalty"]["kurtosis"], none["penalty"]["noise"], none["quantize"]["widths"]) == (0.0, 0.0, [])
    assert less["penalty"]["kurtosis"] == both["penalty"]["kurtosis"] == 0.002
    assert (less["penalty"]["noise"], both["penalty"]["noise"]) == (0.0, 1.0)
    assert (straight["quantize"]["widths"], straight["optimizer"]["lr"]) == (["W4A4"], 0.002)
    # What is there is not done again.
    before = table.file.read_bytes()
    assert run(table) == []
    assert asked == []
    assert table.file.read_bytes() == before


@pytest.mark.usefixtures("measured_at_once")
def test_searches_are_done_once_per_network_with_seed_0(table: Table) -> None:
    run(table, rows=[LESS], seed=3)
    assert asked == [("laptop one kurtosis", ("penalty.kurtosis",), 0)]
    found = json.loads((table.runs / "table1-laptop" / "search-one-kurtosis.json").read_text())
    assert found["chosen"] == 0.002
    assert found["origin"]["commit"]
    (entry,) = read_entries(table.file)
    assert (entry["seed"], entry["recipe"]["seed"]) == (3, 3)
    assert entry["recipe"]["init"].endswith("tiny-one-base-3/model.safetensors")
    run(table, rows=[BOTH])
    assert asked == []  # shares what was found for the other row
    run(table, rows=[LESS], network="two")
    assert asked == [("laptop two kurtosis", ("penalty.kurtosis",), 0)]
    assert len(read_entries(table.file)) == 3


@pytest.mark.usefixtures("measured_at_once")
def test_a_strength_that_costs_too_much_in_the_whole_training_is_weakened(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_then_score(recipe: Recipe, data: Dataset, folder: Path, **more: Any) -> None:
        real(recipe, data, folder, **more)
        values = json.loads((folder / "run.json").read_text())
        values["results"]["validation_accuracy"] = 0.9 - 10 * recipe.penalty.kurtosis
        (folder / "run.json").write_text(json.dumps(values))

    real = module.train
    monkeypatch.setattr(module, "train", train_then_score)
    proven = dataclasses.replace(table, proven=True)
    said = run(proven, rows=[BOTH], seed=1)  # takes what the row of seed 0 shows, which wants the one without penalty
    assert trained(said) == ["none", "kurtosis", "kurtosis", "kurtosis", "kurtosis", "both"]
    assert "  0.002: 88.00 % of 90.00 % after the whole training, too strong" in said
    (less,) = (entry["recipe"] for entry in read_entries(table.file) if entry["row"] == "kurtosis")
    (both,) = (entry["recipe"] for entry in read_entries(table.file) if entry["row"] == "both")
    assert less["penalty"]["kurtosis"] == both["penalty"]["kurtosis"] == 0.00035
    found = json.loads((table.runs / "table1-laptop" / "search-one-kurtosis.json").read_text())
    values = [value for value, _ in found["whole trainings"]]
    assert values == [0.002, 0.0011, 0.00062, 0.00035]
    aside = sorted(path.name for path in (table.runs / "table1-laptop/one-0").glob("kurtosis-*/model.safetensors"))
    assert len(aside) == 3
    said = run(proven, rows=[BOTH, LESS], seed=1)
    assert trained(said) == ["kurtosis"]  # of that seed, and nothing is held against it
    assert trained(run(proven, rows=[BOTH, LESS])) == ["both"]
    assert run(proven, rows=[BOTH, LESS]) == []
    shutil.rmtree(table.runs / "table1-laptop/one-0")  # what was published of the one without penalty is enough
    assert trained(run(proven, rows=[LESS])) == ["kurtosis"]
    table.file.unlink()
    shutil.rmtree(table.runs / "table1-laptop/one-0")
    assert trained(run(proven, rows=[LESS])) == ["none", "kurtosis"]
    shutil.rmtree(table.runs)  # on another machine, what was published says that the strength holds
    assert trained(run(proven, rows=[BOTH])) == ["both"]


@pytest.mark.usefixtures("measured_at_once")
def test_on_another_machine_what_was_published_is_taken(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    run(table, rows=[LESS])
    assert json.loads(table.searches.read_text())["searches"]["one"]["kurtosis"]["chosen"] == 0.002
    published = table.runs.with_name("published")
    shutil.copytree(table.runs / "tiny-one-base-0", published / "tiny-one-base-0")
    monkeypatch.setattr(module, "CHECKPOINTS", published)
    shutil.rmtree(table.runs)
    said = run(table, rows=[LESS])
    assert said[0] == f"one, seed 0: the base network is that in {published / 'tiny-one-base-0'}"
    assert trained(said) == ["kurtosis"]
    assert asked == []
    path = table.recipes / "laptop" / "one-base.toml"  # of another recipe, and is trained again
    path.write_text(path.read_text().replace("batch = 64", "batch = 32"))
    shutil.rmtree(table.runs)
    assert run(table, rows=[LESS])[0] == "one, seed 0: training the base network"


@pytest.mark.usefixtures("measured_at_once")
def test_rows_that_choose_from_the_same_trials_make_them_once(table: Table) -> None:
    told.clear()
    run(table, rows=[LESS])
    shutil.rmtree(table.runs)  # the storage of the trials with it, as on another machine
    more = dataclasses.replace(LESS, name="more", tolerance=0.06, trials_of="kurtosis")
    other = dataclasses.replace(more, name="other", changes={"data.batch": 32})
    table = dataclasses.replace(table, rows=(LESS, more, other))
    assert trained(run(table, rows=[more, other])) == ["more", "other"]
    assert told == [{}, {0.0: 0.9, 0.002: 0.9, 0.1: 0.1}, {}]


@pytest.mark.usefixtures("measured_at_once")
def test_what_was_found_for_another_recipe_is_not_used(table: Table) -> None:
    run(table, rows=[LESS])
    assert len(asked) == 1
    path = table.recipes / "laptop" / "one-tune.toml"
    path.write_text(path.read_text().replace("batch = 64", "batch = 32"))
    assert trained(run(table, rows=[LESS])) == ["kurtosis"]
    assert len(asked) == 1
    assert run(table, rows=[LESS]) == []
    assert asked == []


@pytest.mark.usefixtures("measured_at_once")
def test_an_interrupted_table_goes_on(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.anybit.sweep

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(module.anybit, "sweep", stop)
    with pytest.raises(KeyboardInterrupt):
        run(table, rows=[NONE])
    assert read_entries(table.file) == []
    monkeypatch.setattr(module.anybit, "sweep", real)
    said = run(table, rows=[NONE])
    assert trained(said) == []  # the checkpoint was there
    assert [entry["row"] for entry in read_entries(table.file)] == ["none"]


@pytest.mark.usefixtures("measured_at_once")
def test_a_row_goes_on_in_the_middle(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    run(table, rows=[NONE])
    whole = read_checkpoint(table.folder(Job("one", 0, NONE)) / "model.safetensors")[0]
    stopped_at_once(table, monkeypatch)
    said = run(table, rows=[NONE])
    assert any(line.endswith("going on after step 1") for line in said), said
    again = read_checkpoint(table.folder(Job("one", 0, NONE)) / "model.safetensors")[0]
    assert all(torch.equal(again[name], value) for name, value in whole.items())


@pytest.mark.usefixtures("measured_at_once")
def test_what_another_recipe_left_in_the_middle_is_not_gone_on_with(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(table, rows=[NONE])
    stopped_at_once(table, monkeypatch)
    path = table.recipes / "laptop" / "one-tune.toml"
    path.write_text(path.read_text().replace("lr = 0.05", "lr = 0.01"))
    said = run(table, rows=[NONE])
    assert not any("going on" in line for line in said), said
    assert read_entries(table.file)[-1]["recipe"]["optimizer"]["lr"] == 0.01


def stopped_at_once(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train a row anew and stop it after its first step, as ctrl-C does."""
    shutil.rmtree(table.folder(Job("one", 0, NONE)))
    stop = functools.partial(module.train, progress=lambda done: signal.raise_signal(signal.SIGINT))
    with monkeypatch.context() as patch:
        patch.setattr(module, "train", stop)
        with pytest.raises(KeyboardInterrupt):
            run(table, rows=[NONE])


@pytest.mark.usefixtures("measured_at_once")
def test_a_new_setting_is_measured_without_training(table: Table) -> None:
    run(table, rows=[NONE])
    (old,) = read_entries(table.file)
    more = dataclasses.replace(table, settings={**SMALL, "wide": Setting({"per_channel": True}, (Bits(8, 8),))})
    assert trained(run(more, rows=[NONE])) == []
    (new,) = read_entries(table.file)
    assert new["settings"]["per-tensor"] == old["settings"]["per-tensor"]
    assert [row["weights"] for row in new["settings"]["wide"]["test"]] == [8]
    narrower = dataclasses.replace(table, settings={"per-tensor": Setting(widths=(Bits(), Bits(4, 4), Bits(2, 2)))})
    assert trained(run(narrower, rows=[NONE])) == []
    (newer,) = read_entries(table.file)
    assert len(newer["settings"]["per-tensor"]["test"]) == 3
    assert newer["settings"]["wide"] == new["settings"]["wide"]


def test_options_reach_prepare(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    real = module.anybit.prepare

    def look(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs)
        return real(*args, **kwargs)

    monkeypatch.setattr(module.anybit, "prepare", look)
    other = dataclasses.replace(table, settings={"a": Setting(), "b": Setting({"symmetric": False})})
    run(other, rows=[NONE])
    data = load_dataset("digits")
    always = {"input_range": data.input_range, "preset": "paper"}
    assert seen == [always, {**always, "symmetric": False}]


@pytest.mark.usefixtures("measured_at_once")
def test_again_measures_anew_and_trains_nothing(table: Table) -> None:
    run(table, rows=[NONE])
    before = read_entries(table.file)
    path = table.folder(Job("one", 0, NONE)) / "entry.json"
    values = json.loads(path.read_text())
    values["settings"]["per-tensor"]["test"][0]["accuracy"] = 0.123
    path.write_text(json.dumps(values))
    assert run(table, rows=[NONE]) == []
    said = run(table, rows=[NONE], again=True)
    assert trained(said) == []
    after = read_entries(table.file)
    assert [entry["settings"] for entry in after] == [entry["settings"] for entry in before]


@pytest.mark.usefixtures("measured_at_once")
def test_another_recipe_is_another_row(table: Table) -> None:
    run(table, rows=[NONE])
    path = table.recipes / "laptop" / "one-tune.toml"
    path.write_text(path.read_text().replace("lr = 0.05", "lr = 0.01"))
    assert trained(run(table, rows=[NONE])) == ["none"]
    (entry,) = read_entries(table.file)
    assert entry["recipe"]["optimizer"]["lr"] == 0.01


@pytest.mark.usefixtures("measured_at_once")
def test_how_fast_it_is_computed_makes_no_other_row(table: Table) -> None:
    run(table, rows=[NONE, LESS])
    path = table.recipes / "laptop" / "one-tune.toml"
    path.write_text(path.read_text() + "[speed]\nchannels_last = true\n")
    assert run(table, rows=[NONE, LESS]) == []
    recipe = load_recipe(path)
    known = recipe.to_dict()
    assert same_recipe(known, recipe)
    assert same_recipe({**known, "speed": {"of": "another version"}}, recipe)
    assert same_recipe({**known, "model": {"name": "small-conv", "width": 0.25}}, recipe)  # its name in older files
    assert not same_recipe({**known, "model": {"name": "small-conv", "width": 0.5}}, recipe)
    assert not same_recipe({**known, "epochs": 7}, recipe)
    assert not same_recipe({"epochs": 7}, recipe)
    assert not same_recipe({**known, "penalties": {}}, recipe)
    assert not same_recipe(None, recipe)
    cifar = recipe.changed({"data.name": "paper.cifar10:load"})
    assert same_recipe({**known, "data": {**known["data"], "name": "cifar10"}}, cifar)


@pytest.mark.usefixtures("measured_at_once")
def test_what_is_published_is_kept_and_not_taken_for_done(table: Table) -> None:
    run(table, rows=[NONE])
    other = {"network": "far away", "seed": 0, "row": "none"}
    values = json.loads(table.file.read_text())
    table.file.write_text(json.dumps({**values, "entries": [other, *values["entries"]]}))
    shutil.rmtree(table.folder(Job("one", 0, NONE)))
    assert trained(run(table, rows=[NONE])) == ["none"]  # the file alone does not count
    assert [entry["network"] for entry in read_entries(table.file)] == ["far away", "one"]


@pytest.mark.usefixtures("measured_at_once")
def test_the_loss_at_the_start_and_after_a_row_is_that_of_the_checkpoints(table: Table) -> None:
    run(table, rows=[NONE], seed=2)
    (found,) = starts.measured(table, images=40)
    assert (found["network"], found["seed"], found["images"]) == ("one", 2, 40)
    data = load_dataset("digits")
    for name, path in (
        ("start", table.base("one", 2)),
        ("after the row", table.folder(Job("one", 2, NONE)) / "model.safetensors"),
    ):
        model = load_model(path)[0].eval()
        with torch.no_grad():
            want = F.cross_entropy(model(data.train.x[:40]).double(), data.train.y[:40])
        assert found[name]["training"]["loss"] == pytest.approx(float(want), rel=1e-5)
    assert found["start"]["training"]["loss"] > found["after the row"]["training"]["loss"]
    assert found["start"]["validation"]["accuracy"] != found["start"]["training"]["accuracy"]
    other, path = {"network": "far away", "seed": 2}, table.runs / "starts.json"
    assert starts.merged([found], path) == [found]
    path.write_text(json.dumps({"rows": [other, {**found, "images": 7}]}))
    assert starts.merged([found], path) == [other, found]


WORKER = """
import sys, time
from pathlib import Path
sys.path.insert(0, "{tests}")
import pytest, test_table as here
from paper.tables import Setting, Table

patch = pytest.MonkeyPatch()
here.measure_at_once(patch)
if sys.argv[1] == "stuck":
    def stay(*args, **named):
        Path("stuck").touch()
        time.sleep(600)
    patch.setattr(here.module.anybit, "sweep", stay)
here.module.PAUSE = 0.2
place = Path("{folder}")
table = Table(rows=(here.NONE, here.SHARED), settings=here.SMALL, recipes=place / "recipes", runs=place / "runs",
              results=place / "results")
say = lambda line: print(line, flush=True)
here.run_table(table, networks=["one"], seeds=[0, 1], rows=table.rows, say=say)
"""


def worker(folder: Path, how: str) -> subprocess.Popen[str]:
    code = WORKER.format(tests=Path(__file__).parent, folder=folder)
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", code, how],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root / 'src'}:{root}"},
    )  # fmt: skip


@pytest.mark.slow
def test_two_processes_share_a_table_and_one_may_die(table: Table, tmp_path: Path) -> None:
    dead = worker(tmp_path, "stuck")
    while not (tmp_path / "stuck").exists():
        assert dead.poll() is None, dead.communicate()
        time.sleep(0.1)
    other = worker(tmp_path, "")  # the first one is in the middle of its first row
    assert other.stdout is not None
    first = other.stdout.readline()
    dead.kill()
    dead.communicate()
    out, err = other.communicate(timeout=200)
    assert other.returncode == 0, err
    lines = [first.rstrip(), *out.splitlines()]
    # The dead one had trained its row and not measured it; the folder was free as soon as it was gone.
    assert "one, seed 0: training none" not in lines
    assert any(line.startswith("one, seed 0, none: ") for line in lines)
    for part in ("one, seed 0: training kurtosis", "one, seed 1: training the base network"):
        assert lines.count(part) == 1
    made = [(entry["seed"], entry["row"]) for entry in read_entries(table.file)]
    assert sorted(made) == [(0, "kurtosis"), (0, "none"), (1, "kurtosis"), (1, "none")]


def test_a_row_that_another_process_is_at_is_left_to_it(table: Table) -> None:
    job = Job("one", 0, NONE)
    with module.claimed(table.folder(job)) as mine:
        assert mine
        with module.claimed(table.folder(job)) as again:
            assert not again
        maker = module.Maker(table, {"one": module.load_dataset("digits", True)}, lambda line: None)
        assert not maker.make(job)
    assert not (table.folder(job) / "model.safetensors").exists()
    with module.claimed(table.folder(job)) as free:
        assert free


def test_files_that_are_something_else_are_refused(table: Table) -> None:
    table.results.mkdir()
    table.file.write_text('{"format": "anybit-rows/1"}')
    with pytest.raises(FileError, match=r"table1-laptop.json: not in the format"):
        read_entries(table.file)
    with pytest.raises(RecipeError, match="no such file"):
        run_table(table, networks=["three"], seeds=[0], rows=[NONE])


# The rows


def test_the_rows_are_those_of_the_paper_and_more() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names) == 16
    assert len({row.label for row in ROWS}) == 16
    for network in ("vgg-like", "resnet18"):
        assert set(paper_numbers(network)) <= set(names)
        assert PAPER_WIDTHS[1] == WIDTHS[:4]
    assert set(paper_numbers("imagenet-resnet18")) <= {row.name for row in IMAGENET_ROWS}
    assert PAPER_WIDTHS[2] == IMAGENET_WIDTHS
    assert paper_numbers("something else") == {}
    for row in (*ROWS, *IMAGENET_ROWS):
        assert all(any(other.name == name and other.knob for other in ROWS) for name in row.takes)
        if row.trained_at is not None:
            assert row.changes["quantize.widths"] == (str(row.trained_at),)
    assert {Bits.parse(word) for word in DRAWN} == set(WIDTHS)
    assert {name: round(value, 1) for name, value in PAPER_COST.items()} == {
        "vgg-like": 5.6,
        "resnet18": 8.7,
        "imagenet-resnet18": 8.6,
    }
    assert Bits(2, 8) in SETTINGS["per-channel"].widths
    assert SETTINGS["per-channel"].options == {"per_channel": True}


@pytest.mark.parametrize(("row", "network", "want"), [
    ("ste-4-4", "vgg-like", {Bits(4, 4): 89.79}),
    ("ste-6-4", "resnet18", {Bits(6, 4): 90.77, Bits(4, 4): 88.17}),
    ("l1-strong", "imagenet-resnet18", {Bits(): 64.02, Bits(8, 8): 63.76, Bits(6, 6): 61.19, Bits(4, 4): 55.32}),
])  # fmt: skip
def test_where_the_paper_has_no_number_there_is_none(row: str, network: str, want: dict[Bits, float]) -> None:
    assert paper_numbers(network)[row] == want


def test_every_row_makes_a_recipe_of_every_network() -> None:
    for scale, networks, rows in (
        ("laptop", ("vgg-like", "resnet18"), ROWS),
        ("converged", ("vgg-like", "resnet18", *VARIANTS), CONVERGED_ROWS),
        ("paper", ("vgg-like", "resnet18"), ROWS),
        ("paper", ("imagenet-resnet18",), IMAGENET_ROWS),
    ):
        for network in networks:
            base, tune = (load_recipe(RECIPES / scale / f"{network}-{part}.toml") for part in ("base", "tune"))
            assert tune.init == f"runs/{base.name}-0/model.safetensors"
            assert (tune.model, tune.data.name) == (base.model, base.data.name)
            assert tune.optimizer.lr < base.optimizer.lr
            assert not base.penalty.any
            assert not tune.penalty.any
            seen = set()
            for row in rows:
                recipe = tune.changed(row.changes)
                for name in row.takes:
                    knob = next(other.knob for other in ROWS if other.name == name)
                    assert knob is not None
                    recipe = knob.apply(recipe, 0.1)
                recipe = row.knob.apply(recipe, 0.2 if row.trials_of else 0.1) if row.knob else recipe
                seen.add(json.dumps(recipe.to_dict()))
            assert len(seen) == len(rows)


def test_rows_of_the_any_width_table_differ_and_share_one_start(tmp_path: Path) -> None:
    table = find_table("table1", "any-width", runs=tmp_path)
    maker = module.Maker(table, {}, print)
    for network in table.networks:
        recipes = [maker.changed(Job(network, seed, row)) for seed in (0, 1) for row in table.rows]
        assert len({json.dumps(recipe.to_dict()) for recipe in recipes}) == 2 * len(table.rows)
        assert {recipe.init for recipe in recipes} == {table.recipe(network, "tune").init}
    lost = dataclasses.replace(table, recipes=tmp_path)
    (tmp_path / "any-width").mkdir()
    (tmp_path / "any-width" / "one-tune.toml").write_text('init = "nowhere.safetensors"' + RECIPE.format(part="tune"))
    with pytest.raises(FileError, match=r"nowhere\.safetensors: no such checkpoint; train it first"):
        module.Maker(lost, {}, print).base("one", 0)


def test_the_tables_are_known_by_name() -> None:
    assert find_table("table1", "laptop", runs=Path("x")) == Table(runs=Path("x"))
    assert find_table("table1", "paper", results=Path("a")).file == Path("a/table1-paper.json")
    assert find_table("table1", "converged").rows == CONVERGED_ROWS
    two = find_table("table2", "paper")
    assert (two.name, two.networks, two.rows) == ("table2", ("imagenet-resnet18",), IMAGENET_ROWS)
    with pytest.raises(SpecError, match="table2 is ImageNet at full size"):
        find_table("table2", "laptop")
    with pytest.raises(SpecError, match="a scale is one of laptop, converged, paper, any-width; got 'desk'"):
        find_table("table1", "desk")
    with pytest.raises(SpecError, match="table1 or table2; got 'table3'"):
        find_table("table3", "laptop")
    assert two.row("l1-strong").changes == {"penalty.weight": 0.05, "penalty.activation": 0.05}
    with pytest.raises(SpecError, match="table1 has no row 'l3': use none, l1,"):
        find_table("table1", "laptop").row("l3")


# Showing


def entry(
    row: str,
    test: dict[Bits, float],
    validation: dict[Bits, float] | None = None,
    *,
    seed: int = 0,
    seconds: tuple[float, ...] = (1.0,),
    network: str = "vgg-like",
) -> dict[str, Any]:
    parts = {"test": test, "validation": validation or test}
    measured = {
        name: [{"weights": b.weights, "activations": b.activations, "accuracy": a} for b, a in scores.items()]
        for name, scores in parts.items()
    }
    settings = {"per-tensor": measured}
    return {
        "network": network,
        "row": row,
        "seed": seed,
        "settings": settings,
        "epoch_seconds": {"wall": [2 * s for s in seconds], "processor": list(seconds)},
    }


def test_above_its_own_width_the_better_way_by_validation_counts() -> None:
    own, higher, lower, mixed, other = Bits(4, 4), Bits(8, 4), Bits(3, 3), Bits(8, 3), Bits(3, 32)
    test = {own: 0.80, higher: 0.70, lower: 0.10, mixed: 0.20, other: 0.30, Bits(): 0.95}
    validation = {own: 0.81, higher: 0.75, lower: 0.10, mixed: 0.20, other: 0.30, Bits(): 0.90}
    e = entry("ste-4-4", test, validation)
    got = {bits: accuracy_at(e, "per-tensor", bits, own) for bits in test}
    assert got == {own: 0.80, higher: 0.80, lower: 0.10, mixed: 0.20, other: 0.30, Bits(): 0.95}
    assert accuracy_at(e, "per-tensor", higher) == 0.70  # an ordinary row has no grid of its own
    flipped = entry("ste-4-4", test, {**validation, own: 0.5})
    assert accuracy_at(flipped, "per-tensor", higher, own) == 0.70
    assert accuracy_at(e, "per-tensor", Bits(2, 2), own) is None
    assert accuracy_at(e, "per-channel", own, own) is None
    # With helpers only the test split is measured; the way is that of the setting without them.
    for parts, wanted in ((e, got[higher]), (flipped, 0.70)):
        settings = {**parts["settings"], "per-tensor, helpers": {"test": parts["settings"]["per-tensor"]["test"]}}
        assert accuracy_at({**parts, "settings": settings}, "per-tensor, helpers", higher, own) == wanted


def test_cells_show_mean_and_spread_over_seeds() -> None:
    entries = [entry("none", {Bits(): a}, seed=s) for s, a in ((2, 0.90), (0, 0.91), (1, 0.95))]
    c = cell([*entries, entry("l1", {Bits(): 0.1})], "per-tensor", Bits(), NONE)
    assert c.values == (0.91, 0.95, 0.90)
    assert str(c) == "92.00 (90.0-95.0)"
    assert str(Cell((0.5,))) == "50.00"
    assert str(Cell(())) == ""
    assert spoken(Bits(32, 4)) == "(32,4)"


def test_the_favoured_row_is_chosen_on_the_validation_split() -> None:
    low = Bits(4, 4)
    none = entry("none", {Bits(): 0.1, low: 0.9}, {Bits(): 0.90, low: 0.50})
    good = entry("kurtosis", {Bits(): 0.1, low: 0.1}, {Bits(): 0.896, low: 0.70})
    harmful = entry("both", {Bits(): 0.9, low: 0.9}, {Bits(): 0.894, low: 0.80})
    single = entry("ste-4-4", {Bits(): 0.9, low: 0.9}, {Bits(): 0.90, low: 0.89})
    rows = (NONE, LESS, BOTH, STRAIGHT)
    assert favoured([none, good, harmful, single], rows) == "kurtosis"
    assert favoured([none, good, harmful, single], rows, tolerance=0.01) == "both"
    assert favoured([none, single], rows) == "none"
    assert favoured([good], rows) is None
    assert favoured([none], rows) is None
    # floating point is a condition, not a score
    better = entry("both", {Bits(): 0.9}, {Bits(): 0.99, low: 0.69})
    assert favoured([none, good, better], rows) == "kurtosis"
    # the mean over seeds counts, each against the same seed without penalty
    worse = entry("kurtosis", {Bits(): 0.1}, {Bits(): 0.896, low: 0.20}, seed=1)
    assert favoured([none, good, worse], rows) == "kurtosis"
    other = entry("none", {Bits(): 0.1}, {Bits(): 0.90, low: 0.50}, seed=1)
    assert favoured([none, good, worse, other], rows) == "none"
    easy = entry("none", {Bits(): 0.1}, {Bits(): 0.99, low: 0.10}, seed=1)
    assert favoured([none, good, easy], rows) == "kurtosis"
    # so does the mean over networks, each against the same network without penalty
    elsewhere = [{**e, "network": "another", "seed": 0} for e in (worse, other)]
    assert favoured([none, good, *elsewhere], rows) == "none"


def test_cost_is_against_the_same_seed_without_penalty() -> None:
    entries = [
        entry("none", {}, seed=0, seconds=(1.0, 3.0)),
        entry("none", {}, seed=1, seconds=(10.0,)),
        entry("kurtosis", {}, seed=0, seconds=(6.0,)),
        entry("kurtosis", {}, seed=1, seconds=(20.0, 30.0)),
        entry("kurtosis", {}, seed=2, seconds=(9.0,)),
    ]
    entries[0]["epoch_seconds"]["wall"] = [12.0]
    assert cost(entries, LESS, "processor") == pytest.approx((3.0 + 2.5) / 2)
    assert cost(entries, LESS, "wall") == pytest.approx((1.0 + 2.5) / 2)
    assert cost(entries, NONE, "wall") == 1.0
    assert cost(entries, STRAIGHT, "processor") is None
    assert cost(entries[2:], LESS, "processor") is None


def test_the_paper_stands_beside_where_it_has_numbers() -> None:
    entries = [entry("none", {Bits(): 0.9, Bits(4, 4): 0.5, Bits(3, 3): 0.2}), entry("both", {Bits(): 0.8})]
    widths = (Bits(), Bits(4, 4), Bits(3, 3))
    head, body = accuracy_rows(entries, "per-tensor", widths, (NONE, LESS, BOTH), paper_numbers("vgg-like"))
    assert head == ["row", "FP", "paper", "(4,4)", "paper", "(3,3)"]
    assert body == [
        ["No regularization", "90.00", "92.49", "50.00", "11.47", "20.00"],
        ["Both", "80.00", "", "", "", ""],
    ]
    head, _ = accuracy_rows(entries, "per-tensor", widths, (NONE,), {})
    assert head == ["row", "FP", "(4,4)", "(3,3)"]


def test_a_row_with_fewer_seeds_says_so() -> None:
    low = Bits(4, 4)
    made = [entry("none", {low: 0.5}, {}, seed=seed) for seed in (0, 1)] + [entry("kurtosis", {low: 0.6}, {})]
    _, body = accuracy_rows(made, "per-tensor", [low], (NONE, LESS), {})
    assert [line[0] for line in body] == ["No regularization", "Kurtosis, seed 0 only"]


def test_the_written_table(tmp_path: Path) -> None:
    table = Table(results=tmp_path)
    with pytest.raises(FileError, match="nothing measured yet"):
        table_text(table)
    entries = [
        entry("none", {Bits(): 0.9, Bits(8, 4): 0.7}),
        entry("l1", {Bits(): 0.9, Bits(8, 4): 0.8}, seconds=(2.25,)),
        entry("none", {Bits(): 0.91}, network="resnet18", seed=1),
        entry("none", {Bits(): 0.93}, network="resnet18", seed=2),
    ]
    table.file.write_text(json.dumps({"format": "anybit-table/1", "entries": entries}))
    path, text = write_table(table), table_text(table)
    assert path == tmp_path / "table1-laptop.md"
    assert path.read_text() == text
    assert text.startswith("# Table 1, CIFAR-10, laptop size\n")
    assert "## vgg-like, seed 0\n" in text
    assert "without harm in floating point: **L1 regularization**." in text
    assert "## resnet18, seeds 1, 2\n" in text
    assert "| L1 regularization | 90.00 | 92.63 | 80.00 | 89.74 |" in text
    assert "| L1 regularization | 2.25 | 2.25 | 5.6 |" in text
    assert "| No regularization | 92.00 (91.0-93.0) | 93.54 |" in text
    assert text.index("## vgg-like") < text.index("### per-tensor") < text.index("### cost") < text.index("## resnet18")


# The command


def typed(*words: str) -> Any:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(words))


@pytest.mark.usefixtures("measured_at_once")
def test_the_command_runs_what_is_missing_and_prints_the_table(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "SETTINGS", SMALL)
    places = ["--recipes", str(table.recipes), "--runs", str(table.runs), "--results", str(table.results)]
    result = typed("table1", "--network", "one", "--row", "none", "--seeds", "0, 1", *places)
    assert result.exit_code == 0, result.output
    assert "one, seed 1: training none" in result.output
    assert "## one, seeds 0, 1" in result.output
    assert "| No regularization |" in (table.results / "table1-laptop.md").read_text()
    shown = typed("table1", "--show", *places)
    assert "training" not in shown.output
    assert "## one, seeds 0, 1" in shown.output
    again = typed("table1", "--network", "one", "--row", "none", "--again", *places)
    assert "one, seed 0, none: FP" in again.output
    assert "training" not in again.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table4"], "table1 or table2"),
        (["table1", "--seeds", "0,a"], "seeds are whole numbers separated by commas; got '0,a'"),
        (["table1", "--row", "l3"], "has no row 'l3'"),
        (["table1", "--show", "--results", "/nowhere/at/all"], "nothing measured yet"),
        (["table2", "--scale", "paper"], "data/imagenet: no such folder; images by class are expected here"),
    ],
)
def test_bad_words_are_one_clear_error(words: list[str], message: str) -> None:
    result = typed(*words)
    assert message in str(result.exception)


def test_table_2_is_made_from_a_folder_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipes for ImageNet, cut short: a network of little width, one epoch, three classes."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    for part, count in (("train", 26), ("val", 2)):
        for name, level in (("dark", 40), ("grey", 128), ("light", 215)):
            folder = tmp_path / "data/imagenet" / part / name
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = np.clip(draw.normal(level, 20, (48, 40, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{index}.JPEG")
    (tmp_path / "recipes/paper").mkdir(parents=True)
    for path in (RECIPES / "paper").glob("imagenet-*.toml"):
        text = path.read_text()
        for old, new in (
            ("epochs = ", "epochs = 1 # "),
            ("multiplier = ", "multiplier = 0.0625 # "),
            ("batch = ", "batch = 24 # "),
        ):
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "recipes/paper" / path.name).write_text(text.replace("warmup = 5", "warmup = 0"))
    places = ["--recipes", "recipes", "--runs", "runs", "--results", "results"]
    result = typed("table2", "--scale", "paper", "--row", "none", "--row", "l1-strong", *places)
    assert result.exit_code == 0, result.exception
    none, strong = read_entries(Path("results/table2-paper.json"))
    assert (none["recipe"]["penalty"]["weight"], strong["recipe"]["penalty"]["weight"]) == (0.0, 0.05)
    for entry in (none, strong):
        rows = entry["settings"]["per-tensor"]["test"]
        assert [(row["weights"], row["n"]) for row in rows] == [(32, 6), (8, 6), (6, 6), (4, 6)]
    assert "L1 regularization, λ = 0.05" in result.output
    assert "55.32" in result.output  # the paper's, beside it
