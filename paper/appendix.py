"""The appendices of the paper as numbers.

python -m paper.appendix a          Hoeffding's bound on the length of quantization noise
python -m paper.appendix b          the second-order term
python -m paper.appendix c          singular values of layers
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch.nn.functional as F
import typer
from torch import Tensor, nn

from anybit.cli.show import progress_bars
from anybit.common.progress import Start, quiet
from anybit.common.provenance import origin
from anybit.errors import SpecError
from paper.command import run_command
from paper.hoeffding import BoundCheck, check_bound
from paper.runs import load_data, load_run, small_run
from paper.second_order import SecondOrder, second_order
from paper.show import markdown_table
from paper.singular_values import LayerValues, layer_values

EXAMPLES = 200
"""Test examples whose mean loss appendix B differentiates twice."""

TITLES = {
    "a": "A. squared length of uniform noise on n weights, bins of width 1",
    "b": "B. worst increase of the loss by n weights at 4 bits, in nats",
    "c": "C. the orthogonality penalty of each layer, and its largest singular value σ",
}

HEADS = {
    "a": {
        "n": "n",
        "expected": "mean",
        "mean": "mean, drawn",
        "radius": "95 % within, bound",
        "quantile": "95 % within, drawn",
        "outside": "share beyond bound",
        "length": "length / √n",
    },
    "b": {
        "layer": "layer",
        "n": "n",
        "delta": "half a bin, δ",
        "least": "least eigenvalue",
        "first_order": "first order, δ‖∇L‖₁",
        "rounding": "second order, rounding ≥",
        "exact": "second order, exact",
        "relaxation": "second order, relaxed ≤",
        "spectral": "second order, n·λ_max ≤",
    },
    "c": {
        "layer": "layer",
        "penalty": "‖WᵀW-I‖²",
        "fourth_power": "Σ(σ²-1)²",
        "growth": "power",
        "trace_growth": "trace",
        "reshaped": "kernel σ",
        "circular": "circular σ",
        "operator": "layer σ",
    },
}
"""How each quantity is headed; appendix B has more quantities than cases and is printed on its side."""


def appendix_rows(
    part: str, *, run: Path | None = None, seed: int = 0, start: Start = quiet
) -> Sequence[BoundCheck] | Sequence[SecondOrder] | Sequence[LayerValues]:
    """Return the rows of appendix a, b or c; b and c look at a run, or at a small network trained on the spot."""
    if part not in TITLES:
        raise SpecError(f"the appendices with numbers in them are a, b and c; got {part!r}")
    if part == "a":
        return check_bound(seed=seed)
    if run is None:
        model, dataset = small_run(seed=seed, start=start)
    else:
        trained = load_run(run)
        model, dataset = trained.model, load_data(trained.data)
    if part == "c":
        return layer_values(model, dataset.test.x[:2])
    x, y = dataset.test.x[:EXAMPLES].double(), dataset.test.y[:EXAMPLES]

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(x), y)

    return second_order(model.double(), loss, seed=seed, start=start)


def command(
    part: Annotated[str, typer.Argument(help="a: Hoeffding's bound. b: the second order. c: singular values.")],
    run: Annotated[
        Path | None, typer.Option(help="A run folder for b and c. Default: a small network, trained on the spot.")
    ] = None,
    seed: Annotated[int, typer.Option(help="For everything that is drawn at random.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check an appendix of the paper by numbers."""
    with progress_bars() as start:
        rows = [dataclasses.asdict(row) for row in appendix_rows(part, run=run, seed=seed, start=start)]
    if as_json:
        print(json.dumps({"appendix": part, "seed": seed, "rows": rows, "origin": origin()}, indent=1))
        return
    lines = [[head, *(_cell(row[name]) for row in rows)] for name, head in HEADS[part].items()]
    if part != "b":
        lines = [list(line) for line in zip(*lines, strict=True)]
    print(f"{TITLES[part]}\n\n{markdown_table(lines[0], lines[1:])}")


def _cell(value: Any) -> str:
    """Return a value as it stands in a table.

    >>> _cell(0.12345), _cell((16, 3)), _cell(None), _cell(1000)
    ('0.1235', '16x3', '', '1000')
    """
    if value is None:
        return ""
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    run_command(command)
