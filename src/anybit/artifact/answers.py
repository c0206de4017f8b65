"""What a network says: classes where its outputs are scores of classes, else shape and range; and what a width changes.

Nobody has labels for a stranger's file, so the file in floating point is the truth that each width is compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from anybit.artifact.session import Session
from anybit.artifact.values import parts_of
from anybit.common.text import printable
from anybit.errors import DataError
from anybit.spec import Bits

Array = npt.NDArray[Any]

MISSING = np.zeros((0, 0))
FEW, LONGEST = 8, 60
"""Of an output that is text, so many entries are shown, and so many characters of each."""


@dataclass(frozen=True)
class Answer:
    """One output for one input: its shape and range, and the best class where it holds the scores of classes.

    Of text there is no range but what it says, as far as a line has room.
    """

    name: str
    shape: tuple[int, ...]
    low: float
    high: float
    best: int | None = None
    texts: tuple[str, ...] | None = None

    def __str__(self) -> str:
        if self.texts is not None:
            said = ", ".join(f"{text!r}" for text in self.texts) + ", ..." * (math.prod(self.shape) > len(self.texts))
            return f"{self.name}: {' x '.join(map(str, self.shape)) or 'one text'}, {said or 'nothing'}"
        sizes = " x ".join(map(str, self.shape)) or "one number"
        return f"{self.name}: {sizes}, from {self.low:.4g} to {self.high:.4g}"


def outputs_of(session: Session, x: Mapping[str, Array], *, finite: bool = True) -> tuple[dict[str, Array], Bits]:
    """Run a network and return its outputs by name, and the widths that were used.

    Raises:
        DataError: An output holds no numbers and no text or, unless that is allowed, numbers that are not finite.
    """
    found, used = session.run_with_bits(dict(x))
    values = found if len(session.outputs) > 1 else {session.outputs[0]: found}
    outputs = {part: array for name, value in values.items() for part, array in parts_of(name, value).items()}
    for name, array in outputs.items():
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiubO":
            raise DataError(f"output {name!r} holds no numbers and no text, so nothing can be said about it")
        floats = array.size and array.dtype.kind == "f"
        if finite and floats and not (math.isfinite(array.min()) and math.isfinite(array.max())):
            raise DataError(f"at {used} the output {name!r} is not finite; try a wider width or another input")
    return outputs, used


def scores_of(outputs: Mapping[str, Array], labels: int = 0) -> set[str]:
    """Return the outputs that hold scores of classes along their last dimension.

    Those are probabilities, however a file computes them (or their logarithms), and two-dimensional outputs with as
    many columns as there are labels.

    >>> found = scores_of({"a": np.array([[0.25, 0.75]]), "b": np.array([[0.5, 0.75]]), "c": np.ones((1, 3))}, labels=3)
    >>> sorted(found)
    ['a', 'c']
    """
    return {
        name
        for name, array in outputs.items()
        if array.dtype.kind == "f"
        and array.size > 0
        and array.shape[-1:] > (1,)
        and (
            (array.ndim == 2 and array.shape[-1] == labels)
            or _are_shares(array)
            or _are_shares(np.exp(np.minimum(array, 1)))
        )
    }


def _are_shares(array: Array) -> bool:
    """Tell whether numbers, or what they are logarithms of, are parts of one whole along the last dimension."""
    shares = array if float(array.min()) >= 0 else np.exp(np.minimum(array, 1))
    return float(np.abs(shares.sum(-1, dtype=np.float64) - 1).max()) < 1e-3


def answers(outputs: Mapping[str, Array], labels: int = 0) -> list[Answer]:
    """Describe the outputs of one input; a best class is only told of what is one row of scores.

    Without labels it is told only if no other output holds numbers that are no scores: what a decoder looks at most
    is no class.

    >>> both = {"letters": np.array([[-3.0, 2.0, 9.0]]), "looked_at": np.array([[0.25, 0.75]])}
    >>> [answer.best for answer in answers(both)], [answer.best for answer in answers(both, labels=3)]
    ([None, None], [2, None])
    """
    scores, found = scores_of(outputs, labels), []
    named = {name for name in scores if outputs[name].shape[-1] == labels}
    mixed = any(array.dtype.kind == "f" and name not in scores for name, array in outputs.items())
    for name, array in outputs.items():
        if array.dtype.kind == "O":
            texts = tuple(printable(text, LONGEST) for text in islice(array.flat, FEW))
            found.append(Answer(name, array.shape, math.nan, math.nan, texts=texts))
            continue
        told = name in named if named else not mixed
        best = int(array.argmax()) if told and name in scores and array.size == array.shape[-1] else None
        low, high = (float(array.min()), float(array.max())) if array.size else (math.nan, math.nan)
        found.append(Answer(name, array.shape, low, high, best))
    return found


@dataclass(frozen=True)
class Loss:
    """How far one output at one pair of widths is from floating point, over `n` inputs.

    `same` is the part of decisions that are the same: the largest of scores, whole numbers, or texts. `error` is the
    length of the difference over that of the output, as vectors. Each is None where it makes no sense.
    """

    output: str
    n: int
    same: float | None
    error: float | None


def losses(
    session: Session,
    widths: Iterable[Bits],
    feeds: Sequence[Mapping[str, Array]],
    *,
    on_step: Callable[[], None] = lambda: None,
) -> dict[Bits, list[Loss]]:
    """Compare each pair of widths with floating point on the same inputs, output by output."""
    truth: list[dict[str, Array]] = []
    found: dict[Bits, list[Loss]] = {}
    for bits in dict.fromkeys([Bits(), *widths]):
        session.set_bits(weights=bits.weights, activations=bits.activations)
        outputs = []
        for feed in feeds:
            outputs.append(outputs_of(session, feed)[0])
            on_step()
        truth = truth or outputs
        scores = scores_of(truth[0], len(session.feeding.labels))
        found[bits] = []
        for name in dict.fromkeys(name for told in truth for name in told):  # lists may have other lengths elsewhere
            pairs = [(t[name], o.get(name, MISSING)) for t, o in zip(truth, outputs, strict=True) if name in t]
            found[bits].append(_loss(name, [a for a, _ in pairs], [b for _, b in pairs], name in scores))
    return found


def _loss(name: str, before: Sequence[Array], after: Sequence[Array], scores: bool) -> Loss:
    """Return the loss of one output; an answer of another shape has nothing right."""
    equal = decisions = 0
    difference = length = 0.0
    rows = scores or all(array.ndim == 2 and array.shape[-1] > 1 for array in before)
    for a, b in zip(before, after, strict=True):
        fits = a.shape == b.shape
        if a.dtype.kind != "f":
            decisions += a.size
            equal += int((a == b).sum()) if fits else 0
            continue
        x, y = a.astype(np.float64), b.astype(np.float64) if fits else np.zeros(a.shape)
        length += float((x * x).sum())
        difference += float(((x - y) ** 2).sum())
        if rows and a.size:
            decisions += a[..., 0].size
            equal += int((a.argmax(-1) == b.argmax(-1)).sum()) if fits else 0
    error = None if not length else math.sqrt(difference / length)
    return Loss(name, len(before), equal / decisions if decisions else None, error)


def worst(found: Sequence[Loss]) -> tuple[float | None, float | None]:
    """Return the least part of the same decisions and the largest error over all outputs.

    >>> worst([Loss("a", 9, 0.5, 0.1), Loss("b", 9, None, 0.2)])
    (0.5, 0.2)
    """
    same = [loss.same for loss in found if loss.same is not None]
    error = [loss.error for loss in found if loss.error is not None]
    return min(same, default=None), max(error, default=None)
