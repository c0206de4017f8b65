"""What simulated quantization costs, against floating point in one interleaved run and beside other tools.

    make bench-quant

First ResNet-18 at full width on 32x32 images, batch 128, random weights: forward passes at several widths over the
floating-point pass of the same folded network, the time of `set_bits`, and a sweep over 12 widths. Then a trained
network in anybit, torch.ao, Brevitas, optimum-quanto and NNCF at the same widths: accuracy on 2,000 test images and
forward time over floating point, each tool in a process of its own with its own floating-point pass beside it.
Writes results/quant-speed.json and results/quant-peers.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peers.environment import TOOLS, CannotRun, Tool, run
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor

from anybit.common.files import write_json
from anybit.common.provenance import origin
from anybit.data import load_dataset
from anybit.errors import AnybitError
from anybit.models import build_model
from anybit.simulate.network import QuantizedNetwork
from anybit.simulate.prepare import prepare
from anybit.spec import Bits

BATCH = 128
REACH = 3.0
FORWARDS = [("plain", "W8A8"), ("plain", "W6A6"), ("plain", "W4A4"), ("per channel", "W4A4"), ("all helpers", "W4A4")]
NEW_WIDTHS = (8, 7, 6, 5, 4, 3, 2, 10)
SWEEP = (Bits(4, 4), Bits(6, 6), *(Bits(weights, 8) for weights in (2, 3, 5, 7, 8, 9, 10, 11, 12, 16)))
WIDTHS = ("W8A8", "W6A6", "W4A8", "W4A4")
RUNS = ("runs/laptop-resnet18-base-0", "runs/laptop-vgg-like-base-0")
CALIBRATION, TEST = 512, 2000
Row = dict[str, Any]


def timed(action: Callable[..., object], *args: object) -> float:
    begin = time.perf_counter()
    action(*args)
    return time.perf_counter() - begin


def at(net: QuantizedNetwork, bits: Bits) -> None:
    net.set_bits(weights=bits.weights, activations=bits.activations)


def networks(width: float) -> tuple[dict[str, QuantizedNetwork], Tensor]:
    """ResNet-18 prepared in three ways, and a batch for it."""
    torch.manual_seed(0)
    model = build_model("resnet18-cifar", channels=3, classes=10, multiplier=width).train()
    x = torch.randn(BATCH, 3, 32, 32).clamp(-REACH, REACH)
    with torch.no_grad():
        for _ in range(3):  # batch norm gets to know its input
            model(x)
    model.eval()
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "per channel": {"per_channel": True},
        "all helpers": {"helpers": "all"},
    }
    return {
        name: prepare(model, x[:2], input_range=(-REACH, REACH), **way, preset="paper") for name, way in ways.items()
    }, x


def row(what: str, values: list[float], typical: float, unit: str, asked: float | None, **more: object) -> Row:
    return {
        "what": what, "value": typical, "low": min(values), "high": max(values), "n": len(values), "unit": unit,
        "asked_for_at_most": asked, **more,
    }  # fmt: skip


def forwards(nets: dict[str, QuantizedNetwork], x: Tensor, rounds: int) -> list[Row]:
    """Forward passes at each width over the floating-point pass of the same network, in turns."""
    turns = [("plain", "FP"), *FORWARDS]
    times: dict[tuple[str, str], list[float]] = {turn: [] for turn in turns}
    for index in range(rounds + 1):
        for name, width in turns:
            at(nets[name], Bits.parse(width))
            seconds = timed(nets[name], x)
            if index:  # the first round warms up
                times[name, width].append(seconds)
    base = times["plain", "FP"]
    rows = [row("forward, floating point", base, statistics.median(base), "s", None)]
    for name, width in FORWARDS:
        seconds = times[name, width]
        ratios = [s / b for s, b in zip(seconds, base, strict=True)]
        what = f"forward, {width}" + ("" if name == "plain" else f", {name}")
        rows.append(row(what, ratios, statistics.median(seconds) / statistics.median(base), "x float", 1.35))
    return rows


def switches(nets: dict[str, QuantizedNetwork]) -> list[Row]:
    """Milliseconds of `set_bits` to widths that were not used before, and back to those that were."""
    rows = []
    for name, asked in (("plain", 40), ("all helpers", 300)):
        net = copy.deepcopy(nets[name])
        new = [1000 * timed(at, net, Bits(w, w)) for w in NEW_WIDTHS]
        back = [1000 * timed(at, net, Bits(w, w)) for w in NEW_WIDTHS * 3]
        label = "nearest" if name == "plain" else name
        rows.append(row(f"set_bits, new width, {label}", new, statistics.median(new), "ms", asked))
        rows.append(row(f"set_bits, width used before, {label}", back, statistics.median(back), "ms", 2))
    return rows


def sweeps(net: QuantizedNetwork, x: Tensor, repeats: int) -> Row:
    """Twelve new widths, each with one forward pass, over the floating-point pass in turns with them."""
    totals = []
    net(x)  # warms up
    for _ in range(repeats):
        fresh, spent, base = copy.deepcopy(net), 0.0, []
        for bits in SWEEP:
            base.append(timed(net, x))
            spent += timed(at, fresh, bits) + timed(fresh, x)
        totals.append(spent / statistics.mean(base))
    return row(f"sweep over {len(SWEEP)} new widths", totals, statistics.median(totals), "forwards", len(SWEEP) * 1.4)


def show_speed(rows: list[Row], width: float) -> Table:
    title = f"anybit, ResNet-18 at width {width:g}, 32x32 images, batch {BATCH}, {torch.get_num_threads()} threads"
    table = Table(title=title)
    for column in ("what", "median", "lowest", "highest", "asked for"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for r in rows:
        asked = "" if r["asked_for_at_most"] is None else f"at most {r['asked_for_at_most']:g}"
        table.add_row(r["what"], f"{r['value']:.2f} {r['unit']}", f"{r['low']:.2f}", f"{r['high']:.2f}", asked)
    return table


def speed(width: float, rounds: int) -> list[Row]:
    nets, x = networks(width)
    with torch.no_grad():
        # First what needs a network that has been at no width yet, whose copies have no rounded weights either.
        later = [*switches(nets), sweeps(nets["plain"], x, 2)]
        rows = forwards(nets, x, rounds) + later
    return [{"network": "resnet18-cifar", "width": width, "batch": BATCH, **r} for r in rows]


def write_images(path: Path) -> None:
    """Write the images that every tool gets: some to calibrate with, some to test on."""
    data = load_dataset("paper.cifar10:load", code=True)
    tensors = {"calibration": data.train.x[:CALIBRATION], "x": data.test.x[:TEST], "y": data.test.y[:TEST]}
    save_file(
        {name: t.contiguous() for name, t in tensors.items()}, path, {"input_range": json.dumps(data.input_range)}
    )


def rows_of(tool: Tool, *arguments: str) -> list[Row]:
    """A tool's rows, or one row that says why there are none."""
    try:
        answer = run(tool, *arguments)
    except CannotRun as error:
        return [{"tool": tool.name, "bits": None, "reason": str(error)}]
    return [{"version": answer["version"], "threads": answer["threads"], **r} for r in answer["rows"]]


