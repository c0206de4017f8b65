"""What penalties on the weights alone share: which weights, how strongly, and the gradient of the sum."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from anybit.objectives.base import Closure, Step, WeightPenalty
from anybit.objectives.quantizable import WeightChoice
from anybit.objectives.strength import Shares, Strength, checked


class SummedWeightPenalty(WeightPenalty):
    """`strength · factor · Σ value(W)` over the weights that will be quantized."""

    def __init__(
        self,
        model: nn.Module,
        *,
        strength: Strength = "auto",
        loss: float = 0.01,
        layers: str | list[str] | None = None,
    ) -> None:
        given = checked("strength", strength)
        self._given = None if given == "auto" else float(given)
        self._shares = Shares(1, loss=loss)
        self._choice = WeightChoice(model, layers, required=True)

    @property
    def strength(self) -> float:
        """What the sum is multiplied by right now."""
        return self._shares.strengths[0] if self._given is None else self._given

    def saw(self, step: Step) -> None:
        """Follow the loss, if the strength is to."""
        if self._given is None:
            self._shares.update(step.loss, [step.terms[self.name]])

    def state_dict(self) -> dict[str, float]:
        """Return what a resumed run needs."""
        shares = self._shares.state_dict() if self._given is None else {}
        return {"steps": 0, "factor": self.factor, **shares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from what `state_dict` returned."""
        self.factor = float(state["factor"])
        if self._given is None:
            self._shares.load_state_dict(state)

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
