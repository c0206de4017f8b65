"""`anybit demo`: the whole way in about a minute, on embedded data."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from anybit.cli import options
from anybit.cli.show import console, progress_bars, say, show_table
from anybit.pages.message import message, results


def demo(
    out: Annotated[Path, typer.Option(help="Where to write rows, checkpoints and the report.")] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(help="How many seeds to run.", min=1)] = 3,
    as_json: options.Json = False,
) -> None:
    """Train on digits as usual and for any width, quantize to every width, compare.

    Example: anybit demo --out runs/demo
    """
    begin = time.perf_counter()
    with progress_bars() as start:
        ready = start("getting ready", 1)
        with options.needs_torch("anybit demo"):
            from anybit.demo import PLAIN, TRAINED, run_demo
        ready(1)
        file = run_demo(out, seeds=range(seeds), start=start)
    if as_json:
        typer.echo(json.dumps([row.to_dict() for row in file.rows], indent=1))
        return
    found = results(file.rows)
    said = message(found)
    console.print(" ".join([f"{said.head}.", *said.more]), highlight=False, markup=False)
    shown = [summary for (_, bits), summary in found.found.items() if bits in found.equal]
    show_table("mean (lowest-highest seed); gain in points", shown, gain=(PLAIN, TRAINED))
    for note in file.notes:
        console.print(note, highlight=False)
    say(f"{time.perf_counter() - begin:.0f} s. Look at {out}/report.html; the numbers are in {out}/rows.json.")
