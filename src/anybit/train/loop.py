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
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from anybit.data import Batches, Dataset, Given
from anybit.errors import NonFiniteError, SpecError
from anybit.evaluate.batches import Takes
from anybit.evaluate.sweep import evaluate, sweep
from anybit.objectives.base import Penalty
from anybit.objectives.gradient import GradientPenalty
from anybit.objectives.schedule import last_epochs
from anybit.task.checkpoint import digest_of, load_weights, save_checkpoint
from anybit.task.task import example_of, in_order, pick_metric, prepared
from anybit.train.begin import make_optimizer, make_penalty, start
from anybit.train.board import Log, on_board
from anybit.train.clock import Clock, EpochTime
from anybit.train.keeper import EVERY, Keeper, Stop
from anybit.train.losses import has_batch_norm, loss_by_name, losses
from anybit.train.place import Place, placed
from anybit.train.recipe import PenaltyRecipe, Recipe
from anybit.train.resume import (
    Moving,
    Position,
    Saved,
    Say,
    conditions,
    differences,
    finished,
    identity,
    read_state,
    unsaid,
)
from anybit.train.run import RunFolder
from anybit.train.schedule import learning_rate
from anybit.train.straight import DrawnWidth, unfold

Progress = Callable[[int], None]
"""Called with the number of steps done since the last call."""


def steps_of(recipe: Recipe, data: Dataset) -> int:
    """Return how many optimizer steps a run takes."""
    train = data.need("train", "training")
    return recipe.epochs * len(Batches(train, recipe.data.batch, generator=torch.Generator()))


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
    folded = (
        prepared(model, data, preset="paper", per_channel=recipe.quantize.per_channel)
        if recipe.quantize.widths
        else None
    )
    layout = torch.channels_last if recipe.speed.channels_last else torch.contiguous_format
    network = (folded or model).to(memory_format=layout)  # type: ignore[call-overload]
    network = place.joined(_compiled(network, place) if recipe.speed.compile else network)
    example = example_of(model, data, place.device)
    make = functools.partial(make_penalty, model=network, measure=not recipe.speed.compile, example=example)
    penalized = DrawnWidth(folded, recipe.quantize.pairs) if folded else make(recipe.penalty)
    plain = make(PenaltyRecipe(norm=recipe.penalty.norm))
    optimizer = make_optimizer(recipe.optimizer, network)
    average = _average(folded or model, recipe.optimizer.average)
    moving = Moving(network, optimizer, (penalized, plain), generator, generator.get_state(), average)
    at = Position() if keeper is None else keeper.start(moving, recipe, len(batches))
    if progress is not None and (done := at.epoch * len(batches) + at.index):
        progress(done)
    network.train()
    while at.epoch < recipe.epochs:
        last = max(0, recipe.epochs - recipe.penalty.start)
        penalized.factor = last_epochs(at.epoch, epochs=recipe.epochs, last=last, ramp=recipe.penalty.ramp)
        penalty = penalized if at.epoch >= recipe.penalty.start else plain
        at = _epoch(moving, penalty, at, batches, recipe, log=log, progress=progress, place=place, keeper=keeper)
    if average is not None:
        (folded or model).load_state_dict(average.module.state_dict())
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
    mixed = recipe.speed.precision == "bfloat16" and not _divides(penalty)
    takes, loss, least = Takes.of(moving.module), loss_by_name(recipe.loss), 1 + has_batch_norm(moving.module)
    clock, biggest = Clock(), 0
    for index, raw in enumerate(batches.after(at.index), start=at.index):
        number = at.epoch * len(batches) + index
        rate = _set_rate(moving.optimizer, number, recipe, len(batches))
        batch = takes.split(raw).to(place.device)
        if recipe.speed.channels_last:
            batch = batch.mapped(lambda t: t.to(memory_format=torch.channels_last) if t.dim() == 4 else t)
        biggest = max(biggest, len(batch))
        if len(batch) < min(least, biggest) and place.processes == 1:
            continue  # a loader of the user's own may end in one example, which has no variance to normalize by
        whole = min(recipe.data.batch, batches.used - index * recipe.data.batch)
        whole = len(batch) * place.processes if isinstance(batches.split, Given) else whole
        parts = recipe.speed.accumulate
        usual = whole / place.processes
        closures = losses(moving.network, batch, loss, usual=usual, parts=parts, mixed=mixed, least=least)
        step = place.averaged(penalty.backward(closures))
        moving.optimizer.step()
        moving.optimizer.zero_grad()
        if moving.average is not None:
            moving.average.update_parameters(moving.module)
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


