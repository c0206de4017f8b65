"""How fast a stranger's network runs at each width, as a ratio to floating point: above 1 is faster.

    python benchmarks/strangers/speed.py                 # all files, one process each
    python benchmarks/strangers/speed.py magika silero   # some

One thread. In every round each form of the network has a turn, in an order of its own: three inputs in a row, as a
session runs that is in use. The clock is the thread's own, which does not count what other programs take: a busy
machine slows all forms alike. A ratio is the median of those within a round, with its quartiles. `quantize_static` is
its file per channel as it comes, and with sums exact where the processor needs that for right answers (as anybit's
8-bit sessions are). Masters are made without helpers and from few inputs: that changes numbers and no kernel. Each row
goes to results/strangers-speed.json as it comes; rows of files that were not asked for stay there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tools
from networks import STRANGERS
from rich.console import Console
from rich.table import Table
from task import Feed, Run

import anybit
from anybit.artifact.prefer import interleaved
from anybit.artifact.runtime import sums_saturate
from anybit.common.files import read_json, write_json
from anybit.common.provenance import origin

WIDTHS = {
    "W8A8": (8, 8, "widths"), "W8A8 prefer speed": (8, 8, "speed"), "W7A8": (7, 8, "widths"),
    "W4A8": (4, 8, "widths"), "W4A8 prefer speed": (4, 8, "speed"),
}  # fmt: skip
FORMS = (*WIDTHS, "quantize_static", "quantize_static exact")
ROUNDS, FEWEST, SECONDS, INPUTS = 1000, 7, 20.0, 3
"""Rounds at most and at least, how long they may take in all, and how many inputs calibrate and are timed."""


def forms_of(name: str, folder: Path) -> tuple[dict[str, Run], dict[str, str], list[Feed]]:
    """Return the network in every form that can be made, why others cannot, and inputs."""
    path, made = STRANGERS[name].file(), STRANGERS[name].task
    assert made is not None
    runs, reasons = {"float": tools.plain(path)}, {}
    feeds = list(made(path).calibrate(runs["float"]))[:INPUTS]
    try:
        if not (folder / "adopted.onnx").exists():
            anybit.adopt(path, folder / "adopted.onnx", calibration=feeds, helpers=())
        for width, (weights, activations, prefer) in WIDTHS.items():
            session = tools.open_master(folder / "adopted.onnx")
            session.set_bits(weights=weights, activations=activations, prefer=prefer)
            runs[width] = tools.run_of(session)
            if prefer == "speed":
                reasons[f"{width} runs"] = session.form
    except Exception as error:  # the other forms can still be timed
        reasons["anybit failed"] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    try:
        if not (folder / "static.onnx").exists():
            tools.quantize_static(path, folder / "static.onnx", feeds, per_channel=True)
        runs["quantize_static"] = tools.plain(folder / "static.onnx")
        if sums_saturate():
            runs["quantize_static exact"] = tools.plain(folder / "static.onnx", exact=True)
    except Exception as error:
        reasons["quantize_static failed"] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return runs, reasons, feeds


def timed(name: str, keep: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as passing:
        folder = Path(passing) if keep is None else keep / name
        folder.mkdir(parents=True, exist_ok=True)
        runs, reasons, feeds = forms_of(name, folder)
        turns = {form: lambda run=run: [run(feed) for feed in feeds] for form, run in runs.items()}
        times = interleaved(turns, rounds=ROUNDS, fewest=FEWEST, seconds=SECONDS, clock=time.thread_time)
    base = times["float"]
    each_ms = 1e3 * statistics.median(base) / len(feeds)
    row: dict[str, Any] = {"file": name, "float_ms": each_ms, "rounds": len(base), **reasons}
    for form in (form for form in times if form != "float"):
        each = [b / t for b, t in zip(base, times[form], strict=True)]
        low, middle, high = statistics.quantiles(each, n=4)
        row[form] = {"ratio": middle, "ratio_low": low, "ratio_high": high}
    return row


def main() -> None:
    names = [name for name, stranger in STRANGERS.items() if stranger.task is not None]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", metavar="FILE", help=f"any of {', '.join(names)}; all by default")
    parser.add_argument("--one", choices=names, help=argparse.SUPPRESS)  # what a process of its own is asked for
    parser.add_argument("--keep", type=Path, help="a folder for the files that are made, to time them again later")
    parser.add_argument("--out", type=Path, default=Path("results/strangers-speed.json"))
    options = parser.parse_args()
    if options.one:
        print(json.dumps(timed(options.one, options.keep)), flush=True)
        return
    if unknown := set(options.files) - set(names):
        parser.error(f"{', '.join(sorted(unknown))}: not in the list; choose from {', '.join(names)}")
    console = Console(width=None if sys.stdout.isatty() else 140)
    earlier = read_json(options.out, what="earlier rows")["rows"] if options.out.is_file() else []
    rows: dict[str, Any] = {row["file"]: row for row in earlier}
    about = {
        "threads": tools.THREADS, "clock": "thread time", "exact sums needed": sums_saturate(),
        "load of the machine at the start": os.getloadavg()[0],
    }  # fmt: skip
    table = Table("file", "float, ms", *FORMS, title="speed over floating point, one thread")
    for name in options.files or names:
        command = [sys.executable, str(Path(__file__).resolve()), "--one", name]
        command += ["--keep", str(options.keep.resolve())] if options.keep else []
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        found = [line for line in done.stdout.splitlines() if line.startswith("{")]
        row = json.loads(found[-1]) if found else {"file": name, "error": (done.stderr.splitlines() or ["?"])[-1]}
        came = origin()
        rows[name] = {**row, "commit": came["commit"], "date": came["date"]}
        cells = [f"{row[form]['ratio']:.2f}" if form in row else "" for form in FORMS]
        table.add_row(name, f"{row['float_ms']:.1f}" if "float_ms" in row else row["error"][:60], *cells)
        write_json(options.out, {**came, **about, "rows": [rows[name] for name in names if name in rows]})
    console.print(table)


if __name__ == "__main__":
    main()
