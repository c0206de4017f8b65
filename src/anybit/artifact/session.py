"""Running a master: one file, any width, switched while it runs.

session = anybit.load("model.onnx")
session.set_bits(weights=4, activations=8)
logits = session.run(x)
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from anybit.artifact.coverage import cast_values, table_rows
from anybit.artifact.feeding import Preprocessing
from anybit.artifact.inputs import Input, inputs_of
from anybit.artifact.made_up import made_up_inputs, shapes_in
from anybit.artifact.master import Master, open_master
from anybit.artifact.prefer import ASKED, WEIGHTS, Notes, Times, check_preference, fastest, forms, interleaved
from anybit.artifact.quantized_graph import quantized_graph
from anybit.artifact.runtime import batch_advice, compile_model, memory_advice
from anybit.artifact.texts import TEXT, words_of
from anybit.artifact.values import OPTIONAL, TYPES, Kind, as_array, as_input, kinds_of
from anybit.common.text import printable
from anybit.errors import DataError, SpecError
from anybit.plan.numbers import Kept, Numbers
from anybit.spec import Bits, LayerWidths

Array = npt.NDArray[Any]
Inputs = npt.ArrayLike | Mapping[str, Any]


CODES_BYTES = 2**28
"""Codes that are remembered while a width is made: a bias looks at its weight's again."""

KEEP_BYTES = 2**30
"""How much memory the widths that stay compiled may take, by the size of their weights."""


class Compiled(NamedTuple):
    """A network at one width, ready to run, how many bytes its weights take, and which form of it this is."""

    bits: Bits
    key: tuple[Any, ...]
    engine: Any
    nbytes: int
    form: str = ASKED


def load(path: str | Path, *, threads: int | None = None, keep: int = 8, prefer: str = "widths") -> Session:
    """Open a master for running; it starts in floating point.

    Args:
        path: What `anybit.save` wrote.
        threads: How many threads a run may use; all cores by default.
        keep: How many widths stay compiled, so that going back to one of them costs nothing; fewer if they would take
            more than a gigabyte together.
        prefer: What `set_bits` does if it is not told: "widths" or "speed".
    """
    if threads is not None and threads < 1:
        raise SpecError(f"threads must be at least 1, got {threads}")
    if keep < 1:
        raise SpecError(f"keep must be at least 1, got {keep}")
    return Session(open_master(path), threads=threads, keep=keep, prefer=prefer)


