"""The options that several verbs share, and what their words mean."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anybit.common.files import read_text
from anybit.errors import DataError, MissingDependency, SpecError

if TYPE_CHECKING:
    from anybit.artifact.feeding import Preprocessing

# A trainer's words: which network, which weights, which data, judged and quantized how.

Model = Annotated[
    str,
    typer.Argument(
        help="A checkpoint or its run folder, my_model.py:make, package.module:make, small-conv or another name of "
        "ours, torchvision/NAME, timm/NAME or huggingface/NAME."
    ),
]
Weights = Annotated[
    Path | None, typer.Option(help="The network's weights: safetensors, or a state dict of torch.save.")
]
Data = Annotated[
    str | None,
    typer.Option(
        help="digits, a folder of images, an .npz file, or a function that returns one loader or (train, validation, "
        "test): my_data.py:loaders."
    ),
]
Metric = Annotated[
    str | None,
    typer.Option(help="What to measure: accuracy, mean-IoU, agreement, relative-error, ..., or my_metric.py:metric."),
]
Size = Annotated[int | None, typer.Option(help="The side that the images of a folder are brought to.", min=1)]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...; the graphics card if there is one.")]
Calibrate = Annotated[
    str | None,
    typer.Option(help="Set ranges by data: a number of training examples, or other data, as in --data."),
]

# How a network is quantized.

SETTINGS = "How it is quantized"
Preset = Annotated[str | None, typer.Option(help="default or paper.", rich_help_panel=SETTINGS)]
PerChannel = Annotated[
    bool | None,
    typer.Option(
        "--per-channel/--no-per-channel",
        " /--per-tensor",
        help="One scale per output channel of a weight.",
        rich_help_panel=SETTINGS,
    ),
]
Asymmetric = Annotated[
    bool | None, typer.Option(help="Grids fitted to both ends of a range.", rich_help_panel=SETTINGS)
]
Helpers = Annotated[
    str | None,
    typer.Option(help="equalize, bias, sums, clip, several with commas, all, or none.", rich_help_panel=SETTINGS),
]
Sensitive = Annotated[
    str | None, typer.Option(help="Sensitive layers: measured, 8-bit, same or float.", rich_help_panel=SETTINGS)
]
Store = Annotated[str, typer.Option(help="How weights are stored: fp32, fp16 or int8.", rich_help_panel=SETTINGS)]

# An integrator's words: a master, what it is fed with, and who chooses the width.

Master = Annotated[Path, typer.Argument(help="A master, as anybit save and anybit adopt write it.")]
What = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="WHAT",
        help="A picture, an .npy or .npz file, a folder of them, file.py:function, or name=WHAT for each input.",
    ),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        metavar="WHAT",
        help="Inputs whose values set the ranges: a folder of pictures, .npy, .npz, file.py:function or "
        "module:function; name=WHAT for each of several inputs.",
    ),
]
Limit = Annotated[int, typer.Option(min=1, help="At most so many of these inputs are used.")]
Policies = Annotated[
    str | None,
    typer.Option(
        help="battery, power, latency (see --milliseconds), or fixed.",
        show_default="fixed with --bits, else battery",
    ),
]
Bits = Annotated[
    str | None,
    typer.Option(help="The widths of policy fixed, or of power without mains.", show_default="W8A8"),
]
Steps = Annotated[str, typer.Option(help="Steps of policy battery: below so many percent at those widths.")]
Milliseconds = Annotated[float, typer.Option(help="The time budget of policy latency, at batch 1.")]
Threads = Annotated[int | None, typer.Option(help="Threads that a run may use; all cores by default.")]

# Where numbers go.

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Record = Annotated[Path | None, typer.Option(help="Write the numbers to this JSON file too.")]

Prefer = Annotated[
    str,
    typer.Option(help="widths: just those; speed: activations stay in floating point where that is faster here."),
]


@contextlib.contextmanager
def needs_torch(what: str) -> Iterator[None]:
    """Import inside this block: a package that is not there becomes an error with the install line."""
    try:
        yield
    except MissingDependency:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("anybit"):
            raise
        raise MissingDependency(error.name or "a package", "demo", what) from error


def settings(
    preset: str | None = None,
    per_channel: bool | None = None,
    asymmetric: bool | None = None,
    helpers: str | None = None,
    sensitive: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return the settings of `anybit.prepare` and `anybit.adopt` that were asked for.

    >>> settings(helpers="equalize, bias", asymmetric=True)
    {'symmetric': False, 'helpers': ['equalize', 'bias']}
    """
    chosen = {
        "preset": preset,
        "per_channel": per_channel,
        "symmetric": None if asymmetric is None else not asymmetric,
        "helpers": None if helpers is None else [] if helpers == "none" else helpers.replace(",", " ").split(),
        "sensitive": sensitive,
        **more,
    }
    return {name: value for name, value in chosen.items() if value is not None}


def said(chosen: dict[str, Any], calibrate: str | None) -> tuple[str, ...]:
    """Say in words which settings were asked for.

    >>> said({"per_channel": True, "helpers": ["bias"]}, "256")
    ('Quantized with: per_channel = True, helpers = bias, calibrated on 256.',)
    """
    parts = [f"{k} = {' '.join(v) if isinstance(v, list) else v}" for k, v in chosen.items()]
    parts += [f"calibrated on {calibrate}"] if calibrate else []
    return (f"Quantized with: {', '.join(parts)}.",) if parts else ()


def shape(text: str | None) -> tuple[int, ...]:
    """Read `3x224x224`.

    >>> shape("3x224x224"), shape(None)
    ((3, 224, 224), ())
    """
    if text is None:
        return ()
    if not re.fullmatch(r"\d{1,6}(x\d{1,6})*", text):
        raise SpecError(f"the shape of one input looks like 3x224x224, got {text[:40]!r}")
    return tuple(map(int, text.split("x")))


_CHOICES = {
    "resize": ("squash", "crop", "pad", "letterbox"),
    "channels": ("rgb", "bgr", "grey"),
    "layout": ("nchw", "nhwc"),
    "scale": ("0-1", "0-255", "-1-1"),
}


def preprocessing(name: str | None, labels: Path | None, **flags: str | None) -> Preprocessing:
    """Return a preprocessing by name, with what the flags say instead.

    >>> preprocessing("imagenet", None, size="192", mean=None).size
    (192, 192)
    """
    from anybit.artifact.feeding import Preprocessing

    given: dict[str, Any] = {}
    for flag, text in flags.items():
        if text is None:
            continue
        if flag in ("mean", "std"):
            given[flag] = tuple(numbers(text, f"{flag} is one number or three, such as 0.5"))
        elif flag == "size":
            given[flag] = sides(text)
        elif text not in (choices := _CHOICES[flag]):
            raise SpecError(f"--{flag} is one of {', '.join(choices)}; got {text!r}")
        else:
            given[flag] = text
    how = Preprocessing() if name is None else Preprocessing.named(name)
    return replace(how, **given, labels=() if labels is None else read_labels(labels))


def numbers(text: str, expected: str) -> list[float]:
    """Read numbers that commas or spaces separate.

    >>> numbers("0.5, 1 2", "")
    [0.5, 1.0, 2.0]
    """
    try:
        return [float(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise SpecError(f"{expected}; got {text!r}") from None


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
    what = "a text file with the name of a class a line"
    names = [line.strip() for line in read_text(path, what=what, error=DataError).rstrip().splitlines()]
    if not names:
        raise DataError(f"{path}: is empty; {what} is expected")
    return tuple(names)
