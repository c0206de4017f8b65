"""The search for a strength or a learning rate, on the validation split.

A strength is chosen as in the paper: penalty and loss are tracked for some steps, the grid spans the strengths at which
their product with the penalty is of the order of the loss, and the strongest one wins that keeps the accuracy in
floating point within a tolerance of that without the penalty. No quantization is looked at. A learning rate wins by
accuracy: of a straight-through recipe at the widths it trains for.

Every trial is short (one epoch on a fixed part of the training data, unless told otherwise) and is recorded by Optuna
when it is done, so that a search that was killed goes on with the trial it was in. Several processes that search for
the same in one storage, on this machine or on several, share the trials and come to the same choice.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from anybit.data import Dataset
from anybit.errors import FileError, NonFiniteError, SpecError
from anybit.models import build_model
from anybit.train.checkpoint import digest_of, load_weights
from anybit.train.loop import fit, model_shape, validate
from anybit.train.place import here
from anybit.train.recipe import Recipe
from anybit.train.resume import Say, unsaid
from anybit.train.storage import Store, open_store
from anybit.train.workers import Work, listed

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


def propose(tracked: Tracked, ratios: Sequence[float] = RATIOS) -> tuple[float, ...]:
    """Return strengths at which penalty and loss are of the same order.

    >>> propose(Tracked(loss=0.5, penalty=50.0))
    (0.001, 0.003, 0.01, 0.03, 0.1)
    """
    if not (tracked.loss > 0 and tracked.penalty > 0):
        raise SpecError(f"nothing to compare: loss {tracked.loss}, penalty {tracked.penalty}; give the values to try")
    return tuple(dict.fromkeys(nice(ratio * tracked.loss / tracked.penalty) for ratio in ratios))


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
    n = max(1, round(share * len(data.train)))
    return dataclasses.replace(data, train=data.train.first(n))


def track(recipe: Recipe, data: Dataset, knob: Knob, *, steps: int = TRACKED_STEPS) -> Tracked:
    """Take some steps of the recipe without the searched penalty and return what loss and penalty come to."""
    n = steps * recipe.data.batch
    short = dataclasses.replace(data, train=data.train.first(n))
    strengths = {key: BARELY if key in TERM_KEYS else 0.0 for key in knob.keys}
    off = recipe.changed({"epochs": 1, "speed.compile": False, **strengths})  # compiled steps do not show the norms
    lines: list[dict[str, Any]] = []
    fit(_start(off, data), off, short, log=lambda **values: lines.append(values), place=here())
    names = [(GRADIENT_KEYS | TERM_KEYS)[key] for key in knob.keys]
    penalty = statistics.median(sum(line[name] for name in names) for line in lines)
    return Tracked(statistics.median(line["loss"] for line in lines), penalty)


def try_value(recipe: Recipe, data: Dataset, knob: Knob, value: float) -> float:
    """Train with this value and return the validation accuracy that counts; a run that diverges scores zero."""
    changed = knob.apply(recipe, value)
    model = _start(changed, data)
    try:
        fit(model, changed, data, place=here())
        results = validate(model, changed, data, place=here())
    except NonFiniteError:
        return 0.0
    return float(results.get("validation_accuracy_at_widths", results["validation_accuracy"]))


def _start(recipe: Recipe, data: Dataset) -> nn.Module:
    torch.manual_seed(recipe.seed)
    model = build_model(**model_shape(recipe, data))
    if recipe.init is not None:
        load_weights(recipe.init, model)
    return model


def search(
    recipe: Recipe,
    data: Dataset,
    knob: Knob,
    *,
    storage: str | Store,
    epochs: int = 1,
    share: float = SHARE,
    tolerance: float = TOLERANCE,
    on_trial: Callable[[float, float], None] | None = None,
    say: Say | None = None,
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
        on_trial: Called with value and accuracy after each trial made here.
        say: Told what is waited for, and what is odd about the search, a sentence at a time.
    """
    short = recipe.changed({"epochs": epochs})
    part = part_of(data, share)
    store = open_store(storage) if isinstance(storage, str) else storage
    grid = _Grid(short, part, knob, store=store, on_trial=on_trial, say=say or unsaid)
    tracked = None if knob.values else grid.tracked(data)
    values = knob.values if tracked is None else propose(tracked)
    if knob.aim == "strongest":
        values = (0.0, *values)
    for _ in range(GROWTH + 1):
        accuracies = grid.run(values)
        chosen = choose_strongest(accuracies, tolerance) if knob.aim == "strongest" else choose_best(accuracies)
        further = next_value(accuracies, chosen)
        if further is None:
            break
        values = (*values, further)
    if recipe.init is None and not learned(accuracies.get(0.0, 1.0), len(data.classes)):
        grid.say(NEAR_GUESSING.format(100 * accuracies[0.0]))
    return Found(knob.keys, knob.aim, chosen, accuracies, tolerance, epochs, share, tracked)


