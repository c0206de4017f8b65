"""The search for a strength or a learning rate, on the validation split.

A strength is chosen as in the paper: penalty and loss are tracked for some steps, the grid spans the strengths at which
their product with the penalty is of the order of the loss, and the strongest one wins that keeps the accuracy in
floating point within a tolerance of that without the penalty. No quantization is looked at. A learning rate wins by
accuracy: of a straight-through recipe at the widths it trains for.

Every trial is short (one epoch on a fixed part of the training data, unless told otherwise) and waits in Optuna's queue
until a process takes it. Several processes that search for the same in one storage, on this machine or on several,
share the queue and come to the same choice. A process that is killed stops giving signs of life, and Optuna puts its
trial back into the queue.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from anybit.data import Dataset
from anybit.errors import NonFiniteError, SpecError
from anybit.task.checkpoint import digest_of
from anybit.train.begin import start
from anybit.train.loop import fit, validate
from anybit.train.place import here
from anybit.train.recipe import Recipe
from anybit.train.resume import Say, unsaid
from anybit.train.trials import GRACE, Trials

RATIOS = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Of penalty times strength to loss: "the same order of magnitude", one decade either way."""

TOLERANCE = 0.005
"""Validation accuracy that a strength may cost: one standard error of the difference over 5,000 images."""

GROWTH = 3
"""Values that are added where the winner is at the end of the grid, one at a time."""

SHARE = 1 / 3
TRACKED_STEPS = 40
GRADIENT_KEYS = {"penalty.weight": "weight_norm", "penalty.activation": "activation_norm"}
TERM_KEYS = {"penalty.orthogonal": "orthogonal", "penalty.kurtosis": "kurtosis"}
STRENGTHS = {*GRADIENT_KEYS, *TERM_KEYS, "penalty.noise"}
"""Keys of which the strongest harmless value wins; for noise, which adds nothing to the loss, none can be proposed."""

BARELY = 1e-12
"""A strength that makes a penalty show in the log and does nothing."""

LEARNED = 0.25
"""The part of the way from guessing to no errors below which a network is too bad to be harmed by a strength."""

NEAR_GUESSING = (
    "warning: without the penalty the trials reach only {:.1f} %, near guessing, where no strength seems to cost "
    "anything; start them from a trained network (init in the recipe), or make them longer"
)


@dataclass(frozen=True)
class Knob:
    """What is searched: the keys of a recipe that all get the same value, and the values to try.

    Without values a strength's grid is proposed by tracking. `aim` is "strongest" for strengths (zero is tried too, as
    the reference) and "best" for everything else.
    """

    keys: tuple[str, ...]
    values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.keys:
            raise SpecError("a search needs at least one key of the recipe to vary, such as penalty.weight")
        if not self.values and (unknown := [key for key in self.keys if key not in GRADIENT_KEYS | TERM_KEYS]):
            raise SpecError(f"no range can be proposed for {unknown[0]}; give the values to try")
        if any(not 0 < value < math.inf for value in self.values):
            raise SpecError(f"values to try are above zero, got {self.values}")

    @property
    def aim(self) -> Literal["strongest", "best"]:
        """How the winner is chosen."""
        return "strongest" if STRENGTHS.issuperset(self.keys) else "best"

    def apply(self, recipe: Recipe, value: float) -> Recipe:
        """Return the recipe with this value."""
        return recipe.changed(dict.fromkeys(self.keys, value))


@dataclass(frozen=True)
class Tracked:
    """Medians over the tracked steps: the loss, and the penalty not multiplied by any strength."""

    loss: float
    penalty: float


@dataclass(frozen=True)
class Found:
    """What a search saw and what it chose."""

    keys: tuple[str, ...]
    aim: str
    chosen: float
    accuracies: dict[float, float]
    """Validation accuracy by value; for strengths also of zero."""
    tolerance: float
    epochs: int
    share: float
    tracked: Tracked | None = None

    @property
    def at_edge(self) -> bool:
        """Whether the winner is at the end of what was tried: a value further out might do as well."""
        return next_value(self.accuracies, self.chosen) is not None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        values = dataclasses.asdict(self)
        values["keys"] = list(self.keys)
        values["accuracies"] = [[value, accuracy] for value, accuracy in sorted(self.accuracies.items())]
        return {**values, "at_edge": self.at_edge}


def nice(value: float) -> float:
    """Return the nearest of ..., 0.1, 0.3, 1, 3, 10, ... as the logarithm sees it.

    >>> [nice(v) for v in (0.9, 0.0021, 47.0)]
    [1.0, 0.003, 30.0]
    """
    exponent = math.floor(math.log10(value))
    steps = [float(f"{digit}e{e}") for e in (exponent - 1, exponent, exponent + 1) for digit in (1, 3)]
    return min(steps, key=lambda step: abs(math.log(step / value)))


