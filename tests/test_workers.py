"""Several processes that share one storage: real ones, on SQLite and on a PostgreSQL server of the test's own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pwd
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest

from anybit.analysis import table_run
from anybit.analysis.table import Job, Setting, Table, read_entries, read_searches
from anybit.analysis.table_rows import ROWS, TableRow
from anybit.analysis.table_run import run_table
from anybit.analysis.table_share import MARK
from anybit.data import load_dataset
from anybit.errors import FileError, MissingDependency, SpecError
from anybit.spec import Bits, Row
from anybit.train import workers
from anybit.train.loop import train
from anybit.train.recipe import load_recipe
from anybit.train.search import Knob, search
from anybit.train.storage import open_store
from anybit.train.workers import Work, this_process

SECOND = 1.0
RECIPE = """
name = "{name}"
epochs = {epochs}
{more}
[model]
name = "small-conv"
multiplier = 0.25
[data]
name = "digits.npz"
batch = 64
augment = false
[optimizer]
lr = 0.05
"""


def save_digits(folder: Path) -> None:
    """Put the digits into a file: processes that read it need not load what they come with."""
    data = load_dataset("digits")
    arrays = {f"{name}_{part}": getattr(getattr(data, part), name) for part in ("train", "test") for name in "xy"}
    np.savez(folder / "digits.npz", **{name: array.numpy() for name, array in arrays.items()})


# Storages


def _programs() -> Path | None:
    """Return where PostgreSQL's programs are; Debian does not put them on the path."""
    found = shutil.which("pg_ctl")
    places = [Path(found).parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return next((place for place in reversed(places) if (place / "initdb").is_file()), None)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Start a PostgreSQL server in a temporary folder; give the address of its databases."""
    programs = _programs()
    if programs is None:
        pytest.skip("no PostgreSQL here: apt-get install postgresql")
    pytest.importorskip("psycopg", reason="no driver for PostgreSQL here: pip install 'anybit[postgres]'")
    with tempfile.TemporaryDirectory(prefix="anybit-postgres-", ignore_cleanup_errors=True) as name:
        folder, password, start = Path(name), secrets.token_hex(8), list[str]()
        (folder / "password").write_text(password)
        if os.getuid() == 0:  # it refuses to run as root
            user = pwd.getpwnam("postgres")
            start = ["runuser", "-u", "postgres", "--"]
            for path in (folder, folder / "password"):
                os.chown(path, user.pw_uid, user.pw_gid)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]

        def run(program: str, *words: str) -> None:
            subprocess.run(
                [*start, str(programs / program), "-D", f"{folder}/data", *words],
                cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=60,
            )  # fmt: skip

        run("initdb", "-U", "anybit", "-A", "scram-sha-256", f"--pwfile={folder}/password", "--no-sync")
        options = f"-c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories={folder} -c fsync=off"
        run("pg_ctl", "-w", "-l", f"{folder}/log", "-o", options, "start")
        try:
            yield f"postgresql://anybit:{password}@127.0.0.1:{port}"
        finally:
            run("pg_ctl", "-w", "-m", "immediate", "stop")


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Give a storage that nobody has used yet."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'work.db'}"
    import psycopg

    address, name = request.getfixturevalue("server"), f"test_{secrets.token_hex(4)}"
    with psycopg.connect(f"{address}/postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return f"{address}/{name}"


# Processes


def started(code: str, *words: object, **places: Any) -> subprocess.Popen[str]:
    """Start a Python process."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **places,
    )  # fmt: skip


def anybit(*words: object, **places: Any) -> subprocess.Popen[str]:
    """Start the command line."""
    return subprocess.Popen(
        [sys.executable, "-m", "anybit", *map(str, words)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **places,
    )  # fmt: skip


def ended(*processes: subprocess.Popen[str]) -> list[tuple[str, str]]:
    """Wait for processes that should end well; return what each said on both channels."""
    said = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), said
    return said


def until(condition: Callable[[], Any]) -> Any:
    """Wait until something is so; return it."""
    for _ in range(2000):
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("waited too long")


