"""The command line: a thin shell over the package, one file per verb."""

from anybit.cli.main import main

__all__ = ["main"]
