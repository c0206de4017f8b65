"""Training curves from a run's log: a few hundred points each, the mean over the steps in between."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anybit.common.files import read_json, read_text
from anybit.errors import FileError

POINTS = 500
"""Most points of one curve."""

APART = ("step", "epoch", "lr", "penalized")
"""Entries of a line that are no curve."""


@dataclass(frozen=True)
class Curves:
    """Where each point is, in epochs, and each curve's values there, `None` where no step had one."""

    epochs: tuple[float, ...]
    values: dict[str, tuple[float | None, ...]]


def thinned(values: Sequence[float | None], points: int = POINTS) -> list[float | None]:
    """Return the means of consecutive stretches, at most so many; what is missing does not count.

    >>> thinned([1.0, 3.0, None, 5.0, None, None], points=3)
    [2.0, 5.0, None]
    """
    size = max(1, -(-len(values) // points))
    parts = [[v for v in values[start : start + size] if v is not None] for start in range(0, len(values), size)]
    return [math.fsum(part) / len(part) if part else None for part in parts]


def read_curves(folder: str | Path, *, points: int = POINTS) -> Curves:
    """Read `log.jsonl` and the strengths in `run.json` of a run folder; an error names the line."""
    folder = Path(folder)
    path = folder / "log.jsonl"
    entries = [_entry(path, n, line) for n, line in enumerate(_lines(path), start=1)]
    if not entries:
        raise FileError(f"{path}: holds no step; train it again")
    strengths = _strengths(folder / "run.json")
    for entry in entries:
        entry["penalty"] = _penalty(entry, strengths)
    names = list(dict.fromkeys(name for entry in entries for name in entry if name not in APART))
    each = len(entries) / (int(entries[-1]["epoch"]) + 1)
    epochs = thinned([index / each for index in range(len(entries))], points)
    curves = {name: thinned([_number(entry.get(name)) for entry in entries], points) for name in names}
    kept = {name: tuple(_short(v) for v in curve) for name, curve in curves.items() if any(map(_some, curve))}
    return Curves(tuple(float(f"{e:.6g}") for e in epochs if e is not None), kept)


def _lines(path: Path) -> list[str]:
    return read_text(path, what="log.jsonl of a run").splitlines()


def _entry(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
        if isinstance(entry, dict) and int(entry["epoch"]) >= 0:
            return entry
        problem = "no table with an epoch"
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        problem = repr(error)
    raise FileError(f"{path}: line {number} is no step of a training log ({problem}); train it again")


def _number(value: Any) -> float | None:
    """Return what can be drawn: a finite number that is no truth value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 else None


def _some(value: float | None) -> bool:
    return value is not None


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _strengths(path: Path) -> tuple[float, float] | None:
    """Return λ of the weights' and of the activations' gradient, or `None` where nobody wrote them down."""
    if not path.is_file():
        return None
    values = read_json(path, what="run.json of a run")
    recipe = values.get("recipe") if isinstance(values, dict) else None
    penalty = recipe.get("penalty") if isinstance(recipe, dict) else None
    if not isinstance(penalty, dict):
        return None
    return _number(penalty.get("weight")) or 0.0, _number(penalty.get("activation")) or 0.0


def _penalty(entry: dict[str, Any], strengths: tuple[float, float] | None) -> float | None:
    """Return λ times the norms in a penalized step.

    >>> _penalty({"penalized": True, "weight_norm": 3.0, "activation_norm": 4.0}, (0.5, 0.25))
    2.5
    """
    weight, activation = _number(entry.get("weight_norm")), _number(entry.get("activation_norm"))
    if strengths is None or not any(strengths) or entry.get("penalized") is not True:
        return None
    return None if weight is None or activation is None else strengths[0] * weight + strengths[1] * activation
