"""When a penalty is on: set `penalty.factor` to these at the start of an epoch."""

from __future__ import annotations

from anybit.errors import SpecError


def last_epochs(epoch: int, *, epochs: int, last: int = 15, ramp: int = 0) -> float:
    """Return 0 for the first epochs and 1 for the last ones, as in the paper; `ramp` epochs lead up to full strength.

    >>> [last_epochs(e, epochs=6, last=3) for e in range(6)]
    [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    >>> [last_epochs(e, epochs=6, last=4, ramp=2) for e in range(6)]
    [0.0, 0.0, 0.3333333333333333, 0.6666666666666666, 1.0, 1.0]
    """
    if epochs < 1 or last < 0 or ramp < 0 or not epoch >= 0:
        raise SpecError(
            f"epochs count from zero and lengths are not negative; got {epoch=}, {epochs=}, {last=}, {ramp=}"
        )
    into = epoch - (epochs - min(last, epochs))
    if into < 0:
        return 0.0
    return min(1.0, (into + 1) / (ramp + 1))
