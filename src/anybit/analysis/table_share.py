"""What the workers of a table have in common: claims and results in a storage, and the files of this machine.

Entries and searches go through the storage, so that they reach every worker. Run folders stay where they were trained:
`runs` has a mark by which workers know whether they see the same folder or each have their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from anybit.analysis.table import (
    FORMAT,
    SEARCH_FORMAT,
    Job,
    Table,
    known_entry,
    read_entries,
    read_searches,
    same_recipe,
)
from anybit.common.files import make_folder, write_error, write_json
from anybit.errors import FileError
from anybit.train.checkpoint import digest_of, read_checkpoint
from anybit.train.recipe import Recipe
from anybit.train.storage import Store
from anybit.train.workers import Claim, Work

MARK = ".workers"
"""A file in `runs`: the name of the folder, and what is locked to change a file that others change too."""


def base_unit(network: str, seed: int) -> str:
    """Return what the training of a base network is called in the storage."""
    return f"{network}, seed {seed}, base network"


class Shared:
    """The storage and the files of one table."""

    def __init__(self, table: Table, store: Store) -> None:
        self.table = table
        self.work = Work(store, f"{table.name} {table.scale}")
        with self._lock() as file:
            file.seek(0)
            name = file.read().decode()
            if not name:
                name = secrets.token_hex(8)
                file.write(name.encode())
        self.place = name

    @contextlib.contextmanager
    def _lock(self) -> Iterator[BinaryIO]:
        """Keep all other workers that see this folder from changing files."""
        path = self.table.runs / MARK
        make_folder(path.parent)
        try:
            with path.open("a+b") as file:
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(file, fcntl.LOCK_EX)
                yield file
        except OSError as error:
            raise write_error(path, error) from error

    # Entries

    def entry(self, job: Job, recipe: Recipe) -> dict[str, Any] | None:
        """Return what was measured of a row that was trained by this recipe; the newer, if both places know it."""
        here = known_entry(read_entries(self.table.file), job, recipe)
        stored = self._stored(job, recipe)
        if stored is None or (here is not None and here["measured"]["date"] >= stored["entry"]["measured"]["date"]):
            return here
        self._write(job, stored["entry"])
        return dict(stored["entry"])

    def add(self, job: Job, entry: dict[str, Any], claim: Claim) -> None:
        """Tell everybody what was measured."""
        self._write(job, entry)
        claim.finish(entry=entry, place=self.place)

    def row_elsewhere(self, job: Job, recipe: Recipe) -> str | None:
        """Return the machine that has the run folder of a row, if it was trained into another folder than `runs`."""
        stored = self._stored(job, recipe)
        return None if stored is None or stored["place"] == self.place else str(stored["worker"]["host"])

    def _stored(self, job: Job, recipe: Recipe) -> dict[str, Any] | None:
        trial = self.work.done().get(str(job))
        if trial is None or not same_recipe(trial.user_attrs["entry"]["recipe"], recipe):
            return None
        return dict(trial.user_attrs)

    def _write(self, job: Job, entry: dict[str, Any]) -> None:
        with self._lock():
            others = [known for known in read_entries(self.table.file) if not job.of(known)]
            write_json(self.table.file, {"format": FORMAT, "entries": [*others, entry]})

    # Searches

    def found(self, network: str, name: str, recipe: Recipe) -> dict[str, Any] | None:
        """Return what was found for a row, by this machine or, with the same recipe, by another one."""
        known = read_searches(self.table.search_file).get(network, {}).get(name)
        if known is not None:
            return dict(known)
        trial = self.work.done().get(_search_unit(network, name))
        if trial is None or not same_recipe(trial.user_attrs["recipe"], recipe):
            return None
        self._write_search(network, name, trial.user_attrs["found"])
        return dict(trial.user_attrs["found"])

    def add_search(self, network: str, name: str, recipe: Recipe, found: dict[str, Any]) -> None:
        """Tell everybody what was found."""
        self._write_search(network, name, found)
        self.work.record(_search_unit(network, name), found=found, recipe=recipe.to_dict())

    def _write_search(self, network: str, name: str, found: dict[str, Any]) -> None:
        with self._lock():
            known = read_searches(self.table.search_file)
            known.setdefault(network, {})[name] = found
            write_json(self.table.search_file, {"format": SEARCH_FORMAT, "searches": known})

    # Base networks

    def base_elsewhere(self, network: str, seed: int) -> str | None:
        """Return the machine that has a base network, if it was trained into another folder than `runs`."""
        about = self._base(network, seed)
        return None if about is None or about["place"] == self.place else str(about["worker"]["host"])

    def add_base(self, network: str, seed: int, claim: Claim) -> None:
        """Tell everybody that a base network was trained here."""
        claim.finish(place=self.place, digest=_digest(self.table.base(network, seed)))

    def check_base(self, network: str, seed: int) -> None:
        """Make sure that all rows of a network and seed start from the same weights, wherever they are trained."""
        path, about = self.table.base(network, seed), self._base(network, seed)
        digest = _digest(path)
        if about is not None and about["digest"] == digest:
            return
        if about is not None and about["place"] != self.place:
            raise FileError(
                f"{path}: not the base network that {about['worker']['host']} starts from; copy its folder from "
                "there, keep runs on a disk that all share, or give another storage for a table of its own"
            )
        self.work.record(base_unit(network, seed), place=self.place, digest=digest)

    def _base(self, network: str, seed: int) -> dict[str, Any] | None:
        trial = self.work.done().get(base_unit(network, seed))
        return None if trial is None else dict(trial.user_attrs)


def _search_unit(network: str, name: str) -> str:
    return f"{network}, search for {name}"


def _digest(path: Path) -> str:
    return digest_of(read_checkpoint(path)[0])
