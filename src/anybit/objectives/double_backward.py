"""The penalty's gradient by differentiating the gradient: exact, slow, the reference for everything else."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from anybit.errors import PenaltyError
from anybit.objectives.base import Closure, Scaler, Step, check_loss, check_norms, eagerly, run_backward
from anybit.objectives.taps import EdgeTaps
from anybit.objectives.two_pass import Request


def double_backward(request: Request, closure: Closure, scaler: Scaler | None = None) -> Step:
    """Add the gradient of loss and penalty to every `.grad`, through a graph of the gradient itself."""
    with eagerly(), EdgeTaps() as taps:
        loss = check_loss(closure())
    weights = [p for p in request.weights if p.requires_grad]
    if not (weights or taps.edges):
        raise PenaltyError("nothing to penalize: no weight requires a gradient and no activation was seen")
    grads: Sequence[Tensor | None] = torch.autograd.grad(
        loss, [*weights, *taps.edges], create_graph=True, allow_unused=True
    )
    reaches = [torch.linalg.vector_norm(w.detach(), ord=math.inf) for w in weights] + taps.reaches
    order = 1 if request.norm == "l1" else 2
    objective, norms = loss, [0.0, 0.0]
    for index, (grad, reach) in enumerate(zip(grads, reaches, strict=True)):
        if grad is None:
            continue
        kind = 0 if index < len(weights) else 1
        norm: Tensor = torch.linalg.vector_norm(grad, ord=order)
        norms[kind] += float(norm.detach())
        strength = (request.weight, request.activation)[kind]
        objective = objective + strength * (reach if request.by_range else 1.0) * norm
    check_norms(*norms)
    run_backward(objective, scaler)
    return Step(float(loss.detach()), norms[0], norms[1])
