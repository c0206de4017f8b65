"""`anybit appendix a|b|c`: the paper's appendices as numbers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from anybit.cli.needs import needs_torch
from anybit.cli.show import console, progress_bars


class Part(StrEnum):
    """Which appendix."""

    A = "a"
    B = "b"
    C = "c"


TITLES = {
    Part.A: "A. squared length of uniform noise on n weights, bins of width 1",
    Part.B: "B. worst increase of the loss by n weights at 4 bits, in nats",
    Part.C: "C. the orthogonality penalty of each layer, and its largest singular value σ",
}

HEADS = {
    Part.A: {
        "n": "n",
        "expected": "mean",
        "mean": "mean, drawn",
        "radius": "95 % within, bound",
        "quantile": "95 % within, drawn",
        "outside": "share beyond bound",
        "length": "length / √n",
    },
    Part.B: {
        "layer": "layer",
        "n": "n",
        "delta": "half a bin, δ",
        "least": "least eigenvalue",
        "first_order": "first order, δ‖∇L‖₁",
        "rounding": "second order, rounding ≥",
        "exact": "second order, exact",
        "relaxation": "second order, relaxed ≤",
        "spectral": "second order, n·λ_max ≤",
    },
    Part.C: {
        "layer": "layer",
        "penalty": "‖WᵀW-I‖²",
        "fourth_power": "Σ(σ²-1)²",
        "growth": "power",
        "trace_growth": "trace",
        "reshaped": "kernel σ",
        "circular": "circular σ",
        "operator": "layer σ",
    },
}
"""How each quantity is headed; appendix B has more quantities than cases and is printed on its side."""


def appendix(
    part: Annotated[Part, typer.Argument(help="a: Hoeffding's bound. b: the second order. c: singular values.")],
    run: Annotated[
        Path | None, typer.Option(help="A run folder for b and c. Default: a small network, trained on the spot.")
    ] = None,
    seed: Annotated[int, typer.Option(help="For everything that is drawn at random.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check an appendix of the paper by numbers.

    Example: anybit appendix b --run runs/digits-base-0
    """
    with progress_bars() as start:
        ready = start("getting ready", 1)
        with needs_torch("anybit appendix"):
            from anybit.analysis.appendices import appendix_rows
            from anybit.common.provenance import origin
        ready(1)
        rows = [dataclasses.asdict(row) for row in appendix_rows(part.value, run=run, seed=seed, start=start)]
    if as_json:
        typer.echo(json.dumps({"appendix": part.value, "seed": seed, "rows": rows, "origin": origin()}, indent=1))
        return
    lines = [[head, *(_cell(row[name]) for row in rows)] for name, head in HEADS[part].items()]
    if part is not Part.B:
        lines = [list(line) for line in zip(*lines, strict=True)]
    console.print(_table(TITLES[part], lines), highlight=False)


def _table(title: str, lines: Sequence[Sequence[str]]) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for index, head in enumerate(lines[0]):
        table.add_column(head, justify="left" if index == 0 else "right", no_wrap=index == 0, overflow="fold")
    for line in lines[1:]:
        table.add_row(*line)
    return table


def _cell(value: Any) -> str:
    """Return a value as it stands in a table.

    >>> _cell(0.12345), _cell((16, 3)), _cell(None), _cell(1000)
    ('0.1235', '16x3', '', '1000')
    """
    if value is None:
        return ""
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
