"""Figure 8: the unit balls of l1, l2 and l∞ in the plane, each inside the next."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paper.figures.drawing import COLORS, LINES, legend_below
from paper.figures.request import Request, floats

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = (5.0, 5.6)
ORDERS = {1.0: "1", 2.0: "2", math.inf: "∞"}


@dataclass(frozen=True)
class Ball:
    """The vectors of norm one, once around."""

    order: str
    x: tuple[float, ...]
    y: tuple[float, ...]


def sphere(order: float, corners: int = 360) -> torch.Tensor:
    """Return vectors of l_p norm one in `corners` directions, and the first one again.

    >>> sphere(1, 4).round(decimals=3).abs().tolist()
    [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
    """
    angles = 2 * math.pi * (torch.arange(corners + 1, dtype=torch.float64) % corners) / corners
    directions = torch.stack([angles.cos(), angles.sin()], 1)
    lengths: torch.Tensor = torch.linalg.vector_norm(directions, order, dim=1, keepdim=True)
    return directions / lengths


def measure(request: Request) -> list[Ball]:
    """Return the three balls; nothing is drawn from runs."""
    return [Ball(name, *(floats(column) for column in sphere(order).T)) for order, name in ORDERS.items()]


def draw(figure: Figure, balls: list[Ball]) -> None:
    """Draw the largest ball first, so that each is seen inside the next."""
    axes = figure.subplots()
    for index, ball in reversed(list(enumerate(balls))):
        axes.fill(ball.x, ball.y, color=COLORS[index], alpha=0.15, linewidth=0)
        axes.plot(ball.x, ball.y, color=COLORS[index], linestyle=LINES[index], label=f"‖x‖$_{{{ball.order}}}$ = 1")
    axes.set(aspect="equal", xlabel="$x_1$", ylabel="$x_2$", title="Every unit ball is inside that of l∞")
    axes.set(xlim=(-1.2, 1.2), ylim=(-1.2, 1.2))
    legend_below(axes, len(balls))
