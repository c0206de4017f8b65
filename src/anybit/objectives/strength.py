"""How strong an objective may be: the user says what floating point may lose, a multiplier does the rest.

Beside the loss F a second objective Q is wanted small, and F may rise by a fraction ε over what it would be alone:

    minimize Q(θ)  subject to  F(θ) <= (1 + ε) F*        with the Lagrangian  F(θ) + s Q(θ),  s = 1 / multiplier

*What is safe without looking.* Let θ* minimize F alone and θ_s minimize `F + sQ`. Then
`F(θ_s) + s Q(θ_s) <= F(θ*) + s Q(θ*)`, so

    F(θ_s) - F* <= s (Q(θ*) - Q(θ_s)) <= s Q(θ*)

and a strength with `s Q(θ*) = ε F*` keeps the bound whatever the functions are. That is the least strength.

*What is found by looking.* Mostly F rises far less. Dual ascent follows the constraint itself: the strength rises while
F is within its bound and falls while it is not, by a step in its logarithm that is proportional to how far F is from
the bound, in units of ε F. It rests where `F = (1 + ε) F*`, where θ_s solves the constrained problem, or at `most`.

For classes the user's other word is accuracy. An example that turns wrong costs about what guessing among C classes
does, ln C; so p points of accuracy are p/100 · ln C of cross-entropy, and F may rise by that if it is more than ε F*.
(A network that has learned its training data by heart has a loss of nearly zero, of which a hundredth is nothing.)

F is seen through batches, so it is averaged over the last `AVERAGED` of them, and what that average cannot tell from
chance (two of its standard errors) is not held against Q. F* cannot be seen while Q is there: the lowest average of the
run itself stands for it, that of the first `LOOK` steps among them, in which the strength is zero. Of these the first
half does not count: fine-tuning begins with a learning rate that throws a trained network off by far more than Q does.
"""

from __future__ import annotations

import math
from typing import Literal

from anybit.errors import SpecError

Strength = float | Literal["auto"]

FAR = 1e300
"""Larger than any loss; a finite number, which every format stores."""
LOOK = 100
"""Steps at the start that only look at how large loss and penalties are."""
AVERAGED = 100
"""Steps that the average of the loss reaches back."""
STEP = 0.02
"""Largest change of the strength's logarithm in a step: tenfold in 115 steps."""
CHANCE = 2.0
"""Standard errors of the average that count as chance."""


class Auto:
    """A strength that follows the loss; see the top of this file.

    Args:
        start: The strength after the first steps, in which it is zero.
        most: The largest strength.
        loss: The part of the loss in floating point that may be lost.

    Attributes:
        nats: What the loss may rise by in any case.

    >>> auto = Auto(start=0.1, most=1.0, loss=0.01)
    >>> auto.value
    0.0
    >>> for _ in range(1000):
    ...     auto.update(loss=1.0, value=2.0)
    >>> auto.value
    1.0
    >>> for _ in range(1000):
    ...     auto.update(loss=1.5, value=2.0)
    >>> auto.value == auto.least == 0.01 * 1.0 / 2.0
    True
    """

    def __init__(self, *, start: float, most: float, loss: float = 0.01) -> None:
        if not 0 < loss < math.inf:
            raise SpecError(f"what floating point may lose is a part of the loss above zero, got {loss!r}")
        self.start, self.most, self.loss = start, most, loss
        self.value = self.least = self.nats = 0.0
        self._steps = 0
        self._mean = self._square = 0.0
        self._lowest = FAR

    def update(self, *, loss: float, value: float) -> None:
        """Take note of one step: the loss in floating point, and the objective's own value without its strength.

        The value is not needed in the first steps.
        """
        self._steps += 1
        seen = self._steps if self._steps <= LOOK // 2 else self._steps - LOOK // 2
        part = max(1 / seen, 1 / AVERAGED)  # a plain mean at first, then the last ones count most
        self._mean += part * (loss - self._mean)
        self._square += part * (loss**2 - self._square)
        if self._steps < LOOK:
            return
        self._lowest = min(self._lowest, self._mean)
        if self._steps == LOOK:
            self.value = self.start
            return
        unit = max(self.loss * abs(self._lowest), self.nats)
        if not self.least and value > 0:
            self.least = min(self.most, unit / value)
        spread = math.sqrt(max(0.0, self._square - self._mean**2) / min(seen, 2 * AVERAGED))
        room = self._lowest + unit + CHANCE * spread - self._mean
        step = STEP * min(1.0, max(-1.0, room / unit)) if unit else STEP
        self.value = min(self.most, max(self.least, self.value * math.exp(step)))

    def state_dict(self) -> dict[str, float]:
        """Return what a resumed run needs, as plain numbers."""
        return {name: getattr(self, place) for name, place in _STATE.items()}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from what `state_dict` returned."""
        for name, place in _STATE.items():
            setattr(self, place, type(getattr(self, place))(state[name]))


_STATE = {
    "strength": "value", "least": "least", "followed": "_steps", "mean": "_mean", "square": "_square",
    "lowest": "_lowest",
}  # fmt: skip


class Shares:
    """Strengths of penalties P that follow the loss: each penalty's share of it is the same, `λ P₀ = s L₀`.

    Loss and penalties are those of the first `LOOK` steps; s starts where nothing can be lost.

    >>> shares = Shares(2, loss=0.01)
    >>> for _ in range(LOOK):
    ...     shares.update(4.0, [2.0, 1000.0])
    >>> shares.strengths  # 1 % of 4, half of it from either
    (0.01, 2e-05)
    """

    def __init__(self, count: int, *, loss: float = 0.01) -> None:
        self.auto = Auto(start=loss, most=1.0, loss=loss)
        self._steps = 0
        self._loss, self._values = 0.0, [0.0] * count

    @property
    def strengths(self) -> tuple[float, ...]:
        """What to multiply each penalty by."""
        part = self.auto.value * abs(self._loss) / max(1, len(self._values))
        return tuple(part / value if value > 0 else 0.0 for value in self._values)

    def update(self, loss: float, values: list[float]) -> None:
        """Take note of one step."""
        if self._steps < LOOK:
            self._steps += 1
            self._loss += (loss - self._loss) / self._steps
            self._values = [old + (new - old) / self._steps for old, new in zip(self._values, values, strict=True)]
        shares = [new / old for new, old in zip(values, self._values, strict=True) if old > 0]
        self.auto.update(loss=loss, value=abs(self._loss) * sum(shares) / max(1, len(shares)))

    def state_dict(self) -> dict[str, float]:
        """Return what a resumed run needs, as plain numbers."""
        values = {f"value {i}": value for i, value in enumerate(self._values)}
        return {"looked": self._steps, "loss": self._loss, **values, **self.auto.state_dict()}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from what `state_dict` returned."""
        self._steps, self._loss = int(state["looked"]), float(state["loss"])
        self._values = [float(state[f"value {i}"]) for i in range(len(self._values))]
        self.auto.load_state_dict(state)


def checked(name: str, strength: Strength) -> Strength:
    """Return a strength that makes sense."""
    if strength == "auto" or (isinstance(strength, int | float) and 0 <= strength < math.inf):
        return strength
    raise SpecError(f"{name} is a strength of zero or more, or 'auto'; got {strength!r}")
