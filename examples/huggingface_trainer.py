"""The penalty in a Hugging Face `Trainer`: a subclass with one method, for any model and any arguments.

Needs `pip install 'anybit[examples]'`. Run `python examples/huggingface_trainer.py`: a small vision transformer, made
from a config in this file, on scikit-learn's digits. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification
from your_own_loop import digits

import anybit
from anybit.objectives.base import Penalty, Step

SUPPORTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class PenalizedTrainer(Trainer):
    """A `Trainer` that goes backward through a penalty; `seen` is what the last step saw."""

    def __init__(self, *args: Any, penalty: Penalty, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.penalty, self.seen = penalty, Step(float("nan"), float("nan"), None)
        if self.accelerator.distributed_type not in SUPPORTED:
            raise NotImplementedError(f"{self.accelerator.distributed_type} has a backward pass of its own; use DDP")

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the Trainer's own step as the closure, up to where it would go backward."""
        own_step, own_backward = super().training_step, self.accelerator.backward

        def closure() -> Tensor:
            losses: list[Tensor] = []
            self.accelerator.backward = lambda loss, **_: losses.append(loss)
            try:
                own_step(*args, **kwargs)  # divides by the accumulation steps, or leaves that to the model, as ever
            finally:
                self.accelerator.backward = own_backward
            return losses[0]

        self.seen = self.penalty.backward(closure, scaler=self.accelerator.scaler)
        return torch.tensor(self.seen.loss, device=self.args.device)

    def log(self, logs: dict[str, float], *args: Any) -> None:
        """Add the norms to what is logged."""
        super().log({**logs, "weight_norm": self.seen.weight_norm}, *args)


def vision_transformer() -> ViTForImageClassification:
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        num_labels=10,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return ViTForImageClassification(config)


def examples() -> list[dict[str, Any]]:
    loader, _ = digits()
    return [{"pixel_values": x, "labels": int(y)} for x, y in loader.dataset]


def make_trainer(model: nn.Module, *, strength: float = 1e-4, **options: Any) -> PenalizedTrainer:
    arguments = TrainingArguments(
        use_cpu=True,
        learning_rate=5e-3,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        # The penalty needs the sign of the gradient over all processes in each part, so each part is averaged.
        accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}},
        **options,
    )
    penalty = anybit.GradientPenalty(model, weight=strength, activation=strength, layers="*.weight")
    return PenalizedTrainer(model=model, args=arguments, train_dataset=examples(), penalty=penalty)


def main(argv: Sequence[str] | None = None) -> PenalizedTrainer:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--accumulate", type=int, default=2, help="batches per step of the optimizer")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            vision_transformer(),
            output_dir=folder,
            max_steps=args.steps,
            logging_steps=max(1, args.steps // 4),
            per_device_train_batch_size=32,
            gradient_accumulation_steps=args.accumulate,
        )
        trainer.train()
    return trainer


if __name__ == "__main__":
    main()
