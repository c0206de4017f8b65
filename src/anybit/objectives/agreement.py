"""How far the two-pass gradient can be trusted on a given network and batch, measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anybit.errors import AnybitError, PenaltyError
from anybit.objectives.base import Closure, eagerly
from anybit.objectives.double_backward import double_backward
from anybit.objectives.restore import buffers_kept, gradients_set_aside, random_kept, random_state, set_random_state
from anybit.objectives.two_pass import Request, two_pass

COSINE, RATIO = 0.99, 0.05
"""A penalty's gradient within these of the reference trains like it: its angle, and its length."""


@dataclass(frozen=True)
class Agreement:
    """The two-pass gradient of the penalty alone, against a reference: cosine and ratio of lengths."""

    cosine: float
    ratio: float
    reference: str

    @property
    def trusted(self) -> bool:
        """Whether the difference is too small to matter in training."""
        return self.cosine >= COSINE and abs(self.ratio - 1) <= RATIO

    def __str__(self) -> str:
        verdict = "trust it" if self.trusted else (
            "do not trust it: use engine='double-backward', float32 instead of a shorter format, or a larger batch; "
            "kinks that PyTorch does not show (torch.where on a condition, custom kernels) also cause this"
        )  # fmt: skip
        return f"two-pass against {self.reference}: cosine {self.cosine:.5f}, length {self.ratio:.4f} of it; {verdict}"


def measure_agreement(request: Request, closure: Closure) -> Agreement:
    """Compare the engines on one batch and leave everything as it was."""
    if request.worst_case:
        raise PenaltyError("objective='worst-case' is exact by definition; there is nothing to check")
    parameters = [p for p in request.model.parameters() if p.requires_grad]
    start = random_state()

    def gradient(run: Callable[[], object]) -> Tensor:
        """Return the gradient that a run makes, each from the same state."""
        set_random_state(start)
        for parameter in parameters:
            parameter.grad = None
        run()
        return torch.cat([_flat(p) for p in parameters])

    with random_kept(), gradients_set_aside(parameters) as before, buffers_kept(request.model):
        plain = gradient(lambda: _plain(closure))
        fast = gradient(lambda: two_pass(request, [closure])) - plain
        reference = "double backward"
        try:
            slow = gradient(lambda: double_backward(request, closure)) - plain
        except AnybitError:
            raise
        except (RuntimeError, NotImplementedError):
            # Differences to both sides leave out no curvature, so their only error is rounding.
            reference = "a central difference"
            other = gradient(lambda: two_pass(request, [closure], side=-1.0)) - plain
            slow = (fast + other) / 2
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
    lengths = float(fast.norm()), float(slow.norm())
    if lengths[1] == 0:
        return Agreement(1.0 if lengths[0] == 0 else 0.0, 1.0 if lengths[0] == 0 else float("inf"), reference)
    cosine = float(fast @ slow) / (lengths[0] * lengths[1]) if lengths[0] else 0.0
    return Agreement(cosine, lengths[0] / lengths[1], reference)


def _plain(closure: Closure) -> None:
    with eagerly():
        closure().backward()


def _flat(parameter: nn.Parameter) -> Tensor:
    grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return grad.detach().flatten().double()
