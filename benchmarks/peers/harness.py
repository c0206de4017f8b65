"""What the script of every tool does around its own way to quantize: read the job, measure, print a line per row.

    echo '{"checkpoint": ..., "images": ..., "rounds": 3, "rows": [["per channel", "W4A8"]]}' | python nncf_torch.py

Every row is printed as JSON as soon as it is known. Times are seconds of the processor on one thread, so that a busy
machine does not count; forward passes are timed in turns with the floating-point one and reported as a ratio to it.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime
import torch
from safetensors import safe_open
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from anybit.spec import Bits
from anybit.task.checkpoint import load_model

BATCH = 128
TIMED = 64
"""Images at a time where forward passes are timed or only the answers count; tools calibrate with `BATCH`."""

EXPORTED = 512
"""Images on which an exported file is compared with the simulation."""

Row = dict[str, Any]


class NotOffered(Exception):  # noqa: N818
    """Something that the tool does not do; the message says what it does instead."""


@dataclass(frozen=True)
class Job:
    """The network to quantize and the data that goes with it."""

    model: nn.Module
    calibration: Tensor
    x: Tensor
    y: Tensor
    input_range: tuple[float, float]

    @property
    def batches(self) -> tuple[Tensor, ...]:
        """The calibration images in batches."""
        return self.calibration.split(BATCH)

    @cached_property
    def reference(self) -> fx.GraphModule:
        """The network in floating point with batch norm folded; quantize what `folded` returns, not this one."""
        return folded(self.model)


class Made(NamedTuple):
    """A network at one width, and what writes it as an ONNX file, if the tool has such a thing."""

    network: Callable[[Tensor], Tensor]
    export: Callable[[Path], Any] | None = None
    before: float = 0.0
    """Seconds that went into this width when another one that shares them was made."""


Quantize = Callable[[int, int], Made]
Setting = Callable[[Job], Quantize]
"""Does once what all widths share, and returns what makes one width."""


def folded(model: nn.Module) -> fx.GraphModule:
    """Return a copy of `model` in evaluation mode with every batch norm folded into the layer in front."""
    traced = fx.symbolic_trace(copy.deepcopy(model).eval())  # tracing alone shares the layers
    modules = dict(traced.named_modules())
    for node in list(traced.graph.nodes):
        norm = modules.get(str(node.target)) if node.op == "call_module" else None
        if not isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d):
            continue
        front = node.args[0]
        layer = modules[front.target]
        fuse = fuse_conv_bn_eval if isinstance(layer, nn.Conv2d) else fuse_linear_bn_eval
        parent, _, name = front.target.rpartition(".")
        setattr(traced.get_submodule(parent), name, fuse(layer, norm))
        node.replace_all_uses_with(front)
        traced.graph.erase_node(node)
    traced.delete_all_unused_submodules()
    traced.recompile()
    return traced


def ends(model: nn.Module) -> tuple[str, str]:
    """Return the names of the first and the last layer."""
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    return layers[0], layers[-1]


def run_file(path: Path) -> Callable[[Tensor], Tensor]:
    """Return what runs an ONNX file as anybody would, with the options of a new session on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (name,) = [value.name for value in session.get_inputs()]
    return lambda x: torch.from_numpy(session.run(None, {name: x.contiguous().numpy()})[0])


def to_onnx(network: nn.Module, path: Path) -> None:
    """Write a network through PyTorch's own exporter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network.eval(), (torch.zeros(2, 3, 32, 32),), str(path), input_names=["x"], dynamo=False,
            dynamic_axes={"x": {0: "n"}}, opset_version=17,
        )  # fmt: skip


@torch.no_grad()
def answers(network: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the class that the network sees in each image; what it sees it in is laid out for speed."""
    parts = x.contiguous(memory_format=torch.channels_last).split(TIMED)
    return torch.cat([network(part).argmax(1) for part in parts])


@torch.no_grad()
def slow_down(network: Callable[[Tensor], Tensor], job: Job, rounds: int) -> Row:
    """Forward time over that of floating point, one after the other, round after round: ratio of medians and spread."""
    x, times = job.x[:TIMED], {True: list[float](), False: list[float]()}
    for index in range(rounds + 1):
        for quantized in (False, True):
            begin = time.process_time()
            (network if quantized else job.reference)(x)
            if index:  # the first round warms up
                times[quantized].append(time.process_time() - begin)
    each = [q / f for q, f in zip(times[True], times[False], strict=True)]
    middle = statistics.median(times[True]) / statistics.median(times[False])
    return {"slow_down": middle, "slow_down_low": min(each), "slow_down_high": max(each), "rounds": rounds}


def agreement(made: Made, job: Job, found: Tensor) -> Row:
    """How often the exported file and the simulation see the same class."""
    if made.export is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        try:
            made.export(path)
            same = answers(run_file(path), job.x[:EXPORTED]) == found[:EXPORTED]
        except Exception as error:
            return {"export_error": said(error)}
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
    return {"agreement": float(same.double().mean()), "agreement_n": len(same), "file_bytes": size}


def said(error: BaseException) -> str:
    """Return an error in one line."""
    if isinstance(error, NotOffered):
        return str(error)
    return " ".join(f"{type(error).__name__}: {error}".split())[:240]


def measured(job: Job, quantize: Quantize, bits: Bits, rounds: int) -> Row:
    """Everything about one width."""
    begin = time.process_time()
    made = quantize(bits.weights, bits.activations)
    row: Row = {"seconds": time.process_time() - begin + made.before}
    found = answers(made.network, job.x)  # some tools fail only when they run
    row["accuracy"] = float((found == job.y).double().mean())
    return row | slow_down(made.network, job, rounds) | agreement(made, job, found)


def read_job(checkpoint: str, images: str) -> Job:
    model, _ = load_model(checkpoint)
    with safe_open(images, framework="pt") as file:
        low, high = json.loads(file.metadata()["input_range"])
        tensors = [file.get_tensor(name) for name in ("calibration", "x", "y")]
    return Job(model.eval(), *tensors, input_range=(low, high))


def main(settings: dict[str, Setting], package: str) -> None:
    """Do the rows that the first line of the input asks for, each of a setting and a width."""
    asked = json.loads(sys.stdin.readline())
    answer, sys.stdout = sys.stdout, sys.stderr  # tools print what they like
    warnings.simplefilter("ignore")  # about the tool's own future; nothing that a reader of the table could change
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    job = read_job(asked["checkpoint"], asked["images"])
    shared: dict[str, tuple[Quantize | BaseException, float]] = {}
    for name, width in asked["rows"]:
        row: Row = {"setting": name, "bits": width, "version": metadata.version(package), "n": len(job.y)}
        try:
            if name not in shared:
                begin = time.process_time()
                shared[name] = settings[name](job), time.process_time() - begin
            quantize, once = shared[name]
            row |= {"seconds_once": once, **measured(job, quantize, Bits.parse(width), asked["rounds"])}
        except Exception as error:  # whatever it is, the other rows may work
            row["error"] = said(error)
        print(json.dumps(row), file=answer, flush=True)
