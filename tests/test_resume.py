"""Runs that are killed, stopped, or out of room, and what comes of them when they go on."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from together import script_together
from torch import Tensor

from anybit.cli import main
from anybit.data import Dataset, Split, load_dataset
from anybit.errors import CheckpointError, FileError
from anybit.models import build_model
from anybit.task.checkpoint import digest_of, read_checkpoint, read_tensors, write_tensors
from anybit.train.keeper import Stop
from anybit.train.loop import train
from anybit.train.recipe import DataRecipe, ModelRecipe, OptimizerRecipe, PenaltyRecipe, Recipe
from anybit.train.resume import FORMAT, differences
from anybit.train.run import RunFolder

TINY = Recipe(
    name="tiny",
    epochs=3,
    model=ModelRecipe("small-conv", multiplier=0.25),
    data=DataRecipe("digits", batch=64),
    optimizer=OptimizerRecipe(lr=0.05, warmup=1),
    penalty=PenaltyRecipe(weight=1e-3, activation=1e-3),
)
STEPS = 12
DONE = ["log.jsonl", "model.safetensors", "run.json"]

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"penalty.weight": 0.0, "penalty.activation": 0.0, "optimizer.momentum": 0.0},
    "gradient, every second step, late": {"penalty.every": 2, "penalty.start": 1, "penalty.ramp": 1},
    "adam, noise and kurtosis": {"optimizer.name": "adam", "penalty.noise": 1.0, "penalty.kurtosis": 1e-2},
    "averaged weights": {"optimizer.average": 0.8},
    "straight through, widths drawn": {
        "penalty.weight": 0.0,
        "penalty.activation": 0.0,
        "quantize.widths": ["W4A4", "W8A8", "W6A32"],
        "optimizer.lr": 0.003,
        "optimizer.average": 0.5,
        "epochs": 2,
    },
}


@cache
def digits() -> Dataset:
    """Some of the digits, moved about at random. An epoch is four steps, and the last batch is not full."""
    data = load_dataset("digits")
    assert data.augment is not None
    return dataclasses.replace(data, train=Split(data.train.x[:230], data.train.y[:230]))


def same(a: Path, b: Path) -> bool:
    (one, _), (two, _) = read_checkpoint(a / "model.safetensors"), read_checkpoint(b / "model.safetensors")
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def steps(log: Path) -> list[int]:
    return [json.loads(line)["step"] for line in log.read_text().splitlines()]


class Killed(BaseException):
    """Stands for what ends a run without a word."""


def after(step: int, act: Callable[[], Any]) -> Callable[[int], None]:
    """Return a progress function that acts when so many steps are done, resumed ones included."""
    done = 0

    def progress(more: int) -> None:
        nonlocal done
        done += more
        if done == step:
            act()

    return progress


def kill() -> None:
    raise Killed


def cut(recipe: Recipe, folder: Path, step: int, **options: Any) -> None:
    """Train until so many steps are done, and end without saving anything more."""
    with pytest.raises(Killed):
        train(recipe, digits(), folder, progress=after(step, kill), **options)


# Bit for bit


SLOW = {"straight through, widths drawn": pytest.mark.slow}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=SLOW.get(kind, ())) for kind in KINDS])
def test_a_run_cut_at_several_steps_ends_with_the_same_weights_and_log(kind: str, tmp_path: Path) -> None:
    recipe = TINY.changed(KINDS[kind])
    total = 4 * recipe.epochs
    train(recipe, digits(), tmp_path / "whole")
    # The progress of a step is told before its state is written: a run cut at n goes on after n - 1.
    cuts = (6, total) if recipe.quantize.widths else (1, 2, 5, 6, total)  # capturing a network takes seconds
    for step in cuts:
        cut(recipe, tmp_path / "cut", step, resume=True, save_every=0)
    torch.manual_seed(step)
    seen: list[int] = []
    said: list[str] = []
    model, results = train(
        recipe, digits(), tmp_path / "cut", resume=True, save_every=0, progress=seen.append, say=said.append
    )
    assert said == [f"{tmp_path / 'cut' / 'state.safetensors'}: going on after step {total - 1}"]
    assert seen == [total - 1, 1]
    assert same(tmp_path / "cut", tmp_path / "whole")
    assert names(tmp_path / "cut") == DONE
    assert (tmp_path / "cut" / "log.jsonl").read_bytes() == (tmp_path / "whole" / "log.jsonl").read_bytes()
    whole, about = (json.loads((tmp_path / run / "run.json").read_text()) for run in ("whole", "cut"))
    assert about["results"] == whole["results"] == results
    assert about["resumed_at"] == [step - 1 for step in cuts if step > 1]
    assert "resumed_at" not in whole
    assert len(about["epoch_seconds"]["wall"]) == recipe.epochs
    assert all(seconds > 0 for seconds in about["epoch_seconds"]["wall"])
    assert not model.training


def test_what_would_break_if_a_part_of_the_state_were_left_out(tmp_path: Path) -> None:
    """Each part matters: with it put back to the start, the weights differ."""
    recipe = TINY.changed({**KINDS["adam, noise and kurtosis"], "penalty.every": 2})
    train(recipe, digits(), tmp_path / "whole")
    cut(recipe, tmp_path / "cut", 7, save_every=0)
    path = tmp_path / "cut" / "state.safetensors"
    log = (tmp_path / "cut" / "log.partial").read_bytes()
    tensors, about = read_tensors(path, kind=FORMAT, what="a state")
    kinds = {name.partition(".")[0] for name in tensors}
    assert kinds == {"model", "optimizer", "order", "random"}
    first, *others = about["penalties"]
    assert first == {"steps": 6, "factor": 1.0}
    assert {"steps": 0, "factor": 1.0} in others  # of the epochs without penalty
    fresh = {"order": torch.Generator().manual_seed(1).get_state(), "random.0": torch.Generator().get_state()}
    changes: list[tuple[dict[str, Tensor], dict[str, Any]]] = [({name: fresh[name]}, {}) for name in fresh]
    for start in ("model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq.", "optimizer.step."):
        changes.append(
            ({name: torch.zeros_like(value) for name, value in tensors.items() if name.startswith(start)}, {})
        )
    changes.append(({}, {"penalties": [{"steps": 1, "factor": 1.0}, *others]}))
    changes.append(({}, {}))
    for number, (other, more) in enumerate(changes):
        write_tensors(path, {**tensors, **other}, {**about, **more}, kind=FORMAT)
        (tmp_path / "cut" / "log.partial").write_bytes(log)
        train(recipe, digits(), tmp_path / "cut", resume=True)
        assert same(tmp_path / "cut", tmp_path / "whole") == (number == len(changes) - 1), (
            number,
            list(other)[:1],
            more,
        )


def test_the_state_is_saved_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("anybit.train.keeper.time.monotonic", lambda: now)
    sizes: list[list[str]] = []

    def progress(more: int) -> None:
        nonlocal now
        now += 25.0
        sizes.append(names(tmp_path))

    cut_at = after(8, kill)
    with pytest.raises(Killed):
        train(TINY, digits(), tmp_path, progress=lambda more: (progress(more), cut_at(more))[0])
    # Steps end at 25, 50, 75 seconds and so on: the third is the first that is due, the sixth the second.
    assert ["state.safetensors" in seen for seen in sizes] == [False] * 3 + [True] * 5
    _, about = read_tensors(tmp_path / "state.safetensors", kind=FORMAT, what="a state")
    assert about["position"]["step"] == 6
    assert (about["position"]["epoch"], about["position"]["index"]) == (1, 2)


# SIGKILL, at random

KILLS = 21
KILLED = [kind for kind in KINDS if not kind.startswith("straight")]  # that one is mostly start-up

DRIVER = """
import json, os, random, signal, sys, time
import torch
from test_resume import KILLED, KILLS, KINDS, TINY, digits
from anybit.train.loop import train
import anybit.simulate.prepare, safetensors.torch, torch._dynamo  # what a child would import again and again