class Session:
    """A master at one width at a time. `run` and `set_bits` may be called from any number of threads.

    A switch is one assignment at its very end: every run sees the old width or the new one, whole.

    Attributes:
        plan: What is quantized, over which range, and where the range came from.
        inputs: The names of the network's inputs.
        outputs: The names of its outputs.
    """

    def __init__(self, master: Master, *, threads: int | None = None, keep: int = 8, prefer: str = "widths") -> None:
        self.master, self.prefer = master, check_preference(prefer)
        self.plan, self.inputs, self.outputs = master.plan, master.inputs, master.outputs
        self._threads = threads
        self._forms: dict[tuple[int, ...], str] = {}
        self._compiling, self._measuring = threading.Lock(), threading.Lock()
        self._kept = Kept(KEEP_BYTES, most=keep)
        self._now = Compiled(Bits(), (0,), None, 0)  # nothing is compiled yet, and 0 is no width
        self._now = self._compiled(Bits(), None, "widths")
        self._wanted = set(self.inputs)
        self._takes = kinds_of(master.graph.graph)
        self._ready = {value.name: _Ready.of(value) for value in self._takes}
        self._left_out = {value.name: None for value in self._takes if value.type.startswith(OPTIONAL)}

    @property
    def bits(self) -> Bits:
        """The widths that the next run will use, apart from layers with widths of their own."""
        return self._now.bits

    @property
    def form(self) -> str:
        """Which form of the network runs: "as asked", or one with activations in floating point, "weights only"."""
        return self._now.form

    @property
    def takes(self) -> tuple[Input, ...]:
        """The network's inputs: name, type and shape of each."""
        return inputs_of(self.master.graph.graph, self.plan)

    @property
    def feeding(self) -> Preprocessing:
        """How pictures become inputs, and the names of the classes, as the master tells them."""
        return Preprocessing.of(self.master.header.about, where=str(self.master.path))

    def set_bits(
        self,
        pair: Bits | str | tuple[int, int] | None = None,
        /,
        *,
        weights: int | None = None,
        activations: int | None = None,
        layers: LayerWidths | None = None,
        prefer: str | None = None,
    ) -> None:
        """Run at these widths from now on; 32 means floating point.

        Args:
            pair: Both widths at once: "W4A8", (4, 8), or "FP".
            weights: The width of every weight.
            activations: The width of every activation.
            layers: Other widths for points whose name matches a pattern, as (weights, activations).
            prefer: With "speed" activations stay in floating point where that is faster on this machine; the first time
                this is measured, which takes seconds. With "widths" the widths are what was asked for.
        """
        how = self.prefer if prefer is None else check_preference(prefer)
        self._now = self._compiled(Bits.asked(pair, weights, activations), layers, how)

    def _compiled(self, bits: Bits, layers: LayerWidths | None, prefer: str) -> Compiled:
        # Codes are made anew for each width: an engine keeps what it needs of them.
        numbers = self.master.plan.at(bits, layers, tensors=self.master.tensors, kept=Kept(CODES_BYTES))
        form = ASKED
        if prefer == "speed":
            form, numbers = self._fastest(numbers)
        key, found = numbers.key, self._now
        if found.key != key:
            # One is compiled at a time; runs and switches to kept widths go on meanwhile.
            with contextlib.nullcontext() if key in self._kept else self._compiling:
                make = functools.partial(self._compile, bits, key, numbers)
                found = self._kept.get(key, make, lambda made: made.nbytes)
        return found._replace(bits=bits, form=form)

    def _fastest(self, numbers: Numbers) -> tuple[str, Numbers]:
        """Return the form of a network that is fastest here, measured now if nobody has before."""
        key, known = tuple(numbers.widths.values()), forms(self.master, numbers)
        if len(known) == 1:
            return ASKED, numbers
        if key not in self._forms:
            with self._measuring:  # one at a time; runs and other switches go on meanwhile
                notes = Notes(self.master, self._threads)
                times = notes.read(numbers.widths, known)
                if times is None and (times := self._times(known)):
                    notes.write(numbers.widths, times)
                self._forms[key] = fastest(times) if times else WEIGHTS
        return self._forms[key], known[self._forms[key]]

    def _times(self, known: Mapping[str, Numbers]) -> Times:
        """Return how long each form takes; nothing if no input can be made up."""
        try:
            feed = self.example()
        except DataError:
            return {}
        engines = {form: self._engine(numbers)[0] for form, numbers in known.items()}
        runs = {form: functools.partial(engine.run, None, feed) for form, engine in engines.items()}
        return interleaved(runs, clock=time.thread_time if self._threads == 1 else time.perf_counter)

    def _compile(self, bits: Bits, key: tuple[Any, ...], numbers: Numbers) -> Compiled:
        return Compiled(bits, key, *self._engine(numbers))

    def _engine(self, numbers: Numbers) -> tuple[Any, int]:
        model, exact = quantized_graph(self.master, numbers, packed=False)
        return compile_model(model, exact=exact, threads=self._threads, where=str(self.master.path)), model.nbytes

    def run(self, x: Inputs | None = None) -> Any:
        """Return what the network makes of `x`: an array, or a dict of them by name if there are several outputs.

        Args:
            x: A batch, as anything that numpy can make an array of; several inputs as a dict by name. A sequence is a
                list of arrays, a map a dict by name of the input. What is optional may be None or left out.
        """
        return self.run_with_bits(x)[0]

    def run_with_bits(self, x: Inputs | None = None) -> tuple[Any, Bits]:
        """Return what `run` returns, and the widths that it was computed at."""
        now = self._now  # one look: a switch from here on is for the next run
        try:
            results = now.engine.run(None, self._feed(x))
        except DataError:
            raise
        except Exception as error:  # ONNX Runtime has no common base for its exceptions
            advice = memory_advice(str(error)) or batch_advice(str(error), self._feed(x))
            raise DataError(
                f"{self.master.path}: this input cannot be run ({printable(error, 300)}){advice}"
            ) from error
        outputs = dict(zip(self.outputs, results, strict=True))
        return (results[0] if len(results) == 1 else outputs), now.bits

    def example(self) -> dict[str, Any]:
        """Return a made-up input that the network takes, of the shape that it was captured or calibrated with.

        Raises:
            DataError: None of the sizes that were tried works.
        """
        ranges = {a.name: a.ranges[0][1] for a in self.plan.activations if a.kind == "input" and a.ranges}
        seen = self.master.header.about.get("shapes")
        usual = {value.name: value.usual for value in self.takes} | (shapes_in(seen) if isinstance(seen, dict) else {})
        try:
            return made_up_inputs(
                self._now.engine,
                self._takes,
                ids=table_rows(self.master.model),
                interval={name: (r.low, r.high) for name, r in ranges.items()},
                usual=usual,
                whole=cast_values(self.master.model),
                words=words_of(self.master.graph.graph),
                where=str(self.master.path),
            )[0]
        except DataError as error:
            raise DataError(str(error).replace("pass calibration inputs", "name some with --input")) from error

    def _feed(self, x: Inputs | None) -> dict[str, Any]:
        given = x if isinstance(x, Mapping) else {} if x is None else {next(iter(self.inputs), "an input"): x}
        if given.keys() == self._wanted and all(map(_is_ready, given.values(), map(self._ready.get, given))):
            return dict(given)
        given = {**self._left_out, **given}
        if given.keys() != self._wanted:
            wanted, found = (", ".join(map(str, names)) or "nothing" for names in (self.inputs, given))
            raise DataError(f"{self.master.path}: the network takes {wanted}; got {found}")
        return {value.name: _as_input(given[value.name], value) for value in self._takes}


