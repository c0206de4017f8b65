"""Text out of somebody's file, made fit for a terminal and for one line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches

from anybit.errors import AnybitError

LONGEST = 2000
"""Characters of the longest message that is shown."""


def printable(text: object, length: int = LONGEST) -> str:
    r"""Return a text so that it can be shown in a line: control characters become spaces, and it is never pages long.

    Escape sequences would move the cursor or rename the window, and marks that turn the direction of writing would make
    a name look like another one.

    >>> printable("a\x1b[2J\nb" + 90 * "c", 7)
    'a [2J b'
    >>> printable("\u202egnp.exe")
    'gnp.exe'
    """
    # A lone surrogate has no bytes that a terminal could be sent; a few characters more than shown may be spaces.
    shown = "".join(c if c.isprintable() else " " for c in str(text)[: 2 * length])
    return " ".join(shown.split())[:length]


def first_line(error: BaseException, length: int = 200) -> str:
    r"""Return what an error says first; libraries may go on for pages.

    >>> first_line(ValueError("no such thing\n\nA long story.")), first_line(KeyError())
    ('no such thing', 'KeyError')
    """
    return printable((str(error).strip() or type(error).__name__).partition("\n")[0], length)


@contextlib.contextmanager
def explaining(
    kind: type[AnybitError], what: str, advice: str = "", reason: Callable[[BaseException, int], str] = printable
) -> Iterator[None]:
    """Turn whatever a library raises in this block into one sentence: what failed, its own words, what to do.

    Readers of files have no common base for what they raise on broken ones. Errors of ours go through as they are.

    >>> with explaining(AnybitError, "x.npz: not a whole file", "; save it again"):
    ...     raise KeyError("no such thing")
    Traceback (most recent call last):
    anybit.errors.AnybitError: x.npz: not a whole file ('no such thing'); save it again
    """
    try:
        yield
    except AnybitError:
        raise
    except Exception as error:
        raise kind(f"{what} ({reason(error, 200)}){advice}") from error


def did_you_mean(word: str, known: Iterable[str], *, where: str = "", cutoff: float = 0.6) -> str:
    """Return a question about the known word that is nearest, or nothing; `where` stands in front of it.

    >>> did_you_mean("digit", ["digits", "letters"]), did_you_mean("x", ["digits"])
    ("; did you mean 'digits'?", '')
    """
    close = get_close_matches(word[:80], list(known), n=1, cutoff=cutoff)
    return f"; did you mean {where + close[0]!r}?" if close else ""


def quoted(value: object, length: int = 80) -> str:
    """Return a value as an error quotes it: never pages of it.

    >>> quoted("x" * 99, 9)
    "'xxxxx..."
    """
    # The text of a long value is not made only to be cut: a list of a million numbers takes a second.
    short = value[: 4 * length] if isinstance(value, str | bytes | list | tuple) else value
    try:
        text = printable(repr(short), 2 * length)
    except ValueError:  # a whole number of thousands of digits
        text = f"a {type(value).__name__} without end"
    return text if len(text) <= length else f"{text[: length - 3]}..."