def claims_of(work: Work, pid: int) -> list[Any]:
    return [unit for unit, trial in work.running().items() if trial.user_attrs["worker"]["pid"] == pid]


# Claims

RACE = """
import sys, time
from anybit.train.storage import open_store
from anybit.train.workers import Work

work = Work(open_store(sys.argv[1]), "race")
work.record("here " + sys.argv[2])
while sum(str(unit).startswith("here") for unit in work.done()) < 3:
    time.sleep(0.01)
for unit in [float(n) for n in range(8)]:
    claim = work.claim(unit, done=lambda: unit in work.done())
    if claim is not None:
        with claim:
            print(unit, flush=True)
            assert claim.finish(1.0)
"""


@pytest.mark.slow
def test_of_many_that_claim_at_the_same_moment_one_wins(url: str) -> None:
    # All start on a new storage, so they also race to make its tables.
    said = ended(*(started(RACE, url, n) for n in range(3)))
    taken = Counter(float(word) for out, _ in said for word in out.split())
    assert taken == Counter({float(n): 1 for n in range(8)})
    trials = Work(open_store(url), "race").study.get_trials(deepcopy=False)
    complete = [t.params["value"] for t in trials if t.state.name == "COMPLETE" and t.params]
    assert Counter(complete) == taken
    assert {t.state.name for t in trials} <= {"COMPLETE", "FAIL"}
    assert all("given back" in t.user_attrs for t in trials if t.state.name == "FAIL")


def test_a_claim_is_held_given_back_and_finished(url: str) -> None:
    mine, other = Work(open_store(url), "study"), Work(open_store(url), "study")
    claim = mine.claim("a", done=lambda: False)
    assert claim is not None
    assert other.claim("a", done=lambda: False) is None
    assert list(other.running()) == ["a"]
    with pytest.raises(KeyboardInterrupt), claim:
        raise KeyboardInterrupt
    assert other.running() == {}
    second = other.claim("a", done=lambda: False)
    assert second is not None
    assert second.lost is None  # it was given back, nobody died
    with second:
        assert second.finish(0.5, more={"x": [1, 2]})
    assert mine.done()["a"].user_attrs["more"] == {"x": [1, 2]}
    assert mine.done()["a"].value == 0.5
    assert mine.claim("a", done=lambda: "a" in mine.done()) is None
    assert Work(open_store(url), "another study").done() == {}
    mine.take_note("range", {"low": 1})
    assert (other.note("range"), other.note("nothing")) == ({"low": 1}, None)


HOLD = """
import sys, time
from anybit.train import workers
from anybit.train.storage import open_store

if sys.argv[2] == "elsewhere":
    workers._machine = lambda: "another machine"
if sys.argv[2] == "silent":  # as if it were paused
    workers.Claim._beat = lambda self: None
claim = workers.Work(open_store(sys.argv[1], grace=4), "study").claim("a", done=lambda: False)
with claim:
    print("at it", flush=True)
    time.sleep(1000)
"""


def holding(url: str, how: str) -> subprocess.Popen[str]:
    """Start a process, and wait until it holds a unit."""
    holder = started(HOLD, url, how)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "at it\n"
    return holder


def test_what_a_killed_process_held_is_free_at_once_on_its_machine(url: str) -> None:
    holder = holding(url, "here")
    work = Work(open_store(url, grace=600), "study")
    assert work.claim("a", done=lambda: False) is None
    holder.kill()  # and nobody has waited for it yet: it is dead, but still listed
    claim = until(lambda: work.claim("a", done=lambda: False))
    assert claim.lost == f"process {holder.pid} on {this_process()['host']}"
    holder.communicate()


@pytest.mark.slow
def test_elsewhere_a_process_lives_by_its_signs_of_life(url: str) -> None:
    holder = holding(url, "elsewhere")
    work = Work(open_store(url, grace=4), "study")
    start = time.monotonic()
    while time.monotonic() - start < 5 * SECOND:
        assert work.claim("a", done=lambda: False) is None  # alive for longer than one may be silent
        time.sleep(0.5)
    holder.kill()
    holder.communicate()
    claim = until(lambda: work.claim("a", done=lambda: False))
    assert claim.lost.startswith(f"process {holder.pid} on ")


