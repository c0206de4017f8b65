"""The paper's Table 1 on this machine: every row trained once from a shared start, searched, and measured.

Whatever is done is on disk: base networks and rows as run folders, searches and measurements as JSON. The same call
again goes on where the last one stopped, and a row that only lacks a measurement is not trained again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from anybit.analysis.progress import Start, quiet
from anybit.analysis.table_rows import IMAGENET_ROWS, IMAGENET_WIDTHS, ROWS, WIDTHS, TableRow
from anybit.data import Batches, Dataset, Split, load_dataset
from anybit.errors import DataError, FileError, RecipeError, SpecError
from anybit.evaluate.sweep import sweep
from anybit.files import read_json, write_json
from anybit.provenance import origin
from anybit.quant.prepare import prepare
from anybit.spec import Bits
from anybit.train.checkpoint import load_model, read_checkpoint
from anybit.train.loop import train
from anybit.train.recipe import Recipe, load_recipe, parse_recipe
from anybit.train.search import search

FORMAT = "anybit-table/1"
SEARCH_FORMAT = "anybit-search/1"
SCALES = ("laptop", "paper")
BATCH = 500
Say = Callable[[str], None]


@dataclass(frozen=True)
class Setting:
    """One way to quantize: what `prepare` is told, and the widths to measure."""

    options: Mapping[str, Any] = field(default_factory=dict)
    widths: tuple[Bits, ...] = WIDTHS


SETTINGS = {
    "per-tensor": Setting(),
    "per-channel": Setting({"per_channel": True}, (*WIDTHS[1:], Bits(2, 8))),
    "per-tensor, helpers": Setting({"helpers": "all"}, WIDTHS[1:]),
    "per-channel, helpers": Setting({"per_channel": True, "helpers": "all"}, (*WIDTHS[1:], Bits(2, 8))),
}
"""The ways to quantize, by name: add one here and only that is measured, from the stored checkpoints."""


IMAGENET_SETTINGS = {
    "per-tensor": Setting(widths=IMAGENET_WIDTHS),
    "per-channel": Setting({"per_channel": True}, (*IMAGENET_WIDTHS[1:], Bits(3, 3), Bits(2, 8))),
}


@dataclass(frozen=True)
class Table:
    """What a table is made of and where its parts are: `recipes` in, `runs` and `results` out."""

    name: str = "table1"
    scale: str = "laptop"
    networks: tuple[str, ...] = ("vgg-like", "resnet18")
    rows: tuple[TableRow, ...] = ROWS
    settings: Mapping[str, Setting] = field(default_factory=lambda: SETTINGS)
    recipes: Path = Path("recipes")
    runs: Path = Path("runs")
    results: Path = Path("results")

    def row(self, name: str) -> TableRow:
        """Return the row of that name."""
        for row in self.rows:
            if row.name == name:
                return row
        raise SpecError(f"{self.name} has no row {name!r}: use {', '.join(row.name for row in self.rows)}")

    @property
    def file(self) -> Path:
        """What was measured."""
        return self.results / f"{self.name}-{self.scale}.json"

    @property
    def search_file(self) -> Path:
        """What was searched and chosen."""
        return self.results / f"search-{self.scale}.json"

    def recipe(self, network: str, part: str) -> Recipe:
        """Return a network's recipe: "base" for the shared start, "tune" for what every row changes."""
        return load_recipe(self.recipes / self.scale / f"{network}-{part}.toml")

    def base(self, network: str, seed: int) -> Path:
        """Return the checkpoint that all rows of one network and seed start from."""
        return self.runs / f"{self.recipe(network, 'base').name}-{seed}" / "model.safetensors"

    def folder(self, network: str, seed: int, row: TableRow) -> Path:
        """Return the run folder of one row."""
        return self.runs / f"{self.name}-{self.scale}" / f"{network}-{seed}" / row.name


