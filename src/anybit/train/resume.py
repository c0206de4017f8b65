"""Going on where a run was stopped: everything that moves during training, in one file.

That is weights and buffers, the optimizer, the counters of the penalties, the random numbers of every process, and the
place in the data: the generator as it was when the epoch began, and how many of its batches were used; order and
augmentation follow from that, as the learning rate and the penalty's strength follow from the step. On a CPU the
weights are then the same bit for bit as without the interruption.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from anybit.common.files import read_json
from anybit.common.text import printable, quoted
from anybit.data import Dataset, Split
from anybit.errors import CheckpointError
from anybit.objectives.base import Penalty
from anybit.objectives.restore import random_state, set_random_state
from anybit.task.checkpoint import check_fit, read_tensors
from anybit.train.clock import Clock, EpochTime
from anybit.train.place import Place
from anybit.train.recipe import Recipe
from anybit.train.run import RunFolder

FORMAT = "anybit-state/1"
AGAIN = "delete it to start again from the beginning"
NO_TIME = EpochTime(0.0, 0.0)

Say = Callable[[str], None]
"""Told about what happens, a sentence at a time."""


def unsaid(text: str) -> None:
    """Let a sentence go where nobody listens."""


@dataclass
class Moving:
    """What changes from step to step."""

    network: nn.Module
    optimizer: torch.optim.Optimizer
    penalties: tuple[Penalty, ...]
    generator: torch.Generator
    order: Tensor
    """The generator's state when the epoch began."""
    average: AveragedModel | None = None
    """A running average of the weights and buffers."""

    @property
    def module(self) -> nn.Module:
        """The network without what joins it to other processes."""
        return self.network.module if isinstance(self.network, DistributedDataParallel) else self.network

    @property
    def counters(self) -> list[Any]:
        """The penalties that have a state, sums taken apart."""
        parts = [part for penalty in self.penalties for part in getattr(penalty, "parts", [penalty])]
        return [part for part in parts if hasattr(part, "state_dict")]

    def entries(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter and buffer, also those that checkpoints leave out."""
        yield from self.module.named_parameters()
        yield from self.module.named_buffers()
        if self.average is not None:
            yield from self.average.named_parameters("average")
            yield from self.average.named_buffers("average")


@dataclass(frozen=True)
class Position:
    """Where a run is: the epoch, how many of its steps are done, and what it took so far."""

    epoch: int = 0
    index: int = 0
    times: tuple[EpochTime, ...] = ()
    """Of the epochs before."""
    spent: EpochTime = NO_TIME
    """On this epoch, before the clock that runs now."""

    def after(self, index: int, clock: Clock) -> Position:
        """Return where the run is after so many steps of this epoch."""
        return replace(self, index=index, spent=self._total(clock))

    def next_epoch(self, clock: Clock) -> Position:
        """Return where the next epoch begins."""
        return Position(self.epoch + 1, times=(*self.times, self._total(clock)))

    def _total(self, clock: Clock) -> EpochTime:
        now = clock.read()
        return EpochTime(self.spent.wall + now.wall, self.spent.processor + now.processor)


@dataclass(frozen=True)
class Saved:
    """A state as it was read: its parts are in order, and nobody has looked yet whether they fit the network."""

    path: Path
    tensors: dict[str, Tensor]
    position: Position
    steps: int
    log: int
    """Bytes of the log that belong to it."""
    counters: list[dict[str, float]]
    resumed: tuple[int, ...]
    """The steps at which the run was taken up again before."""
    conditions: dict[str, Any]


def identity(recipe: Recipe, data: Dataset, start: str, place: Place) -> dict[str, Any]:
    """Return what must be the same for a run to go on. `start` is the checksum of the weights that it started from."""
    about = {
        "name": data.name,
        "examples": len(data.train),
        "shape": list(data.shape),
        "training": _digest(data.train),
        "validation": _digest(data.validation),
    }
    values = {"recipe": recipe.to_dict(), "data": about, "start": start, "processes": place.processes}
    return dict(json.loads(json.dumps(values)))


def _digest(part: Any) -> str | None:
    """Return a checksum of data; of a loader none, which would have to be gone through."""
    return part.digest() if isinstance(part, Split) else None


def conditions(place: Place) -> dict[str, Any]:
    """Return what may change on the way, at the price of the last digits."""
    return {"torch": torch.__version__, "threads": torch.get_num_threads(), "device": place.device.type}


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Say in which values two nested tables differ.

    >>> differences({"optimizer": {"lr": 0.1}, "seed": 1}, {"optimizer": {"lr": 0.2}, "seed": 1})
    ['optimizer.lr is 0.1 there and 0.2 here']
    """
    a, b = dict(_flat(there)), dict(_flat(here))
    return [
        f"{printable(key, 60)} is {_spoken(a, key)} there and {_spoken(b, key)} here"
        for key in dict.fromkeys([*b, *a])
        if a.get(key, ...) != b.get(key, ...)
    ]


def _flat(table: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{where}{key}.")
        else:
            yield where + key, value


def _spoken(values: dict[str, Any], key: str) -> str:
    return quoted(values[key], 60) if key in values else "missing"


def finished(run: RunFolder, *, leads: bool) -> dict[str, Any] | None:
    """Return the results of a run that is already done, or nothing; one of another recipe is refused."""
    if run.state.is_file() or not (run.summary.is_file() and run.checkpoint.is_file()):
        return None
    values = read_json(run.summary, what="the summary of a run", error=CheckpointError)
    results = values.get("results") if isinstance(values, dict) else None
    if not isinstance(results, dict) or not results:
        return None
    there = values.get("recipe")
    found = differences(there if isinstance(there, dict) else {}, run.recipe.to_dict())
    _refuse(run.path, "holds a finished run of another recipe", found)
    if leads:
        run.finish_log()
    return results


def _refuse(path: Path, what: str, found: list[str]) -> None:
    if found:
        more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
        raise CheckpointError(f"{path}: {what}: {'; '.join(found[:3])}{more}; use another folder, or do not resume")


def read_state(path: Path, here: Callable[[], dict[str, Any]]) -> Saved | None:
    """Return the state that a run left, if there is one; `here` says what the run is that wants to go on."""
    if not path.exists():
        return None
    tensors, about = read_tensors(path, kind=FORMAT, what="the state of a run")
    try:
        there = dict(about["identity"])
        saved = _saved(path, tensors, about)
        found = differences(there, here())
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        reason = f"{type(error).__name__}: {printable(str(error), 100)}"
        raise CheckpointError(f"{path}: the header cannot be read ({reason}); {AGAIN}") from error
    _refuse(path, "is the state of another run", found)
    return saved


def _saved(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> Saved:
    at = about["position"]
    position = Position(_count(at["epoch"]), _count(at["index"]), tuple(map(_time, at["times"])), _time(at["spent"]))
    if len(position.times) != position.epoch:
        raise ValueError(f"times of {len(position.times)} epochs before epoch {position.epoch}")
    counters = [
        {str(name): _count(v) if name == "steps" else _number(v) for name, v in c.items()} for c in about["penalties"]
    ]
    if any({"steps", "factor"} - counter.keys() for counter in counters):
        raise ValueError("a penalty without its steps or its factor")
    resumed = tuple(map(_count, about["resumed"]))
    return Saved(
        path, tensors, position, _count(at["step"]), _count(about["log"]), counters, resumed, dict(about["conditions"])
    )


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**62:
        raise ValueError(f"a count is expected, got {quoted(value, 40)}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"a number is expected, got {quoted(value, 40)}")
    return float(value)


def _time(value: Any) -> EpochTime:
    wall, processor = value
    return EpochTime(_number(wall), _number(processor))


def capture(moving: Moving, gathered: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of all tensors of a state; `gathered` are those that each process has its own of."""
    tensors = {f"model.{name}": value for name, value in moving.entries()}
    for name, parameter in moving.module.named_parameters():
        for kind, value in moving.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{kind}.{name}"] = value
    tensors["order"] = moving.order
    tensors.update(gathered)
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}


def restore(saved: Saved, moving: Moving, place: Place) -> None:
    """Put everything back to what it was; shapes are looked at first, and nothing is changed if one does not fit."""
    check_fit(saved.path, saved.tensors, _outline(saved, moving, place), advice=AGAIN)
    counters = moving.counters
    if len(counters) != len(saved.counters):
        raise CheckpointError(
            f"{saved.path}: has the state of {len(saved.counters)} penalties, the recipe has {len(counters)}; {AGAIN}"
        )
    tensors = {name: value.clone() for name, value in saved.tensors.items()}
    try:
        moving.generator.set_state(tensors["order"])
        set_random_state(_apart(tensors[f"random.{place.rank}"]))
    except (RuntimeError, TypeError) as error:
        raise CheckpointError(f"{saved.path}: its random numbers cannot be used ({error}); {AGAIN}") from error
    with torch.no_grad():
        for name, value in moving.entries():
            value.copy_(tensors[f"model.{name}"])
        for name, value in moving.module.named_buffers() if place.rank else ():
            value.copy_(tensors[f"buffers.{place.rank}.{name}"])
    moving.optimizer.load_state_dict({**moving.optimizer.state_dict(), "state": _by_number(tensors, moving)})
    for counter, values in zip(counters, saved.counters, strict=True):
        counter.load_state_dict(values)


def _kinds(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    adam = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
    return ("step", "exp_avg", "exp_avg_sq") if adam else ("momentum_buffer",)


def _outline(saved: Saved, moving: Moving, place: Place) -> dict[str, Tensor]:
    """Return tensors of the shapes and types that a state of this run has."""
    own = {f"model.{name}": value for name, value in moving.entries()}
    kinds = _kinds(moving.optimizer)
    for name, parameter in moving.module.named_parameters():
        named = {kind: f"optimizer.{kind}.{name}" for kind in kinds}
        if not saved.tensors.keys().isdisjoint(named.values()):  # a parameter without gradients has no state
            like = parameter.detach()
            own.update({named[kind]: torch.zeros(()) if kind == "step" else like for kind in kinds})
    own["order"] = moving.generator.get_state()
    own.update({f"random.{rank}": together(random_state()) for rank in range(place.processes)})
    for rank in range(1, place.processes):
        own.update({f"buffers.{rank}.{name}": value for name, value in moving.module.named_buffers()})
    return own


def _by_number(tensors: dict[str, Tensor], moving: Moving) -> dict[int, dict[str, Tensor]]:
    """Return the optimizer's tensors as it wants them: by the number of the parameter."""
    state: dict[int, dict[str, Tensor]] = {}
    for number, (name, _) in enumerate(moving.module.named_parameters()):
        named = {kind: f"optimizer.{kind}.{name}" for kind in _kinds(moving.optimizer)}
        if found := {kind: tensors[key] for kind, key in named.items() if key in tensors}:
            state[number] = found
    return state


def together(state: tuple[Tensor, list[Tensor]]) -> Tensor:
    """Return the states of all generators of a process in one tensor."""
    return torch.cat([state[0], *state[1]])


def _apart(joined: Tensor) -> tuple[Tensor, list[Tensor]]:
    first, cards = random_state()
    parts = torch.split(joined, [len(first), *map(len, cards)])
    return parts[0], list(parts[1:])
