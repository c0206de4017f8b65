"""Where a penalized step spends what an l-infinity SAM step does not: the operators whose time differs most.

    python benchmarks/penalty_profile.py resnet18-cifar 0.25

Both are two forward and two backward passes, so the difference is the price of frozen kinks and shifted activations.
"""

from __future__ import annotations

import argparse

from penalty import make
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from anybit.train.memory import keep_freed_memory

ROWS = ("two-pass", "SAM by hand")


def times(name: str, width: float, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds per step that each row spends in each operator itself, the rows in turns."""
    made = {row: make(name, width, row) for row in ROWS}
    for _, step in made.values():
        step()
    total: dict[str, dict[str, float]] = {row: {} for row in ROWS}
    for _ in range(rounds):
        for row, (model, step) in made.items():
            model.zero_grad()
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                step()
            for event in seen.key_averages():
                total[row][event.key] = total[row].get(event.key, 0.0) + event.self_cpu_time_total / 1000 / rounds
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("network")
    parser.add_argument("width", type=float)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    keep_freed_memory()
    found = times(options.network, options.width, options.rounds)
    first, second = (found[row] for row in ROWS)
    table = Table(title=f"{options.network}, width {options.width:g}: milliseconds per step in each operator itself")
    for head in ("operator", *ROWS, "difference"):
        table.add_column(head, justify="left" if head == "operator" else "right")
    difference = {key: first.get(key, 0.0) - second.get(key, 0.0) for key in first | second}
    for key in sorted(difference, key=lambda k: -abs(difference[k]))[:15]:
        table.add_row(key, f"{first.get(key, 0):.1f}", f"{second.get(key, 0):.1f}", f"{difference[key]:+.1f}")
    table.add_row(
        "all", f"{sum(first.values()):.0f}", f"{sum(second.values()):.0f}", f"{sum(difference.values()):+.0f}"
    )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
