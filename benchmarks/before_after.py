"""Whether a change made anybit slower or hungrier: two source trees, one run, each measure in turns.

    git worktree add /tmp/before COMMIT
    python benchmarks/before_after.py --before /tmp/before

A residual network of 11 million weights (simulation, file, session) and a small one (penalty), with random weights and
the settings of the paper, which every version has. Each tree runs in a process of its own; each round asks both for
the same thing, the order changing from round to round. Above 1 the tree you stand in is slower. Writes
results/before-after.json.
"""

from __future__ import annotations

import argparse
import copy
import gc
import inspect
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Action = Callable[[], float]
"""Returns what it measured: seconds, or bytes."""

RANGE = (-3.0, 3.0)


def residual(multiplier: float) -> Any:
    """Return a residual network for images of 32x32, its batch norm acquainted with noise."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, inside: int, outside: int, stride: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(),
                nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside),
            )  # fmt: skip
            same = stride == 1 and inside == outside
            short = [nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)]
            self.short = nn.Sequential(*([] if same else short))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.body(x) + self.short(x)).relu()

    torch.manual_seed(0)
    sizes = [int(multiplier * size) for size in (64, 64, 128, 256, 512)]
    layers: list[nn.Module] = [nn.Conv2d(3, sizes[0], 3, 1, 1, bias=False), nn.BatchNorm2d(sizes[0]), nn.ReLU()]
    for inside, outside in itertools.pairwise(sizes):
        layers += [Block(inside, outside, 1 if inside == outside else 2), Block(outside, outside, 1)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sizes[-1], 10)).train()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(16, 3, 32, 32).clamp(*RANGE))
    return model.eval()


def timed(action: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def rise(action: Callable[[], object]) -> float:
    """Return by how many bytes the memory of this process rose at most in one call."""

    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))

    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    before = status("VmRSS")
    action()
    return status("VmHWM") - before


def measures(folder: Path) -> dict[str, Action]:
    """Return what this tree is asked for, each ready to run."""
    import torch

    import anybit

    paper = {"preset": "paper"} if "preset" in inspect.signature(anybit.prepare).parameters else {}
    model, x = residual(1.0), torch.randn(32, 3, 32, 32).clamp(*RANGE)
    fresh = {
        way: anybit.prepare(model, x[:2], input_range=RANGE, per_channel=way == "per channel", **paper)
        for way in ("per tensor", "per channel")
    }
    net = copy.deepcopy(fresh["per tensor"])
    anybit.save(net, folder / "m.onnx")
    session, image = anybit.load(folder / "m.onnx"), x[:1].numpy()
    small = residual(0.125).train()
    labels = torch.arange(64) % 10
    images = torch.randn(64, 3, 32, 32)
    penalty = anybit.GradientPenalty(small, weight=1e-3, activation=1e-3)

    def forward(way: str, bits: int) -> Action:
        own = copy.deepcopy(fresh[way])
        own.set_bits(weights=bits, activations=bits)
        return lambda: timed(lambda: own(x))

    def new_width(way: str) -> Action:
        def action() -> float:
            own = copy.deepcopy(fresh[way])
            gc.collect()  # else the networks of earlier rounds keep their memory, and each round asks for more
            return timed(lambda: own.set_bits(weights=5, activations=8))

        return action

    def back() -> float:
        for bits in (4, 8):
            net.set_bits(weights=bits, activations=8)
        return timed(lambda: net.set_bits(weights=4, activations=8))

    def switch() -> float:
        other = anybit.load(folder / "m.onnx")
        return timed(lambda: other.set_bits(weights=4, activations=8))

    def run(bits: int) -> Action:
        def action() -> float:
            session.set_bits(weights=bits, activations=bits)
            session.run(image)
            return timed(lambda: session.run(image))

        return action

    def loss() -> Any:
        return torch.nn.functional.cross_entropy(small(images), labels)

    def penalized() -> float:
        small.zero_grad()
        return timed(lambda: penalty.backward(loss))

    def plain() -> float:
        small.zero_grad()
        return timed(lambda: loss().backward())

    return {
        "forward, floating point": forward("per tensor", 32),
        "forward, W8A8": forward("per tensor", 8),
        "forward, W4A4": forward("per tensor", 4),
        "forward, W4A4, per channel": forward("per channel", 4),
        "set_bits, new width": new_width("per tensor"),
        "set_bits, new width, per channel": new_width("per channel"),
        "set_bits, width used before": back,
        "session.set_bits, new width": switch,
        "session.run, floating point": run(32),
        "session.run, W8A8": run(8),
        "plain step": plain,
        "penalized step": penalized,
        "save, seconds": lambda: timed(lambda: anybit.save(fresh["per tensor"], folder / "again.onnx")),
        "save, memory": lambda: rise(lambda: anybit.save(fresh["per tensor"], folder / "again.onnx")),
    }


def work() -> None:
    """Answer each line of the input, the name of a measure, with a number."""
    import torch

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        ready = measures(Path(folder))
        print(json.dumps(list(ready)), flush=True)
        for line in sys.stdin:
            with torch.set_grad_enabled(line.strip().endswith("step")):
                print(json.dumps(ready[line.strip()]()), flush=True)


class Tree:
    """A source tree that measures in a process of its own."""

    def __init__(self, root: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(root / "src")}
        command = [sys.executable, __file__, "--work"]
        self.process = subprocess.Popen(
            command, env=environment, cwd=root, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.names: list[str] = self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("one of the trees stopped; its message stands above")
        return json.loads(line)

    def ask(self, name: str) -> float:
        """Return what it measured for this name."""
        assert self.process.stdin is not None
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()
        return float(self._answer())


def compare(before: Tree, after: Tree, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each measure: the ratio of medians, the middle half of the rounds' ratios, both medians."""
    rows = []
    for name in after.names:
        found: dict[int, list[float]] = {0: [], 1: []}
        for number in range(rounds + 1):
            for tree in (0, 1) if number % 2 else (1, 0):
                value = (before, after)[tree].ask(name)
                if number:  # the first round warms up
                    found[tree].append(value)
        medians = [statistics.median(found[tree]) for tree in (0, 1)]
        quarters = statistics.quantiles((b / a for a, b in zip(found[0], found[1], strict=True)), n=4)
        rows.append({
            "what": name, "ratio": medians[1] / medians[0], "low": quarters[0], "high": quarters[2],
            "before": medians[0], "after": medians[1], "rounds": rounds,
        })  # fmt: skip
        print(f"{name:36} {rows[-1]['ratio']:6.2f}   ({quarters[0]:.2f} to {quarters[2]:.2f})", flush=True)
    return rows


def main() -> None:
    """Compare two trees and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a source tree of an earlier commit")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("results/before-after.json"))
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work()
        return
    if args.before is None or not (args.before / "src/anybit").is_dir():
        raise SystemExit("--before wants the folder of an earlier tree: git worktree add /tmp/before COMMIT")
    from anybit.common.files import write_json
    from anybit.common.provenance import origin

    here = Path(__file__).resolve().parents[1]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=args.before, capture_output=True, text=True, check=True)
    print("after / before, ratio of medians (middle half of the rounds); above 1: slower than before")
    rows = compare(Tree(args.before), Tree(here), args.rounds)
    load = os.getloadavg()[0]
    write_json(args.out, {"before": commit.stdout[:12], "rows": rows, "load_at_end": load, "origin": origin()})


if __name__ == "__main__":
    main()
