"""The penalty's gradient from two ordinary passes.

Let `g(w, y)` be the gradient of the loss when every penalized weight is shifted by `w` and every activation output
by `y`. The penalty is `P = λ_w Σ‖g_W‖ + λ_y Σ‖g_y‖`, and the derivative of a norm at `v` is its dual direction `d(v)`:
the sign of `v` for l1, `v/‖v‖` for l2. So the gradient of `P` is the derivative of `g` along `(λ_w d_W, λ_y d_y)`:

    ∇P ≈ (g(h λ_w d_W, h λ_y d_y) - g(0, 0)) / h

The first pass gives `g(0, 0)` and the directions, the second the shifted gradient. Both are plain forward and
backward passes, so whatever can train can be penalized. Kinks are frozen (see `kinks`): without that each switched
ReLU adds a jump divided by h, and the result is mostly noise.

How large is h? With u the unit roundoff of the arithmetic in use:

- *Not too small for the gradients.* Their entries are sums of many rounded products and carry an error of about 32u
  of their size, which the difference divides by h. The curvature that a one-sided difference leaves out grows like h.
  A shift by h changes the loss by `hP` to first order, and where that is a fraction κ of the loss the gradients change
  by a fraction of that order too. Rounding then costs 32u/κ and curvature about 4κ: equal at `κ = √(8u)`, so
  `h = κ L / P`.
- *Not too large for the tensors.* The loss may have a scale of its own (an offset, a factor), so h also stays below the
  point where the tensors change by more than √u of their own size.
- *Not too small for the tensors.* An entry shifted by less than its last digit does not move at all. So the shift is
  at least four last digits of the typical entry it is added to, whatever the other two say. And h is rounded so that
  the shift of the largest tensor is a power of two: adding that to a binary number is exact as long as it reaches the
  last digit at all.

Each is a number for the whole network, from the tensors' own scale and the floating-point format they are in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anybit.errors import NonFiniteError, PenaltyError
from anybit.objectives.base import Closure, Scaler, Step, check_loss, check_norms, eagerly, run_backward, scale_of
from anybit.objectives.passes import Activation, FirstPass, Norm, SecondPass, direction, norm_of, root_mean_square
from anybit.objectives.pieces import extrapolate_
from anybit.objectives.processes import agreed, averaged, kept, synced
from anybit.objectives.state import buffers_kept, gradients_set_aside, random_state, replaced, set_random_state

NOISE = 32
"""Roundoffs that a gradient entry has gathered: measured between 30 and 60 on networks of 8 to 53 layers."""

CURVATURE = 4
"""What a one-sided difference leaves out, over κ: measured between 1.5 (VGG) and 16 (MobileNetV2)."""

DIGITS = 4
"""Last digits that a shift moves a typical entry by, so that it still moves the large ones."""


@dataclass(frozen=True)
class Request:
    """What a step is asked for: whose gradients, in which norm, how strongly."""

    model: nn.Module
    weights: Sequence[nn.Parameter]
    norm: Norm
    weight: float
    activation: float
    worst_case: bool = False
    by_range: bool = False
    measure: bool = False
    """Look at the activations even where nothing is penalized."""

    @property
    def penalized(self) -> bool:
        """Whether a second pass is needed."""
        return self.weight > 0 or self.activation > 0

    @property
    def watched(self) -> bool:
        """Whether the closure's functions must be seen."""
        frozen_kinks = self.penalized and not self.worst_case
        return self.measure or frozen_kinks or self.activation > 0


@dataclass(frozen=True)
class Shift:
    """One tensor's part: how far it moves per unit of h, how large it is, and the norm of its gradient."""

    amount: float
    size: float
    norm: float


def step_size(shifts: Sequence[Shift], loss: float, eps: float) -> float:
    """Return h; the reasoning is at the top of this file.

    Here the loss decides: `√(8 · 2⁻²⁴) · 8 / (0.5 · 16) = 2⁻¹⁰·⁵`, so the shift becomes `2⁻¹²`.

    >>> step_size([Shift(amount=0.5, size=100.0, norm=16.0)], loss=8.0, eps=2.0**-23) * 0.5 == 2.0**-12
    True
    """
    moving = [s for s in shifts if s.amount > 0 and s.size > 0]
    if not moving:
        return 1.0
    penalty = sum(s.amount * s.norm for s in moving)
    by_loss = math.sqrt(NOISE / CURVATURE * eps / 2) * abs(loss) / penalty if penalty else math.inf
    by_tensors = math.sqrt(eps / 2) / math.hypot(*(s.amount / s.size for s in moving))
    least = DIGITS * eps * max(s.size / s.amount for s in moving)
    h = max(least, min(by_loss, by_tensors))
    largest = max(moving, key=lambda s: s.size).amount
    return float(2.0 ** round(math.log2(h * largest)) / largest)


def two_pass(request: Request, closures: Sequence[Closure], scaler: Scaler | None = None, *, side: float = 1.0) -> Step:
    """Add the gradient of loss and penalty to every `.grad`; see the top of this file.

    Several closures are the parts of a batch: each pass goes through all of them. `side=-1` shifts the other way, for a
    difference to both sides.
    """
    parameters = [p for p in request.model.parameters() if p.requires_grad]
    with gradients_set_aside(parameters) as before:
        start = random_state()
        loss, firsts = _first_pass(request, closures, scaler)
        weights = [p for p in request.weights if p.requires_grad and p.grad is not None]
        step, finite = _measure(request, loss, weights, firsts, scaler)
        if request.penalized and finite:
            end = random_state()
            set_random_state(start)
            _second_pass(request, closures, firsts, parameters, weights, step, scaler, side)
            set_random_state(end)
        for parameter, old in zip(parameters, averaged(request.model, before), strict=True):
            if old is not None:
                parameter.grad = old if parameter.grad is None else parameter.grad.add_(old)
    return step


