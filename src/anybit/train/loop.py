"""The training loop: a recipe in, a trained network and a run folder out."""

from __future__ import annotations

import contextlib
import functools
import math
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybit.data import Batches, Dataset
from anybit.errors import NonFiniteError, SpecError
from anybit.evaluate.accuracy import evaluate
from anybit.evaluate.sweep import sweep
from anybit.models import build_model
from anybit.objectives.any_width import AnyWidth
from anybit.objectives.base import Closure, Penalty, Sum
from anybit.objectives.gradient import GradientPenalty
from anybit.objectives.kurtosis import KurtosisPenalty
from anybit.objectives.noise import UniformNoise
from anybit.objectives.orthogonal import OrthogonalPenalty
from anybit.objectives.schedule import last_epochs
from anybit.simulate.capture import evaluating
from anybit.train.board import Log, on_board
from anybit.train.checkpoint import check_room, digest_of, load_model, load_weights, save_checkpoint
from anybit.train.clock import Clock, EpochTime
from anybit.train.memory import keep_freed_memory
from anybit.train.place import OnDevice, Place, placed
from anybit.train.recipe import OptimizerRecipe, PenaltyRecipe, Recipe
from anybit.train.resume import (
    EVERY,
    Keeper,
    Moving,
    Position,
    Saved,
    Say,
    Stop,
    conditions,
    differences,
    finished,
    identity,
    read_state,
    unsaid,
)
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
        "multiplier": recipe.model.multiplier,
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


def make_penalty(
    recipe: PenaltyRecipe, model: nn.Module, *, measure: bool = True, example: Tensor | None = None
) -> Penalty:
    """Return the penalties that a recipe asks for, as one; without strengths it only measures the norms, if wanted.

    `example` is an input of the model, for a quantized pass.
    """
    parts: list[Penalty] = []
    if recipe.any_width:
        assert example is not None
        strength = recipe.any_width_strength
        parts.append(AnyWidth(model, example, strength="auto" if strength is None else strength))
    if (measure and not recipe.any_width) or recipe.gradient:
        parts.append(
            GradientPenalty(
                model,
                norm=recipe.norm,
                weight=recipe.weight,
                activation=recipe.activation,
                engine=recipe.engine,
                objective=recipe.objective,
                scale=recipe.scale,
                every=recipe.every,
            )
        )
    if recipe.orthogonal:
        parts.append(OrthogonalPenalty(model, strength=recipe.orthogonal))
    if recipe.kurtosis:
        parts.append(KurtosisPenalty(model, strength=recipe.kurtosis))
    if recipe.noise:
        parts.append(UniformNoise(model, strength=recipe.noise))
    return parts[0] if len(parts) == 1 else Sum(parts)


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
    keeper: Keeper | None = None,
) -> list[EpochTime]:
    """Train `model` in place as the recipe says, on the training split only; return what each epoch took.

    With a `keeper` the run is saved on its way, and goes on from what was saved before.
    """
    place = place or Place()
    generator = torch.Generator().manual_seed(recipe.seed)
    torch.manual_seed(recipe.seed)
    augment = data.augment if recipe.data.augment else None
    part = (place.rank, place.processes)
    batches = Batches(data.train, recipe.data.batch, generator=generator, augment=augment, part=part)
    folded = fold(model, data, per_channel=recipe.quantize.per_channel) if recipe.quantize.widths else None
    network = (folded or model).to(memory_format=_layout(recipe))  # type: ignore[call-overload]
    network = place.joined(_compiled(network, place) if recipe.speed.compile else network)
    example = data.train.x[:2].to(place.device)
    make = functools.partial(make_penalty, model=network, measure=not recipe.speed.compile, example=example)
    penalized = DrawnWidth(folded, recipe.quantize.pairs) if folded else make(recipe.penalty)
    plain = make(PenaltyRecipe(norm=recipe.penalty.norm))
    optimizer = make_optimizer(recipe.optimizer, network)
    moving = Moving(network, optimizer, (penalized, plain), generator, generator.get_state())
    at = Position() if keeper is None else keeper.start(moving, recipe, len(batches))
    if progress is not None and (done := at.epoch * len(batches) + at.index):
        progress(done)
    network.train()
    while at.epoch < recipe.epochs:
        last = max(0, recipe.epochs - recipe.penalty.start)
        penalized.factor = last_epochs(at.epoch, epochs=recipe.epochs, last=last, ramp=recipe.penalty.ramp)
        penalty = penalized if at.epoch >= recipe.penalty.start else plain
        at = _epoch(moving, penalty, at, batches, recipe, log=log, progress=progress, place=place, keeper=keeper)
    if folded is not None:
        unfold(folded.cpu(), model)
    model.to(memory_format=torch.contiguous_format).eval()  # type: ignore[call-overload]
    return list(at.times)


