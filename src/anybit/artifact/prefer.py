"""What is fastest here: the activations that stay in floating point where integer kernels do not pay on this machine.

Forms of a network at the same widths differ only in those; the weights come from the same codes in all of them. Each is
timed, in turns, and the times are kept beside the file, for this file, processor, ONNX Runtime and number of threads.
One form has every activation in floating point and runs as fast as the network without rounding.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from anybit.artifact.master import Master
from anybit.common.files import read_json, write_json
from anybit.common.provenance import cpu_name
from anybit.common.text import quoted
from anybit.errors import FileError, SpecError
from anybit.plan.numbers import Numbers
from anybit.spec import FLOAT

PREFERENCES = ("widths", "speed")

Times = dict[str, list[float]]
"""Seconds of each run of some forms, by their name."""

ASKED, WEIGHTS = "as asked", "weights only"
PARTS = {"later three quarters": 0.25, "later half": 0.5, "last quarter": 0.75}
"""Early layers see large images and few channels: rounding takes longer there, and multiplying is less of the work."""

ROUNDS, FEWEST, SECONDS = 50, 5, 3.0
"""How often each form is timed, how often at least, and after how long there is no further round."""

SURE = 0.75
"""In so many rounds a form has to beat the one that is as fast as floating point: chance findings cost speed later."""

LARGE = 2**28
"""Bytes of weights from which on only two forms are made: all of them are in memory while they are timed."""

VERSION = 2
"""Of what is kept; another one is measured again."""


def check_preference(prefer: str) -> str:
    """Return a preference if there is one of that name.

    >>> check_preference("size")
    Traceback (most recent call last):
    anybit.errors.SpecError: prefer must be one of widths, speed; got 'size'
    """
    if prefer not in PREFERENCES:
        raise SpecError(f"prefer must be one of {', '.join(PREFERENCES)}; got {quoted(prefer)}")
    return prefer


def forms(master: Master, numbers: Numbers) -> dict[str, Numbers]:
    """Return the forms of a network that differ from each other, what was asked for first."""
    names = [point.name for point in master.plan.activations]
    kept = {ASKED: names, **{part: names[int(at * len(names)) :] for part, at in PARTS.items()}}
    kept |= {WEIGHTS: [], "matrix products": _multiplied(master, names)}
    if sum(weight.nbytes for weight in master.weights.values()) > LARGE:
        kept = {form: kept[form] for form in (ASKED, WEIGHTS)}
    found: dict[str, Numbers] = {}
    for form, whole in kept.items():
        floating = set(names).difference(whole)
        widths = {name: FLOAT if name in floating else width for name, width in numbers.widths.items()}
        if not any(widths == other.widths for other in found.values()):
            found[form] = replace(numbers, widths=widths)
    return found


def _multiplied(master: Master, names: Iterable[str]) -> list[str]:
    """Return the activations that go straight into matrix products: these need no byte at their other end."""
    used = {name for node in master.model.graph.node if node.op_type in ("MatMul", "Gemm") for name in node.input}
    return [name for name in names if master.plan.activation(name).place in used]


def fastest(times: Mapping[str, list[float]]) -> str:
    """Return the form that takes least, by the median of its runs, of those that are surely faster than "weights only".

    >>> fastest({"as asked": [3.0, 3.1, 9.0], "later half": [2.0, 3.9, 2.1], "weights only": [4.0, 4.0, 4.0]})
    'later half'
    >>> fastest({"as asked": [3.9, 3.9, 4.1], "weights only": [4.0, 4.0, 4.0]})
    'weights only'
    """

    def sure(taken: list[float]) -> bool:
        won = [mine < safe for mine, safe in zip(taken, times.get(WEIGHTS, ()), strict=False)]
        return sum(won) >= SURE * len(won)

    known = {form: taken for form, taken in times.items() if form == WEIGHTS or sure(taken)}
    return min(known, key=lambda form: statistics.median(known[form]))


def interleaved(
    runs: Mapping[str, Callable[[], object]],
    *,
    rounds: int = ROUNDS,
    seconds: float = SECONDS,
    fewest: int = FEWEST,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Return the seconds of every run, in turns after one that warms up; five rounds at least, if so many are wanted.

    A run on one thread is best timed by `time.thread_time`, which does not count what other programs take. Each round
    has an order of its own: what runs after its like finds more of what it needs in the caches.
    """
    times: Times = {name: [] for name in runs}
    for run in runs.values():
        run()
    begin, orders = time.perf_counter(), random.Random(0)
    for i in range(rounds):
        if i >= fewest and time.perf_counter() - begin > seconds:
            break
        for name in orders.sample(list(runs), len(runs)):
            start = clock()
            runs[name]()
            times[name].append(clock() - start)
    return times


# What is kept


class Notes:
    """The times of a master's forms on this machine, in a file beside it, or in the user's cache if that cannot be."""

    def __init__(self, master: Master, threads: int | None) -> None:
        beside = master.path.with_name(f"{master.path.name}.speed.json")
        self.paths = beside, cache_folder() / f"{master.digest[:32]}.speed.json"
        self.digest = master.digest
        self.place = f"{cpu_name()}, ONNX Runtime {metadata.version('onnxruntime')}, threads {threads or 'all'}"

    def read(self, widths: Mapping[str, int], wanted: Iterable[str]) -> Times | None:
        """Return the times of these widths if they are known for all the forms that are wanted."""
        for path in self.paths:
            found = _part(_part(self._known(path), self.place), _key(widths))
            if set(found) == set(wanted) and all(_are_times(taken) for taken in found.values()):
                return found
        return None

    def write(self, widths: Mapping[str, int], times: Times) -> None:
        """Keep times; what cannot be written anywhere is measured again the next time."""
        for path in self.paths:
            known = self._known(path)
            known[self.place] = _part(known, self.place) | {_key(widths): times}
            with contextlib.suppress(FileError):
                write_json(path, {"version": VERSION, "digest": self.digest, "seconds": known})
                return

    def _known(self, path: Path) -> dict[str, Any]:
        """Return what a file says about this master: nothing if it is another one's, damaged or not there."""
        with contextlib.suppress(FileError):
            found = read_json(path, what="times of a master")
            if isinstance(found, dict) and (found.get("version"), found.get("digest")) == (VERSION, self.digest):
                return _part(found, "seconds")
        return {}


def cache_folder() -> Path:
    """Return where this user's programs keep what they can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anybit"


def _key(widths: Mapping[str, int]) -> str:
    return hashlib.sha256(repr(list(itertools.chain(*widths.items()))).encode()).hexdigest()[:16]


def _part(found: Any, key: str) -> dict[str, Any]:
    part = found.get(key)
    return part if isinstance(part, dict) else {}


def _are_times(taken: Any) -> bool:
    return isinstance(taken, list) and bool(taken) and all(isinstance(t, float) and t > 0 for t in taken)
