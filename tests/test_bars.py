"""Progress bars in a real pseudo-terminal, and none without one."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

CODE = """
import time
from anybit.common.bars import progress_bars
with progress_bars() as start:
    advance = start("outer", 4)
    with progress_bars() as inner:
        within = inner("inner", 2_000_000)
        for _ in range(4):
            advance(1)
            within(500_000)
            print("a row")
            time.sleep(0.15)
"""


def in_terminal(stdout: Path | None) -> str:
    """Run the code with stderr, and stdout unless it goes to a file, in a terminal; return what was drawn there."""
    ours, theirs = pty.openpty()
    out = theirs if stdout is None else os.open(stdout, os.O_CREAT | os.O_WRONLY)
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"}
    with subprocess.Popen([sys.executable, "-c", CODE], stdout=out, stderr=theirs, env=environment) as process:
        os.close(theirs)
        drawn = b""
        while True:
            try:
                drawn += os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
    os.close(ours)
    if stdout is not None:
        os.close(out)
    assert process.returncode == 0
    return drawn.decode()


def test_bars_are_drawn_together_with_the_time_left_and_rows_above_them() -> None:
    drawn = in_terminal(None)
    for text in ("outer", "4/4", "inner", "2.0/2.0 M", "left", "0:00:0"):
        assert text in drawn
    assert drawn.count("a row\r\n") == 4
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn)
    assert re.search(r"inner +━+ 2\.0/2\.0 M 0:00:0\d elapsed, 0:00:00 left", plain)  # on one line of 80 characters
    last = drawn.rpartition("outer")[2]
    assert "a row" not in last


def test_what_goes_to_a_file_is_not_drawn(tmp_path: Path) -> None:
    drawn = in_terminal(tmp_path / "rows.txt")
    assert "4/4" in drawn
    assert "a row" not in drawn
    assert (tmp_path / "rows.txt").read_text() == "a row\n" * 4


def test_nothing_is_drawn_where_nobody_watches() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "a row\n" * 4, "")
