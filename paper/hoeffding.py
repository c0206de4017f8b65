"""Appendix A: quantization noise is long, so a small l2 norm of the gradient does not make it harmless.

The errors of n weights, independent and uniform in [-δ/2, δ/2], have squared length n·δ²/12 on average. Each square
lies in [0, δ²/4], so by Hoeffding's inequality

    P(|‖Δ‖₂² - n·δ²/12| ≥ t) ≤ 2·exp(-32·t² / (n·δ⁴)),

and with probability 1 - ε the distance is at most √(n·δ⁴/32 · log(2/ε)). The length itself grows as √n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anybit.errors import SpecError

SIZES = (10, 100, 1_000, 10_000)
"""How many weights the check is made for."""

CHUNK = 2**20
"""Random numbers drawn at a time."""


def radius(n: int, delta: float, epsilon: float) -> float:
    """Return the distance from the mean that ‖Δ‖₂² keeps with probability `1 - ε`.

    >>> radius(32, 1.0, 2 / math.e)
    1.0
    """
    if not 0 < epsilon < 1:
        raise SpecError(f"epsilon is a probability between 0 and 1, got {epsilon}")
    return math.sqrt(n * delta**4 / 32 * math.log(2 / epsilon))


def sample_powers(n: int, delta: float, *, trials: int, generator: torch.Generator) -> Tensor:
    """Return ‖Δ‖₂² of `trials` draws of uniform noise.

    >>> powers = sample_powers(3, 2.0, trials=5, generator=torch.Generator().manual_seed(0))
    >>> powers.shape, bool((powers <= 3).all())
    (torch.Size([5]), True)
    """
    rows = max(1, CHUNK // n)
    parts = []
    for start in range(0, trials, rows):
        shape = (min(rows, trials - start), n)
        noise = torch.rand(shape, dtype=torch.float64, generator=generator).sub_(0.5).mul_(delta)
        parts.append(noise.square_().sum(1))
    return torch.cat(parts)


@dataclass(frozen=True)
class BoundCheck:
    """The bound for n weights beside what random draws did.

    `expected` is n·δ²/12 and `mean` what came out; `radius` is what the bound allows ‖Δ‖₂² to be away from it but for
    one draw in 1/ε, `quantile` what all but one in 1/ε kept to, `outside` the share beyond the radius; `length` is the
    mean of ‖Δ‖₂ / (√n·δ), which goes to 1/√12 = 0.2887.
    """

    n: int
    expected: float
    mean: float
    radius: float
    quantile: float
    outside: float
    length: float


def check_bound(
    sizes: Sequence[int] = SIZES, *, delta: float = 1.0, epsilon: float = 0.05, trials: int = 4_000, seed: int = 0
) -> list[BoundCheck]:
    """Draw uniform noise for each number of weights and hold its squared length against the bound."""
    rows = []
    for n in sizes:
        powers = sample_powers(n, delta, trials=trials, generator=torch.Generator().manual_seed(seed))
        expected, allowed = n * delta**2 / 12, radius(n, delta, epsilon)
        away = (powers - expected).abs()
        outside, length = (away > allowed).double().mean(), (powers.sqrt() / (math.sqrt(n) * delta)).mean()
        quantile = float(away.quantile(1 - epsilon))
        rows.append(BoundCheck(n, expected, float(powers.mean()), allowed, quantile, float(outside), float(length)))
    return rows
