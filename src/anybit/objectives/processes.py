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
    """Return gradients that DDP has not seen as its next synchronized step would have them: averaged.

    Those gathered under `no_sync` are still each process's own; those that were averaged before stay what they are.
    """
    if not (several() and isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync):
        return grads
    present = [grad for grad in grads if grad is not None]
    if present:
        flat = torch.cat([grad.reshape(-1) for grad in present])
        dist.all_reduce(flat, group=model.process_group)
        flat.div_(dist.get_world_size(model.process_group))
        for grad, new in zip(present, torch.split(flat, [grad.numel() for grad in present]), strict=True):
            grad.copy_(new.view_as(grad))
    return grads
