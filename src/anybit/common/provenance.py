"""Where a number comes from: commit, machine, library versions, date."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

LIBRARIES = (
    "anybit", "cvxpy", "matplotlib", "numpy", "onnx", "onnxruntime", "optuna", "safetensors", "scikit-learn", "torch",
)  # fmt: skip


def commit() -> str:
    """Return the commit of the source tree this package runs from, with "+" if it was changed since."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return "unknown (not run from a git checkout)"
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", "src", "paper")
    except (OSError, subprocess.SubprocessError):
        return "unknown (git did not answer)"
    return head + ("+" if changed else "")


def _git(root: Path, *args: str) -> str:
    command = ["git", "-C", str(root), *args]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def cpu_name() -> str:
    """Return the processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Return the versions of the libraries that are installed."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def origin() -> dict[str, Any]:
    """Return everything a later reader needs to know about where and when this runs."""
    return {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": versions(),
    }