folder = sys.argv[1]
rng = random.Random(0)
torch.set_num_threads(1)
digits()


def start(recipe, name, **options):
    # Returns the child and the end of a pipe on which it says when it has taken a step.
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            train(recipe, digits(), f"{folder}/{name}", progress=lambda done: os.write(tell, b"."), **options)
            code = 0
        finally:
            os._exit(code)
    os.close(tell)
    return child, told


def ended(child):
    found, status = os.waitpid(child, os.WNOHANG)
    assert not found or status == 0, status
    return bool(found)


def killed(child):
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


found = {}
for number, kind in enumerate(KILLED):
    recipe = TINY.changed({**KINDS[kind], "epochs": 6})
    child, told = start(recipe, f"{number}-whole", save_every=0)
    os.read(told, 1)
    began = time.monotonic()
    os.waitpid(child, 0)
    took = time.monotonic() - began
    kills, round, done = 0, 0, False
    wanted = -(-KILLS // len(KILLED))
    while kills < wanted or not done:
        child, told = start(recipe, f"{number}-cut-{round}", resume=True, save_every=0)
        if kills < wanted:
            # The first one is killed while it sets things up, the others some steps later, at any point of a step.
            for _ in range(rng.randint(1, 5) if kills else 0):
                os.read(told, 1)
            time.sleep(rng.uniform(0, 2 * took / 24))
        else:
            while os.read(told, 1):
                pass
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        os.close(told)
        done = ended(child)
        if done:
            round += 1  # faster than the knife: the next one is killed again from its beginning
        else:
            kills += killed(child)
    found[kind] = kills
print(json.dumps(found))
"""


def run_script(text: str, *words: str, timeout: float = 800) -> str:
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", text, *words], env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)  # on a machine with other work on it
def test_killed_more_than_twenty_times_at_random_moments(tmp_path: Path) -> None:
    kills = json.loads(run_script(DRIVER, str(tmp_path)))
    assert sum(kills.values()) >= KILLS
    resumed: set[int] = set()
    for number, kind in enumerate(KILLED):
        whole = tmp_path / f"{number}-whole"
        cuts = sorted(tmp_path.glob(f"{number}-cut-*"))
        assert cuts
        for folder in cuts:
            assert same(folder, whole), kind
            assert names(folder) == DONE  # and nothing of what killed writes had begun
            assert (folder / "log.jsonl").read_bytes() == (whole / "log.jsonl").read_bytes()
            assert steps(folder / "log.jsonl") == list(range(24))
            resumed.update(json.loads((folder / "run.json").read_text()).get("resumed_at", []))
    assert len(resumed) >= 6  # the kills did not all fall on the same steps


# SIGINT and SIGTERM


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_run_that_is_asked_to_stop_saves_first(number: int, error: type[BaseException], tmp_path: Path) -> None:
    train(TINY, digits(), tmp_path / "whole")
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    said: list[str] = []
    stop = after(6, lambda: os.kill(os.getpid(), number))
    with pytest.raises(error) as caught:
        train(TINY, digits(), tmp_path / "cut", progress=stop, say=said.append)
    if error is SystemExit:
        assert caught.value.code == 143
    state = tmp_path / "cut" / "state.safetensors"
    name = signal.Signals(number).name
    assert said == [f"stopped by {name} after step 6; {state} has the state to go on from (anybit train: --resume)"]
    assert names(tmp_path / "cut") == ["log.partial", "run.json", "state.safetensors"]
    assert steps(tmp_path / "cut" / "log.partial") == list(range(6))
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    train(TINY, digits(), tmp_path / "cut", resume=True)
    assert same(tmp_path / "cut", tmp_path / "whole")


def test_the_second_signal_does_what_it_always_did() -> None:
    with Stop() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.number == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_signals_that_somebody_else_handles_are_left_alone() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with Stop() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
        assert (seen, stop.number) == ([signal.SIGTERM], 0)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_run_in_another_thread_leaves_signals_alone(tmp_path: Path) -> None:
    found: list[Any] = []

    def work() -> None:
        train(TINY.changed({"epochs": 1}), digits(), tmp_path)
        found.append(names(tmp_path))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [DONE]


RECIPE = """
name = "tiny"
epochs = 15

[model]
name = "small-conv"
multiplier = 0.25

[data]
name = "digits"

[penalty]
"""


def anybit(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "anybit", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def stamp(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def wait_until(true: Callable[[], bool], *, within: float = 400) -> None:
    until = time.monotonic() + within
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


def command(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Run a command in this process."""
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


@pytest.mark.slow
@pytest.mark.timeout(900)  # on a machine with other work on it
def test_the_command_line_stops_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, run = tmp_path / "tiny.toml", tmp_path / "run"
    recipe.write_text(RECIPE)
    words = ["train", recipe, "--out", run]
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        written = stamp(run / "run.json")
        process = anybit(*words, *(["--resume"] if code == 130 else []))
        wait_until(lambda: stamp(run / "run.json") != written)  # noqa: B023 from here on signals are noted
        process.send_signal(number)
        out, err = process.communicate(timeout=400)
        assert (process.returncode, out) == (code, "")
        assert f"stopped by {signal.Signals(number).name} after step" in err
        assert f"{run}/state.safetensors has the state to go on from (anybit train: --resume)" in err
        assert "Traceback" not in err
    code, out, err = command(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {run}/state.safetensors: left by an unfinished run; go on with --resume, or delete")
    process = anybit(*words, "--resume")
    out, err = process.communicate(timeout=400)
    assert (process.returncode, out.splitlines()[-1]) == (0, f"{run}/: model.safetensors, run.json, log.jsonl")
    assert "going on after step" in err
    assert names(run) == DONE
    code, again, err = command(capsys, *words, "--resume")
    assert (code, again, err) == (0, out, f"{run}: this run is finished; nothing is left to do\n")
    code, again, err = command(capsys, "train", recipe, "--out", tmp_path / "whole", "--resume")
    assert (code, again.splitlines()[0]) == (0, out.splitlines()[0])
    assert err.startswith(f"{tmp_path}/whole/state.safetensors: no such file")
    assert err.endswith("; starting from the beginning\n")
    assert same(run, tmp_path / "whole")


# No room


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting needs rights that this process lacks")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_ends_the_run_and_the_last_state_is_intact(small_disk: Path, tmp_path: Path) -> None:
    train(TINY, digits(), tmp_path / "whole")
    state = small_disk / "run" / "state.safetensors"
    good: list[bytes] = []

    def fill() -> None:
        good.append(state.read_bytes())
        with contextlib.suppress(OSError), (small_disk / "filler").open("wb", 0) as file:
            while True:
                file.write(bytes(4096))

    with pytest.raises(FileError, match="No space left on device") as caught:
        train(TINY, digits(), small_disk / "run", save_every=0, progress=after(7, fill))
    assert f"there is no room in {small_disk / 'run'}" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert state.read_bytes() == good[0]
    assert names(small_disk / "run") == ["log.partial", "run.json", "state.safetensors"]
    (small_disk / "filler").unlink()
    train(TINY, digits(), small_disk / "run", save_every=0, resume=True)
    assert same(small_disk / "run", tmp_path / "whole")


def test_a_limit_on_the_size_of_files_is_the_same(tmp_path: Path) -> None:
    train(TINY, digits(), tmp_path / "whole")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    state = tmp_path / "cut" / "state.safetensors"
    good: list[bytes] = []

    def limit() -> None:
        good.append(state.read_bytes())
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))

    try:
        with pytest.raises(FileError, match="File too large") as caught:
            train(TINY, digits(), tmp_path / "cut", save_every=0, progress=after(7, limit))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(caught.value).startswith(f"{state}: cannot be written, there is no room in {tmp_path / 'cut'} (")
    assert state.read_bytes() == good[0]
    assert names(tmp_path / "cut") == ["log.partial", "run.json", "state.safetensors"]
    train(TINY, digits(), tmp_path / "cut", resume=True)
    assert same(tmp_path / "cut", tmp_path / "whole")


