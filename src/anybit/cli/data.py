"""`anybit data get cifar10`: fetch a data set ahead of time, checked and cached."""

from __future__ import annotations

from typing import Annotated

import typer

from anybit.cli.needs import needs_torch
from anybit.cli.show import console, errors, progress_bars
from anybit.errors import DataError

data = typer.Typer(
    no_args_is_help=True, help="Fetch data sets and say what is in them.\n\nExample: anybit data get cifar10"
)


@data.callback()
def _group() -> None:
    """Keep `get` a verb of its own, though it is the only one."""


@data.command()
def get(name: Annotated[str, typer.Argument(help="The data set: cifar10. Digits come with scikit-learn.")]) -> None:
    """Fetch a data set, verify it, and keep it in the cache folder (ANYBIT_CACHE names another one).

    A download that was interrupted goes on where it stopped when you type the same again.

    Example: anybit data get cifar10
    """
    with needs_torch("anybit data get"):
        from anybit.data import DATASETS, load_dataset
        from anybit.data.cifar10 import download_cifar10
    if name not in DATASETS:
        raise DataError(f"no data set {name!r} can be fetched; there are {', '.join(DATASETS)}")
    if name == "cifar10":
        with progress_bars() as start:
            path = download_cifar10(start, say=_say)
        console.print(f"{path}", highlight=False, soft_wrap=True)
    found = load_dataset(name)
    sizes = ", ".join(f"{kind} {len(getattr(found, kind)):,}" for kind in ("train", "validation", "test"))
    shape = "x".join(map(str, found.shape))
    console.print(f"{name}: {sizes} images of {shape} in {len(found.classes)} classes", highlight=False, soft_wrap=True)


def _say(line: str) -> None:
    """Print a line where somebody watches."""
    if errors.is_terminal:
        errors.print(line, markup=False, highlight=False, soft_wrap=True)
