"""Why the rows of the laptop-size table do not stand in the paper's order: stronger λ, more epochs, one layer apart.

    make bench-order

Fine-tunes the shared start of the table's VGG-like network with the l1 penalty at strengths beyond the one that the
search chose, and for three times as long, beside the same without a penalty. Everything is measured on the validation
split, and over-fitting as the distance of its loss from that of as many training images. "First layer wide" keeps the
weights of the first layer at 8 bits. Trainings are kept in runs/order and are not repeated; results/order.json is
written after every line.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from anybit.common.files import write_json
from anybit.common.provenance import origin
from anybit.data import Batches, Dataset, load_dataset
from anybit.evaluate.sweep import evaluate
from anybit.simulate.network import QuantizedNetwork
from anybit.simulate.prepare import prepare
from anybit.spec import Bits
from anybit.task.checkpoint import load_model, read_checkpoint
from anybit.train.loop import train
from anybit.train.recipe import Recipe, load_recipe
from paper.rows import LAMBDA
from paper.tables import same_recipe

CASES = ((0.0, 2), (3e-4, 2), (1e-3, 2), (3e-3, 2), (0.0, 6), (3e-4, 6), (1e-3, 6))
"""Strengths and epochs."""

IN_TABLE = {(0.0, 2): "none", (3e-4, 2): "l1"}
"""Those that are rows of the table, and are taken from there if it was made."""

WIDTHS = (Bits(8, 4), Bits(4, 4), Bits(3, 3))


def accuracy(net: QuantizedNetwork, batches: Batches, bits: Bits, **more: Any) -> float:
    with net.at(weights=bits.weights, activations=bits.activations, **more):
        return evaluate(net, batches).accuracy


def network(recipe: Recipe, data: Dataset, folder: Path) -> nn.Module:
    """Train, unless that was done."""
    path = folder / "model.safetensors"
    if path.is_file() and same_recipe(read_checkpoint(path)[1].get("recipe"), recipe):
        return load_model(path)[0]
    return train(recipe, data, folder, resume=True)[0]


def measure(model: nn.Module, data: Dataset) -> dict[str, Any]:
    """Return what a network reaches on the validation split."""
    validation = Batches(data.validation.channels_last(), 100)
    seen = Batches(data.train.first(len(data.validation)).channels_last(), 100)
    whole, known = evaluate(model, validation), evaluate(model, seen)
    result: dict[str, Any] = {"FP": whole.accuracy, "loss": whole.loss, "loss on training images": known.loss}
    for scales in ("per tensor", "per channel"):
        net = prepare(
            model, data.test.x[:2], input_range=data.input_range, per_channel=scales == "per channel", preset="paper"
        )
        first = net.plan.weights[0].name
        result[scales] = {str(bits): accuracy(net, validation, bits) for bits in WIDTHS}
        if scales == "per tensor":
            reach = net.weights[first].detach().flatten(1).abs().amax(1)
            result["widest over median channel, first layer"] = float(reach.max() / reach.median())
            result["first layer wide"] = {
                str(bits): accuracy(net, validation, bits, layers={first: (8, bits.activations)}) for bits in WIDTHS
            }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="results/order.json")
    options = parser.parse_args()
    console, base = Console(), load_recipe("paper/recipes/laptop/vgg-like-tune.toml")
    data, results = load_dataset(base.data.name, code=True), list[dict[str, Any]]()
    for strength, epochs in CASES:
        row = IN_TABLE.get((strength, epochs))
        name = row or f"l1-{strength:g}-{epochs}-epochs"
        folder = Path("runs/table1-laptop/vgg-like-0" if row else "runs/order") / name
        recipe = base.changed({"name": name, "epochs": epochs, **dict.fromkeys(LAMBDA, strength)})
        result = {"strength": strength, "epochs": epochs, "seed": recipe.seed, "n": len(data.validation)}
        result |= measure(network(recipe, data, folder), data)
        results.append(result)
        write_json(options.out, {**origin(), "threads": torch.get_num_threads(), "rows": results})
        console.print(name, result)
    console.print(shown(results))


def shown(results: list[dict[str, Any]]) -> Table:
    """Return the results as a table."""
    table = Table(title="validation accuracy in %")
    ways = [(way, str(bits)) for way in ("per tensor", "first layer wide", "per channel") for bits in WIDTHS]
    for column in ("λ", "epochs", "FP", *(f"{way} {bits}" for way, bits in ways)):
        table.add_column(column, justify="right")
    for row in results:
        cells = (f"{100 * row[way][bits]:.1f}" for way, bits in ways)
        table.add_row(f"{row['strength']:g}", str(row["epochs"]), f"{100 * row['FP']:.1f}", *cells)
    return table


if __name__ == "__main__":
    main()