def find_table(
    name: str,
    scale: str,
    *,
    recipes: Path = Path("recipes"),
    runs: Path = Path("runs"),
    results: Path = Path("results"),
) -> Table:
    """Return one of the paper's tables at one of the two scales."""
    if scale not in SCALES:
        raise SpecError(f"a scale is one of {', '.join(SCALES)}; got {scale!r}")
    if name not in ("table1", "table2"):
        raise SpecError(f"what can be reproduced here is table1 or table2; got {name!r}")
    table = Table(scale=scale, recipes=recipes, runs=runs, results=results)
    if name == "table1":
        return table
    if scale != "paper":
        raise SpecError("table2 is ImageNet at full size; say --scale paper")
    networks = ("imagenet-resnet18",)
    return replace(table, name=name, networks=networks, rows=IMAGENET_ROWS, settings=IMAGENET_SETTINGS)


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

    With `again` everything is measured anew, from the checkpoints that are there.
    """
    data: Dataset | None = None
    advance = start("rows", len(networks) * len(seeds) * len(rows))
    for network in networks:
        tune = table.recipe(network, "tune")
        if data is None or data.name != tune.data.name:
            data = _load(tune.data.name)
        for seed in seeds:
            _train_base(table, network, seed, data, say)
            for row in rows:
                recipe = row_recipe(table, network, seed, row, data, say)
                _train_row(table, network, seed, row, recipe, data, say)
                _measure_row(table, network, seed, row, recipe, data, again, say)
                advance(1)


def _load(name: str) -> Dataset:
    if "/" in name and not name.endswith(".npz") and not Path(name).is_dir():
        raise DataError(
            f"{name}: no such folder; images by class are expected here, train/CLASS/*.JPEG and val/CLASS/*.JPEG. "
            "Put ImageNet there or make it a link"
        )
    return load_dataset(name)


def _train_base(table: Table, network: str, seed: int, data: Dataset, say: Say) -> None:
    path = table.base(network, seed)
    if not path.is_file():
        say(f"{network}, seed {seed}: training the base network")
        train(table.recipe(network, "base").changed({"seed": seed}), data, path.parent)


def row_recipe(table: Table, network: str, seed: int, row: TableRow, data: Dataset, say: Say) -> Recipe:
    """Return the recipe of one row, searching what it needs first; searches are done once, with seed 0."""
    found = {key: value for name in row.takes for key, value in searched(table, network, name, data, say).items()}
    if row.knob is not None:
        found.update(searched(table, network, row.name, data, say))
    return _changed(table, network, seed, row).changed(found)


def _changed(table: Table, network: str, seed: int, row: TableRow) -> Recipe:
    start = {"name": row.name, "seed": seed, "init": str(table.base(network, seed))}
    return table.recipe(network, "tune").changed({**start, **row.changes})


def searched(table: Table, network: str, name: str, data: Dataset, say: Say) -> dict[str, float]:
    """Return the chosen values of one row by key, from the search file or from a search now."""
    known = read_searches(table.search_file)
    if name not in known.get(network, {}):
        row = table.row(name)
        assert row.knob is not None
        _train_base(table, network, 0, data, say)
        recipe = _changed(table, network, 0, row).changed({"name": f"{table.scale} {network} {name}"})
        say(f"{network}: searching {' = '.join(row.knob.keys)} for {name}")
        found = search(
            recipe,
            data,
            row.knob,
            storage=f"sqlite:///{table.runs / 'search.db'}",
            on_trial=lambda value, accuracy: say(f"  {value:g}: {100 * accuracy:.2f} %"),
        )
        say(f"  chosen: {found.chosen:g}")
        known = read_searches(table.search_file)
        known.setdefault(network, {})[name] = {**found.to_dict(), "seed": 0, "origin": origin()}
        write_json(table.search_file, {"format": SEARCH_FORMAT, "searches": known})
    found_values = known[network][name]
    return {key: float(found_values["chosen"]) for key in found_values["keys"]}


def read_searches(path: Path) -> dict[str, dict[str, Any]]:
    """Return what was searched, by network and row; nothing if there is no file yet."""
    if not path.is_file():
        return {}
    values = read_json(path, what="a record of searches")
    if not isinstance(values, dict) or values.get("format") != SEARCH_FORMAT:
        raise FileError(f"{path}: not in the format {SEARCH_FORMAT!r}; move it away and search again")
    return dict(values["searches"])


def _train_row(table: Table, network: str, seed: int, row: TableRow, recipe: Recipe, data: Dataset, say: Say) -> None:
    folder = table.folder(network, seed, row)
    checkpoint = folder / "model.safetensors"
    if checkpoint.is_file() and _same(read_checkpoint(checkpoint)[1].get("recipe"), recipe):
        return
    say(f"{network}, seed {seed}: training {row.name}")
    train(recipe, data, folder)


def _measure_row(
    table: Table,
    network: str,
    seed: int,
    row: TableRow,
    recipe: Recipe,
    data: Dataset,
    again: bool,
    say: Say,
) -> None:
    entry = None if again else _known_entry(read_entries(table.file), network, seed, row, recipe)
    settings = table.settings
    missing = [name for name, setting in settings.items() if not _covers(entry, name, setting)]
    if not missing:
        return
    folder = table.folder(network, seed, row)
    run = read_json(folder / "run.json", what="the summary of a run")
    model, _ = load_model(folder / "model.safetensors")
    measured = dict(entry["settings"]) if entry else {}
    for name in missing:
        net = prepare(model, data.test.x[:2], input_range=data.input_range, **settings[name].options)
        measured[name] = {
            "test": _sweep(net, data.test, settings[name].widths, row, seed),
            "validation": _sweep(net, data.validation, settings[name].widths, row, seed),
        }
    new = {
        "network": network,
        "seed": seed,
        "row": row.name,
        "recipe": recipe.to_dict(),
        "validation": run["results"],
        "epoch_seconds": run["epoch_seconds"],
        "trained": {key: run[key] for key in ("commit", "date", "machine", "versions")},
        "measured": origin(),
        "settings": measured,
    }
    entries = [e for e in read_entries(table.file) if not _is(e, network, seed, row)]
    write_json(table.file, {"format": FORMAT, "entries": [*entries, new]})
    first = next(iter(measured.values()))["test"]
    scores = ", ".join(f"{Bits(r['weights'], r['activations'])} {100 * r['accuracy']:.2f}" for r in first)
    seconds = ", ".join(f"{second:.0f} s" for second in run["epoch_seconds"]["processor"])
    say(f"{network}, seed {seed}, {row.name}: {scores}; epochs of {seconds}")


def _sweep(net: Any, split: Split, widths: Sequence[Bits], row: TableRow, seed: int) -> list[dict[str, Any]]:
    return [r.to_dict() for r in sweep(net, Batches(split, BATCH), widths=widths, label=row.name, seed=seed)]


def read_entries(path: Path) -> list[dict[str, Any]]:
    """Return what was measured, one entry per network, seed and row; nothing if there is no file yet."""
    if not path.is_file():
        return []
    values = read_json(path, what="a measured table")
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise FileError(f"{path}: not in the format {FORMAT!r}; move it away and measure again")
    return list(values["entries"])


def _is(entry: Mapping[str, Any], network: str, seed: int, row: TableRow) -> bool:
    return (entry["network"], entry["seed"], entry["row"]) == (network, seed, row.name)


def _known_entry(
    entries: Sequence[dict[str, Any]], network: str, seed: int, row: TableRow, recipe: Recipe
) -> dict[str, Any] | None:
    """Return the entry of a row, unless it was trained by another recipe."""
    for entry in entries:
        if _is(entry, network, seed, row) and _same(entry["recipe"], recipe):
            return entry
    return None


def _same(known: Any, recipe: Recipe) -> bool:
    """Tell whether a stored recipe is this one; keys that came later have their defaults."""
    try:
        return isinstance(known, dict) and parse_recipe({k: v for k, v in known.items() if v is not None}) == recipe
    except RecipeError:
        return False


def _covers(entry: Mapping[str, Any] | None, name: str, setting: Setting) -> bool:
    rows = entry["settings"].get(name, {}).get("test", []) if entry else []
    return {Bits(row["weights"], row["activations"]) for row in rows} >= set(setting.widths)
