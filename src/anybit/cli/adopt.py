"""`anybit adopt other.onnx`: make a master of somebody else's ONNX model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from anybit.cli.options import preprocessing
from anybit.cli.show import console, progress_bars
from anybit.errors import SpecError

T = TypeVar("T")

PICTURES, SETTINGS = "How pictures are fed (stored in the master)", "How it is quantized"


def adopt(
    model: Annotated[Path, typer.Argument(help="An ONNX model in floating point.")],
    out: Annotated[Path | None, typer.Option(help="The master to write.", show_default="MODEL-anybit.onnx")] = None,
    calibrate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT",
            help="Inputs whose values set the ranges: a folder of pictures, .npy, .npz, file.py:function or "
            "module:function; name=WHAT for each of several inputs.",
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many of these inputs are used.")] = 16,
    preprocess: Annotated[
        str | None,
        typer.Option(
            help="By name: imagenet, imagenet-bgr, caffe, tf, yolo, ocr-line, ocr-page, 0-1, 0-255 or -1-1; the other "
            "flags change it.",
            rich_help_panel=PICTURES,
        ),
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="HEIGHTxWIDTH or one number; 0 is free.", rich_help_panel=PICTURES)
    ] = None,
    resize: Annotated[
        str | None, typer.Option(help="squash, crop, pad or letterbox.", rich_help_panel=PICTURES)
    ] = None,
    channels: Annotated[str | None, typer.Option(help="rgb, bgr or grey.", rich_help_panel=PICTURES)] = None,
    layout: Annotated[str | None, typer.Option(help="nchw or nhwc.", rich_help_panel=PICTURES)] = None,
    scale: Annotated[
        str | None, typer.Option(help="What bytes become: 0-1, 0-255 or -1-1.", rich_help_panel=PICTURES)
    ] = None,
    mean: Annotated[
        str | None, typer.Option(help="Then taken off: one number, or three.", rich_help_panel=PICTURES)
    ] = None,
    std: Annotated[
        str | None, typer.Option(help="Then divided by: one number, or three.", rich_help_panel=PICTURES)
    ] = None,
    labels: Annotated[
        Path | None, typer.Option(help="A text file with the name of a class a line.", rich_help_panel=PICTURES)
    ] = None,
    preset: Annotated[str | None, typer.Option(help="default or paper.", rich_help_panel=SETTINGS)] = None,
    method: Annotated[
        str | None, typer.Option(help="How inputs set a range: mse, min-max or percentile.", rich_help_panel=SETTINGS)
    ] = None,
    sensitive: Annotated[
        str | None, typer.Option(help="Sensitive layers: measured, 8-bit, same or float.", rich_help_panel=SETTINGS)
    ] = None,
    helpers: Annotated[
        str | None,
        typer.Option(help="equalize, bias, sums, clip, several with commas, or all.", rich_help_panel=SETTINGS),
    ] = None,
    per_channel: Annotated[
        bool | None,
        typer.Option(
            "--per-channel/--per-tensor", help="Scales of a weight.", show_default=False, rich_help_panel=SETTINGS
        ),
    ] = None,
    store: Annotated[
        str, typer.Option(help="How weights are stored: fp32, fp16 or int8.", rich_help_panel=SETTINGS)
    ] = "fp32",
) -> None:
    """Write a master made of a plain ONNX model, without its training code and without PyTorch.

    Ranges come from your inputs, else from normalization layers, else from inputs that are made up. The last lines say
    how much of the network is quantized, what is not, and how sure the ranges are.

    Example: anybit adopt other.onnx --out model.onnx --calibrate images/ --preprocess imagenet
    """
    from anybit.artifact.adopt import adopt as run
    from anybit.artifact.coverage import Coverage, summary
    from anybit.artifact.inputs import inputs_of, read_feeds
    from anybit.artifact.master import open_master
    from anybit.artifact.plain import read_plain
    from anybit.artifact.storage import size_on_disk

    target = out or model.with_name(f"{model.stem}-anybit.onnx")
    if target.resolve() == model.resolve():
        raise SpecError(f"{target}: is the file that is read; name another one with --out")
    flags = {
        "size": size, "resize": resize, "channels": channels, "layout": layout,
        "scale": scale, "mean": mean, "std": std,
    }  # fmt: skip
    how = preprocessing(preprocess, labels, **flags)
    said = any(flag is not None for flag in (preprocess, labels, *flags.values()))
    named = None if helpers is None else helpers.replace(",", " ").split()
    chosen: dict[str, Any] = {
        "preset": preset, "method": method, "sensitive": sensitive, "per_channel": per_channel, "helpers": named,
    }  # fmt: skip
    settings = {name: value for name, value in chosen.items() if value is not None}
    with progress_bars() as start:
        feeds = None
        if calibrate:
            found = read_feeds(calibrate, inputs_of(read_plain(model).graph), how, limit=limit)
            feeds = watched((feed for _, feed in found), start("inputs", limit))
        plan = run(model, target, calibration=feeds, store=store, preprocessing=how if said else None, **settings)
    for line in summary(plan, Coverage(**open_master(target).header.about["quantized"])):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    console.print(f"{target}: {size_on_disk(target) / 1e6:.2f} MB", highlight=False, soft_wrap=True, markup=False)


def watched(values: Iterable[T], advance: Callable[[int], None]) -> Iterator[T]:
    """Hand on values, and move a bar when the next one is asked for: the work on this one is done then.

    >>> list(watched("ab", lambda steps: print("on")))
    on
    on
    ['a', 'b']
    """
    for value in values:
        yield value
        advance(1)
