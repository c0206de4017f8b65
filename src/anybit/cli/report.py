"""`anybit report runs/mine`: a page to look at."""

from __future__ import annotations

import os
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer

from anybit.cli import options
from anybit.cli.show import progress_bars, say
from anybit.cli.sweep import measured
from anybit.errors import SpecError
from anybit.pages.page import write_report
from anybit.pages.rows import GRID, read_rows


def report(
    runs: Annotated[
        list[str],
        typer.Argument(help="Run folders, or files of rows; several are put side by side. Or one network to measure."),
    ],
    weights: options.Weights = None,
    data: options.Data = None,
    metric: options.Metric = None,
    calibrate: options.Calibrate = None,
    preset: options.Preset = None,
    size: options.Size = None,
    device: options.Device = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The page. Default: report.html beside the rows, of several runs in the folder of them all."),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Turn what `anybit sweep` measured into one self-contained HTML page; the others are compared with the first.

    With --data, one network is measured at every width first.

    Example: anybit report runs/digits-base-0 runs/digits-l1-0 --open
    """
    paths = list(dict.fromkeys(Path(run) / "rows.json" if Path(run).is_dir() else Path(run) for run in runs))
    if data is not None or weights is not None:
        if len(runs) > 1:
            raise SpecError("report measures one network at a time; sweep each with --out, and report the files")
        with options.needs_torch("anybit report"):
            from anybit.task.task import load_task
        asked: dict[str, Any] = {"metric": metric, "size": size, "device": device, "what": "anybit report"}
        task = load_task(runs[0], weights=weights, data=data, **asked)
        with progress_bars() as start:
            files = [measured(task, list(GRID), start, calibrate, options.settings(preset))]
        page, names = out or Path("report.html"), [task.name]
    else:
        files = [read_rows(path) for path in paths]
        page = out or Path(os.path.commonpath([path.parent.resolve() for path in paths])) / "report.html"
        if out is None and len(files) == 1:
            page = paths[0].parent / "report.html"
        names = [str(path.parent if path.name == "rows.json" else path) for path in paths]
    write_report(files, page, names)
    say(page)
    if show:
        webbrowser.open(page.resolve().as_uri())
