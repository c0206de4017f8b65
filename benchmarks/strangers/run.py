"""How much of a stranger's network survives: decisions equal to floating point, for anybit and for ONNX Runtime's tool.

    make bench-strangers
    python benchmarks/strangers/run.py --files silero magika --again
    python benchmarks/strangers/run.py --blame ppocr-v4-rec --bits W4A8 [--tools prepare]

Every case runs in a process of its own with a time limit. Writes results/strangers.json after every case and goes on
from there next time; what anybit did with another state of `src` is measured again. What falls short of a mark is
printed at the end, with what costs it as far as `--blame` has measured that; without a name it takes all of them.
Fetching needs pip, npm, apt-get.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from blame import blame, in_words
from case import TOOLS, WIDTHS, suits
from networks import STRANGERS
from rich.console import Console
from rich.table import Table
from task import CALIBRATION_SEED, MOST_INPUTS, TEST_SEED

from anybit.common.files import write_json
from anybit.common.provenance import commit, origin
from anybit.spec import Bits

Row = dict[str, Any]
MARKS = {
    ("anybit", "W8A8"): 0.97, ("anybit", "W4A8"): 0.80, ("anybit without data", "W8A8"): 0.90,
    ("anybit without data", "refused"): 1.0,
}  # fmt: skip
"""What every file should reach."""
MEAN_W4A8 = 0.90
IMAGENET_MARKS = {"W8A8": 1.0, "W4A8": 0.9, "W4A4": 0.7}
"""What ResNet-50 should reach, in both forms."""


def run_case(name: str, tool: str, limit: float) -> list[Row]:
    """Run one case in a process and a folder of its own; what it printed before it failed counts."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, str(Path(__file__).resolve().with_name("case.py")), name, tool]
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    ended = ""
    with tempfile.TemporaryDirectory() as folder:  # some tools leave files where they run
        process = subprocess.Popen(command, cwd=folder, env=environment, text=True, start_new_session=True, **quiet)
        try:
            out, _ = process.communicate(timeout=limit)
        except BaseException as error:  # also ctrl-C: the case must not stay behind
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            ended = f"took more than {limit:.0f} seconds"
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    if process.returncode and not ended:
        ended = f"ended with code {process.returncode}"
    if ended:
        rows.append({"error": ended, "kind": "crashed"})
    return [{"file": name, "tool": tool, "commit": commit(), "source": source(), **row} for row in rows]


def source() -> str:
    """Return what names the state of `src`; nothing if there are changes that are not committed."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD:./../../src"]
    found = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return "" if commit().endswith("+") else found


def still_good(row: Row, now: str) -> bool:
    """Say whether a row of an earlier run counts; other tools do not change with our source."""
    return row["tool"].startswith("quantize_static") or bool(now and row.get("source") == now)


def read(path: Path, key: str) -> list[Row]:
    found: list[Row] = json.loads(path.read_text()).get(key, []) if path.exists() else []
    return found


def write(path: Path, rows: list[Row], blamed: list[Row]) -> None:
    seeds = {"calibration": CALIBRATION_SEED, "test": TEST_SEED}
    about = {**origin(), "seeds": seeds, "calibration_inputs": MOST_INPUTS}
    write_json(path, {**about, "rows": rows, "blame": blamed})


def score(rows: list[Row], name: str, tool: str, bits: str) -> str:
    """Return one cell of the table: a score, why there is none, or nothing."""
    mine = [row for row in rows if (row["file"], row["tool"]) == (name, tool)]
    for row in mine:
        if row.get("bits") == bits:
            return f"{row['score']:.2f}"
    return next((row["kind"] for row in mine if "error" in row), "")


def show(rows: list[Row], console: Console) -> None:
    table = Table(title="decisions equal to floating point (1.00: all)")
    columns = {f"{tool.replace('quantize_static', 'ORT')}\n{bits}": (tool, bits) for tool in TOOLS for bits in WIDTHS
               if bits == "W8A8" or not tool.startswith("quantize_static")}  # fmt: skip
    table.add_column("file", no_wrap=True)
    for title in columns:
        table.add_column(title, justify="right", max_width=9)
    for name in STRANGERS:
        if any(row["file"] == name for row in rows):
            table.add_row(name, *(score(rows, name, *column) for column in columns.values()))
    means = []
    for tool, bits in columns.values():
        found = [row["score"] for row in rows if (row["tool"], row.get("bits")) == (tool, bits)]
        means.append(f"{sum(found) / len(found):.2f} ({len(found)})" if found else "")
    table.add_row("mean (of how many)", *means, style="bold")
    console.print(table)
    for row in rows:
        if "error" in row or row.get("reason"):
            console.print(f"{row['file']}, {row['tool']}: {row.get('error') or row['reason']}", soft_wrap=True)


def _quantizes(row: Row) -> bool:
    """Say whether the other tool quantized at least half of a network; leaving it as it is loses nothing."""
    weights: float = row.get("summary", {}).get("weights", 0.0)
    return row["tool"].startswith("quantize_static") and "score" in row and weights >= 0.5


Miss = tuple[str, str, str, float | None, float]
"""File, tool, width, what was measured, and the mark."""


def misses(rows: list[Row]) -> list[Miss]:
    """Return what falls short: of a mark, or of ONNX Runtime's tool on the same inputs."""
    scores = {(row["file"], row["tool"], row["bits"]): row["score"] for row in rows if "bits" in row}
    found: list[Miss] = []
    low = [value for (_, tool, bits), value in scores.items() if (tool, bits) == ("anybit", "W4A8")]
    if low and sum(low) / len(low) < MEAN_W4A8:
        found.append((f"mean of {len(low)} files", "anybit", "W4A8", sum(low) / len(low), MEAN_W4A8))
    for name in dict.fromkeys(row["file"] for row in rows):
        marks = {key: mark for key, mark in MARKS.items() if suits(STRANGERS[name], key[0])}
        if name == "resnet50":
            marks |= {(tool, bits): mark for tool in ("anybit", "prepare") for bits, mark in IMAGENET_MARKS.items()}
        if STRANGERS[name].task is None:
            marks = {key: mark for key, mark in marks.items() if key[1] == "refused"}
        else:
            marks = {key: mark for key, mark in marks.items() if key[1] != "refused"}
            peers = [r["score"] for r in rows if r["file"] == name and _quantizes(r)]
            marks["anybit", "W8A8"] = max([marks["anybit", "W8A8"], *peers])
        for (tool, bits), mark in marks.items():
            value = scores.get((name, tool, bits))
            if value is None or value < mark - 5e-4:
                found.append((name, tool, bits, value, mark))
    return found


