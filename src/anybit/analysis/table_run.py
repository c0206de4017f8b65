"""A table of the paper, trained and measured: every row once, from a shared start, by one process or by several.

Whatever is done is on disk: base networks and rows as run folders, searches and measurements as JSON. The same call
again goes on where the last one stopped, also in the middle of a training, and a row that only lacks a measurement is
not trained again. Several processes with the same call share base networks, the trials of searches, and rows, through a
storage.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anybit.analysis.table import Job, Table, covers, same_recipe
from anybit.analysis.table_rows import TableRow
from anybit.analysis.table_share import Shared, base_unit
from anybit.common.files import read_json
from anybit.common.progress import Start, quiet
from anybit.common.provenance import origin
from anybit.data import Batches, Dataset, load_dataset
from anybit.errors import CheckpointError, DataError, FileError
from anybit.evaluate.sweep import sweep
from anybit.quant.prepare import prepare
from anybit.spec import Bits
from anybit.train.checkpoint import load_model, read_checkpoint
from anybit.train.loop import train
from anybit.train.recipe import Recipe
from anybit.train.resume import Say
from anybit.train.run import RunFolder
from anybit.train.search import search
from anybit.train.storage import GRACE, open_store
from anybit.train.workers import listed

BATCH = 100
"""Small enough that activations stay in the processor's cache: a quarter less time than with 500."""


def run_table(
    table: Table,
    *,
    networks: Sequence[str],
    seeds: Sequence[int],
    rows: Sequence[TableRow],
    storage: str | None = None,
    grace: int = GRACE,
    again: bool = False,
    say: Say = print,
    start: Start = quiet,
) -> None:
    """Train, search and measure what is missing, in the order given; stop it at any time and call it again.

    Args:
        table: What is made, and where.
        networks: Of the table.
        seeds: Each is a training of its own.
        rows: Of the table.
        storage: Where trials and claims are kept; by default a file in `runs`. Whoever makes the same table there at
            the same time takes a part of the work, and all end when the whole is done.
        grace: Seconds without a sign of life after which the work of another process is taken up.
        again: Measure everything anew, from the checkpoints that are there.
        say: Told what is done, a line at a time.
        start: Starts a progress bar.
    """
    names = {network: table.recipe(network, "tune").data.name for network in networks}
    loaded = {name: _load(name) for name in dict.fromkeys(names.values())}
    data = {network: loaded[name] for network, name in names.items()}
    shared = Shared(table, open_store(storage or table.storage, grace=grace))
    left = [Job(network, seed, row) for network in networks for seed in seeds for row in rows]
    worker = _Worker(table, shared, data, say)
    if again:
        worker.measure_again(left)
    advance = start("rows", len(left))
    while left:
        before = len(left)
        for job in tuple(left):
            if worker.attempt(job):
                left.remove(job)
                advance(1)
        if len(left) == before:
            worker.wait()


def _load(name: str) -> Dataset:
    if "/" in name and not name.endswith(".npz") and not Path(name).is_dir():
        raise DataError(
            f"{name}: no such folder; images by class are expected here, train/CLASS/*.JPEG and val/CLASS/*.JPEG. "
            "Put ImageNet there or make it a link"
        )
    return load_dataset(name)


