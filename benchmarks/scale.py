"""How time and memory grow: of a regularized step with the network, and of the tools with its parameters.

    make bench-scale

`step`: a two-pass step over a plain one on 32x32 images, in one interleaved run, for several batches, widths and depths
of a residual network; peak memory in a process of its own for each. `network`: `prepare`, `set_bits`, `save` and `load`
of a wide random network of 1 to 300 million parameters, and of one whose file passes 2 GB. A size is measured in three
processes: plain, with helpers, and loading. Memory is the peak of the process during a call, less what it held with a
tiny network and all libraries, over the size of the weights in float32; malloc hands freed memory back at once, so that
this is what is held at one time. The original model is gone after `prepare`, as when a checkpoint was loaded for it.
Writes results/scale.json after each point; `--only`, `--largest` and `--missing` run a part and keep the rest of it.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from anybit.artifact.session import load
from anybit.common.files import read_json, write_json
from anybit.common.provenance import origin
from anybit.errors import FileError
from anybit.models.resnet import BasicBlock, ResNet
from anybit.objectives.gradient import GradientPenalty
from anybit.simulate.network import QuantizedNetwork
from anybit.simulate.prepare import prepare
from anybit.simulate.to_onnx import save
from anybit.train.memory import keep_freed_memory

Row = dict[str, Any]
Spent = tuple[float, float]
"""Seconds by the clock, and of all processors: those do not count what others do on a busy machine."""

LAMBDA = 1e-3
BASE = {"batch": 64, "multiplier": 0.125, "depth": 18}
VARIED: dict[str, tuple[float, ...]] = {
    "batch": (32, 64, 128, 256),
    "width": (0.125, 0.25, 0.5),
    "depth": (18, 34, 66),
}
DEPTHS = {18: (2, 2, 2, 2), 34: (4, 4, 4, 4), 66: (8, 8, 8, 8)}

SIZES = (1, 10, 30, 100, 300)
"""Millions of parameters."""
BEYOND = 600
"""Millions of parameters whose weights take 2.4 GB, more than one ONNX file may have."""
HELPERS = ("bias", "sums", "clip")
REACH = 3.0
ASKED = 2.2
FITTED = 3
"""The growth exponent is fitted to so many of the largest points."""


# The regularized step


def residual(width: float, depth: int) -> nn.Module:
    return ResNet(BasicBlock, DEPTHS[depth], small_images=True, channels=3, classes=10, multiplier=width)


def make_step(kind: str, batch: int, width: float, depth: int) -> tuple[nn.Module, Callable[[], object]]:
    torch.manual_seed(0)
    model = residual(width, depth).train()
    x, y = torch.randn(batch, 3, 32, 32), torch.arange(batch) % 10
    if kind == "plain":
        return model, lambda: F.cross_entropy(model(x), y).backward()
    penalty = GradientPenalty(model, weight=LAMBDA, activation=LAMBDA)
    return model, lambda: penalty.backward(lambda: F.cross_entropy(model(x), y))


def time_steps(rounds: int, batch: int, width: float, depth: int) -> dict[str, list[Spent]]:
    """Seconds of both kinds of step, one after the other, round after round."""
    keep_freed_memory()
    made = {kind: make_step(kind, batch, width, depth) for kind in ("plain", "two-pass")}
    taken: dict[str, list[Spent]] = {kind: [] for kind in made}
    for index in range(rounds + 1):
        for kind, (model, step) in made.items():
            model.zero_grad()
            spent, _ = timed(step)
            if index:  # the first round warms up
                taken[kind].append(spent)
    return taken


def step_memory(kind: str, batch: int, width: float, depth: int) -> float:
    model, step = make_step(kind, batch, width, depth)
    before = forget_peak()
    for _ in range(2):
        model.zero_grad()
        step()
    return status("VmHWM") - before


def measure_step(rounds: int, where: dict[str, float]) -> Row:
    """One point: the ratio of medians with its spread, and the ratio of peak memories."""
    words = [str(where[name]) for name in ("batch", "width", "depth")]
    taken = child("--time", str(rounds), *words)
    memory = {kind: child("--memory", kind, *words, returned=True) for kind in ("plain", "two-pass")}
    (wall, cpu) = ({kind: [spent[i] for spent in all_] for kind, all_ in taken.items()} for i in (0, 1))
    ratios = [b / a for a, b in zip(wall["plain"], wall["two-pass"], strict=True)]
    parameters = sum(p.numel() for p in residual(where["width"], int(where["depth"])).parameters())
    return {
        **where,
        "parameters": parameters,
        "rounds": rounds,
        "plain_seconds": statistics.median(wall["plain"]),
        "ratio": statistics.median(wall["two-pass"]) / statistics.median(wall["plain"]),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "ratio_cpu": statistics.median(cpu["two-pass"]) / statistics.median(cpu["plain"]),
        "plain_memory_mb": memory["plain"],
        "memory_ratio": memory["two-pass"] / memory["plain"],
    }


# The tools on a wide network


class Wide(nn.Module):
    """Eight convolutions and eight linear layers with batch norm, all of one size: half of the weights in either."""

    def __init__(self, parameters: float) -> None:
        super().__init__()
        size = max(8, round(math.sqrt(parameters / 144)))
        convs = [self.conv(3, size), *(self.conv(size, size) for _ in range(8))]
        linears = [self.linear(size, 3 * size), *(self.linear(3 * size, 3 * size) for _ in range(8))]
        self.convs, self.linears = nn.Sequential(*convs), nn.Sequential(*linears)
        self.classifier = nn.Linear(3 * size, 10)

    @staticmethod
    def conv(before: int, after: int) -> nn.Sequential:
        """A convolution as networks have them."""
        layer = nn.Conv2d(before, after, 3, padding=1, bias=False)
        return nn.Sequential(layer, nn.BatchNorm2d(after), nn.ReLU())

    @staticmethod
    def linear(before: int, after: int) -> nn.Sequential:
        """A linear layer with batch norm, so that ranges need no data."""
        return nn.Sequential(nn.Linear(before, after, bias=False), nn.BatchNorm1d(after), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch."""
        return self.classifier(self.linears(self.convs(x).mean((2, 3))))


