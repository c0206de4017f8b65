"""The paper's tables: every row trained from a shared start and measured at every width.

    python -m paper.table table1 --network vgg-like --seeds 0,1,2

Whatever is done is on disk: base networks and rows as run folders with what was measured of each, searches as trials in
a database. The same command again goes on where the last one stopped, also in the middle of a training. Started several
times, or on several machines that share `runs`, each takes the rows that nobody else is at: a process holds a lock on
the folder of a row, which the system lets go of when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import anybit
from anybit.common.files import make_folder, read_json, write_json
from anybit.common.progress import Start, quiet
from anybit.common.provenance import origin
from anybit.data import Batches, Dataset, load_dataset
from anybit.errors import CheckpointError, DataError, FileError, SpecError
from anybit.spec import Bits
from anybit.task.checkpoint import load_model, read_checkpoint
from anybit.train.loop import train
from anybit.train.recipe import Recipe
from anybit.train.resume import Say
from anybit.train.run import RunFolder
from anybit.train.search import search
from paper.command import run_command
from paper.rows import TableRow
from paper.runs import quantized
from paper.tables import (
    CHECKPOINTS,
    RECIPES,
    SEARCHED,
    Job,
    Setting,
    Table,
    covers,
    find_table,
    read_entries,
    read_searches,
    same_recipe,
    write_entries,
    write_searches,
)

BATCH = 100
"""Small enough that activations stay in the processor's cache: a quarter less time than with 500."""

PAUSE = 5.0
"""Seconds between two looks at what other processes have finished."""


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Hold a folder against other processes; give whether nobody else does."""
    make_folder(folder)
    with (folder / ".claim").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True  # closing the file lets go of it


def run_table(
    table: Table,
    *,
    networks: Sequence[str],
    seeds: Sequence[int],
    rows: Sequence[TableRow],
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
        again: Measure everything anew, from the checkpoints that are there.
        say: Told what is done, a line at a time.
        start: Starts a progress bar.
    """
    maker = Maker(table, {network: _data(table.recipe(network, "tune").data.name) for network in networks}, say)
    left = [Job(network, seed, row) for network in networks for seed in seeds for row in rows]
    if again:
        for job in left:
            (table.folder(job) / "entry.json").unlink(missing_ok=True)
    advance, waiting = start("rows", len(left)), False
    while left:
        done = [job for job in left if maker.make(job)]
        advance(len(done))
        left = [job for job in left if job not in done]
        if left and not done:
            if not waiting:
                say(f"waiting for other processes: {'; '.join(map(str, left))}")
            waiting = True
            time.sleep(PAUSE)
    write_entries(table)
    write_searches(table)


def held(found: Mapping[str, Any], row: TableRow, plain: float) -> bool:
    """Tell whether the strength that a search chose is known to cost no more than it may in the whole training."""
    known = dict(found.get("whole trainings", []))
    return bool(known.get(found["chosen"], -1.0) >= plain - row.tolerance)


def _data(name: str) -> Dataset:
    if "/" in name and not name.endswith(".npz") and not Path(name).is_dir():
        raise DataError(
            f"{name}: no such folder; images by class are expected here, train/CLASS/*.JPEG and val/CLASS/*.JPEG. "
            "Put ImageNet there or make it a link"
        )
    return load_dataset(name, code=True)