def _first_pass(request: Request, closures: Sequence[Closure], scaler: Scaler | None) -> tuple[float, list[FirstPass]]:
    """Run the closures as they are; return the loss and what was recorded of each."""
    frozen = request.penalized and not request.worst_case
    total, firsts = 0.0, []
    for part, closure in enumerate(closures, start=1):
        first = FirstPass(request.norm, directions=request.activation > 0, kinks=frozen, reach=request.by_range)
        with synced(request.model, part == len(closures)), eagerly(request.watched), first.watching(request.watched):
            loss = check_loss(closure())
            run_backward(loss, scaler)
        if first.short is not None and frozen:
            raise PenaltyError(
                f"the model computes in {str(first.short).removeprefix('torch.')}, too few digits for the difference "
                "of two passes; use engine='double-backward', objective='worst-case', or a closure without autocast"
            )
        total += float(loss.detach())
        firsts.append(first)
    return total, firsts


def _measure(
    request: Request, loss: float, weights: list[nn.Parameter], firsts: list[FirstPass], scaler: Scaler | None
) -> tuple[Step, bool]:
    """Return what the first pass saw; overflown gradients are an error, or the scaler's business if there is one."""
    by = scale_of(scaler)
    weight_norm = sum(float(norm_of(_grad(p), request.norm)) for p in weights) / by
    norms = [a.norm for first in firsts for a in first.activations if a.norm is not None]
    activation_norm = float(torch.stack(norms).sum()) / by if norms else 0.0
    if scaler is None:
        check_norms(weight_norm, activation_norm)
    step = Step(loss, weight_norm, activation_norm if request.watched else None)
    return step, math.isfinite(weight_norm + activation_norm)


def _second_pass(
    request: Request,
    closures: Sequence[Closure],
    firsts: list[FirstPass],
    parameters: list[nn.Parameter],
    weights: list[nn.Parameter],
    step: Step,
    scaler: Scaler | None,
    side: float,
) -> None:
    """Run the closures once more, shifted, and turn the difference into the gradient of loss and penalty."""
    old = kept([p.grad for p in parameters])
    moved = weights if request.weight > 0 else []
    active = [a for first in firsts for a in first.activations if a.direction is not None]
    amounts, h = _amounts(request, moved, active, step, scale_of(scaler))
    h = agreed(h, parameters[0].device) * side
    values = _shifted([p.data for p in moved], [_grad(p) for p in moved], [h * a for a in amounts], request.norm)
    factors = {a: h * amount for a, amount in zip(active, amounts[len(moved) :], strict=True)}
    with buffers_kept(request.model), replaced(moved, values), eagerly(request.watched):
        for parameter in parameters:
            parameter.grad = None
        for part, (first, closure) in enumerate(zip(firsts, closures, strict=True), start=1):
            second = SecondPass(first, factors)
            with synced(request.model, part == len(closures)), second.watching(request.watched):
                loss = closure()
                if not bool(torch.isfinite(loss.detach())):
                    raise NonFiniteError(f"the shifted loss is {float(loss.detach())}; lower the penalty's strength")
                run_backward(loss, scaler)
    for parameter, a in zip(parameters, old, strict=True):
        if parameter.grad is None:
            parameter.grad = a
        elif a is not None and h != 1.0:
            extrapolate_(parameter.grad, a, h)


def _amounts(
    request: Request, weights: list[nn.Parameter], active: list[Activation], step: Step, by: float
) -> tuple[list[float], float]:
    """Return how far each tensor moves per unit of h, weights first, and h. Gradients come multiplied by `by`."""
    one = torch.ones(())
    reaches = [torch.linalg.vector_norm(p.data, ord=math.inf) if request.by_range else one for p in weights]
    reaches += [one if a.reach is None else a.reach for a in active]
    strengths = [request.weight] * len(weights) + [request.activation] * len(active)
    amounts = [s * r for s, r in zip(strengths, torch.stack(reaches).tolist(), strict=True)] if reaches else []
    if request.worst_case:
        return amounts, 1.0
    sizes = torch.stack([root_mean_square(p.data) for p in weights] + [a.size for a in active]).tolist()
    norms = [norm_of(_grad(p), request.norm) for p in weights]
    norms += [a.norm for a in active if a.norm is not None]
    counts = [p.numel() for p in weights] + [a.numel for a in active]
    # A unit vector's entries are one over the root of their number; signs are one.
    spreads = [1.0 if request.norm == "l1" else 1.0 / math.sqrt(max(1, n)) for n in counts]
    shifts = [
        Shift(amount * spread, size, norm / spread / by)
        for amount, spread, size, norm in zip(amounts, spreads, sizes, torch.stack(norms).tolist(), strict=True)
    ]
    eps = max([torch.finfo(p.dtype).eps for p in weights] + [a.eps for a in active])
    return amounts, step_size(shifts, step.loss, eps)


def _shifted(weights: list[Tensor], grads: list[Tensor], factors: Sequence[float], norm: Norm) -> Iterator[Tensor]:
    """Yield each weight plus its factor times its gradient's direction, one at a time."""
    for weight, grad, factor in zip(weights, grads, factors, strict=False):
        unit = torch.sign(grad) if norm == "l1" else direction(grad, norm)
        yield unit.mul_(factor).add_(weight)


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
