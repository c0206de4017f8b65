"""`anybit bench model.onnx`: what each width gains on this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anybit.cli.needs import needs_torch
from anybit.cli.show import console, progress_bars
from anybit.spec import Bits

if TYPE_CHECKING:
    from rich.table import Table

    from anybit.artifact.bench import Gain


def bench(
    master: Annotated[Path, typer.Argument(help="A master, as anybit save writes it.")],
    widths: Annotated[
        str, typer.Option(help="Pairs of widths, weights and activations, separated by blanks.")
    ] = "FP W8A8 W4A8 W4A4",
    data: Annotated[str | None, typer.Option(help="A data set, or an .npz file: measure test accuracy too.")] = None,
    threads: Annotated[int, typer.Option(help="Threads that a run may use.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="How often each width is timed.")] = 15,
    out: Annotated[Path | None, typer.Option(help="Write the numbers to this JSON file too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print file size, memory, time per input and accuracy for each width; all widths are timed in turns.

    Example: anybit bench model.onnx --widths "FP W8A8 W4A4" --data digits
    """
    from anybit.artifact.bench import bench as run
    from anybit.artifact.bench import steps_of
    from anybit.artifact.session import load
    from anybit.common.files import write_json
    from anybit.common.provenance import origin

    pairs = list(dict.fromkeys(Bits.parse(word) for word in widths.split()))
    labelled = None
    with progress_bars() as start:
        ready = start("getting ready", 2)
        if data is not None:
            with needs_torch("anybit bench --data"):
                from anybit.data import load_dataset
            x, y = load_dataset(data).test.fitting().tensors()
            labelled = x.numpy(), y.numpy()
        ready(1)
        session = load(master, threads=threads, keep=max(1, len(pairs)))
        ready(1)
        advance = start("rounds", steps_of(pairs, rounds))
        gains = run(session, pairs, rounds=rounds, data=labelled, on_step=lambda: advance(1))
    record = {
        "master": master.name, "threads": threads, "rounds": rounds, "batch": 32, "data": data,
        "rows": [gain.to_dict() for gain in gains], "origin": origin(),
    }  # fmt: skip
    if out is not None:
        write_json(out, record)
    if as_json:
        typer.echo(json.dumps(record, indent=1))
        return
    console.print(_table(gains, f"{master}, {threads} thread(s)"))


def _table(gains: Sequence[Gain], title: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    heads = (
        "widths",
        "file MB",
        "memory MB",
        "ms, batch 1",
        "times FP",
        "inputs/s, batch 32",
        "times FP",
        "accuracy %",
    )
    for head in heads:
        table.add_column(head, justify="left" if head == "widths" else "right")
    for gain in gains:
        table.add_row(
            str(Bits(gain.weights, gain.activations)),
            f"{gain.file_bytes / 1e6:.2f}",
            f"{gain.resident_bytes / 1e6:.1f}",
            f"{1000 * gain.latency:.2f}",
            ratio(gain.speedup),
            f"{gain.throughput:.0f}",
            ratio(gain.speedup_batch),
            "" if gain.accuracy is None else f"{100 * gain.accuracy:.2f}",
        )
    return table


def ratio(speedup: tuple[float, float, float] | None) -> str:
    """Return a speed-up without its spread, which is in the JSON.

    >>> ratio((1.5, 1.25, 2.0))
    '1.50'
    """
    return "" if speedup is None else f"{speedup[0]:.2f}"
