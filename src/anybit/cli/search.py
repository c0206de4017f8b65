"""`anybit search recipe.toml`: the strength of a penalty, or a learning rate, by short trials."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from anybit.cli import words
from anybit.cli.needs import needs_torch
from anybit.cli.show import console, errors, progress_bars
from anybit.errors import DataError, RecipeError, SpecError


def search(
    recipe: Annotated[
        str, typer.Argument(help="The recipe of the training to be done later in full, or a network: my_model.py:make.")
    ],
    weights: words.Weights = None,
    data: words.Data = None,
    size: words.Size = None,
    device: words.Device = None,
    vary: Annotated[
        str, typer.Option(help="Keys of the recipe that all get the searched value, separated by commas.")
    ] = "penalty.weight,penalty.activation",
    values: Annotated[
        str | None, typer.Option(help="Values to try, separated by commas. Default: proposed from some steps.")
    ] = None,
    epochs: Annotated[int, typer.Option(help="Epochs of a trial.", min=1)] = 1,
    share: Annotated[float, typer.Option(help="Part of the training data that a trial sees.")] = 1 / 3,
    tolerance: Annotated[
        float, typer.Option(help="Validation accuracy that a strength may cost, in points.", min=0.0)
    ] = 0.5,
    finer: Annotated[
        int, typer.Option(help="How often to halve the step above the winning strength.", min=0, max=6)
    ] = 0,
    storage: Annotated[
        str, typer.Option(help="Where trials are kept and shared: sqlite:///FILE, or postgresql://USER@HOST/DATABASE.")
    ] = "sqlite:///runs/search.db",
    grace: Annotated[
        int, typer.Option(help="Seconds without a sign of life after which another worker's trial is taken up.", min=3)
    ] = 60,
    out: Annotated[Path | None, typer.Option(help="Write what was found to this JSON file too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Find the strongest penalty that costs no accuracy in floating point, or the best learning rate.

    Nothing is quantized on the way, except for the learning rate of a recipe with a [quantize] table. A search that was
    stopped goes on where it was. Start the same command several times, here or on other machines with the same storage:
    they share the trials, and all end with the same choice.

    Example: anybit search digits-l1 --share 1
    """
    with needs_torch("anybit search"):
        from anybit.common.files import write_json
        from anybit.common.provenance import origin
        from anybit.data import load_dataset
        from anybit.task.task import pick_device
        from anybit.train.recipe import recipe_by_word
        from anybit.train.search import RATIOS, Knob
        from anybit.train.search import search as run
    init = None if weights is None else str(weights)
    plan = recipe_by_word(recipe, init=init, data__name=data, data__size=size)
    knob = Knob(tuple(_words(vary)), tuple(_number(word) for word in _words(values or "")))
    try:
        found_data = load_dataset(plan.data.name, code=True, size=plan.data.size)
        with progress_bars() as start:
            advance = start("trials", len(knob.values or RATIOS) + (knob.aim == "strongest"))

            def tell(line: str) -> None:
                errors.print(line, highlight=False, soft_wrap=True, markup=False)

            def on_trial(value: float, accuracy: float) -> None:
                tell(f"{value:g}: {100 * accuracy:.2f} %")
                advance(1)

            found = run(
                plan,
                found_data,
                knob,
                device=pick_device(device),
                storage=storage,
                grace=grace,
                finer=finer,
                epochs=epochs,
                share=share,
                tolerance=tolerance / 100,
                on_trial=on_trial,
                say=tell,
            )
    except (DataError, SpecError) as error:
        raise RecipeError(f"{recipe}: {error}") from error
    record = {**found.to_dict(), "recipe": plan.to_dict(), "origin": origin()}
    if out is not None:
        write_json(out, record)
    if as_json:
        typer.echo(json.dumps(record, indent=1))
        return
    if found.tracked is not None:
        console.print(f"tracked: loss {found.tracked.loss:.4g}, penalty {found.tracked.penalty:.4g}", highlight=False)
    table = Table("value", "validation accuracy in %")
    for value, accuracy in sorted(found.accuracies.items()):
        table.add_row(f"{value:g}" + (" <" if value == found.chosen else ""), f"{100 * accuracy:.2f}")
    console.print(table)
    edge = "; it is at the end of what was tried" if found.at_edge else ""
    console.print(f"chosen: {' = '.join(found.keys)} = {found.chosen:g}{edge}", highlight=False, soft_wrap=True)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError as error:
        raise SpecError(f"values to try are numbers separated by commas; got {word!r}") from error
