"""`anybit reproduce table1`: the paper's tables on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from anybit.cli.needs import needs_torch
from anybit.cli.show import console, errors, progress_bars
from anybit.errors import SpecError


def reproduce(
    what: Annotated[str, typer.Argument(help="What to reproduce: table1 or table2.")],
    scale: Annotated[str, typer.Option(help="laptop: small networks, for two cores. paper: full size.")] = "laptop",
    network: Annotated[list[str] | None, typer.Option(help="Only this network; may be given more than once.")] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0",
    row: Annotated[list[str] | None, typer.Option(help="Only this row; may be given more than once.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Only print what is there.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Measure all checkpoints again; train nothing twice.")] = False,
    recipes: Annotated[Path, typer.Option(help="The folder of the recipes.")] = Path("recipes"),
    runs: Annotated[Path, typer.Option(help="Where checkpoints go.")] = Path("runs"),
    results: Annotated[Path, typer.Option(help="Where numbers and tables go.")] = Path("results"),
    storage: Annotated[
        str | None,
        typer.Option(
            help="Where work is shared: sqlite:///FILE (default: RUNS/search.db), or postgresql://HOST/DATABASE."
        ),
    ] = None,
    grace: Annotated[
        int, typer.Option(help="Seconds without a sign of life after which another worker's row is taken up.", min=3)
    ] = 60,
    as_json: Annotated[bool, typer.Option("--json", help="Print the measured numbers instead of the table.")] = False,
) -> None:
    """Train and measure what is missing of a table, and print it beside the paper's numbers.

    Stop it at any time: the same command goes on where it was. Start it several times, here or on other machines with
    the same storage: they share base networks, searches and rows.

    Example: anybit reproduce table1 --network vgg-like --seeds 0,1,2
    """
    with needs_torch("anybit reproduce"):
        from anybit.analysis.table import find_table, read_entries
        from anybit.analysis.table_run import run_table
        from anybit.analysis.table_show import write_table
    table = find_table(what, scale, recipes=recipes, runs=runs, results=results)
    if not show:
        with progress_bars() as start:
            run_table(
                table,
                networks=network or table.networks,
                seeds=[_seed(word) for word in seeds.split(",")],
                rows=[table.row(name) for name in row] if row else table.rows,
                storage=storage,
                grace=grace,
                again=again,
                say=lambda line: (errors if as_json else console).print(line, highlight=False, soft_wrap=True),
                start=start,
            )
    text, path = write_table(table)
    if as_json:
        typer.echo(json.dumps(read_entries(table.file), indent=1))
        return
    console.print(text, highlight=False, soft_wrap=True, markup=False)
    console.print(str(path), highlight=False, soft_wrap=True)


def _seed(word: str) -> int:
    try:
        return int(word)
    except ValueError as error:
        raise SpecError(f"seeds are whole numbers separated by commas; got {word!r}") from error
