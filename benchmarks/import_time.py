"""What `import anybit` adds to bare Python, in one interleaved run of fresh interpreters.

make bench
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

ROUNDS = 15
COMMANDS = {"bare Python": "pass", "import anybit": "import anybit", "import torch": "import torch"}


def seconds(code: str) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - begin


def main() -> None:
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for index in range(ROUNDS + 1):
        for name, code in COMMANDS.items():
            taken = seconds(code)
            if index:  # the first round fills the disk cache
                times[name].append(taken)
    bare = statistics.median(times["bare Python"])
    for name, values in times.items():
        middle = statistics.median(values)
        print(f"{name:15} {1000 * middle:6.0f} ms ({1000 * min(values):.0f}-{1000 * max(values):.0f}), "
              f"{1000 * (middle - bare):+5.0f} ms, {middle / bare:.1f} times bare Python")  # fmt: skip


if __name__ == "__main__":
    main()
