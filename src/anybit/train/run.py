"""The run folder: recipe, seed, origin, and a log with one line per step."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from anybit.common.files import discard_partial, make_folder, write_json, writing
from anybit.common.provenance import origin
from anybit.errors import FileError
from anybit.train.recipe import Recipe


class RunFolder:
    """Where one training run leaves what it did: `run.json`, `log.jsonl`, `model.safetensors`.

    The log grows as `log.partial` and is renamed when the run ends, so that a folder with a `log.jsonl` holds a whole
    one. While a run is on its way, `state.safetensors` holds what it needs to go on after an interruption.

    Args:
        path: The folder.
        recipe: What is trained.
    """

    def __init__(self, path: str | Path, recipe: Recipe) -> None:
        self.path, self.recipe = Path(path), recipe
        self.checkpoint, self.summary = self.path / "model.safetensors", self.path / "run.json"
        self.state, self._partial = self.path / "state.safetensors", self.path / "log.partial"
        self._log: BinaryIO | None = None

    def __enter__(self) -> RunFolder:
        """Take the folder for this process. Nothing in it is changed yet: a run that is refused leaves it as it was."""
        make_folder(self.path)
        with writing(self.path):
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise FileError(f"{self.path}: another process is training into this folder; use another one") from error
        except OSError:  # a file system without locks
            pass
        return self

    def begin(self, kept: int | None = None) -> None:
        """Make the folder one of a run that is on its way, once nothing else can refuse it.

        Args:
            kept: How many bytes of the log belong to the state that the run goes on from; without it, it starts anew.
        """
        found = self._partial.stat().st_size if self._partial.is_file() else 0
        if kept is not None and found < kept:
            raise FileError(
                f"{self._partial}: has {found} bytes, the state was saved with {kept}; put it back, or delete the "
                "state and start again"
            )
        with writing(self._partial):
            for file in (self.checkpoint, self.state, self.summary):
                discard_partial(file)
            if kept is None:  # first of all: a state without its log could not be gone on from
                self.state.unlink(missing_ok=True)
            self.write_summary({})
            self._log = self._partial.open("ab")
            self._log.truncate(kept or 0)  # takes back the lines of steps that will be taken again
            self._log.seek(0, os.SEEK_END)

    def write_summary(self, results: dict[str, Any], **more: Any) -> None:
        """Write `run.json`: the recipe, the seed, where and when it ran, and what came out so far."""
        values = {"recipe": self.recipe.to_dict(), "seed": self.recipe.seed, **origin(), "results": results, **more}
        write_json(self.summary, values)

    def log(self, **values: Any) -> None:
        """Add one line to the log."""
        assert self._log is not None
        with writing(self._partial):
            self._log.write((json.dumps(values) + os.linesep).encode())

    def sync(self) -> int:
        """Bring the log to the disk; return its size in bytes."""
        assert self._log is not None
        with writing(self._partial):
            self._log.flush()
            os.fsync(self._log.fileno())
        return self._log.tell()

    def finish(self, results: dict[str, Any], **more: Any) -> None:
        """Leave a whole folder. Killed at any point in here, the run goes on from its state or is finished."""
        self.sync()
        self.write_summary(results, **more)
        self.state.unlink(missing_ok=True)
        self.finish_log()

    def finish_log(self) -> None:
        """Give the log of a finished run its name."""
        if self._partial.is_file():
            self._partial.replace(self.path / "log.jsonl")

    def __exit__(self, *error: object) -> None:
        os.close(self._lock)
        if self._log is not None:
            # What is lost of the log here was not saved with a state either, and the first error is the one to read.
            with contextlib.suppress(OSError):
                self._log.close()
