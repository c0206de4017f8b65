"""How good outputs are, as one number over all batches: accuracy where there are classes, or what else is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from anybit.common.text import did_you_mean
from anybit.errors import DataError, SpecError

Function = Callable[[Any, Any], "float | tuple[float, float]"]
"""Of outputs and targets of one batch: their score, or a sum and the number of what was summed up."""


@dataclass(frozen=True)
class Metric:
    """A number over all batches.

    `add` gives what one batch contributes, for `done` to be told the sum. With `floats` outputs are compared with those
    of the same network in floating point, and nothing needs a label.
    """

    name: str
    add: Callable[[Any, Any], Tensor]
    done: Callable[[Tensor], float] = lambda sums: float(sums[0] / sums[1])
    floats: bool = False


def plain(outputs: Any) -> Any:
    """Return the one tensor of outputs that name it: `.logits`, `["logits"]`, `["out"]`, or the only one there is."""
    if isinstance(outputs, Mapping):
        found = [value for value in outputs.values() if isinstance(value, Tensor)]
        named = next((outputs[key] for key in ("logits", "out") if key in outputs), None)
        return named if named is not None else found[0] if len(found) == 1 else outputs
    if isinstance(outputs, tuple | list) and len(outputs) == 1:
        return outputs[0]
    return getattr(outputs, "logits", outputs)


def classes(labels: Tensor, outputs: Tensor) -> Tensor:
    """Return the class of every example: one-hot rows become numbers, and a column of numbers a list."""
    if labels.shape == outputs.shape and labels.dim() == 2:
        labels = labels.argmax(1)
    elif labels.dim() == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.is_floating_point():
        raise DataError("labels are floating-point numbers, and classes are whole ones; convert them with y.long()")
    if not len(labels):
        raise DataError("there is nothing to evaluate on: not one label")
    if (found := int(labels.max())) >= outputs.shape[1] or int(labels.min()) < 0:
        raise DataError(f"labels go from 0 to {outputs.shape[1] - 1} for this network; found {found}")
    return labels


def _sums(total: float | Tensor, count: float | Tensor) -> Tensor:
    return torch.tensor([float(total), float(count)], dtype=torch.float64)


def _accuracy(outputs: Any, targets: Any) -> Tensor:
    logits, labels = plain(outputs), targets
    if logits.dim() == labels.dim() + 1 == 3 and logits.shape[:2] == labels.shape:  # a class for every token
        logits, labels = logits[labels >= 0], labels[labels >= 0]
    labels = classes(labels, logits)
    return _sums((logits.argmax(1) == labels).sum(), len(labels))


def _top5(outputs: Any, targets: Any) -> Tensor:
    logits = plain(outputs)
    labels = classes(targets, logits)
    best = logits.topk(min(5, logits.shape[1]), 1).indices
    return _sums((best == labels[:, None]).any(1).sum(), len(labels))


def _pixels(outputs: Any, targets: Any) -> tuple[Tensor, Tensor, int]:
    """Return the class that each pixel was put in and its true one, without those whose label is no class."""
    logits = plain(outputs)
    known = (targets >= 0) & (targets < logits.shape[1])
    return logits.argmax(1)[known], targets[known], logits.shape[1]


def _pixel_accuracy(outputs: Any, targets: Any) -> Tensor:
    said, true, _ = _pixels(outputs, targets)
    return _sums((said == true).sum(), true.numel())


def _overlaps(outputs: Any, targets: Any) -> Tensor:
    said, true, n = _pixels(outputs, targets)
    counts = [torch.bincount(part, minlength=n) for part in (said[said == true], said, true)]
    both, ours, theirs = (count.double().cpu() for count in counts)
    return torch.stack([both, ours + theirs - both])


def _mean_overlap(sums: Tensor) -> float:
    there = sums[1] > 0
    return float((sums[0][there] / sums[1][there]).mean())


def _agreement(outputs: Any, reference: Any) -> Tensor:
    scores, wanted = plain(outputs), plain(reference)
    if not isinstance(scores, Tensor) or scores.dim() < 2:
        raise DataError(f"the network returns {_spoken(outputs)}, no scores of classes; take metric='relative error'")
    same = scores.argmax(1) == wanted.argmax(1)
    return _sums(same.sum(), same.numel())


def _relative(outputs: Any, reference: Any) -> Tensor:
    """Return what all floating-point tensors among outputs differ by, and what they come to."""
    pairs = zip(_floats(outputs), _floats(reference), strict=True)
    return torch.stack([_sums((a - b).square().sum(), b.square().sum()) for a, b in pairs]).sum(0)


def _floats(outputs: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(plain(outputs))
    return [leaf.double() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _difference(power: int) -> Callable[[Any, Any], Tensor]:
    def add(outputs: Any, targets: Any) -> Tensor:
        a, b = plain(outputs).double(), targets.double()
        if a.numel() != b.numel():
            raise DataError(f"outputs of shape {tuple(a.shape)} cannot be compared with {tuple(b.shape)} targets")
        return _sums((a.reshape(-1) - b.reshape(-1)).abs().pow(power).sum(), b.numel())

    return add


METRICS = {
    metric.name: metric
    for metric in (
        Metric("accuracy", _accuracy),
        Metric("top-5 accuracy", _top5),
        Metric("pixel accuracy", _pixel_accuracy),
        Metric("mean IoU", _overlaps, _mean_overlap),
        Metric("mean absolute error", _difference(1)),
        Metric("mean squared error", _difference(2)),
        Metric("agreement", _agreement, floats=True),
        Metric("relative error", _relative, lambda sums: float((sums[0] / sums[1]).sqrt()), floats=True),
    )
}
"""What can be asked for by name; the last two compare with the network in floating point."""


def metric_of(metric: str | Metric | Function) -> Metric:
    """Return a metric by its name, or one made of a function of outputs and targets.

    >>> metric_of("Mean-IoU").name
    'mean IoU'
    """
    if isinstance(metric, Metric):
        return metric
    if isinstance(metric, str):
        simple = {name.lower(): name for name in METRICS}
        word = metric.lower().replace("-", " ").replace("_", " ").replace("top 5", "top-5")
        if word not in simple:
            hint = did_you_mean(word, METRICS)
            raise SpecError(f"no metric {metric[:60]!r}: use {', '.join(METRICS)}, or a function{hint}")
        return METRICS[simple[word]]
    if not callable(metric):
        raise SpecError(f"a metric is a name or a function of outputs and targets, got {type(metric).__name__}")
    return Metric(getattr(metric, "__name__", "score").replace("_", " ").strip("<>"), _own(metric))


def _own(function: Function) -> Callable[[Any, Any], Tensor]:
    def add(outputs: Any, targets: Any) -> Tensor:
        found = function(outputs, targets)
        try:
            if isinstance(found, tuple):
                total, count = found
                return _sums(total, count)
            leaf = plain(outputs)
            count = len(leaf) if isinstance(leaf, Tensor | list | tuple) else 1
            return _sums(float(found) * count, count)
        except (TypeError, ValueError, RuntimeError) as error:
            raise SpecError(f"a metric returns a number, or a sum and a count; got {found!r:.80}") from error

    return add


OWN = "take metric='relative error' (to floating point), or a function (outputs, targets) -> number or (sum, count)"


def usual(outputs: Any, targets: Any) -> Metric:
    """Return the metric that fits a batch when none was asked for, or say in one sentence what is needed."""
    logits = plain(outputs)
    if not isinstance(logits, Tensor):
        if targets is None and _floats(outputs):
            return METRICS["relative error"]
        raise DataError(f"the network returns {_spoken(outputs)}, as detectors do, which has no accuracy; {OWN}")
    several = logits.dim() >= 2 and logits.shape[1] > 1 and logits.is_floating_point()
    if targets is None:
        return METRICS["agreement" if several and logits.dim() in (2, 4) else "relative error"]
    if not isinstance(targets, Tensor):
        raise DataError(f"the targets are {_spoken(targets)}, for which there is no usual metric; {OWN}")
    whole = not targets.is_floating_point()
    ones = targets.shape == logits.shape and ((targets == 0) | (targets == 1)).all() and (targets.sum(1) == 1).all()
    if several and logits.dim() == 2 and (ones or (whole and targets.numel() == len(logits))):
        return METRICS["accuracy"]
    if several and whole and logits.dim() == 3 and targets.shape == logits.shape[:2]:
        return METRICS["accuracy"]
    if several and whole and logits.dim() > 2 and targets.shape == (logits.shape[0], *logits.shape[2:]):
        return METRICS["mean IoU"]
    hint = "convert labels with y.long() if they are classes, or " if several and targets.dim() == 1 else ""
    raise DataError(
        f"outputs of shape {tuple(logits.shape)} and {'whole' if whole else 'floating-point'} targets of shape "
        f"{tuple(targets.shape)} have no accuracy; {hint}take metric='mean absolute error', metric='relative error' "
        "(to floating point) or a function (outputs, targets) -> number"
    )


def _spoken(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} {type(value[0]).__name__ if value else 'thing'}s"
    return f"a {type(value).__name__}"