@pytest.mark.slow
def test_here_a_silent_process_keeps_what_it_holds(url: str) -> None:
    holder = holding(url, "silent")
    work = Work(open_store(url, grace=4), "study")
    (trial,) = work.running().values()
    until(lambda: work.store.storage._get_stale_trial_ids(work.id) == [trial._trial_id])  # silent for too long
    assert work.claim("a", done=lambda: False) is None
    holder.kill()
    assert until(lambda: work.claim("a", done=lambda: False)).lost
    holder.communicate()


def test_a_worker_that_was_given_up_hears_of_it(url: str) -> None:
    work = Work(open_store(url), "study")
    claim = work.claim("a", done=lambda: False)
    assert claim is not None
    with claim:
        work.store.storage.set_trial_state_values(claim.id, optuna.trial.TrialState.FAIL)  # as another worker would
        assert not claim.finish(1.0)
    assert work.done() == {}


def test_a_trial_that_never_gave_a_sign_of_life_is_given_up_too(tmp_path: Path) -> None:
    work = Work(open_store(f"sqlite:///{tmp_path / 'work.db'}", grace=3), "study")
    work._add("a", work.states.RUNNING)  # as a process leaves it that is killed in the middle of a claim
    work.store.storage.set_trial_user_attr(1, "worker", {**this_process(), "machine": "another"})
    assert work.claim("a", done=lambda: False) is None
    assert until(lambda: work.claim("a", done=lambda: False)) is not None


def test_processes_are_told_apart() -> None:
    me = this_process()
    assert workers.is_there(me)
    assert workers.is_there({**me, "started": "1"}) is False  # the number was given to another process since
    assert workers.is_there({**me, "started": "1", "machine": "another"}) is None  # nothing is known about that one
    assert workers.is_there({}) is None
    ended_one = started("")
    ended_one.wait()
    assert workers.is_there({**me, "pid": ended_one.pid}) is False
    ended_one.communicate()


# Bad storages


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("nonsense", r"a storage is sqlite:///FILE .* or postgresql://.*; got 'nonsense'"),
        ("mysql://me@localhost/x", r"a storage is sqlite:///FILE .*; got mysql://me@localhost/x"),
        ("postgres://me:secret@localhost/x", r"a storage is .*; got postgres://me:\*\*\*@localhost/x"),
        ("sqlite://", r"a storage is sqlite:///FILE .*; got sqlite://"),
        ("postgresql://me:secret@localhost:port/x", r"a storage is .*; got 'localhost:port/x'"),
        ("sqlite:////proc/nowhere/x.db", r"/proc/nowhere: cannot make this folder"),
        ("sqlite:////", r"sqlite:////: cannot be opened \(unable to open database file\); name a file"),
        (
            "postgresql://me:secret@127.0.0.1:1/x",
            r"127.0.0.1:1/x: cannot be opened \(.*refused.*\); see that the server",
        ),
    ],
)
def test_a_storage_that_cannot_be_is_one_clear_line(bad: str, message: str) -> None:
    with pytest.raises(FileError, match=message) as caught:
        open_store(bad)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anybit.train.storage.TRIES", 2)
    (tmp_path / "x.db").write_text("no database " * 100)
    with pytest.raises(FileError, match=r"x.db: cannot be made a storage \(file is not a database\); name a data"):
        open_store(f"sqlite:///{tmp_path / 'x.db'}")
    with pytest.raises(SpecError, match="3 seconds or more, got 2"):
        open_store(f"sqlite:///{tmp_path / 'y.db'}", grace=2)


def test_without_a_driver_the_install_line_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingDependency, match=r"postgresql://me:\*\*\*@h/x needs psycopg.*'anybit\[postgres\]'"):
        open_store("postgresql://me:secret@h/x")


def test_a_wrong_password_is_one_line_and_exit_code_2(server: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(name="tiny", epochs=1, more=""))
    address = server.rpartition("@")[2]
    done = anybit("search", recipe, "--storage", f"postgresql://anybit:guessed@{address}/postgres", cwd=tmp_path)
    out, err = done.communicate(timeout=120)
    assert (done.returncode, out) == (2, "")
    assert re.fullmatch(r"error: postgresql://anybit:\*\*\*@.*password authentication failed.*; see that .*\n", err), (
        err
    )


