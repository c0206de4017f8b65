from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from anybit.common.progress import Advance
from anybit.errors import AnybitError, DataError
from anybit.train.side_by_side import SideBySide, one_by_one


def count(steps: int, result: str, advance: Advance) -> tuple[str, int]:
    """A job that takes some steps; the last one is long enough to be waited for."""
    for _ in range(steps):
        advance(1)
    time.sleep(0.3)
    return result, os.getpid()


def die(advance: Advance) -> None:
    advance(1)
    os.kill(os.getpid(), signal.SIGKILL)


def endless(folder: Path, advance: Advance) -> None:
    """A job that only ends when it is told to."""
    (folder / str(os.getpid())).touch()
    while True:
        advance(1)
        time.sleep(0.01)


def fail_after(folder: Path, advance: Advance) -> None:
    """A job that fails when another one runs."""
    while not any(folder.iterdir()):
        time.sleep(0.01)
    raise DataError("broken")


def one_of(kind: str, folder: Path, advance: Advance) -> None:
    endless(folder, advance) if kind == "endless" else fail_after(folder, advance)


def runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return False


def gone(pids: list[int]) -> bool:
    """Tell whether processes end soon."""
    for _ in range(1000):
        if not any(map(runs, pids)):
            return True
        time.sleep(0.01)
    return False


def test_results_come_in_order_and_steps_while_jobs_run() -> None:
    jobs = [(100, "a"), (1, "b"), (20, "c"), (0, "d")]
    moves: list[int] = []
    with SideBySide(2, jobs=4) as processes:
        found = processes.run(count, jobs, moves.append)
        assert sum(moves) == 121
        assert [name for name, _ in found] == ["a", "b", "c", "d"]
        assert os.getpid() not in {pid for _, pid in found}
        moves.clear()
        processes.run(count, [(5, "e")], moves.append)  # counted anew
        assert sum(moves) == 5
        assert moves[-1] == 0  # it was seen before the job was over
    assert gone([pid for _, pid in found])
    assert [name for name, _ in one_by_one(count, jobs[:2], moves.append)] == ["a", "b"]
    assert sum(moves) == 106


def test_a_process_that_is_killed_is_an_error_not_a_wait(tmp_path: Path) -> None:
    with pytest.raises(AnybitError, match="ended before its work was done"), SideBySide(1, jobs=2) as processes:
        processes.run(die, [(), ()], lambda steps: None)


def test_a_job_that_fails_stops_the_others(tmp_path: Path) -> None:
    jobs = [("endless", tmp_path), ("fail", tmp_path), ("endless", tmp_path)]
    with pytest.raises(DataError, match="broken"), SideBySide(2, jobs=3) as processes:
        processes.run(one_of, jobs, lambda steps: None)
    assert gone([int(path.name) for path in tmp_path.iterdir()])


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_and_a_kill_leave_no_process_behind(tmp_path: Path, end: signal.Signals) -> None:
    folder = tmp_path / "running"
    folder.mkdir()
    code = f"""
import signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from anybit.train.side_by_side import SideBySide
from test_side_by_side import endless
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with SideBySide(2, jobs=9) as processes:
            processes.run(endless, [(Path({str(folder)!r}),)] * 9, lambda steps: None)
    except KeyboardInterrupt:
        sys.exit(130)
"""
    (tmp_path / "job.py").write_text(code)
    words = [sys.executable, str(tmp_path / "job.py")]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        while process.poll() is None and len(list(folder.iterdir())) < 2:
            time.sleep(0.01)
        # ctrl-C in a terminal reaches the whole group; kill -9 only the one.
        os.killpg(process.pid, end) if end == signal.SIGINT else process.kill()
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == (130 if end == signal.SIGINT else -signal.SIGKILL)
    assert gone([int(path.name) for path in folder.iterdir()])
    assert len(list(folder.iterdir())) == 2  # those in the queue were not begun
    assert "Traceback" not in stderr