class _Ready(NamedTuple):
    """What an array has to be so that nothing needs to be done to it: its type, dimensions, and their fixed sizes."""

    dtype: np.dtype[Any]
    dims: int
    fixed: list[tuple[int, int]]

    @classmethod
    def of(cls, wanted: Kind) -> _Ready | None:
        """Return that of an input; nothing for optional ones, sequences, and text."""
        kind = np.dtype(TYPES.get(wanted.type, np.object_))
        fixed = [(place, size) for place, size in enumerate(wanted.shape) if isinstance(size, int)]
        return cls(kind, len(wanted.shape), fixed) if kind.kind in "fiub" else None


def _is_ready(x: Any, wanted: _Ready | None) -> bool:
    """Tell whether an array can be taken as it is: most can, and a small network takes 50 µs in all."""
    if wanted is None or type(x) is not np.ndarray or x.dtype is not wanted.dtype or x.ndim != wanted.dims:
        return False
    shape = x.shape
    for place, size in wanted.fixed:
        if shape[place] != size:
            return False
    return x.flags.c_contiguous


def _as_input(x: Any, wanted: Kind) -> Any:
    """Return a value of the type and shape that an input wants, or say what it wants."""
    shape = wanted.shape[1:] if "seq(" in wanted.type else wanted.shape
    return as_input(x, *wanted[:2], lambda entry, kind: _as_tensor(entry, Kind(wanted.name, kind, shape)))


def _fits(found: tuple[int, ...], wanted: list[int | str | None]) -> bool:
    return len(found) == len(wanted) and all(
        not isinstance(size, int) or size == own for size, own in zip(wanted, found, strict=True)
    )


def _as_tensor(x: npt.ArrayLike, wanted: Kind) -> Array:
    """Return an array of the type and shape that a tensor has."""
    try:
        kind = TYPES[wanted.type]
        array = as_array(x, TEXT) if wanted.type == TEXT else np.asarray(x)
        whole = np.issubdtype(kind, np.integer)
        if wanted.type != TEXT and (array.dtype.kind not in "fiub" or (whole and array.dtype.kind == "f")):
            raise TypeError
    except (TypeError, ValueError, KeyError) as error:
        if wanted.type == TEXT:
            raise DataError(f"input {wanted.name!r} takes text; got {printable(error, 60)}") from None
        found = getattr(x, "dtype", type(x).__name__)
        raise DataError(f"input {wanted.name!r} takes numbers of type {wanted.type}; got {found}") from None
    shape = wanted.shape
    if not shape and array.ndim:  # a file that does not say how many dimensions it wants
        return np.asarray(array, kind, order="C")
    if not _fits(array.shape, shape):
        spoken = " x ".join(str(size) if isinstance(size, int) else "N" for size in shape)
        raise DataError(f"input {wanted.name!r} has the shape {spoken}; got {list(array.shape)}")
    return np.asarray(array, kind, order="C")
