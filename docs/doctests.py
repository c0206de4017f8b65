"""Shows the doctests of docstrings as code: a griffe extension, named in mkdocs.yml."""

from __future__ import annotations

from typing import Any

import griffe


def fenced(text: str) -> str:
    r"""Return a docstring with a code fence around every run of lines that starts with a prompt.

    >>> fenced("Double it.\n\n>>> 2 * 2\n4").splitlines()
    ['Double it.', '', '```pycon', '>>> 2 * 2', '4', '```']
    """
    lines: list[str] = []
    indent: str | None = None
    for line in [*text.splitlines(), ""]:
        if indent is None and line.lstrip().startswith(">>> "):
            indent = line[: len(line) - len(line.lstrip())]
            lines.append(f"{indent}```pycon")
        elif indent is not None and not line.strip():
            lines.append(f"{indent}```")
            indent = None
        lines.append(line)
    return "\n".join(lines[:-1])


class Doctests(griffe.Extension):
    """Fences the doctests of every docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite one docstring, before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
