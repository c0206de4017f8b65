"""The penalty in PyTorch Lightning: a mixin with one method, called where `manual_backward` would be.

Needs `pip install 'anybit[examples]'`. Run `python examples/lightning_module.py`, or in two processes with
`--devices 2`. For one device or DDP, in full or mixed precision.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from your_own_loop import digits, network

import anybit
from anybit.objectives.base import Penalty, Step


class Penalized:
    """For a module with `self.automatic_optimization = False`: its `training_step` says when to go backward."""

    def penalized_backward(self, penalty: Penalty, closure: Callable[[], Tensor]) -> Step:
        """Do what `self.manual_backward(closure())` does, penalty included.

        `manual_backward` runs one pass, on a loss that is there already; the penalty runs two, forward and backward.
        So what it does around its pass is done around each of them: DDP's averaging, and 16-bit loss scaling.
        """
        strategy = self.trainer.strategy
        if type(strategy) not in (SingleDeviceStrategy, DDPStrategy):
            raise NotImplementedError(
                f"{type(strategy).__name__} has a backward pass of its own; use one device or DDP"
            )

        def prepared() -> Tensor:
            loss = closure()
            strategy.pre_backward(loss)  # without it DDP would leave each process with its own gradient
            return loss

        return penalty.backward(prepared, scaler=getattr(strategy.precision_plugin, "scaler", None))


class Digits(Penalized, lightning.LightningModule):
    """Any module of yours."""

    def __init__(self, net: nn.Module, *, strength: float = 2e-3) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = net
        self.penalty = anybit.GradientPenalty(self, weight=strength, activation=strength)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Take a step and log what it saw."""
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        step = self.penalized_backward(self.penalty, lambda: F.cross_entropy(self.net(x), y))
        optimizer.step()
        self.log("loss", step.loss, prog_bar=True)
        self.log("weight_norm", step.weight_norm)
        if step.activation_norm is not None:  # plain steps between penalized ones do not look
            self.log("activation_norm", step.activation_norm)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Any optimizer will do."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main(argv: Sequence[str] | None = None) -> lightning.Trainer:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=-1, help="stop after so many steps")
    parser.add_argument("--devices", type=int, default=1, help="processes on the CPU; more than one is DDP")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    loader, _ = digits()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=args.devices,
        max_epochs=args.epochs,
        max_steps=args.steps,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(Digits(network()), loader)
    print({name: round(float(value), 4) for name, value in trainer.callback_metrics.items()})
    return trainer


if __name__ == "__main__":
    main()
