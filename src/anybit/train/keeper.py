"""Who saves a run on its way: every so often, and when somebody wants it to stop."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anybit.errors import CheckpointError
from anybit.objectives.restore import random_state
from anybit.task.checkpoint import write_tensors
from anybit.train.clock import Clock
from anybit.train.place import Place
from anybit.train.recipe import Recipe
from anybit.train.resume import AGAIN, FORMAT, Moving, Position, Saved, Say, capture, conditions, restore, together
from anybit.train.run import RunFolder

EVERY = 60.0
"""Seconds between two states on disk, and so about the most that can be lost."""

SAVE = 1
"""Why a state is written, beside the numbers of signals, which are larger."""


class Stop:
    """Inside its block SIGINT and SIGTERM are noted instead of acted upon, so that a step can be finished.

    The second one does what it always did.
    """

    def __init__(self) -> None:
        self.number = 0
        self._handlers = contextlib.ExitStack()

    def __enter__(self) -> Stop:
        # Only the main thread may, and what somebody else has set up is left alone.
        if threading.current_thread() is threading.main_thread():
            for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
                if signal.getsignal(number) == usual:
                    self._handlers.callback(signal.signal, number, signal.signal(number, self._note))
        return self

    def _note(self, number: int, frame: object) -> None:
        self.number = number
        self._handlers.close()

    def __exit__(self, *error: object) -> None:
        self._handlers.close()


@dataclass
class Keeper:
    """Writes the state of a run every so often, and when somebody wants it to stop.

    Of processes that train together the leading one writes; all save and stop at the same step.
    """

    run: RunFolder
    here: Callable[[], dict[str, Any]]
    """Says what the run is; see `identity`."""
    place: Place
    every: float
    """Seconds between two states; zero saves after every step."""
    saved: Saved | None
    """The state to go on from."""
    stop: Stop
    say: Say

    def __post_init__(self) -> None:
        self.path = self.run.state
        self.resumed = (*self.saved.resumed, self.saved.steps) if self.saved else ()
        self._due = time.monotonic() + self.every
        self._epoch = 0

    def start(self, moving: Moving, recipe: Recipe, steps: int) -> Position:
        """Put a state back and return where it was; without one, the beginning. `steps` is the length of an epoch."""
        self._epoch = steps
        saved, self.saved = self.saved, None  # the tensors are not needed twice
        at = Position() if saved is None else self._restored(saved, moving, recipe, steps)
        if self.place.leads:
            self.run.begin(None if saved is None else saved.log)  # not before now: what is refused changes nothing
        return at

    def _restored(self, saved: Saved, moving: Moving, recipe: Recipe, steps: int) -> Position:
        at = saved.position
        if at.epoch >= recipe.epochs or at.index > steps or saved.steps != at.epoch * steps + at.index:
            raise CheckpointError(f"{self.path}: epoch {at.epoch}, step {at.index} is not of this run; {AGAIN}")
        restore(saved, moving, self.place)
        return at

    def after_step(self, moving: Moving, at: Position, index: int, clock: Clock) -> None:
        """Save if it is time to or if the process was asked to stop, and do stop; `index` steps are done."""
        why = self._agreed(self.stop.number or (SAVE if time.monotonic() >= self._due else 0))
        if not why:
            return
        position = at.after(index, clock)
        self.save(moving, position)
        self._due = time.monotonic() + self.every
        if why == SAVE:
            return
        self.say(
            f"stopped by {signal.Signals(why).name} after step {self._steps(position)}; {self.path} has the state "
            "to go on from (anybit train: --resume)"
        )
        raise KeyboardInterrupt if why == signal.SIGINT else SystemExit(128 + why)

    def _steps(self, position: Position) -> int:
        return position.epoch * self._epoch + position.index

    def save(self, moving: Moving, position: Position) -> None:
        """Write the state; all processes wait until it is there."""
        gathered = self._gathered(moving)
        if self.place.leads:
            about = {
                "identity": self.here(),
                "conditions": conditions(self.place),
                "position": {**vars(position), "step": self._steps(position)},
                "penalties": [counter.state_dict() for counter in moving.counters],
                "resumed": self.resumed,
                "log": self.run.sync(),  # before the state that counts on it
            }
            write_tensors(self.path, capture(moving, gathered), about, kind=FORMAT)
        self._agreed(0)

    def _agreed(self, why: int) -> int:
        if self.place.processes == 1:
            return why
        most = torch.tensor([why], device=self.place.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)

    def _gathered(self, moving: Moving) -> dict[str, Tensor]:
        """Return what each process draws from, and the buffers of all but the leading one, whose are the model's."""
        found = {f"random.{rank}": value for rank, value in enumerate(self._from_all(together(random_state())))}
        if self.place.processes > 1:
            for name, buffer in moving.module.named_buffers():
                others = self._from_all(buffer)[1:]
                found.update({f"buffers.{rank}.{name}": value for rank, value in enumerate(others, start=1)})
        return found

    def _from_all(self, mine: Tensor) -> list[Tensor]:
        if self.place.processes == 1:
            return [mine]
        mine = mine.to(self.place.device)
        parts = [torch.empty_like(mine) for _ in range(self.place.processes)]
        dist.all_gather(parts, mine)
        return parts
