"""How equal two decisions are: 1.0 if quantization changed nothing, 0.0 if nothing is left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def ctc(scores: Array) -> list[int]:
    """Return what a recognizer reads: the best class of every step, repetitions and blanks (class 0) left out."""
    best = scores.argmax(-1)
    return [int(now) for before, now in zip([0, *best[:-1]], best, strict=True) if now and now != before]


def same_text(a: Sequence[int], b: Sequence[int]) -> float:
    """One minus the edit distance over the length of the longer text."""
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, right in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (left != right))
    return 1 - row[-1] / max(len(a), len(b), 1)


def overlap(a: Array, b: Array) -> float:
    """Intersection over union of two masks."""
    if a.shape != b.shape:
        return 0.0
    union = np.logical_or(a, b).sum()
    return float(np.logical_and(a, b).sum() / union) if union else 1.0


def share_equal(a: Array, b: Array) -> float:
    """Share of the places where two arrays are equal."""
    return float(np.mean(a == b)) if a.shape == b.shape else 0.0


def within_tenth(a: Array, b: Array) -> float:
    """Share of the probabilities that differ by less than 0.1."""
    return float(np.mean(np.abs(a - b) < 0.1)) if a.shape == b.shape else 0.0


def same_side(a: Array, b: Array) -> float:
    """Share of the probabilities on the same side of one half."""
    return share_equal(a > 0.5, b > 0.5)


def cosine(a: Array, b: Array) -> float:
    """Cosine of the angle between two vectors."""
    length = float(np.linalg.norm(a) * np.linalg.norm(b))
    return max(0.0, float(a.ravel() @ b.ravel()) / length) if length and np.isfinite(length) else 0.0


def same_boxes(a: Array, b: Array) -> float:
    """F1 of finding the boxes of `a` in `b`; rows are x1, y1, x2, y2, class. A pair overlaps by a half or more."""
    if not len(a) and not len(b):
        return 1.0
    left, found = list(range(len(b))), 0
    for box in a:
        best = max(left, key=lambda i: _iou(box, b[i]), default=None)
        if best is not None and _iou(box, b[best]) >= 0.5:
            left.remove(best)
            found += 1
    return 2 * found / (len(a) + len(b))


def _iou(a: Array, b: Array) -> float:
    if a[4] != b[4]:
        return 0.0
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    inner = width * height
    return float(inner / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - inner))


def best_boxes(boxes: Array, scores: Array, *, threshold: float, most: int = 100) -> Array:
    """Return the boxes over a threshold that no better one of their class covers; rows as in `same_boxes`."""
    classes = scores.argmax(-1)
    best = scores.max(-1)
    kept: list[Array] = []
    for i in np.argsort(-best, kind="stable"):
        if best[i] <= threshold or len(kept) == most:
            break
        row = np.append(boxes[i], classes[i])
        if all(_iou(row, other) < 0.5 for other in kept):
            kept.append(row)
    return np.array(kept).reshape(-1, 5)
