"""`anybit adopt other.onnx`: make a master of somebody else's ONNX model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from anybit.cli import options
from anybit.cli.show import progress_bars, say
from anybit.errors import SpecError

if TYPE_CHECKING:
    from anybit.artifact.feeding import Preprocessing

T = TypeVar("T")


def _picture(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="How pictures are fed (stored in the master)")


def adopt(
    model: Annotated[Path, typer.Argument(help="An ONNX model in floating point.")],
    out: Annotated[Path | None, typer.Option(help="The master to write.", show_default="MODEL-anybit.onnx")] = None,
    calibrate: options.Inputs = None,
    limit: options.Limit = 16,
    preprocess: Annotated[
        str | None,
        _picture(
            "By name: imagenet, imagenet-bgr, caffe, tf, yolo, ocr-line, ocr-page, 0-1, 0-255 or -1-1; the other flags "
            "change it."
        ),
    ] = None,
    size: Annotated[str | None, _picture("HEIGHTxWIDTH or one number; 0 is free.")] = None,
    resize: Annotated[str | None, _picture("squash, crop, pad or letterbox.")] = None,
    channels: Annotated[str | None, _picture("rgb, bgr or grey.")] = None,
    layout: Annotated[str | None, _picture("nchw or nhwc.")] = None,
    scale: Annotated[str | None, _picture("What bytes become: 0-1, 0-255 or -1-1.")] = None,
    mean: Annotated[str | None, _picture("Then taken off: one number, or three.")] = None,
    std: Annotated[str | None, _picture("Then divided by: one number, or three.")] = None,
    labels: Annotated[Path | None, _picture("A text file with the name of a class a line.")] = None,
    preset: options.Preset = None,
    method: Annotated[
        str | None,
        typer.Option(help="How inputs set a range: mse, min-max or percentile.", rich_help_panel=options.SETTINGS),
    ] = None,
    sensitive: options.Sensitive = None,
    helpers: options.Helpers = None,
    per_channel: options.PerChannel = None,
    store: options.Store = "fp32",
) -> None:
    """Write a master made of a plain ONNX model, without its training code and without PyTorch.

    Ranges come from your inputs, else from normalization layers, else from inputs that are made up. The last lines say
    how much of the network is quantized, what is not, and how sure the ranges are.

    Example: anybit adopt other.onnx --out model.onnx --calibrate images/ --preprocess imagenet
    """
    flags = {"size": size, "resize": resize, "channels": channels, "layout": layout}
    flags |= {"scale": scale, "mean": mean, "std": std}
    how = options.preprocessing(preprocess, labels, **flags)
    chosen = options.settings(preset, per_channel, None, helpers, sensitive, method=method)
    if any(flag is not None for flag in (preprocess, labels, *flags.values())):
        chosen["preprocessing"] = how
    target = out or model.with_name(f"{model.stem}-anybit.onnx")
    _adopt(model, target, calibrate, limit, how, store=store, **chosen)


def _adopt(
    model: Path, out: Path, calibrate: list[str] | None, limit: int, how: Preprocessing, **settings: Any
) -> None:
    """Write the master, and say what became of the network."""
    from anybit.artifact.adopt import adopt as run
    from anybit.artifact.coverage import Coverage, summary
    from anybit.artifact.inputs import inputs_of, read_feeds
    from anybit.artifact.master import open_master
    from anybit.artifact.plain import read_plain
    from anybit.artifact.storage import size_on_disk

    if out.resolve() == model.resolve():
        raise SpecError(f"{out}: is the file that is read; name another one with --out")
    with progress_bars() as start:
        feeds = None
        if calibrate:
            found = read_feeds(calibrate, inputs_of(read_plain(model).graph), how, limit=limit)
            feeds = watched((feed for _, feed in found), start("inputs", limit))
        plan = run(model, out, calibration=feeds, **settings)
    for line in summary(plan, Coverage(**open_master(out).header.about["quantized"])):
        say(line)
    say(f"{out}: {size_on_disk(out) / 1e6:.2f} MB")


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
