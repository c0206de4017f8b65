"""The training loop: a recipe in, a trained network and a run folder out."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybit.data import Batches, Dataset
from anybit.errors import NonFiniteError, SpecError
from anybit.evaluate.accuracy import evaluate
from anybit.evaluate.sweep import sweep
from anybit.models import build_model
from anybit.penalties.base import Penalty, Step
from anybit.penalties.gradient import GradientPenalty
from anybit.penalties.kurtosis import KurtosisPenalty
from anybit.penalties.noise import UniformNoise
from anybit.penalties.orthogonal import OrthogonalPenalty
from anybit.penalties.schedule import last_epochs
from anybit.quant.capture import evaluating
from anybit.train.checkpoint import load_weights, save_checkpoint
from anybit.train.clock import Clock, EpochTime
from anybit.train.memory import keep_freed_memory
from anybit.train.place import OnDevice, Place, placed
from anybit.train.recipe import OptimizerRecipe, PenaltyRecipe, Recipe
from anybit.train.run import RunFolder
from anybit.train.schedule import learning_rate
from anybit.train.straight import DrawnWidth, fold, unfold

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
    place: Place | None = None,
) -> list[EpochTime]:
    """Train `model` in place as the recipe says, on the training split only; return what each epoch took."""
    place = place or Place()
    generator = torch.Generator().manual_seed(recipe.seed)
    torch.manual_seed(recipe.seed)
    augment = data.augment if recipe.data.augment else None
    batches = Batches(data.train, recipe.data.batch, generator=generator, augment=augment)
    folded = fold(model, data, per_channel=recipe.quantize.per_channel) if recipe.quantize.widths else None
    network = place.joined(folded or model)
    optimizer = make_optimizer(recipe.optimizer, network)
    penalized = DrawnWidth(folded, recipe.quantize.pairs) if folded else make_penalty(recipe.penalty, network)
    plain = GradientPenalty(network, norm=recipe.penalty.norm)
    total = steps_of(recipe, data)
    warmup = recipe.optimizer.warmup * len(batches)
    times: list[EpochTime] = []
    network.train()
    for epoch in range(recipe.epochs):
        on = epoch >= recipe.penalty.start
        penalty = penalized if on else plain
        last = max(0, recipe.epochs - recipe.penalty.start)
        penalized.factor = last_epochs(epoch, epochs=recipe.epochs, last=last, ramp=recipe.penalty.ramp)
        clock = Clock()
        for index, (x, y) in enumerate(batches):
            number = epoch * len(batches) + index
            rate = learning_rate(
                number, steps=total, peak=recipe.optimizer.lr, warmup=warmup, shape=recipe.optimizer.schedule
            )
            for group in optimizer.param_groups:
                group["lr"] = rate
            step = _train_step(network, *place.share(x, y), optimizer, penalty)
            clock.tick()
            if log is not None:
                log(
                    step=number,
                    epoch=epoch,
                    lr=rate,
                    loss=step.loss,
                    weight_norm=None if math.isnan(step.weight_norm) else step.weight_norm,
                    activation_norm=step.activation_norm,
                    **step.terms,
                    penalized=on and recipe.penalty.any,
                )
            if progress is not None:
                progress(1)
        times.append(clock.read())
    if folded is not None:
        unfold(folded.cpu(), model)
    model.eval()
    return times


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
    keep_freed_memory()
    torch.manual_seed(recipe.seed)
    if len(data.shape) != 3:
        raise SpecError(f"the models here take images (channels, height, width); the data has {data.shape}")
    shape = model_shape(recipe, data)
    model = build_model(shape["name"], channels=shape["channels"], classes=shape["classes"], width=shape["width"])
    if recipe.init is not None:
        load_weights(recipe.init, model)
    _check_fit(model, recipe, data)
    with placed() as place, contextlib.ExitStack() as stack:
        _check_shares(recipe, data, place)
        run = stack.enter_context(RunFolder(folder, recipe)) if place.leads else None
        times = fit(model, recipe, data, log=run.log if run else None, progress=progress, place=place)
        results = validate(model, recipe, data, place=place)
        about = {
            "model": shape,
            "data": recipe.data.name,
            "seed": recipe.seed,
            "recipe": recipe.to_dict(),
            **results,
        }
        model.cpu()
        if run is not None:
            save_checkpoint(run.checkpoint, model, about)
            seconds = {kind: [getattr(epoch, kind) for epoch in times] for kind in EpochTime._fields}
            run.write_summary(results, epoch_seconds=seconds)
    return model, results


def validate(model: nn.Module, recipe: Recipe, data: Dataset, *, place: Place | None = None) -> dict[str, Any]:
    """Return accuracy and loss on the validation split, in floating point; of a recipe with widths also at those."""
    batches = OnDevice(Batches(data.validation, 256), (place or Place()).device)
    score = evaluate(model.to(batches.device), batches)
    if not math.isfinite(score.loss):
        raise NonFiniteError(f"after training the validation loss is {score.loss}; lower the learning rate")
    results = {"validation_accuracy": score.accuracy, "validation_loss": score.loss}
    if recipe.quantize.widths:
        net = fold(model.cpu(), data, per_channel=recipe.quantize.per_channel).to(batches.device)
        rows = sweep(net, batches, widths=recipe.quantize.pairs)
        results["validation_accuracy_at_widths"] = statistics.fmean(row.accuracy for row in rows)
    return results


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


def _check_shares(recipe: Recipe, data: Dataset, place: Place) -> None:
    """Refuse what several processes cannot share."""
    if place.processes == 1:
        return
    if recipe.quantize.widths:
        raise SpecError("straight-through training runs in one process; start it without torchrun")
    batch, n = recipe.data.batch, len(data.train)
    if (last := n % batch or batch) < 2 * place.processes:
        raise SpecError(
            f"data.batch = {batch} leaves a last batch of {last} out of {n}: {place.processes} processes need two "
            "examples each; change it"
        )
