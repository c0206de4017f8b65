"""`anybit report runs/mine`: a page to look at."""

from __future__ import annotations

import os
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from anybit.cli.show import console
from anybit.pages.page import write_report
from anybit.pages.rows import read_rows


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or files of rows; several are put side by side.")],
    out: Annotated[
        Path | None,
        typer.Option(help="The page. Default: report.html beside the rows, of several runs in the folder of them all."),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Turn what `anybit sweep` measured into one self-contained HTML page; the others are compared with the first.

    Example: anybit report runs/digits-base-0 runs/digits-l1-0 --open
    """
    paths = list(dict.fromkeys(path / "rows.json" if path.is_dir() else path for path in runs))
    files = [read_rows(path) for path in paths]
    page = out or Path(os.path.commonpath([path.parent.resolve() for path in paths])) / "report.html"
    if out is None and len(files) == 1:
        page = paths[0].parent / "report.html"
    write_report(files, page, [str(path.parent if path.name == "rows.json" else path) for path in paths])
    console.print(str(page), highlight=False, soft_wrap=True)
    if show:
        webbrowser.open(page.resolve().as_uri())
