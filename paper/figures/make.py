"""One call per figure: measure, draw, and write picture and numbers side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from anybit.common.files import write_json
from anybit.common.provenance import origin
from anybit.errors import SpecError
from paper.figures import (
    balls,
    boundaries,
    divergence,
    first_order,
    gradient_norms,
    noise,
    progression,
    sweeps,
)
from paper.figures.drawing import canvas, save
from paper.figures.request import Request
from paper.runs import default_runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = "anybit-figure/1"


@dataclass(frozen=True)
class Kind:
    """A figure of the paper: how it is measured and drawn, and which runs it takes when none are named."""

    name: str
    measure: Callable[[Request], Sequence[Any]]
    draw: Callable[[Figure, Any], None]
    size: tuple[float, float]
    takes: Literal["a pair", "every seed", "nothing"] = "a pair"
    examples: int | None = None
    """Test examples when not told otherwise, so that a small network takes a minute or two; `None` for all."""


FIGURES = {
    1: Kind("gradient-norms", gradient_norms.measure, gradient_norms.draw, gradient_norms.SIZE),
    2: Kind("divergence", divergence.measure, divergence.draw, divergence.SIZE, examples=5_000),
    3: Kind("first-order", first_order.measure, first_order.draw, first_order.SIZE, examples=5_000),
    4: Kind("sweeps", sweeps.measure, sweeps.draw, sweeps.SIZE, takes="every seed", examples=2_000),
    5: Kind("boundaries", boundaries.measure, boundaries.draw, (12.0, 7.0), examples=2_000),
    6: Kind("noise", noise.measure, noise.draw, noise.SIZE),
    7: Kind("progression", progression.measure, progression.draw, progression.SIZE),
    8: Kind("balls", balls.measure, balls.draw, balls.SIZE, takes="nothing"),
}
"""The figures by their number in the paper: add one here."""


def make_figure(number: int, out: str | Path, request: Request) -> list[Path]:
    """Draw a figure into a folder as `figure-N-NAME.png`, `.svg` and `.json`; return the three paths."""
    kind = kind_of(number)
    if kind.takes == "nothing":
        request = dataclasses.replace(request, paths=())
    elif not request.paths:
        request = dataclasses.replace(request, paths=tuple(default_runs(seeds=kind.takes == "every seed")))
    if request.examples is None:
        request = dataclasses.replace(request, examples=kind.examples)
    stem = Path(out) / f"figure-{number}-{kind.name}"
    with canvas(*kind.size) as figure:
        data = kind.measure(request)
        kind.draw(figure, data)
        paths = save(figure, stem)
    numbers = stem.with_suffix(".json")
    write_json(
        numbers,
        {
            "format": FORMAT,
            "figure": number,
            "name": kind.name,
            "seed": request.seed,
            "bits": str(request.bits),
            "examples": request.examples,
            "runs": [str(path) for path in request.paths],
            "data": [dataclasses.asdict(entry) for entry in data],
            "origin": origin(),
        },
    )
    return [*paths, numbers]


def kind_of(number: int) -> Kind:
    """Return the figure of that number.

    >>> kind_of(8).name
    'balls'
    """
    if number not in FIGURES:
        raise SpecError(f"the paper has figures {min(FIGURES)} to {max(FIGURES)}, got {number}")
    return FIGURES[number]