# What cannot be gone on from


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run cut after six steps, five of them saved."""
    folder = tmp_path_factory.mktemp("half") / "run"
    cut(TINY, folder, 6, save_every=0)
    return folder


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "run"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer.lr": 0.06}, "recipe.optimizer.lr is 0.05 there and 0.06 here"),
        ({"seed": 1}, r"recipe.seed is 0 there and 1 here; start is '\w+' there and '\w+' here"),
        ({"epochs": 4, "penalty.noise": 0.5}, "recipe.epochs is 3 there and 4 here; recipe.penalty.noise is 0.0"),
        ({"model.multiplier": 0.5, "data.batch": 32, "epochs": 9}, r"\(and 1 more\)"),
    ],
)
def test_a_state_of_another_recipe(changes: dict[str, Any], message: str, half: Path, tmp_path: Path) -> None:
    folder = copied(half, tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(CheckpointError, match=message) as caught:
        train(TINY.changed(changes), digits(), folder, resume=True)
    assert str(caught.value).startswith(f"{folder / 'state.safetensors'}: is the state of another run: ")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_state_of_other_data_or_another_start(half: Path, tmp_path: Path) -> None:
    folder, data = copied(half, tmp_path), digits()
    fewer = dataclasses.replace(data, train=Split(data.train.x[:200], data.train.y[:200]))
    with pytest.raises(CheckpointError, match=r"data.examples is 230 there and 200 here; data.training is"):
        train(TINY, fewer, folder, resume=True)
    x = data.train.x.clone()
    x[100, 0, 3, 3] += 1e-6
    with pytest.raises(CheckpointError, match=r"another run: data.training is"):
        train(TINY, dataclasses.replace(data, train=Split(x, data.train.y)), folder, resume=True)
    start = tmp_path / "start.pt"
    recipe = TINY.changed({"init": str(start)})
    for seed in (1, 2):
        torch.manual_seed(seed)
        torch.save(build_model("small-conv", channels=1, classes=10, multiplier=0.25).state_dict(), start)
        if seed == 1:
            cut(recipe, tmp_path / "tuned", 3, save_every=0)
    with pytest.raises(CheckpointError, match="another run: start is"):
        train(recipe, data, tmp_path / "tuned", resume=True)


def test_a_finished_run_is_returned_as_it_is(tmp_path: Path) -> None:
    model, results = train(TINY, digits(), tmp_path)
    before = contents(tmp_path)
    said: list[str] = []
    again, known = train(TINY, digits(), tmp_path, resume=True, say=said.append)
    assert said == [f"{tmp_path}: this run is finished; nothing is left to do"]
    assert known == results
    assert digest_of(again.state_dict()) == digest_of(model.state_dict())
    with pytest.raises(CheckpointError, match="finished run of another recipe: seed is 0 there and 3 here"):
        train(TINY.changed({"seed": 3}), digits(), tmp_path, resume=True)
    assert contents(tmp_path) == before
    (tmp_path / "log.jsonl").rename(tmp_path / "log.partial")  # killed just before its last act
    train(TINY, digits(), tmp_path, resume=True)
    assert contents(tmp_path) == before


def test_without_resume_a_run_starts_anew(half: Path, tmp_path: Path) -> None:
    folder = copied(half, tmp_path)
    for name in (".state.safetensors.0123abcd.partial", ".tmpOLYa0m"):  # ours, and a library's
        (folder / name).write_bytes(b"half")
    train(TINY.changed({"seed": 1}), digits(), folder)
    assert names(folder) == DONE
    assert steps(folder / "log.jsonl") == list(range(STEPS))


def test_a_log_that_lost_lines_is_not_gone_on_with(half: Path, tmp_path: Path) -> None:
    folder = copied(half, tmp_path)
    log = (folder / "log.partial").read_bytes()
    (folder / "log.partial").write_bytes(log[:100])
    with pytest.raises(FileError, match=r"log.partial: has 100 bytes, the state was saved with \d+"):
        train(TINY, digits(), folder, resume=True)


def test_two_runs_in_one_folder(half: Path, tmp_path: Path) -> None:
    folder = copied(half, tmp_path)
    before = contents(folder)
    for resume in (False, True):
        with RunFolder(folder, TINY), pytest.raises(FileError, match="another process is training"):
            train(TINY, digits(), folder, resume=resume)
    assert contents(folder) == before
    train(TINY, digits(), folder, resume=True)
    assert steps(folder / "log.jsonl") == list(range(STEPS))


def test_a_run_that_ends_while_another_one_looks_at_it_stays_as_it_is(
    half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one must not have looked before it holds the folder: what it saw would be gone."""
    folder = copied(half, tmp_path)
    whole: list[dict[str, bytes]] = []
    enter = RunFolder.__enter__

    def late(run: RunFolder) -> RunFolder:
        if not whole:  # between the start of the second and its hold on the folder, the first goes on to its end
            whole.append({})
            train(TINY, digits(), folder, resume=True)
            whole[0] = contents(folder)
        return enter(run)

    monkeypatch.setattr(RunFolder, "__enter__", late)
    said: list[str] = []
    train(TINY, digits(), folder, resume=True, say=said.append)
    assert contents(folder) == whole[0]
    assert json.loads((folder / "run.json").read_text())["results"]
    assert said == [f"{folder}: this run is finished; nothing is left to do"]


