"""One network and one tool, in a process of its own: prints one JSON line for every width.

`python benchmarks/strangers/case.py silero "anybit"` is one case of `run.py`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tools
from fetch import Unavailable, cache_folder
from networks import STRANGERS, Stranger
from task import MOST_INPUTS, Run, Task, scores

from anybit.errors import AnybitError

WIDTHS = {"W8A8": (8, 8), "W4A8": (4, 8), "W4A4": (4, 4)}
NARROW = {width: pair for width, pair in WIDTHS.items() if min(pair) < 8}
"""What is reconstructed: at 8 bits rounding to nearest is as good."""
MOST_SIGNS = 300
"""Of an error that lists every layer, this much is enough."""
Row = dict[str, Any]
Quantized = Iterator[tuple[str, Run, Row]]


def adopted(stranger: Stranger, task: Task, floats: Run, out: Path, *, data: bool, fitted: bool = False) -> Quantized:
    """Adopt the file, with data or without, and give it at every width; `fitted` ones are reconstructed first."""
    feeds = list(task.calibrate(floats))[:MOST_INPUTS] if data else None
    begin = time.perf_counter()
    summary = tools.adopt(stranger.file(), out, feeds)
    about = {"adopt_seconds": time.perf_counter() - begin, "summary": tools.summary_numbers(summary)}
    if fitted:
        about |= tools.reconstruct(out, feeds or [], list(NARROW))
    session = tools.open_master(out)
    for width, (weights, activations) in (NARROW if fitted else WIDTHS).items():
        session.set_bits(weights=weights, activations=activations)
        yield width, tools.run_of(session), about


def prepared(stranger: Stranger, task: Task, floats: Run, out: Path, *, data: bool) -> Quantized:
    """Prepare the PyTorch network, with data or without, and give it at every width."""
    assert stranger.torch is not None
    feeds = list(task.calibrate(floats))[:MOST_INPUTS] if data else None
    begin = time.perf_counter()
    network = tools.prepare(stranger.torch, feeds)
    about = {"adopt_seconds": time.perf_counter() - begin}
    for width, (weights, activations) in WIDTHS.items():
        network.set_bits(weights=weights, activations=activations)
        yield width, tools.run_of_network(network), about


def static(stranger: Stranger, task: Task, floats: Run, out: Path, *, per_channel: bool) -> Quantized:
    """Give the file as ONNX Runtime's own tool quantizes it."""
    begin = time.perf_counter()
    feeds = list(task.calibrate(floats))[:MOST_INPUTS]
    run = tools.quantize_static(stranger.file(), out, feeds, per_channel=per_channel)
    about = {"adopt_seconds": time.perf_counter() - begin, "summary": {"weights": tools.quantized_share(out)}}
    yield "W8A8", run, about


Tool = Callable[[Stranger, Task, Run, Path], Quantized]
TOOLS: dict[str, Tool] = {
    "anybit": lambda *case: adopted(*case, data=True),
    "anybit without data": lambda *case: adopted(*case, data=False),
    "anybit reconstructed": lambda *case: adopted(*case, data=True, fitted=True),
    "prepare": lambda *case: prepared(*case, data=True),
    "prepare without data": lambda *case: prepared(*case, data=False),
    "quantize_static per channel": lambda *case: static(*case, per_channel=True),
    "quantize_static per tensor": lambda *case: static(*case, per_channel=False),
}
PYTORCH = tuple(name for name in TOOLS if name.startswith("prepare"))


def suits(stranger: Stranger, tool: str) -> bool:
    """Say whether a tool is tried on a network."""
    if stranger.task is None:
        return tool == "anybit without data"
    return tool not in PYTORCH or stranger.torch is not None


def measured(stranger: Stranger, tool: str) -> Iterator[Row]:
    """Quantize and measure; a row for every width."""
    assert stranger.task is not None
    task = stranger.task(stranger.file())
    floats = tools.plain(stranger.file())
    wanted: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        for width, run, about in TOOLS[tool](stranger, task, floats, Path(folder) / "quantized.onnx"):
            if not wanted:  # only now: a file that is refused needs no truth to compare with
                wanted = [task.decide(floats, sample) for sample in task.samples]
            begin = time.perf_counter()
            found = scores(task, run, wanted)
            yield {"bits": width, **found, "n": len(wanted), "seconds": time.perf_counter() - begin, **about}


def one_line(reason: str) -> str:
    """Return what an error says, short, and without where this machine keeps its files."""
    return " ".join(reason.replace(f"{cache_folder()}/", "").split())[:MOST_SIGNS]


def refused(stranger: Stranger) -> Iterator[Row]:
    """Adopt a file that is quantized already; 1.0 if it is refused with a sentence that says so."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            tools.adopt(stranger.file(), Path(folder) / "adopted.onnx", None)
        except AnybitError as error:
            right = "quantized" in str(error)
            yield {"bits": "refused", "score": float(right), "n": 1, "reason": one_line(str(error))}
        else:
            yield {"bits": "refused", "score": 0.0, "n": 1, "reason": "was taken as if it were in floating point"}


def main() -> None:
    name, tool = sys.argv[1:]
    stranger = STRANGERS[name]
    warnings.simplefilter("ignore")
    try:
        for row in refused(stranger) if stranger.task is None else measured(stranger, tool):
            print(json.dumps(row), flush=True)
    except (AnybitError, Unavailable) as error:
        print(json.dumps({"error": one_line(str(error)), "kind": "refused"}), flush=True)
    except Exception as error:  # whatever it is, it belongs into the table
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
        print(json.dumps({"error": one_line(reason), "kind": "crashed"}), flush=True)


if __name__ == "__main__":
    main()
