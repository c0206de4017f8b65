"""`anybit figure N`: a figure of the paper, from your own runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anybit.cli.needs import needs_torch
from anybit.cli.show import console, progress_bars
from anybit.spec import Bits


def figure(
    number: Annotated[
        int,
        typer.Argument(
            help="1 gradient norms, 2 divergence, 3 first-order prediction, 4 accuracy sweeps, 5 decision boundaries, "
            "6 quantization noise, 7 penalty over training, 8 unit balls."
        ),
    ],
    runs: Annotated[
        list[Path] | None,
        typer.Option(
            help="A run folder; once for each, the one without penalty first. Default: those of the laptop-size table."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder for PNG, SVG and JSON.")] = Path("runs/figures"),
    examples: Annotated[
        int | None, typer.Option(help="Use the first so many test examples. Default: enough for the figure.", min=1)
    ] = None,
    bits: Annotated[str, typer.Option(help="The pair of widths in figures 3 and 5.")] = "W4A4",
    seed: Annotated[int, typer.Option(help="For everything that is drawn at random.", min=0)] = 0,
) -> None:
    """Draw a figure of the paper and write the numbers behind it.

    Example: anybit figure 1 --runs runs/digits-base-0 --runs runs/digits-l1-0
    """
    widths = Bits.parse(bits)
    with progress_bars() as start:
        ready = start("getting ready", 1)
        with needs_torch("anybit figure"):
            from anybit.analysis.figures.make import make_figure
            from anybit.analysis.figures.request import Request
        ready(1)
        request = Request(tuple(runs or ()), examples=examples, bits=widths, seed=seed, start=start)
        paths = make_figure(number, out, request)
    for path in paths:
        console.print(str(path), highlight=False, soft_wrap=True)