def _epoch(
    moving: Moving,
    penalty: Penalty,
    at: Position,
    batches: Batches,
    recipe: Recipe,
    *,
    log: Callable[..., None] | None,
    progress: Progress | None,
    place: Place,
    keeper: Keeper | None,
) -> Position:
    """Take the steps of an epoch that are not done yet; return where the next one begins."""
    moving.order = moving.generator.get_state()
    layout, mixed = _layout(recipe), recipe.speed.precision == "bfloat16" and not _divides(penalty)
    clock = Clock()
    for index, (x, y) in enumerate(batches.after(at.index), start=at.index):
        number = at.epoch * len(batches) + index
        rate = _set_rate(moving.optimizer, number, recipe, len(batches))
        whole = min(recipe.data.batch, len(batches.split) - index * recipe.data.batch)
        x, y = x.to(place.device, memory_format=layout), y.to(place.device)
        losses = _losses(moving.network, x, y, whole / place.processes, recipe, mixed)
        step = place.averaged(penalty.backward(losses))
        moving.optimizer.step()
        moving.optimizer.zero_grad()
        clock.tick()
        if log is not None:
            log(
                step=number,
                epoch=at.epoch,
                lr=rate,
                loss=step.loss,
                weight_norm=None if math.isnan(step.weight_norm) else step.weight_norm,
                activation_norm=step.activation_norm,
                **step.terms,
                penalized=at.epoch >= recipe.penalty.start and recipe.penalty.any,
            )
        if progress is not None:
            progress(1)
        if keeper is not None:
            keeper.after_step(moving, at, index + 1, clock)
    return at.next_epoch(clock)


def _divides(penalty: Penalty) -> bool:
    """Tell whether a penalty divides differences of gradients by a small number."""
    return any(isinstance(part, GradientPenalty) and part.divides for part in getattr(penalty, "parts", [penalty]))


def _layout(recipe: Recipe) -> torch.memory_format:
    return torch.channels_last if recipe.speed.channels_last else torch.contiguous_format


def _set_rate(optimizer: torch.optim.Optimizer, number: int, recipe: Recipe, epoch: int) -> float:
    """Give the optimizer the learning rate of a step; `epoch` is the number of steps in one."""
    rate = learning_rate(
        number,
        steps=recipe.epochs * epoch,
        peak=recipe.optimizer.lr,
        warmup=recipe.optimizer.warmup * epoch,
        shape=recipe.optimizer.schedule,
    )
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def _losses(model: nn.Module, x: Tensor, y: Tensor, usual: float, recipe: Recipe, mixed: bool) -> list[Closure]:
    """Return what computes the loss of a batch, a part at a time; `usual` is how many examples a process has of it.

    A process may have one more or less, and so may a part: averaged over the processes and added up over the parts it
    is the mean over the whole batch.
    """

    def loss(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=mixed):
            outputs = model(x)
            mean = F.cross_entropy(outputs, y)
        return mean if len(x) == usual else mean * (len(x) / usual), outputs

    parts = zip(x.tensor_split(recipe.speed.accumulate), y.tensor_split(recipe.speed.accumulate), strict=True)
    return [functools.partial(loss, *part) for part in parts if len(part[0])]


def _compiled(network: nn.Module, place: Place) -> nn.Module:
    if place.device.type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise SpecError("speed.compile needs a C++ compiler on this machine, such as g++; install one, or drop it")
    return cast(nn.Module, torch.compile(network))


