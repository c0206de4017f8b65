"""The tests again and again, beside whatever else the machine does.

    python benchmarks/runs_in_a_row.py 10

A test that fails once in ten runs on a busy machine tells nobody anything. Each run is `make test` in this tree; what
it counted, how long it took and how busy the machine was are added to results/runs-in-a-row.json as soon as it ends.
Stops at the first run that fails, with exit code 1; the count of runs in a row starts anew then.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from anybit.common.files import read_json, write_json
from anybit.common.provenance import origin

ROOT = Path(__file__).parents[1]
OUT = ROOT / "results/runs-in-a-row.json"
EVERY = 10.0
"""Seconds between two looks at the load."""


def counted(output: str) -> dict[str, int]:
    r"""Return what pytest's last line counts.

    >>> counted("12 failed in an example\n\x1b[32m4858 passed\x1b[0m, 6 skipped in 612.11s (0:10:12)\n")
    {'passed': 4858, 'skipped': 6}
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    last = next((line for line in reversed(plain.splitlines()) if re.search(r" in [0-9.]+s", line)), "")
    return {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|xfailed|error)", last)}


def run(log: Path) -> dict[str, Any]:
    """Run the tests once; return what came of it, with the median of the load meanwhile."""
    loads, ended = [os.getloadavg()[0]], threading.Event()

    def watch() -> None:
        while not ended.wait(EVERY):
            loads.append(os.getloadavg()[0])

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    start, before = time.perf_counter(), os.times()
    done = subprocess.run(["make", "test"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    after = os.times()
    ended.set()
    watcher.join()
    log.write_text(done.stdout)
    processor = after.children_user + after.children_system - before.children_user - before.children_system
    return {
        "exit": done.returncode,
        **counted(done.stdout),
        "minutes": round((time.perf_counter() - start) / 60, 1),
        "processor_minutes": round(processor / 60, 1),
        "load": round(statistics.median(loads), 1),
        **origin(),
    }


def main() -> int:
    """Run as often as asked, and record each run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("times", type=int, nargs="?", default=10)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--logs", type=Path, default=Path("/tmp"), help="where the output of each run goes")
    asked = parser.parse_args()
    runs = read_json(asked.out, what="earlier runs")["runs"] if asked.out.is_file() else []
    for number in range(1, asked.times + 1):
        seen = run(asked.logs / f"run-{number}.log")
        runs.append(seen)
        write_json(asked.out, {"runs": runs})
        print({key: value for key, value in seen.items() if not isinstance(value, dict)}, flush=True)
        if seen["exit"]:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
