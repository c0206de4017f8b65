"""What every penalty shares: it takes a closure that returns the loss, and fills `.grad`. Penalties add up."""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from anybit.errors import NonFiniteError, PenaltyError

Closure = Callable[[], Tensor]
"""Runs the forward pass and returns the loss, a scalar with a graph behind it."""

Closures = Closure | Sequence[Closure]
"""One closure for a whole batch, or one for each part of it, whose losses add up to that of the batch."""


class Scaler(Protocol):
    """What is needed of a `torch.amp.GradScaler`."""

    def scale(self, outputs: Tensor) -> Tensor:
        """Multiply by the current scale."""

    def get_scale(self) -> float:
        """Return the current scale."""


@dataclass(frozen=True)
class Step:
    """What one call of `backward` saw, as plain values ready for a log.

    `loss` is the loss without any penalty. The norms are those of its gradient over weights and over activations,
    not multiplied by any strength; the latter is `None` in steps that did not look. `terms` holds the value of each
    further penalty, by name.
    """

    loss: float
    weight_norm: float
    activation_norm: float | None
    terms: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


class Penalty(ABC):
    """Something added to the loss. `a + b` is a penalty that does both. `factor` multiplies its strength."""

    name = "penalty"
    factor = 1.0

    @abstractmethod
    def backward(self, closure: Closures, *, scaler: Scaler | None = None) -> Step:
        """Run `closure`, add the gradient of loss and penalty to every `.grad`, and say what was seen.

        A batch that is too large for the memory comes as a list of closures, one for each part of it, whose losses add
        up to that of the batch: only one part has its graph in memory at a time, and the penalty is that of the whole.
        """

    def __add__(self, other: Penalty) -> Penalty:
        return Sum([*_parts(self), *_parts(other)])


class WeightPenalty(Penalty):
    """A penalty that depends on the weights alone."""

    @abstractmethod
    def gradients(self) -> tuple[float, list[tuple[Tensor, Tensor]]]:
        """Return the value, and each weight with the gradient of strength times value."""

    def backward(self, closure: Closures, *, scaler: Scaler | None = None) -> Step:
        """Take a plain step and add this penalty's gradient."""
        return Sum([self]).backward(closure, scaler=scaler)

    def add_gradients(self, scale: float) -> float:
        """Add the gradient, times `scale`, to every `.grad`; return the value."""
        value, pairs = self.gradients()
        if not torch.isfinite(torch.tensor(value)):
            raise NonFiniteError(f"the {self.name} penalty is {value}; are the weights finite?")
        for weight, grad in pairs:
            grad = grad.mul_(scale) if scale != 1.0 else grad
            weight.grad = grad if weight.grad is None else weight.grad.add_(grad)
        return value


class Perturbation(Penalty):
    """A way to run the closure on changed weights or activations."""

    @abstractmethod
    def around(self, closures: Sequence[Closure]) -> contextlib.AbstractContextManager[Sequence[Closure]]:
        """Change the weights for one step, forward and backward; give the closures to run meanwhile."""

    def backward(self, closure: Closures, *, scaler: Scaler | None = None) -> Step:
        """Take a plain step on the changed network."""
        return Sum([self]).backward(closure, scaler=scaler)


class Sum(Penalty):
    """Several penalties in one step: perturbations around, at most one gradient penalty inside, weights on top."""

    name = "sum"

    def __init__(self, parts: Sequence[Penalty]) -> None:
        self.parts = list(parts)
        self.drivers = [p for p in self.parts if not isinstance(p, WeightPenalty | Perturbation)]
        if len(self.drivers) > 1:
            raise PenaltyError(
                "one step takes one gradient penalty; give that one both strengths instead of adding two"
            )

    def backward(self, closure: Closures, *, scaler: Scaler | None = None) -> Step:
        """Run `closure`, add the gradient of loss and every penalty to every `.grad`, and say what was seen."""
        closures: Sequence[Closure] = parts_of(closure)
        with contextlib.ExitStack() as stack:
            for part in self.parts:
                if isinstance(part, Perturbation):
                    closures = stack.enter_context(part.around(closures))
            step = self.drivers[0].backward(closures, scaler=scaler) if self.drivers else plain_step(closures, scaler)
        scale = scale_of(scaler)
        terms = {p.name: p.add_gradients(scale) for p in self.parts if isinstance(p, WeightPenalty)}
        return replace(step, terms=MappingProxyType({**step.terms, **terms}))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "factor":
            for part in self.parts:
                part.factor = value
        super().__setattr__(name, value)


def _parts(penalty: Penalty) -> list[Penalty]:
    return penalty.parts if isinstance(penalty, Sum) else [penalty]


def parts_of(closure: Closures) -> list[Closure]:
    """Return the closures of the parts of a batch."""
    parts = list(closure) if isinstance(closure, Sequence) else [closure]
    if not parts or not all(callable(part) for part in parts):
        raise PenaltyError("backward takes a function that returns the loss, or a list of such functions")
    return parts


def plain_step(closures: Sequence[Closure], scaler: Scaler | None) -> Step:
    """Take an ordinary step."""
    total = 0.0
    for closure in closures:
        loss = check_loss(closure())
        run_backward(loss, scaler)
        total += float(loss.detach())
    return Step(total, float("nan"), None)


def run_backward(loss: Tensor, scaler: Scaler | None) -> None:
    """Do what `loss.backward()` does, scaled if there is a scaler."""
    loss = loss if scaler is None else scaler.scale(loss)
    # `loss.backward()` would be shown to an active mode, which PyTorch switches off meanwhile; checkpointed parts run
    # again in there and would go unseen. The engine itself takes the mode along, to device threads too.
    torch.autograd.graph._engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def scale_of(scaler: Scaler | None) -> float:
    """Return what the gradients are multiplied by."""
    return 1.0 if scaler is None else float(scaler.get_scale())


def check_loss(loss: Any) -> Tensor:
    """Return the loss, unless it cannot be differentiated or would spread NaN into the weights."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise PenaltyError(f"the closure must return the loss, one number in a tensor; got {what}")
    if not loss.requires_grad:
        raise PenaltyError("the loss has no gradient; is the closure under torch.no_grad, or the model frozen?")
    if not bool(torch.isfinite(loss.detach())):
        value = float(loss.detach())
        raise NonFiniteError(f"the loss is {value}; no gradient was changed. Lower the learning rate?")
    return loss


def check_norms(weight_norm: float, activation_norm: float) -> None:
    """Refuse a gradient that would spread NaN into the weights."""
    if not abs(weight_norm) + abs(activation_norm) < float("inf"):
        raise NonFiniteError(
            f"the gradient's norm is {weight_norm} over weights and {activation_norm} over activations; no gradient "
            "was changed. Lower the penalty's strength or the learning rate"
        )


@contextlib.contextmanager
def eagerly(wanted: bool = True) -> Iterator[None]:
    """Run compiled models as they were written for the time being: a compiled one cannot be watched."""
    if not wanted or "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
