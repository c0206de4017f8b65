"""What a training step minimizes, a part of a batch at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from anybit.common.named import by_name, is_code
from anybit.errors import DataError, SpecError
from anybit.evaluate.batches import Batch
from anybit.evaluate.metric import plain
from anybit.objectives.base import Closure

Loss = Callable[[Any, Any], Tensor]


def loss_by_name(word: str | None) -> Loss:
    """Return the loss that a recipe names; without a name, cross-entropy."""
    if word is None:
        return cross_entropy
    if not is_code(word):
        raise SpecError(f"loss is a function of outputs and targets, such as my_loss.py:loss; got {word[:60]!r}")
    found = by_name(word)
    if not callable(found):
        raise SpecError(f"{word}: a loss is a function of outputs and targets, got {type(found).__name__}")
    return found  # type: ignore[no-any-return]


ADVICE = "name another loss, such as torch.nn.functional:mse_loss or my_loss.py:loss (--loss, or loss = in a recipe)"


def check_targets(loss: Loss, outputs: Any, targets: Any) -> None:
    """Refuse before the first step what a loss cannot take, or would take without a word and learn nothing from."""
    loss(outputs, targets)
    if loss is cross_entropy and targets.shape == plain(outputs).shape:
        sums = targets.double().sum(1)
        if targets.shape[1] < 2 or bool((targets < 0).any()) or not bool(torch.isclose(sums, sums.new_ones(())).all()):
            raise DataError(f"targets of shape {tuple(targets.shape)} are no classes for cross-entropy; {ADVICE}")


def cross_entropy(outputs: Any, targets: Any) -> Tensor:
    """Return the mean cross-entropy of classes: one per example or per pixel, as numbers or one-hot."""
    logits = plain(outputs)
    if not isinstance(logits, Tensor) or logits.dim() < 2:
        raise DataError(f"cross-entropy needs a score for each class, and the network returns none; {ADVICE}")
    if not isinstance(targets, Tensor):
        raise DataError(f"training needs targets, and a batch has {type(targets).__name__} in their place; {ADVICE}")
    if targets.shape == logits.shape:
        return F.cross_entropy(logits, targets.to(logits.dtype))
    if targets.is_floating_point():
        raise DataError(f"targets are floating-point numbers; convert classes with y.long(), or {ADVICE}")
    targets = targets[:, 0] if targets.dim() == 2 and targets.shape[1] == 1 and logits.dim() == 2 else targets
    return F.cross_entropy(logits, targets)


def has_batch_norm(model: nn.Module) -> bool:
    """Tell whether a network normalizes over the examples of a batch, for which one example is too few."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def losses(
    model: nn.Module, batch: Batch, loss: Loss, *, usual: float, parts: int, mixed: bool, least: int
) -> list[Closure]:
    """Return what computes the loss of a batch, a part at a time.

    A process may have one example more or less than another, and so may a part: averaged over the processes and added
    up over the parts it is the mean over the whole batch.

    Args:
        model: The network.
        batch: The examples of this process.
        loss: Of outputs and targets.
        usual: How many examples a process has of a batch.
        parts: How many parts.
        mixed: Whether to multiply in bfloat16 where that is safe.
        least: Examples that a part must have.
    """

    def mean(part: Batch) -> Tensor | tuple[Tensor, Any]:
        device = next(leaf for leaf in pytree.tree_leaves(vars(part)) if isinstance(leaf, Tensor)).device.type
        with torch.autocast(device, torch.bfloat16, enabled=mixed):
            outputs = model(*part.args, **part.kwargs)
            found = loss(outputs, part.targets)
        found = found if len(part) == usual else found * (len(part) / usual)
        # A quantized pass learns from scores of classes; of other outputs only the loss knows what they mean.
        return (found, plain(outputs)) if loss is cross_entropy else found

    count = min(parts, max(1, len(batch) // least))

    def cut_out(index: int) -> Batch:
        return batch.mapped(lambda t: t.tensor_split(count)[index] if t.dim() else t)

    cut = [batch] if count == 1 else map(cut_out, range(count))
    return [functools.partial(mean, part) for part in cut if len(part)]
