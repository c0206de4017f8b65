"""Widths per layer from the first-order bound, against equal widths and a greedy search by accuracy.

    make bench-allocate

Budgets in bits per weight on average, activations at 8 bits, on the trained CIFAR-10 networks, data-free ranges. The
bound sees 1,024 training images; the greedy search starts with every layer at 8 bits and takes one bit at a time from
the layer whose loss on 500 validation images suffers least per bit saved. Reported on 5,000 test images. Writes
results/allocate.json.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from anybit.common.files import write_json
from anybit.common.provenance import origin
from anybit.data import Batches, load_dataset
from anybit.data.base import Split
from anybit.evaluate.sweep import evaluate
from anybit.simulate.allocate import mean_loss
from anybit.simulate.network import QuantizedNetwork
from anybit.simulate.prepare import prepare
from anybit.spec import Bits
from anybit.task.checkpoint import load_model

RUNS = ("runs/laptop-vgg-like-base-0", "runs/laptop-resnet18-base-0")
BUDGETS = (3.0, 4.0, 5.0)
ACTIVATIONS = 8


def part(split: Split, n: int) -> Batches:
    return Batches(split.first(n).channels_last(), 100)


def greedy(net: QuantizedNetwork, loader: Batches, budgets: tuple[float, ...]) -> dict[float, dict[str, Bits]]:
    """Take bits away one by one where it hurts least; return the widths when each budget was first met."""
    counts = {name: weight.numel() for name, weight in net.weights.items()}
    widths = dict.fromkeys(counts, 8)
    total = sum(counts.values())
    found: dict[float, dict[str, Bits]] = {}

    def loss(candidate: dict[str, int]) -> float:
        layers = {name: (bits, ACTIVATIONS) for name, bits in candidate.items()}
        with net.at(weights=8, activations=ACTIVATIONS, layers=layers):
            return mean_loss(net, loader, F.cross_entropy)

    before = loss(widths)
    while len(found) < len(budgets):
        average = sum(counts[n] * b for n, b in widths.items()) / total
        for budget in budgets:
            if budget not in found and average <= budget:
                found[budget] = {n: Bits(b, ACTIVATIONS) for n, b in widths.items()}
        options = {n: loss({**widths, n: b - 1}) for n, b in widths.items() if b > 2}
        if not options:
            break
        best = min(options, key=lambda n: (options[n] - before) / counts[n])
        widths[best] -= 1
        before = options[best]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", nargs="+", default=list(RUNS))
    parser.add_argument("--out", default="results/allocate.json")
    options = parser.parse_args()
    console = Console()
    results: list[dict[str, Any]] = []
    for run in options.runs:
        model, about = load_model(Path(run) / "model.safetensors")
        data = load_dataset(about["data"])
        net = prepare(model, data.test.x[:2], input_range=data.input_range, preset="paper")
        begin = time.perf_counter()
        searched = greedy(net, part(data.validation, 500), BUDGETS)
        greedy_seconds = time.perf_counter() - begin
        table = Table(title=f"{run}: weights at an average width, activations at {ACTIVATIONS} bits, 5,000 test images")
        for column in ("budget", "widths by", "average", "accuracy %", "loss", "bound"):
            table.add_column(column, justify="left" if column == "widths by" else "right")
        for budget in BUDGETS:
            begin = time.perf_counter()
            chosen = net.allocate(budget=budget, loader=part(data.train, 1024), activations=ACTIVATIONS)
            seconds = time.perf_counter() - begin
            equal = {name: Bits(int(budget), ACTIVATIONS) for name in chosen.layers}
            ways = {
                "equal widths": (equal, 0.0),
                "first-order bound": (chosen.layers, seconds),
                "greedy by accuracy": (searched[budget], greedy_seconds),
            }
            for way, (layers, took) in ways.items():
                with net.at(weights=8, activations=ACTIVATIONS, layers=layers):
                    s = evaluate(net, part(data.test, 5000))
                counts = {name: weight.numel() for name, weight in net.weights.items()}
                average = sum(counts[n] * b.weights for n, b in layers.items()) / sum(counts.values())
                bound = chosen.predicted if way == "first-order bound" else None
                table.add_row(
                    f"{budget:g}", way, f"{average:.2f}", f"{100 * s.accuracy:.2f}", f"{s.loss:.3f}",
                    "" if bound is None else f"{bound:.2f}",
                )  # fmt: skip
                results.append(
                    {
                        "run": run, "model": about["model"], "budget_bits": budget, "way": way,
                        "average_bits": average, "accuracy": s.accuracy, "loss": s.loss, "n": s.n,
                        "predicted_increase": bound, "measured_on_training_images": None
                        if way != "first-order bound" else [chosen.loss, chosen.measured],
                        "seconds": took, "layers": {n: b.weights for n, b in layers.items()},
                    }
                )  # fmt: skip
            write_json(options.out, {**origin(), "threads": torch.get_num_threads(), "rows": results})
        console.print(table)
    console.print(f"written to {options.out}")


if __name__ == "__main__":
    main()
