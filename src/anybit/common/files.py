"""Files that are either the old one or the new one, never half of each."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anybit.errors import FileError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""How a system says that there is no room: a full disk, a used-up quota, a limit on the size of files."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Tell somebody whose file cannot be written in this block why."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno not in FULL:
            raise FileError(f"{path}: cannot be written ({reason})") from error
        raise FileError(
            f"{path}: cannot be written, there is no room in {path.parent} ({reason}); make some and start again; "
            "what was written before is intact"
        ) from error


def make_folder(path: Path) -> None:
    """Make a folder and those above it, if they are not there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{path}: cannot make this folder ({error.strerror})") from error


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Give a path beside `path` to write to, and rename it into place when the block ends well.

    When the block raises, the file beside it is removed and `path` is as it was.
    """
    path = Path(path)
    make_folder(path.parent)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with writing(path):
            yield beside
            with beside.open("rb") as file:
                os.fsync(file.fileno())
            beside.replace(path)
    finally:
        with contextlib.suppress(OSError):  # what went wrong before is what the user should read
            beside.unlink(missing_ok=True)


def discard_partial(path: Path) -> None:
    """Remove what a process that was killed in the middle of writing a file has left beside it.

    That is what `replacing` makes, and what libraries make that write safely themselves: `.tmp` and six characters.
    """
    for pattern in (f".{glob.escape(path.name)}.????????.partial", ".tmp??????"):
        for left in path.parent.glob(pattern):
            with contextlib.suppress(OSError):  # it takes room and does no harm otherwise
                left.unlink()


def write_text(path: str | Path, text: str) -> None:
    """Write a text file at once."""
    with replacing(path) as beside:
        beside.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON file at once, indented for people."""
    try:
        text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise FileError(f"{path}: not written, JSON has no NaN and no infinity ({error})") from error
    write_text(path, text + "\n")


def read_text(path: str | Path, *, what: str, error: type[FileError] = FileError) -> str:
    """Read a text file, or say which one is missing or is no text."""
    path = Path(path)
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as e:
        raise error(f"{path}: no such file; {what} is expected here") from e
    except IsADirectoryError as e:
        raise error(f"{path}: is a folder; {what} is expected here") from e
    except (OSError, UnicodeDecodeError) as e:
        raise error(f"{path}: cannot be read as {what} ({e})") from e


def read_json(path: str | Path, *, what: str, error: type[FileError] = FileError) -> Any:
    """Read a JSON file, or say where it breaks."""
    text = read_text(path, what=what, error=error)
    try:
        return json.loads(text)
    except json.JSONDecodeError as e:
        message = f"{path}: broken JSON at line {e.lineno} ({e.msg}); {what} is expected here, write it again"
        raise error(message) from e
    except (ValueError, RecursionError) as e:  # a number with thousands of digits, thousands of brackets
        raise error(f"{path}: cannot be read as {what} ({e}); write it again") from e