EXAMPLE = torch.zeros(2, 3, 4, 4)


def prepared(model: nn.Module, helpers: tuple[str, ...] = ()) -> QuantizedNetwork:
    return prepare(model, EXAMPLE, input_range=(-REACH, REACH), helpers=helpers, preset="paper")


class Meter:
    """Measures calls: seconds, and peak memory over the size of the weights."""

    def __init__(self, weights: float) -> None:
        self.weights, self.libraries = weights, forget_peak()
        self.rows: list[Row] = []

    def __call__(self, call: str, action: Callable[[], Any], **more: Any) -> Any:
        """Return what the call returns."""
        before = forget_peak()
        (seconds, cpu), result = timed(action)
        peak, after = status("VmHWM"), status("VmRSS")
        held, most, left = ((value - self.libraries) * 2**20 / self.weights for value in (before, peak, after))
        times = {"seconds": seconds, "cpu_seconds": cpu}
        self.rows.append({"call": call, **times, "held": held, "peak": most, "after": left, **more})
        return result


def measure_plain(parameters: float, folder: Path) -> list[Row]:
    warm_up(folder)
    torch.manual_seed(0)
    meter = Meter(4 * count(parameters))
    model = Wide(parameters).eval()
    net = meter("prepare", functools.partial(prepared, model))
    del model
    meter("set_bits", lambda: net.set_bits(weights=8, activations=8))
    meter("save", lambda: save(net, folder / "wide.onnx"))  # at 8 bits: both sets of weights are held
    meter.rows[-1] |= {"files": sorted(p.stat().st_size for p in folder.glob("wide.onnx*"))}
    meter("set_bits, another width", lambda: net.set_bits(weights=4, activations=8))
    x = torch.linspace(-1, 1, EXAMPLE.numel()).reshape(EXAMPLE.shape)
    with torch.no_grad(), net.at(weights=32, activations=32):
        np.save(folder / "wanted.npy", net(x).numpy())
    return meter.rows


