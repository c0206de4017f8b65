"""Trained networks for figures and appendices: from run folders, or a small one trained on the spot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import anybit
from anybit.common.progress import Start, quiet
from anybit.data import Dataset, load_dataset
from anybit.errors import CheckpointError, DataError, FileError
from anybit.models import build_model
from anybit.simulate.capture import evaluating
from anybit.task.checkpoint import load_model
from anybit.train.begin import model_shape
from anybit.train.loop import fit, steps_of
from anybit.train.recipe import DataRecipe, ModelRecipe, OptimizerRecipe, Recipe
from paper import cifar10

TABLES = Path("runs/table1-converged"), Path("runs/table1-laptop")
"""Where the tables keep their runs, NETWORK-SEED/ROW; the one in the paper's regime comes first."""

PAIR = ("none", "l1")
"""The two rows of the table that the figures compare."""

SMALL = Recipe(
    name="small",
    epochs=8,
    model=ModelRecipe("small-conv", multiplier=0.25),
    data=DataRecipe("digits", batch=64, augment=False),
    optimizer=OptimizerRecipe(lr=0.1, weight_decay=5e-4),
)
"""What the appendices look at when no run is named: a few seconds of training."""


def load_data(name: str) -> Dataset:
    """Return a data set by the name in a recipe; older run folders call CIFAR-10 by its plain name."""
    return load_dataset(cifar10.NAME if name == "cifar10" else name, code=name == cifar10.NAME or name == "cifar10")


def quantized(model: nn.Module, dataset: Dataset, **options: Any) -> Any:
    """Return a network with its width switch, unless told otherwise set up as in the paper: symmetric, per tensor."""
    return anybit.prepare(model, dataset.test.x[:2], input_range=dataset.input_range, **{"preset": "paper", **options})


@torch.no_grad()
def predict(network: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the logits and labels of every example, with the network in evaluation mode for the time being."""
    with evaluating(network):
        pairs = [(network(x), y) for x, y in batches]
    return torch.cat([logits for logits, _ in pairs]), torch.cat([labels for _, labels in pairs])


def folded_weights(net: nn.Module) -> list[Tensor]:
    """Return the weights of a quantized network with batch norm folded into them."""
    return [value for value in net.parameters() if value.dim() > 1]


def bin_width(weight: Tensor, bits: int) -> Tensor:
    """Return the width of a bin of the paper's grid: symmetric, up to the largest entry.

    >>> bin_width(torch.tensor([3.5, -7.0]), 4)
    tensor(1.)
    """
    return weight.abs().amax().div(2 ** (bits - 1) - 1)


@dataclass(frozen=True)
class Run:
    """A trained network, what it was trained on, and a label that says how."""

    path: Path
    label: str
    seed: int
    data: str
    model: nn.Module


def recipe_label(recipe: dict[str, Any]) -> str:
    """Return in a few words what a recipe does to make a network robust.

    >>> recipe_label({"penalty": {"weight": 0.1, "norm": "l1", "kurtosis": 0.5}}), recipe_label({})
    ('l1 penalty + kurtosis', 'no penalty')
    >>> recipe_label({"quantize": {"widths": ["W4A4", "W8A4"]}})
    'straight-through W4A4 W8A4'
    """
    penalty, quantize = (value if isinstance(value, dict) else {} for value in map(recipe.get, ("penalty", "quantize")))
    parts = []
    if penalty.get("weight") or penalty.get("activation"):
        parts.append(f"{penalty.get('norm', 'l1')} penalty")
    parts += [name for name in ("orthogonal", "kurtosis", "noise") if penalty.get(name)]
    if widths := quantize.get("widths"):
        parts.append(" ".join(["straight-through", *map(str, widths)]))
    return " + ".join(parts) or "no penalty"


def load_run(path: str | Path) -> Run:
    """Load the network of a run folder, or of a checkpoint."""
    path = Path(path)
    checkpoint = path / "model.safetensors" if path.is_dir() else path
    model, about = load_model(checkpoint)
    recipe, seed, data = about.get("recipe", {}), about.get("seed", 0), about.get("data")
    if not isinstance(recipe, dict) or not isinstance(seed, int) or not isinstance(data, str):
        raise CheckpointError(f"{checkpoint}: the header lacks the recipe, the seed or the data set; train it again")
    return Run(path, recipe_label(recipe), seed, data, model.eval())


def load_runs(paths: Sequence[Path], *, merge_seeds: bool = False) -> list[Run]:
    """Load several runs on the same data; those that a label does not tell apart are named after their path too.

    With `merge_seeds` the runs of one recipe keep one label, for a figure that averages over seeds.
    """
    runs = [load_run(path) for path in paths]
    if len(names := sorted({run.data for run in runs})) > 1:
        raise DataError(f"runs on {' and on '.join(names)} cannot be compared; take one data set")
    keys = [(run.label, run.seed) if merge_seeds else run.label for run in runs]
    count = Counter(keys)
    return [
        replace(run, label=f"{run.label}, {run.path}") if count[key] > 1 else run
        for run, key in zip(runs, keys, strict=True)
    ]


def default_runs(*, seeds: bool = False, tables: Sequence[Path] = TABLES) -> list[Path]:
    """Return a table's run without penalty and the one with the l1 penalty, of one seed or of every seed."""
    pairs = ([f for f in sorted(table.glob("*-*")) if _has_pair(f)] for table in tables)
    ready = next(filter(None, pairs), [])
    if not ready:
        places = " and ".join(map(str, tables))
        raise FileError(
            f"{places}: no network with the rows {' and '.join(PAIR)} here; make them with: make table1, or name "
            "a pair of run folders: --runs DIR --runs DIR"
        )
    # The paper draws its figures from the VGG-like network.
    first = next((folder for folder in ready if folder.name.startswith("vgg")), ready[0])
    network = first.name.rpartition("-")[0]
    chosen = [folder for folder in ready if folder.name.rpartition("-")[0] == network] if seeds else [first]
    return [folder / row for folder in chosen for row in PAIR]


def _has_pair(folder: Path) -> bool:
    return all((folder / row / "model.safetensors").is_file() for row in PAIR)


def small_run(*, seed: int = 0, start: Start = quiet) -> tuple[nn.Module, Dataset]:
    """Train a small network on digits and return it with its data."""
    recipe = replace(SMALL, seed=seed)
    dataset = load_dataset(recipe.data.name)
    torch.manual_seed(seed)
    model = build_model(**model_shape(recipe, dataset))
    fit(model, recipe, dataset, progress=start("training a small network", steps_of(recipe, dataset)))
    return model.eval(), dataset
