"""`anybit sweep runs/mine`: one set of weights at many widths."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anybit.cli.needs import needs_torch
from anybit.cli.show import accuracy_table, console, progress_bars
from anybit.errors import CheckpointError, DataError
from anybit.pages.rows import GRID
from anybit.spec import Bits

if TYPE_CHECKING:
    from anybit.common.progress import Advance
    from anybit.data import Dataset
    from anybit.simulate.network import QuantizedNetwork


def sweep(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or the run folder it is in.")],
    widths: Annotated[
        str,
        typer.Option(help="Pairs of widths, such as 'FP W8A8 W4A8', or all: every pair of FP and 8 to 2 bits."),
    ] = "all",
    data: Annotated[str | None, typer.Option(help="Another data set than the one it was trained on.")] = None,
    per_channel: Annotated[bool, typer.Option(help="One scale per output channel of a weight.")] = False,
    asymmetric: Annotated[bool, typer.Option(help="Grids fitted to both ends of a range.")] = False,
    helpers: Annotated[
        str, typer.Option(help="Data-free helpers: equalize, bias, sums, clip, several with commas, or all.")
    ] = "",
    ends: Annotated[str, typer.Option(help="First and last layers: same, 8-bit or float.")] = "same",
    plan: Annotated[bool, typer.Option(help="Print every quantization point and its range first.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="The JSON file for the rows. Default for a run folder: rows.json in it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure test accuracy at many widths, quantized without data from batch-norm statistics.

    Example: anybit sweep runs/digits-l1-0 --widths "W8A8 W4A4 W3A8" --helpers all
    """
    pairs = list(GRID) if widths == "all" else [Bits.parse(word) for word in widths.split()]
    with progress_bars() as start:
        ready = start("getting ready", 3)
        with needs_torch("anybit sweep"):
            from anybit.common.provenance import origin
            from anybit.data import Batches
            from anybit.evaluate.sweep import sweep as run
            from anybit.pages.rows import RowFile, summarize, write_rows
        ready(1)
        path = checkpoint / "model.safetensors" if checkpoint.is_dir() else checkpoint
        options = {"per_channel": per_channel, "symmetric": not asymmetric, "ends": ends}
        net, dataset, seed = _subject(path, data, {**options, "helpers": helpers.replace(",", " ").split()}, ready)
        if plan and not as_json:
            console.print(str(net.plan), highlight=False, soft_wrap=True)
        name, test = dataset.name, Batches(dataset.test.channels_last(), 128)
        target = out or (checkpoint / "rows.json" if checkpoint.is_dir() else None)
        made = {**origin(), "checkpoint_sha256": _digest(path), "settings": {**options, "helpers": helpers}}
        advance = start("widths", len(pairs))
        label = path.resolve().parent.name or path.stem
        rows = run(net, test, widths=pairs, label=label, seed=seed, on_row=lambda _: advance(1))
        if target is not None:
            write_rows(target, RowFile(f"{path} on {name}", tuple(rows), made, _notes(made["settings"])))
    if as_json:
        typer.echo(json.dumps([row.to_dict() for row in rows], indent=1))
        return
    shown = [row for row in rows if widths != "all" or target is None or row.weights == row.activations]
    console.print(accuracy_table(f"test accuracy in %, {name}, n = {rows[0].n}", summarize(shown)))
    if len(shown) < len(rows):
        text = f"{len(rows)} pairs of widths were measured; anybit report {checkpoint} shows them all"
        console.print(text, highlight=False, soft_wrap=True)
    if target:
        console.print(str(target), highlight=False, soft_wrap=True)


def _subject(
    path: Path, data: str | None, options: dict[str, Any], ready: Advance
) -> tuple[QuantizedNetwork, Dataset, int]:
    """Load a checkpoint with its data and give it its width switch: two steps."""
    from anybit.data import load_dataset
    from anybit.simulate.prepare import prepare
    from anybit.train.checkpoint import load_model

    model, about = load_model(path)
    dataset = load_dataset(data or str(about.get("data", "")), code=data is not None)
    seed = about.get("seed", 0)
    if not isinstance(seed, int):
        raise CheckpointError(f"{path}: the header has a seed that is no whole number: {seed!r}")
    channels, classes = about["model"]["channels"], about["model"]["classes"]
    if len(dataset.shape) != 3 or dataset.shape[0] != channels or len(dataset.classes) > classes:
        raise DataError(
            f"{data or dataset.name}: inputs of shape {dataset.shape} in {len(dataset.classes)} classes; "
            f"{path} is for images of {channels} channels in {classes} classes"
        )
    ready(1)
    net = prepare(model, dataset.test.x[:2], input_range=dataset.input_range, **options)
    ready(1)
    return net, dataset, seed


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _notes(settings: dict[str, Any]) -> tuple[str, ...]:
    """Say in words what differs from the paper's settings.

    >>> _notes({"per_channel": True, "symmetric": True, "ends": "same", "helpers": ""})
    ('Quantized with: one scale per output channel.',)
    """
    words = [
        "one scale per output channel" if settings["per_channel"] else "",
        "" if settings["symmetric"] else "asymmetric grids",
        "" if settings["ends"] == "same" else f"first and last layers: {settings['ends']}",
        f"helpers: {settings['helpers']}" if settings["helpers"] else "",
    ]
    return (f"Quantized with: {', '.join(filter(None, words))}.",) if any(words) else ()
