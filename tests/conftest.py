"""For all tests: ctrl-C means what it means in a terminal, and what could not be tested is said at the end."""

from __future__ import annotations

import copy
import functools
import gc
import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

# A second device, once registered, is there for everything in its process; test_second_device.py starts one for these.
collect_ignore_glob = [] if os.environ.get("ANYBIT_SECOND_DEVICE") else ["test_device_*.py"]

PROGRAMS = ("Chromium", "PostgreSQL", "playwright")
"""What a machine may lack, so that whole files of tests are skipped."""

# A shell starts what runs in its background with SIGINT ignored, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that have long tests, so that no process is left alone with one at the end."""
    long = {item.path for item in items if item.get_closest_marker("slow")}
    first = sorted((item for item in items if item.path in long), key=lambda item: item.path, reverse=True)
    items[:] = [*first, *(item for item in items if item.path not in long)]


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what was imported, and look less often: that took a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line what is missing on this machine and how many tests were left out for it."""
    reasons = [str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", [])]
    missing = Counter(reason.removeprefix("Skipped: ") for reason in reasons if any(p in reason for p in PROGRAMS))
    if missing:
        parts = [f"{count} ({reason})" for reason, count in sorted(missing.items())]
        terminalreporter.write_line(f"\nNOT TESTED on this machine: {', '.join(parts)}", yellow=True)


@pytest.fixture(autouse=True, scope="session")
def _translations_are_read_once() -> Iterator[None]:
    """Let PyTorch read its table of ONNX translations once for all tests: half of the time of a small export."""
    patch = pytest.MonkeyPatch()
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry
    except ImportError:  # another version keeps it elsewhere, and reads it each time
        yield
        return
    read = functools.cache(ONNXRegistry.from_torchlib)

    def own(*args: Any, **kwargs: Any) -> ONNXRegistry:
        registry = copy.copy(read(*args, **kwargs))
        registry.functions = {name: list(found) for name, found in registry.functions.items()}  # exports add to it
        return registry

    patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(own))
    yield
    patch.undo()
