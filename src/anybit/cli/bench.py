"""`anybit bench model.onnx`: what each width gains on this machine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from anybit.cli import options
from anybit.cli.show import console, progress_bars
from anybit.spec import Bits, widths_of

if TYPE_CHECKING:
    from rich.table import Table

    from anybit.artifact.bench import Gain


def bench(
    master: options.Master,
    widths: Annotated[
        str, typer.Option(help="Pairs of widths, weights and activations, separated by blanks.")
    ] = "FP W8A8 W4A8 W4A4",
    inputs: options.What = None,
    limit: options.Limit = 64,
    data: Annotated[str | None, typer.Option(help="A data set, or an .npz file: measure test accuracy too.")] = None,
    threads: Annotated[int, typer.Option(help="Threads that a run may use.")] = 1,
    prefer: options.Prefer = "widths",
    rounds: Annotated[int, typer.Option(min=1, help="How often each width is timed.")] = 15,
    out: options.Record = None,
    as_json: options.Json = False,
) -> None:
    """Print file size, memory and time per input for each width; all widths are timed in turns.

    With --input also how much is lost: on these inputs, how often the answer is that of floating point (the largest
    score), and how far the outputs are away from it. With --data the accuracy. The last line says what is fastest here.

    Example: anybit bench model.onnx --widths "FP W8A8 W4A4" --input images/
    """
    from anybit.artifact.bench import bench as run
    from anybit.artifact.bench import steps_of, verdict, with_sevens
    from anybit.artifact.inputs import read_feeds
    from anybit.artifact.runtime import sums_saturate
    from anybit.artifact.session import load
    from anybit.common.files import write_json
    from anybit.common.provenance import origin

    pairs = with_sevens(widths_of(widths), sums_saturate())
    labelled = None
    with progress_bars() as start:
        ready = start("getting ready", 2)
        if data is not None:
            with options.needs_torch("anybit bench --data"):
                from anybit.data import load_dataset
            x, y = load_dataset(data).need("test", "anybit bench --data").tensors()
            labelled = x.numpy(), y.numpy()
        ready(1)
        session = load(master, threads=threads, keep=max(1, len(pairs)), prefer=prefer)
        feeds = [feed for _, feed in read_feeds(inputs, session.takes, session.feeding, limit=limit)] if inputs else []
        ready(1)
        advance = start("rounds", steps_of(pairs, rounds, len(feeds)))
        gains = run(session, pairs, rounds=rounds, data=labelled, inputs=feeds, on_step=lambda: advance(1))
    said = verdict(gains, prefer=prefer)
    record = {
        "master": master.name, "threads": threads, "rounds": rounds, "data": data, "inputs": len(feeds),
        "prefer": prefer, "verdict": said,
        "rows": [dataclasses.asdict(gain) for gain in gains], "origin": origin(),
    }  # fmt: skip
    if out is not None:
        write_json(out, record)
    if as_json:
        typer.echo(json.dumps(record, indent=1))
        return
    console.print(_table(gains, f"{master}, {threads} thread(s)"))
    console.print(said, highlight=False, markup=False, soft_wrap=True)


def _table(gains: Sequence[Gain], title: str) -> Table:
    from rich.table import Table

    from anybit.artifact.answers import worst

    table = Table(title=title, title_justify="left", title_style="bold")
    batch = max(gain.batch for gain in gains)
    rows = []
    for gain in gains:
        same, error = worst(gain.losses)
        cells = {
            "widths": str(Bits(gain.weights, gain.activations)),
            "same as FP": percent(same),
            "error": percent(error),
            "accuracy": percent(gain.accuracy),
            "file MB": f"{gain.file_bytes / 1e6:.2f}",
            "memory MB": f"{gain.resident_bytes / 1e6:.1f}",
            "ms": f"{1000 * gain.latency:.2f}",
            "times FP": ratio(gain.speedup),
            f"inputs per s by {batch}": f"{gain.throughput:.0f}" if batch > 1 else "",
            f"times FP by {batch}": ratio(gain.speedup_batch) if batch > 1 else "",
        }
        rows.append(cells)
    shown = [head for head in rows[0] if any(row[head] for row in rows)]
    for head in shown:
        table.add_column(head, justify="left" if head == "widths" else "right")
    for row in rows:
        table.add_row(*(row[head] for head in shown))
    return table


def percent(share: float | None) -> str:
    """Return a part of a whole in percent, or nothing.

    >>> percent(0.1234), percent(None)
    ('12.3%', '')
    """
    return "" if share is None else f"{100 * share:.1f}%"


def ratio(speedup: tuple[float, float, float] | None) -> str:
    """Return a speed-up without its spread, which is in the JSON.

    >>> ratio((1.5, 1.25, 2.0))
    '1.50'
    """
    return "" if speedup is None else f"{speedup[0]:.2f}"
