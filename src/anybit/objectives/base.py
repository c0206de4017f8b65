"""What every penalty shares: it takes a closure that returns the loss, and fills `.grad`. Penalties add up."""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from anybit.errors import NonFiniteError, PenaltyError
from anybit.objectives.closures import Closure as Closure
from anybit.objectives.closures import LossOf
from anybit.objectives.processes import averaged
from anybit.objectives.restore import add_gradients, gradients_set_aside

Closures = Closure | Sequence[Closure]
"""One closure for a whole batch, or one for each part of it, whose losses add up to that of the batch."""


class Scaler(Protocol):
    """What is needed of a `torch.amp.GradScaler`."""

    def scale(self, outputs: Tensor) -> Tensor:
        """Multiply by the current scale, on the tensor's own device."""


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


class Beside(Penalty):
    """Something that happens beside an ordinary step, or beside that of a gradient penalty."""

    def backward(self, closure: Closures, *, scaler: Scaler | None = None) -> Step:
        """Take a plain step with it."""
        return Sum([self]).backward(closure, scaler=scaler)


class WeightPenalty(Beside):
    """A penalty that depends on the weights alone."""

    @abstractmethod
    def gradients(self) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the value, and each weight with the gradient of strength times value."""

    def look(self, closure: Closure) -> None:  # most need no look
        """Find out from a run of the closure what the weights are used for, if that matters and is not known yet."""

    def saw(self, step: Step) -> None:  # most have a strength that stays
        """Take note of what a step saw."""


class Perturbation(Beside):
    """A way to run the closure on changed weights or activations."""

    @abstractmethod
    def around(self, closures: Sequence[Closure]) -> contextlib.AbstractContextManager[Sequence[Closure]]:
        """Change the weights for one step, forward and backward; give the closures to run meanwhile.

        What must be seen by the backward pass too, where checkpointed parts run again, is an `Under`.
        """


class FurtherPass(Beside):
    """A pass of its own after that of the loss, which learns from what the loss's pass made of the same examples."""

    model: nn.Module

    @abstractmethod
    def after(self, parts: Sequence[LossOf], step: Step, scaler: Scaler | None) -> dict[str, float]:
        """Run what comes after the loss's own pass, add to every `.grad`, and return numbers for the log by name."""


class Sum(Penalty):
    """Several penalties in one step.

    Perturbations are around, at most one gradient penalty is inside, further passes come after, weights on top.
    """

    name = "sum"

    def __init__(self, parts: Sequence[Penalty]) -> None:
        self.parts = list(parts)
        self.drivers = [p for p in self.parts if not isinstance(p, Beside)]
        self.further = [p for p in self.parts if isinstance(p, FurtherPass)]
        if len(self.drivers) > 1:
            raise PenaltyError(
                "one step takes one gradient penalty; give that one both strengths instead of adding two"
            )

    def backward(self, closure: Closures, *, scaler: Scaler | None = None) -> Step:
        """Take one step with all of them."""
        parts = parts_of(closure, watched=bool(self.further))
        terms, pairs = self._on_top(parts[0])  # before anything is changed, since it may not be finite
        step = self._with_further(parts, scaler) if self.further else self._inside(parts, scaler)
        if pairs and all(weight.grad is None for weight, _ in pairs):
            warn_of_another_model()
        add_gradients((weight for weight, _ in pairs), (g if scaler is None else scaler.scale(g) for _, g in pairs))
        step = replace(step, terms=MappingProxyType({**step.terms, **terms}))
        for part in self.parts:
            if isinstance(part, WeightPenalty):
                part.saw(step)
        return step

    def _inside(self, closures: Sequence[Closure], scaler: Scaler | None) -> Step:
        """Take the loss's own step, in a changed network if a part wants that."""
        with contextlib.ExitStack() as stack:
            for part in self.parts:
                if isinstance(part, Perturbation):
                    closures = stack.enter_context(part.around(closures))
            return self.drivers[0].backward(closures, scaler=scaler) if self.drivers else plain_step(closures, scaler)

    def _with_further(self, parts: Sequence[LossOf], scaler: Scaler | None) -> Step:
        """Take the loss's own step and the further passes; if one of them fails, no gradient is changed."""
        model = self.further[0].model
        parameters = list(model.parameters())
        with gradients_set_aside(parameters) as before:
            step = self._inside(parts, scaler)
            for further in self.further:
                found = further.after(parts, step, scaler)
                step = replace(step, terms=MappingProxyType({**step.terms, **found}))
            add_gradients(parameters, averaged(model, before))
        return step

    def _on_top(self, closure: Closure) -> tuple[dict[str, float], list[tuple[Tensor, Tensor]]]:
        """Return the value of each penalty on the weights, and all their gradients."""
        found = []
        for part in self.parts:
            if isinstance(part, WeightPenalty):
                part.look(closure)
                found.append((part.name, *part.gradients()))
        pairs = [pair for _, _, some in found for pair in some]
        numbers = read_numbers([value for _, value, _ in found] + extremes(grad for _, grad in pairs))
        terms = dict(zip([name for name, _, _ in found], numbers, strict=False))
        for name, value in terms.items():
            if not math.isfinite(value):
                raise NonFiniteError(f"the {name} penalty is {value}; no gradient was changed. Are the weights finite?")
        if not all(map(math.isfinite, numbers)):
            raise NonFiniteError(f"the gradient of {' + '.join(terms)} is not finite; no gradient was changed")
        return terms, pairs

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "factor":
            for part in self.parts:
                part.factor = value
        super().__setattr__(name, value)