def measure_helpers(parameters: float, folder: Path) -> list[Row]:
    warm_up(folder)
    torch.manual_seed(0)
    meter = Meter(4 * count(parameters))
    net = meter("prepare, helpers", lambda: prepared(Wide(parameters).eval(), HELPERS))
    meter("set_bits, helpers", lambda: net.set_bits(weights=4, activations=8))
    return meter.rows[1:]


def measure_load(parameters: float, folder: Path) -> list[Row]:
    """Load, run, switch and run; what floating point gives is compared with the simulation."""
    warm_up(folder)
    meter = Meter(4 * count(parameters))
    session = meter("load", lambda: load(folder / "wide.onnx"))
    x = np.linspace(-1, 1, EXAMPLE.numel(), dtype=np.float32).reshape(EXAMPLE.shape)
    got, want = session.run(x), np.load(folder / "wanted.npy")
    error = float(np.abs(got - want).max() / np.abs(want).max())
    assert error < 1e-3, error
    meter("switch a session", lambda: session.set_bits(weights=8, activations=8))
    meter("run", lambda: session.run(x), error_in_float=error)
    return meter.rows


def warm_up(folder: Path) -> None:
    """Load every library and fill every cache with a tiny network first."""
    net = prepared(Wide(1e4).eval(), HELPERS)
    net.set_bits(weights=8, activations=8)
    save(net, folder / "tiny.onnx")
    load(folder / "tiny.onnx").run(EXAMPLE.numpy())


def count(parameters: float) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Wide(parameters).parameters())


PARTS = {"plain": measure_plain, "helpers": measure_helpers, "load": measure_load}


def measure_network(millions: int, parts: tuple[str, ...]) -> list[Row]:
    """All calls at one size, each part in a process of its own."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            rows += child("--network", part, str(millions), folder, returned=True)
    return [{"millions": millions, "parameters": count(1e6 * millions), **row} for row in rows]


# Measuring


def timed(action: Callable[[], Any]) -> tuple[Spent, Any]:
    """Run something; return its seconds by the clock and of all processors, and what it returned."""
    begin, cpu = time.perf_counter(), time.process_time()
    result = action()
    return (time.perf_counter() - begin, time.process_time() - cpu), result


def status(field: str) -> float:
    """A line of /proc/self/status in megabytes."""
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in text.splitlines() if line.startswith(field))


def forget_peak() -> float:
    """Start a new peak; return what is held now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def child(*words: str, returned: bool = False) -> Any:
    """Run a part of this program in a process of its own; return what it printed."""
    # Threads that wait do not count as work, and leave the processor to others.
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    if returned:
        environment["MALLOC_MMAP_THRESHOLD_"] = "65536"
    command = [sys.executable, __file__, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def slope(points: list[tuple[float, float]]) -> float:
    """Return the growth exponent of y in x: the slope of the straight line through the logarithms.

    >>> round(slope([(1, 5), (10, 500), (100, 50_000)]), 6)
    2.0
    """
    x, y = (np.log([point[i] for point in points]) for i in (0, 1))
    return float(np.polyfit(x, y, 1)[0])


def exponents(rows: list[Row]) -> dict[str, float]:
    """The growth exponent of each call's processor time, over the largest points up to 300 million."""
    found = {}
    for call in dict.fromkeys(row["call"] for row in rows):
        points = [(r["parameters"], r["cpu_seconds"]) for r in rows if r["call"] == call and r["millions"] in SIZES]
        if len(points) >= FITTED:
            found[call] = slope(sorted(points)[-FITTED:])
    return found


# Showing


def show_steps(rows: list[Row]) -> Table:
    table = Table(title="a two-pass step over a plain one, residual network on 32x32 images")
    for column in (
        "batch",
        "width",
        "depth",
        "parameters",
        "plain step",
        "times plain",
        "spread",
        "by cpu time",
        "memory",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row['batch']:g}", f"{row['width']:g}", f"{row['depth']:g}", f"{row['parameters']:,}",
            f"{1000 * row['plain_seconds']:.0f} ms", f"{row['ratio']:.2f}",
            f"{row['ratio_low']:.2f}-{row['ratio_high']:.2f}", f"{row['ratio_cpu']:.2f}", f"{row['memory_ratio']:.2f}x",
        )  # fmt: skip
    return table


