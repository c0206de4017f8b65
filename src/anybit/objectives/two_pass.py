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
- *Not too large for the tensors.* The loss may have an offset, so h is also measured by where the tensors change by √u
  of their own size. Where the loss allows more it goes a third of the way (in digits) towards that: a loss that hardly
  depends on the weights has gradients that nearly cancel, and rounding would drown a smaller step.
- *Not too small for the tensors.* An entry shifted by less than its last digit does not move at all. So the shift is
  at least four last digits of the typical entry it is added to, whatever the other two say. And h is rounded so that
  the shift of the largest tensor is a power of two, no smaller than that: adding one to a binary number is exact as
  long as it reaches the last digit at all.

Each is a number for the whole network, from the tensors' own scale and the floating-point format they are in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anybit.errors import NonFiniteError, PenaltyError
from anybit.objectives import base, restore
from anybit.objectives.base import Closure, Scaler, Step, check_finite, eagerly, modes_of
from anybit.objectives.chunks import extrapolate_
from anybit.objectives.processes import agreed, averaged, several, synced
from anybit.objectives.record_replay import FirstPass, Norm, Operand, SecondPass, unit
from anybit.objectives.restore import buffers_kept, full_precision, gradients_set_aside, replaced

NOISE = 32
"""Roundoffs that a gradient entry has gathered: measured between 30 and 60 on networks of 8 to 53 layers."""

CURVATURE = 4
"""What a one-sided difference leaves out, over κ: measured between 1.5 (VGG) and 16 (MobileNetV2)."""

DIGITS = 4
"""Last digits that a shift moves a typical entry by, so that it still moves the large ones."""


@dataclass(frozen=True)
class Request:
    """What a step is asked for: whose gradients, in which norm, how strongly, and `times` that difference."""

    model: nn.Module
    weights: Sequence[nn.Parameter]
    norm: Norm
    weight: float
    activation: float
    times: float = 1.0
    worst_case: bool = False
    by_range: bool = False
    measure: bool = False
    """Look at the activations even where nothing is penalized."""

    @property
    def penalized(self) -> bool:
        """Whether a second pass is needed."""
        return self.weight > 0 or self.activation > 0

    @property
    def divides(self) -> bool:
        """Whether a difference of gradients is divided by a small number, which takes frozen kinks and all digits."""
        return self.penalized and not self.worst_case

    @property
    def watched(self) -> bool:
        """Whether the closure's functions must be seen."""
        return self.measure or self.divides or self.activation > 0


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
    by_tensors = math.sqrt(eps / 2) / math.hypot(*(s.amount / s.size for s in moving))
    by_loss = math.sqrt(NOISE / CURVATURE * eps / 2) * abs(loss) / penalty if penalty else by_tensors
    least = DIGITS * eps * max(s.size / s.amount for s in moving)
    h = max(least, by_loss if by_loss < by_tensors else by_tensors ** (2 / 3) * by_loss ** (1 / 3))
    largest = max(moving, key=lambda s: s.size).amount
    power = round(math.log2(h * largest))
    return float(2.0 ** max(power, math.ceil(math.log2(least * largest))) / largest)


def two_pass(request: Request, closures: Sequence[Closure], scaler: Scaler | None = None, *, side: float = 1.0) -> Step:
    """Add the gradient of loss and penalty to every `.grad`; see the top of this file.

    Several closures are the parts of a batch: each pass goes through all of them. `side=-1` shifts the other way, for a
    difference to both sides.
    """
    parameters = trained(request)
    with gradients_set_aside(parameters) as before, full_precision(request.divides):
        start = restore.random_state()
        losses, firsts = _first_pass(request, closures, scaler)
        seen = _measure(request, losses, parameters, firsts, scaler)
        if request.penalized and seen.usable:
            end = restore.random_state()
            restore.set_random_state(start)
            _second_pass(request, closures, firsts, parameters, seen, scaler, side)
            restore.set_random_state(end)
        restore.add_gradients(parameters, averaged(request.model, before))
    return seen.step


def trained(request: Request) -> list[nn.Parameter]:
    """Return the parameters that a step changes the gradient of."""
    parameters = [p for p in request.model.parameters() if p.requires_grad]
    if request.penalized and not parameters:
        raise PenaltyError(
            f"every parameter of {type(request.model).__name__} is frozen, so a penalty can change nothing; build it "
            "from the module that is trained, or set both strengths to zero"
        )
    return parameters


def _first_pass(
    request: Request, closures: Sequence[Closure], scaler: Scaler | None
) -> tuple[list[Tensor], list[FirstPass]]:
    """Run the closures as they are; return the loss of each and what was recorded."""
    losses, firsts = [], []
    for part, closure in enumerate(closures, start=1):
        first = FirstPass(
            request.norm, directions=request.activation > 0, kinks=request.divides, reach=request.by_range
        )
        averages, watching = synced(request.model, part == len(closures)), first.watching(request.watched)
        with averages, eagerly(request.watched), watching, modes_of(closure):
            loss = base.check_loss(closure())
            base.run_backward(loss, scaler)
        if first.short is not None and request.divides:
            raise PenaltyError(
                f"the model computes in {str(first.short).removeprefix('torch.')}, too few digits for the difference "
                "of two passes; use engine='double-backward', objective='worst-case', or a closure without autocast"
            )
        losses.append(loss.detach())
        firsts.append(first)
    return losses, firsts


