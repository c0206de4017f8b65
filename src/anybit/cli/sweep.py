"""`anybit sweep runs/mine`: one set of weights at many widths."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anybit.cli import options
from anybit.cli.show import note_task, progress_bars, say, show_table
from anybit.common.progress import Start
from anybit.pages.rows import GRID, RowFile, summarize, write_rows
from anybit.spec import Bits, widths_of

if TYPE_CHECKING:
    from anybit.task.task import Task


def sweep(
    model: options.Model,
    weights: options.Weights = None,
    data: options.Data = None,
    widths: Annotated[
        str,
        typer.Option(help="Pairs of widths, such as 'FP W8A8 W4A8', or all: every pair of FP and 8 to 2 bits."),
    ] = "all",
    metric: options.Metric = None,
    calibrate: options.Calibrate = None,
    preset: options.Preset = None,
    per_channel: options.PerChannel = None,
    asymmetric: options.Asymmetric = None,
    helpers: options.Helpers = None,
    sensitive: options.Sensitive = None,
    size: options.Size = None,
    device: options.Device = None,
    plan: Annotated[bool, typer.Option(help="Print every quantization point and its range first.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="The JSON file for the rows. Default for a run folder: rows.json in it.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Measure a network on test data at many widths.

    Example: anybit sweep my_model.py:make --weights best.pt --data my_data.py:loaders --widths "W8A8 W4A4"
    """
    chosen = options.settings(preset, per_channel, asymmetric, helpers, sensitive)
    pairs = list(GRID) if widths == "all" else widths_of(widths)
    with progress_bars() as start:
        ready = start("getting ready", 2)
        with options.needs_torch("anybit sweep"):
            from anybit.task.task import load_task
        ready(1)
        asked: dict[str, Any] = {"metric": metric, "size": size, "device": device, "what": "anybit sweep"}
        task = load_task(model, weights=weights, data=data, **asked)
        ready(1)
        file = measured(task, pairs, start, calibrate, chosen, plan=plan and not as_json)
        target = out or (Path(model) / "rows.json" if Path(model).is_dir() else None)
        if target is not None:
            write_rows(target, file)
    rows = file.rows
    if as_json:
        typer.echo(json.dumps([row.to_dict() for row in rows], indent=1))
        return
    shown = [row for row in rows if widths != "all" or target is None or row.weights == row.activations]
    show_table(f"{task.data.name}, n = {rows[0].n}", summarize(shown), metric=rows[0].metric)
    if len(shown) < len(rows):
        say(f"{len(rows)} pairs of widths were measured; anybit report {target} shows them all")
    if target:
        say(target)


def measured(
    task: Task, pairs: list[Bits], start: Start, calibrate: str | None, chosen: dict[str, Any], *, plan: bool = False
) -> RowFile:
    """Return the rows of a task at pairs of widths."""
    from anybit.common.provenance import origin
    from anybit.evaluate.sweep import sweep as run

    test = task.test("anybit sweep")
    ready = start("quantizing", 1)
    net = task.network(calibrate=calibrate, **chosen)
    ready(1)
    note_task(task, net.plan)
    if plan:
        say(net.plan)
    advance = start("widths", len(pairs))
    asked: dict[str, Any] = {"metric": task.metric, "label": task.name, "seed": task.seed}
    rows = run(net, test, widths=pairs, on_row=lambda _: advance(1), **asked)
    made = {**origin(), "settings": {**chosen, "calibrate": calibrate}}
    if task.weights is not None:
        with task.weights.open("rb") as file:
            made["checkpoint_sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
    return RowFile(
        f"{task.weights or task.name} on {task.data.name}", tuple(rows), made, options.said(chosen, calibrate)
    )
