"""Options that several verbs share, and how pictures are fed, by name or by flags."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anybit.errors import DataError, SpecError

if TYPE_CHECKING:
    from anybit.artifact.feeding import Preprocessing

What = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="WHAT",
        help="A picture, an .npy or .npz file, a folder of them, file.py:function, or name=WHAT for each input.",
    ),
]
"""The option that names inputs; it may be given several times."""

Policies = Annotated[
    str | None,
    typer.Option(
        help="battery, power, latency (see --milliseconds), or fixed.",
        show_default="fixed with --bits, else battery",
    ),
]
Widths = Annotated[
    str | None,
    typer.Option(help="The widths of policy fixed, or of power without mains.", show_default="W8A8"),
]

Prefer = Annotated[
    str,
    typer.Option(help="widths: just those; speed: activations stay in floating point where that is faster here."),
]


def preprocessing(name: str | None, labels: Path | None, **flags: str | None) -> Preprocessing:
    """Return a preprocessing by name, with what the flags say instead.

    >>> preprocessing("imagenet", None, size="192", mean=None).size
    (192, 192)
    """
    from anybit.artifact.feeding import Preprocessing

    how = Preprocessing() if name is None else Preprocessing.named(name)
    given: dict[str, Any] = {}
    for flag, text in flags.items():
        if text is None:
            continue
        if flag in ("mean", "std"):
            given[flag] = tuple(numbers(text, flag))
        elif flag == "size":
            given[flag] = sides(text)
        elif text not in (choices := _CHOICES[flag]):
            raise SpecError(f"--{flag} is one of {', '.join(choices)}; got {text!r}")
        else:
            given[flag] = text
    return replace(how, **given, labels=() if labels is None else read_labels(labels))


_CHOICES = {
    "resize": ("squash", "crop", "pad", "letterbox"),
    "channels": ("rgb", "bgr", "grey"),
    "layout": ("nchw", "nhwc"),
    "scale": ("0-1", "0-255", "-1-1"),
}


def numbers(text: str, what: str) -> list[float]:
    """Read one or three numbers.

    >>> numbers("0.5 1 2", "mean")
    [0.5, 1.0, 2.0]
    """
    try:
        return [float(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise SpecError(f"{what} is one number or three, such as 0.5; got {text!r}") from None


def sides(text: str) -> tuple[int, int]:
    """Read height and width, or one number for both; 0 is a side that the picture decides.

    >>> sides("48x0"), sides("224")
    ((48, 0), (224, 224))
    """
    words = text.lower().replace("x", " ").replace(",", " ").split()
    if len(words) not in (1, 2) or not all(word.isdecimal() for word in words):
        raise SpecError(f"size is a number of pixels or HEIGHTxWIDTH, such as 224 or 48x0; got {text!r}")
    return int(words[0]), int(words[-1])


def read_labels(path: Path) -> tuple[str, ...]:
    """Return the names of classes in a text file, one a line."""
    try:
        names = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no text in UTF-8"
        raise DataError(f"{path}: cannot be read ({reason}); a text file with the name of a class a line") from error
    while names and not names[-1]:
        names.pop()
    if not names:
        raise DataError(f"{path}: is empty; a text file with the name of a class a line is expected")
    return tuple(names)