def propose(tracked: Tracked) -> tuple[float, ...]:
    """Return strengths at which penalty and loss are of the same order.

    >>> propose(Tracked(loss=0.5, penalty=50.0))
    (0.001, 0.003, 0.01, 0.03, 0.1)
    """
    if not (tracked.loss > 0 and tracked.penalty > 0):
        raise SpecError(f"nothing to compare: loss {tracked.loss}, penalty {tracked.penalty}; give the values to try")
    return tuple(dict.fromkeys(nice(ratio * tracked.loss / tracked.penalty) for ratio in RATIOS))


def choose_strongest(accuracies: Mapping[float, float], tolerance: float) -> float:
    """Return the largest strength whose accuracy is within `tolerance` of that of zero; zero if none is.

    >>> choose_strongest({0.0: 0.90, 0.1: 0.899, 1.0: 0.87}, tolerance=0.005)
    0.1
    """
    return max(value for value, accuracy in accuracies.items() if accuracy >= accuracies[0.0] - tolerance)


def choose_best(accuracies: Mapping[float, float]) -> float:
    """Return the value with the highest accuracy; of equals the smallest.

    >>> choose_best({0.1: 0.8, 0.01: 0.9, 0.001: 0.9})
    0.001
    """
    return min(accuracies, key=lambda value: (-accuracies[value], value))


def next_value(accuracies: Mapping[float, float], chosen: float) -> float | None:
    """Return the value to try next where the winner is at an end of the grid, half a decade further out.

    Where every strength costs too much and zero wins, that is a weaker one.

    >>> next_value({0.0: 0.9, 0.1: 0.9, 0.3: 0.9}, chosen=0.3), next_value({0.0: 0.9, 0.1: 0.5}, chosen=0.0)
    (1.0, 0.03)
    >>> next_value({0.0: 0.9, 0.1: 0.9, 0.3: 0.5}, chosen=0.1)
    """
    tried = sorted(value for value in accuracies if value > 0)
    if chosen == tried[-1]:
        return nice(chosen * math.sqrt(10))
    if chosen == 0 or (chosen == tried[0] and 0.0 not in accuracies):
        return nice(tried[0] / math.sqrt(10))
    return None


def part_of(data: Dataset, share: float) -> Dataset:
    """Return the data set with the first part of its training split only."""
    if not 0 < share <= 1:
        raise SpecError(f"the share of the training data is above 0 and at most 1, got {share}")
    n = max(1, round(share * len(data.need("train", "a search"))))
    return dataclasses.replace(data, train=data.train.first(n))


def track(
    recipe: Recipe, data: Dataset, knob: Knob, *, steps: int = TRACKED_STEPS, device: torch.device | None = None
) -> Tracked:
    """Take some steps of the recipe without the searched penalty and return what loss and penalty come to."""
    n = steps * recipe.data.batch
    short = dataclasses.replace(data, train=data.train.first(n))
    strengths = {key: BARELY if key in TERM_KEYS else 0.0 for key in knob.keys}
    off = recipe.changed({"epochs": 1, "speed.compile": False, **strengths})  # compiled steps do not show the norms
    lines: list[dict[str, Any]] = []
    fit(start(off, data)[0], off, short, log=lambda **values: lines.append(values), place=here(device))
    names = [(GRADIENT_KEYS | TERM_KEYS)[key] for key in knob.keys]
    penalty = statistics.median(sum(line[name] for name in names) for line in lines)
    return Tracked(statistics.median(line["loss"] for line in lines), penalty)


def try_value(recipe: Recipe, data: Dataset, knob: Knob, value: float, *, device: torch.device | None = None) -> float:
    """Train with this value and return the validation accuracy that counts; a run that diverges scores zero."""
    changed = knob.apply(recipe, value)
    model, _ = start(changed, data)
    try:
        fit(model, changed, data, place=here(device))
        results = validate(model, changed, data, place=here(device))
    except NonFiniteError:
        return 0.0
    return float(results.get("validation_accuracy_at_widths", results["validation_accuracy"]))


