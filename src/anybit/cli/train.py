"""`anybit train recipe.toml`: one training run, one folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from anybit.cli.needs import needs_torch
from anybit.cli.show import console, errors, progress_bars
from anybit.common.progress import Start, quiet
from anybit.errors import DataError, FileError, RecipeError, SpecError


def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe in TOML; digits-base and digits-l1 come with anybit.")],
    out: Annotated[Path | None, typer.Option(help="The run folder. Default: runs/NAME-SEED.")] = None,
    seed: Annotated[int | None, typer.Option(help="Another seed than the recipe's.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a run was interrupted or killed.")] = False,
    save_every: Annotated[
        float, typer.Option(help="Seconds between two states that can be resumed; 0 is every step.", min=0.0)
    ] = 60.0,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write the log for TensorBoard too, under the same names.")
    ] = False,
) -> None:
    """Train a network as a recipe says, so that it can be quantized to any width.

    A recipe without a table [penalty] is trained with the default: gradient l1 and kurtosis. An empty one is trained
    without any penalty.

    The state of the run is saved from time to time, and on ctrl-C (exit code 130) and SIGTERM (143). With --resume it
    goes on from there; on a CPU the weights are the same as without the interruption, bit for bit.

    Example: anybit train digits-base --seed 1
    """
    # Of several processes that torchrun started, one speaks.
    leads = os.environ.get("RANK", "0") == "0"
    with progress_bars() if leads else contextlib.nullcontext(quiet) as start, _silence(not leads):
        folder, accuracy = _train(recipe, out, seed, resume, save_every, tensorboard, start)
    if leads:
        console.print(f"validation accuracy {100 * accuracy:.1f} %, in floating point")
        console.print(f"{folder}/: model.safetensors, run.json, log.jsonl", highlight=False, soft_wrap=True)


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
    recipe: Path, out: Path | None, seed: int | None, resume: bool, save_every: float, tensorboard: bool, start: Start
) -> tuple[Path, float]:
    """Run the recipe; return the run folder and the validation accuracy in floating point."""
    ready = start("getting ready", 2)
    with needs_torch("anybit train"):
        import dataclasses

        from anybit.data import load_dataset
        from anybit.train.loop import steps_of
        from anybit.train.loop import train as run
        from anybit.train.recipe import FLAGSHIP, load_recipe
        from anybit.train.run import RunFolder
    ready(1)
    plan = load_recipe(recipe, penalty=FLAGSHIP)
    if seed is not None:
        plan = dataclasses.replace(plan, seed=seed)
    folder = out or Path("runs") / f"{plan.name}-{plan.seed}"
    if not resume and (state := RunFolder(folder, plan).state).exists():
        raise FileError(f"{state}: left by an unfinished run; go on with --resume, or delete it to start again")
    if plan.penalty is FLAGSHIP:
        errors.print(
            f"{recipe} has no table [penalty]: training for any width, in about twice the time of plain training; an "
            "empty [penalty] trains without",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
    try:
        data = load_dataset(plan.data.name, code=True)
        ready(1)
        _, results = run(
            plan,
            data,
            folder,
            progress=start(plan.name, steps_of(plan, data)),
            resume=resume,
            save_every=save_every,
            board=tensorboard,
            say=lambda text: errors.print(text, markup=False, highlight=False, soft_wrap=True),
        )
    except (DataError, SpecError) as error:  # a name or a size that only now proved wrong
        raise RecipeError(f"{recipe}: {error}") from error
    return folder, float(results["validation_accuracy"])
