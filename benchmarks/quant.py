"""What simulated quantization costs, against floating point in one interleaved run.

    make bench-quant

ResNet-18 at full width on 32x32 images, batch 128, random weights: forward passes at several widths over the
floating-point pass of the same folded network, the time of `set_bits`, and a sweep over 12 widths. Writes
results/quant-speed.json. Other tools stand beside it in `make bench-peers`.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from anybit.common.files import write_json
from anybit.common.provenance import origin
from anybit.models import build_model
from anybit.simulate.network import QuantizedNetwork
from anybit.simulate.prepare import prepare
from anybit.spec import Bits

BATCH = 128
REACH = 3.0
FORWARDS = [("plain", "W8A8"), ("plain", "W6A6"), ("plain", "W4A4"), ("per channel", "W4A4"), ("all helpers", "W4A4")]
NEW_WIDTHS = (8, 7, 6, 5, 4, 3, 2, 10)
SWEEP = (Bits(4, 4), Bits(6, 6), *(Bits(weights, 8) for weights in (2, 3, 5, 7, 8, 9, 10, 11, 12, 16)))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=float, default=1.0, help="of the network")
    parser.add_argument("--out", default="results", type=Path, help="the folder to write to")
    options = parser.parse_args()
    console = Console()
    console = Console(width=max(console.width, 130))
    rows = speed(options.width, options.rounds)
    console.print(show_speed(rows, options.width))
    path = options.out / "quant-speed.json"
    write_json(path, {**origin(), "threads": torch.get_num_threads(), "seed": 0, "speed": rows})
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
