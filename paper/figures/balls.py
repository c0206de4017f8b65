"""Figure 8: the unit balls of l1, l2 and l∞ in the plane, each inside the next."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anybit.errors import SpecError
from paper.figures.drawing import COLORS, LINES, legend_below
from paper.figures.request import Request

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = (5.0, 5.6)

ORDERS = {1.0: "1", 2.0: "2", math.inf: "∞"}
CORNERS = 360


@dataclass(frozen=True)
class Ball:
    """The vectors of norm one, once around."""

    order: str
    x: tuple[float, ...]
    y: tuple[float, ...]


def norm(x: float, y: float, order: float) -> float:
    """Return the l_p norm of a vector in the plane.

    >>> norm(3.0, -4.0, 1), norm(3.0, -4.0, 2), norm(3.0, -4.0, math.inf)
    (7.0, 5.0, 4.0)
    """
    if order < 1:
        raise SpecError(f"a norm has an order of one or more, got {order}")
    if order == math.inf:
        return max(abs(x), abs(y))
    return float((abs(x) ** order + abs(y) ** order) ** (1 / order))


def sphere(order: float, corners: int = CORNERS) -> list[tuple[float, float]]:
    """Return vectors of l_p norm one in `corners` directions, and the first one again.

    >>> [(round(x, 3) + 0.0, round(y, 3) + 0.0) for x, y in sphere(1, 4)]
    [(1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (0.0, -1.0), (1.0, 0.0)]
    """
    found = []
    for index in range(corners + 1):
        angle = 2 * math.pi * (index % corners) / corners
        x, y = math.cos(angle), math.sin(angle)
        length = norm(x, y, order)
        found.append((x / length, y / length))
    return found


def measure(request: Request) -> list[Ball]:
    """Return the three balls; nothing is drawn from runs."""
    advance = request.start("balls", len(ORDERS))
    balls = []
    for order, name in ORDERS.items():
        points = sphere(order)
        balls.append(Ball(name, tuple(x for x, _ in points), tuple(y for _, y in points)))
        advance(1)
    return balls


def draw(figure: Figure, balls: list[Ball]) -> None:
    """Draw the largest ball first, so that each is seen inside the next."""
    axes = figure.subplots()
    for index, ball in reversed(list(enumerate(balls))):
        axes.fill(ball.x, ball.y, color=COLORS[index], alpha=0.15, linewidth=0)
        axes.plot(ball.x, ball.y, color=COLORS[index], linestyle=LINES[index], label=f"‖x‖$_{{{ball.order}}}$ = 1")
    axes.set(aspect="equal", xlabel="$x_1$", ylabel="$x_2$", title="Every unit ball is inside that of l∞")
    axes.set(xlim=(-1.2, 1.2), ylim=(-1.2, 1.2))
    legend_below(axes, len(balls))
