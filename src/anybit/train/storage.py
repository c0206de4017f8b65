"""The storage that workers share: an Optuna database, SQLite for one machine or PostgreSQL for several."""

from __future__ import annotations

import contextlib
import random
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anybit.common.files import make_folder
from anybit.errors import FileError, MissingDependency, SpecError

GRACE = 60
"""Seconds without a sign of life after which a worker counts as dead."""

TRIES = 10
"""To open a new storage while others make its tables too."""

KINDS = "sqlite:///FILE (for one machine) or postgresql://USER:PASSWORD@HOST/DATABASE (for several)"

MENDED = "name a database in which you may make tables, a file that is one of SQLite, or one that is not there yet"


@dataclass(frozen=True)
class Store:
    """An opened storage, and for how long a silent worker counts as alive."""

    url: str
    """Without the password."""
    grace: int
    optuna: Any
    storage: Any

    @property
    def pause(self) -> float:
        """Seconds between two looks at what the others do."""
        return min(5.0, self.grace / 12)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Turn what a database may say into one line."""
        import sqlalchemy.exc

        try:
            yield
        except (sqlalchemy.exc.SQLAlchemyError, self.optuna.exceptions.StorageInternalError) as error:
            raise FileError(
                f"{self.url}: the storage does not answer ({_reason(error)}); mend that and start again: "
                "what was done is kept"
            ) from error


def load_optuna() -> Any:
    """Return Optuna, or say how to install it."""
    try:
        import optuna
    except ImportError as error:
        raise MissingDependency("optuna", "search", "a search") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def open_store(url: str, *, grace: int = GRACE) -> Store:
    """Open a storage and make its tables if they are not there.

    Args:
        url: As Optuna writes it: `sqlite:///runs/search.db`, or a PostgreSQL server for several machines.
        grace: Seconds without a sign of life after which a worker counts as dead; the same for all workers.
    """
    if grace < 3:
        raise SpecError(f"the grace of a silent worker is 3 seconds or more, got {grace}")
    optuna = load_optuna()
    import sqlalchemy

    try:
        parsed = sqlalchemy.make_url(url)
    except (sqlalchemy.exc.ArgumentError, ValueError):
        raise FileError(f"a storage is {KINDS}; got {url.rpartition('@')[2]!r}") from None
    shown, settings = parsed.render_as_string(hide_password=True), _settings(parsed)
    try:
        sqlalchemy.create_engine(parsed, **settings).connect().close()
    except ImportError as error:
        raise MissingDependency(error.name or "psycopg", "postgres", f"the storage {shown}") from error
    except sqlalchemy.exc.SQLAlchemyError as error:
        raise FileError(f"{shown}: cannot be opened ({_reason(error)}); {_remedy(parsed)}") from error
    return Store(shown, grace, optuna, _tables(optuna, url, settings, grace, shown))


def _settings(url: Any) -> dict[str, Any]:
    """Return what the database driver is told, for the two kinds of storage there are."""
    import sqlalchemy

    kind = url.get_backend_name()
    # A connection for each question: there are few, and between two of them a server may have been started again.
    settings: dict[str, Any] = {"poolclass": sqlalchemy.pool.NullPool}
    if kind == "sqlite" and url.database not in (None, "", ":memory:"):
        make_folder(Path(url.database).parent)
        return {**settings, "connect_args": {"timeout": GRACE}}
    if kind == "postgresql":
        # Signs of life are compared in the server's local time: in any other zone a change of the clock would kill.
        options = {} if "options" in url.query else {"options": "-c timezone=utc"}
        return {**settings, "connect_args": {"connect_timeout": 10, **options}}
    raise FileError(f"a storage is {KINDS}; got {url.render_as_string(hide_password=True)}")


def _remedy(url: Any) -> str:
    if url.get_backend_name() == "sqlite":
        return "name a file that is a database of Optuna, or one that is not there yet"
    return "see that the server runs and can be reached from here, and that user, password and database are right"


def _tables(optuna: Any, url: str, settings: dict[str, Any], grace: int, shown: str) -> Any:
    """Return Optuna's storage; several workers may be making its tables at once, and then one of them is told off."""
    import sqlalchemy.exc

    for left in reversed(range(TRIES)):
        try:
            with experimental(optuna):
                return optuna.storages.RDBStorage(
                    url.replace("{", "{{").replace("}", "}}"),
                    engine_kwargs=dict(settings),
                    heartbeat_interval=max(1, grace // 3),
                    grace_period=grace,
                )
        except RuntimeError as error:  # tables of another version of Optuna
            raise FileError(f"{shown}: {_reason(error)}") from error
        except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError, AssertionError) as error:
            if not left:
                raise FileError(f"{shown}: cannot be made a storage ({_reason(error)}); {MENDED}") from error
            time.sleep(random.uniform(0.05, 0.5))
    raise AssertionError("not reached")


@contextlib.contextmanager
def experimental(optuna: Any) -> Iterator[None]:
    """Say nothing of Optuna's signs of life being experimental: the version is pinned."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


def _reason(error: BaseException) -> str:
    inner = error.__cause__ if error.__cause__ is not None and not hasattr(error, "orig") else error
    return " ".join(str(getattr(inner, "orig", None) or inner).split())
