"""Where the loss comes from: some weights and activations quantized, everything else in floating point."""

from __future__ import annotations

import glob
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import tools
from networks import Stranger
from task import MOST_INPUTS, Array, Feed, Run, scores

from anybit.plan.widen import Unit, costs_most
from anybit.spec import FLOAT, Bits

WORST = 6
INPUTS = 2
"""On how many inputs the errors of the outputs are compared."""


def blame(stranger: Stranger, bits: Bits, tool: str) -> dict[str, Any]:
    """Return which neighbours among the points cost the outputs most, and what weights and activations cost alone.

    The share of an entry is its squared error over that of all points together; the decisions are those that stay as
    they are when these points alone are quantized.
    """
    assert stranger.task is not None
    task, floats = stranger.task(stranger.file()), tools.plain(stranger.file())
    feeds = list(task.calibrate(floats))[:MOST_INPUTS]
    with tempfile.TemporaryDirectory() as folder:
        session, run = _quantized(stranger, tool, feeds, Path(folder) / "adopted.onnx")
        names = tools.point_names(session)
        outputs = [floats(feed) for feed in feeds[:INPUTS]]

        def error(some: Collection[str]) -> float:
            only = {glob.escape(name): (bits.weights, bits.activations) for name in some}
            session.set_bits(weights=FLOAT, activations=FLOAT, layers=only)
            return _error(run, feeds[:INPUTS], outputs)

        whole = error(names)
        found = sorted(costs_most([Unit((name,), frozenset()) for name in names], error), key=lambda entry: -entry[0])
        wanted = [task.decide(floats, sample) for sample in task.samples]
        alone = {}
        for title, widths in {"weights": (bits.weights, FLOAT), "activations": (FLOAT, bits.activations)}.items():
            session.set_bits(weights=widths[0], activations=widths[1])
            alone[title] = scores(task, run, wanted)["score"]
        worst = [
            {
                "first": unit.names[0],
                "last": unit.names[-1],
                "points": len(unit.names),
                "share": cost / max(whole, 1e-30),
            }
            for cost, unit in found[:WORST]
        ]
        return {"worst": worst, **alone}


def _quantized(stranger: Stranger, tool: str, feeds: list[Feed], out: Path) -> tuple[Any, Run]:
    """Return a network whose points can be quantized one by one, and the same as a function."""
    given = None if tool.endswith("without data") else feeds
    if tool.startswith("prepare"):
        assert stranger.torch is not None
        network = tools.prepare(stranger.torch, given)
        return network, tools.run_of_network(network)
    tools.adopt(stranger.file(), out, given)
    session = tools.open_master(out)
    return session, tools.run_of(session)


def in_words(entry: dict[str, Any]) -> str:
    """Return in one line what costs a network its decisions."""
    parts = [
        f"{w['first']}{'' if w['points'] == 1 else ' to ' + w['last']} ({w['points']} points, {w['share']:.0%})"
        for w in entry["worst"]
    ]
    alone = f"weights alone keep {entry['weights']:.3f}, activations alone {entry['activations']:.3f}"
    return f"{alone}; of the error of the outputs: {', '.join(parts) or 'nothing stands out'}"


def _error(run: Run, feeds: list[Feed], outputs: list[dict[str, Array]]) -> float:
    """Return the squared distance to the outputs in floating point over their own size, each output alike."""
    errors = []
    for feed, wanted in zip(feeds, outputs, strict=True):
        for value, found in zip(wanted.values(), run(feed).values(), strict=True):  # names differ in PyTorch
            if value.dtype.kind != "f":
                continue
            if found.shape != value.shape:  # an answer of free length became another one
                errors.append(1.0)
                continue
            size = float(np.sum(value.astype(np.float64) ** 2))
            errors.append(float(np.sum((found.astype(np.float64) - value) ** 2)) / max(size, 1e-30))
    return float(np.mean(errors)) if errors else 0.0
