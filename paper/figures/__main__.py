"""`python -m paper.figures 1 2 3`: figures of the paper, from your own runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anybit.cli.show import progress_bars
from anybit.spec import Bits
from paper.command import run_command
from paper.figures.make import FIGURES, make_figure
from paper.figures.request import Request


def command(
    numbers: Annotated[
        list[int] | None,
        typer.Argument(
            help="1 gradient norms, 2 divergence, 3 first-order prediction, 4 accuracy sweeps, 5 decision boundaries, "
            "6 quantization noise, 7 penalty over training, 8 unit balls. Default: all."
        ),
    ] = None,
    runs: Annotated[
        list[Path] | None,
        typer.Option(help="A run folder; once for each, the one without penalty first. Default: those of a table."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder for PNG, SVG and JSON.")] = Path("runs/figures"),
    examples: Annotated[
        int | None, typer.Option(help="Use the first so many test examples. Default: enough for the figure.", min=1)
    ] = None,
    bits: Annotated[str, typer.Option(help="The pair of widths in figures 3 and 5.")] = "W4A4",
    seed: Annotated[int, typer.Option(help="For everything that is drawn at random.", min=0)] = 0,
) -> None:
    """Draw figures of the paper and write the numbers behind them."""
    with progress_bars() as start:
        request = Request(tuple(runs or ()), examples, Bits.parse(bits), seed, start)
        paths = [path for number in numbers or FIGURES for path in make_figure(number, out, request)]
    print("\n".join(map(str, paths)))


if __name__ == "__main__":
    run_command(command)
