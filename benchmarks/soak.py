"""The switching runtime under load: four clients, a switch every 100 ms over all widths, for five minutes.

    make soak

Every output must be that of one of the widths, bit for bit, and after a warm-up memory must stay where it is. Prints
what it saw as it goes and writes results/soak.json; ends with exit code 1 if an output was wrong or memory grew by more
than 5 %.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from anybit.artifact.session import Session, load
from anybit.common.files import write_json
from anybit.common.provenance import origin

CLIENTS, EVERY, INPUTS, GROWTH = 4, 0.1, 16, 0.05
WIDTHS = [(32, 32), *((w, a) for w in range(2, 9) for a in (2, 3, 4, 6, 8)), (32, 8), (8, 32), (12, 12), (16, 16)]
Array = np.ndarray[Any, Any]


@dataclass
class Seen:
    """What the clients and the switcher counted; each client has a place of its own in the lists."""

    runs: list[int] = field(default_factory=lambda: [0] * CLIENTS)
    wrong: list[int] = field(default_factory=lambda: [0] * CLIENTS)
    errors: list[str] = field(default_factory=list)
    switches: int = 0
    switch_seconds: list[float] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)


def master(folder: Path) -> Path:
    """A VGG-like network of an eighth of its width, random weights, ranges from batch norm."""
    import torch

    import anybit
    from anybit.models import build_model

    torch.manual_seed(0)
    model = build_model("vgg-like", channels=3, classes=10, multiplier=0.125).eval()
    net = anybit.prepare(model, torch.zeros(2, 3, 32, 32), input_range=(-3.0, 3.0), preset="paper")
    anybit.save(net, folder / "model.onnx")
    return folder / "model.onnx"


def expected(session: Session, inputs: list[Array]) -> list[set[bytes]]:
    """What each input gives at every width."""
    answers: list[set[bytes]] = [set() for _ in inputs]
    for weights, activations in WIDTHS:
        session.set_bits(weights=weights, activations=activations)
        for found, x in zip(answers, inputs, strict=True):
            found.add(session.run(x).tobytes())
    return answers


def client(session: Session, inputs: list[Array], answers: list[set[bytes]], seen: Seen, me: int, end: float) -> None:
    order = np.random.default_rng(me)
    while time.monotonic() < end:
        index = int(order.integers(len(inputs)))
        try:
            seen.wrong[me] += session.run(inputs[index]).tobytes() not in answers[index]
        except Exception as error:
            seen.errors.append(repr(error))
            return
        seen.runs[me] += 1


def switch(session: Session, seen: Seen, end: float) -> None:
    for weights, activations in itertools.cycle(WIDTHS):
        begin = time.monotonic()
        if begin >= end:
            return
        session.set_bits(weights=weights, activations=activations)
        seen.switches += 1
        seen.switch_seconds.append(time.monotonic() - begin)
        time.sleep(max(0.0, EVERY - (time.monotonic() - begin)))


def resident() -> float:
    """Megabytes that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def soak(path: Path, seconds: float, say: Any) -> Seen:
    session = load(path, threads=1)
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(1 + i % 4, 3, 32, 32)).astype(np.float32) for i in range(INPUTS)]
    answers = expected(session, inputs)
    seen, start = Seen(), time.monotonic()
    end = start + seconds
    threads = [threading.Thread(target=client, args=(session, inputs, answers, seen, i, end)) for i in range(CLIENTS)]
    threads.append(threading.Thread(target=switch, args=(session, seen, end)))
    for thread in threads:
        thread.start()
    while time.monotonic() < end:
        time.sleep(min(5.0, max(0.1, seconds / 20)))
        seen.memory.append((time.monotonic() - start, resident()))
        say(f"{seen.memory[-1][0]:5.0f} s: {sum(seen.runs)} runs, {seen.switches} switches, {resident():.0f} MB")
    for thread in threads:
        thread.join()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--out", type=Path, default=Path("results/soak.json"))
    options = parser.parse_args()
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        seen = soak(master(Path(folder)), options.seconds, console.print)
    warm = [mb for at, mb in seen.memory if at >= options.seconds / 5] or [mb for _, mb in seen.memory]
    third = max(1, len(warm) // 3)
    growth = statistics.median(warm[-third:]) / statistics.median(warm[:third]) - 1
    record = {
        **origin(), "seconds": options.seconds, "clients": CLIENTS, "widths": len(WIDTHS), "kept": 8,
        "runs": sum(seen.runs), "wrong": sum(seen.wrong), "errors": seen.errors, "switches": seen.switches,
        "switch_seconds_median": statistics.median(seen.switch_seconds), "switch_seconds_max": max(seen.switch_seconds),
        "memory_growth_after_warm_up": growth, "memory_mb": [[round(at), round(mb, 1)] for at, mb in seen.memory],
    }  # fmt: skip
    write_json(options.out, record)
    console.print(
        f"{record['runs']} runs, {record['wrong']} wrong, {len(seen.errors)} errors, {seen.switches} switches, memory "
        f"{100 * growth:+.1f} % from the first to the last third after warm-up; written to {options.out}"
    )
    sys.exit(bool(record["wrong"] or seen.errors or growth > GROWTH))


if __name__ == "__main__":
    main()
