"""The words that the verbs of a trainer share: which network, which weights, which data, judged and quantized how."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from anybit.errors import SpecError

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
Preset = Annotated[str | None, typer.Option(help="How to quantize: default, or paper.")]
PerChannel = Annotated[bool | None, typer.Option(help="One scale per output channel of a weight.")]
Asymmetric = Annotated[bool | None, typer.Option(help="Grids fitted to both ends of a range.")]
Helpers = Annotated[
    str | None, typer.Option(help="Helpers: equalize, bias, sums, clip, several with commas, all, or none.")
]
Sensitive = Annotated[str | None, typer.Option(help="Sensitive layers: same, 8-bit (or more) or float.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def settings(
    preset: str | None, per_channel: bool | None, asymmetric: bool | None, helpers: str | None, sensitive: str | None
) -> dict[str, Any]:
    """Return the settings of `anybit.prepare` that were asked for."""
    chosen = {
        "preset": preset,
        "per_channel": per_channel,
        "symmetric": None if asymmetric is None else not asymmetric,
        "helpers": None if helpers is None else words(helpers if helpers != "none" else ""),
        "sensitive": sensitive,
    }
    return {name: value for name, value in chosen.items() if value is not None}


def words(text: str) -> list[str]:
    """Return what commas or spaces separate.

    >>> words("equalize, bias")
    ['equalize', 'bias']
    """
    return text.replace(",", " ").split()


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


def said(chosen: dict[str, Any], calibrate: str | None) -> tuple[str, ...]:
    """Say in words which settings were asked for.

    >>> said({"per_channel": True, "helpers": ["bias"]}, "256")
    ('Quantized with: per_channel = True, helpers = bias, calibrated on 256.',)
    """
    parts = [f"{k} = {' '.join(v) if isinstance(v, list) else v}" for k, v in chosen.items()]
    parts += [f"calibrated on {calibrate}"] if calibrate else []
    return (f"Quantized with: {', '.join(parts)}.",) if parts else ()