class Maker:
    """Makes rows of a table, one at a time."""

    def __init__(self, table: Table, data: dict[str, Dataset], say: Say) -> None:
        self.table, self.data, self.say = table, data, say

    def make(self, job: Job) -> bool:
        """Do what is missing of a row, unless another process is at it; return whether it is done by now."""
        recipe = self.recipe(job)
        plain = self.plain(job.network) if self.proves(job) else None
        if recipe is None or (self.proves(job) and plain is None):
            return False
        folder = self.table.folder(job)
        with claimed(folder) as mine:
            if not mine:
                return False
            entry = self.entry(job, recipe)
            missing = {name: s for name, s in self.table.settings.items() if not covers(entry, name, s)}
            if not missing:
                return True
            if not self.trained(folder / "model.safetensors", recipe):
                self.say(f"{job.network}, seed {job.seed}: training {job.row.name}")
                self.train(recipe, job.network, folder)
            done = plain is None or self.holds(job, plain)
            if done:
                write_json(folder / "entry.json", self.measured(job, recipe, entry, missing))
                write_entries(self.table)
        return done or self.make(job)

    def plain(self, network: str) -> float | None:
        """Return what the row without a penalty has on validation images; nothing while another process is at it."""
        job = Job(network, 0, self.table.row("none"))
        recipe = self.recipe(job)
        if recipe is None:
            return None
        of_row = (
            e for e in read_entries(self.table.file) if (e["network"], e["seed"], e["row"]) == (network, 0, "none")
        )
        entry = next((e for e in of_row if same_recipe(e["recipe"], recipe)), None)
        if entry is None and self.make(job):
            entry = self.entry(job, recipe)
        return None if entry is None else float(entry["validation"]["validation_accuracy"])

    def proves(self, job: Job) -> bool:
        """Tell whether this row shows if the strength that short trials chose holds in the whole training."""
        return self.table.proven and job.seed == 0 and job.row.knob is not None and job.row.knob.aim == "strongest"

    def holds(self, job: Job, plain: float) -> bool:
        """Tell whether a trained row lost no more than it may, on validation images; else take a weaker strength.

        Short trials find the order of a strength. What it costs grows with the number of steps, so that one that
        cost nothing there may cost a point in the end. Each that did is put aside, and the next is a quarter of a
        decade weaker.
        """
        folder = self.table.folder(job)
        now = float(read_json(folder / "run.json", what="the summary of a run")["results"]["validation_accuracy"])
        path = self.searched(job.network, job.row)
        found: dict[str, Any] = read_json(path, what="what a search found")
        value = found["chosen"]
        known = [pair for pair in found.get("whole trainings", []) if pair[0] != value]
        found["whole trainings"] = [*known, [value, now]]
        good = held(found, job.row, plain)
        if not good:
            found["chosen"] = float(f"{value / 10**0.25:.2g}")
            self.say(f"  {value:g}: {100 * now:.2f} % of {100 * plain:.2f} % after the whole training, too strong")
            aside = folder.with_name(f"{folder.name}-{value:g}")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
        write_json(path, found)
        return good

    def entry(self, job: Job, recipe: Recipe) -> dict[str, Any] | None:
        """Return what was measured of a row, if its checkpoint is still that of this recipe."""
        path = self.table.folder(job) / "entry.json"
        if not path.is_file() or not self.trained(path.with_name("model.safetensors"), recipe):
            return None
        entry: dict[str, Any] = read_json(path, what="what was measured of a row")
        return entry if same_recipe(entry["recipe"], recipe) else None

    def trained(self, path: Path, recipe: Recipe) -> bool:
        """Tell whether a checkpoint is there that this recipe made."""
        return path.is_file() and same_recipe(read_checkpoint(path)[1].get("recipe"), recipe)

    def base(self, network: str, seed: int) -> bool:
        """Train a base network, unless that was done; return false if another process is at it."""
        path = self.table.base(network, seed)
        if path.is_file():
            return True
        if self.table.one_start:
            raise FileError(f"{path}: no such checkpoint; train it first, as paper/README.md says")
        recipe = self.table.recipe(network, "base").changed({"seed": seed})
        with claimed(path.parent) as mine:
            if mine and not path.is_file():
                published = CHECKPOINTS / path.parent.name
                if self.trained(published / path.name, recipe):
                    self.say(f"{network}, seed {seed}: the base network is that in {published}")
                    shutil.copytree(published, path.parent, dirs_exist_ok=True)
                    return True
                self.say(f"{network}, seed {seed}: training the base network")
                self.train(recipe, network, path.parent)
            return mine

    def recipe(self, job: Job) -> Recipe | None:
        """Return the recipe of a row with the values searched for it; nothing while what it needs is being trained.

        Searches are done with seed 0, once for all seeds, and a strength that has to hold in a whole training is known
        when the row of seed 0 is. Whoever searches for the same at the same time shares the
        trials, and nothing is tried again.
        """
        searched = job.row.takes if job.row.knob is None else (*job.row.takes, job.row.name)
        seeds = {job.seed, 0} if searched else {job.seed}
        if not all(self.base(job.network, seed) for seed in sorted(seeds, key=lambda seed: seed != job.seed)):
            return None
        values: dict[str, float] = {}
        for name in searched:
            shown = Job(job.network, 0, self.table.row(name))
            found = self.search(job.network, shown.row)
            if shown != job and self.proves(shown):
                plain = self.plain(job.network)
                if plain is None or not (held(found, shown.row, plain) or self.make(shown)):
                    return None
                found = self.search(job.network, shown.row)
            values.update(dict.fromkeys(found["keys"], float(found["chosen"])))
        return self.changed(job).changed(values)

    def changed(self, job: Job) -> Recipe:
        """Return the recipe of a row without what is searched for it."""
        start = {"name": job.row.name, "seed": job.seed, "init": str(self.table.base(job.network, job.seed))}
        own = job.row.by_network.get(job.network, {})
        return self.table.recipe(job.network, "tune").changed({**start, **job.row.changes, **own})

    def search(self, network: str, row: TableRow) -> dict[str, Any]:
        """Return what a search found for a row; what was found before counts only for the very same recipe."""
        assert row.knob is not None
        name = f"{self.table.scale} {network} {row.trials_of or row.name}"
        recipe = self.changed(Job(network, 0, row)).changed({"name": name})
        path = self.searched(network, row)
        if path.is_file():
            known: dict[str, Any] = read_json(path, what="what a search found")
            if same_recipe(known["recipe"], recipe):
                return known
        published = read_searches(self.table).get(network, {}).get(row.name, {})
        if same_recipe(published.get("recipe"), recipe):
            write_json(path, published)
            return dict(published)
        self.say(f"{network}: searching {' = '.join(row.knob.keys)} for {row.name}")
        found = search(
            recipe,
            self.data[network],
            row.knob,
            storage=f"sqlite:///{self.table.runs / 'search.db'}",
            known=self.tried(network, row, recipe),
            tolerance=row.tolerance,
            on_trial=lambda value, accuracy: self.say(f"  {value:g}: {100 * accuracy:.2f} %"),
            say=lambda line: self.say(f"  {line}"),
            **SEARCHED[self.table.scale],
        )
        self.say(f"  chosen: {found.chosen:g}")
        record = {**found.to_dict(), "seed": 0, "recipe": recipe.to_dict(), "origin": origin()}
        write_json(path, record)
        return record

    def tried(self, network: str, row: TableRow, recipe: Recipe) -> dict[float, float]:
        """Return what published searches know of the very same trials, by value; two rows may choose from the same."""
        assert row.knob is not None
        return {
            value: accuracy
            for found in read_searches(self.table).get(network, {}).values()
            if found["keys"] == list(row.knob.keys) and same_recipe(found["recipe"], recipe)
            for value, accuracy in found["accuracies"]
        }

    def searched(self, network: str, row: TableRow) -> Path:
        """Return the file of what a search found."""
        return self.table.runs / f"{self.table.name}-{self.table.scale}" / f"search-{network}-{row.name}.json"

    def train(self, recipe: Recipe, network: str, folder: Path) -> None:
        """Train into a folder, from where the same training was stopped before, if it was."""
        stopped = RunFolder(folder, recipe).state.is_file()
        try:
            train(recipe, self.data[network], folder, resume=stopped, say=self.say)
        except CheckpointError:  # what is there is of another recipe, or damaged
            train(recipe, self.data[network], folder)

    def measured(
        self, job: Job, recipe: Recipe, entry: dict[str, Any] | None, missing: Mapping[str, Setting]
    ) -> dict[str, Any]:
        """Measure a row in the settings that it lacks; return its entry."""
        data, folder = self.data[job.network], self.table.folder(job)
        model, _ = load_model(folder / "model.safetensors")
        splits = {"test": data.test.first(self.table.tested), "validation": data.validation}
        batches = {part: Batches(split.channels_last(), BATCH) for part, split in splits.items()}
        settings = {} if entry is None else dict(entry["settings"])
        for name, setting in missing.items():
            net = quantized(model, data, **setting.options)
            settings[name] = {
                part: [r.to_dict() for r in anybit.sweep(net, batches[part], widths=setting.widths, label=job.row.name)]
                for part in (("test", "validation") if setting.validated else ("test",))
            }
        run = read_json(folder / "run.json", what="the summary of a run")
        first = next(iter(settings.values()))["test"]
        scores = ", ".join(f"{Bits(r['weights'], r['activations'])} {100 * r['accuracy']:.2f}" for r in first)
        self.say(f"{job}: {scores}")
        return {
            "network": job.network,
            "seed": job.seed,
            "row": job.row.name,
            "recipe": recipe.to_dict(),
            "validation": run["results"],
            "epoch_seconds": run["epoch_seconds"],
            "trained": {key: run[key] for key in ("commit", "date", "machine", "versions")},
            "measured": origin(),
            "settings": settings,
        }


