"""Progress bars with the time left, on stderr, and none where nobody watches."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from anybit.common.progress import Advance, Start

errors = Console(stderr=True, emoji=False)
"""What is printed here while bars are drawn stands above them."""

_drawn: list[Start] = []


class Count(ProgressColumn):
    """How many steps are done, of how many."""

    def render(self, task: Task) -> Text:
        """Return the text beside the bar."""
        return Text(count(task.completed, task.total), style="progress.download")


@contextlib.contextmanager
def progress_bars() -> Iterator[Start]:
    """Give a function that starts a bar of so many steps and returns what moves it on. No bars outside a terminal.

    Inside another such block the bars join those that are drawn already.
    """
    if _drawn:
        yield _drawn[-1]
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(16),
        Count(Column(no_wrap=True)),
        TimeElapsedColumn(),
        TextColumn("elapsed,", table_column=Column(no_wrap=True)),
        TimeRemainingColumn(),
        TextColumn("left", table_column=Column(no_wrap=True)),
    )
    # Only what would be drawn over is led around the bars: standard output that goes to a file stays in it.
    beside = sys.stdout.isatty()
    with Progress(*columns, console=errors, redirect_stdout=beside, disable=not errors.is_terminal) as progress:

        def start(name: str, total: int) -> Advance:
            task = progress.add_task(name, total=total or None)
            return lambda steps: progress.advance(task, steps)

        _drawn.append(start)
        try:
            yield start
        finally:
            _drawn.remove(start)


def count(done: float, total: float | None) -> str:
    """Return how much is done, in millions where it is bytes or that many steps.

    >>> count(3, 8), count(53_212_000, 138_940_914), count(2, None)
    ('3/8', '53.2/138.9 M', '2')
    """
    if total is None:
        return f"{done:.0f}"
    return f"{done:.0f}/{total:.0f}" if total < 1e6 else f"{done / 1e6:.1f}/{total / 1e6:.1f} M"
