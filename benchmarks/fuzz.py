"""Broken files of every kind that anybit reads, one after the other, for a set time.

    make fuzz                                             ten minutes, all kinds
    python benchmarks/fuzz.py --seconds 60 masters plain  a minute, two kinds

Each kind has a worker process with limits on memory and processor time. A case is good if the file is used, or refused
with one short line that a terminal can show; a crash, another exception, a limit that is reached, or other contents
without an error are not. What is found is kept in tests/regressions, if it is small, and `make test` tries it again for
ever. Adds the number of cases to results/fuzz.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
REGRESSIONS = ROOT / "tests" / "regressions"
LARGEST_KEPT = 64 * 2**10

MEMORY = 1536 * 2**20
"""Bytes that a worker may add to its address space once everything is imported."""

RISE = 200 * 10**6
"""Bytes that one file may take, and three times its own size."""

PROCESSOR, WALL = 10.0, 300.0
"""Seconds that one case may take of a processor, and by the clock, on a machine with other work on it."""

LONGEST = 1200
KINDS = ("masters", "plain", "pictures", "arrays", "recipes", "checkpoints", "pickled", "run-folders")


class Found(Exception):  # noqa: N818
    """A case that is not good."""


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, resource.RLIM_INFINITY))


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def try_case(kind: Any, path: Path, *, want: str | None = None) -> str:
    """Use a file as an unsuspecting user would; return "used" or "refused", or raise what is wrong."""
    from anybit.errors import AnybitError

    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    before = status("VmRSS")
    signal.setitimer(signal.ITIMER_PROF, PROCESSOR)
    signal.setitimer(signal.ITIMER_REAL, WALL)
    try:
        got = kind.use(path)
    except AnybitError as error:
        message = str(error)
        if len(message) > LONGEST or not message.replace("\n", " ").isprintable():
            raise Found(f"a message of {len(message)} characters: {message[:200]!r}") from error
        outcome = "refused"
    else:
        if want is not None and got != want:
            raise Found("a damaged file gave other contents without an error")
        outcome = "used"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    rise = status("VmHWM") - before
    if rise > getattr(kind, "rise", RISE) + 3 * path.stat().st_size:
        raise Found(f"took {rise >> 20} MB for a file of {path.stat().st_size} bytes")
    return outcome


def prepared(name: str, folder: Path) -> tuple[Any, Path, str]:
    """Return a kind, where its cases go, and what its whole file gives; from here on there are limits."""
    os.environ.setdefault("ANYBIT_MEMORY_GB", "0.125")  # of what a run may work with; loading has no share in it
    from fuzz_kinds import make_kind

    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the end of the process, whatever it is in
    kind = make_kind(name, folder)
    path = folder / f"case{kind.suffix}"
    path.write_bytes(kind.whole)
    want = kind.use(path)  # and everything is imported
    limit_memory()
    return kind, path, want


def replay(name: str, cases: list[Path]) -> None:
    """Try cases that were found before; the first that is still not good is an exception."""
    with tempfile.TemporaryDirectory() as folder:
        kind, path, _ = prepared(name, Path(folder))
        for case in cases:
            path.write_bytes(case.read_bytes())
            print(case.name, try_case(kind, path), flush=True)


def work(name: str, folder: Path, seed: int, first: int, cases: int, seconds: float) -> None:
    """Try cases until the time is over, each made from its number; print what came of each kind of end."""
    say = speaker()
    kind, path, want = prepared(name, folder)
    end = time.monotonic() + seconds
    for number in range(first, first + cases):
        if time.monotonic() > end:
            break
        data, resealed = kind.broken(np.random.default_rng([KINDS.index(name), seed, number]))
        path.write_bytes(data)
        say({"number": number})
        try:
            say({"end": try_case(kind, path, want=None if resealed else want)})
        except Exception as error:
            import traceback

            path.with_name(f"found-{number}{path.suffix}").write_bytes(data)  # the next case takes its place
            where = "".join(traceback.format_exception(error))[-1500:]
            say({"end": "found", "why": f"{type(error).__name__}: {error}"[:300], "where": where})


def speaker() -> Callable[[dict[str, Any]], None]:
    """Return what tells the other side of standard output a value; whatever else is printed goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(value: dict[str, Any]) -> None:
        out.write(json.dumps(value) + "\n")
        out.flush()

    return say


