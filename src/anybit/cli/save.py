"""`anybit save runs/digits-l1-0 --out model.onnx`: from a network to one file that runs at any width."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anybit.cli import words
from anybit.cli.needs import needs_torch
from anybit.cli.show import console, progress_bars
from anybit.common.progress import Advance
from anybit.pages.rows import SHARES
from anybit.spec import Bits, Row

if TYPE_CHECKING:
    from anybit.task.task import Task


def save(
    model: words.Model,
    weights: words.Weights = None,
    data: words.Data = None,
    out: Annotated[Path, typer.Option(help="The master to write.")] = Path("model.onnx"),
    store: Annotated[str, typer.Option(help="How weights are stored: fp32, fp16 or int8.")] = "fp32",
    widths: Annotated[
        str, typer.Option(help="Measure on test data at these widths and write it into the file.")
    ] = "FP W8A8 W4A8 W4A4",
    metric: words.Metric = None,
    calibrate: words.Calibrate = None,
    preset: words.Preset = None,
    per_channel: words.PerChannel = None,
    asymmetric: words.Asymmetric = None,
    helpers: words.Helpers = None,
    sensitive: words.Sensitive = None,
    size: words.Size = None,
    shape: Annotated[
        str | None, typer.Option("--input", help="Without data: the shape of one input, such as 3x224x224.")
    ] = None,
    device: words.Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was measured as JSON.")] = False,
) -> None:
    """Write a network as a master: an ONNX file that runs at any width, without PyTorch.

    With --store int8 lower widths are derived from the 8-bit codes; both ways are measured.

    Example: anybit save my_model.py:make --weights best.pt --data my_data.py:loaders --out mine.onnx
    """
    pairs, chosen = (
        [Bits.parse(word) for word in widths.split()],
        words.settings(preset, per_channel, asymmetric, helpers, sensitive),
    )
    with progress_bars() as start:
        ready = start("getting ready", 4)
        with needs_torch("anybit save"):
            from anybit.artifact.header import Header
            from anybit.artifact.master import write_master
            from anybit.artifact.storage import size_on_disk
            from anybit.simulate.to_onnx import translate
            from anybit.task.task import load_task
        ready(1)
        asked: dict[str, Any] = {"metric": metric, "size": size, "device": device, "shape": words.shape(shape)}
        task = load_task(model, weights=weights, data=data, what="anybit save", **asked)
        ready(1)
        net = task.network(calibrate=calibrate, **chosen).cpu()
        ready(1)
        graph = translate(net)
        ready(1)
    about = _about(task, chosen, calibrate)
    ways = {"measured": store, **({"measured_from_fp32": "fp32"} if store == "int8" else {})}
    found: dict[str, list[Row]] = {}
    if task.data.test is not None:
        with tempfile.TemporaryDirectory() as folder, progress_bars() as start:
            advance = start("widths", len(ways) * len(pairs))
            for name, way in ways.items():
                write_master(Path(folder) / "model.onnx", graph, Header(net.plan, way))
                found[name] = _rows(Path(folder) / "model.onnx", task, pairs, advance)
    measured = {name: {str(row.bits): row.accuracy for row in rows} for name, rows in found.items()}
    kind = {row.metric for rows in found.values() for row in rows} - {"accuracy"}
    about.update(measured, **({"metric": kind.pop()} if kind else {}))
    write_master(out, graph, Header(net.plan, store, about))
    n = found["measured"][0].n if found else 0
    if as_json:
        typer.echo(json.dumps({"master": str(out), "bytes": size_on_disk(out), "n": n, **measured}, indent=1))
        return
    for i, row in enumerate(found.get("measured", [])):
        line = f"{row.bits!s:6} {_value(row)} of {n}" + f" ({row.metric})" * (row.metric != "accuracy")
        if store == "int8":
            line += f" from 8-bit codes, {_value(found['measured_from_fp32'][i])} from floating point"
        console.print(line, highlight=False)
    console.print(f"{out}: {size_on_disk(out) / 1e6:.2f} MB", highlight=False)


def _value(row: Row) -> str:
    return f"{100 * row.accuracy:.2f}%" if row.metric in SHARES else f"{row.accuracy:.4g}"


def _about(task: Task, chosen: dict[str, Any], calibrate: str | None) -> dict[str, Any]:
    """Return what a master says about where it comes from, without the folders of this machine."""
    from anybit.common.provenance import origin
    from anybit.task.task import without_paths

    feeding = {} if task.preprocessing is None else task.preprocessing.to_about()
    return {
        "origin": origin(),
        "training": without_paths(task.about),
        "data": without_paths(task.data.name),
        "classes": list(task.data.classes),
        **feeding,
        "settings": without_paths({**chosen, "calibrate": calibrate}),
    }


def _rows(master: Path, task: Task, pairs: list[Bits], advance: Advance) -> list[Row]:
    """Return what a master scores on the test data at each pair of widths."""
    import torch

    from anybit.artifact.session import load
    from anybit.evaluate.batches import Batch, Takes
    from anybit.evaluate.sweep import Run, measure

    session = load(master, keep=1)
    names = [value.name for value in session.master.graph.graph.input]

    def at(bits: Bits) -> Run:
        session.set_bits(weights=bits.weights, activations=bits.activations)
        return run

    def run(batch: Batch) -> Any:
        given = batch.kwargs or dict(zip(names, batch.args, strict=False))
        found = session.run({name: value.numpy() for name, value in given.items()})
        if isinstance(found, dict):
            return {name: torch.from_numpy(value) for name, value in found.items()}
        return torch.from_numpy(found)

    rows = []
    for row in measure(at, task.test("anybit save"), Takes.of(task.model), widths=pairs, metric=task.metric):
        rows.append(row)
        advance(1)
    return rows
