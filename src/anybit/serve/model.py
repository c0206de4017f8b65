"""The network behind the page: a prediction at a width, with what it takes there."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from anybit.artifact.bench import footprint, input_shapes
from anybit.artifact.pictures import pillow
from anybit.artifact.session import Session
from anybit.errors import DataError
from anybit.policy import measure
from anybit.serve.upload import read_upload
from anybit.spec import Bits

TOP = 5
FEWEST_RUNS, MOST_RUNS, TIMING = 3, 15, 0.25
"""How often a run is timed: as often as fits in `TIMING` seconds, within these limits."""

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Guess:
    """A class and how sure the network is of it."""

    index: int
    label: str
    confidence: float


@dataclass(frozen=True)
class Prediction:
    """What the network says about one picture at one pair of widths; `seconds` is the median of `runs`."""

    bits: Bits
    guesses: tuple[Guess, ...]
    seconds: float
    runs: int
    seen: bytes
    """The picture in the pixels that the network gets, as a PNG."""


@dataclass(frozen=True)
class Footprint:
    """What a pair of widths takes: bytes of the exported file, and bytes in memory."""

    file_bytes: int
    resident_bytes: int


class LiveModel:
    """A session that many requests share; each one is served at its own width.

    Switching, running and timing happen under one lock: no request sees the width of another, and no run is timed
    while another one takes the processor.
    """

    def __init__(
        self,
        session: Session,
        *,
        name: Callable[[int], str] = str,
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
    ) -> None:
        pillow()  # what is missing is told before there is a page
        self.session, self.name = session, name
        self.mean, self.std = mean, std
        self.input, self.shape = _picture_input(session)
        if not {len(mean), len(std)} <= {1, self.shape[0]}:
            raise DataError(f"{self.path}: mean and std must be 1 or {self.shape[0]} numbers, one per channel")
        self._running, self._measuring = threading.Lock(), threading.Lock()
        self._footprints: dict[Bits, Footprint] = {}
        self._blank: npt.NDArray[np.float32] = np.zeros((1, *self.shape), np.float32)
        self.classes = len(self._scores(self._blank)[0])

    @property
    def path(self) -> str:
        """The master's path, for messages."""
        return str(self.session.master.path)

    def predict(self, data: bytes, bits: Bits) -> Prediction:
        """Return what the network says about a picture at these widths, and how long a run takes now."""
        x = read_upload(data, self.shape, mean=self.mean, std=self.std)  # others may run while this decodes
        with self._running:
            self.session.set_bits(weights=bits.weights, activations=bits.activations)
            scores, used = self._scores(x)
            seconds, runs = self.timed(x)
        best = np.argsort(-scores, kind="stable")[:TOP]
        guesses = tuple(Guess(int(i), self.name(int(i)), float(scores[i])) for i in best)
        return Prediction(used, guesses, seconds, runs, self.seen(x))

    def seen(self, x: npt.NDArray[np.float32]) -> bytes:
        """Return a batch of one as a PNG of the network's own size, its normalization undone."""
        share = x[0].transpose(1, 2, 0) * np.asarray(self.std) + np.asarray(self.mean)
        pixels = np.rint(255 * share.clip(0, 1)).astype(np.uint8)
        file = io.BytesIO()
        pillow().fromarray(pixels if len(x[0]) == 3 else pixels[..., 0]).save(file, "PNG")
        return file.getvalue()

    def timed(self, x: npt.NDArray[np.float32]) -> tuple[float, int]:
        """Return the median time of a run in seconds, and over how many runs."""
        one = measure(lambda: self.session.run(x), repeats=1)
        runs = max(FEWEST_RUNS, min(MOST_RUNS, int(TIMING / max(one, 1e-6))))
        return measure(lambda: self.session.run(x), repeats=runs), runs

    def _scores(self, x: npt.NDArray[np.float32]) -> tuple[Numbers, Bits]:
        """Return the probability of each class, and the widths it was computed at."""
        found, used = self.session.run_with_bits(x)
        outputs = next(iter(found.values())) if isinstance(found, dict) else found
        if outputs.ndim != 2 or len(outputs) != 1 or not outputs.size:
            raise DataError(f"{self.path}: the page needs an output of shape N x classes, got {list(outputs.shape)}")
        row = np.asarray(outputs[0], np.float64)
        if not np.isfinite(row).all():
            raise DataError(f"{self.path}: the output at {used} is not finite; try a wider width")
        return (row if self._says_probabilities() else softmax(row)), used

    def _says_probabilities(self) -> bool:
        """Tell whether the network ends in a softmax of its own."""
        graph = self.session.master.graph.graph
        return any(node.op_type == "Softmax" and self.session.outputs[0] in node.output for node in graph.node)

    def footprint(self, bits: Bits) -> Footprint:
        """Return what these widths take, measured once, in a process of its own."""
        with self._measuring:
            if bits not in self._footprints:
                self._footprints[bits] = Footprint(
                    *footprint(self.session.master.path, bits, {self.input: self._blank})
                )
            return self._footprints[bits]


def softmax(x: Numbers) -> Numbers:
    """Return probabilities in proportion to exp(x).

    >>> softmax(np.array([1000.0, 1000.0])).tolist()
    [0.5, 0.5]
    """
    parts = np.exp(x - x.max())
    return np.asarray(parts / parts.sum(), np.float64)


def _picture_input(session: Session) -> tuple[str, tuple[int, int, int]]:
    """Return name and shape of the one input, which must be a picture."""
    shapes = input_shapes(session)
    where = session.master.path
    if len(shapes) != 1:
        raise DataError(f"{where}: the network takes {len(shapes)} inputs; the page shows networks with one")
    ((name, shape),) = shapes.items()
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise DataError(
            f"{where}: the network takes inputs of shape {list(shape)}, which no picture has; use anybit run"
        )
    return name, (shape[0], shape[1], shape[2])
