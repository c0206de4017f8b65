"""The whole way on embedded data: train, fine-tune with and without the penalty, quantize, compare.

Both fine-tuned networks start from the same checkpoint and take the same number of steps over the same batches.
The strength λ is chosen as in the paper: the strongest that does not hurt full precision, judged on the validation
split. The test split is read once, for the table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from anybit.data import Batches, Dataset, load_dataset
from anybit.evaluate.sweep import sweep
from anybit.provenance import origin
from anybit.quant.prepare import prepare
from anybit.report.page import write_report
from anybit.report.rows import RowFile, Summary, summarize, write_rows
from anybit.spec import FLOAT, Bits, Row
from anybit.train.checkpoint import load_model
from anybit.train.loop import steps_of, train
from anybit.train.recipe import DataRecipe, ModelRecipe, OptimizerRecipe, PenaltyRecipe, Recipe

PLAIN, PENALIZED = "without penalty", "with l1 penalty"

WIDTHS = (
    Bits(FLOAT, FLOAT),
    *(Bits(b, b) for b in range(8, 1, -1)),
    *(Bits(b, FLOAT) for b in range(8, 1, -1)),
    *(Bits(FLOAT, b) for b in range(8, 1, -1)),
)
STRENGTHS = (0.001, 0.002, 0.004, 0.008)
TOLERANCE = 0.005
"""Mean validation accuracy that a strength may cost and still count as harmless: about one image in 250."""

BASE = Recipe(
    name="base",
    epochs=30,
    model=ModelRecipe("small-conv"),
    data=DataRecipe("digits", batch=64, augment=False),
    optimizer=OptimizerRecipe(lr=0.1, weight_decay=5e-4),
)
TUNE = dataclasses.replace(BASE, name="tune", epochs=15, optimizer=OptimizerRecipe(lr=0.02, weight_decay=1e-4))

Start = Callable[[str, int], Callable[[int], None]]
"""Starts a progress bar of so many steps; returns what moves it on."""


@dataclass(frozen=True)
class DemoResult:
    """What the demo measured, and which strength it chose by which validation accuracies."""

    file: RowFile
    strength: float
    validation: dict[float, float]

    @property
    def summaries(self) -> list[Summary]:
        """Mean and spread over seeds."""
        return summarize(self.file.rows)


def choose_strength(validation: dict[float, float], *, tolerance: float = TOLERANCE) -> float:
    """Return the strongest λ whose validation accuracy is within `tolerance` of that of λ = 0.

    >>> choose_strength({0.0: 0.98, 0.01: 0.979, 0.1: 0.9})
    0.01
    """
    floor = validation[0.0] - tolerance
    return max(strength for strength, accuracy in validation.items() if accuracy >= floor)


def run_demo(
    folder: str | Path = "runs/demo", *, seeds: Sequence[int] = (0, 1, 2), start: Start | None = None
) -> DemoResult:
    """Train, choose λ, sweep, and write `rows.json`, `report.html` and the checkpoints to `folder`."""
    folder = Path(folder)
    data = load_dataset("digits")
    start = start or (lambda name, total: lambda steps: None)
    advance = start("base networks", len(seeds) * steps_of(BASE, data))
    for seed in seeds:
        train(dataclasses.replace(BASE, seed=seed), data, folder / f"base-{seed}", progress=advance)
    advance = start("fine-tuning", len(seeds) * (1 + len(STRENGTHS)) * steps_of(TUNE, data))
    validation = {
        strength: _mean([_tune(strength, seed, data, folder, advance) for seed in seeds])
        for strength in (0.0, *STRENGTHS)
    }
    strength = choose_strength(validation)
    advance = start("sweeping widths", 2 * len(seeds) * len(WIDTHS))
    rows: list[Row] = []
    for label, value in ((PLAIN, 0.0), (PENALIZED, strength)):
        for seed in seeds:
            rows += _sweep(_folder(folder, value, seed), data, label, seed, advance)
    notes = describe(rows, strength, validation, seeds)
    file = RowFile("anybit demo: digits at every width", tuple(rows), {**origin(), **_settings()}, notes)
    write_rows(folder / "rows.json", file)
    write_report(file, folder / "report.html")
    return DemoResult(file, strength, validation)


def _folder(folder: Path, strength: float, seed: int) -> Path:
    return folder / f"tune-{strength:g}-{seed}"


def _tune(strength: float, seed: int, data: Dataset, folder: Path, advance: Callable[[int], None]) -> float:
    recipe = dataclasses.replace(
        TUNE,
        seed=seed,
        init=str(folder / f"base-{seed}" / "model.safetensors"),
        penalty=PenaltyRecipe(weight=strength, activation=strength),
    )
    _, results = train(recipe, data, _folder(folder, strength, seed), progress=advance)
    return float(results["validation_accuracy"])


def _sweep(run: Path, data: Dataset, label: str, seed: int, advance: Callable[[int], None]) -> list[Row]:
    model, _ = load_model(run / "model.safetensors")
    net = prepare(model, data.test.x[:2], input_range=data.input_range)
    loader = Batches(data.test, len(data.test))
    return sweep(net, loader, widths=WIDTHS, label=label, seed=seed, on_row=lambda _: advance(1))


def describe(
    rows: Sequence[Row], strength: float, validation: dict[float, float], seeds: Sequence[int]
) -> tuple[str, ...]:
    """Say what was measured, and at which widths the penalty helped, made no difference, or hurt."""
    found = {(s.label, s.bits): s for s in summarize(rows)}
    gains = {bits: 100 * (found[PENALIZED, bits].mean - found[PLAIN, bits].mean) for bits in WIDTHS}
    tried = ", ".join(f"{s:g}: {100 * a:.1f} %" for s, a in validation.items())
    return (
        f"Measured on {rows[0].n} test digits, {len(seeds)} seeds. Both networks were fine-tuned from the same "
        f"checkpoint for the same number of steps; the only difference is the gradient l1 penalty, λ = {strength:g}.",
        f"λ is the strongest tried whose mean validation accuracy in floating point stayed within "
        f"{100 * TOLERANCE:g} points of that without penalty ({tried}).",
        f"Helped by half a point or more at: {_names(gains, lambda g: g >= 0.5)}. "
        f"Made less than half a point of difference at: {_names(gains, lambda g: abs(g) < 0.5)}. "
        f"Did harm of half a point or more at: {_names(gains, lambda g: g <= -0.5)}.",
    )


def _names(gains: dict[Bits, float], wanted: Callable[[float], bool]) -> str:
    return ", ".join(str(bits) for bits, gain in gains.items() if wanted(gain)) or "no width"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _settings() -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "base": BASE.to_dict(),
        "tune": TUNE.to_dict(),
        "strengths": list(STRENGTHS),
    }
