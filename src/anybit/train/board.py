"""TensorBoard beside the log: the same numbers under the same names."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from anybit.errors import MissingDependency

Log = Callable[..., None]


@contextlib.contextmanager
def on_board(folder: Path, log: Log, *, start: int = 0) -> Iterator[Log]:
    """Give a log that also writes every number to `folder`, from step `start` on; what was there after it is dropped.

    Args:
        folder: Where the event files go; `tensorboard --logdir` shows them.
        log: What every line goes to first.
        start: The step that a resumed run goes on with.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingDependency("tensorboard", "tensorboard", "anybit train --tensorboard") from error
    writer: Any = functools.cache(lambda: SummaryWriter(str(folder), purge_step=start or None))

    def both(**values: Any) -> None:
        log(**values)
        for name, value in values.items():
            if name != "step" and value is not None:
                writer().add_scalar(name, float(value), values["step"])

    try:
        yield both
    finally:
        if writer.cache_info().currsize:  # nothing is made for a run that was refused before its first step
            writer().close()
