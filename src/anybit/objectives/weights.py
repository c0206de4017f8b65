"""What penalties on the weights alone share: which weights, how strongly, and the gradient of the sum."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn

from anybit.errors import SpecError
from anybit.objectives.base import Closure, WeightPenalty
from anybit.objectives.quantizable import WeightChoice


class SummedWeightPenalty(WeightPenalty):
    """`strength · factor · Σ value(W)` over the weights that will be quantized."""

    def __init__(self, model: nn.Module, *, strength: float, layers: str | list[str] | None = None) -> None:
        if not 0 <= strength < math.inf:
            raise SpecError(f"strength must be zero or more, got {strength!r}")
        self.strength = float(strength)
        self._choice = WeightChoice(model, layers, required=True)

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The weights, by name, as the model has them now."""
        return self._choice.weights()

    def look(self, closure: Closure) -> None:
        """Find out which parameters are multiplied, where their layer does not tell."""
        self._choice.look(closure)

    @abstractmethod
    def value(self, weight: Tensor) -> Tensor:
        """Return the penalty of one weight tensor, differentiable."""

    def total(self) -> Tensor:
        """Return the sum over weights, not multiplied by the strength."""
        return torch.stack([self.value(w) for w in self.weights.values()]).sum()

    def gradients(self) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the sum, and each trainable weight with its gradient."""
        weights = [w for w in self.weights.values() if w.requires_grad]
        with torch.enable_grad():
            total = self.total()
            grads = torch.autograd.grad(self.strength * self.factor * total, weights) if weights else ()
        return total.detach(), list(zip(weights, grads, strict=True))
