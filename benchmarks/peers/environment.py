"""A virtual environment for every peer, made on first use; torch and all else that fits comes from the main one.

The pins of the peers conflict with each other, so they cannot share an environment, and torch is too big to install
four times. Each environment is a folder under `peers` in anybit's cache folder and can be deleted at any time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CONSTRAINTS = HERE.parents[1] / "constraints.txt"
MAIN = sysconfig.get_path("purelib")
SECONDS = 900
"""How long a tool may take, including the minutes that some need to compile an extension on first use."""


class CannotRun(Exception):  # noqa: N818
    """A tool that does not run here; the message says why, in one line."""


@dataclass(frozen=True)
class Tool:
    """A script in this folder, and what has to be installed for it; `None` if the main environment has it."""

    name: str
    script: str
    requirement: str | None = None


TOOLS = (
    Tool("anybit", "ours.py"),
    Tool("torch.ao", "torch_ao.py"),
    Tool("Brevitas", "brevitas_layers.py", "brevitas==0.13.4"),
    Tool("optimum-quanto", "quanto.py", "optimum-quanto==0.2.7"),
    Tool("NNCF", "nncf_torch.py", "nncf==3.4"),
)


def folder_of(requirement: str) -> Path:
    cache = os.environ.get("ANYBIT_CACHE") or "~/.cache/anybit"
    return Path(cache).expanduser() / "peers" / requirement.partition("==")[0]


def python_for(tool: Tool) -> Path:
    """Return the Python to run a tool with, after making its environment if there is none yet."""
    if tool.requirement is None:
        return Path(sys.executable)
    folder = folder_of(tool.requirement)
    python, ready = folder / "bin" / "python", folder / "ready"
    made_for = f"{tool.requirement} beside {MAIN}"
    if not (ready.is_file() and ready.read_text() == made_for):
        shutil.rmtree(folder, ignore_errors=True)
        make(folder, tool.requirement)
        ready.write_text(made_for)
    return python


def make(folder: Path, requirement: str) -> None:
    """Make an environment with one package and what it needs beyond the main environment."""
    call([sys.executable, "-m", "venv", folder])
    python = folder / "bin" / "python"
    own = call([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    # Not a bare path: the main environment has .pth files of its own, anybit's among them.
    Path(own, "main.pth").write_text(f"import site; site.addsitedir({MAIN!r})\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", CONSTRAINTS, requirement]
    planned = json.loads(call([*pip, "--dry-run", "--report", "-"]))
    names = [item["metadata"]["name"].lower() for item in planned["install"]]
    if heavy := [name for name in names if name == "torch" or name.startswith(("nvidia", "cuda", "triton"))]:
        raise CannotRun(f"{requirement} would install {', '.join(heavy)}")
    call(pip)


def call(command: Sequence[str | Path], environment: dict[str, str] | None = None) -> str:
    """Run a command to its end and return what it printed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
    except subprocess.TimeoutExpired as error:
        raise CannotRun(f"not done after {SECONDS} s") from error
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("ERROR")] or said[-1:]
        raise CannotRun(errors[-1][:200] if errors else f"ended with code {done.returncode}")
    return done.stdout


def run(tool: Tool, *arguments: str) -> dict[str, Any]:
    """Run a tool's script and return the JSON of its last line."""
    python = python_for(tool)
    environment = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    if tool.requirement is not None:
        environment["TORCH_EXTENSIONS_DIR"] = str(folder_of(tool.requirement) / "extensions")
    try:
        printed = call([python, HERE / tool.script, *arguments], environment)
    except CannotRun as error:
        if tool.requirement is not None and isinstance(error.__cause__, subprocess.TimeoutExpired):
            # A build that was cut off leaves a lock behind, and the next run would wait for it.
            shutil.rmtree(folder_of(tool.requirement), ignore_errors=True)
        raise
    return json.loads(printed.splitlines()[-1])