def _average(network: nn.Module, keep: float | None) -> AveragedModel | None:
    """Return what follows a network's weights and buffers as their running average."""

    def follow(average: Tensor, now: Tensor, steps: Any) -> Tensor:
        if not now.is_floating_point():
            return now
        # In a short run, or at its beginning, no more than the last tenth of the steps counts.
        return torch.lerp(average, now, (1 - ((1 + steps) / (10 + steps)).clamp(max=keep)).to(now.dtype))

    return AveragedModel(network, avg_fn=follow, use_buffers=True) if keep else None


def _divides(penalty: Penalty) -> bool:
    """Tell whether a penalty divides differences of gradients by a small number."""
    return any(isinstance(part, GradientPenalty) and part.divides for part in getattr(penalty, "parts", [penalty]))


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
    device: torch.device | None = None,
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
        device: Where to train; on the graphics card, if not given and there is one.
    """
    data.need("train", "training")
    model, shape = start(recipe, data)
    with placed(device) as place, contextlib.ExitStack() as stack:
        _check_shares(recipe, data, place)
        tell = say if say is not None and place.leads else unsaid
        run = RunFolder(folder, recipe)
        if place.leads:
            stack.enter_context(run)  # before the first look at it: another process may be about to end its run
        if resume and (results := finished(run, leads=place.leads)) is not None:
            tell(f"{run.path}: this run is finished; nothing is left to do")
            load_weights(run.checkpoint, model)
            return model.eval(), results
        here = functools.cache(functools.partial(identity, recipe, data, digest_of(model.state_dict()), place))
        saved = _resumed(run.state, here, place, tell) if resume else None
        with Stop() as stop:
            keeper = Keeper(run, here, place, save_every, saved, stop, tell)
            log: Log | None = run.log if place.leads else None
            if board and log is not None:
                log = stack.enter_context(on_board(run.path / "tensorboard", log, start=saved.steps if saved else 0))
            times = fit(model, recipe, data, log=log, progress=progress, place=place, keeper=keeper)
            place.same_buffers(model)
        results = validate(model, recipe, data, place=place)
        model.cpu()
        if skipped := place.gathered(data.skipped):
            tell(f"{len(skipped)} of the data's files could not be read; {run.summary} has their names")
        if place.leads:
            _write_checkpoint(run, model, shape, data, results)
            seconds = {kind: [getattr(epoch, kind) for epoch in times] for kind in EpochTime._fields}
            more = {"resumed_at": keeper.resumed, "skipped_files": skipped}
            run.finish(results, epoch_seconds=seconds, **{key: list(found) for key, found in more.items() if found})
    return model, results


def _write_checkpoint(
    run: RunFolder, model: nn.Module, shape: dict[str, Any], data: Dataset, results: dict[str, Any]
) -> None:
    recipe = run.recipe
    about = {"model": shape, "data": recipe.data.name, "seed": recipe.seed, "recipe": recipe.to_dict()}
    if data.preprocessing is not None:
        about["input"] = data.preprocessing.to_about()["input"]
    save_checkpoint(run.checkpoint, model, {**about, **results})


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
    """Return the score and the loss on validation data, in floating point; of a recipe with widths also at those."""
    if data.validation is None:
        return {"validation_accuracy": None}
    device, metric = (place or Place()).device, pick_metric(recipe.metric)
    batches = in_order(data.validation, 256)
    row = evaluate(model.to(device), batches, metric=metric)
    if not math.isfinite(row.accuracy if row.loss is None else row.loss):
        raise NonFiniteError(f"after training the validation loss is {row.loss}; lower the learning rate")
    results: dict[str, Any] = {"validation_accuracy": row.accuracy, "validation_loss": row.loss}
    if row.metric != "accuracy":
        results["metric"] = row.metric
    if recipe.quantize.widths:
        net = prepared(model.cpu(), data, preset="paper", per_channel=recipe.quantize.per_channel).to(device)
        rows = sweep(net, batches, widths=recipe.quantize.pairs, metric=metric)
        results["validation_accuracy_at_widths"] = statistics.fmean(row.accuracy for row in rows)
    return results


def _check_shares(recipe: Recipe, data: Dataset, place: Place) -> None:
    """Refuse what several processes cannot share."""
    if place.processes == 1 or isinstance(data.train, Given):
        return
    if recipe.quantize.widths:
        raise SpecError("straight-through training runs in one process; start it without torchrun")
    batch, n = recipe.data.batch, len(data.train)
    if (last := n % batch or batch) < 2 * place.processes:
        raise SpecError(
            f"data.batch = {batch} leaves a last batch of {last} out of {n}: {place.processes} processes need two "
            "examples each; change it"
        )
