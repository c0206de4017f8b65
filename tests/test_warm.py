"""Programs that are forked from a process with everything loaded end as those do that Python starts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import warm

PROGRAM = """
import os, sys
assert "torch" in sys.modules
print(sys.argv[1:], os.getcwd(), os.environ["WORD"], __name__, sys.stdin.read())
print("said", file=sys.stderr)
{end}
"""


def run(folder: Path, end: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(PROGRAM.format(end=end))
    command = [*warm.python(), "program.py", "one", "two words"]
    environment = {**os.environ, "WORD": "λ"}
    return subprocess.run(command, cwd=folder, env=environment, input="in", capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("sys.exit('no')", 1),
        ("1 / 0", 1),
        ("os._exit(5)", 5),
        ("os.kill(os.getpid(), 9)", 137),
    ],
    ids=["end", "number", "words", "error", "at once", "killed"],
)
def test_what_a_program_is_given_and_how_it_ends(end: str, code: int, tmp_path: Path) -> None:
    done = run(tmp_path, "sys.stdout.flush()\n" + end)
    assert done.returncode == code
    assert done.stdout == f"['one', 'two words'] {tmp_path} λ __main__ in\n"
    assert done.stderr.startswith("said\n")
    assert ("ZeroDivisionError" in done.stderr) == (end == "1 / 0")


def test_words_at_the_end_are_shown(tmp_path: Path) -> None:
    assert run(tmp_path, "sys.exit('no such thing')").stderr == "said\nno such thing\n"


def test_a_program_ends_with_whoever_asked_for_it(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    with subprocess.Popen([*warm.python(), str(tmp_path / "program.py")], stdout=subprocess.PIPE, text=True) as asked:
        assert asked.stdout is not None
        assert asked.stdout.readline() == "here\n"
        asked.kill()
        assert asked.stdout.read() == ""  # comes to its end when the last process that could write has ended


def test_the_command_fails_as_it_does_elsewhere(tmp_path: Path) -> None:
    words = ["bash", "-c", "anybit sweep nowhere"]
    done = subprocess.run(words, cwd=tmp_path, env=warm.with_command(os.environ), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: nowhere: no such file")
