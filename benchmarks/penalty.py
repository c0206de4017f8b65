"""What a penalized step costs, against a plain one, in one interleaved run.

    make bench-penalty

Batch 128 on 32x32 images, VGG-like and ResNet-18 at a quarter of the width and in full. Rows: plain, uniform noise,
two-pass, two-pass every fourth step, an l-infinity SAM step by hand, and double backward as one would write it by hand.
Prints the ratio of medians to the plain step with its spread and writes results/penalty-cost.json: once with glibc
told to keep freed memory, as `anybit train` does, and once as it comes (at a quarter of the width only, where a round
takes seconds), with the page faults of a step that make the difference. Peak memory is measured in a process of its own
per row.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from anybit.common.files import write_json
from anybit.common.provenance import origin
from anybit.models import build_model
from anybit.objectives.gradient import GradientPenalty
from anybit.objectives.noise import UniformNoise
from anybit.train.memory import keep_freed_memory

BATCH = 128
NETWORKS = [("vgg-like", 0.25), ("resnet18-cifar", 0.25), ("vgg-like", 1.0), ("resnet18-cifar", 1.0)]
LAMBDA = 1e-3


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    return lambda: F.cross_entropy(model(x), y).backward()


def two_pass(model: nn.Module, x: Tensor, y: Tensor, every: int = 1) -> Callable[[], None]:
    penalty = GradientPenalty(model, weight=LAMBDA, activation=LAMBDA, every=every)
    return lambda: penalty.backward(lambda: F.cross_entropy(model(x), y)) and None


def every_fourth(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Four steps, so that the mean over them is what is timed."""
    return two_pass(model, x, y, every=4)


