"""Runs the Python blocks of pages and puts what they print into the text blocks below them.

Run from the root of a clone after what a page reads has changed:

    python docs/fill.py docs/results.md docs/four-bits.md

Blocks run in a folder of their own that has the clone's paper and results. Commands of the shell are not run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

BLOCK = re.compile(r'(```(\w*)(?: title="(.*?)")?\n(.*?)```\n)(\n```text\n.*?```\n)?', re.DOTALL)


def filled(text: str) -> str:
    r"""Return a page with what its blocks print; numbers that vary, and say so, stay as they are.

    >>> filled("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n").splitlines()[-3:]
    ['```text', '2', '```']
    """
    scope: dict[str, Any] = {"__name__": "page"}

    def run(found: re.Match[str]) -> str:
        block, kind, title, body, below = found.groups()
        if title:
            Path(title).write_text(body, encoding="utf-8")
        if kind != "python":
            return found[0]
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(body, scope)
        printed = "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())
        return f"{block}\n```text\n{printed}```\n" if below else found[0]

    return BLOCK.sub(run, text)


def main() -> None:
    """Fill the pages that were named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="+", type=Path)
    sys.path.insert(0, str(Path.cwd()))  # pages import the paper's own code
    for page in [path.resolve() for path in parser.parse_args().pages]:
        with tempfile.TemporaryDirectory() as folder:
            for name in ("paper", "results"):
                (Path(folder) / name).symlink_to(Path(name).resolve())
            with contextlib.chdir(folder):
                text = filled(page.read_text(encoding="utf-8"))
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
