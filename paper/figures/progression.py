"""Figure 7: the penalty over training, in runs that are never penalized and in runs where it is switched on late.

The numbers come from `log.jsonl`. A run that starts from the checkpoint of another is drawn as its continuation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anybit.common.files import read_json, read_text
from anybit.errors import FileError, SpecError
from paper.figures.drawing import COLORS, LINES, panels, plain_log
from paper.figures.request import Request
from paper.runs import recipe_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = (9.6, 4.4)

POINTS = 150
"""Most points of one curve; each is the mean over some steps."""

NEVER, LATE = "never penalized", "penalty switched on"


@dataclass(frozen=True)
class Curve:
    """The sum of the gradient's norms over weights and activations, without λ, over the epochs of training.

    `low` and `high` are the smallest and largest step behind each point; `on` is the epoch of the first penalized one.
    """

    label: str
    epochs: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    on: float | None


@dataclass(frozen=True)
class Logged:
    """One step of a log: when, in epochs; the penalty; whether it was in force."""

    epoch: float
    penalty: float
    penalized: bool


def read_log(path: Path) -> tuple[list[Logged], int]:
    """Return the steps of a log that looked at both norms, and how many epochs it has; an error names the line."""
    entries = []
    for number, line in enumerate(read_text(path, what="log.jsonl of a run").splitlines(), start=1):
        try:
            entry = json.loads(line)
            norms = (entry["weight_norm"], entry["activation_norm"])  # nothing where a step did not look
            penalty = math.nan if None in norms else float(norms[0]) + float(norms[1])
            entries.append((int(entry["step"]), int(entry["epoch"]), penalty, bool(entry["penalized"])))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FileError(f"{path}: line {number} is no step of a training log ({error}); train it again") from error
    epochs = entries[-1][1] + 1 if entries else 1
    steps = [Logged(step * epochs / len(entries), value, on) for step, _, value, on in entries if math.isfinite(value)]
    return steps, epochs


def whole_log(folder: Path) -> list[Logged]:
    """Return the log of a run, behind that of the run whose checkpoint it started from, as far as those are there."""
    parts, seen, epochs = [], set(), 0
    current: Path | None = folder
    while current is not None and current.resolve() not in seen:
        seen.add(current.resolve())
        parts.append(read_log(current / "log.jsonl"))
        init = recipe_of(current).get("init")
        before = Path(init).parent if isinstance(init, str) else None
        current = before if before is not None and (before / "log.jsonl").is_file() else None
    steps: list[Logged] = []
    for part, length in reversed(parts):
        steps += [Logged(epochs + step.epoch, step.penalty, step.penalized) for step in part]
        epochs += length
    if not steps:
        raise FileError(f"{folder / 'log.jsonl'}: no step has the norms over weights and activations; train it again")
    return steps


def recipe_of(folder: Path) -> dict[str, Any]:
    """Return the recipe in `run.json`."""
    values = read_json(folder / "run.json", what="run.json of a run")
    if not isinstance(values, dict) or not isinstance(values.get("recipe"), dict):
        raise FileError(f"{folder / 'run.json'}: holds no recipe; a run folder is expected here")
    recipe: dict[str, Any] = values["recipe"]
    return recipe


def thin_out(label: str, steps: Sequence[Logged], *, points: int = POINTS) -> Curve:
    """Return a curve of at most so many points, each the mean over as many steps.

    >>> steps = [Logged(0.5, 4.0, False), Logged(1.0, 2.0, False), Logged(1.5, 1.0, True), Logged(2.0, 1.0, True)]
    >>> curve = thin_out("a", steps, points=2)
    >>> curve.mean, curve.low, curve.high, curve.on
    ((3.0, 1.0), (2.0, 1.0), (4.0, 1.0), 1.5)
    """
    size = -(-len(steps) // points)
    parts = [steps[i : i + size] for i in range(0, len(steps), size)]
    values = [[step.penalty for step in part] for part in parts]
    return Curve(
        label,
        tuple(sum(step.epoch for step in part) / len(part) for part in parts),
        tuple(sum(part) / len(part) for part in values),
        tuple(min(part) for part in values),
        tuple(max(part) for part in values),
        next((step.epoch for step in steps if step.penalized), None),
    )


def measure(request: Request) -> list[Curve]:
    """Read the logs of the runs."""
    if not request.paths:
        raise SpecError("this figure is drawn from run folders; pass --runs DIR, once for each")
    return [thin_out(recipe_label(recipe_of(path)), whole_log(path)) for path in request.paths]


def draw(figure: Figure, curves: list[Curve]) -> None:
    """Draw runs without penalty on the left and the others on the right, on one logarithmic scale."""
    groups = {
        NEVER: [curve for curve in curves if curve.on is None],
        LATE: [curve for curve in curves if curve.on is not None],
    }
    shown = {title: group for title, group in groups.items() if group}
    all_axes = panels(figure, len(shown), sharex=True, sharey=True)
    for axes, (title, group) in zip(all_axes, shown.items(), strict=True):
        for index, curve in enumerate(group):
            color = COLORS[index % len(COLORS)]
            axes.fill_between(curve.epochs, curve.low, curve.high, color=color, alpha=0.2, linewidth=0)
            axes.plot(curve.epochs, curve.mean, color=color, linestyle=LINES[index % len(LINES)], label=curve.label)
            if curve.on is not None:
                axes.axvline(curve.on, color="black", linestyle=":", linewidth=1.2)
        axes.set(title=title, xlabel="epoch")
        plain_log(axes, "y")
        axes.legend(loc="upper right")  # looking for the best place may take long, and then warns
    all_axes[0].set_ylabel("l1 norm of the gradient over\nweights and activations")
