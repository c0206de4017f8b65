"""How the commands of this folder start, and how their errors become one line."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from anybit.errors import AnybitError


def run_command(function: Callable[..., None]) -> None:
    """Run a function with the words of the command line; an error the user can mend is one line and exit code 2."""
    try:
        typer.run(function)
    except (AnybitError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
