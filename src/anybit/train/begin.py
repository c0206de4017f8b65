"""What a recipe asks for, made: the network that a run starts from, its optimizer, its penalties."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from anybit.common.text import first_line
from anybit.data import Dataset, Given, Split
from anybit.errors import SpecError
from anybit.evaluate.batches import Takes
from anybit.evaluate.metric import usual
from anybit.models import build_model
from anybit.objectives.any_width import AnyWidth
from anybit.objectives.base import Penalty, Sum
from anybit.objectives.gradient import GradientPenalty
from anybit.objectives.kurtosis import KurtosisPenalty
from anybit.objectives.noise import UniformNoise
from anybit.objectives.orthogonal import OrthogonalPenalty
from anybit.simulate.capture import Example, evaluating
from anybit.task.checkpoint import check_room, load_weights, read_weights
from anybit.task.networks import make_network
from anybit.task.task import pick_metric
from anybit.train.losses import check_targets, loss_by_name
from anybit.train.recipe import OptimizerRecipe, PenaltyRecipe, Recipe


def model_shape(recipe: Recipe, data: Dataset) -> dict[str, Any]:
    """Return what a checkpoint of one of our networks must say so that it can be built again."""
    classes = len(data.classes) or data.count_classes()
    sizes = {"channels": data.shape[0], "classes": classes, "multiplier": recipe.model.multiplier}
    return {"name": recipe.model.name, **sizes}


def make_optimizer(recipe: OptimizerRecipe, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that a recipe names."""
    if recipe.name != "sgd":
        kind = torch.optim.Adam if recipe.name == "adam" else torch.optim.AdamW
        return kind(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    return torch.optim.SGD(
        model.parameters(),
        lr=recipe.lr,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
        nesterov=recipe.momentum > 0,
    )


def make_penalty(
    recipe: PenaltyRecipe, model: nn.Module, *, measure: bool = True, example: Example | None = None
) -> Penalty:
    """Return the penalties that a recipe asks for, as one; without strengths it only measures the norms, if wanted.

    `example` is what the model is called with, for a quantized pass.
    """
    parts: list[Penalty] = []
    if recipe.any_width:
        assert example is not None
        strength = recipe.any_width_strength
        parts.append(AnyWidth(model, example, strength="auto" if strength is None else strength))
    if (measure and not recipe.any_width) or recipe.gradient:
        names = ("norm", "weight", "activation", "engine", "objective", "scale", "every")
        parts.append(GradientPenalty(model, **{name: getattr(recipe, name) for name in names}))
    if recipe.orthogonal:
        parts.append(OrthogonalPenalty(model, strength=recipe.orthogonal))
    if recipe.kurtosis:
        parts.append(KurtosisPenalty(model, strength=recipe.kurtosis))
    if recipe.noise:
        parts.append(UniformNoise(model, strength=recipe.noise))
    return parts[0] if len(parts) == 1 else Sum(parts)


def start(recipe: Recipe, data: Dataset) -> tuple[nn.Module, dict[str, Any]]:
    """Return the network that a run starts from, and what a checkpoint must say about it."""
    torch.manual_seed(recipe.seed)
    if recipe.model.factory is None:
        if len(data.shape) != 3:
            raise SpecError(f"the models here take images (channels, height, width); the data has {data.shape}")
        shape = model_shape(recipe, data)
        check_room(shape)
        model = build_model(**shape)
    else:
        tensors = None if recipe.init is None else read_weights(recipe.init)[0]
        model, shape = make_network(recipe.model.factory, tensors=tensors, classes=data.count_classes)
    if recipe.init is not None:
        load_weights(recipe.init, model)
    _check_fit(model, recipe, data)
    return model, shape


@torch.no_grad()
def _check_fit(model: nn.Module, recipe: Recipe, data: Dataset) -> None:
    """Refuse before the first step what would fail in the middle of a run."""
    batch = Takes.of(model).split(data.example)
    try:
        with evaluating(model):
            outputs = model(*batch.args, **batch.kwargs)
    except RuntimeError as error:
        word = recipe.model.word
        raise SpecError(f"{word} cannot take inputs of shape {data.shape}: {first_line(error)}") from error
    if isinstance(data.train, Given):
        check_targets(loss_by_name(recipe.loss), outputs, batch.targets)
        if data.validation is not None:
            metric = pick_metric(recipe.metric) or usual(outputs, batch.targets)
            metric.add(outputs, outputs if metric.floats else batch.targets)
    single = recipe.data.batch == 1 and isinstance(data.train, Split)
    if single and any(isinstance(module, nn.BatchNorm1d) for module in model.modules()):
        raise SpecError("data.batch = 1 gives batches of one example: batch norm needs two; change it")