def cell(r: Row | None) -> str:
    if r is None or "accuracy" not in r:
        return "-"
    return f"{100 * r['accuracy']:.1f} %  {r['ratio']:.2f}x"


def show_peers(rows: list[Row], checkpoint: Path) -> Table:
    floats = [r["float_accuracy"] for r in rows if "float_accuracy" in r]
    exact = f"; floating point {100 * floats[0]:.1f} %" if floats else ""
    title = f"{checkpoint.parent.name}, CIFAR-10, first {TEST} test images{exact}"
    table = Table(title=title, caption="accuracy, and forward time over the tool's own floating-point pass")
    for column in ("tool", *WIDTHS, "first width", "another width"):
        table.add_column(column, justify="left" if column == "tool" else "right")
    for name in dict.fromkeys(r["tool"] for r in rows):
        own = {r["bits"]: r for r in rows if r["tool"] == name}
        if None in own:
            table.add_row(f"{name} does not run here: {own[None]['reason']}", *("-" for _ in range(len(WIDTHS) + 2)))
            continue
        times = [r["seconds_to_width"] for r in own.values() if "seconds_to_width" in r]
        later = f"{statistics.median(times[1:]):.3f} s" if times[1:] else "-"
        label = f"{name} {next(iter(own.values()))['version']}"
        table.add_row(label, *(cell(own.get(w)) for w in WIDTHS), f"{times[0]:.3f} s" if times else "-", later)
    return table


def peers(checkpoint: Path, tools: list[Tool], rounds: int, show: Callable[[str], None]) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder) / "images.safetensors"
        write_images(images)
        for tool in tools:
            show(f"running {tool.name}")
            rows += rows_of(tool, str(checkpoint), str(images), " ".join(WIDTHS), str(rounds))
    return [{"checkpoint": str(checkpoint), **r} for r in rows]


def find_checkpoint() -> Path | None:
    found = (Path(folder) / "model.safetensors" for folder in RUNS)
    return next((path for path in found if path.is_file()), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=float, default=1.0, help="of the network in the first table")
    parser.add_argument("--only", choices=("speed", "peers"))
    parser.add_argument("--tools", help=f"for the second table, such as {TOOLS[0].name},{TOOLS[1].name}; default all")
    parser.add_argument("--checkpoint", type=Path, help="for the second table, instead of a laptop run")
    parser.add_argument("--out", default="results", type=Path, help="the folder to write to")
    options = parser.parse_args()
    console = Console()
    console = Console(width=max(console.width, 130))

    def write(part: str, rows: list[Row]) -> None:
        path = options.out / f"quant-{part}.json"
        write_json(path, {**origin(), "threads": torch.get_num_threads(), "seed": 0, part: rows})
        console.print(f"written to {path}")

    if options.only != "peers":
        rows = speed(options.width, options.rounds)
        console.print(show_speed(rows, options.width))
        write("speed", rows)
    if options.only != "speed":
        checkpoint = options.checkpoint or find_checkpoint()
        if checkpoint is None:
            console.print(f"no trained network: train one into {' or '.join(RUNS)} for the table beside other tools")
            return
        tools = [t for t in TOOLS if not options.tools or t.name in options.tools.split(",")]
        try:
            rows = peers(checkpoint, tools, 2 * options.rounds + 1, console.print)
        except AnybitError as error:
            console.print(f"no table beside other tools: {error}")
            return
        console.print(show_peers(rows, checkpoint))
        for r in rows:
            if r["bits"] is not None and "reason" in r:
                console.print(f"{r['tool']}, {r['bits']}: {r['reason']}", highlight=False)
        write("peers", rows)


if __name__ == "__main__":
    main()
