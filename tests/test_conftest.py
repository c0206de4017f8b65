"""What the tests say at their end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def pytest_says(*words: str, **environment: str) -> str:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *words]
    done = subprocess.run(command, cwd=ROOT, env={**kept, **environment}, capture_output=True, text=True, timeout=280)
    assert done.returncode in (0, 5), done.stdout[-2000:]
    return done.stdout


def test_what_a_machine_lacks_is_said_at_the_end() -> None:
    out = pytest_says("tests/test_browser_serve.py", ANYBIT_CHROMIUM="/nowhere/chromium")
    said = [line for line in out.splitlines() if line.startswith("NOT TESTED on this machine: ")]
    assert len(said) == 1
    assert "no Chromium here; install it" in said[0] or "no playwright here" in said[0]


def test_the_marker_slow_selects_some_tests_and_not_all() -> None:
    out = pytest_says("tests/test_resume.py", "tests/test_folder.py", "--collect-only", "-m", "slow", "--verbose")
    (found,) = re.findall(r"^=* ?(\d+)/(\d+) tests collected \((\d+) deselected\)", out, re.MULTILINE)
    slow, every, others = map(int, found)
    assert slow >= 4
    assert slow + others == every
    assert others > 5 * slow
