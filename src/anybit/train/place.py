"""Where training runs: on a graphics card if there is one, in one process or in those that torchrun started."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anybit.objectives.base import Step
from anybit.task.task import pick_device


@dataclass(frozen=True)
class Place:
    """The device of this process, and which one it is of how many that train together."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rank: int = 0
    processes: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes files."""
        return self.rank == 0

    def gathered(self, texts: Sequence[str]) -> list[str]:
        """Return the texts of all processes, each once; all of them must ask.

        >>> Place().gathered(["b", "a", "b"])
        ['a', 'b']
        """
        parts: list[Sequence[str]] = [texts] * self.processes
        if self.processes > 1:
            dist.all_gather_object(parts, list(texts))
        return sorted({text for part in parts for text in part})

    def averaged(self, step: Step) -> Step:
        """Return what all processes saw together in a step; all of them must ask.

        The gradient over weights is averaged already; losses and gradients over activations are those of the examples
        that each process had.
        """
        if self.processes == 1:
            return step
        own = [step.loss, step.activation_norm or 0.0]
        values = torch.tensor(own, dtype=torch.float64, device=self.device)
        dist.all_reduce(values)
        loss, norm = (values / self.processes).tolist()
        return replace(step, loss=loss, activation_norm=None if step.activation_norm is None else norm)

    def same_buffers(self, model: nn.Module) -> None:
        """Give all processes the leading one's buffers: each saw other examples in the last step."""
        for buffer in model.buffers() if self.processes > 1 else ():
            dist.broadcast(buffer, 0)

    def joined(self, model: nn.Module) -> nn.Module:
        """Return the model on this device, its gradients averaged over all processes."""
        model = model.to(self.device)
        return DistributedDataParallel(model) if self.processes > 1 else model


def here(device: torch.device | None = None) -> Place:
    """Return the place of a process of its own: a device, or the graphics card if there is one."""
    found = device or pick_device(None)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return Place(torch.device(found.type, local) if found.type == "cuda" and found.index is None else found)


@contextlib.contextmanager
def placed(device: torch.device | None = None) -> Iterator[Place]:
    """Say where this process runs; if torchrun started several, they are connected inside the block.

    Processes that are connected already stay so afterwards.
    """
    place = here(device)
    if dist.is_initialized():
        yield Place(place.device, dist.get_rank(), dist.get_world_size())
        return
    if not dist.is_torchelastic_launched():
        yield place
        return
    on_card = place.device.type == "cuda"
    if on_card:
        torch.cuda.set_device(place.device)
    dist.init_process_group("nccl" if on_card else "gloo")
    try:
        with warnings.catch_warnings():
            # A dimension of length one may have any stride: DDP copies such a gradient, and tells the user about it.
            warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
            yield Place(place.device, dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