def test_a_server_that_goes_away_is_one_clear_line(url: str) -> None:
    work = Work(open_store(url), "study")
    claim = work.claim("a", done=lambda: False)
    assert claim is not None
    work.store.storage.engine.dispose()
    with work.store.storage.engine.begin() as connection:  # as if somebody had dropped it
        connection.exec_driver_sql("ALTER TABLE trial_heartbeats RENAME TO lost")
        connection.exec_driver_sql("ALTER TABLE trials RENAME TO lost_too")
    with pytest.raises(FileError, match=r"the storage does not answer \(.*\); mend that and start again"):
        work.done()
    with pytest.raises(RuntimeError, match="the first error"), claim:
        raise RuntimeError("the first error")


# A search


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained network, and a recipe to search with that starts from it."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "base.toml").write_text(RECIPE.format(name="base", epochs=5, more=""))
    tuned = RECIPE.format(name="tuned", epochs=9, more='init = "runs/base-0/model.safetensors"')
    (folder / "tuned.toml").write_text(tuned)
    save_digits(folder)
    with contextlib.chdir(folder):
        train(load_recipe("base.toml"), load_dataset("digits.npz"), "runs/base-0")
    return folder


def tried(text: str) -> dict[float, float]:
    """Return what a worker says that it tried itself."""
    return {float(v): float(a) for v, a in re.findall(r"^([\d.e-]+): ([\d.]+) %$", text, re.MULTILINE)}


def search_work(url: str) -> Work:
    """Return the only search in a storage."""
    store = open_store(url)
    (name,) = until(lambda: optuna.get_all_study_names(store.storage))
    return Work(store, name)


@pytest.mark.slow
def test_three_workers_share_a_search(home: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'work.db'}"
    words = ("search", "tuned.toml", "--share", 0.5, "--tolerance", 5, "--storage", url, "--json")
    said = ended(*(anybit(*words, cwd=home) for _ in range(3)))
    records = [json.loads(out) for out, _ in said]
    accuracies = dict(records[0]["accuracies"])
    for record in records:  # all see the same, with the range that one of them tracked, and choose the same
        for key in ("chosen", "accuracies", "tracked", "at_edge"):
            assert record[key] == records[0][key]
    own = [tried(err) for _, err in said]
    assert Counter(value for each in own for value in each) == Counter(list(accuracies))
    assert len(accuracies) >= 6
    trials = search_work(url).study.get_trials(deepcopy=False)
    complete = [trial for trial in trials if trial.state.name == "COMPLETE"]
    assert Counter(trial.params["value"] for trial in complete) == Counter(list(accuracies))
    assert {trial.params["value"]: trial.value for trial in complete} == accuracies
    pids = Counter(trial.user_attrs["worker"]["pid"] for trial in complete)
    assert sorted(pids.values()) == sorted(len(each) for each in own if each)


# It comes to the end of its first trial and stays there, so that it can be killed in the middle of it.
STUCK = """
import pathlib, sys, time
from anybit.cli import main
from anybit.train import search

def stay(*ignored, **named):
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(600)

search.validate = stay
main(sys.argv[2:])
"""


