"""Scripts that two processes run together, as torchrun starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import warm

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

ENDING = """
import os, sys
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
"""
"""How a script ends: at once. A thread of gloo that lets go of its last work after Python's own end aborts the process,
in one of five runs on a busy machine, also where nobody but PyTorch is at work."""


def warm_torchrun() -> list[str]:
    """Return the words that start a script with torchrun, all of whose processes have PyTorch loaded."""
    return [*warm.python(), *TORCHRUN[1:], "--no-python", *warm.python()]


def together(
    words: list[str], *, launcher: list[str] = TORCHRUN, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in two processes of one thread each, which find the modules of the tests; fail if it fails."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [*launcher, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def script_together(folder: Path, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the text of a script, which is written into a folder, in two processes."""
    return together([_script(folder, text), *words], launcher=warm_torchrun())


def script_alone(folder: Path, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the same in one process that nothing else was started with."""
    return together([_script(folder, text), *words], launcher=warm.python())


def _script(folder: Path, text: str) -> str:
    path = folder / "program.py"
    path.write_text(text + ENDING)
    return str(path)
