"""What a width gains and what it costs: file size, memory, time per run, accuracy, distance to floating point."""

from __future__ import annotations

import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from anybit.artifact.answers import Loss, losses, worst
from anybit.artifact.export import export
from anybit.artifact.session import Session
from anybit.artifact.storage import size_on_disk
from anybit.artifact.texts import storable
from anybit.common.text import printable
from anybit.errors import DataError
from anybit.spec import Bits

Array = npt.NDArray[Any]

LONGEST = 30.0
"""How many seconds a batch may take that is timed beside single inputs."""
WORTH_A_BIT = 1.1
"""How many times as fast 7-bit weights must be to be proposed in place of 8-bit ones."""


@dataclass(frozen=True)
class Gain:
    """One pair of widths: bytes of the file, bytes in memory, seconds at batch 1, inputs per second, accuracy.

    A network that takes one input at a time has a `batch` of 1. `losses` tells how far each output is from floating
    point, where inputs were given. The speed-ups are over floating point in the same run, at batch 1 and at the larger
    batch, each as the ratio of medians, the lowest and the highest ratio of a round; without floating point in the run
    there are none.
    """

    weights: int
    activations: int
    file_bytes: int
    resident_bytes: int
    latency: float
    throughput: float
    speedup: tuple[float, float, float] | None = None
    speedup_batch: tuple[float, float, float] | None = None
    batch: int = 32
    accuracy: float | None = None
    n: int | None = None
    losses: tuple[Loss, ...] = ()


def steps_of(pairs: Sequence[Bits], rounds: int, inputs: int = 0) -> int:
    """Return how often `bench` calls `on_step`: for the sizes, the warm-up, every round, the accuracy, every input.

    >>> steps_of([Bits(), Bits(8, 8)], rounds=15)
    36
    """
    return len(pairs) * (rounds + 3) + inputs * len({Bits(), *pairs}) * (inputs > 0)


def bench(
    session: Session,
    widths: Iterable[Bits],
    *,
    rounds: int = 15,
    batch: int = 32,
    data: tuple[Array, Array] | None = None,
    inputs: Sequence[Mapping[str, Array]] = (),
    on_step: Callable[[], None] = lambda: None,
) -> list[Gain]:
    """Measure each pair of widths; the times of all pairs are taken in turns, so that a busy moment hits them all.

    Latency is the median over rounds, throughput that of the batch. With `inputs` each width is compared with floating
    point on them, and the first one is what is timed; else one is made up.
    """
    pairs = list(dict.fromkeys(widths))
    one = dict(inputs[0]) if inputs else session.example()
    feeds = {1: one, **_batched(session, one, batch)}
    many = max(feeds)
    sizes = {}
    for bits in pairs:
        sizes[bits] = footprint(session.master.path, bits, one)
        on_step()
    taken = _timed(session, pairs, feeds, rounds, on_step)
    lost = losses(session, pairs, inputs, on_step=on_step) if inputs else {}
    gains = []
    for bits in pairs:
        accuracy = None if data is None else accuracy_at(session, bits, *data)
        gains.append(
            Gain(
                bits.weights,
                bits.activations,
                *sizes[bits],
                statistics.median(taken[bits, 1]),
                many / statistics.median(taken[bits, many]),
                speedup(taken.get((Bits(), 1)), taken[bits, 1]),
                speedup(taken.get((Bits(), many)), taken[bits, many]),
                many,
                accuracy,
                None if data is None else len(data[1]),
                tuple(lost.get(bits, ())),
            )
        )
        on_step()
    return gains


def _batched(session: Session, one: Mapping[str, Array], batch: int) -> dict[int, dict[str, Array]]:
    """Return a batch of the same input, if the network takes one and is not so slow that nobody would wait for it."""
    seconds = []
    for _ in range(2):  # the first run of a session may take longer
        begin = time.perf_counter()
        session.run(one)
        seconds.append(time.perf_counter() - begin)
    if min(seconds) * batch > LONGEST:
        return {}
    free = {value.name for value in session.takes if value.shape and not value.shape[0]}
    free = {name for name in free if isinstance(one[name], np.ndarray)}
    many = {name: np.concatenate([x] * batch) if name in free else x for name, x in one.items()}
    try:
        session.run(many)
    except DataError:
        return {}
    return {batch: many} if free and all(len(one[name]) == 1 for name in free) else {}


def _timed(
    session: Session,
    pairs: Sequence[Bits],
    feeds: Mapping[int, dict[str, Array]],
    rounds: int,
    on_step: Callable[[], None],
) -> dict[tuple[Bits, int], list[float]]:
    """Return the seconds of every round, by pair and batch, each in its own order; one before the first warms up."""
    taken: dict[tuple[Bits, int], list[float]] = {(bits, n): [] for bits in pairs for n in feeds}
    orders = random.Random(0)
    for i in range(rounds + 1):
        for bits in orders.sample(list(pairs), len(pairs)):
            session.set_bits(weights=bits.weights, activations=bits.activations)
            for n, feed in feeds.items():
                start = time.perf_counter()
                session.run(feed)
                if i:
                    taken[bits, n].append(time.perf_counter() - start)
            on_step()
    return taken


