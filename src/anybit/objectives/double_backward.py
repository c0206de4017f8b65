"""The penalty's gradient by differentiating the gradient: exact, slow, the reference for everything else."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from anybit.errors import PenaltyError
from anybit.objectives import base
from anybit.objectives.activations import EdgeTaps
from anybit.objectives.base import Closure, Scaler, Step, check_finite, eagerly, modes_of
from anybit.objectives.restore import add_gradients, gradients_set_aside
from anybit.objectives.two_pass import Request, trained


def double_backward(request: Request, closure: Closure, scaler: Scaler | None = None) -> Step:
    """Add the gradient of loss and penalty to every `.grad`, through a graph of the gradient itself."""
    parameters = trained(request)
    with gradients_set_aside(parameters) as before, eagerly(), EdgeTaps() as taps, modes_of(closure):
        loss = base.check_loss(closure())
        weights = [p for p in request.weights if p.requires_grad]
        if not (weights or taps.edges):
            raise PenaltyError("nothing to penalize: no weight requires a gradient and no activation was seen")
        with base.first_backward():
            grads: tuple[Tensor | None, ...] = torch.autograd.graph._engine_run_backward(
                (loss,), (torch.ones_like(loss),), True, True, (*weights, *taps.edges), allow_unreachable=True,
                accumulate_grad=False,
            )  # fmt: skip
        reaches = [torch.linalg.vector_norm(w.detach(), ord=math.inf) for w in weights] + taps.reaches
        order = 1 if request.norm == "l1" else 2
        zero = torch.zeros_like(loss.detach())
        norms = [zero if grad is None else torch.linalg.vector_norm(grad, ord=order) for grad in grads]
        objective = loss
        for index, (norm, reach) in enumerate(zip(norms, reaches, strict=True)):
            strength = request.times * (request.weight if index < len(weights) else request.activation)
            objective = objective + strength * (reach if request.by_range else 1.0) * norm
        value, *found = base.read_numbers([loss, *norms])
        by_kind = sum(found[: len(weights)]), sum(found[len(weights) :])
        check_finite(value, *by_kind)
        base.run_backward(objective, scaler)
        if scaler is None:
            check_finite(value, *by_kind, *base.read_numbers(base.extremes(p.grad for p in parameters)))
        add_gradients(parameters, before)
    return Step(value, *by_kind)