def show_misses(rows: list[Row], blamed: list[Row], console: Console) -> None:
    """Print a line for every mark that is missed, and below it what costs it."""
    for name, tool, bits, value, mark in misses(rows):
        got = "none" if value is None else f"{value:.3f}"
        console.print(
            f"short of its mark: {name}, {tool}, {bits}: {got} of {mark:.3f}", soft_wrap=True, highlight=False
        )
        for entry in blamed:
            if (entry["file"], entry["tool"], entry["bits"]) == (name, tool, bits):
                console.print(f"    {in_words(entry)}", soft_wrap=True, highlight=False)


def with_blame(wanted: list[tuple[str, str, str]], blamed: list[Row], console: Console) -> list[Row]:
    """Measure what costs some files their decisions, and put it in place of what is known of them."""
    for name, tool, bits in wanted:
        if tool.startswith(("anybit", "prepare")) and STRANGERS[name].task is not None:
            found = blame(STRANGERS[name], Bits.parse(bits), tool)
            entry = {"file": name, "tool": tool, "bits": bits, "commit": commit(), **found}
            blamed = [e for e in blamed if (e["file"], e["tool"], e["bits"]) != (name, tool, bits)] + [entry]
            console.print(f"{name}, {tool}, {bits}: {in_words(entry)}", soft_wrap=True, highlight=False)
    return blamed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", nargs="+", choices=list(STRANGERS), default=list(STRANGERS), metavar="FILE")
    parser.add_argument("--tools", nargs="+", choices=list(TOOLS), default=list(TOOLS), metavar="TOOL")
    parser.add_argument("--again", action="store_true", help="measure what is measured already once more")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds that one case may take")
    parser.add_argument("--show", action="store_true", help="only print what is measured already")
    parser.add_argument(
        "--blame",
        nargs="?",
        choices=["", *STRANGERS],
        const="",
        metavar="FILE",
        help="which layers of a file cost most; without a name, of every file that misses a mark",
    )
    parser.add_argument("--bits", type=Bits.parse, default=Bits(8, 8), help="widths for --blame, W8A8 by default")
    parser.add_argument("--out", type=Path, default=Path("results/strangers.json"))
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 200)
    rows, blamed, now = read(options.out, "rows"), read(options.out, "blame"), source()
    if options.blame is not None:
        missed = [(name, tool, bits) for name, tool, bits, _, _ in misses(rows) if name in STRANGERS]
        one = [(options.blame, options.tools[0], str(options.bits))]
        blamed = with_blame(one if options.blame else missed, blamed, console)
        write(options.out, rows, blamed)
        return
    for name in [] if options.show else options.files:
        for tool in options.tools:
            old = [row for row in rows if (row["file"], row["tool"]) == (name, tool)]
            if not suits(STRANGERS[name], tool):
                continue
            if old and not options.again and all(still_good(row, now) for row in old):
                continue
            new = run_case(name, tool, options.limit)
            rows = [row for row in rows if row not in old] + new
            write(options.out, rows, blamed)
            said = ", ".join(f"{r['bits']} {r['score']:.3f}" if "bits" in r else r["error"][:100] for r in new)
            console.print(f"{name}, {tool}: {said}", soft_wrap=True, highlight=False)
    show(rows, console)
    show_misses(rows, blamed, console)


if __name__ == "__main__":
    main()