REFUSED: dict[str, Callable[[Path], None]] = {
    "log is short": lambda folder: (folder / "log.partial").write_bytes(b"{}"),
    "log is gone": lambda folder: (folder / "log.partial").unlink(),
    "not of this run": lambda folder: sealed(folder, {"position": {"epoch": 99, "index": 1, "step": 5}}),
    "two penalties": lambda folder: sealed(folder, {"penalties": []}),
    "no tensors": lambda folder: sealed(folder, {}, drop=True),
    "damaged": lambda folder: (folder / "state.safetensors").write_bytes(b"\0" * 99),
}


def sealed(folder: Path, changes: dict[str, Any], *, drop: bool = False) -> None:
    """Change what a state says, with a checksum that fits."""
    path = folder / "state.safetensors"
    tensors, about = read_tensors(path, kind=FORMAT, what="a state")
    for key, value in changes.items():
        about[key] = {**about[key], **value} if isinstance(value, dict) else value
    if drop:
        tensors.popitem()
    write_tensors(path, tensors, about, kind=FORMAT)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused_changes_nothing(kind: str, half: Path, tmp_path: Path) -> None:
    folder = copied(half, tmp_path)
    (folder / ".tmpAb12cD").write_bytes(b"half")
    REFUSED[kind](folder)
    before = contents(folder)
    with pytest.raises(FileError) as caught:
        train(TINY, digits(), folder, resume=True, board=True)
    assert len(str(caught.value).splitlines()) == 1
    assert contents(folder) == before


