"""Keeping count of calls under gradient checkpointing, which runs parts of the model again in the backward pass.

A recomputed call is the same call as in the forward pass and must be treated the same. `torch.utils.checkpoint` (with
`use_reentrant=False`) packs tensors through hooks that know which checkpointed region they belong to, in the forward
pass and when it is recomputed; that tells which call comes next.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils import checkpoint

from anybit.errors import PenaltyError


def in_backward() -> bool:
    """Tell whether the autograd engine is running on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def current_region() -> Any:
    """Return the checkpointed region that the running code belongs to, or `None`."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else _region_of(hooks[0])


def _region_of(hook: Any, depth: int = 3) -> Any:
    """Look for the region among what a packing hook, wrapped or not, holds on to."""
    for cell in getattr(hook, "__closure__", None) or ():
        value = cell.cell_contents
        if isinstance(value, weakref.ref):
            value = value()
        if isinstance(value, checkpoint._CheckpointFrame):
            return value
        if depth and callable(value) and (found := _region_of(value, depth - 1)) is not None:
            return found
    return None


def recomputing() -> bool:
    """Tell whether the running call repeats one of the forward pass."""
    if not in_backward():
        return False
    if current_region() is None:
        raise PenaltyError(
            "this model recomputes parts of itself with use_reentrant=True, which hides them from the penalty; "
            "call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
        )
    return True


class CallOrder:
    """Numbers the watched calls of one pass; a recomputed call gets the number it had in the forward pass."""

    def __init__(self) -> None:
        self._count = 0
        self._starts: dict[int, int] = {}
        self._again: dict[int, int] = {}
        self._regions: list[Any] = []

    def in_region(self) -> bool:
        """Tell whether the running call may come again in the backward pass."""
        return in_backward() or current_region() is not None

    def advance(self) -> int:
        """Count a call of the forward pass and return its number."""
        region = current_region()
        if region is not None and id(region) not in self._starts:
            self._starts[id(region)] = self._count
            self._regions.append(region)  # kept alive, so that no other region gets its id
        self._count += 1
        return self._count - 1

    def position(self) -> int:
        """Return the number of the running call, of the forward pass or recomputed."""
        if not recomputing():
            return self.advance()
        region = id(current_region())
        index = self._again.get(region, self._starts.get(region, 0))
        self._again[region] = index + 1
        return index
