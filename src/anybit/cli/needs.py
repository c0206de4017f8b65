"""Turning a missing optional package into the line that installs it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from anybit.errors import MissingDependency


@contextlib.contextmanager
def needs_torch(what: str) -> Iterator[None]:
    """Import inside this block: a package that is not there becomes an error with the install line."""
    try:
        yield
    except MissingDependency:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("anybit"):
            raise
        raise MissingDependency(error.name or "a package", "demo", what) from error
