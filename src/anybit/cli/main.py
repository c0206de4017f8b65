"""Where the verbs come together, and where errors become one line and an exit code."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, get_type_hints

import typer
from rich.markup import escape

from anybit import __version__
from anybit.cli.show import errors
from anybit.common.text import printable
from anybit.errors import AnybitError

OK, BAD_INPUT, INTERRUPTED = 0, 2, 130

app = typer.Typer(
    name="anybit",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train once, store one set of weights, run it at any bit width.",
    epilog="Exit codes: 0 done, 1 a bug in anybit, 2 bad input, 130 interrupted, 143 terminated.",
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


PANELS: dict[str, dict[str, str]] = {
    "Start here": {
        "demo": "The whole way in a minute, on embedded data.",
    },
    "Trainers: your own network, ready for every width": {
        "train": "Train a network as a recipe says.",
        "search": "Find the strongest penalty that costs nothing.",
        "sweep": "Measure a checkpoint at many widths, without data.",
        "report": "Turn measurements into one HTML page.",
        "data": "Say what is in a data set.",
        "save": "Write a checkpoint as one ONNX file for every width.",
    },
    "Integrators: somebody else's file, no PyTorch": {
        "adopt": "Make a plain ONNX file switchable.",
        "reconstruct": "Fit the rounding of some widths to a few inputs.",
        "export": "Write one width as plain ONNX.",
        "run": "Run inputs at the width you or a policy choose.",
        "watch": "Show battery and width, live.",
        "serve": "Try a file at every width in the browser.",
        "bench": "Measure what each width gains and what it loses.",
    },
}
"""The verbs by who needs them, each with what it does in one line; a verb is the function in the file of its name."""


def _literally(function: Callable[..., object]) -> Callable[..., object]:
    """Let help texts say [brackets], which would be taken for markup, and break lines where the terminal ends."""
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    function.__doc__ = escape("\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs))
    for hint in get_type_hints(function, include_extras=True).values():
        for info in getattr(hint, "__metadata__", ()):
            if isinstance(getattr(info, "help", None), str) and id(info) not in _escaped:
                info.help = escape(info.help)
                _escaped.add(id(info))
    return function


_escaped: set[int] = set()
"""The options whose help texts are done: verbs share some."""

for panel, verbs in PANELS.items():
    for name, short in verbs.items():
        function = getattr(importlib.import_module(f"anybit.cli.{name}"), name)
        app.command(name=name, short_help=short, rich_help_panel=panel)(_literally(function))


def main(argv: list[str] | None = None) -> None:
    """Run one command; an error the user can mend is one line on stderr and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
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
        _leave(stop.code)
        raise


def _leave(code: str | int | None) -> None:
    """End a process that torchrun started at once, with the exit code it has earned.

    On a busy machine, a thread of gloo that lets go of its last work after Python's own end aborts the process.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and not isinstance(code, str):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or OK)


def _warn(message: Warning | str, category: type[Warning], *where: object, **rest: object) -> None:
    """Print what the user should know in one line; what is about code is not for them."""
    if category is UserWarning:
        errors.print(
            f"warning: {printable(str(message))}", style="yellow", markup=False, highlight=False, soft_wrap=True
        )


def _one_line(error: Exception) -> str:
    r"""Return the message with its list of problems, if it has one, behind the headline.

    >>> _one_line(AnybitError("two problems\n  - a: is odd\n  - b: is even"))
    'two problems: a: is odd; b: is even'
    """
    head, *rest = str(error).splitlines() or [type(error).__name__]
    problems = "; ".join(line.strip().removeprefix("- ") for line in rest)
    return printable(f"{head}: {problems}" if problems else head)