def speedup(before: Sequence[float] | None, after: Sequence[float]) -> tuple[float, float, float] | None:
    """Return how many times as fast: the ratio of medians, the lowest and the highest ratio of a round.

    >>> speedup([2.0, 4.0, 6.0], [1.0, 2.0, 2.0])
    (2.0, 2.0, 3.0)
    """
    if before is None:
        return None
    ratios = [b / a for b, a in zip(before, after, strict=True)]
    return statistics.median(before) / statistics.median(after), min(ratios), max(ratios)


def with_sevens(pairs: Iterable[Bits], saturates: bool) -> list[Bits]:
    """Return pairs of widths, each once, with 7-bit weights beside 8-bit ones where exact sums cost time.

    >>> [str(bits) for bits in with_sevens([Bits(), Bits(8, 8), Bits(4, 8)], saturates=True)]
    ['FP', 'W8A8', 'W7A8', 'W4A8']
    """
    found = [(bits, Bits(7, bits.activations)) if saturates and bits.weights == 8 else (bits,) for bits in pairs]
    return list(dict.fromkeys(itertools.chain(*found)))


SPEED = " With --prefer speed the other widths leave in floating point what does not get faster as bytes."


def verdict(gains: Sequence[Gain], *, prefer: str = "widths") -> str:
    """Return one sentence: which widths are fastest here, how much faster than floating point, and what that costs.

    A second one proposes 7-bit weights where they are faster than 8-bit ones by more than a bit is worth, or to
    prefer speed where floating point is fastest.
    """
    best = min(gains, key=lambda gain: gain.latency)
    name = str(Bits(best.weights, best.activations))
    text = f"{name} is fastest here: {1000 * best.latency:.2f} ms"
    if name == "FP":
        slower = len(gains) > 1 and prefer != "speed"
        return text + "." + (SPEED if slower else "") + _sevens(gains)
    if best.speedup is not None:
        text += ", {:.2f} times as fast as floating point ({:.2f} to {:.2f})".format(*best.speedup)
    same, error = worst(best.losses)
    if same is not None:
        text += f"; {100 * same:.1f}% of its decisions are those of floating point"
        _, error = worst([loss for loss in best.losses if loss.same is None])  # of outputs that decide nothing
    if error is not None:
        text += f"; its outputs are {100 * error:.1f}% away from those of floating point"
    elif same is None:
        text += "; what it costs is told with --input"
    return text + "." + _sevens(gains)


def _sevens(gains: Sequence[Gain]) -> str:
    by = {(gain.weights, gain.activations): gain.latency for gain in gains}
    for activations in dict.fromkeys(gain.activations for gain in gains):
        eight, seven = by.get((8, activations)), by.get((7, activations))
        if eight and seven and eight > WORTH_A_BIT * seven:
            return (
                f" Take 7 bits instead of 8 for the weights: {eight / seven:.2f} times as fast, since on this "
                "processor 8 bits need slower sums to be exact."
            )
    return ""


def accuracy_at(session: Session, bits: Bits, x: Array, y: Array, *, batch: int = 250) -> float:
    """Return the part of `x` that the network puts in class `y` at these widths."""
    session.set_bits(weights=bits.weights, activations=bits.activations)
    right = 0
    for start in range(0, len(y), batch):
        logits = session.run(x[start : start + batch])
        if isinstance(logits, dict) or logits.ndim != 2:
            raise DataError(f"{session.master.path}: accuracy needs one output of shape N x classes")
        right += int((logits.argmax(1) == y[start : start + batch]).sum())
    return right / len(y)


_PROBE = """
import json, sys, numpy as np
from pathlib import Path
from anybit.artifact.runtime import onnxruntime
from anybit.artifact.values import as_value
def resident():
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])
ort, arrays = onnxruntime(), np.load(sys.argv[2])
names, others = json.loads(Path(sys.argv[3]).read_text())
feed = {name: arrays[f"arr_{i}"] for i, name in enumerate(names)}
options = ort.SessionOptions()
options.intra_op_num_threads = 1
before = resident()
session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
session.run(None, feed | {v.name: as_value(others[v.name], v.type) for v in session.get_inputs() if v.name in others})
print(resident() - before)
"""


def footprint(master: Path, bits: Bits, feed: Mapping[str, Array]) -> tuple[int, int]:
    """Return the bytes of the exported file, and how much a process of its own grows by loading and running it."""
    with tempfile.TemporaryDirectory() as folder:
        out, inputs = Path(folder) / "model.onnx", Path(folder) / "inputs.npz"
        export(master, out, weights=bits.weights, activations=bits.activations)
        plain = {name: x for name, x in feed.items() if isinstance(x, np.ndarray)}
        np.savez(inputs, *map(storable, plain.values()))  # names of inputs are no names of files
        others = {name: x for name, x in feed.items() if name not in plain}
        told = inputs.with_suffix(".json")
        told.write_text(json.dumps([list(plain), others], default=np.ndarray.tolist))
        command = [sys.executable, "-c", _PROBE, str(out), str(inputs), str(told)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            reason = printable(done.stderr.strip()[-200:])
            raise DataError(f"{master}: the memory at {bits} cannot be measured ({reason})")
        return size_on_disk(out), int(done.stdout)