@dataclass(frozen=True)
class Seen:
    """What the first pass saw: the step for the log, and the tensors to move with how far each moves per unit of h."""

    step: Step
    usable: bool
    weights: list[nn.Parameter]
    active: list[Operand]
    amounts: list[float]
    h: float


def _measure(
    request: Request,
    losses: list[Tensor],
    parameters: list[nn.Parameter],
    firsts: list[FirstPass],
    scaler: Scaler | None,
) -> Seen:
    """Return what the first pass saw; overflown gradients are an error, or the scaler's business if there is one.

    All numbers come from the device at once: waiting for it once per tensor would cost more than the arithmetic.
    """
    weights = [p for p in request.weights if p.requires_grad and p.grad is not None]
    operands = [Operand(p, reach=request.by_range) for p in weights]
    for operand, weight in zip(operands, weights, strict=True):
        operand.take(_grad(weight), request.norm, directed=False)
    count = len(operands)
    operands += [a for first in firsts for a in first.activations]
    one = torch.ones_like(losses[0].reshape(()))
    table = [column for o in operands for column in (o.norm, o.size, one if o.reach is None else o.reach)]
    ends = base.extremes(p.grad for p in parameters)
    scale = one if scaler is None else scaler.scale(one)
    numbers = base.read_numbers([torch.stack(losses).sum(), scale, *(t for t in table if t is not None), *ends])
    loss, by, rows = numbers[0], numbers[1], numbers[2 : 2 + len(table)]
    norms, sizes, reaches = [n / by for n in rows[::3]], rows[1::3], rows[2::3]
    step = Step(loss, sum(norms[:count]), sum(norms[count:]) if request.watched else None)
    check_finite(loss)
    finite = all(map(math.isfinite, numbers))
    if scaler is None:
        check_finite(loss, step.weight_norm, step.activation_norm or 0.0, *numbers[2 + len(table) :])
    if request.penalized and not ends:
        base.warn_of_another_model()
    amounts = [(request.weight if i < count else request.activation) * r for i, r in enumerate(reaches)]
    h = 1.0 if request.worst_case or not finite else _step(request, operands, amounts, norms, sizes, loss)
    return Seen(step, finite and bool(ends), weights, operands[count:], amounts, h)


def _step(
    request: Request, operands: list[Operand], amounts: list[float], norms: list[float], sizes: list[float], loss: float
) -> float:
    """Return h for tensors that move so far, of such norms and sizes."""
    # A unit vector's entries are one over the root of their number; signs are one.
    spreads = [1.0 if request.norm == "l1" else 1.0 / math.sqrt(max(1, o.numel)) for o in operands]
    rows = zip(operands, amounts, spreads, sizes, norms, strict=True)
    moved = [(o, Shift(a * spread, size, n / spread)) for o, a, spread, size, n in rows if a > 0]
    return step_size([shift for _, shift in moved], loss, max((o.eps for o, _ in moved), default=1.0))


def _second_pass(
    request: Request,
    closures: Sequence[Closure],
    firsts: list[FirstPass],
    parameters: list[nn.Parameter],
    seen: Seen,
    scaler: Scaler | None,
    side: float,
) -> None:
    """Run the closures once more, shifted, and turn the difference into the gradient of loss and penalty."""
    shared = several()  # then DDP may hand out parts of its own buffers, which the next pass overwrites
    old = [p.grad.clone() if shared and p.grad is not None else p.grad for p in parameters]
    h = agreed(seen.h, parameters[0].device) * side
    shifts = [h * amount for amount in seen.amounts]
    moved = seen.weights if request.weight > 0 else []
    values = _shifted([p.data for p in moved], [_grad(p) for p in moved], shifts, request.norm)
    factors = dict(zip(seen.active, shifts[len(seen.weights) :], strict=True)) if request.activation > 0 else {}
    losses = []
    with buffers_kept(request.model), replaced(moved, values), eagerly(request.watched):
        for parameter in parameters:
            parameter.grad = None
        for part, (first, closure) in enumerate(zip(firsts, closures, strict=True), start=1):
            second = SecondPass(first, factors)
            with synced(request.model, part == len(closures)), second.watching(request.watched), modes_of(closure):
                loss = closure()
                base.run_backward(loss, scaler)
            losses.append(loss.detach())
    for parameter, a in zip(parameters, old, strict=True):
        if parameter.grad is None:
            parameter.grad = a
        elif a is not None and h != request.times:
            extrapolate_(parameter.grad, a, h / request.times)
    numbers = base.read_numbers([torch.stack(losses).sum(), *base.extremes(p.grad for p in parameters)])
    if not math.isfinite(numbers[0]):
        raise NonFiniteError(f"the shifted loss is {numbers[0]}; lower the penalty's strength")
    if scaler is None:
        check_finite(0.0, 0.0, 0.0, *numbers)


def _shifted(weights: list[Tensor], grads: list[Tensor], factors: Sequence[float], norm: Norm) -> Iterator[Tensor]:
    """Yield each weight plus its factor times its gradient's direction, one at a time."""
    for weight, grad, factor in zip(weights, grads, factors, strict=False):
        direction = torch.sign(grad) if norm == "l1" else unit(grad)
        yield direction.mul_(factor).add_(weight)


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
