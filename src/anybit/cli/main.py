"""Where the verbs come together, and where errors become one line and an exit code."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from anybit import __version__
from anybit.cli import (
    adopt,
    appendix,
    bench,
    data,
    demo,
    export,
    figure,
    report,
    reproduce,
    run,
    save,
    search,
    sweep,
    train,
    watch,
)
from anybit.cli.show import errors
from anybit.errors import AnybitError

OK, BAD_INPUT, INTERRUPTED = 0, 2, 130

app = typer.Typer(
    name="anybit",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train once, store one set of weights, run it at any bit width.",
    epilog="Exit codes: 0 done, 1 a bug in anybit, 2 bad input, 130 interrupted.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"anybit {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    pass


app.add_typer(data.data, name="data")
app.command(name="demo")(demo.demo)
app.command(name="train")(train.train)
app.command(name="sweep")(sweep.sweep)
app.command(name="report")(report.report)
app.command(name="save")(save.save)
app.command(name="export")(export.export)
app.command(name="run")(run.run)
app.command(name="watch")(watch.watch)
app.command(name="bench")(bench.bench)
app.command(name="adopt")(adopt.adopt)
app.command(name="reproduce")(reproduce.reproduce)
app.command(name="search")(search.search)
app.command(name="figure")(figure.figure)
app.command(name="appendix")(appendix.appendix)


def main(argv: list[str] | None = None) -> None:
    """Run one command; an error the user can mend is one line on stderr and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    try:
        app(args=[word for word in words if word != "--debug"], prog_name="anybit")
    except (AnybitError, OSError) as error:
        if debug:
            raise
        errors.print(f"error: {_one_line(error)}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(BAD_INPUT) from None
    except SystemExit as stop:
        # Typer turns ctrl-C into this code before anybody else sees it.
        if stop.code == INTERRUPTED:
            if debug:
                raise KeyboardInterrupt from stop
            errors.print("interrupted", style="red")
        raise


def _one_line(error: Exception) -> str:
    r"""Return the message with its list of problems, if it has one, behind the headline.

    >>> _one_line(AnybitError("two problems\n  - a: is odd\n  - b: is even"))
    'two problems: a: is odd; b: is even'
    """
    head, *rest = str(error).splitlines() or [type(error).__name__]
    problems = "; ".join(line.strip().removeprefix("- ") for line in rest)
    return f"{head}: {problems}" if problems else head