def run_worker(name: str, seed: int, first: int, cases: int, seconds: float) -> tuple[dict[str, int], int, list[Any]]:
    """Run one worker to its end; return how its cases ended, the number of the next one, and what was found."""
    counts = {"used": 0, "refused": 0, "found": 0}
    found: list[Any] = []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as stderr:
        words = ["--work", name, folder, seed, first, cases, seconds]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(
            [sys.executable, __file__, *map(str, words)], env=environment, text=True, stdout=subprocess.PIPE,
            stderr=stderr,
        )  # fmt: skip
        number, open_case = first - 1, False
        assert process.stdout is not None
        for line in process.stdout:
            value = json.loads(line)
            if "number" in value:
                number, open_case = value["number"], True
                continue
            counts[value["end"]] += 1
            open_case = False
            if value["end"] == "found":
                found.append(keep(name, Path(folder), number, value["why"], value["where"]))
        code = process.wait()
        stderr.seek(0)
        errors = stderr.read()
        if code and not open_case:
            raise SystemExit(f"the worker for {name} does not start: {errors[-3000:]}")
        if code:
            counts["found"] += 1
            ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            found.append(keep(name, Path(folder), number, f"the process ended with {ended}", errors[-1500:]))
    return counts, number + 1, found


def keep(name: str, folder: Path, number: int, why: str, where: str) -> dict[str, Any]:
    """Keep a case that is not good, if it is small."""
    (case,) = folder.glob(f"found-{number}.*") if any(folder.glob(f"found-{number}.*")) else folder.glob("case.*")
    data = case.read_bytes()
    kept = REGRESSIONS / f"{name}-{hashlib.sha256(data).hexdigest()[:10]}{case.suffix}"
    if len(data) <= LARGEST_KEPT:
        REGRESSIONS.mkdir(exist_ok=True)
        kept.write_bytes(data)
    print(f"{name} {number}: {why}\n  {kept.name}, {len(data)} bytes\n{where}", flush=True)
    return {"kind": name, "number": number, "why": why, "file": kept.name}


def fuzz(names: list[str], *, seed: int, seconds: float, cases: int) -> dict[str, Any]:
    """Try all kinds in turn, each for its share of the time; return what came of it."""
    counts: dict[str, dict[str, int]] = {}
    found: list[Any] = []
    for name in names:
        end, first = time.monotonic() + seconds / len(names), 0
        counts[name] = {"used": 0, "refused": 0, "found": 0}
        while (left := end - time.monotonic()) > 0 and first < cases:  # again after a crash, behind it
            more, first, bad = run_worker(name, seed, first, cases - first, left)
            counts[name] = {key: counts[name][key] + more[key] for key in more}
            found += bad
        print(f"{name:12} {sum(counts[name].values()):6} cases: {counts[name]}", flush=True)
    return {"cases": sum(sum(c.values()) for c in counts.values()), "kinds": counts, "found": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=[], help=f"some of {', '.join(KINDS)}")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--cases", type=int, default=10**9, help="of each kind, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", metavar="KIND FILE", help="try files of one kind that were found before")
    parser.add_argument("--out", type=Path, help="add the result to this file, as results/fuzz.json")
    options = parser.parse_args()
    result = fuzz(options.kinds or list(KINDS), seed=options.seed, seconds=options.seconds, cases=options.cases)
    print(f"{result['cases']} cases, {len(result['found'])} not good")
    if options.out is not None:
        from anybit.common.files import read_json, write_json
        from anybit.common.provenance import origin

        runs = read_json(options.out, what="what fuzzing found")["runs"] if options.out.exists() else []
        runs.append({**origin(), "seed": options.seed, "seconds": options.seconds, **result})
        write_json(options.out, {"cases": sum(run["cases"] for run in runs), "runs": runs})
    raise SystemExit(1 if result["found"] else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        kind, folder, *numbers = sys.argv[2:]
        work(kind, Path(folder), *map(int, numbers[:3]), float(numbers[3]))
    elif sys.argv[1:2] == ["--replay"]:
        replay(sys.argv[2], [Path(word) for word in sys.argv[3:]])
    else:
        main()
