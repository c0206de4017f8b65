"""What runs on a second device is tested in a process of its own: PyTorch cannot forget a device again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_on_a_second_device() -> None:
    files = sorted(map(str, HERE.glob("test_device_*.py")))
    assert len(files) >= 2
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, "ANYBIT_SECOND_DEVICE": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(command, env=environment, cwd=HERE.parent, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "[100%]" in done.stdout
