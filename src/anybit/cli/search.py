"""`anybit search recipe.toml`: the strength of a penalty, or a learning rate, by short trials."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from anybit.cli import options
from anybit.cli.show import console, note, progress_bars, say
from anybit.errors import DataError, RecipeError, SpecError

if TYPE_CHECKING:
    from anybit.train.recipe import Recipe
    from anybit.train.search import Found, Knob


def search(
    recipe: Annotated[
        str, typer.Argument(help="The recipe of the training to be done later in full, or a network: my_model.py:make.")
    ],
    weights: options.Weights = None,
    data: options.Data = None,
    size: options.Size = None,
    device: options.Device = None,
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
    out: options.Record = None,
    as_json: options.Json = False,
) -> None:
    """Find the strongest penalty that costs no accuracy in floating point, or the best learning rate.

    Nothing is quantized on the way, except for the learning rate of a recipe with a [quantize] table. A search that was
    stopped goes on where it was. Start the same command several times, here or on other machines with the same storage:
    they share the trials, and all end with the same choice.

    Example: anybit search digits-l1 --share 1
    """
    with options.needs_torch("anybit search"):
        from anybit.common.files import write_json
        from anybit.common.provenance import origin
        from anybit.train.recipe import recipe_by_word
        from anybit.train.search import Knob
    init = None if weights is None else str(weights)
    plan = recipe_by_word(recipe, init=init, data__name=data, data__size=size)
    tried = options.numbers(values or "", "values to try are numbers separated by commas")
    knob = Knob(tuple(vary.replace(",", " ").split()), tuple(tried))
    asked = {"storage": storage, "grace": grace, "epochs": epochs, "share": share, "finer": finer}
    try:
        found = _search(plan, knob, device, tolerance=tolerance / 100, **asked)
    except (DataError, SpecError) as error:
        raise RecipeError(f"{recipe}: {error}") from error
    record = {**found.to_dict(), "recipe": plan.to_dict(), "origin": origin()}
    if out is not None:
        write_json(out, record)
    if as_json:
        typer.echo(json.dumps(record, indent=1))
    else:
        _show(found)


def _search(plan: Recipe, knob: Knob, device: str | None, **asked: Any) -> Found:
    from anybit.data import load_dataset
    from anybit.task.task import pick_device
    from anybit.train.search import RATIOS, search

    data = load_dataset(plan.data.name, code=True, size=plan.data.size)
    with progress_bars() as start:
        advance = start("trials", len(knob.values or RATIOS) + (knob.aim == "strongest"))

        def on_trial(value: float, accuracy: float) -> None:
            note(f"{value:g}: {100 * accuracy:.2f} %")
            advance(1)

        return search(plan, data, knob, device=pick_device(device), on_trial=on_trial, say=note, **asked)


def _show(found: Found) -> None:
    if found.tracked is not None:
        say(f"tracked: loss {found.tracked.loss:.4g}, penalty {found.tracked.penalty:.4g}")
    table = Table("value", "validation accuracy in %")
    for value, accuracy in sorted(found.accuracies.items()):
        table.add_row(f"{value:g}" + (" <" if value == found.chosen else ""), f"{100 * accuracy:.2f}")
    console.print(table)
    edge = "; it is at the end of what was tried" if found.at_edge else ""
    say(f"chosen: {' = '.join(found.keys)} = {found.chosen:g}{edge}")
