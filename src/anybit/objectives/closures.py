"""What a loop hands over: a function that runs the forward pass, and what it said in the loss's own pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anybit.objectives.restore import random_state

Closure = Callable[[], Any]
"""Runs the forward pass and returns the loss, a scalar with a graph behind it, or `(loss, outputs)`."""


class LossOf:
    """A closure that returns the loss alone; if it is `watched`, its outputs and where random numbers began are kept.

    Only the first run with gradients counts: later ones may be on shifted weights.
    """

    def __init__(self, closure: Closure, *, watched: bool = False) -> None:
        self.closure, self.watched = closure, watched
        self.outputs: Any = None
        self.start: tuple[Tensor, list[Tensor]] | None = None

    def __call__(self) -> Tensor:
        """Run the closure."""
        first = self.watched and self.start is None and torch.is_grad_enabled()
        if first:
            self.start = random_state()
        loss, outputs = split(self.closure())
        if first and outputs is not None:
            self.outputs = torch.utils._pytree.tree_map_only(Tensor, torch.Tensor.detach, outputs)
        found: Tensor = loss
        return found


def split(value: Any) -> tuple[Any, Any]:
    """Return the loss that a closure gave, and the outputs or nothing.

    >>> split(1.5), split((1.5, 2))
    ((1.5, None), (1.5, 2))
    """
    return value if isinstance(value, tuple) and len(value) == 2 else (value, None)
