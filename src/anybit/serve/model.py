"""The network behind the page: what it says at a width, with what it takes there."""

from __future__ import annotations

import base64
import io
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from anybit.artifact.answers import answers, outputs_of, scores_of
from anybit.artifact.bench import footprint
from anybit.artifact.feeding import Preprocessing
from anybit.artifact.inputs import Feed
from anybit.artifact.pictures import pillow
from anybit.artifact.session import Session
from anybit.common.text import printable
from anybit.errors import DataError
from anybit.policy import measure
from anybit.serve.upload import read_upload
from anybit.spec import Bits

TOP = 5
FEWEST_RUNS, MOST_RUNS, TIMING = 3, 15, 0.25
"""How often a run is timed: as often as fits in `TIMING` seconds, within these limits."""

Numbers = npt.NDArray[np.float64]


class LiveModel:
    """A session that many requests share; each one is served at its own width.

    Switching, running and timing happen under one lock: no request sees the width of another, and no run is timed
    while another one takes the processor.
    """

    def __init__(self, session: Session) -> None:
        pillow()  # what is missing is told before there is a page
        self.session, self.takes = session, session.takes
        self.how = _of_pictures(session)
        self._running, self._measuring = threading.Lock(), threading.Lock()
        self._footprints: dict[Bits, tuple[int, int]] = {}
        self._example = session.example()
        outputs, _ = outputs_of(session, self._example, finite=False)
        self.labels = session.feeding
        told = (answer.name for answer in answers(outputs, len(self.labels.labels)) if answer.best is not None)
        self.classes = max((outputs[name].shape[-1] for name in told), default=0)

    @property
    def fed_with(self) -> str:
        """What the network takes, in words."""
        if self.how is None:
            return "; ".join(map(str, self.takes)) or "nothing"
        height, width = (side or "any" for side in self.how.size)
        return f"{height} x {width} pixels, {'grey' if self.how.channels == 'grey' else 'colour'}"

    def predict(self, data: bytes, bits: Bits) -> dict[str, Any]:
        """Return what the network says about an upload at these widths, and how long a run takes now: the median.

        `guesses` are the most likely classes, where an output is one row of scores; `seen` is a picture in the pixels
        that the network gets, as a PNG, and `size` its height and width.
        """
        feed = read_upload(data, self.takes, self.how)  # others may run while this decodes
        with self._running:
            self.session.set_bits(weights=bits.weights, activations=bits.activations)
            outputs, used = outputs_of(self.session, feed)
            seconds, runs = self.timed(feed)
        found = answers(outputs, len(self.labels.labels))
        rows = [outputs[answer.name] for answer in found if answer.best is not None]
        said = {
            **pair(used),
            "guesses": self._guesses(rows[0].ravel()) if rows else [],
            "milliseconds": 1000 * seconds,
            "runs": runs,
            "outputs": [printable(answer, 200) for answer in found],
            "seen": None,
            "size": None,
        }
        if self.how is not None:
            png, said["size"] = self.seen(next(iter(feed.values())))
            said["seen"] = base64.b64encode(png).decode()
        return said

    def _guesses(self, scores: npt.NDArray[np.float32]) -> list[dict[str, Any]]:
        row: Numbers = np.asarray(scores, np.float64)
        shares = row if scores_of({"": row}) and row.min() >= 0 else softmax(row)
        best = np.argsort(-shares, kind="stable")[:TOP]
        return [{"class": i, "label": self.labels.label(i), "confidence": float(shares[i])} for i in best.tolist()]

    def seen(self, x: npt.NDArray[np.float32]) -> tuple[bytes, tuple[int, int]]:
        """Return a batch of one as a PNG of the network's own size, its normalization undone."""
        assert self.how is not None
        pixels = self.how.pixels(x[0])
        file = io.BytesIO()
        pillow().fromarray(pixels if pixels.shape[-1] == 3 else pixels[..., 0]).save(file, "PNG")
        return file.getvalue(), (pixels.shape[0], pixels.shape[1])

    def timed(self, x: Feed) -> tuple[float, int]:
        """Return the median time of a run in seconds, and over how many runs."""
        one = measure(lambda: self.session.run(x), repeats=1)
        runs = max(FEWEST_RUNS, min(MOST_RUNS, int(TIMING / max(one, 1e-6))))
        return measure(lambda: self.session.run(x), repeats=runs), runs

    def footprint(self, bits: Bits) -> dict[str, Any]:
        """Return the bytes that these widths take on disk and in memory, measured once, in a process of its own."""
        with self._measuring:
            if bits not in self._footprints:
                self._footprints[bits] = footprint(self.session.master.path, bits, self._example)
            file, resident = self._footprints[bits]
        return {**pair(bits), "file_bytes": file, "resident_bytes": resident}


def pair(bits: Bits) -> dict[str, Any]:
    """Return widths as the page takes them."""
    return {"bits": str(bits), "weights": bits.weights, "activations": bits.activations}


def softmax(x: Numbers) -> Numbers:
    """Return probabilities in proportion to exp(x).

    >>> softmax(np.array([1000.0, 1000.0])).tolist()
    [0.5, 0.5]
    """
    parts = np.exp(x - x.max())
    return np.asarray(parts / parts.sum(), np.float64)


def _of_pictures(session: Session) -> Preprocessing | None:
    """Return how pictures are fed, if the network takes one picture and nothing else."""
    if len(session.takes) != 1 or session.takes[0].kind is None:
        return None
    try:
        return session.takes[0].settle(session.feeding)
    except DataError:
        return None