def train(
    recipe: Recipe,
    data: Dataset,
    folder: str | Path,
    *,
    progress: Progress | None = None,
    resume: bool = False,
    save_every: float = EVERY,
    say: Say | None = None,
    board: bool = False,
) -> tuple[nn.Module, dict[str, Any]]:
    """Run a recipe from start to end; return the network and its full-precision validation score.

    Leaves a run folder with the recipe, the seed, the origin, the log and the checkpoint. On the way the state of the
    run is saved there, and once more when SIGINT or SIGTERM asks it to stop.

    Args:
        recipe: What to train, and how.
        data: What to train it on.
        folder: Where the run folder is made. What an earlier run left there is replaced, unless `resume`.
        progress: Called with the number of steps done since the last call.
        resume: Go on from the state in the folder, if there is one; a finished run is returned as it is.
        save_every: Seconds between two states; zero saves after every step.
        say: Told where the run goes on and why it stops, a sentence at a time.
        board: Write what goes into the log for TensorBoard too.
    """
    keep_freed_memory()
    model, shape = _start(recipe, data)
    with placed() as place, contextlib.ExitStack() as stack:
        _check_shares(recipe, data, place)
        tell = say if say is not None and place.leads else unsaid
        run = RunFolder(folder, recipe)
        if place.leads:
            stack.enter_context(run)  # before the first look at it: another process may be about to end its run
        if resume and (results := finished(run, leads=place.leads)) is not None:
            tell(f"{run.path}: this run is finished; nothing is left to do")
            return load_model(run.checkpoint)[0].eval(), results
        here = functools.cache(functools.partial(identity, recipe, data, digest_of(model.state_dict()), place))
        saved = _resumed(run.state, here, place, tell) if resume else None
        with Stop() as stop:
            keeper = Keeper(run, here, place=place, every=save_every, saved=saved, stop=stop, say=tell)
            log: Log | None = run.log if place.leads else None
            if board and log is not None:
                start = 0 if saved is None else saved.steps
                log = stack.enter_context(on_board(run.path / "tensorboard", log, start=start))
            times = fit(model, recipe, data, log=log, progress=progress, place=place, keeper=keeper)
        results = validate(model, recipe, data, place=place)
        model.cpu()
        skipped = place.gathered(data.skipped)
        if skipped:
            tell(f"{len(skipped)} of the data's files could not be read; {run.summary} has their names")
        if place.leads:
            about = {"model": shape, "data": recipe.data.name, "seed": recipe.seed, "recipe": recipe.to_dict()}
            save_checkpoint(run.checkpoint, model, {**about, **results})
            seconds = {kind: [getattr(epoch, kind) for epoch in times] for kind in EpochTime._fields}
            more = {"resumed_at": keeper.resumed, "skipped_files": skipped}
            run.finish(results, epoch_seconds=seconds, **{key: list(found) for key, found in more.items() if found})
    return model, results


def _start(recipe: Recipe, data: Dataset) -> tuple[nn.Module, dict[str, Any]]:
    """Return the network that a run starts from, and its shape."""
    torch.manual_seed(recipe.seed)
    if len(data.shape) != 3:
        raise SpecError(f"the models here take images (channels, height, width); the data has {data.shape}")
    shape = model_shape(recipe, data)
    check_room(shape)
    model = build_model(**shape)
    if recipe.init is not None:
        load_weights(recipe.init, model)
    _check_fit(model, recipe, data)
    return model, shape


def _resumed(path: Path, here: Callable[[], dict[str, Any]], place: Place, say: Say) -> Saved | None:
    """Return the state to go on from, and say what that means."""
    saved = read_state(path, here)
    if saved is None:
        say(f"{path}: no such file, so there is nothing to resume; starting from the beginning")
        return None
    say(f"{path}: going on after step {saved.steps}")
    if found := differences(saved.conditions, conditions(place)):
        say(f"{'; '.join(found[:3])}: the weights may differ in their last digits from those of an uninterrupted run")
    return saved


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
    # One example has no variance to normalize by.
    batch, n = recipe.data.batch, len(data.train)
    parts = min(recipe.speed.accumulate, last := n % batch or batch)
    if last // parts == 1 and any(isinstance(module, nn.BatchNorm1d) for module in model.modules()):
        where = "a batch" if parts == 1 else f"speed.accumulate = {parts} a part of a batch"
        raise SpecError(
            f"data.batch = {batch} leaves {where} of one example out of {n}: batch norm needs two; change it"
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
