"""What one run brings to the page: its rows and, where they are, insight and training curves beside them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from anybit.report.curves import Curves, read_curves
from anybit.report.insight import Insight, insight_path, read_insight
from anybit.report.rows import RowFile
from anybit.spec import Row

PARTS = "the grid of widths, sizes, layers, gradients and examples"
ALONE = f"These are rows alone: {PARTS} are missing. For a run folder they are added by: anybit sweep RUN"


@dataclass(frozen=True)
class Measured:
    """One file of rows and what was found beside it; `missing` says what was not, and which command adds it."""

    file: RowFile
    insight: Insight | None = None
    curves: Curves | None = None
    missing: tuple[str, ...] = field(default=())

    @property
    def name(self) -> str:
        """What to call it: the label of its insight, or of its first row."""
        return self.insight.label if self.insight else self.file.rows[0].label


def measured(file: RowFile, path: Path) -> Measured:
    """Read what lies beside a file of rows."""
    missing = []
    insight, curves = None, None
    beside = insight_path(path)
    command = f"anybit sweep {path.parent}"
    if not (beside.is_file() or (path.parent / "model.safetensors").is_file()):
        missing.append(ALONE)
    elif not beside.is_file():
        missing.append(f"There is no {beside}: {PARTS} are missing. This adds them: {command}")
    else:
        insight = read_insight(beside)
        ours, theirs = (origin.get("checkpoint_sha256") for origin in (file.origin, insight.origin))
        if ours != theirs:
            insight = None
            missing.append(f"{beside} was measured on another checkpoint than the rows and is left out; run: {command}")
    if (path.parent / "log.jsonl").is_file():
        curves = read_curves(path.parent)
    else:
        missing.append(f"There is no {path.parent / 'log.jsonl'}: training curves are missing. anybit train writes it.")
    return Measured(file, insight, curves, tuple(missing))


def told_apart(runs: Sequence[Measured], names: Sequence[str]) -> list[Measured]:
    """Return the runs, those with the label and seed of another one named after their folder too.

    >>> row = Row("a", 0, 4, 4, accuracy=0.5, loss=1.0, n=9)
    >>> runs = told_apart([Measured(RowFile("", (row,), {}))] * 2, ["here", "there"])
    >>> [run.file.rows[0].label for run in runs]
    ['a (here)', 'a (there)']
    """
    count = Counter(key for run in runs for key in {(row.label, row.seed) for row in run.file.rows})

    def named(label: str, seed: int, name: str) -> str:
        return f"{label} ({name})" if count[label, seed] > 1 else label

    result = []
    for run, name in zip(runs, names, strict=True):
        rows = tuple(dataclasses.replace(row, label=named(row.label, row.seed, name)) for row in run.file.rows)
        found = run.insight
        if found:
            found = dataclasses.replace(found, label=named(found.label, found.seed, name))
        result.append(dataclasses.replace(run, file=dataclasses.replace(run.file, rows=rows), insight=found))
    return result


def group_seeds(files: Sequence[RowFile]) -> dict[str, str]:
    """Return for each label what to call it when runs that differ in the seed alone are one line with a spread.

    A run folder ends in its seed; labels that are the same without it, each with its own seed, are one group.

    >>> rows = [Row(f"base-{s}", s, 4, 4, accuracy=0.5, loss=1.0, n=9) for s in (0, 1)]
    >>> group_seeds([RowFile("", (row,), {}) for row in rows])
    {'base-0': 'base', 'base-1': 'base'}
    >>> group_seeds([RowFile("", (rows[0],), {})])
    {'base-0': 'base-0'}
    """
    stems: dict[str, set[str]] = {}
    labels = {}
    for row in (row for file in files for row in file.rows):
        stem = row.label.removesuffix(f"-{row.seed}")
        stems.setdefault(stem, set()).add(row.label)
        labels[row.label] = stem
    return {label: stem if len(stems[stem]) > 1 else label for label, stem in labels.items()}


def grouped_rows(files: Sequence[RowFile], groups: dict[str, str]) -> list[Row]:
    """Return all rows under the names of their groups."""
    return [dataclasses.replace(row, label=groups[row.label]) for file in files for row in file.rows]
