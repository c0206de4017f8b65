"""The tools that are compared, each behind one function, and the one place that knows how they are called."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from task import Array, Feed, Run

os.environ["ORT_DISABLE_TELEMETRY"] = "1"
THREADS = 1


# anybit


def adopt(path: Path, out: Path, calibration: Iterable[Feed] | None) -> Any:
    """Write a master with anybit's default settings; return what it says of it, or `None`."""
    import anybit

    return anybit.adopt(path, out, calibration=calibration)


def summary_numbers(summary: Any) -> dict[str, float]:
    """Return the plain numbers of what `adopt` reports, such as the share of weights that is quantized."""
    names = [name for name in dir(summary) if not name.startswith("_")] if summary is not None else []
    found = {name: getattr(summary, name) for name in names}
    return {k: float(v) for k, v in found.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def reconstruct(master: Path, feeds: Sequence[Feed], widths: Sequence[str]) -> dict[str, float]:
    """Fit some widths of a master to inputs; say how long that takes and by how much of its size the file grows."""
    import anybit

    before, begin = master.stat().st_size, time.perf_counter()
    anybit.reconstruct(master, feeds, widths)
    seconds = (time.perf_counter() - begin) / len(widths)
    return {"width_seconds": seconds, "growth": master.stat().st_size / before - 1}


def open_master(path: Path) -> Any:
    import anybit

    return anybit.load(path, threads=THREADS)


def run_of(session: Any) -> Run:
    """Return a master's session as a function, at the widths that it has when it is called."""

    def run(feed: Feed) -> dict[str, Array]:
        found = session.run(dict(feed))
        return dict(found) if isinstance(found, dict) else {session.outputs[0]: found}

    return run


def point_names(session: Any) -> list[str]:
    """Return the names of everything in a master that has a width: weights and activations."""
    return [point.name for point in session.plan.points]


def prepare(name: str, calibration: Sequence[Feed] | None) -> Any:
    """Return a PyTorch network with a width switch, with its default settings."""
    import torch
    from from_torch import NETWORKS

    import anybit

    model, example, _ = NETWORKS[name]()
    inputs = _tensors(example)
    batches = [_tensors(feed) for feed in calibration] if calibration is not None else None
    if len(inputs) == 1:  # one input goes without its name
        (key,) = inputs
        given = [b[key] for b in batches] if batches else None
        return anybit.prepare(model, inputs[key], calibration=given)
    torch.set_num_threads(THREADS)
    return anybit.prepare(model, inputs, calibration=batches)


def _tensors(feed: Feed) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(np.array(value)) for name, value in feed.items()}


def run_of_network(network: Any) -> Run:
    """Return a prepared network, or any other in PyTorch, as a function."""
    import torch

    def run(feed: Feed) -> dict[str, Array]:
        tensors = _tensors(feed)
        with torch.no_grad():
            found = network(*tensors.values()) if len(tensors) == 1 else network(**tensors)
        return {"output": found.numpy()}

    return run


# ONNX Runtime


def plain(path: Path, *, exact: bool = False, optimize: bool = True) -> Run:
    """Return an ONNX file as a function, run by ONNX Runtime as it is.

    `exact` asks for 8-bit sums without saturation, so that a file is judged and not the processor.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.log_severity_level = 4
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if exact:
        options.add_session_config_entry("session.x64quantprecision", "1")
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return lambda feed: dict(zip(names, session.run(None, dict(feed)), strict=True))


def quantize_static(path: Path, out: Path, feeds: Sequence[Feed], *, per_channel: bool) -> Run:
    """Quantize a file to W8A8 with ONNX Runtime's own tool, in the first way that gives a file that runs.

    Its documentation asks for preprocessing first; scales per channel need operators of version 13 or later. Files
    that fail at either are tried without. A file on which the runtime's optimizer fails runs without it.
    """
    reason: Exception | None = None
    with _quiet():
        for source in _preprocessed(path, out.parent):
            try:
                _quantize_static(source, out, feeds, per_channel=per_channel)
            except Exception as error:  # it raises what it likes
                reason = reason or error
                continue
            for optimize in (True, False):
                try:
                    run = plain(out, exact=True, optimize=optimize)
                    run(feeds[0])
                except Exception as error:
                    reason = reason or error
                else:
                    return run
    assert reason is not None
    raise reason


def quantized_share(path: Path) -> float:
    """Return how much of a file's weights is stored in 8 bits; those inside of branches and loops count too."""
    import onnx

    def tensors(graph: Any) -> Iterator[Any]:
        yield from graph.initializer
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.TENSOR:
                    yield attribute.t
                elif attribute.type == onnx.AttributeProto.GRAPH:
                    yield from tensors(attribute.g)

    sizes = {"small": 0, "float": 0}
    for tensor in tensors(onnx.load(path).graph):
        if len(tensor.dims) > 1:
            small = tensor.data_type in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
            wide = tensor.data_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
            sizes["small" if small else "float"] += int(np.prod(tensor.dims)) if small or wide else 0
    return sizes["small"] / max(1, sum(sizes.values()))


def _quantize_static(path: Path, out: Path, feeds: Sequence[Feed], *, per_channel: bool) -> None:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat
    from onnxruntime.quantization import quantize_static as quantize

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left: Iterator[Feed] = iter(feeds)

        def get_next(self) -> Feed | None:
            return next(self.left, None)

    quantize(str(path), str(out), Reader(), quant_format=QuantFormat.QDQ, per_channel=per_channel)


def _preprocessed(path: Path, folder: Path) -> Iterator[Path]:
    """Give the file in several forms, the one that a careful user would take first."""
    import onnx
    import onnx.version_converter
    from onnxruntime.quantization.shape_inference import quant_pre_process

    ready, newer = folder / "preprocessed.onnx", folder / "newer.onnx"
    version = max((o.version for o in onnx.load(path).opset_import if o.domain in ("", "ai.onnx")), default=0)
    for source in (newer, path) if version < 13 else (path,):
        with contextlib.suppress(Exception):
            if source is newer:
                onnx.save(onnx.version_converter.convert_version(onnx.load(path), 17), newer)
            for skip in (False, True):
                with contextlib.suppress(Exception):
                    quant_pre_process(str(source), str(ready), skip_symbolic_shape=skip)
                    yield ready
            yield source


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep advice on how to use a tool out of the table."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
