"""What the script of every tool does around its own way to quantize: read the job, measure, print one JSON line.

    python brevitas_fx.py checkpoint.safetensors images.safetensors "W8A8 W4A4" 15

The images file has `calibration`, `x` and `y`. Each width is a network of its own; their forward passes are timed in
turns with the floating-point one, whose batch norm is folded, and reported as a ratio to it.
"""

from __future__ import annotations

import copy
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from anybit.spec import Bits
from anybit.task.checkpoint import load_model

BATCH = 128
LAYERS = (nn.Conv2d, nn.Linear)


class NotOffered(Exception):  # noqa: N818
    """A width that the tool does not do; the message says what it does instead."""


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


Quantize = Callable[[Job, int, int], nn.Module]


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


def without_relu(model: fx.GraphModule) -> list[str]:
    """Return the layers whose output is no activation: it goes into a sum, or out of the network."""
    modules = dict(model.named_modules())
    layers = [node for node in model.graph.nodes if isinstance(modules.get(str(node.target)), LAYERS)]
    return [str(n.target) for n in layers if not all(isinstance(modules.get(str(u.target)), nn.ReLU) for u in n.users)]


@torch.no_grad()
def accuracy(network: nn.Module, job: Job) -> float:
    found = torch.cat([network(x).argmax(1) for x in job.x.split(BATCH)])
    return float((found == job.y).double().mean())


@torch.no_grad()
def interleaved(networks: dict[str, nn.Module], x: Tensor, rounds: int) -> dict[str, list[float]]:
    """Seconds per forward pass of every network, one after the other, round after round."""
    times: dict[str, list[float]] = {name: [] for name in networks}
    for index in range(rounds + 2):
        for name, network in networks.items():
            begin = time.perf_counter()
            network(x)
            if index > 1:  # the first rounds warm up
                times[name].append(time.perf_counter() - begin)
    return times


def ratio(times: list[float], base: list[float]) -> dict[str, float]:
    """Ratio of medians, and the smallest and largest ratio within one round."""
    each = [t / b for t, b in zip(times, base, strict=True)]
    middle = statistics.median(times) / statistics.median(base)
    return {"ratio": middle, "ratio_low": min(each), "ratio_high": max(each)}


def measure(job: Job, tools: dict[str, Quantize], widths: list[str], rounds: int) -> list[dict[str, Any]]:
    """One row per tool and width: accuracy, forward time over floating point, time to get to the width."""
    networks: dict[str, nn.Module] = {"float": job.reference}
    rows = [{"tool": tool, "bits": width} for tool in tools for width in widths]
    for row in rows:
        bits = Bits.parse(row["bits"])
        begin = time.perf_counter()
        try:
            network = tools[row["tool"]](job, bits.weights, bits.activations)
            seconds = time.perf_counter() - begin
            found = accuracy(network, job)  # some tools fail only when they run
        except NotOffered as reason:
            row["reason"] = str(reason)
            continue
        except Exception as error:  # whatever it is, the other widths may work
            row["reason"] = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            continue
        row |= {"seconds_to_width": seconds, "accuracy": found}
        networks[f"{row['tool']} {row['bits']}"] = network
    times = interleaved(networks, job.x[:BATCH], rounds)
    for row in rows:
        if "accuracy" in row:
            row.update(ratio(times[f"{row['tool']} {row['bits']}"], times["float"]), rounds=rounds)
    float_row = {"float_accuracy": accuracy(job.reference, job), "float_seconds": statistics.median(times["float"])}
    return [{**row, **float_row, "n": len(job.y)} for row in rows]


def read_job(checkpoint: str, images: str) -> Job:
    model, _ = load_model(checkpoint)
    with safe_open(images, framework="pt") as file:
        low, high = json.loads(file.metadata()["input_range"])
        tensors = [file.get_tensor(name) for name in ("calibration", "x", "y")]
    return Job(model.eval(), *tensors, input_range=(low, high))


def main(tools: dict[str, Quantize], package: str) -> None:
    """Do the job that the command line names with each of these tools."""
    checkpoint, images, widths, rounds = sys.argv[1:]
    warnings.simplefilter("ignore")  # about the tool's own future; nothing that a reader of the table could change
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    rows = measure(read_job(checkpoint, images), tools, widths.split(), int(rounds))
    print(json.dumps({"version": metadata.version(package), "threads": torch.get_num_threads(), "rows": rows}))
