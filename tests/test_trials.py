"""Trials that several processes share: real ones, on SQLite and on a PostgreSQL server of the test's own."""

from __future__ import annotations

import os
import pwd
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from anybit.errors import FileError, MissingDependency, SpecError
from anybit.train.trials import Trials

FAILED = optuna.trial.TrialState.FAIL


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
    address, name = request.getfixturevalue("server"), f"test_{secrets.token_hex(4)}"
    import psycopg

    with psycopg.connect(f"{address}/postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return f"{address}/{name}"


WORKER = """
import pathlib, sys, time
from anybit.train.trials import Trials

url, stuck = sys.argv[1:]

def attempt(value):
    print(value, flush=True)
    if stuck:
        time.sleep(600)
    time.sleep(0.05)
    return value / 10

print(Trials("study a", attempt, storage=url, grace=3, say=lambda line: None).run([1.0, 2.0, 3.0, 4.0]))
"""


def started(url: str, stuck: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, url, stuck],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def trials(url: str, attempt: Callable[[float], float] = lambda value: value / 10, **more: Any) -> Trials:
    return Trials("study a", attempt, storage=url, **{"grace": 3, "say": lambda line: None, **more})


@pytest.mark.slow
def test_processes_share_the_trials_and_the_work_of_a_dead_one(url: str) -> None:
    dead = started(url, "stuck")
    assert dead.stdout is not None
    assert dead.stdout.readline() == "1.0\n"  # it is in the middle of this trial
    others = [started(url) for _ in range(2)]
    dead.kill()
    dead.communicate()
    said = [process.communicate(timeout=100) for process in others]
    assert [process.returncode for process in others] == [0, 0], said
    made = Counter(line for out, _ in said for line in out.splitlines() if not line.startswith("{"))
    assert set(made) == {"1.0", "2.0", "3.0", "4.0"}  # also what the dead one was at
    assert all("{1.0: 0.1, 2.0: 0.2, 3.0: 0.3, 4.0: 0.4}" in out for out, _ in said)
    known = trials(url).study.get_trials()
    failed = [trial for trial in known if trial.state.name == "FAIL"]
    assert [trial.user_attrs["value"] for trial in failed] == [1.0]
    assert not [trial for trial in known if trial.state.name in ("RUNNING", "WAITING")]


def test_the_work_of_one_that_died_before_any_sign_of_life_is_taken_up(url: str) -> None:
    dead = trials(url)
    dead.study.enqueue_trial({"value": 1.0}, user_attrs={"value": 1.0})
    with pytest.warns(UserWarning, match="[Hh]eartbeat"):
        dead.study.ask()  # it is at work from here on, and gives no sign of life
    assert trials(url).run([1.0, 2.0]) == {1.0: 0.1, 2.0: 0.2}
    assert [trial.state.name for trial in dead.study.get_trials()].count("FAIL") == 1


@pytest.mark.slow
def test_several_that_start_at_once_on_a_new_storage_all_come_to_the_end(url: str) -> None:
    all_of_them = [started(url) for _ in range(3)]
    said = [process.communicate(timeout=100) for process in all_of_them]
    assert [process.returncode for process in all_of_them] == [0, 0, 0], said
    made = [line for out, _ in said for line in out.splitlines() if not line.startswith("{")]
    assert sorted(set(made)) == ["1.0", "2.0", "3.0", "4.0"]
    assert len(made) <= 6  # two that ask at the same moment may do the same; that is rare, and harmless


def test_what_two_put_into_the_queue_at_once_is_made_once_and_leaves_the_queue(tmp_path: Path) -> None:
    url, asked = f"sqlite:///{tmp_path / 'x.db'}", list[float]()

    def attempt(value: float) -> float:
        asked.append(value)
        return value

    work = trials(url, attempt)
    for value in (1.0, 2.0, 1.0):
        work.study.enqueue_trial({"value": value}, user_attrs={"value": value})
    assert work.run([1.0, 2.0]) == {1.0: 1.0, 2.0: 2.0}
    assert asked == [1.0, 2.0]
    assert [trial.state.name for trial in work.study.get_trials()] == ["COMPLETE", "COMPLETE", "PRUNED"]


def test_what_is_known_is_not_tried_again_and_what_failed_is(tmp_path: Path) -> None:
    url, asked = f"sqlite:///{tmp_path / 'deeper' / 'x.db'}", list[float]()

    def attempt(value: float) -> float:
        asked.append(value)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return value

    with pytest.raises(KeyboardInterrupt):
        trials(url, attempt).run([1.0, 2.0, 3.0])
    assert trials(url, attempt).run([1.0, 2.0, 3.0]) == {1.0: 1.0, 2.0: 2.0, 3.0: 3.0}
    assert Counter(asked) == {1.0: 1, 2.0: 2, 3.0: 1}
    assert trials(url, attempt).run([2.0]) == {2.0: 2.0}
    assert len(asked) == 4


def test_what_was_made_elsewhere_is_taken_and_what_is_here_counts_more(tmp_path: Path) -> None:
    url, asked = f"sqlite:///{tmp_path / 'x.db'}", list[float]()

    def attempt(value: float) -> float:
        asked.append(value)
        return value

    work = trials(url, attempt)
    work.run([1.0])
    for _ in range(2):
        work.know({1.0: 0.25, 2.0: 0.5})
    assert trials(url, attempt).run([1.0, 2.0, 3.0]) == {1.0: 1.0, 2.0: 0.5, 3.0: 3.0}
    assert asked == [1.0, 3.0]
    assert len(work.study.get_trials()) == 3


@pytest.mark.parametrize("error", [ValueError("the data are odd"), RuntimeError("no memory")])
def test_an_error_of_a_trial_is_not_hidden(error: Exception, tmp_path: Path) -> None:
    def attempt(value: float) -> float:
        raise error

    with pytest.raises(type(error), match=str(error)):
        trials(f"sqlite:///{tmp_path / 'x.db'}", attempt).run([1.0])


def test_a_process_that_was_given_up_says_so_and_goes_on(tmp_path: Path) -> None:
    url, said = f"sqlite:///{tmp_path / 'x.db'}", list[str]()

    def attempt(value: float) -> float:
        if not asked:
            asked.append(value)
            (running,) = (t for t in mine.study.get_trials() if t.state.name == "RUNNING")
            optuna.load_study(study_name="study a", storage=url).tell(running.number, state=FAILED)
        return 0.5

    asked: list[float] = []
    mine = trials(url, attempt, say=said.append)
    assert mine.run([1.0]) == {1.0: 0.5}
    assert said == ["1: done, but this process was silent for so long that another one took it up"]


def test_a_trial_that_two_processes_were_given_and_both_put_aside_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite may give the same trial to two processes; where neither wants it, the other one says so first."""
    url = f"sqlite:///{tmp_path / 'x.db'}"
    mine = trials(url)
    other, wanted = optuna.load_study(study_name="study a", storage=url), mine._wanted

    def with_another(trial: Any) -> bool:
        if not (found := wanted(trial)):
            other.tell(trial.number, state=optuna.trial.TrialState.PRUNED)
        return found

    monkeypatch.setattr(mine, "_wanted", with_another)
    for value in (1.0, 1.0):
        mine.study.enqueue_trial({"value": value}, user_attrs={"value": value})
    assert mine.run([1.0]) == {1.0: 0.1}
    assert [trial.state.name for trial in mine.study.get_trials()] == ["COMPLETE", "PRUNED"]


def test_one_that_waits_says_so_once_and_takes_up_what_is_left(tmp_path: Path) -> None:
    url, said = f"sqlite:///{tmp_path / 'x.db'}", list[str]()
    dead = started(url, "stuck")
    assert dead.stdout is not None
    assert dead.stdout.readline() == "1.0\n"
    dead.kill()
    dead.communicate()
    assert trials(url, say=said.append).run([1.0, 2.0]) == {1.0: 0.1, 2.0: 0.2}
    assert said == ["waiting for 1, which other processes are trying"]


def test_a_note_is_worked_out_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'x.db'}"
    assert trials(url).note("range", lambda: {"low": 1}) == {"low": 1}
    assert trials(url).note("range", lambda: pytest.fail("it is known")) == {"low": 1}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("nonsense", r"a storage is sqlite:///FILE .* or postgresql://.*; got 'nonsense'"),
        ("postgresql://me:secret@localhost:port/x", r"a storage is .*; got 'localhost:port/x'"),
        ("sqlite:////proc/nowhere/x.db", r"/proc/nowhere: cannot make this folder"),
        ("sqlite:////", r"sqlite:////: the storage does not answer \(unable to open database file\); mend that"),
        ("postgresql://me:secret@127.0.0.1:1/x", r"127.0.0.1:1/x: the storage does not answer \(.*refused.*\); mend"),
    ],
)
def test_a_storage_that_cannot_be_is_one_clear_line(bad: str, message: str) -> None:
    with pytest.raises(FileError, match=message) as caught:
        trials(bad)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_text("no database " * 100)
    with pytest.raises(FileError, match=r"x.db: the storage does not answer \(file is not a database\); mend that"):
        trials(f"sqlite:///{tmp_path / 'x.db'}")
    with pytest.raises(SpecError, match="3 seconds or more, got 2"):
        Trials("a", lambda value: value, storage="sqlite:///y.db", grace=2, say=print)


def test_without_a_driver_the_install_line_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingDependency, match=r"postgresql://me:\*\*\*@h/x needs psycopg.*'anybit\[postgres\]'"):
        trials("postgresql://me:secret@h/x")


def test_a_wrong_password_is_one_line(server: str) -> None:
    address = server.rpartition("@")[2]
    with pytest.raises(FileError) as caught:
        trials(f"postgresql://anybit:guessed@{address}/postgres")
    assert re.match(r"postgresql://anybit:\*\*\*@.*password authentication failed", str(caught.value))
    assert "guessed" not in str(caught.value)