def _parts(penalty: Penalty) -> list[Penalty]:
    return penalty.parts if isinstance(penalty, Sum) else [penalty]


def parts_of(closure: Closures, *, watched: bool = False) -> list[Any]:
    """Return the closures of the parts of a batch, each as one that returns the loss alone."""
    parts = list(closure) if isinstance(closure, Sequence) else [closure]
    if not parts or not all(callable(part) for part in parts):
        raise PenaltyError("backward takes a function that returns the loss, or a list of such functions")
    return [part if isinstance(part, LossOf | Under) else LossOf(part, watched=watched) for part in parts]


class Under:
    """A closure that runs under a mode, which stays for the backward pass."""

    def __init__(self, closure: Closure, mode: TorchFunctionMode) -> None:
        self.closure, self.mode = closure, mode

    def __call__(self) -> Tensor:
        """Run the closure; the mode is there already."""
        loss: Tensor = self.closure()
        return loss


@contextlib.contextmanager
def modes_of(closure: Closure) -> Iterator[None]:
    """Enter what a closure is to run under, forward and backward."""
    if not isinstance(closure, Under):
        yield
        return
    with modes_of(closure.closure), closure.mode:
        yield


def plain_step(closures: Sequence[Closure], scaler: Scaler | None) -> Step:
    """Take an ordinary step."""
    total = 0.0
    for closure in closures:
        with modes_of(closure):
            loss = check_loss(closure())
            total += check_finite(*read_numbers([loss]))
            run_backward(loss, scaler)
    return Step(total, float("nan"), None)


def run_backward(loss: Tensor, scaler: Scaler | None) -> None:
    """Do what `loss.backward()` does, scaled if there is a scaler."""
    loss = loss if scaler is None else scaler.scale(loss)
    # `loss.backward()` would be shown to an active mode, which PyTorch switches off meanwhile; checkpointed parts run
    # again in there and would go unseen. The engine itself takes the mode along, to device threads too.
    with first_backward():
        torch.autograd.graph._engine_run_backward(
            (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )


@contextlib.contextmanager
def first_backward() -> Iterator[None]:
    """Say what is wrong with a closure that ran backward before this block does."""
    try:
        yield
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise PenaltyError(
            "the closure runs backward() itself; let it return the loss, and the penalty runs backward"
        ) from error


def read_numbers(values: Sequence[Tensor]) -> list[float]:
    """Return single numbers that may be on a device, waiting for it once.

    >>> read_numbers([torch.tensor(1.5), torch.tensor([2.0])])
    [1.5, 2.0]
    """
    if not values:
        return []
    wide = torch.float64 if any(v.dtype == torch.float64 for v in values) else torch.float32
    numbers: list[float] = torch.stack([v.detach().reshape(()).to(values[0].device, wide) for v in values]).tolist()
    return numbers


def extremes(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """Return the largest absolute entry of each tensor, which is not finite if any entry is not.

    >>> extremes([torch.tensor([-3.0, 1.0]), None, torch.tensor([float("nan"), 1.0])])
    [tensor(3.), tensor(nan)]
    """
    dense = [t.coalesce().values() if t.is_sparse else t for t in tensors if t is not None]
    full = [t.detach() for t in dense if t.numel()]
    return list(torch._foreach_norm(full, math.inf)) if full else []


def check_loss(loss: Any) -> Tensor:
    """Return the loss, unless it cannot be differentiated."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise PenaltyError(f"the closure must return the loss, one number in a tensor; got {what}")
    if not loss.requires_grad:
        raise PenaltyError("the loss has no gradient; is the closure under torch.no_grad, or the model frozen?")
    return loss


def check_finite(loss: float, weight_norm: float = 0.0, activation_norm: float = 0.0, *largest: float) -> float:
    """Return the loss; refuse one, or a gradient, that would spread NaN into the weights."""
    if not math.isfinite(loss):
        raise NonFiniteError(f"the loss is {loss}; no gradient was changed. Lower the learning rate?")
    if not math.isfinite(weight_norm + activation_norm):
        raise NonFiniteError(
            f"the gradient's norm is {weight_norm} over weights and {activation_norm} over activations; no gradient "
            "was changed. Lower the penalty's strength or the learning rate"
        )
    if not all(map(math.isfinite, largest)):
        raise NonFiniteError(
            "the gradient of some parameter is not finite; no gradient was changed. Lower the penalty's strength or "
            "the learning rate"
        )
    return loss


def warn_of_another_model() -> None:
    """Say that a penalty's weights are not those that are trained."""
    warnings.warn(
        "the loss does not reach any weight of the model that this penalty was built for; build it from the model that "
        "the closure runs",
        stacklevel=3,
    )


@contextlib.contextmanager
def eagerly(wanted: bool = True) -> Iterator[None]:
    """Run compiled models as they were written for the time being: a compiled one cannot be watched."""
    if not wanted or "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