@pytest.mark.slow
def test_a_killed_worker_loses_only_its_trial(home: Path, tmp_path: Path, url: str) -> None:
    # One rate does nothing, one is far too large: the winner is between them, and the grid does not grow.
    rates = "1e-7,0.02,100"
    words = ("search", "tuned.toml", "--vary", "optimizer.lr", "--values", rates, "--epochs", 4, "--share", 1)
    words = (*words, "--storage", url, "--json")
    both = [started(STUCK, tmp_path / "stuck", *words, cwd=home), anybit(*words, cwd=home)]
    work = search_work(url)
    until(lambda: claims_of(work, both[1].pid))
    until((tmp_path / "stuck").exists)
    (value,) = claims_of(work, both[0].pid)
    both[0].kill()
    _, killed_err = both[0].communicate()
    ((out, err),) = ended(both[1])
    record = json.loads(out)
    before, after = tried(killed_err), tried(err)
    accuracies = dict(record["accuracies"])
    assert (record["chosen"], sorted(accuracies)) == (0.02, [1e-7, 0.02, 100.0])
    assert sorted([*before, *after]) == sorted(accuracies)  # each once, whoever did it
    assert value in after
    host = this_process()["host"]
    assert f"{value:g}: taken up again; process {both[0].pid} on {host} died while trying it" in err
    trials = work.study.get_trials(deepcopy=False)
    dead = [t for t in trials if t.state.name == "FAIL" and "given back" not in t.user_attrs]
    assert [(t.params["value"], t.user_attrs["worker"]["pid"]) for t in dead] == [(value, both[0].pid)]
    done = Counter(t.params["value"] for t in trials if t.state.name == "COMPLETE")
    assert done == Counter(list(accuracies))
    assert not [t for t in trials if t.state.name == "RUNNING"]


def test_other_weights_under_the_same_name_are_refused(home: Path, tmp_path: Path) -> None:
    there, url = tmp_path / "there", f"sqlite:///{tmp_path / 'work.db'}"
    rate = Knob(("optimizer.lr",), (0.01,))
    with contextlib.chdir(home):
        data = load_dataset("digits.npz")
        search(load_recipe("tuned.toml"), data, rate, storage=url, share=0.1)
    there.mkdir()
    with contextlib.chdir(there):
        train(load_recipe(home / "base.toml").changed({"seed": 1}), data, "runs/base-0")
        with pytest.raises(FileError, match=r"runs/base-0/model.safetensors: the trials in sqlite:.* other weights"):
            search(load_recipe(home / "tuned.toml"), data, rate, storage=url, share=0.1)


# A table

KURTOSIS = TableRow("kurtosis", "Kurtosis", knob=Knob(("penalty.kurtosis",), (0.001, 0.003)))
NONE = next(row for row in ROWS if row.name == "none")
BOTH = TableRow("both", "Both", {"penalty.noise": 1.0}, takes=("kurtosis",))
SMALL = {"per-tensor": Setting(widths=(Bits(), Bits(4, 4)))}


TABLE = Table(networks=("one",), rows=(NONE, KURTOSIS, BOTH), settings=SMALL)


def table_folder(folder: Path) -> Path:
    """Make a folder with what a table starts from."""
    recipes = folder / "recipes" / "laptop"
    recipes.mkdir(parents=True)
    save_digits(folder)
    for part, epochs in (("base", 3), ("tune", 1)):
        (recipes / f"one-{part}.toml").write_text(RECIPE.format(name=f"one-{part}", epochs=epochs, more=""))
    return folder


def measure_at_once(*, stuck: bool = False) -> None:
    """Read accuracies off the weights: to capture a network takes a second, and tests of this have their own file.

    A stuck one comes to measure its first row and stays there, so that it can be killed in the middle of it.
    """

    def sweep(net: Any, loader: Any, *, widths: Any, label: str, seed: int) -> list[Row]:
        if stuck:
            Path("stuck").touch()
            time.sleep(600)
        accuracy = float(net.classifier.bias.detach().square().mean())
        return [Row(label, seed, b.weights, b.activations, accuracy, 1.0, len(loader)) for b in widths]

    table_run.prepare = lambda model, example, **options: model  # type: ignore[assignment]
    table_run.sweep = sweep


def run_here(url: str, *rows: TableRow, **more: Any) -> list[str]:
    """Make rows of the table in this process and folder; return what was said."""
    said: list[str] = []
    more = {"seeds": [0], **more}
    run_table(TABLE, networks=["one"], rows=rows, storage=url, say=said.append, **more)
    return said


WORKER = """
import sys
import test_workers as here

here.measure_at_once(stuck=len(sys.argv) > 2)
rows = [here.NONE, here.KURTOSIS]
say = lambda line: print(line, flush=True)
here.run_table(here.TABLE, networks=["one"], seeds=[0, 1], rows=rows, storage=sys.argv[1], say=say)
"""