def search(
    recipe: Recipe,
    data: Dataset,
    knob: Knob,
    *,
    storage: str,
    epochs: int = 1,
    share: float = SHARE,
    tolerance: float = TOLERANCE,
    finer: int = 0,
    grace: int = GRACE,
    known: Mapping[float, float] | None = None,
    on_trial: Callable[[float, float], None] | None = None,
    say: Say = unsaid,
    device: torch.device | None = None,
) -> Found:
    """Try every value of the knob, as far as `storage` does not know it yet, and choose.

    Args:
        recipe: The training to be done later in full; its seed and start are used.
        data: The data set; the test split is not touched.
        knob: What is varied.
        storage: Where trials are kept, as Optuna writes it: `sqlite:///runs/search.db`, or a database server. Whoever
            searches for the same there at the same time takes a part of the trials.
        epochs: Length of a trial.
        share: The part of the training data that a trial sees, always the same.
        tolerance: The accuracy that a strength may cost.
        finer: How often the step above the winning strength is halved, as the logarithm sees it. The grid has two
            values to a decade; twice finer it has eight around the winner.
        grace: Seconds without a sign of life after which another process's trial is taken up; the same for all.
        known: Accuracies by value of the same trials, made where `storage` was another; they are not made again.
        on_trial: Called with value and accuracy after each trial made here.
        say: Told what is waited for, and what is odd about the search, a sentence at a time.
        device: Where to train; on the graphics card, if not given and there is one.
    """
    # Each trial would be translated anew, for as long as a small one takes.
    short = recipe.changed({"epochs": epochs, "speed.compile": False})
    data.need("validation", "a search")
    part = part_of(data, share)

    def attempt(value: float) -> float:
        accuracy = try_value(short, part, knob, value, device=device)
        if on_trial is not None:
            on_trial(value, accuracy)
        return accuracy

    name = study_name(short, part, knob.keys, start(short, part)[0])
    trials = Trials(name, attempt, storage=storage, grace=grace, say=say)
    trials.know(known or {})
    tracked = None
    if not knob.values:
        tracked = Tracked(**trials.note("tracked", lambda: dataclasses.asdict(track(short, data, knob, device=device))))
    values = knob.values if tracked is None else propose(tracked)
    accuracies, chosen = _tried(trials, knob, values, tolerance, finer)
    if recipe.init is None and data.classes and not learned(accuracies.get(0.0, 1.0), len(data.classes)):
        say(NEAR_GUESSING.format(100 * accuracies[0.0]))
    return Found(knob.keys, knob.aim, chosen, accuracies, tolerance, epochs, share, tracked)


def _tried(
    trials: Trials, knob: Knob, values: tuple[float, ...], tolerance: float, finer: int
) -> tuple[dict[float, float], float]:
    """Try the values, then further ones where the winner is at an end, then finer ones; return all, and the winner."""
    strongest = knob.aim == "strongest"
    values = (0.0, *values) if strongest else values
    ways = [next_value] * GROWTH + [value_above] * (finer if strongest else 0)
    while True:
        accuracies = trials.run(values)
        chosen = choose_strongest(accuracies, tolerance) if strongest else choose_best(accuracies)
        more = None
        while ways and more is None:
            more = ways.pop(0)(accuracies, chosen)
        if more is None:
            return accuracies, chosen
        values = (*values, more)


def value_above(accuracies: Mapping[float, float], chosen: float) -> float | None:
    """Return the value half way between the winning strength and the next that was tried, as the logarithm sees it.

    >>> value_above({0.0: 0.9, 0.1: 0.9, 0.3: 0.5}, 0.1), value_above({0.0: 0.9, 0.1: 0.9}, 0.1)
    (0.17, None)
    """
    above = [value for value in accuracies if value > chosen]
    if not above or chosen <= 0:
        return None
    between = float(f"{math.sqrt(chosen * min(above)):.2g}")
    return between if chosen < between < min(above) else None


def learned(accuracy: float, classes: int) -> bool:
    """Tell whether a network does so much better than guessing that something could be harmed.

    >>> learned(0.3, classes=10), learned(0.6, classes=10), learned(0.6, classes=2)
    (False, True, False)
    """
    return accuracy - 1 / classes >= LEARNED * (1 - 1 / classes)


def study_name(recipe: Recipe, data: Dataset, keys: Sequence[str], start: nn.Module) -> str:
    """Return a name that changes with whatever would make old trials stale; how fast they are computed does not.

    The last word stands for the data and the weights that trials start from, the one before it for the recipe.
    """
    values = {key: value for key, value in recipe.to_dict().items() if key != "speed"}
    words = [
        json.dumps([values, data.name, len(data.train), list(keys)], sort_keys=True),
        json.dumps([data.train.digest(), data.validation.digest(), digest_of(start.state_dict())]),
    ]
    return " ".join([recipe.name, "+".join(keys), *(hashlib.sha256(word.encode()).hexdigest()[:8] for word in words)])
