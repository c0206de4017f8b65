"""What several processes that train one model must agree on."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def several() -> bool:
    """Tell whether this process is one of several that step together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def agreed(h: float, device: torch.device) -> float:
    """Return the smallest h of all processes: a difference of averaged gradients has one step for all."""
    if not several():
        return h
    smallest = torch.tensor([h], dtype=torch.float64, device=device)
    dist.all_reduce(smallest, dist.ReduceOp.MIN)
    return float(smallest)


def synced(model: nn.Module, wanted: bool) -> contextlib.AbstractContextManager[Any]:
    """Let DDP average the gradients of this pass, or only gather them for a later one that does."""
    if wanted or not isinstance(model, DistributedDataParallel):
        return contextlib.nullcontext()
    return model.no_sync()


def averaged(model: nn.Module, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Return gradients gathered in earlier steps as DDP's next synchronized step would have them: averaged.

    Under `no_sync` they are still each process's own; those that were averaged before stay what they are.
    """
    if not (several() and isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync):
        return grads
    for grad in grads:
        if grad is not None:
            dist.all_reduce(grad, group=model.process_group)
            grad.div_(dist.get_world_size(model.process_group))
    return grads