def command(
    what: Annotated[str, typer.Argument(help="table1 or table2.")],
    scale: Annotated[
        str,
        typer.Option(
            help="laptop: small networks. converged: the same, trained to the end. paper: full size. "
            "any-width: the any-width objective beside the other ways to train."
        ),
    ] = "laptop",
    network: Annotated[list[str] | None, typer.Option(help="Only this network; may be given more than once.")] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0",
    row: Annotated[list[str] | None, typer.Option(help="Only this row; may be given more than once.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Only print what is there.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Measure all checkpoints again; train nothing twice.")] = False,
    recipes: Annotated[Path, typer.Option(help="The folder of the recipes.")] = RECIPES,
    runs: Annotated[Path, typer.Option(help="Where checkpoints go.")] = Path("runs"),
    results: Annotated[Path, typer.Option(help="Where numbers and tables go; results has what was published.")] = Path(
        "runs"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the measured numbers instead of the table.")] = False,
) -> None:
    """Train and measure what is missing of a table, and print it beside the paper's numbers.

    Stop it at any time: the same command goes on where it was. Start it several times: they share the rows.
    """
    from anybit.cli.show import errors, progress_bars
    from paper.show import table_text, write_table

    try:
        numbers = [int(word) for word in seeds.split(",")]
    except ValueError as error:
        raise SpecError(f"seeds are whole numbers separated by commas; got {seeds!r}") from error
    table = find_table(what, scale, recipes=recipes, runs=runs, results=results)
    if not show:
        with progress_bars() as start:
            run_table(
                table,
                networks=network or table.networks,
                seeds=numbers,
                rows=[table.row(name) for name in row] if row else table.rows,
                again=again,
                say=lambda line: errors.print(line, highlight=False, soft_wrap=True, markup=False),
                start=start,
            )
        write_table(table)
    print(json.dumps(read_entries(table.file), indent=1) if as_json else table_text(table))


if __name__ == "__main__":
    run_command(command)
