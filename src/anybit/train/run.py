"""The run folder: recipe, seed, origin, and a log with one line per step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from anybit.files import replacing, write_json
from anybit.provenance import origin
from anybit.train.recipe import Recipe


class RunFolder:
    """Where one training run leaves what it did: `run.json`, `log.jsonl`, `model.safetensors`.

    The log is written beside its target and renamed when the run ends, so that a folder with a `log.jsonl` holds a
    whole one; what an interrupted run got to is kept as `log.partial`.
    """

    def __init__(self, path: str | Path, recipe: Recipe) -> None:
        self.path = Path(path)
        self.recipe = recipe
        self._lines: list[str] = []

    @property
    def checkpoint(self) -> Path:
        """Where the weights go."""
        return self.path / "model.safetensors"

    def __enter__(self) -> RunFolder:
        self.write_summary({})
        return self

    def write_summary(self, results: dict[str, Any], **more: Any) -> None:
        """Write `run.json`: the recipe, the seed, where and when it ran, and what came out so far."""
        values = {"recipe": self.recipe.to_dict(), "seed": self.recipe.seed, **origin(), "results": results, **more}
        write_json(self.path / "run.json", values)

    def log(self, **values: Any) -> None:
        """Add one line to the log."""
        self._lines.append(json.dumps(values))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        name = "log.jsonl" if kind is None else "log.partial"
        with replacing(self.path / name) as beside, beside.open("w") as file:
            file.writelines(line + os.linesep for line in self._lines)
        if kind is None:
            (self.path / "log.partial").unlink(missing_ok=True)
