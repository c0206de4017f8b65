"""Appendix A: quantization noise is long, so a small l2 norm of the gradient does not make it harmless.

The errors of n weights, independent and uniform in [-δ/2, δ/2], have squared length n·δ²/12 on average. Each square
lies in [0, δ²/4], so by Hoeffding's inequality

    P(|‖Δ‖₂² - n·δ²/12| ≥ t) ≤ 2·exp(-32·t² / (n·δ⁴)),

and with probability 1 - ε the distance is at most √(n·δ⁴/32 · log(2/ε)). The length itself grows as √n.
For noise of another distribution on the same interval, `n·E[x²]` takes the place of `n·δ²/12`; the rest stays.
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


def expected_power(n: int, delta: float) -> float:
    """Return the mean of ‖Δ‖₂², `n·δ²/12`.

    >>> expected_power(12, 2.0)
    4.0
    """
    _check(n=n, delta=delta)
    return n * delta**2 / 12


def tail_bound(n: int, delta: float, t: float) -> float:
    """Return the most that the probability of `|‖Δ‖₂² - n·δ²/12| ≥ t` can be, `2·exp(-32·t² / (n·δ⁴))`.

    >>> tail_bound(32, 1.0, 1.0) == 2 * math.exp(-1), tail_bound(32, 1.0, 0.0)
    (True, 1.0)
    """
    _check(n=n, delta=delta)
    return min(1.0, 2 * math.exp(-32 * t**2 / (n * delta**4)))


def radius(n: int, delta: float, epsilon: float) -> float:
    """Return the distance from the mean that ‖Δ‖₂² keeps with probability `1 - ε`.

    >>> radius(32, 1.0, 2 / math.e)
    1.0
    """
    _check(n=n, delta=delta)
    if not 0 < epsilon < 1:
        raise SpecError(f"epsilon is a probability between 0 and 1, got {epsilon}")
    return math.sqrt(n * delta**4 / 32 * math.log(2 / epsilon))


def sample_powers(n: int, delta: float, *, trials: int, generator: torch.Generator) -> Tensor:
    """Return ‖Δ‖₂² of `trials` draws of uniform noise.

    >>> powers = sample_powers(3, 2.0, trials=5, generator=torch.Generator().manual_seed(0))
    >>> powers.shape, bool((powers <= 3).all())
    (torch.Size([5]), True)
    """
    _check(n=n, delta=delta, trials=trials)
    rows = max(1, CHUNK // n)
    parts = []
    for start in range(0, trials, rows):
        shape = (min(rows, trials - start), n)
        noise = torch.rand(shape, dtype=torch.float64, generator=generator).sub_(0.5).mul_(delta)
        parts.append(noise.square_().sum(1))
    return torch.cat(parts)


@dataclass(frozen=True)
class BoundCheck:
    """The bound for n weights beside what random draws did."""

    n: int
    expected: float
    """n·δ²/12."""
    mean: float
    """Mean of ‖Δ‖₂² over the draws."""
    radius: float
    """What the bound allows ‖Δ‖₂² to be away from its mean, but for one draw in 1/ε."""
    quantile: float
    """What all but one draw in 1/ε kept to."""
    outside: float
    """Share of draws beyond the radius; the bound promises at most ε."""
    length: float
    """Mean of ‖Δ‖₂ / (√n·δ), which goes to 1/√12 = 0.2887."""


def check_bound(
    sizes: Sequence[int] = SIZES, *, delta: float = 1.0, epsilon: float = 0.05, trials: int = 4_000, seed: int = 0
) -> list[BoundCheck]:
    """Draw uniform noise for each number of weights and hold its squared length against the bound."""
    rows = []
    for n in sizes:
        powers = sample_powers(n, delta, trials=trials, generator=torch.Generator().manual_seed(seed))
        expected, allowed = expected_power(n, delta), radius(n, delta, epsilon)
        away = (powers - expected).abs()
        rows.append(
            BoundCheck(
                n=n,
                expected=expected,
                mean=float(powers.mean()),
                radius=allowed,
                quantile=float(away.quantile(1 - epsilon)),
                outside=float((away > allowed).double().mean()),
                length=float((powers.sqrt() / (math.sqrt(n) * delta)).mean()),
            )
        )
    return rows


def _check(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise SpecError(f"{name} must be above zero, got {value}")
