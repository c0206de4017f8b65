"""The rows of `make bench-peers`: a file that several runs may fill at once, and the table that shows it."""

from __future__ import annotations

import fcntl
import json
import tempfile
from pathlib import Path
from typing import Any

from environment import Tool
from rich.table import Table

from anybit.common.files import write_json
from anybit.common.provenance import origin

WIDTHS = ("W8A8", "W6A6", "W4A8", "W4A4", "W3A8", "W3A3", "W2A8")
Row = dict[str, Any]


class Results:
    """The rows of a file, written again after every new one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = self._read()

    def missing(self, network: str, tool: Tool, widths: list[str], n: int, *, again: bool) -> list[tuple[str, str]]:
        """Return the settings and widths that were not measured yet, all settings of a width together."""
        done = {
            (r["setting"], r["bits"])
            for r in self.rows
            if (r["network"], r["tool"], r.get("n", n)) == (network, tool.name, n) and not (again and "error" in r)
        }
        return [(s, w) for w in widths for s in tool.settings if (s, w) not in done]

    def add(self, row: Row) -> None:
        def key(r: Row) -> tuple[Any, ...]:
            return r["network"], r["tool"], r["setting"], r["bits"]

        came = origin()
        with (Path(tempfile.gettempdir()) / f"{self.path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # several runs may fill one file
            others = [r for r in self._read() if key(r) != key(row)]
            self.rows = [*others, {**row, "commit": came["commit"], "date": came["date"]}]
            write_json(self.path, {"machine": came["machine"], "versions": came["versions"], "rows": self.rows})

    def _read(self) -> list[Row]:
        return json.loads(self.path.read_text())["rows"] if self.path.is_file() else []


def shown(rows: list[Row], network: str) -> Table:
    """Accuracy at every width, the median of the seconds to a width, the slow-down, and the agreement of the file."""
    own = [r for r in rows if r["network"] == network]
    exact = [f"; floating point {100 * r['accuracy']:.1f} %" for r in own if r["bits"] == "FP"]
    table = Table(title=f"{network}{''.join(exact)}")
    for column in ("tool", *WIDTHS, "seconds a width", "forward", "file agrees"):
        table.add_column(column, justify="left" if column == "tool" else "right")
    for tool, setting in dict.fromkeys((r["tool"], r["setting"]) for r in own if r["bits"] != "FP"):
        at = {r["bits"]: r for r in own if (r["tool"], r["setting"]) == (tool, setting)}
        done = [r for r in at.values() if "accuracy" in r]
        accuracies = [f"{100 * at[w]['accuracy']:.1f}" if "accuracy" in at.get(w, {}) else "-" for w in WIDTHS]
        table.add_row(
            f"{tool}, {setting}", *accuracies, *(spread(done, k) for k in ("seconds", "slow_down", "agreement"))
        )
    return table


def spread(rows: list[Row], key: str) -> str:
    values = sorted(r[key] for r in rows if key in r)
    return f"{values[0]:.2f}-{values[-1]:.2f}" if values else "-"