class _Worker:
    """One of those that make a table."""

    def __init__(self, table: Table, shared: Shared, data: dict[str, Dataset], say: Say) -> None:
        self.table, self.shared, self.data, self.say = table, shared, data, say
        self.before: dict[str, Any] | None = None
        self.checked: set[tuple[str, int]] = set()
        self.said: set[str] = set()
        self.lacking: dict[str, None] = {}
        self.alone_since: float | None = None

    def measure_again(self, jobs: Sequence[Job]) -> None:
        """Take what was measured until now for old."""
        self.before = {str(job): self._measured(job) for job in jobs}

    def _measured(self, job: Job) -> Any:
        recipe = self.recipe(job)
        entry = None if recipe is None else self.shared.entry(job, recipe)
        return entry and entry["measured"]

    def attempt(self, job: Job) -> bool:
        """Do a row, unless another worker is at it; return whether it is done by now."""
        if self.finished(job):
            return True
        if not self.ready(job):
            return False
        claim = self.shared.work.claim(str(job), done=lambda: self.finished(job))
        if claim is None:
            return False
        with claim:
            if claim.lost is not None:
                self.say(f"{job}: taken up again; {claim.lost} died over it")
            for name in _searches(job.row):
                self.search(job.network, name)
            if not self.finished(job):
                recipe = self.recipe(job)
                assert recipe is not None
                self.train(job, recipe)
                self.shared.add(job, self.measure(job, recipe), claim)
        return True

    def finished(self, job: Job) -> bool:
        """Tell whether nothing is left to do for a row, here or anywhere."""
        recipe = self.recipe(job)
        entry = None if recipe is None else self.shared.entry(job, recipe)
        if recipe is None or entry is None:
            return False
        here = self.trained(job, recipe)
        if not here and self.shared.row_elsewhere(job, recipe) is None:
            return False  # its run folder was removed, or the entry came with a clone
        if self.before is not None and here and entry["measured"] == self.before[str(job)]:
            return False
        return all(covers(entry, name, setting) for name, setting in self.table.settings.items())

    def trained(self, job: Job, recipe: Recipe) -> bool:
        """Tell whether the checkpoint of a row is in this folder."""
        path = self.table.checkpoint(job)
        return path.is_file() and same_recipe(read_checkpoint(path)[1].get("recipe"), recipe)

    def ready(self, job: Job) -> bool:
        """Tell whether a row can be made here: it starts from a base network, and so does the search for its values."""
        recipe = self.recipe(job)
        if recipe is not None and not self.trained(job, recipe):
            host = self.shared.row_elsewhere(job, recipe)
            if host is not None:
                return self.lacks(f"{job}", self.table.folder(job), host)
        seeds = {job.seed} if recipe is not None else {job.seed, 0}
        here = [self.base(job.network, seed) for seed in sorted(seeds)]  # all: one may be trained while another is
        return all(here)

    def lacks(self, what: str, folder: Path, host: str) -> bool:
        """Note that something cannot be gone on with here, because another machine has what it needs."""
        line = f"{what}: is in {folder} on {host}; copy that folder here to help with what is left of it"
        self.lacking[line] = None
        self.say_once(line)
        return False

    def say_once(self, line: str) -> None:
        """Say something that stays true for a while."""
        if line not in self.said:
            self.said.add(line)
            self.say(line)

    def base(self, network: str, seed: int) -> bool:
        """Tell whether a base network is here; train it if nobody has it and nobody is at it."""
        path = self.table.base(network, seed)
        if path.is_file():
            if (network, seed) not in self.checked:
                self.shared.check_base(network, seed)
                self.checked.add((network, seed))
            return True
        if (host := self.shared.base_elsewhere(network, seed)) is not None:
            return self.lacks(base_unit(network, seed), path.parent, host)
        claim = self.shared.work.claim(
            base_unit(network, seed),
            done=lambda: path.is_file() or self.shared.base_elsewhere(network, seed) is not None,
        )
        if claim is None:
            return False
        with claim:
            self.say(f"{network}, seed {seed}: training the base network")
            self.run(self.table.recipe(network, "base").changed({"seed": seed}), network, path.parent)
            self.shared.add_base(network, seed, claim)
        return True

    def recipe(self, job: Job) -> Recipe | None:
        """Return the recipe of a row with the values searched for it; nothing while one is not known yet."""
        values: dict[str, float] = {}
        for name in _searches(job.row):
            found = self.shared.found(job.network, name, self.search_recipe(job.network, name))
            if found is None:
                return None
            values.update(dict.fromkeys(found["keys"], float(found["chosen"])))
        return self.changed(job).changed(values)

    def changed(self, job: Job) -> Recipe:
        """Return the recipe of a row without what is searched for it."""
        start = {"name": job.row.name, "seed": job.seed, "init": str(self.table.base(job.network, job.seed))}
        return self.table.recipe(job.network, "tune").changed({**start, **job.row.changes})

    def search_recipe(self, network: str, name: str) -> Recipe:
        """Return the recipe that is searched with; searches are done once, with seed 0."""
        changed = self.changed(Job(network, 0, self.table.row(name)))
        return changed.changed({"name": f"{self.table.scale} {network} {name}"})

    def search(self, network: str, name: str) -> None:
        """Search what a row needs, together with whoever needs it too."""
        row, recipe = self.table.row(name), self.search_recipe(network, name)
        if self.shared.found(network, name, recipe) is not None:
            return
        assert row.knob is not None
        self.say(f"{network}: searching {' = '.join(row.knob.keys)} for {name}")
        found = search(
            recipe,
            self.data[network],
            row.knob,
            storage=self.shared.work.store,
            on_trial=lambda value, accuracy: self.say(f"  {value:g}: {100 * accuracy:.2f} %"),
            say=lambda line: self.say(f"  {line}"),
        )
        self.say(f"  chosen: {found.chosen:g}")
        if self.shared.found(network, name, recipe) is None:
            self.shared.add_search(network, name, recipe, {**found.to_dict(), "seed": 0, "origin": origin()})

    def train(self, job: Job, recipe: Recipe) -> None:
        """Train a row, unless that was done."""
        if not self.trained(job, recipe):
            self.say(f"{job.network}, seed {job.seed}: training {job.row.name}")
            self.run(recipe, job.network, self.table.folder(job))

    def run(self, recipe: Recipe, network: str, folder: Path) -> None:
        """Train into a folder, from where the same training was stopped before, if it was."""
        stopped = RunFolder(folder, recipe).state.is_file()
        try:
            train(recipe, self.data[network], folder, resume=stopped, say=self.say)
        except CheckpointError:  # what is there is of another recipe, or damaged
            train(recipe, self.data[network], folder)

    def measure(self, job: Job, recipe: Recipe) -> dict[str, Any]:
        """Measure a row in every setting that it lacks; return its entry."""
        entry = None if self.before is not None else self.shared.entry(job, recipe)
        run = read_json(self.table.folder(job) / "run.json", what="the summary of a run")
        measured = self.settings(job, entry)
        first = next(iter(measured.values()))["test"]
        scores = ", ".join(f"{Bits(r['weights'], r['activations'])} {100 * r['accuracy']:.2f}" for r in first)
        seconds = ", ".join(f"{second:.0f} s" for second in run["epoch_seconds"]["processor"])
        self.say(f"{job}: {scores}; epochs of {seconds}")
        return {
            "network": job.network,
            "seed": job.seed,
            "row": job.row.name,
            "recipe": recipe.to_dict(),
            "validation": run["results"],
            "epoch_seconds": run["epoch_seconds"],
            "trained": {key: run[key] for key in ("commit", "date", "machine", "versions")},
            "measured": origin(),
            "settings": measured,
        }

    def settings(self, job: Job, entry: dict[str, Any] | None) -> dict[str, Any]:
        """Return the accuracies of a row by setting, adding those that an entry lacks."""
        data, label, seed = self.data[job.network], job.row.name, job.seed
        model, _ = load_model(self.table.checkpoint(job))
        splits = {"test": data.test, "validation": data.validation}
        batches = {part: Batches(split.channels_last(), BATCH) for part, split in splits.items()}
        measured = {name: dict(parts) for name, parts in entry["settings"].items()} if entry else {}
        for name, setting in self.table.settings.items():
            if covers(entry, name, setting):
                continue
            net = prepare(model, data.test.x[:2], input_range=data.input_range, **setting.options)
            for part in ("test", "validation") if setting.validated else ("test",):
                rows = sweep(net, batches[part], widths=setting.widths, label=label, seed=seed)
                measured.setdefault(name, {})[part] = [row.to_dict() for row in rows]
        return measured

    def wait(self) -> None:
        """Wait for what other workers are at; where there is none for long, say what is lacking here."""
        store, others = self.shared.work.store, self.shared.work.running()
        if others:
            self.alone_since = None
            self.say_once(f"waiting for other workers: {listed(sorted(map(str, others)))}")
        elif self.alone_since is None:
            self.alone_since = time.monotonic()
        elif time.monotonic() - self.alone_since > store.grace:
            raise FileError(f"nobody else is at work, and something is missing here: {'; '.join(self.lacking)}")
        self.lacking.clear()
        time.sleep(store.pause)


def _searches(row: TableRow) -> tuple[str, ...]:
    """Return the rows whose searched values a row needs, its own last."""
    return row.takes if row.knob is None else (*row.takes, row.name)