def naive(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """The objective as the paper writes it: hooks collect activations, autograd.grad with create_graph."""
    activations: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
            module.register_forward_hook(lambda module, args, out: activations.append(out))
    weights = [p for p in model.parameters() if p.dim() > 1]

    def step() -> None:
        activations.clear()
        loss = F.cross_entropy(model(x), y)
        grads = torch.autograd.grad(loss, [*weights, *activations], create_graph=True)
        (loss + LAMBDA * sum(g.abs().sum() for g in grads)).backward()
        activations.clear()

    return step


def sam(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """l-infinity SAM: gradient, move every weight by λ along its sign, gradient there, move back."""
    weights = [p for p in model.parameters() if p.dim() > 1]

    def step() -> None:
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            kept = [p.clone() for p in weights]
            for p in weights:
                p.add_(p.grad.sign(), alpha=LAMBDA)
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, old in zip(weights, kept, strict=True):
                p.copy_(old)

    return step


def noise(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    penalty = UniformNoise(model)
    return lambda: penalty.backward(lambda: F.cross_entropy(model(x), y)) and None


STEPS = {
    "plain": plain,
    "uniform noise": noise,
    "two-pass": two_pass,
    "two-pass, every=4": every_fourth,
    "SAM by hand": sam,
    "double backward by hand": naive,
}


def make(name: str, width: float, row: str) -> tuple[nn.Module, Callable[[], None]]:
    torch.manual_seed(0)
    model = build_model(name, channels=3, classes=10, multiplier=width).train()
    x, y = torch.randn(BATCH, 3, 32, 32), torch.arange(BATCH) % 10
    return model, STEPS[row](model, x, y)


def peak_memory(name: str, width: float, row: str, *, returned: bool) -> float:
    """Megabytes that a process with this step needs beyond one that has only made the model and the data.

    `returned` makes glibc hand freed tensors back to the system at once, so that the peak is that of what is held at
    one time; by default it keeps them, and the peak includes the holes between them.
    """
    command = [sys.executable, __file__, "--memory", name, str(width), row]
    environment = {**os.environ, **({"MALLOC_MMAP_THRESHOLD_": "65536"} if returned else {})}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout)


def status(field: str) -> float:
    """A line of /proc/self/status in megabytes."""
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in text.splitlines() if line.startswith(field))


def measure_memory(name: str, width: float, row: str) -> None:
    model, step = make(name, width, row)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = status("VmRSS")
    for _ in range(2):
        model.zero_grad()
        step()
    print(status("VmHWM") - before)


@dataclass(frozen=True)
class Timed:
    """One step: how long it took, and how many pages the system had to hand out for it."""

    seconds: float
    faults: float


def interleaved(name: str, width: float, rounds: int) -> dict[str, list[Timed]]:
    """Every row's steps, one after the other, round after round."""
    made = {row: make(name, width, row) for row in STEPS}
    times: dict[str, list[Timed]] = {row: [] for row in STEPS}
    for index in range(rounds + 1):
        for row, (model, step) in made.items():
            repeats = 4 if row.endswith("every=4") else 1
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            begin = time.perf_counter()
            for _ in range(repeats):
                model.zero_grad()
                step()
            seconds = time.perf_counter() - begin
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
            if index:  # the first round warms up
                times[row].append(Timed(seconds / repeats, faults / repeats))
    return times


def timed(name: str, width: float, rounds: int, malloc: str) -> dict[str, list[Timed]]:
    """The same in a process of its own, since what malloc is told once holds for the whole process."""
    command = [sys.executable, __file__, "--time", name, str(width), str(rounds), malloc]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {row: [Timed(*step) for step in steps] for row, steps in json.loads(done.stdout).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", help="networks by name and width, such as vgg-like:0.25,resnet18-cifar:0.25")
    parser.add_argument("--malloc", choices=["both", "kept", "default"], default="both")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--time", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--memory", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--out", default="results/penalty-cost.json")
    options = parser.parse_args()
    if options.memory:
        measure_memory(options.memory[0], float(options.memory[1]), options.memory[2])
        return
    if options.time:
        name, width, rounds, malloc = options.time
        if malloc == "kept":
            keep_freed_memory()
        times = interleaved(name, float(width), int(rounds))
        print(json.dumps({row: [[step.seconds, step.faults] for step in steps] for row, steps in times.items()}))
        return
    console = Console()
    results: list[dict[str, object]] = []
    for name, width in NETWORKS:
        if options.only and f"{name}:{width}" not in options.only.split(","):
            continue
        small = width < 1  # a round in full takes more than a minute
        kinds = () if options.no_memory else (True, False) if small else (True,)
        rounds = options.rounds if small else max(3, options.rounds // 3)
        memory = {(row, kind): peak_memory(name, width, row, returned=kind) for row in STEPS for kind in kinds}
        mallocs = ["kept", "default"] if small else ["kept"]
        for malloc in mallocs if options.malloc == "both" else [options.malloc]:
            times = timed(name, width, rounds, malloc)
            rows = [summary(row, times, memory) for row in STEPS]
            console.print(table_of(f"{name}, width {width:g}, batch {BATCH}, malloc {malloc}", rows))
            results += [{"network": name, "width": width, "malloc": malloc, "rounds": rounds, **row} for row in rows]
        write_json(options.out, {**origin(), "threads": torch.get_num_threads(), "seed": 0, "rows": results})
    console.print(f"written to {options.out}")


def summary(
    row: str, times: dict[str, list[Timed]], memory: dict[tuple[str, bool], float]
) -> dict[str, str | float | None]:
    """One row against the plain one."""
    seconds = [step.seconds for step in times[row]]
    plain_seconds = [step.seconds for step in times["plain"]]
    ratios = [s / p for s, p in zip(seconds, plain_seconds, strict=True)]
    held, holes = (memory[row, k] / memory["plain", k] if (row, k) in memory else None for k in (True, False))
    return {
        "step": row,
        "ratio": statistics.median(seconds) / statistics.median(plain_seconds),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "median_seconds": statistics.median(seconds),
        "page_faults": statistics.median(step.faults for step in times[row]),
        "memory_ratio": held,
        "memory_ratio_default_malloc": holes,
    }


def table_of(title: str, rows: list[dict[str, str | float | None]]) -> Table:
    """The rows of one network for the terminal."""
    table = Table(title=f"{title}; plain step {1000 * rows[0]['median_seconds']:.0f} ms")
    for column in ("step", "times plain", "spread", "page faults", "memory held", "with malloc's holes"):
        table.add_column(column, justify="left" if column == "step" else "right")
    for row in rows:
        memory = (row["memory_ratio"], row["memory_ratio_default_malloc"])
        table.add_row(
            row["step"],
            f"{row['ratio']:.2f}",
            f"{row['ratio_low']:.2f}-{row['ratio_high']:.2f}",
            f"{row['page_faults']:.0f}",
            *("-" if m is None else f"{m:.2f}x" for m in memory),
        )
    return table


if __name__ == "__main__":
    main()
