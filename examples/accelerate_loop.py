"""The penalty in a Hugging Face Accelerate loop, with gradient accumulation: what replaces `accelerator.backward`.

Needs `pip install 'anybit[examples]'`. Run `python examples/accelerate_loop.py`, or in two processes
`torchrun --nproc_per_node 2 examples/accelerate_loop.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DistributedType, GradientAccumulationPlugin
from torch import Tensor, nn
from torch.utils.data import DataLoader
from your_own_loop import digits, network

import anybit
from anybit.objectives.base import Penalty, Step

SUPPORTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def penalized_backward(accelerator: Accelerator, penalty: Penalty, closure: Callable[[], Tensor]) -> Step:
    """Do what `accelerator.backward(closure())` does, penalty included: the same division, the same loss scaling."""
    if accelerator.distributed_type not in SUPPORTED:
        raise NotImplementedError(f"{accelerator.distributed_type} has a backward pass of its own; use DDP")
    parts = accelerator.gradient_accumulation_steps
    return penalty.backward(lambda: closure() / parts, scaler=accelerator.scaler)


def make_accelerator(accumulate: int) -> Accelerator:
    # The penalty needs the sign of the gradient over all processes in each part, so each part is averaged.
    plugin = GradientAccumulationPlugin(num_steps=accumulate, sync_each_batch=True)
    return Accelerator(cpu=True, gradient_accumulation_plugin=plugin)


def train(
    accelerator: Accelerator, model: nn.Module, loader: DataLoader, *, epochs: int, strength: float = 2e-3
) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    penalty = anybit.GradientPenalty(model, weight=strength, activation=strength)
    losses = []
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                step = penalized_backward(accelerator, penalty, lambda: F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(step.loss * accelerator.gradient_accumulation_steps)
    return losses


def main(argv: Sequence[str] | None = None) -> tuple[nn.Module, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=2, help="batches per step of the optimizer")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    accelerator = make_accelerator(args.accumulate)
    model, (loader, _) = network(), digits()
    losses = train(accelerator, model, loader, epochs=args.epochs)
    accelerator.end_training()
    accelerator.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} batches")
    return model, losses


if __name__ == "__main__":
    main()
