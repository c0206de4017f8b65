"""`anybit save runs/digits-l1-0 --out model.onnx`: from a checkpoint to one file that runs at any width."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anybit.cli.needs import needs_torch
from anybit.cli.show import console, progress_bars
from anybit.spec import Bits

if TYPE_CHECKING:
    from anybit.data import Dataset


def save(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or the run folder it is in.")],
    out: Annotated[Path, typer.Option(help="The master to write.")] = Path("model.onnx"),
    store: Annotated[str, typer.Option(help="How weights are stored: fp32, fp16 or int8.")] = "fp32",
    widths: Annotated[
        str, typer.Option(help="Measure test accuracy at these widths and write it into the file.")
    ] = "FP W8A8 W4A8 W4A4",
    data: Annotated[str | None, typer.Option(help="Another data set than the one it was trained on.")] = None,
    per_channel: Annotated[bool, typer.Option(help="One scale per output channel of a weight.")] = False,
    helpers: Annotated[
        str, typer.Option(help="Data-free helpers: equalize, bias, sums, clip, several with commas, or all.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print what was measured as JSON.")] = False,
) -> None:
    """Write a checkpoint as a master: an ONNX file that runs at any width, without PyTorch.

    With --store int8 lower widths are derived from the 8-bit codes; the accuracy of both ways is printed.

    Example: anybit save runs/digits-l1-0 --out digits.onnx --store int8
    """
    pairs = [Bits.parse(word) for word in widths.split()]
    chosen = helpers.replace(",", " ").split()
    with progress_bars() as start:
        ready = start("getting ready", 4)
        with needs_torch("anybit save"):
            from anybit.artifact.header import Header
            from anybit.artifact.master import write_master
            from anybit.artifact.storage import size_on_disk
            from anybit.common.provenance import origin
            from anybit.data import load_dataset
            from anybit.simulate.prepare import prepare
            from anybit.simulate.to_onnx import translate
            from anybit.train.checkpoint import load_model
        ready(1)
        path = checkpoint / "model.safetensors" if checkpoint.is_dir() else checkpoint
        model, known = load_model(path)
        dataset = load_dataset(data or str(known.get("data", "")), code=data is not None)
        x, y = dataset.test.fitting().tensors()
        test = x.numpy(), y.numpy()
        ready(1)
        example, inputs = dataset.test.x[:2], dataset.input_range
        net = prepare(model, example, input_range=inputs, per_channel=per_channel, helpers=chosen)
        ready(1)
        graph = translate(net)
        ready(1)
    about: dict[str, Any] = {
        "origin": origin(),
        "training": known,
        "data": dataset.name,
        "classes": list(dataset.classes),
        **pixels(dataset),
        "helpers": chosen,
    }
    ways = {"measured": store, **({"measured_from_fp32": "fp32"} if store == "int8" else {})}
    with tempfile.TemporaryDirectory() as folder, progress_bars() as start:
        advance = start("widths", len(ways) * len(pairs))
        for name, way in ways.items():
            write_master(Path(folder) / "model.onnx", graph, Header(net.plan, way))
            about[name] = accuracies(Path(folder) / "model.onnx", pairs, *test, advance=advance)
    write_master(out, graph, Header(net.plan, store, about))
    if as_json:
        measured = {key: about[key] for key in ("measured", "measured_from_fp32") if key in about}
        typer.echo(
            json.dumps({"master": str(out), "bytes": size_on_disk(out), "n": len(test[1]), **measured}, indent=1)
        )
        return
    for bits in map(str, pairs):
        line = f"{bits:6} {100 * about['measured'][bits]:.2f}% of {len(test[1])}"
        if store == "int8":
            line += f" from 8-bit codes, {100 * about['measured_from_fp32'][bits]:.2f}% from floating point"
        console.print(line, highlight=False)
    console.print(f"{out}: {size_on_disk(out) / 1e6:.2f} MB", highlight=False)


def pixels(data: Dataset) -> dict[str, Any]:
    """Return how a data set's pixels were normalized, for those whose inputs are pictures."""
    return {} if data.pixels is None else {"input": dict(zip(("mean", "std"), map(list, data.pixels), strict=True))}


def accuracies(master: Path, pairs: list[Bits], x: Any, y: Any, *, advance: Callable[[int], None]) -> dict[str, float]:
    """Return the accuracy of a master at each pair of widths."""
    from anybit.artifact.bench import accuracy_at
    from anybit.artifact.session import load

    session, found = load(master, keep=1), {}
    for bits in pairs:
        found[str(bits)] = accuracy_at(session, bits, x, y)
        advance(1)
    return found
