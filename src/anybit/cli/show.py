"""What the verbs print: sentences, tables and progress bars, quiet where nobody watches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from anybit.common.bars import errors, progress_bars
from anybit.pages.rows import SHARES, Summary, shown

if TYPE_CHECKING:
    from anybit.plan.points import Plan
    from anybit.task.task import Task

__all__ = ["console", "errors", "note", "note_task", "progress_bars", "say", "show_table"]

console = Console(emoji=False)
"""A file may be called :boom:, and is then shown so."""


def say(text: object) -> None:
    """Print a line as it is, however long."""
    console.print(str(text), highlight=False, markup=False, soft_wrap=True)


def note(text: str) -> None:
    """Print a line on stderr, above the bars."""
    errors.print(text, highlight=False, markup=False, soft_wrap=True)


def note_task(task: Task, plan: Plan) -> None:
    """Say what a user may not expect: weights that no file gave, and widths at which all weights keep 8 bits."""
    if task.weights is None:
        note(f"{task.name}: with the weights that it comes with; --weights FILE puts in others")
    if plan.weights and all(weight.floor >= 8 for weight in plan.weights):
        reasons = ", ".join(dict.fromkeys(weight.because for weight in plan.weights))
        note(f"every weight keeps 8 bits or more ({reasons}); --sensitive same makes all of them as narrow as asked")


def show_table(
    about: str, summaries: Iterable[Summary], *, gain: tuple[str, str] | None = None, metric: str = "accuracy"
) -> None:
    """Print a metric by width, one column per label; `gain=(from, to)` adds the difference in points."""
    found = {(s.label, s.bits): s for s in summaries}
    labels = list(dict.fromkeys(label for label, _ in found))
    title = f"test {metric}{' in %' * (metric in SHARES)}, {about}"
    table = Table()
    table.add_column("widths")
    for head in [*labels, "gain"] if gain else labels:
        table.add_column(head, justify="right")
    for bits in dict.fromkeys(bits for _, bits in found):
        cells = [_cell(found.get((label, bits)), metric) for label in labels]
        if gain is not None:
            before, after = found.get((gain[0], bits)), found.get((gain[1], bits))
            cells.append(f"{100 * (after.mean - before.mean):+.1f}" if before and after else "")
        table.add_row(str(bits), *cells)
    console.print(title, style="bold", highlight=False, markup=False, soft_wrap=True)
    console.print(table)


def _cell(summary: Summary | None, metric: str) -> str:
    if summary is None:
        return ""
    mean, low, high = (shown(v, metric).removesuffix("\xa0%") for v in (summary.mean, summary.low, summary.high))
    return f"{mean} ({low}-{high})" if summary.seeds > 1 else mean
