"""The whole way on embedded data: train, fine-tune as usual and for any width, quantize, compare.

Both fine-tuned networks start from the same checkpoint and take the same number of steps over the same batches. No
setting is searched: the strength of training for any width follows the loss. The test split is read once, at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
from collections.abc import Sequence
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
from anybit.train.side_by_side import SideBySide, one_by_one

PLAIN, TRAINED = "usual training", "any-width training"
PENALTIES = {PLAIN: PenaltyRecipe(), TRAINED: PenaltyRecipe(any_width=True, kurtosis=0.1)}
SHOWN = (Bits(4, 4), Bits(3, 3), Bits(2, 8))
"""Widths at which the demo says what both networks have with the default settings."""

BASE = Recipe(
    name="base",
    epochs=30,
    model=ModelRecipe("small-conv"),
    data=DataRecipe("digits", batch=64, augment=False),
    optimizer=OptimizerRecipe(lr=0.1, weight_decay=5e-4),
)
TUNE = dataclasses.replace(BASE, name="tune", epochs=12, optimizer=OptimizerRecipe(lr=0.02, weight_decay=1e-4))


def run_demo(
    folder: str | Path = "runs/demo",
    *,
    seeds: Sequence[int] = (0, 1, 2),
    start: Start = quiet,
    workers: int | None = None,
) -> RowFile:
    """Train, sweep, and write `rows.json`, `report.html` and the checkpoints to `folder`; return the rows.

    The networks are so small that several run side by side, one core each; `workers=1` keeps all in this process.
    """
    folder = Path(folder)
    data = load_dataset("digits")
    workers = workers or min(len(seeds), os.cpu_count() or 1)
    bases = [(dataclasses.replace(BASE, seed=seed), folder / f"base-{seed}") for seed in seeds]
    runs = [(label, seed) for label in PENALTIES for seed in seeds]
    tuned = [(_tuned(label, seed, folder), _folder(folder, label, seed)) for label, seed in runs]
    jobs = [(_folder(folder, label, seed), label, seed, GRID, "paper") for label, seed in runs]
    few = [(_folder(folder, label, seed), label, seed, SHOWN, "default") for label, seed in runs]
    with contextlib.ExitStack() as stack:
        run = one_by_one
        if workers > 1:
            run = stack.enter_context(SideBySide(workers, jobs=len(jobs) + len(few))).run
            run(_warm_up, [()] * workers, start("starting processes", workers))
        run(_train, bases, start("base networks", len(bases) * steps_of(BASE, data)))
        run(_train, tuned, start("fine-tuning", len(tuned) * steps_of(TUNE, data)))
        total = len(runs) * (len(GRID) + len(SHOWN))
        parts = run(_sweep, [*jobs, *few], start("sweeping widths", total))
    rows, own = ([row for part in some for row in part] for some in (parts[: len(jobs)], parts[len(jobs) :]))
    file = RowFile(
        "anybit demo: digits, trained as usual and for any width",
        tuple(rows),
        {**origin(), "base": BASE.to_dict(), "tune": TUNE.to_dict()},
        describe(own),
    )
    write_rows(folder / "rows.json", file)
    write_report([file], folder / "report.html")
    return file


def _warm_up(advance: Advance) -> None:
    """Take one step: what only the first one loads and sets up does not spoil the time left of the first bar."""
    data = load_dataset("digits")
    few = dataclasses.replace(data, train=data.train.first(BASE.data.batch))
    fit(build_model(**model_shape(BASE, few)), dataclasses.replace(BASE, epochs=1), few)
    advance(1)


def _train(recipe: Recipe, folder: Path, advance: Advance) -> None:
    train(recipe, load_dataset("digits"), folder, progress=advance)


def _folder(folder: Path, label: str, seed: int) -> Path:
    return folder / f"{label.replace(' ', '-')}-{seed}"


def _tuned(label: str, seed: int, folder: Path) -> Recipe:
    start = str(folder / f"base-{seed}" / "model.safetensors")
    return dataclasses.replace(TUNE, seed=seed, init=start, penalty=PENALTIES[label])


def _sweep(run: Path, label: str, seed: int, widths: Sequence[Bits], preset: str, advance: Advance) -> list[Row]:
    data = load_dataset("digits")
    net = prepared(load_model(run / "model.safetensors")[0], data, preset=preset)
    test = Batches(data.test, len(data.test))
    return sweep(net, test, widths=widths, label=label, seed=seed, on_row=lambda row: advance(1))


def describe(own: Sequence[Row]) -> tuple[str, ...]:
    """Say what was compared, and where the networks differ most with the default settings."""

    def mean(label: str, bits: Bits) -> float:
        return 100 * statistics.fmean(row.accuracy for row in own if (row.label, row.bits) == (label, bits))

    bits = max(SHOWN, key=lambda bits: abs(mean(TRAINED, bits) - mean(PLAIN, bits)))
    return (
        "Both networks were fine-tuned from the same checkpoint for the same number of steps. One of them had a "
        "second, quantized pass in each step, at a width drawn anew (anybit.AnyWidth), and a kurtosis penalty of 0.1.",
        "The table has the settings of the paper: one scale for each tensor, every layer at the same width. With "
        f"anybit's default settings they differ most at {bits}: {mean(PLAIN, bits):.1f} % trained as usual, "
        f"{mean(TRAINED, bits):.1f} % for any width.",
    )
