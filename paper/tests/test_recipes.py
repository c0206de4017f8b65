"""Every recipe can be read, and the full-size ones take two steps on noise."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from anybit.data import Dataset, Split
from anybit.models import MODELS, build_model
from anybit.train.begin import model_shape
from anybit.train.loop import fit
from anybit.train.recipe import FLAGSHIP, load_recipe
from paper import cifar10
from paper.tables import RECIPES

PAPER = sorted((RECIPES / "paper").glob("*.toml"))


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.toml")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_recipe_says_what_it_wants(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe == load_recipe(path, penalty=FLAGSHIP)
    assert recipe.model.name in MODELS
    assert recipe.data.name in (cifar10.NAME, "data/imagenet")
    assert recipe.name == f"{path.parent.name}-{path.stem}"


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_two_steps_of_a_full_size_recipe(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.model.multiplier == 1.0
    size, classes = (32, 10) if recipe.data.name == cifar10.NAME else (64, 1000)
    split = Split(torch.randn(4, 3, size, size), torch.arange(4))
    data = Dataset(recipe.data.name, split, split, split, tuple(map(str, range(classes))), (-3.0, 3.0))
    short = recipe.changed({"epochs": 1, "data.batch": 2, "optimizer.warmup": 0})
    if path.stem.endswith("-tune"):
        short = short.changed({"penalty.weight": 1e-4, "penalty.activation": 1e-4, "penalty.kurtosis": 0.1})
    torch.manual_seed(0)
    model = build_model(**model_shape(short, data))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lines: list[dict[str, Any]] = []
    fit(model, short, data, log=lambda **values: lines.append(values))
    assert len(lines) == 2
    assert all(math.isfinite(line["loss"]) for line in lines)
    after = model.state_dict()
    weights = [name for name, parameter in model.named_parameters() if parameter.dim() > 1]
    assert all(bool(torch.isfinite(after[name]).all()) for name in after)
    assert not any(torch.equal(before[name], after[name]) for name in weights)


def test_there_are_full_size_recipes() -> None:
    networks = ("imagenet-resnet18", "resnet18", "vgg-like")
    assert [path.stem for path in PAPER] == [f"{network}-{part}" for network in networks for part in ("base", "tune")]
