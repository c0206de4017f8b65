"""The paper's penalty: `L + λ_w Σ‖∇_W L‖ + λ_y Σ‖∇_y L‖` over weights W and activation outputs y.

Quantizing moves every weight and activation by at most half a bin, so to first order the loss rises by at most
δ/2 times the l1 norm of its gradient, at every width at once.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from torch import nn

from anybit.errors import PenaltyError, SpecError
from anybit.objectives.agreement import Agreement, measure_agreement
from anybit.objectives.base import Closure, Closures, Penalty, Scaler, Step, parts_of
from anybit.objectives.double_backward import double_backward
from anybit.objectives.quantizable import WeightChoice
from anybit.objectives.record_replay import Norm
from anybit.objectives.strength import Shares, Strength, checked
from anybit.objectives.two_pass import Request, two_pass

Engine = Literal["two-pass", "double-backward"]
Objective = Literal["penalty", "worst-case"]
Scale = Literal["none", "range"]


class GradientPenalty(Penalty):
    """Adds the norm of the loss gradient, over weights and over activations, to the loss of any training loop.

    Args:
        model: The network whose weights are penalized. Wrapped ones (DDP, compiled) are fine.
        norm: "l1" (the paper), or "l2" (its comparison).
        weight: λ_w, the strength over weights. Zero switches that part off; with both at zero the penalty only
            measures the norms. "auto" follows the loss (`anybit.objectives.strength`).
        activation: λ_y, the strength over the outputs of activation functions. If neither is given both are "auto".
        loss: The part of the loss that may be lost, for "auto".
        engine: "two-pass" needs two ordinary passes and works with whatever can train. "double-backward"
            differentiates the gradient: exact, slow, and impossible for compiled models and fused attention.
        objective: "penalty", or "worst-case": the gradient at the point where every weight and activation is moved
            by λ in the direction that raises the loss most (l-infinity sharpness-aware training). Two-pass only.
        scale: "none" (the paper), or "range": λ in units of each tensor's own largest absolute value, as its
            quantization bin is.
        every: Apply the penalty at every k-th step only, k times as strong; the steps between are plain ones. In the
            worst case the point moves as far as always, and its gradient's difference to the plain one counts k times.
        layers: Names or patterns (`"layer3.*"`) of the weights to penalize. Default: all that will be quantized.

    Attributes:
        factor: Multiplies both strengths; set it to follow a schedule (`anybit.objectives.schedule`).

    Example:
        >>> import torch
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.constant_(model.weight, 2.0)
        >>> penalty = GradientPenalty(model, weight=0.5, engine="double-backward")
        >>> step = penalty.backward(lambda: (model(torch.ones(1, 1)) ** 2).sum())

        With L = w² the penalty is |2w|: the objective w² + 0.5·|2w| has the slope 2w + 1 = 5 at w = 2.

        >>> step.loss, step.weight_norm, model.weight.grad.item()
        (4.0, 4.0, 5.0)
    """

    name = "gradient"

    def __init__(
        self,
        model: nn.Module,
        *,
        norm: Norm = "l1",
        weight: Strength | None = None,
        activation: Strength | None = None,
        loss: float = 0.01,
        engine: Engine = "two-pass",
        objective: Objective = "penalty",
        scale: Scale = "none",
        every: int = 1,
        layers: str | list[str] | None = None,
    ) -> None:
        choices = (("norm", norm, Norm), ("engine", engine, Engine), ("objective", objective, Objective))
        for name, value, allowed in (*choices, ("scale", scale, Scale)):
            if value not in get_args(allowed):
                raise SpecError(f"{name} must be one of {', '.join(get_args(allowed))}; got {value!r}")
        other: Strength = "auto" if weight is None and activation is None else 0.0
        given = {
            "weight": other if weight is None else weight,
            "activation": other if activation is None else activation,
        }
        given = {name: checked(name, strength) for name, strength in given.items()}
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise SpecError(f"every is a whole number of steps, one or more; got {every!r}")
        if objective == "worst-case" and engine != "two-pass":
            raise SpecError("objective='worst-case' is a matter of two passes; drop engine='double-backward'")
        self.model, self.norm, self.engine = model, norm, engine
        self._given = given
        self._auto = [name for name, strength in given.items() if strength == "auto"]
        self._shares = Shares(len(self._auto), loss=loss)
        self.objective, self.scale, self.every = objective, scale, every
        self._choice = WeightChoice(model, layers, required=bool(given["weight"]))
        self._steps = 0

    @property
    def weight(self) -> float:
        """λ_w right now."""
        return self._strength("weight")

    @property
    def activation(self) -> float:
        """λ_y right now."""
        return self._strength("activation")

    def _strength(self, name: str) -> float:
        given = self._given[name]
        return self._shares.strengths[self._auto.index(name)] if given == "auto" else float(given)

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The weights that are penalized, by name, as the model has them now."""
        return self._choice.weights()

    @property
    def divides(self) -> bool:
        """Whether it divides the difference of two gradients by a small number, which takes all digits of float32."""
        return self.engine == "two-pass" and (
            (bool(self._auto) and self.objective == "penalty") or self.request().divides
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: how many steps were taken, and the factor."""
        shares = self._shares.state_dict() if self._auto else {}
        return {"steps": self._steps, "factor": self.factor, **shares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._steps, self.factor = int(state["steps"]), float(state["factor"])
        if self._auto:
            self._shares.load_state_dict(state)

    def backward(self, closure: Closures, *, scaler: Scaler | None = None) -> Step:
        """Run `closure`, add the gradient of loss and penalty to every `.grad`, and say what was seen.

        A list of closures is one batch in parts: their losses add up, only one part has its graph in memory at a time,
        and the penalty's directions over weights are those of the whole batch. Over activations every example has its
        own direction with l1; ranges and l2 lengths are those of a part.

        `closure` runs the forward pass and returns the loss. The two-pass engine calls it twice, with the same random
        state: keep bookkeeping of your own outside it. With `scaler` (a `torch.amp.GradScaler`) the gradients are
        scaled by it, as `scaler.scale(loss).backward()` would.
        """
        closures = parts_of(closure)
        self._choice.look(closures[0])
        request = self.request(self.factor if self._steps % self.every == 0 else 0.0)
        if self.engine == "double-backward" and request.penalized:
            if len(closures) > 1:
                raise PenaltyError("double backward takes a batch at once; give it one closure, or use two-pass")
            step = double_backward(request, closures[0], scaler)
        else:
            step = two_pass(request, closures, scaler)
        self._steps += 1
        norms = {"weight": step.weight_norm, "activation": step.activation_norm}
        if self._auto and None not in norms.values():  # steps between those with a penalty do not look
            self._shares.update(step.loss, [norms[name] or 0.0 for name in self._auto])
        return step

    def request(self, factor: float = 1.0) -> Request:
        """Return what one step is asked for, with both strengths multiplied by `factor`."""
        return Request(
            model=self.model,
            weights=list(self.weights.values()),
            norm=self.norm,
            weight=factor * self.weight,
            activation=factor * self.activation,
            times=float(self.every),
            worst_case=self.objective == "worst-case",
            by_range=self.scale == "range",
            measure=bool(self._auto) or not (self.weight or self.activation),
        )

    def check(self, closure: Closure) -> Agreement:
        """Measure on your own network and batch how well the two-pass gradient agrees with an independent one.

        The reference is double backward where the model allows it, else two-pass with a far smaller step in a central
        difference. Nothing is changed: gradients, statistics and random state are as before.
        """
        if not (self.weight or self.activation):
            raise PenaltyError("nothing to check: both strengths are zero")
        (loss,) = parts_of(closure)
        self._choice.look(loss)
        return measure_agreement(self.request(), loss)
