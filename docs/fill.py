"""Runs the Python blocks of pages and puts what they print into the text blocks below them.

Run from the root of a clone after what a page reads has changed:

    python docs/fill.py docs/results.md docs/four-bits.md
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"```python\n(.*?)```\n(\n```text\n.*?```\n)?", re.DOTALL)


def filled(text: str) -> str:
    r"""Return a page with what its blocks print; numbers that vary, and say so, stay as they are.

    >>> filled("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n").splitlines()[-3:]
    ['```text', '2', '```']
    """
    scope: dict[str, Any] = {"__name__": "page"}

    def run(found: re.Match[str]) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(found[1], scope)
        if not found[2]:
            return found[0]
        printed = "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())
        return f"```python\n{found[1]}```\n\n```text\n{printed}```\n"

    return BLOCK.sub(run, text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="+", type=Path)
    for page in parser.parse_args().pages:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
