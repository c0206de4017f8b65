"""What the paper's tables are made of, where their parts are, and what their files say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from anybit.common.files import read_json, write_json
from anybit.errors import FileError, RecipeError, SpecError
from anybit.spec import Bits
from anybit.train.recipe import Recipe, load_recipe, parse_recipe
from paper import cifar10
from paper.rows import ANY_WIDTH_ROWS, CONVERGED_ROWS, IMAGENET_ROWS, IMAGENET_WIDTHS, ROWS, WIDTHS, TableRow

FORMAT, SEARCH_FORMAT = "anybit-table/1", "anybit-search/1"
RECIPES = Path(__file__).parent / "recipes"
CHECKPOINTS = Path(__file__).parent / "checkpoints"
"""Published starts, each in a folder of its run's name."""

SEARCHED: dict[str, dict[str, Any]] = {
    "laptop": {},
    "converged": {"epochs": 2, "share": 0.5, "finer": 1},
    "paper": {"finer": 1},
    "any-width": {},
}
"""The sizes a table can have, and how each searches for strengths and learning rates."""


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

WITH_DEFAULT = {
    **SETTINGS,
    "default": Setting({"preset": "default"}, (Bits(8, 8), *WIDTHS[1:], Bits(2, 8)), validated=False),
}
"""Those of the paper's table, and what `prepare` does unless told otherwise."""

CONVERGED_SETTINGS = {
    **WITH_DEFAULT,
    "per-tensor, ends at 8 bits": Setting({"sensitive": "8-bit"}, WIDTHS[1:], validated=False),
}
"""With one that tells how much of what is lost per tensor is lost in the first and the last layer."""

ANY_WIDTH_SETTINGS = {name: replace(setting, validated=False) for name, setting in WITH_DEFAULT.items()}

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


@dataclass(frozen=True)
class Table:
    """What a table is made of and where its parts are: `recipes` in, `runs` and `results` out."""

    name: str = "table1"
    scale: str = "laptop"
    networks: tuple[str, ...] = ("vgg-like", "resnet18")
    rows: tuple[TableRow, ...] = ROWS
    settings: Mapping[str, Setting] = field(default_factory=lambda: SETTINGS)
    recipes: Path = RECIPES
    runs: Path = Path("runs")
    results: Path = Path("runs")
    one_start: bool = False
    """Whether all seeds start from the checkpoint that the recipe names; they differ in batches and draws."""
    tested: int = 10_000
    """How many test images are measured, the first ones."""
    proven: bool = False
    """Whether a strength that short trials chose has to hold in the whole training too; else a weaker one is taken."""

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
    def searches(self) -> Path:
        """What searches found."""
        return self.results / f"search-{self.scale}.json"

    def recipe(self, network: str, part: str) -> Recipe:
        """Return a network's recipe: "base" for the shared start, "tune" for what every row changes."""
        return load_recipe(self.recipes / self.scale / f"{network}-{part}.toml")

    def base(self, network: str, seed: int) -> Path:
        """Return the checkpoint that all rows of one network and seed start from."""
        if self.one_start:
            return Path(str(self.recipe(network, "tune").init))
        return self.runs / f"{self.recipe(network, 'base').name}-{seed}" / "model.safetensors"

    def folder(self, job: Job) -> Path:
        """Return the run folder of one row."""
        return self.runs / f"{self.name}-{self.scale}" / f"{job.network}-{job.seed}" / job.row.name


def find_table(name: str, scale: str, **places: Any) -> Table:
    """Return one of the paper's tables at one of its sizes."""
    if scale not in SEARCHED:
        raise SpecError(f"a scale is one of {', '.join(SEARCHED)}; got {scale!r}")
    if name not in ("table1", "table2"):
        raise SpecError(f"what can be made here is table1 or table2; got {name!r}")
    table = Table(scale=scale, **places)
    if name == "table2":
        if scale != "paper":
            raise SpecError("table2 is ImageNet at full size; say --scale paper")
        networks = ("imagenet-resnet18",)
        parts: dict[str, Any] = {"rows": IMAGENET_ROWS, "settings": IMAGENET_SETTINGS, "proven": True}
        return replace(table, name=name, networks=networks, **parts)
    if scale == "any-width":
        parts = {"rows": ANY_WIDTH_ROWS, "settings": ANY_WIDTH_SETTINGS, "tested": 5_000}
        return replace(table, networks=("vgg-like", "resnet18", "mobilenet-v2"), one_start=True, **parts)
    if scale == "converged":
        return replace(table, rows=CONVERGED_ROWS, settings=CONVERGED_SETTINGS, proven=True)
    return replace(table, proven=scale == "paper")


def read_entries(path: Path) -> list[dict[str, Any]]:
    """Return what was measured, one entry per network, seed and row; nothing if there is no file yet."""
    if not path.is_file():
        return []
    values = read_json(path, what="a measured table")
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise FileError(f"{path}: not in the format {FORMAT!r}; move it away and measure again")
    return list(values["entries"])


def write_entries(table: Table) -> list[dict[str, Any]]:
    """Write what was measured of all rows in `runs` into one file, beside what is there of others; return all of it."""
    found = sorted((table.runs / f"{table.name}-{table.scale}").glob("*/*/entry.json"))
    fresh = [read_json(path, what="what was measured of a row") for path in found]
    entries = {(e["network"], e["seed"], e["row"]): e for e in (*read_entries(table.file), *fresh)}
    if fresh:
        write_json(table.file, {"format": FORMAT, "entries": list(entries.values())})
    return list(entries.values())


def read_searches(table: Table) -> dict[str, dict[str, Any]]:
    """Return what searches found that were published, by network and row."""
    if not table.searches.is_file():
        return {}
    found: dict[str, dict[str, Any]] = read_json(table.searches, what="what searches found")["searches"]
    return found


def write_searches(table: Table) -> None:
    """Write what searches in `runs` found into one file, beside what is there of others."""
    found = read_searches(table)
    paths = sorted((table.runs / f"{table.name}-{table.scale}").glob("search-*.json"))
    networks = [p.name.removesuffix("-tune.toml") for p in (table.recipes / table.scale).glob("*-tune.toml")]
    for path in paths:
        network = max((n for n in networks if path.stem.startswith(f"search-{n}-")), key=len)
        row = path.stem.removeprefix(f"search-{network}-")
        found.setdefault(network, {})[row] = read_json(path, what="what a search found")
    if paths:
        write_json(table.searches, {"format": SEARCH_FORMAT, "searches": found})


def same_recipe(known: Any, recipe: Recipe) -> bool:
    """Tell whether a stored recipe is this one: keys that came later have their defaults, and speed does not matter."""
    if not isinstance(known, dict):
        return False
    values = {**known, "speed": recipe.to_dict()["speed"]}
    if known.get("data", {}).get("name") == "cifar10":  # its name in older files
        values["data"] = {**known["data"], "name": cifar10.NAME}
    if isinstance(model := known.get("model"), dict) and "width" in model:
        values["model"] = {"name": model.get("name"), "multiplier": model["width"]}
    try:
        return parse_recipe({key: value for key, value in values.items() if value is not None}) == recipe
    except RecipeError:
        return False


def covers(entry: Mapping[str, Any] | None, name: str, setting: Setting) -> bool:
    """Tell whether an entry has every width of a setting."""
    rows = entry["settings"].get(name, {}).get("test", []) if entry else []
    return {Bits(row["weights"], row["activations"]) for row in rows} >= set(setting.widths)
