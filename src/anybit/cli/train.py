"""`anybit train recipe.toml`: one training run, one folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from anybit.cli import options
from anybit.cli.show import console, errors, note, progress_bars, say
from anybit.common.progress import Start, quiet
from anybit.errors import DataError, FileError, NetworkError, RecipeError, SpecError
from anybit.pages.rows import shown


def train(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A recipe in TOML; digits-base and digits-l1 come with anybit. Or a network: my_model.py:make, "
            "small-conv, timm/NAME, ..."
        ),
    ],
    weights: options.Weights = None,
    data: options.Data = None,
    epochs: Annotated[int | None, typer.Option(help="Other than the recipe's; 10 without one.", min=1)] = None,
    lr: Annotated[float | None, typer.Option(help="Another learning rate than the recipe's.")] = None,
    loss: Annotated[
        str | None, typer.Option(help="What to minimize: my_loss.py:loss, of outputs and targets; else cross-entropy.")
    ] = None,
    metric: options.Metric = None,
    size: options.Size = None,
    device: options.Device = None,
    out: Annotated[Path | None, typer.Option(help="The run folder. Default: runs/NAME-SEED.")] = None,
    seed: Annotated[int | None, typer.Option(help="Another seed than the recipe's.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a finished run in the folder.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a run was interrupted or killed.")] = False,
    save_every: Annotated[
        float, typer.Option(help="Seconds between two states that can be resumed; 0 is every step.", min=0.0)
    ] = 60.0,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write the log for TensorBoard too, under the same names.")
    ] = False,
) -> None:
    """Train a network as a recipe says, so that it can be quantized to any width.

    Without a table [penalty] in its recipe a network is trained for any width, with kurtosis; an empty one trains
    without any penalty.

    The state of the run is saved from time to time, and on ctrl-C (exit code 130) and SIGTERM (143). With --resume it
    goes on from there; on a CPU the weights are the same as without the interruption, bit for bit.

    Example: anybit train my_model.py:make --data my_data.py:loaders --epochs 20
    """
    # Of several processes that torchrun started, one speaks.
    leads = os.environ.get("RANK", "0") == "0"
    init = None if weights is None else str(weights)
    changes: dict[str, Any] = {"init": init, "data__name": data, "data__size": size, "seed": seed}
    changes |= {"epochs": epochs, "optimizer__lr": lr, "loss": loss, "metric": metric}
    asked: dict[str, Any] = {"resume": resume, "save_every": save_every, "board": tensorboard}
    with progress_bars() if leads else contextlib.nullcontext(quiet) as start, _silence(not leads):
        folder, results = _train(recipe, changes, device, out, overwrite, start, **asked)
    if leads:
        name, value = str(results.get("metric", "accuracy")), results["validation_accuracy"]
        scored = "" if value is None else shown(value, name).replace("\xa0", " ")
        said = f"validation {name} {scored}, in floating point" if scored else "there is no validation data"
        say(said)
        say(f"{folder}/: model.safetensors, run.json, log.jsonl")


@contextlib.contextmanager
def _silence(wanted: bool) -> Iterator[None]:
    """Let the consoles say nothing for a while, if wanted; errors are printed after it."""
    before = console.quiet, errors.quiet
    console.quiet, errors.quiet = before[0] or wanted, before[1] or wanted
    try:
        yield
    finally:
        console.quiet, errors.quiet = before


def _train(
    recipe: str,
    changes: dict[str, Any],
    device: str | None,
    out: Path | None,
    overwrite: bool,
    start: Start,
    *,
    resume: bool,
    **asked: Any,
) -> tuple[Path, dict[str, Any]]:
    """Run the recipe; return the run folder and what validation said."""
    ready = start("getting ready", 2)
    with options.needs_torch("anybit train"):
        from anybit.data import load_dataset
        from anybit.task.task import pick_device
        from anybit.train.loop import steps_of
        from anybit.train.loop import train as run
        from anybit.train.memory import keep_freed_memory
        from anybit.train.recipe import FLAGSHIP, recipe_by_word
        from anybit.train.run import RunFolder
    keep_freed_memory()  # this process does nothing but train
    ready(1)
    plan = recipe_by_word(recipe, penalty=FLAGSHIP, **changes)
    folder = out or Path("runs") / f"{plan.name}-{plan.seed}"
    run_folder = RunFolder(folder, plan)
    if not resume and run_folder.state.exists():
        raise FileError(
            f"{run_folder.state}: left by an unfinished run; go on with --resume, or delete it to start again"
        )
    if not resume and not overwrite and run_folder.checkpoint.exists():
        raise FileError(f"{folder}: holds a finished run; choose another folder with --out, or say --overwrite")
    if plan.penalty is FLAGSHIP:
        note(
            f"training for any width (any_width = true, kurtosis = {FLAGSHIP.kurtosis:g}, optimizer.average = "
            f"{plan.optimizer.average:g}); a recipe with an empty table [penalty] trains without"
        )
    try:
        data = load_dataset(plan.data.name, code=True, size=plan.data.size)
        ready(1)
        advance = start(plan.name, steps_of(plan, data))
        _, results = run(
            plan, data, folder, progress=advance, resume=resume, device=pick_device(device), say=note, **asked
        )
    except NetworkError as error:
        if plan.penalty is not FLAGSHIP:
            raise
        raise NetworkError(
            f"{error}\nTraining for any width, the default, needs that; a recipe with a table [penalty] that has "
            "weight = 3e-4, activation = 3e-4, kurtosis = 0.3 does not"
        ) from error
    except (DataError, SpecError) as error:  # a name or a size that only now proved wrong
        raise RecipeError(f"{recipe}: {error}") from error
    return folder, results