PARTS = ("none", "kurtosis", "the base network")
UNITS = {f"one, seed {seed}: training {part}" for seed in (0, 1) for part in PARTS}


@pytest.mark.slow
def test_two_workers_share_a_table_and_one_may_die(tmp_path: Path, url: str) -> None:
    table_folder(tmp_path)
    both = [started(WORKER, url, *more, cwd=tmp_path) for more in (("stuck",), ())]
    work = Work(open_store(url), "table1 laptop")
    until(lambda: claims_of(work, both[1].pid))
    until((tmp_path / "stuck").exists)
    (unit,) = claims_of(work, both[0].pid)
    both[0].kill()
    first, _ = both[0].communicate()
    ((second, _),) = ended(both[1])
    assert f"{unit}: taken up again; process {both[0].pid} on " in second
    # Everything once, except for what the dead one was in, which it may have spoken of already.
    count = Counter(line for line in (first + second).splitlines() if ": training" in line)
    network, seed, row = unit.split(", ")
    assert set(count) == UNITS
    assert {line for line, n in count.items() if n > 1} <= {f"{network}, {seed}: training {row}"}
    with contextlib.chdir(tmp_path):
        assert run_here(url, NONE, KURTOSIS, seeds=[0, 1]) == []  # nothing is left
        entries = read_entries(TABLE.file)
        found = read_searches(TABLE.search_file)["one"]["kurtosis"]
    made = Counter((entry["seed"], entry["row"]) for entry in entries)
    assert made == Counter((seed, row) for seed in (0, 1) for row in ("none", "kurtosis"))
    for entry in entries:
        assert entry["recipe"]["penalty"]["kurtosis"] == (found["chosen"] if entry["row"] == "kurtosis" else 0.0)
    values = [float(v) for v, _ in re.findall(r"^  ([\d.e-]+): ([\d.]+) %$", first + second, re.MULTILINE)]
    assert sorted(values) == sorted(value for value, _ in found["accuracies"])  # each trial of the search once, too


@pytest.mark.slow
def test_two_folders_share_a_table_through_the_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("prepare", "sweep"):
        monkeypatch.setattr(table_run, name, getattr(table_run, name))  # put back afterwards
    measure_at_once()
    url = f"sqlite:///{tmp_path / 'work.db'}"
    here, there = table_folder(tmp_path / "here"), table_folder(tmp_path / "there")
    with contextlib.chdir(here):
        run_here(url, NONE, KURTOSIS)
        done, found = read_entries(TABLE.file), read_searches(TABLE.search_file)
    with contextlib.chdir(there):
        # What was measured and what was found comes through the storage; nothing is trained, no folder is needed.
        assert run_here(url, NONE, KURTOSIS) == []
        assert (read_entries(TABLE.file), read_searches(TABLE.search_file)) == (done, found)
        assert run_here(url, NONE, KURTOSIS, again=True) == []  # the checkpoints are elsewhere
        # A row that is not there needs the base network, and all rows start from the same one.
        with pytest.raises(FileError, match=r"nobody else is at work.*network: is in runs/one-base-0 on \S+; copy"):
            run_here(url, BOTH, grace=3)
        shutil.copytree(here / "runs" / "one-base-0", "runs/one-base-0")
        assert run_here(url, BOTH)[0] == "one, seed 0: training both"
        assert len(read_entries(TABLE.file)) == 3
        other = load_recipe("recipes/laptop/one-base.toml").changed({"seed": 5})
        train(other, load_dataset("digits.npz"), "runs/one-base-0")
        with pytest.raises(FileError, match=r"one-base-0/model.safetensors: not the base network that \S+ starts from"):
            run_here(url, dataclasses.replace(BOTH, name="more"))
    with contextlib.chdir(here):
        assert run_here(url, NONE, KURTOSIS, BOTH) == []  # one of them was made there
        assert len(read_entries(TABLE.file)) == 3
        assert Path("runs", MARK).read_text() != (there / "runs" / MARK).read_text()
        # A run folder that was here and is removed is made again, as ever.
        shutil.rmtree(TABLE.folder(Job("one", 0, NONE)))
        assert run_here(url, NONE)[0] == "one, seed 0: training none"
