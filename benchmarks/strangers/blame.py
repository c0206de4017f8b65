"""Where the loss comes from: one weight or activation at a time quantized, everything else in floating point."""

from __future__ import annotations

import glob
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tools
from networks import Stranger
from rich.console import Console
from rich.progress import track
from rich.table import Table
from task import MOST_INPUTS, Array, Feed, Run, Task, scores

from anybit.spec import FLOAT, Bits

WORST = 10


def show_blame(stranger: Stranger, bits: Bits, console: Console) -> None:
    """Print the ten weights and activations that change the network's outputs most when they alone are quantized."""
    if stranger.task is None:
        console.print(f"{stranger.name} is quantized already; there is nothing to blame")
        return
    task = stranger.task(stranger.file())
    floats = tools.plain(stranger.file())
    feeds = list(task.calibrate(floats))[:MOST_INPUTS]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "adopted.onnx"
        tools.adopt(stranger.file(), out, feeds)
        session = tools.open_master(out)
        run, names = tools.run_of(session), tools.point_names(session)
        outputs = [floats(feed) for feed in feeds[:4]]
        found = []
        for name in track(names, description="one at a time", console=console, transient=True):
            _only(session, name, bits)
            found.append((_error(run, feeds[:4], outputs), name))
        found.sort(reverse=True)
        wanted = [task.decide(floats, sample) for sample in task.samples]
        table = Table(title=f"{stranger.name} at {bits}: one quantized, the rest in floating point")
        for column in ("quantized", "error of the outputs", "decisions kept"):
            table.add_column(column, justify="left" if column == "quantized" else "right")
        for error, name in found[:WORST]:
            _only(session, name, bits)
            table.add_row(name, f"{error:.4f}", f"{scores(task, run, wanted)['score']:.3f}")
        _whole(table, session, bits, task, run, wanted)
        console.print(table)


def _only(session: Any, name: str, bits: Bits) -> None:
    session.set_bits(weights=FLOAT, activations=FLOAT, layers={glob.escape(name): (bits.weights, bits.activations)})


def _whole(table: Table, session: Any, bits: Bits, task: Task, run: Run, wanted: list[Any]) -> None:
    """Add the rows that tell weights from activations."""
    rows = {
        "all weights": (bits.weights, FLOAT), "all activations": (FLOAT, bits.activations),
        "everything": (bits.weights, bits.activations),
    }  # fmt: skip
    table.add_section()
    for title, (weights, activations) in rows.items():
        session.set_bits(weights=weights, activations=activations)
        table.add_row(title, "", f"{scores(task, run, wanted)['score']:.3f}")


def _error(run: Run, feeds: list[Feed], outputs: list[dict[str, Array]]) -> float:
    """Return the distance to the outputs in floating point over their own size, of the outputs that are no integers."""
    distance = size = 0.0
    for feed, wanted in zip(feeds, outputs, strict=True):
        found = run(feed)
        for name, value in wanted.items():
            if value.dtype.kind != "f":
                continue
            if found[name].shape != value.shape:  # an answer of free length became another one
                return 1.0
            distance += float(np.sum((found[name].astype(np.float64) - value) ** 2))
            size += float(np.sum(value.astype(np.float64) ** 2))
    return (distance / max(size, 1e-30)) ** 0.5
