"""Mixed widths without labels: what rounding one weight does to the output, with all else exact; no PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anybit.artifact.latency import Clock, choose_in_time
from anybit.artifact.master import Master, open_master
from anybit.artifact.reconstruct import Array, Network, feeds_of, runner
from anybit.artifact.values import parts_of
from anybit.common.bars import progress_bars
from anybit.plan.allocation import Allocation, Unit, check_choices, choose
from anybit.plan.numbers import Kept
from anybit.plan.points import Widths
from anybit.plan.widen import as_one, relative_errors
from anybit.spec import FLOAT, Bits, LayerWidths


def allocate(
    network: Master | Network | str | Path,
    inputs: Iterable[Any],
    *,
    budget: float,
    unit: Unit = "bits",
    activations: int = 8,
    widths: Sequence[int] = (2, 3, 4, 5, 6, 7, 8),
    threads: int | None = None,
) -> Allocation:
    """Choose a width for every weight so that the error of the output is smallest under a budget, never exceeded.

    Args:
        network: What `anybit.prepare` returned, a master, or its path. Its widths are not changed.
        inputs: Batches of inputs without labels, a few dozen inputs in all will do.
        budget: How much the weights may take: bits per weight on average, or bytes in all; or how many seconds a run of
            the first input may take in ONNX Runtime on this machine, which is measured.
        unit: What the budget counts: "bits" (on average), "bytes" or "seconds".
        activations: The width of all activations when the error and the seconds are measured.
        widths: What to choose from.
        threads: How many threads a run may use when it is timed, as in `anybit.load`; all cores by default.

    Raises:
        SpecError: The budget cannot be met.
    """
    choices, batches = check_choices(widths, unit, activations), list(inputs)
    if isinstance(network, str | Path):
        network = open_master(network)
    master = network if isinstance(network, Master) else network.as_master()
    costs, seconds = output_errors(master, batches, choices), None
    if unit == "seconds":
        clock = Clock.of(master, next(feeds_of(master, batches)), activations, threads)
        found, seconds = choose_in_time(clock, costs, choices, budget)
    else:
        found = choose(master.plan.weights, costs, choices, budget, unit)
    layers = {name: Bits(width, activations) for name, width in found.widths.items()}
    error = error_at(master, batches, Bits(choices[-1], activations), layers)
    return Allocation(layers, found.average, found.size, found.cost, 0.0, error, "output error", seconds)


def output_errors(master: Master, inputs: Iterable[Any], widths: Sequence[int]) -> dict[str, list[float]]:
    """Return for each weight and width the squared error of the outputs, relative to how far those spread.

    Errors of several weights are nearly independent, so that their squares add up.
    """
    feeds = list(feeds_of(master, inputs))
    plain: dict[str, int] = dict.fromkeys(master.plan.widths(Bits()), FLOAT)
    exact = outputs_at(master, feeds, plain)
    found: dict[str, list[float]] = {}
    with progress_bars() as start:
        advance = start("output error of each weight", len(master.plan.weights))
        for weight in master.plan.weights:
            found[weight.name] = [
                sum(relative_errors(exact, outputs_at(master, feeds, plain | {weight.name: max(bits, weight.floor)})))
                for bits in widths
            ]
            advance(1)
    return found


def error_at(master: Master, inputs: Iterable[Any], bits: Bits, layers: LayerWidths | None = None) -> float:
    """Return the squared error of the outputs at some widths, relative to how far they spread."""
    feeds = list(feeds_of(master, inputs))
    exact = outputs_at(master, feeds, dict.fromkeys(master.plan.widths(Bits()), FLOAT))
    plan = master.plan
    found = outputs_at(master, feeds, plan.widths(bits, layers), asked=plan.asked(bits, layers))
    return sum(relative_errors(exact, found))


def outputs_at(
    master: Master,
    feeds: Iterable[Mapping[str, Array]],
    widths: Widths,
    kept: Kept | None = None,
    names: Sequence[str] = (),
    asked: Mapping[str, Bits] | None = None,
) -> list[Array]:
    """Return every output over all inputs, or other values."""
    run = runner(master, master.plan, widths, names or master.outputs, kept, asked=asked)
    made: dict[str, list[Array]] = {}
    for feed in feeds:
        for name, value in run(feed).items():
            made.setdefault(name, []).append(_whole(value))
    return [as_one(parts) for parts in made.values()]


def _whole(value: Any) -> Array:
    """Return an output as one array, also where it is a list of them.

    >>> _whole([np.ones((1, 2)), np.ones(1)]).tolist()
    [1.0, 1.0, 1.0]
    """
    parts = [*parts_of("", value).values()]
    return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0), *map(np.ravel, parts)])
