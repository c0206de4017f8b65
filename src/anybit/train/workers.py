"""Work that several processes share through an Optuna storage: each unit is done once, by whoever claims it first.

A unit of work is a trial of a study. A worker claims one by adding a trial that is running, and then looks whether an
earlier one is: of two workers that claim at the same moment the database lets one be first, and the other takes its
trial back. (Optuna's own queue of waiting trials would not do: on SQLite, which has no row locks, two processes can
take the same one.) While it works, a worker gives a sign of life in the storage every few seconds. Where that stays
away for too long, or the process is seen to be gone from this machine, its trial has failed and the unit is free again.
A process that is seen on this machine may be silent: it was paused, or the machine slept.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from anybit.errors import FileError
from anybit.train.storage import Store, experimental

LARGEST = 1e12
GIVEN_BACK = "given back"
"""The mark of a trial that failed because its worker let it go, and not because it died."""

Unit = float | str
"""A value to try, which Optuna knows as a parameter, or the name of something to do."""


class Work:
    """The units of one study.

    Args:
        store: Where they are kept.
        name: The study; workers that name the same one share its units.
    """

    def __init__(self, store: Store, name: str) -> None:
        self.store, self.states = store, store.optuna.trial.TrialState
        self._strange: dict[int, float] = {}
        with store.answering():
            self.study = store.optuna.create_study(
                storage=store.storage, study_name=name, direction="maximize", load_if_exists=True
            )
            self.id = store.storage.get_study_id_from_name(name)

    def done(self) -> dict[Unit, Any]:
        """Return the trials that are complete by unit, of several the last."""
        return dict(self._trials(self.states.COMPLETE))

    def running(self) -> dict[Unit, Any]:
        """Return the trials that somebody is at, by unit; those of the dead are given up first."""
        self._bury()
        return dict(self._trials(self.states.RUNNING))

    def _trials(self, state: Any) -> list[tuple[Unit, Any]]:
        with self.store.answering():
            trials = self.study.get_trials(deepcopy=False, states=(state,))
        units = ((unit_of(trial.params, trial.user_attrs), trial) for trial in trials)
        return [(unit, trial) for unit, trial in units if unit is not None]

    def claim(self, unit: Unit, done: Callable[[], bool]) -> Claim | None:
        """Take a unit to work on it; nothing if somebody else is at it, or if it is `done` by now."""
        if unit in self.running():
            return None
        claim = Claim(self, self._add(unit, self.states.RUNNING))
        # The order matters: who was first has finished or is still running, and both are seen from here on.
        earlier = (trial for other, trial in self._trials(self.states.RUNNING) if other == unit)
        if any(trial._trial_id < claim.id for trial in earlier) or done():
            claim.give_back()
            return None
        claim.lost = self._lost(unit)
        return claim

    def _lost(self, unit: Unit) -> str | None:
        """Return who died over a unit, the last of several."""
        failed = [trial.user_attrs for other, trial in self._trials(self.states.FAIL) if other == unit]
        dead = [about["worker"] for about in failed if "worker" in about and GIVEN_BACK not in about]
        return f"process {dead[-1]['pid']} on {dead[-1]['host']}" if dead else None

    def note(self, key: str) -> Any:
        """Return what all workers know under this key; nothing if nobody has noted it yet."""
        with self.store.answering():
            return self.study.user_attrs.get(key)

    def take_note(self, key: str, value: Any) -> None:
        """Let all workers know something."""
        with self.store.answering():
            self.study.set_user_attr(key, value)

    def record(self, unit: Unit, **about: Any) -> None:
        """Note a unit as done that nobody had to work on."""
        self._add(unit, self.states.COMPLETE, value=0.0, about=about)

    def _add(
        self, unit: Unit, state: Any, *, value: float | None = None, about: Mapping[str, Any] | None = None
    ) -> int:
        optuna, named = self.store.optuna, isinstance(unit, str)
        trial = optuna.create_trial(
            state=state,
            value=value,
            params={} if named else {"value": unit},
            distributions={} if named else {"value": optuna.distributions.FloatDistribution(0.0, LARGEST)},
            user_attrs={**({"unit": unit} if named else {}), "worker": this_process(), **(about or {})},
        )
        with self.store.answering():
            return int(self.store.storage.create_new_trial(self.id, template_trial=trial))

    def _bury(self) -> None:
        """Let the trials of dead workers fail."""
        with self.store.answering(), experimental(self.store.optuna):
            silent = self.store.storage._get_stale_trial_ids(self.id)
            running = self.study.get_trials(deepcopy=False, states=(self.states.RUNNING,))
            for trial in running:
                there = is_there(trial.user_attrs.get("worker", {}))
                if there is False or (there is None and trial._trial_id in silent) or self._never_lived(trial):
                    with contextlib.suppress(self.store.optuna.exceptions.UpdateFinishedTrialError):
                        self.store.storage.set_trial_state_values(trial._trial_id, self.states.FAIL)

    def _never_lived(self, trial: Any) -> bool:
        """Tell whether a trial was left without any sign of life for as long as one may be silent."""
        if trial._trial_id not in self._strange:
            if self._has_pulse(trial):
                return False
            self._strange[trial._trial_id] = time.monotonic()
        waited = time.monotonic() - self._strange[trial._trial_id]
        return waited > self.store.grace and not self._has_pulse(trial)

    def _has_pulse(self, trial: Any) -> bool:
        import sqlalchemy

        count = sqlalchemy.text("SELECT count(*) FROM trial_heartbeats WHERE trial_id = :trial")
        with self.store.storage.engine.connect() as connection:
            return bool(connection.execute(count, {"trial": trial._trial_id}).scalar())


class Claim:
    """A unit that this process works on: `with claim:` keeps up the signs of life, and gives it back on an error."""

    def __init__(self, work: Work, trial: int) -> None:
        self.work, self.id = work, trial
        self.lost: str | None = None
        """The process that died over this unit before, if one did."""
        self._open = True
        self._end = threading.Event()
        self._pulse = threading.Thread(target=self._beat, daemon=True)
        with work.store.answering():
            work.store.storage.record_heartbeat(trial)

    def _beat(self) -> None:
        storage = self.work.store.storage
        while not self._end.wait(storage.get_heartbeat_interval()):
            # A database that is away for a moment is no reason to stop; the next sign of life may get through.
            with contextlib.suppress(Exception):
                storage.record_heartbeat(self.id)
        storage.remove_session()

    def __enter__(self) -> Claim:
        self._pulse.start()
        return self

    def finish(self, value: float = 0.0, **about: Any) -> bool:
        """Note the unit as done; false if this worker was given up meanwhile and another one took it."""
        self._open = False
        store = self.work.store
        with store.answering():
            try:
                for key, text in about.items():
                    store.storage.set_trial_user_attr(self.id, key, text)
                return bool(store.storage.set_trial_state_values(self.id, self.work.states.COMPLETE, [value]))
            except store.optuna.exceptions.UpdateFinishedTrialError:
                return False

    def give_back(self) -> None:
        """Let somebody else have it."""
        self._open = False
        store = self.work.store
        with store.answering(), contextlib.suppress(store.optuna.exceptions.UpdateFinishedTrialError):
            store.storage.set_trial_user_attr(self.id, GIVEN_BACK, True)
            store.storage.set_trial_state_values(self.id, self.work.states.FAIL)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end.set()
        self._pulse.join()
        if not self._open:
            return
        if error is None:
            self.give_back()
        else:
            with contextlib.suppress(FileError):  # the first error is the one to read
                self.give_back()


def unit_of(params: Mapping[str, Any], about: Mapping[str, Any]) -> Unit | None:
    """Return the unit that a trial is about.

    >>> unit_of({"value": 0.1}, {}), unit_of({}, {"unit": "tracking"}), unit_of({}, {})
    (0.1, 'tracking', None)
    """
    if "value" in params:
        return float(params["value"])
    return about.get("unit")


def this_process() -> dict[str, Any]:
    """Return what others need to know to tell whether this process is still there."""
    pid = os.getpid()
    return {"host": platform.node(), "pid": pid, "machine": _machine(), "started": _started(pid)}


def is_there(worker: Mapping[str, Any]) -> bool | None:
    """Tell whether a process is on this machine; nothing is known of other machines.

    >>> is_there(this_process()), is_there({**this_process(), "started": "0"}), is_there({"machine": "another"})
    (True, False, None)
    """
    machine = _machine()
    if machine is None or worker.get("machine") != machine:
        return None
    return bool(worker["started"] == _started(worker["pid"]))


def _machine() -> str | None:
    """Return what processes have in common that see each other: the boot of the system, the space of process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def _started(pid: int) -> str | None:
    """Return when a process started, in ticks since boot; nothing if it is not there, or dead and not yet cleared."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def listed(words: Sequence[object]) -> str:
    """Return words as a person would say them.

    >>> listed(["a", "b", "c"]), listed([0.1])
    ('a, b and c', '0.1')
    """
    *first, last = (f"{word:g}" if isinstance(word, float) else str(word) for word in words)
    return f"{', '.join(first)} and {last}" if first else last
