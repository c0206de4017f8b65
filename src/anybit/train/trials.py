"""Trials in an Optuna storage: a queue that processes share, on one machine (SQLite) or on several (PostgreSQL).

Signs of life, and putting back into the queue what a dead process was at, are Optuna's own.
"""

from __future__ import annotations

import random
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anybit.common.files import make_folder
from anybit.errors import FileError, MissingDependency, SpecError

GRACE = 60
"""Seconds without a sign of life after which a process counts as dead."""

RETRIES = 3
"""Processes that may die over one trial."""

TRIES = 10
"""To open a new storage while others make its tables too."""

LARGEST = 1e12


class Trials:
    """The trials of one search, of which this process makes those that it takes first.

    Args:
        name: Of the study. The last word stands for data and weights: trials of another last word are stale.
        attempt: Makes a trial of a value.
        storage: As Optuna writes it.
        grace: Seconds without a sign of life after which another process's trial is taken up.
        say: Told what is waited for, and what is odd.
    """

    def __init__(
        self, name: str, attempt: Callable[[float], float], *, storage: str, grace: int, say: Callable[[str], None]
    ) -> None:
        self.optuna, self.url = _optuna(), shown(storage)
        self.attempt, self.grace, self.say, self._said = attempt, grace, say, ""
        self._greeted: set[int] = set()
        with self._answering():
            self._storage = _open(self.optuna, storage, grace)
            others = [other for other in self.optuna.get_all_study_names(self._storage) if other != name]
            self.study = self.optuna.create_study(
                storage=self._storage, study_name=name, direction="maximize", load_if_exists=True
            )
        if any(other.rpartition(" ")[0] == name.rpartition(" ")[0] for other in others):
            say(f"{self.url}: has trials of this recipe with other data or other starting weights; they are not used")

    def note(self, key: str, work_out: Callable[[], Any]) -> Any:
        """Return what all processes know under this key; whoever comes first works it out."""
        with self._answering():
            if key not in self.study.user_attrs:
                found = work_out()
                if key not in self.study.user_attrs:
                    self.study.set_user_attr(key, found)
            return self.study.user_attrs[key]

    def know(self, accuracies: Mapping[float, float]) -> None:
        """Take trials as made whose accuracies, by value, are known from elsewhere."""
        distributions = {"value": self.optuna.distributions.FloatDistribution(0.0, LARGEST)}
        with self._answering():
            here = {value for value, _ in self._trials()}
            for value, accuracy in accuracies.items():
                if value not in here:
                    own = {"value": value}
                    trial = self.optuna.trial.create_trial(
                        params=own, distributions=distributions, value=accuracy, user_attrs=own
                    )
                    self.study.add_trial(trial)

    def run(self, values: Sequence[float]) -> dict[float, float]:
        """Try what is not known yet and nobody else is trying; return the accuracy of every value."""
        states = self.optuna.trial.TrialState
        while True:
            with self._answering():
                trials = self._trials()
                done = {value: trial.value for value, trial in trials if trial.state == states.COMPLETE}
                missing = [value for value in values if value not in done]
                # Of two processes that put the same value into the queue at once, one did so in vain: it is taken out.
                if not missing and not any(value in done for value, trial in trials if trial.state == states.WAITING):
                    return {value: done[value] for value in values}
                live = {value for value, trial in trials if trial.state in (states.RUNNING, states.WAITING)}
                for value in missing:
                    if value not in live:
                        self.study.enqueue_trial({"value": value}, user_attrs={"value": value})
                waiting = any(trial.state == states.WAITING for _, trial in self._trials())
            if waiting:
                self._take_one()
            elif missing:
                self._wait(missing)

    def _trials(self) -> list[tuple[float, Any]]:
        trials = self.study.get_trials(deepcopy=False)
        return [(trial.user_attrs["value"], trial) for trial in trials if "value" in trial.user_attrs]

    def _take_one(self) -> None:
        """Make the trial that is first in the queue, while Optuna gives signs of life."""
        made: list[float] = []
        unwanted: list[int] = []

        def make(trial: Any) -> float:
            if not self._wanted(trial):
                unwanted.append(trial.number)
                raise self.optuna.TrialPruned
            value = trial.suggest_float("value", 0.0, LARGEST)
            accuracy = self.attempt(value)
            made.append(value)
            return accuracy

        with self._answering():
            try:
                self.study.optimize(make, n_trials=1)
            except (ValueError, AssertionError, self.optuna.exceptions.UpdateFinishedTrialError):
                if unwanted:  # SQLite gave it to two processes, and the other one has put it aside already
                    return
                if not made:  # it is an error of the trial itself
                    raise
                self.say(f"{made[0]:g}: done, but this process was silent for so long that another one took it up")

    def _wanted(self, trial: Any) -> bool:
        """Tell whether a trial came from the queue, and is not the second of two processes that asked at once."""
        value, states = trial.user_attrs.get("value"), self.optuna.trial.TrialState
        same = [other for known, other in self._trials() if known == value and other.number != trial.number]
        earlier = (other for other in same if other.state == states.RUNNING and other.number < trial.number)
        return value is not None and not any(other.state == states.COMPLETE for other in same) and not any(earlier)

    def _wait(self, values: Sequence[float]) -> None:
        """Wait for others, say so once, and put back into the queue what a dead one was at."""
        said = f"waiting for {', '.join(f'{value:g}' for value in values)}, which other processes are trying"
        if said != self._said:
            self._said = said
            self.say(said)
        time.sleep(min(5.0, self.grace / 6))
        with self._answering():
            self._greet()
            self.optuna.storages.fail_stale_trials(self.study)

    def _greet(self) -> None:
        """Give each trial that somebody is at one sign of life: Optuna never misses who died before giving any."""
        study = self._storage.get_study_id_from_name(self.study.study_name)
        running = self.study.get_trials(deepcopy=False, states=(self.optuna.trial.TrialState.RUNNING,))
        for number in {trial.number for trial in running} - self._greeted:
            self._greeted.add(number)
            self._storage.record_heartbeat(self._storage.get_trial_id_from_study_id_trial_number(study, number))

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Turn what a database may say into one line, and say nothing of what Optuna calls experimental."""
        import sqlalchemy.exc

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", self.optuna.exceptions.ExperimentalWarning)
                yield
        except (sqlalchemy.exc.SQLAlchemyError, self.optuna.exceptions.StorageInternalError) as error:
            reason = " ".join(str(getattr(error, "orig", None) or error.__cause__ or error).split())
            raise FileError(f"{self.url}: the storage does not answer ({reason}); mend that and start again") from error


def shown(url: str) -> str:
    """Return the address of a storage without its password.

    >>> shown("postgresql://me:secret@host/db")
    'postgresql://me:***@host/db'
    """
    import sqlalchemy

    try:
        parsed = sqlalchemy.make_url(url)
    except (sqlalchemy.exc.ArgumentError, ValueError):
        raise FileError(
            "a storage is sqlite:///FILE (for one machine) or postgresql://USER@HOST/DATABASE (for several); "
            f"got {url.rpartition('@')[2]!r}"
        ) from None
    if parsed.get_backend_name() == "sqlite" and parsed.database not in (None, "", ":memory:"):
        make_folder(Path(str(parsed.database)).parent)
    return str(parsed.render_as_string(hide_password=True))


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise MissingDependency("optuna", "search", "a search") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _open(optuna: Any, url: str, grace: int) -> Any:
    """Return Optuna's storage, with signs of life and a second chance for what a dead process was at."""
    import sqlalchemy

    if grace < 3:
        raise SpecError(f"the grace of a silent process is 3 seconds or more, got {grace}")
    retry = optuna.storages.RetryHeartbeatStaleTrialCallback(max_retry=RETRIES)
    for left in reversed(range(TRIES)):
        try:
            return optuna.storages.RDBStorage(
                url,
                # A connection for each question: there are few, and between two of them a server may start again.
                engine_kwargs={"poolclass": sqlalchemy.pool.NullPool},
                heartbeat_interval=max(1, grace // 3),
                grace_period=grace,
                heartbeat_stale_trial_callback=retry,
            )
        except ImportError as error:
            raise MissingDependency(error.name or "psycopg", "postgres", f"the storage {shown(url)}") from error
        except RuntimeError as error:  # tables of another version of Optuna
            raise FileError(f"{shown(url)}: {error}") from error
        except Exception as error:
            # Of several processes that make the tables of a new storage at once, some are told off.
            if not left or not (
                isinstance(error, AssertionError) or re.search("already exists|duplicate|UNIQUE", str(error))
            ):
                raise
            time.sleep(random.uniform(0.05, 0.5))
    raise AssertionError("not reached")
