"""`anybit report rows.json`: a page to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anybit.cli.show import console
from anybit.report.page import write_report
from anybit.report.rows import read_rows


def report(
    rows: Annotated[Path, typer.Argument(help="A rows.json, or the run folder it is in.")],
    out: Annotated[Path | None, typer.Option(help="The page. Default: report.html beside the rows.")] = None,
) -> None:
    """Turn measured rows into one self-contained HTML page.

    Example: anybit report runs/demo
    """
    path = rows / "rows.json" if rows.is_dir() else rows
    page = out or path.parent / "report.html"
    write_report(read_rows(path), page)
    console.print(str(page), highlight=False, soft_wrap=True)
