"""Trained networks for figures and appendices: from run folders, or a small one trained on the spot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anybit.common.progress import Start, quiet
from anybit.data import Dataset, load_dataset
from anybit.errors import CheckpointError, DataError, FileError
from anybit.models import build_model
from anybit.quant.network import QuantizedNetwork
from anybit.quant.prepare import prepare
from anybit.train.checkpoint import load_model
from anybit.train.loop import fit, model_shape, steps_of
from anybit.train.recipe import DataRecipe, ModelRecipe, OptimizerRecipe, Recipe

TABLE = Path("runs/table1-laptop")
"""Where the laptop-size table keeps its runs: NETWORK-SEED/ROW."""

PAIR = ("none", "l1")
"""The two rows of the table that the figures compare."""

PLAIN = "no penalty"

SMALL = Recipe(
    name="small",
    epochs=8,
    model=ModelRecipe("small-conv", multiplier=0.25),
    data=DataRecipe("digits", batch=64, augment=False),
    optimizer=OptimizerRecipe(lr=0.1, weight_decay=5e-4),
)
"""What the appendices look at when no run is named: a few seconds of training."""


@dataclass(frozen=True)
class Run:
    """A trained network, what it was trained on, and a label that says how."""

    path: Path
    label: str
    seed: int
    data: str
    model: nn.Module
    recipe: dict[str, Any]

    def quantized(self, dataset: Dataset) -> QuantizedNetwork:
        """Return the network with its width switch, set up as in the paper: symmetric, per tensor, without data."""
        return prepare(self.model, dataset.test.x[:2], input_range=dataset.input_range)


def recipe_label(recipe: dict[str, Any]) -> str:
    """Return in a few words what a recipe does to make a network robust.

    >>> recipe_label({"penalty": {"weight": 0.1, "norm": "l1", "kurtosis": 0.5}})
    'l1 penalty + kurtosis'
    >>> recipe_label({"quantize": {"widths": ["W4A4", "W8A4"]}})
    'straight-through W4A4 W8A4'
    >>> recipe_label({})
    'no penalty'
    """
    penalty, quantize = (value if isinstance(value, dict) else {} for value in map(recipe.get, ("penalty", "quantize")))
    parts = []
    if penalty.get("weight") or penalty.get("activation"):
        parts.append(f"{penalty.get('norm', 'l1')} penalty")
    parts += [name for name in ("orthogonal", "kurtosis", "noise") if penalty.get(name)]
    if widths := quantize.get("widths"):
        parts.append(" ".join(["straight-through", *map(str, widths)]))
    return " + ".join(parts) or PLAIN


def load_run(path: str | Path) -> Run:
    """Load the network of a run folder, or of a checkpoint."""
    path = Path(path)
    checkpoint = path / "model.safetensors" if path.is_dir() else path
    model, about = load_model(checkpoint)
    recipe, seed, data = about.get("recipe", {}), about.get("seed", 0), about.get("data")
    if not isinstance(recipe, dict) or not isinstance(seed, int) or not isinstance(data, str):
        raise CheckpointError(f"{checkpoint}: the header lacks the recipe, the seed or the data set; train it again")
    model.eval()
    return Run(path, recipe_label(recipe), seed, data, model, recipe)


def load_runs(paths: Sequence[str | Path], *, merge_seeds: bool = False) -> list[Run]:
    """Load several runs on the same data; those that a label does not tell apart are named after their path too.

    With `merge_seeds` the runs of one recipe keep one label, for a figure that averages over seeds.
    """
    runs = [load_run(path) for path in paths]
    if others := sorted({run.data for run in runs} - {run.data for run in runs[:1]}):
        raise DataError(f"runs on {runs[0].data} and on {', '.join(others)} cannot be compared; take one data set")
    keys = [(run.label, run.seed) if merge_seeds else run.label for run in runs]
    count = Counter(keys)
    return [
        replace(run, label=f"{run.label}, {run.path}") if count[key] > 1 else run
        for run, key in zip(runs, keys, strict=True)
    ]


def default_runs(*, seeds: bool = False, table: Path | None = None) -> list[Path]:
    """Return the table's run without penalty and the one with the l1 penalty, of one seed or of every seed."""
    table = TABLE if table is None else table
    whole = [
        folder
        for folder in sorted(table.glob("*-*"))
        if all((folder / row / "model.safetensors").is_file() for row in PAIR)
    ]
    if not whole:
        raise FileError(
            f"{table}: no network with the rows {' and '.join(PAIR)} here; make them with: anybit reproduce table1, "
            "or name a pair of run folders: --runs DIR --runs DIR"
        )
    # The paper draws its figures from the VGG-like network.
    first = next((folder for folder in whole if folder.name.startswith("vgg")), whole[0])
    network = first.name.rpartition("-")[0]
    chosen = [folder for folder in whole if folder.name.rpartition("-")[0] == network] if seeds else [first]
    return [folder / row for folder in chosen for row in PAIR]


def dataset_of(runs: Sequence[Run], *, examples: int | None = None) -> Dataset:
    """Return the data set of some runs, with the first so many test examples."""
    dataset = load_dataset(runs[0].data)
    for run in runs:
        _check_fit(run, dataset)
    if examples is None or examples >= len(dataset.test):
        return dataset
    return replace(dataset, test=dataset.test.first(examples))


@torch.no_grad()
def _check_fit(run: Run, dataset: Dataset) -> None:
    try:
        logits = run.model(dataset.test.x[:2])
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{run.path}: cannot take the inputs of {run.data}, {dataset.shape}: {reason}") from error
    if logits.shape[1] < len(dataset.classes):
        raise DataError(f"{run.path}: tells {logits.shape[1]} classes apart, {run.data} has {len(dataset.classes)}")


def small_run(*, seed: int = 0, start: Start = quiet) -> tuple[Run, Dataset]:
    """Train a small network on digits and return it with its data."""
    recipe = replace(SMALL, seed=seed)
    dataset = load_dataset(recipe.data.name)
    torch.manual_seed(seed)
    model = build_model(**model_shape(recipe, dataset))
    fit(model, recipe, dataset, progress=start("training a small network", steps_of(recipe, dataset)))
    run = Run(Path("trained on the spot"), PLAIN, seed, recipe.data.name, model, recipe.to_dict())
    return run, dataset
