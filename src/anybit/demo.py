"""The whole way on embedded data: train, fine-tune with and without the penalty, quantize, compare.

Both fine-tuned networks start from the same checkpoint and take the same number of steps over the same batches.
The strength λ is chosen as in the paper: the strongest that does not hurt full precision, judged on the validation
split. The test split is read once, for the table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from anybit.common.progress import Advance, Start, quiet
from anybit.common.provenance import origin
from anybit.data import Batches, load_dataset
from anybit.evaluate.sweep import sweep
from anybit.models import build_model
from anybit.pages.page import write_report
from anybit.pages.rows import GRID, RowFile, write_rows
from anybit.spec import Bits, Row
from anybit.task.checkpoint import load_model
from anybit.task.task import prepared
from anybit.train.begin import model_shape
from anybit.train.loop import fit, steps_of, train
from anybit.train.recipe import DataRecipe, ModelRecipe, OptimizerRecipe, PenaltyRecipe, Recipe
from anybit.train.search import choose_strongest
from anybit.train.side_by_side import SideBySide, one_by_one

PLAIN, PENALIZED = "without penalty", "with l1 penalty"
SHOWN = (Bits(4, 4), Bits(3, 3))
"""Widths at which the demo says what the default settings do without a penalty."""

STRENGTHS = (0.001, 0.003, 0.006, 0.012)
TOLERANCE = 0.01
"""Mean validation accuracy that a strength may cost and still count as harmless: two standard errors of 750 images."""

BASE = Recipe(
    name="base",
    epochs=30,
    model=ModelRecipe("small-conv"),
    data=DataRecipe("digits", batch=64, augment=False),
    optimizer=OptimizerRecipe(lr=0.1, weight_decay=5e-4),
)
TUNE = dataclasses.replace(BASE, name="tune", epochs=12, optimizer=OptimizerRecipe(lr=0.02, weight_decay=1e-4))


@dataclass(frozen=True)
class DemoResult:
    """What the demo measured, and which strength it chose by which validation accuracies."""

    file: RowFile
    strength: float
    validation: dict[float, float]


def run_demo(
    folder: str | Path = "runs/demo",
    *,
    seeds: Sequence[int] = (0, 1, 2),
    start: Start = quiet,
    workers: int | None = None,
) -> DemoResult:
    """Train, choose λ, sweep, and write `rows.json`, `report.html` and the checkpoints to `folder`.

    The networks are so small that several run side by side, one core each; `workers=1` keeps all in this process.
    """
    folder = Path(folder)
    data = load_dataset("digits")
    workers = workers or min(len(seeds), os.cpu_count() or 1)
    bases = [(dataclasses.replace(BASE, seed=seed), folder / f"base-{seed}") for seed in seeds]
    strengths = (0.0, *STRENGTHS)
    tuned = [(_tuned(value, seed, folder), _folder(folder, value, seed)) for value in strengths for seed in seeds]
    with contextlib.ExitStack() as stack:
        run = one_by_one
        if workers > 1:
            run = stack.enter_context(SideBySide(workers, jobs=len(tuned))).run
            run(_warm_up, [()] * workers, start("starting processes", workers))
        run(_train, bases, start("base networks", len(bases) * steps_of(BASE, data)))
        scores = run(_train, tuned, start("fine-tuning", len(tuned) * steps_of(TUNE, data)))
        grouped = [scores[i : i + len(seeds)] for i in range(0, len(scores), len(seeds))]
        validation = {value: sum(part) / len(part) for value, part in zip(strengths, grouped, strict=True)}
        strength = choose_strongest(validation, TOLERANCE)
        jobs = [
            (_folder(folder, value, seed), label, seed, GRID, "paper")
            for label, value in ((PLAIN, 0.0), (PENALIZED, strength))
            for seed in seeds
        ]
        few = [(_folder(folder, 0.0, seed), "defaults", seed, SHOWN, "default") for seed in seeds]
        total = len(jobs) * len(GRID) + len(few) * len(SHOWN)
        parts = run(_sweep, [*jobs, *few], start("sweeping widths", total))
    rows = [row for part in parts[: len(jobs)] for row in part]
    own = [row for part in parts[len(jobs) :] for row in part]
    defaults = {bits: statistics.fmean(row.accuracy for row in own if row.bits == bits) for bits in SHOWN}
    file = RowFile(
        "anybit demo: digits, without and with the gradient l1 penalty",
        tuple(rows),
        {**origin(), "base": BASE.to_dict(), "tune": TUNE.to_dict(), "strengths": list(STRENGTHS)},
        describe(strength, validation, defaults),
    )
    write_rows(folder / "rows.json", file)
    write_report([file], folder / "report.html")
    return DemoResult(file, strength, validation)


def _warm_up(advance: Advance) -> None:
    """Take one step: what only the first one loads and sets up does not spoil the time left of the first bar."""
    data = load_dataset("digits")
    few = dataclasses.replace(data, train=data.train.first(BASE.data.batch))
    fit(build_model(**model_shape(BASE, few)), dataclasses.replace(BASE, epochs=1), few)
    advance(1)


def _train(recipe: Recipe, folder: Path, advance: Advance) -> float:
    """Train a recipe into its folder; return the validation accuracy."""
    _, results = train(recipe, load_dataset("digits"), folder, progress=advance)
    return float(results["validation_accuracy"])


def _folder(folder: Path, strength: float, seed: int) -> Path:
    return folder / f"tune-{strength:g}-{seed}"


def _tuned(strength: float, seed: int, folder: Path) -> Recipe:
    return dataclasses.replace(
        TUNE,
        seed=seed,
        init=str(folder / f"base-{seed}" / "model.safetensors"),
        penalty=PenaltyRecipe(weight=strength, activation=strength),
    )


def _sweep(run: Path, label: str, seed: int, widths: Sequence[Bits], preset: str, advance: Advance) -> list[Row]:
    data = load_dataset("digits")
    net = prepared(load_model(run / "model.safetensors")[0], data, preset=preset)
    test = Batches(data.test, len(data.test))
    return sweep(net, test, widths=widths, label=label, seed=seed, on_row=lambda row: advance(1))


def describe(
    strength: float, validation: dict[float, float], defaults: Mapping[Bits, float] | None = None
) -> tuple[str, ...]:
    """Say what was compared, how the strength was chosen, and what the default settings do without any penalty."""
    found = ", ".join(f"{100 * accuracy:.1f} % at {bits}" for bits, accuracy in (defaults or {}).items())
    better = f"With anybit's default settings the network without penalty has {found}." if found else ""
    tried = ", ".join(f"{s:g}: {100 * a:.1f} %" for s, a in validation.items())
    return (
        "Both networks were fine-tuned from the same checkpoint for the same number of steps; the only difference is "
        f"the gradient l1 penalty, λ = {strength:g}.",
        "λ is the strongest tried whose mean validation accuracy in floating point stayed within "
        f"{100 * TOLERANCE:g} point of that without penalty ({tried}).",
        *([f"Both are quantized with the settings of the paper. {better}"] if better else []),
    )