def cell(row: Row) -> str:
    return f"{row['seconds']:.2f} s ({row['cpu_seconds']:.2f}) {row['peak']:.2f}x"


def show_network(rows: list[Row], grown: dict[str, float]) -> Table:
    sizes = sorted({row["millions"] for row in rows})
    table = Table(title="seconds, in brackets those of all processors, and peak memory over the size of the weights")
    table.add_column("call")
    for millions in sizes:
        table.add_column(f"{millions}M", justify="right")
    table.add_column("grows with", justify="right")
    cells = {(row["call"], row["millions"]): cell(row) for row in rows}
    for call in dict.fromkeys(row["call"] for row in rows):
        exponent = f"n^{grown[call]:.2f}" if call in grown else "-"
        table.add_row(call, *(cells.get((call, m), "-") for m in sizes), exponent)
    return table


def asked_for(rows: list[Row]) -> list[str]:
    """What was asked for and does not hold."""
    return [
        f"{row['call']} of {row['millions']} million parameters takes {row['peak']:.2f} times its weights, over {ASKED}"
        for row in rows
        if row["call"] in ("set_bits", "save", "set_bits, helpers") and row["millions"] >= 30 and row["peak"] > ASKED
    ]


class Results:
    """The file, written after each point; points measured again replace the old ones."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.values = read_json(path, what="an earlier measurement")
        except FileError:
            self.values = {"step": [], "network": []}

    def add(self, part: str, rows: list[Row], key: tuple[str, ...]) -> None:
        """Keep rows and write the file."""
        new = {tuple(row[k] for k in key): row for row in rows}
        old = {tuple(row[k] for k in key): row for row in self.values[part]}
        self.values[part] = list({**old, **new}.values())
        self.values |= {**origin(), "threads": torch.get_num_threads(), "seed": 0, "load": os.getloadavg()[1]}
        self.values["exponents"] = exponents(self.values["network"])
        write_json(self.path, self.values)


def run_step(results: Results, rounds: int, show: Callable[[str], None], *, missing: bool) -> None:
    points = [{**BASE, name: value} for name, values in VARIED.items() for value in values]
    done = [{name: row[name] for name in BASE} for row in results.values["step"]] if missing else []
    for where in {tuple(p.items()): p for p in points if p not in done}.values():
        show(f"step: {where}")
        results.add("step", [measure_step(rounds, where)], ("batch", "width", "depth"))


def run_network(results: Results, largest: int, show: Callable[[str], None], *, missing: bool) -> None:
    done = {row["millions"] for row in results.values["network"]} if missing else set()
    for millions in [m for m in (*SIZES, BEYOND) if m <= largest and m not in done]:
        show(f"network: {millions} million parameters")
        parts = ("plain", "load") if millions == BEYOND else tuple(PARTS)
        results.add("network", measure_network(millions, parts), ("millions", "call"))


def run_child(options: argparse.Namespace) -> Any:
    """Do the part that this process was started for."""
    if options.time:
        rounds, batch, width, depth = options.time
        return time_steps(int(rounds), int(batch), float(width), int(depth))
    if options.memory:
        kind, batch, width, depth = options.memory
        return step_memory(kind, int(batch), float(width), int(depth))
    part, millions, folder = options.network
    return PARTS[part](1e6 * float(millions), Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("step", "network"))
    parser.add_argument("--largest", type=int, default=BEYOND, help="millions of parameters of the largest network")
    parser.add_argument("--missing", action="store_true", help="measure only what the file does not have yet")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results/scale.json"))
    for name, words in (("--time", 4), ("--memory", 4), ("--network", 3)):
        parser.add_argument(name, nargs=words, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.time or options.memory or options.network:
        print(json.dumps(run_child(options)))
        return
    console = Console()
    console = Console(width=max(console.width, 130))
    results = Results(options.out)
    if options.only != "network":
        run_step(results, options.rounds, console.print, missing=options.missing)
        console.print(show_steps(results.values["step"]))
    if options.only != "step":
        run_network(results, options.largest, console.print, missing=options.missing)
        console.print(show_network(results.values["network"], results.values["exponents"]))
        for problem in asked_for(results.values["network"]):
            console.print(problem)
    console.print(f"written to {options.out}")


if __name__ == "__main__":
    main()
