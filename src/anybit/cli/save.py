"""`anybit save runs/digits-l1-0 --out model.onnx`: from a network to one file that runs at any width."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anybit.cli import options
from anybit.cli.show import note_task, progress_bars, say
from anybit.common.progress import Advance, Start
from anybit.pages.rows import SHARES
from anybit.spec import Bits, Row, widths_of

if TYPE_CHECKING:
    from anybit.artifact.model import OnnxModel
    from anybit.plan.points import Plan
    from anybit.task.task import Task


def save(
    model: options.Model,
    weights: options.Weights = None,
    data: options.Data = None,
    out: Annotated[Path, typer.Option(help="The master to write.")] = Path("model.onnx"),
    store: options.Store = "fp32",
    widths: Annotated[
        str, typer.Option(help="Measure on test data at these widths and write it into the file.")
    ] = "FP W8A8 W4A8 W4A4",
    metric: options.Metric = None,
    calibrate: options.Calibrate = None,
    preset: options.Preset = None,
    per_channel: options.PerChannel = None,
    asymmetric: options.Asymmetric = None,
    helpers: options.Helpers = None,
    sensitive: options.Sensitive = None,
    size: options.Size = None,
    shape: Annotated[
        str | None, typer.Option("--input", help="Without data: the shape of one input, such as 3x224x224.")
    ] = None,
    device: options.Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was measured as JSON.")] = False,
) -> None:
    """Write a network as a master: an ONNX file that runs at any width, without PyTorch.

    With --store int8 lower widths are derived from the 8-bit codes; both ways are measured.

    Example: anybit save my_model.py:make --weights best.pt --data my_data.py:loaders --out mine.onnx
    """
    pairs = widths_of(widths)
    chosen = options.settings(preset, per_channel, asymmetric, helpers, sensitive)
    with progress_bars() as start:
        ready = start("getting ready", 4)
        with options.needs_torch("anybit save"):
            from anybit.artifact.header import Header
            from anybit.artifact.master import write_master
            from anybit.artifact.storage import size_on_disk
            from anybit.simulate.to_onnx import translate
            from anybit.task.task import load_task
        ready(1)
        asked: dict[str, Any] = {"metric": metric, "size": size, "device": device, "shape": options.shape(shape)}
        task = load_task(model, weights=weights, data=data, what="anybit save", **asked)
        ready(1)
        net = task.network(calibrate=calibrate, **chosen).cpu()
        note_task(task, net.plan)
        ready(1)
        graph = translate(net)
        ready(1)
        found = _measured(task, graph, net.plan, store, pairs, start) if task.data.test is not None else {}
    measured = {name: {str(row.bits): row.accuracy for row in rows} for name, rows in found.items()}
    kind = {row.metric for rows in found.values() for row in rows} - {"accuracy"}
    about = {**_about(task, chosen, calibrate), **measured, **({"metric": kind.pop()} if kind else {})}
    write_master(out, graph, Header(net.plan, store, about))
    if as_json:
        n = found["measured"][0].n if found else 0
        typer.echo(json.dumps({"master": str(out), "bytes": size_on_disk(out), "n": n, **measured}, indent=1))
        return
    _show(found, store)
    say(f"{out}: {size_on_disk(out) / 1e6:.2f} MB")


def _show(found: dict[str, list[Row]], store: str) -> None:
    for i, row in enumerate(found.get("measured", [])):
        line = f"{row.bits!s:6} {_value(row)} of {row.n}" + f" ({row.metric})" * (row.metric != "accuracy")
        if store == "int8":
            line += f" from 8-bit codes, {_value(found['measured_from_fp32'][i])} from floating point"
        say(line)


def _measured(
    task: Task, graph: OnnxModel, plan: Plan, store: str, pairs: list[Bits], start: Start
) -> dict[str, list[Row]]:
    """Return what masters of this network score: stored as asked for and, if that is in 8 bits, unrounded too."""
    from anybit.artifact.header import Header
    from anybit.artifact.master import write_master

    ways = {"measured": store, **({"measured_from_fp32": "fp32"} if store == "int8" else {})}
    advance = start("widths", len(ways) * len(pairs))
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, way in ways.items():
            write_master(Path(folder) / "model.onnx", graph, Header(plan, way))
            found[name] = _rows(Path(folder) / "model.onnx", task, pairs, advance)
    return found


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