def learned(accuracy: float, classes: int) -> bool:
    """Tell whether a network does so much better than guessing that something could be harmed.

    >>> learned(0.3, classes=10), learned(0.6, classes=10), learned(0.6, classes=2)
    (False, True, False)
    """
    return accuracy - 1 / classes >= LEARNED * (1 - 1 / classes)


def study_name(recipe: Recipe, data: Dataset, keys: Sequence[str]) -> str:
    """Return a name that changes with whatever would make old trials stale; how fast they are computed does not."""
    values = {key: value for key, value in recipe.to_dict().items() if key != "speed"}
    if (noise := recipe.penalty.noise) in (0.0, 1.0):  # once a switch, and so it is in the names of old studies
        values["penalty"]["noise"] = bool(noise)
    about = json.dumps([values, data.name, len(data.train), list(keys)], sort_keys=True)
    return f"{recipe.name} {'+'.join(keys)} {hashlib.sha256(about.encode()).hexdigest()[:8]}"


class _Grid:
    """The trials of one search, of which this process makes those that it claims first."""

    def __init__(
        self,
        recipe: Recipe,
        data: Dataset,
        knob: Knob,
        *,
        store: Store,
        on_trial: Callable[[float, float], None] | None,
        say: Say,
    ) -> None:
        self.recipe, self.data, self.knob, self.on_trial, self.say = recipe, data, knob, on_trial, say
        self.work = Work(store, study_name(recipe, data, knob.keys))
        self._said: tuple[float | str, ...] = ()
        if recipe.init is not None:
            self._check_start(recipe.init)

    def _check_start(self, init: str) -> None:
        """Refuse to add to trials that began from other weights, as may be on another machine under the same name."""
        start = digest_of(_start(self.recipe, self.data).state_dict())
        known = self.work.note("start")
        if known is None:
            self.work.take_note("start", {"digest": start, "host": platform.node()})
        elif known["digest"] != start:
            raise FileError(
                f"{init}: the trials in {self.work.store.url} began from other weights (those on {known['host']}); "
                "copy that file here to go on with them, or give another storage to search anew"
            )

    def tracked(self, data: Dataset) -> Tracked:
        """Return what the grid is proposed from, the same for all: whoever comes first works it out."""
        while (known := self.work.note("tracked")) is None:
            claim = self.work.claim("tracking", done=lambda: self.work.note("tracked") is not None)
            if claim is None:
                self._wait(["tracking"], "loss and penalty, which another worker is tracking")
                continue
            with claim:
                self.work.take_note("tracked", dataclasses.asdict(track(self.recipe, data, self.knob)))
        return Tracked(**known)

    def run(self, values: Sequence[float]) -> dict[float, float]:
        """Try what is not known yet and nobody else is trying; return the accuracy of every value."""
        while missing := [value for value in values if value not in self._accuracies()]:
            if not any(self._try(value) for value in missing):
                others = [value for value in missing if value in self.work.running()]
                self._wait(others, f"{listed(others)}, which other workers are trying" if others else "")
        accuracies = self._accuracies()
        return {value: accuracies[value] for value in values}

    def _try(self, value: float) -> bool:
        """Make one trial, unless somebody else does; return whether it was made here."""
        claim = self.work.claim(value, done=lambda: value in self._accuracies())
        if claim is None:
            return False
        with claim:
            if claim.lost is not None:
                self.say(f"{value:g}: taken up again; {claim.lost} died while trying it")
            accuracy = try_value(self.recipe, self.data, self.knob, value)
            if not claim.finish(accuracy):
                self.say(f"{value:g}: done, but nothing was heard from here for so long that another worker took it up")
            elif self.on_trial is not None:
                self.on_trial(value, accuracy)
        return True

    def _accuracies(self) -> dict[float, float]:
        return {unit: trial.value for unit, trial in self.work.done().items() if isinstance(unit, float)}

    def _wait(self, units: Sequence[float | str], what: str) -> None:
        """Wait for others, and say so once."""
        if what and tuple(units) != self._said:
            self._said = tuple(units)
            self.say(f"waiting for {what}")
        time.sleep(self.work.store.pause)
