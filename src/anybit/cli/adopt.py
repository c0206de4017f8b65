"""`anybit adopt other.onnx`: make a master of somebody else's ONNX model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from anybit.cli.show import console, progress_bars
from anybit.errors import DataError, SpecError

if TYPE_CHECKING:
    import onnx

    from anybit.plan.points import Plan

T = TypeVar("T")


def adopt(
    model: Annotated[Path, typer.Argument(help="An ONNX model in floating point.")],
    out: Annotated[Path | None, typer.Option(help="The master to write.", show_default="MODEL-anybit.onnx")] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="Pictures or .npy files whose values set the ranges; else batch norm does.")
    ] = None,
    mean: Annotated[str, typer.Option(help="Mean of the pixels (0 to 1), one number or one per channel.")] = "0",
    std: Annotated[str, typer.Option(help="Deviation of the pixels, one number or one per channel.")] = "1",
    per_channel: Annotated[bool, typer.Option(help="One scale per output channel of a weight.")] = True,
    store: Annotated[str, typer.Option(help="How weights are stored: fp32, fp16 or int8.")] = "fp32",
) -> None:
    """Write a master made of a plain ONNX model, without its training code and without PyTorch.

    Ranges come from your inputs, else from normalization layers, else from inputs that are made up; the last lines say
    how much of the network is quantized, and how sure its ranges are.

    Example: anybit adopt other.onnx --out model.onnx --calibrate images/ --mean "0.49 0.48 0.45" --std "0.25 0.24 0.26"
    """
    from anybit.artifact.adopt import adopt as run
    from anybit.artifact.master import open_master
    from anybit.artifact.pictures import find_inputs, read_inputs
    from anybit.artifact.plain import read_plain
    from anybit.artifact.storage import size_on_disk

    target = out or model.with_name(f"{model.stem}-anybit.onnx")
    if target.resolve() == model.resolve():
        raise SpecError(f"{target}: is the file that is read; name another one with --out")
    normal = {"mean": numbers(mean, "mean"), "std": numbers(std, "std")}
    with progress_bars() as start:
        feeds = None
        if calibrate is not None:
            name, shape = one_input(read_plain(model), model)
            files = find_inputs(calibrate)
            advance = start("inputs", len(files))
            feeds = watched(({name: x} for _, x in read_inputs(files, shape, **normal)), advance)
        plan = run(model, target, calibration=feeds, per_channel=per_channel, store=store, about={"input": normal})
    for line in summary(plan, open_master(target).header.about["quantized_share"]):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"{target}: {size_on_disk(target) / 1e6:.2f} MB", highlight=False)


def summary(plan: Plan, share: float) -> list[str]:
    """Say in a few lines what of a network is quantized, what is not, and where the ranges came from."""
    words = {"calibration": "your inputs", "made-up": "made-up inputs"}
    named = [a.ranges[0][1].source for a in plan.activations if a.ranges]
    sources = Counter(next((w for k, w in words.items() if k in source), "the network itself") for source in named)
    ranges = ", ".join(f"{n} from {name}" for name, n in sources.items()) or "none"
    lines = [f"{100 * share:.0f}% of the weights can be quantized, in {len(plan.weights)} tensors; ranges: {ranges}"]
    if sources["made-up inputs"]:
        lines.append("ranges from made-up inputs are a guess; --calibrate with a few real ones makes them sure")
    if share < 0.5:
        lines.append("warning: less than half of the weights can be quantized, so little is gained")
    lines += [f"stays in floating point: {entry.name} ({entry.reason})" for entry in plan.left[:5]]
    return lines + ([f"... and {len(plan.left) - 5} more"] if len(plan.left) > 5 else [])


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


def numbers(text: str, what: str) -> list[float]:
    """Read one or three numbers.

    >>> numbers("0.5 1 2", "mean")
    [0.5, 1.0, 2.0]
    """
    try:
        found = [float(word) for word in text.replace(",", " ").split()]
    except ValueError:
        found = []
    if len(found) not in (1, 3) or (what == "std" and min(found) <= 0):
        raise SpecError(f"{what} is one number or three, such as 0.5; got {text!r}")
    return found


def one_input(model: onnx.ModelProto, path: Path) -> tuple[str, tuple[int, ...]]:
    """Return name and shape of a model's only input, without the batch dimension; a free size is 0."""
    values: list[Any] = list(model.graph.input)
    if len(values) != 1:
        raise DataError(f"{path}: takes {len(values)} inputs; calibration from files is for models with one")
    sizes = [dim.dim_value for dim in values[0].type.tensor_type.shape.dim][1:]
    if not sizes:
        raise DataError(f"{path}: the input {values[0].name!r} has no shape; pass .npy files to anybit.adopt in Python")
    return values[0].name, tuple(sizes)
