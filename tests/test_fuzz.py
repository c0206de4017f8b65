"""A short run of `make fuzz`, and everything that it ever found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
FUZZ = ROOT / "benchmarks" / "fuzz.py"
REGRESSIONS = ROOT / "tests" / "regressions"
CASES = {
    "masters": 150, "plain": 60, "pictures": 150, "arrays": 150, "recipes": 200, "checkpoints": 150, "pickled": 60,
    "run-folders": 40,
}  # fmt: skip


def fuzz(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(FUZZ), *map(str, words)], capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize("kind", CASES)
def test_broken_files_are_refused_in_a_line_or_used(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "fuzz.json"
    done = fuzz(kind, "--cases", CASES[kind], "--seconds", 270, "--out", out)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    ((run,),) = [json.loads(out.read_text())["runs"]]
    counts = run["kinds"][kind]
    assert run["cases"] == sum(counts.values())
    assert run["cases"] >= 10  # the machine may be busy, and the time was over first
    assert counts["refused"] > 0
    assert counts["found"] == 0


@pytest.mark.parametrize("kind", sorted({path.name.rpartition("-")[0] for path in REGRESSIONS.glob("*-*")}))
def test_what_was_found_before_stays_mended(kind: str) -> None:
    files = sorted(REGRESSIONS.glob(f"{kind}-*"))
    done = fuzz("--replay", kind, *files)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == len(files)


# The harness itself: what is not good must be found


class Bad:
    """A kind whose files do what the first letter says."""

    def use(self, path: Path) -> str:
        match path.read_text():
            case "crash":
                raise RuntimeError("boom")
            case "pages":
                from anybit.errors import FileError

                raise FileError("x" * 5000)
            case "escape":
                from anybit.errors import FileError

                raise FileError("\x1b[2J")
            case "memory":
                assert np.ones(50_000_000).sum() > 0
            case "other":
                return "other"
        return "whole"


@pytest.mark.parametrize("what", ["crash", "pages", "escape", "memory", "other"])
def test_what_is_not_good_is_found(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FUZZ.parent))
    import fuzz

    path = tmp_path / "case"
    path.write_text(what)
    with pytest.raises((RuntimeError, fuzz.Found)):
        fuzz.try_case(Bad(), path, want="whole")
    path.write_text("fine")
    assert fuzz.try_case(Bad(), path, want="whole") == "used"