def test_all_files_of_a_run_have_the_mode_that_the_umask_wants(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        cut(TINY, tmp_path, 6, save_every=0)
        assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}
        train(TINY, digits(), tmp_path, resume=True)
    finally:
        os.umask(before)
    assert names(tmp_path) == DONE
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}


def test_other_conditions_are_said(half: Path, tmp_path: Path) -> None:
    folder = copied(half, tmp_path)
    path = folder / "state.safetensors"
    tensors, about = read_tensors(path, kind=FORMAT, what="a state")
    about["conditions"].update(torch="1.0", threads=torch.get_num_threads() + 1)
    write_tensors(path, tensors, about, kind=FORMAT)
    said: list[str] = []
    train(TINY, digits(), folder, resume=True, say=said.append)
    assert len(said) == 2
    assert said[1].startswith("torch is '1.0' there and ")
    assert "threads is" in said[1]
    assert said[1].endswith("the weights may differ in their last digits from those of an uninterrupted run")


# Several processes

TOGETHER = """
import os, signal, sys
from test_resume import TINY, after, digits
from anybit.train.loop import train
from anybit.train.place import placed

folder = sys.argv[1]
recipe = TINY.changed({"data.batch": 46, "epochs": 2, "penalty.kurtosis": 1e-2})
with placed() as place:
    train(recipe, digits(), f"{folder}/whole")
    # One of the two is asked to stop, and both do.
    stop = after(7, lambda: os.kill(os.getpid(), signal.SIGTERM)) if place.rank == 1 else None
    try:
        train(recipe, digits(), f"{folder}/cut", progress=stop)
    except SystemExit as error:
        assert error.code == 143
    else:
        raise AssertionError("nobody stopped")
    assert os.path.exists(f"{folder}/cut/state.safetensors")
    train(recipe, digits(), f"{folder}/cut", resume=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)  # on a machine with other work on it
def test_processes_that_train_together_stop_and_go_on_together(tmp_path: Path) -> None:
    script_together(tmp_path, TOGETHER, str(tmp_path))
    assert same(tmp_path / "cut", tmp_path / "whole")
    assert json.loads((tmp_path / "cut" / "run.json").read_text())["resumed_at"] == [7]
    assert (tmp_path / "cut" / "log.jsonl").read_bytes() == (tmp_path / "whole" / "log.jsonl").read_bytes()


def test_differences_are_named_whatever_is_compared() -> None:
    assert differences({"a": {"b": 1}}, {"a": {"b": 1}}) == []
    assert differences({"a": {"b": 1}}, {"a": 3}) == [
        "a is missing there and 3 here",
        "a.b is 1 there and missing here",
    ]
    assert len(differences({"k" * 999: "v" * 999}, {})[0]) < 200
