"""KURE's penalty: `(kurtosis - 1.8)²`, which pulls the weights' distribution towards the uniform one.

A uniform tensor uses every code of a uniform grid equally and has no outliers to stretch the range.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from anybit.objectives.strength import Strength
from anybit.objectives.weights import SummedWeightPenalty

UNIFORM = 1.8
"""The kurtosis of a uniform distribution; a normal one has 3."""


def kurtosis(weight: Tensor) -> Tensor:
    """Return the fourth standardized moment of all entries.

    >>> float(kurtosis(torch.tensor([-1.0, 1.0])))
    1.0
    """
    centred = weight - weight.mean()
    variance = centred.pow(2).mean()
    return centred.pow(4).mean() / variance.pow(2).clamp(min=torch.finfo(weight.dtype).tiny)


class KurtosisPenalty(SummedWeightPenalty):
    """Adds `strength` times the mean over layers of `(kurtosis - target)²` to the loss."""

    name = "kurtosis"

    def __init__(
        self,
        model: nn.Module,
        *,
        strength: Strength = "auto",
        loss: float = 0.01,
        target: float = UNIFORM,
        layers: str | list[str] | None = None,
    ) -> None:
        super().__init__(model, strength=strength, loss=loss, layers=layers)
        self.target = target

    def value(self, weight: Tensor) -> Tensor:
        """Return the penalty of one weight tensor."""
        return (kurtosis(weight) - self.target).pow(2)

    def total(self) -> Tensor:
        """Return the mean over weights, not multiplied by the strength."""
        return super().total() / len(self.weights)
