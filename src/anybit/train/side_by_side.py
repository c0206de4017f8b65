"""Small jobs in processes of their own, one core each, that tell how far they are while they run."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from typing import Any, TypeVar

import torch

from anybit.common.progress import Advance
from anybit.errors import AnybitError
from anybit.train.memory import keep_freed_memory

T = TypeVar("T")

GONE = "ended before its work was done, killed perhaps for lack of memory"
EVERY = 0.1
"""Seconds between two looks at how far the jobs are."""


def one_by_one(function: Callable[..., T], jobs: Sequence[tuple[Any, ...]], advance: Advance) -> list[T]:
    """Run `function(*job, advance)` for every job, in this process, and return the results in order.

    >>> one_by_one(lambda a, b, advance: a + b, [(1, 2), (3, 4)], print)
    [3, 7]
    """
    return [function(*job, advance) for job in jobs]


class SideBySide:
    """A number of processes that run jobs as `one_by_one` does. A context manager: at its end they are gone.

    Each job counts its steps in a place of its own in shared memory. Nobody waits for anybody there, so that a
    process that is killed leaves nothing locked. When the block ends with an error, jobs stop at their next step.

    Args:
        workers: How many processes.
        jobs: The most jobs that `run` is given at once.
    """

    def __init__(self, workers: int, *, jobs: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._steps = context.RawArray("q", jobs)
        self._stop = context.RawValue("b", 0)
        self._pool = ProcessPoolExecutor(
            workers, mp_context=context, initializer=_begin, initargs=(self._steps, self._stop)
        )

    def run(self, function: Callable[..., T], jobs: Sequence[tuple[Any, ...]], advance: Advance) -> list[T]:
        """Run `function(*job, advance)` for every job, side by side, and return the results in order."""
        for number in range(len(jobs)):
            self._steps[number] = 0
        with _ctrl_c_kept_off():
            futures = [self._pool.submit(_counted, function, number, job) for number, job in enumerate(jobs)]
        waiting, shown = set(futures), 0
        while waiting:
            finished, waiting = wait(waiting, timeout=EVERY, return_when=FIRST_COMPLETED)
            done = sum(self._steps[: len(jobs)])
            advance(done - shown)
            shown = done
            for future in finished:
                try:
                    future.result()
                except BrokenProcessPool as error:
                    raise AnybitError(f"a process {GONE}; make room and start again") from error
        return [future.result() for future in futures]

    def __enter__(self) -> SideBySide:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.value = any(error)
        self._pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _ctrl_c_kept_off() -> Iterator[None]:
    """Start processes in this block that ctrl-C does not reach: this one gets it and stops them in order."""
    resource_tracker.ensure_running()  # it would let ctrl-C through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_shared: list[Any] = []
"""In a process that runs jobs: the steps of every job, and whether to stop."""


def _begin(steps: Any, stop: Any) -> None:
    _shared[:] = [steps, stop]
    torch.set_num_threads(1)
    keep_freed_memory()  # this process does nothing but train
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _counted(function: Callable[..., T], number: int, job: tuple[Any, ...]) -> T:
    """Run a job here and write its steps to where the other process reads them."""
    steps, stop = _shared

    def advance(count: int) -> None:
        steps[number] += count
        if stop.value:
            raise KeyboardInterrupt

    return function(*job, advance)
