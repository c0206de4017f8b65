"""The paper's tables: what each is made of, where its parts are, and what its files say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from anybit.analysis.table_rows import IMAGENET_ROWS, IMAGENET_WIDTHS, ROWS, WIDTHS, TableRow
from anybit.common.files import read_json
from anybit.errors import FileError, RecipeError, SpecError
from anybit.spec import Bits
from anybit.train.recipe import Recipe, load_recipe, parse_recipe

FORMAT = "anybit-table/1"
SEARCH_FORMAT = "anybit-search/1"
SCALES = ("laptop", "paper")


@dataclass(frozen=True)
class Setting:
    """One way to quantize: what `prepare` is told, the widths to measure, and whether on the validation split too."""

    options: Mapping[str, Any] = field(default_factory=dict)
    widths: tuple[Bits, ...] = WIDTHS
    validated: bool = True


SETTINGS = {
    "per-tensor": Setting(),
    "per-channel": Setting({"per_channel": True}, (*WIDTHS[1:], Bits(2, 8))),
    "per-tensor, helpers": Setting({"helpers": "all"}, WIDTHS[1:], validated=False),
    "per-channel, helpers": Setting(
        {"per_channel": True, "helpers": "all"}, (*WIDTHS[1:], Bits(2, 8)), validated=False
    ),
}
"""The ways to quantize, by name: add one here and only that is measured, from the stored checkpoints."""


IMAGENET_SETTINGS = {
    "per-tensor": Setting(widths=IMAGENET_WIDTHS),
    "per-channel": Setting({"per_channel": True}, (*IMAGENET_WIDTHS[1:], Bits(3, 3), Bits(2, 8))),
}


@dataclass(frozen=True)
class Job:
    """One row to train and measure, for one network and one seed."""

    network: str
    seed: int
    row: TableRow

    def __str__(self) -> str:
        return f"{self.network}, seed {self.seed}, {self.row.name}"

    def of(self, entry: Mapping[str, Any]) -> bool:
        """Tell whether an entry of the measured table is about this row."""
        return (entry["network"], entry["seed"], entry["row"]) == (self.network, self.seed, self.row.name)


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

    @property
    def storage(self) -> str:
        """Where trials and claims are kept, unless told otherwise."""
        return f"sqlite:///{self.runs / 'search.db'}"

    def recipe(self, network: str, part: str) -> Recipe:
        """Return a network's recipe: "base" for the shared start, "tune" for what every row changes."""
        return load_recipe(self.recipes / self.scale / f"{network}-{part}.toml")

    def base(self, network: str, seed: int) -> Path:
        """Return the checkpoint that all rows of one network and seed start from."""
        return self.runs / f"{self.recipe(network, 'base').name}-{seed}" / "model.safetensors"

    def folder(self, job: Job) -> Path:
        """Return the run folder of one row."""
        return self.runs / f"{self.name}-{self.scale}" / f"{job.network}-{job.seed}" / job.row.name

    def checkpoint(self, job: Job) -> Path:
        """Return the checkpoint of one row."""
        return self.folder(job) / "model.safetensors"


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


def read_entries(path: Path) -> list[dict[str, Any]]:
    """Return what was measured, one entry per network, seed and row; nothing if there is no file yet."""
    if not path.is_file():
        return []
    values = read_json(path, what="a measured table")
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise FileError(f"{path}: not in the format {FORMAT!r}; move it away and measure again")
    return list(values["entries"])


def read_searches(path: Path) -> dict[str, dict[str, Any]]:
    """Return what was searched, by network and row; nothing if there is no file yet."""
    if not path.is_file():
        return {}
    values = read_json(path, what="a record of searches")
    if not isinstance(values, dict) or values.get("format") != SEARCH_FORMAT:
        raise FileError(f"{path}: not in the format {SEARCH_FORMAT!r}; move it away and search again")
    return dict(values["searches"])


def known_entry(entries: Sequence[dict[str, Any]], job: Job, recipe: Recipe) -> dict[str, Any] | None:
    """Return the entry of a row, unless it was trained by another recipe."""
    for entry in entries:
        if job.of(entry) and same_recipe(entry["recipe"], recipe):
            return entry
    return None


def same_recipe(known: Any, recipe: Recipe) -> bool:
    """Tell whether a stored recipe is this one.

    Keys that came later have their defaults, noise once was a switch, and how fast it was computed does not matter.
    """
    if not isinstance(known, dict) or not isinstance(known.get("penalty"), dict):
        return False
    values = {**known, "speed": recipe.to_dict()["speed"]}
    if isinstance(noise := known["penalty"].get("noise"), bool):
        values["penalty"] = {**known["penalty"], "noise": float(noise)}
    try:
        return parse_recipe({key: value for key, value in values.items() if value is not None}) == recipe
    except RecipeError:
        return False


def covers(entry: Mapping[str, Any] | None, name: str, setting: Setting) -> bool:
    """Tell whether an entry has every width of a setting."""
    rows = entry["settings"].get(name, {}).get("test", []) if entry else []
    return {Bits(row["weights"], row["activations"]) for row in rows} >= set(setting.widths)
