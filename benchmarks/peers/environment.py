"""A virtual environment for every peer, made on first use; torch and all else that fits comes from the main one.

The pins of the peers conflict with each other, so they cannot share an environment, and torch is too big to install
seven times. Each environment is a folder under `peers` in anybit's cache folder and can be deleted at any time.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CONSTRAINTS = HERE.parents[1] / "constraints.txt"
MAIN = sysconfig.get_path("purelib")
SECONDS = 900
"""How long an installation may take."""

BOTH = ("per channel", "per tensor")


class CannotRun(Exception):  # noqa: N818
    """A tool that does not run here; the message says why, in one line."""


@dataclass(frozen=True)
class Tool:
    """A script in this folder, its settings, and what has to be installed for it beside the main environment.

    `alone` are packages whose own requirements are not installed: they ask for builds that nothing here needs.
    """

    name: str
    script: str
    settings: tuple[str, ...]
    needs: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        cache = os.environ.get("ANYBIT_CACHE") or "~/.cache/anybit"
        return Path(cache).expanduser() / "peers" / Path(self.script).stem


OURS = (
    "reconstructed, per channel",
    "per channel",
    "no data, per channel",
    "reconstructed, per channel, all layers",
    "no data, per channel, all layers",
    "reconstructed, per tensor",
    "per tensor",
    "no data, per tensor",
    "no data, the paper's settings",
)
TOOLS = (
    Tool("anybit", "ours.py", OURS),
    Tool(
        "Brevitas",
        "brevitas_layers.py",
        ("GPTQ, per channel", "per channel", "GPTQ, per tensor", "per tensor"),
        ("brevitas==0.13.4", "onnxoptimizer"),
    ),
    Tool("onnxruntime", "ort_static.py", BOTH),
    Tool("torchao PT2E", "torchao_pt2e.py", BOTH, ("torchao==0.18.0",)),
    Tool("NNCF", "nncf_torch.py", BOTH, ("nncf==3.4", "torchao==0.18.0")),
    Tool(
        "MCT",
        "mct_torch.py",
        ("per channel, all layers", "per tensor, all layers"),
        ("tabulate",),
        (
            "model-compression-toolkit==2.6.1",
            "mct-quantizers~=1.7.0",
            "edge-mdt-cl~=1.1.0",
            "PuLP",
            "scikit-image",
            "torchvision==0.28.0",
        ),
    ),
    Tool(
        "AIMET",
        "aimet_torch_sim.py",
        ("CLE and AdaRound, per channel", "CLE, per channel", "CLE and AdaRound, per tensor", "CLE, per tensor"),
        ("aimet-torch==2.42.0",),
    ),
)


def python_for(tool: Tool) -> Path:
    """Return the Python to run a tool with, after making its environment if there is none yet."""
    if not tool.needs + tool.alone:
        return Path(sys.executable)
    python, ready = tool.folder / "bin" / "python", tool.folder / "ready"
    made_for = f"{' '.join(tool.needs + tool.alone)} beside {MAIN}"
    if not (ready.is_file() and ready.read_text() == made_for):
        shutil.rmtree(tool.folder, ignore_errors=True)
        make(tool)
        ready.write_text(made_for)
    return python


def make(tool: Tool) -> None:
    """Make an environment with a tool and what it needs beyond the main environment."""
    call([sys.executable, "-m", "venv", tool.folder])
    python = tool.folder / "bin" / "python"
    own = call([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    # Not a bare path: the main environment has .pth files of its own, anybit's among them.
    Path(own, "main.pth").write_text(f"import site; site.addsitedir({MAIN!r})\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if tool.needs:
        bounded = [*pip, "-c", CONSTRAINTS, *tool.needs]
        planned = json.loads(call([*bounded, "--dry-run", "--report", "-"]))
        names = [item["metadata"]["name"].lower() for item in planned["install"]]
        if heavy := [name for name in names if name == "torch" or name.startswith(("nvidia", "cuda", "triton"))]:
            raise CannotRun(f"{tool.name} would install {', '.join(heavy)}")
        call(bounded)
    if tool.alone:
        call([*pip, "--no-deps", *tool.alone])


def call(command: Sequence[str | Path]) -> str:
    """Run a command to its end and return what it printed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        raise CannotRun(f"not done after {SECONDS} s") from error
    if done.returncode:
        raise CannotRun(last_words(done.stderr) or f"ended with code {done.returncode}")
    return done.stdout


def last_words(text: str) -> str:
    """Return the line of a program's complaints that says what went wrong."""
    said = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in said if line.startswith("ERROR")] or said[-1:]
    return errors[-1][:240] if errors else ""


def rows_of(tool: Tool, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run a tool's script and yield its rows as they come.

    Raises:
        CannotRun: The tool cannot be installed, or its script ended before the last row.
    """
    python = python_for(tool)
    environment = {
        **os.environ,
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "TORCH_EXTENSIONS_DIR": str(tool.folder / "extensions"),
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryFile("w+") as complaints:
        process = subprocess.Popen(
            [python, HERE / tool.script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints, text=True,
            env=environment,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        with process:
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.close()
            yield from map(json.loads, process.stdout)
        if process.returncode in (-signal.SIGTERM, -signal.SIGINT):
            sys.exit(f"{tool.name} was stopped; run this again to go on")  # that says nothing about the tool
        if process.returncode:
            complaints.seek(0)
            raise CannotRun(last_words(complaints.read()) or f"ended with code {process.returncode}")
