"""`anybit sweep model.safetensors`: one set of weights at many widths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from anybit.cli.needs import needs_torch
from anybit.cli.show import accuracy_table, console, progress_bars
from anybit.errors import CheckpointError, DataError
from anybit.spec import Bits


def sweep(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or the run folder it is in.")],
    widths: Annotated[
        str, typer.Option(help="Pairs of widths, weights and activations, separated by blanks.")
    ] = "FP W8A8 W6A6 W5A5 W4A4 W3A3 W2A2",
    data: Annotated[str | None, typer.Option(help="Another data set than the one it was trained on.")] = None,
    per_channel: Annotated[bool, typer.Option(help="One scale per output channel of a weight.")] = False,
    asymmetric: Annotated[bool, typer.Option(help="Grids fitted to both ends of a range.")] = False,
    helpers: Annotated[
        str, typer.Option(help="Data-free helpers: equalize, bias, sums, clip, several with commas, or all.")
    ] = "",
    ends: Annotated[str, typer.Option(help="First and last layers: same, 8-bit or float.")] = "same",
    plan: Annotated[bool, typer.Option(help="Print every quantization point and its range first.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the rows to this JSON file too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure test accuracy at many widths, quantized without data from batch-norm statistics.

    Example: anybit sweep runs/digits-l1-0 --widths "W8A8 W4A4 W3A8" --helpers all
    """
    pairs = [Bits.parse(word) for word in widths.split()]
    with needs_torch("anybit sweep"):
        from anybit.data import Batches, load_dataset
        from anybit.evaluate.sweep import sweep as run
        from anybit.provenance import origin
        from anybit.quant.prepare import prepare
        from anybit.report.rows import RowFile, summarize, write_rows
        from anybit.train.checkpoint import load_model
    path = checkpoint / "model.safetensors" if checkpoint.is_dir() else checkpoint
    model, about = load_model(path)
    dataset = load_dataset(data or str(about.get("data", "")))
    seed = about.get("seed", 0)
    if not isinstance(seed, int):
        raise CheckpointError(f"{path}: the header has a seed that is no whole number: {seed!r}")
    channels, classes = about["model"]["channels"], about["model"]["classes"]
    if len(dataset.shape) != 3 or dataset.shape[0] != channels or len(dataset.classes) > classes:
        raise DataError(
            f"{data or dataset.name}: inputs of shape {dataset.shape} in {len(dataset.classes)} classes; "
            f"{path} is for images of {channels} channels in {classes} classes"
        )
    net = prepare(
        model,
        dataset.test.x[:2],
        input_range=dataset.input_range,
        per_channel=per_channel,
        symmetric=not asymmetric,
        helpers=helpers.split(",") if helpers else (),
        ends=ends,  # type: ignore[arg-type]  # prepare says what it can be
    )
    if plan and not as_json:
        console.print(str(net.plan), highlight=False, soft_wrap=True)
    with progress_bars() as start:
        advance = start("widths", len(pairs))
        rows = run(
            net,
            Batches(dataset.test, 512),
            widths=pairs,
            label=path.parent.name or path.stem,
            seed=seed,
            on_row=lambda _: advance(1),
        )
    if out is not None:
        write_rows(out, RowFile(f"{path} on {dataset.name}", tuple(rows), origin()))
    if as_json:
        typer.echo(json.dumps([row.to_dict() for row in rows], indent=1))
    else:
        console.print(accuracy_table(f"test accuracy in %, {dataset.name}, n = {rows[0].n}", summarize(rows)))
