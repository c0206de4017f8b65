"""The training loop: a recipe in, a trained network and a run folder out."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybit.data import Batches, Dataset
from anybit.errors import NonFiniteError, SpecError
from anybit.evaluate.accuracy import evaluate
from anybit.models import build_model
from anybit.penalties.base import Penalty, Step
from anybit.penalties.gradient import GradientPenalty
from anybit.penalties.kurtosis import KurtosisPenalty
from anybit.penalties.noise import UniformNoise
from anybit.penalties.orthogonal import OrthogonalPenalty
from anybit.penalties.schedule import last_epochs
from anybit.quant.capture import evaluating
from anybit.train.checkpoint import load_weights, save_checkpoint
from anybit.train.recipe import OptimizerRecipe, PenaltyRecipe, Recipe
from anybit.train.run import RunFolder
from anybit.train.schedule import learning_rate

Progress = Callable[[int], None]
"""Called with the number of steps done since the last call."""


def model_shape(recipe: Recipe, data: Dataset) -> dict[str, Any]:
    """Return what a checkpoint must say so that the network can be built again."""
    return {
        "name": recipe.model.name,
        "channels": data.shape[0],
        "classes": len(data.classes),
        "width": recipe.model.width,
    }


def make_optimizer(recipe: OptimizerRecipe, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that a recipe names."""
    if recipe.name == "adam":
        return torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    return torch.optim.SGD(
        model.parameters(),
        lr=recipe.lr,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
        nesterov=recipe.momentum > 0,
    )


def make_penalty(recipe: PenaltyRecipe, model: nn.Module) -> Penalty:
    """Return the penalties that a recipe asks for, as one; without strengths it only measures the norms."""
    penalty: Penalty = GradientPenalty(
        model,
        norm=recipe.norm,
        weight=recipe.weight,
        activation=recipe.activation,
        engine=recipe.engine,
        objective=recipe.objective,
        scale=recipe.scale,
        every=recipe.every,
    )
    if recipe.orthogonal:
        penalty += OrthogonalPenalty(model, strength=recipe.orthogonal)
    if recipe.kurtosis:
        penalty += KurtosisPenalty(model, strength=recipe.kurtosis)
    if recipe.noise:
        penalty += UniformNoise(model)
    return penalty


def steps_of(recipe: Recipe, data: Dataset) -> int:
    """Return how many optimizer steps a run takes."""
    return recipe.epochs * -(-len(data.train) // recipe.data.batch)


def fit(
    model: nn.Module,
    recipe: Recipe,
    data: Dataset,
    *,
    log: Callable[..., None] | None = None,
    progress: Progress | None = None,
) -> None:
    """Train `model` in place as the recipe says, on the training split only."""
    generator = torch.Generator().manual_seed(recipe.seed)
    torch.manual_seed(recipe.seed)
    augment = data.augment if recipe.data.augment else None
    batches = Batches(data.train, recipe.data.batch, generator=generator, augment=augment)
    optimizer = make_optimizer(recipe.optimizer, model)
    penalized = make_penalty(recipe.penalty, model)
    plain = GradientPenalty(model, norm=recipe.penalty.norm)
    total = steps_of(recipe, data)
    warmup = recipe.optimizer.warmup * len(batches)
    model.train()
    for epoch in range(recipe.epochs):
        on = epoch >= recipe.penalty.start
        penalty = penalized if on else plain
        last = max(0, recipe.epochs - recipe.penalty.start)
        penalized.factor = last_epochs(epoch, epochs=recipe.epochs, last=last, ramp=recipe.penalty.ramp)
        for index, (x, y) in enumerate(batches):
            number = epoch * len(batches) + index
            rate = learning_rate(
                number, steps=total, peak=recipe.optimizer.lr, warmup=warmup, shape=recipe.optimizer.schedule
            )
            for group in optimizer.param_groups:
                group["lr"] = rate
            step = _train_step(model, x, y, optimizer, penalty)
            if log is not None:
                log(
                    step=number,
                    epoch=epoch,
                    lr=rate,
                    loss=step.loss,
                    weight_norm=step.weight_norm,
                    activation_norm=step.activation_norm,
                    **step.terms,
                    penalized=on and recipe.penalty.any,
                )
            if progress is not None:
                progress(1)
    model.eval()


def _train_step(model: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer, penalty: Penalty) -> Step:
    step = penalty.backward(lambda: F.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
    return step


def train(
    recipe: Recipe, data: Dataset, folder: str | Path, *, progress: Progress | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """Run a recipe from start to end; return the network and its full-precision validation score.

    Leaves a run folder with the recipe, the seed, the origin, the log and the checkpoint.
    """
    torch.manual_seed(recipe.seed)
    if len(data.shape) != 3:
        raise SpecError(f"the models here take images (channels, height, width); the data has {data.shape}")
    shape = model_shape(recipe, data)
    model = build_model(shape["name"], channels=shape["channels"], classes=shape["classes"], width=shape["width"])
    if recipe.init is not None:
        load_weights(recipe.init, model)
    _check_fit(model, recipe, data)
    with RunFolder(folder, recipe) as run:
        fit(model, recipe, data, log=run.log, progress=progress)
        validation = evaluate(model, Batches(data.validation, 256))
        if not math.isfinite(validation.loss):
            raise NonFiniteError(f"after training the validation loss is {validation.loss}; lower the learning rate")
        results = {"validation_accuracy": validation.accuracy, "validation_loss": validation.loss}
        about = {
            "model": shape,
            "data": recipe.data.name,
            "seed": recipe.seed,
            "recipe": recipe.to_dict(),
            **results,
        }
        save_checkpoint(run.checkpoint, model, about)
        run.write_summary(results)
    return model, results


@torch.no_grad()
def _check_fit(model: nn.Module, recipe: Recipe, data: Dataset) -> None:
    """Refuse before the first step what would fail in the middle of a run."""
    try:
        with evaluating(model):
            model(data.train.x[:2])
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise SpecError(f"{recipe.model.name} cannot take inputs of shape {data.shape}: {reason}") from error
    # A last batch of one example has no variance to normalize by.
    batch, n = recipe.data.batch, len(data.train)
    if n % batch == 1 % batch and any(isinstance(module, nn.BatchNorm1d) for module in model.modules()):
        raise SpecError(
            f"data.batch = {batch} leaves a batch of one example out of {n}: batch norm needs two; change it"
        )
