"""Rows on disk, with where they came from, and what they come to over several seeds."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anybit.common.files import read_json, write_json
from anybit.errors import FileError, SpecError
from anybit.spec import FLOAT, Bits, Row

FORMAT = "anybit-rows/1"

WIDTHS = (FLOAT, *range(8, 1, -1))
GRID = tuple(sorted((Bits(w, a) for w in WIDTHS for a in WIDTHS), key=lambda bits: bits.weights != bits.activations))
"""Every pair of widths that a page has a place for, the equal ones first."""

SHARES = frozenset({"accuracy", "top-5 accuracy", "pixel accuracy", "mean IoU", "agreement"})
"""Metrics from 0 to 1, which are shown in percent."""


def lower_is_better(metric: str) -> bool:
    """Tell by its name whether a metric is an error.

    >>> lower_is_better("relative error"), lower_is_better("mean IoU")
    (True, False)
    """
    return metric.lower().endswith(("error", "loss", "distance", "perplexity"))


def shown(value: float, metric: str = "accuracy") -> str:
    r"""Return the value of a metric as a page says it.

    >>> shown(0.5312), shown(0.5312, "mean squared error")
    ('53.1\xa0%', '0.5312')
    """
    return f"{100 * value:.1f}\xa0%" if metric in SHARES else f"{value:.4g}"


@dataclass(frozen=True)
class RowFile:
    """What one experiment measured: the rows, their origin, and what a reader should know about them."""

    title: str
    rows: tuple[Row, ...]
    origin: dict[str, Any]
    notes: tuple[str, ...] = field(default=())
    format: str = FORMAT


def write_rows(path: str | Path, file: RowFile) -> None:
    """Write rows as JSON, at once."""
    values = {
        "format": file.format,
        "title": file.title,
        "notes": list(file.notes),
        "origin": file.origin,
        "rows": [row.to_dict() for row in file.rows],
    }
    write_json(path, values)


def read_rows(path: str | Path) -> RowFile:
    """Read what `write_rows` wrote; an error names the file and the row."""
    what = "rows.json of a run"
    values = read_json(path, what=what)
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise FileError(f"{path}: not in the format {FORMAT!r}; {what} is expected here")
    entries, notes, origin = values.get("rows"), values.get("notes"), values.get("origin")
    if not isinstance(entries, list) or not isinstance(notes, list) or not isinstance(origin, dict):
        raise FileError(f"{path}: rows and notes must be lists, origin a table; {what} is expected here")
    if not entries:
        raise FileError(f"{path}: holds no rows; run the experiment again")
    rows = []
    for index, entry in enumerate(entries):
        try:
            rows.append(_read_row(entry))
        except SpecError as error:
            raise FileError(f"{path}: row {index}: {error}") from error
    return RowFile(str(values.get("title", "untitled")), tuple(rows), origin, tuple(map(str, notes)))


def _read_row(entry: Any) -> Row:
    if not isinstance(entry, dict):
        raise SpecError(f"a row is a table with a label, a seed and so on; got {entry!r}")
    row = Row.from_dict(entry)
    Bits(row.weights, row.activations)
    fine = 0 <= row.accuracy <= 1 if row.metric in SHARES else math.isfinite(row.accuracy)
    if not fine:
        raise SpecError(f"{row.metric} of a row is from 0 to 1, got {row.accuracy}")
    return row


@dataclass(frozen=True)
class Summary:
    """What one label scored at one pair of widths, over seeds."""

    label: str
    bits: Bits
    mean: float
    low: float
    high: float
    seeds: int


def summarize(rows: Iterable[Row]) -> list[Summary]:
    """Return mean, minimum and maximum over seeds, in the order in which labels and widths first appear.

    >>> rows = [Row("a", s, 4, 4, accuracy=a, loss=1.0, n=9) for s, a in enumerate((0.5, 0.75))]
    >>> [(s.mean, s.low, s.high, s.seeds) for s in summarize(rows)]
    [(0.625, 0.5, 0.75, 2)]
    """
    groups: dict[tuple[str, Bits], list[float]] = {}
    for row in rows:
        groups.setdefault((row.label, row.bits), []).append(row.accuracy)
    # Exact, then rounded: a sum of floats over their number may lie a bit outside of what it is the mean of.
    return [
        Summary(label, bits, statistics.mean(values), min(values), max(values), len(values))
        for (label, bits), values in groups.items()
    ]


def told_apart(files: Sequence[RowFile], names: Sequence[str]) -> list[Row]:
    """Return all rows; runs that differ in the seed alone share a label, others of one label are named after `names`.

    A run folder ends in its seed; labels that are the same without it, each with its own seed, are one group.

    >>> def runs(*pairs):
    ...     return [RowFile("", (Row(label, seed, 4, 4, accuracy=0.5, loss=1.0, n=9),), {}) for label, seed in pairs]
    >>> [row.label for row in told_apart(runs(("base-0", 0), ("base-1", 1), ("l1-0", 0)), ["a", "b", "c"])]
    ['base', 'base', 'l1-0']
    >>> [row.label for row in told_apart(runs(("base", 0), ("base", 0)), ["here", "there"])]
    ['base (here)', 'base (there)']
    >>> [row.label for row in told_apart(runs(("net-0", 0), ("net-0", 1), ("net-1", 1)), list("abc"))]
    ['net-0', 'net-0', 'net-1']
    """
    count = Counter(key for file in files for key in {(row.label, row.seed) for row in file.rows})
    rows = [
        dataclasses.replace(row, label=f"{row.label} ({name})") if count[row.label, row.seed] > 1 else row
        for file, name in zip(files, names, strict=True)
        for row in file.rows
    ]
    seeds: dict[str, set[int]] = {}
    for row in rows:
        seeds.setdefault(row.label, set()).add(row.seed)
    stems: dict[str, set[str]] = {}
    for label, own in seeds.items():
        if len(own) == 1:  # what has several seeds is a group already
            stems.setdefault(label.removesuffix(f"-{min(own)}"), set()).add(label)
    shared = {label: stem for stem, labels in stems.items() if len(labels) > 1 for label in labels}
    return [dataclasses.replace(row, label=shared.get(row.label, row.label)) for row in rows]
