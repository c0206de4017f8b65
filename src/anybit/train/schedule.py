"""How the learning rate moves over a run."""

from __future__ import annotations

import math


def learning_rate(step: int, *, steps: int, peak: float, warmup: int = 0, shape: str = "cosine") -> float:
    """Return the rate of one step: a straight rise over `warmup` steps, then a half cosine to zero, or level.

    >>> [round(learning_rate(i, steps=5, peak=1.0), 2) for i in range(5)]
    [1.0, 0.9, 0.65, 0.35, 0.1]
    >>> [learning_rate(i, steps=4, peak=1.0, warmup=2, shape="constant") for i in range(4)]
    [0.5, 1.0, 1.0, 1.0]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if shape == "constant":
        return peak
    done = (step - warmup) / max(1, steps - warmup)
    return peak * 0.5 * (1 + math.cos(math.pi * done))
