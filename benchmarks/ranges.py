"""Ranges of activations without data: six standard deviations, as in the paper, beside one for each width.

    python benchmarks/ranges.py

Weights keep 8 bits, so that activations alone make the difference; all else is as `prepare` and `adopt` do it by
default. Networks of the any-width table: accuracy on the first 5,000 CIFAR-10 test images. Strangers' networks with
batch norm (ResNet-50 with ImageNet weights, PP-OCRv3's detector): decisions equal to floating point, as
benchmarks/strangers has them; `python benchmarks/strangers/fetch.py` fetches these. Writes results/ranges.json as it
goes, and leaves out what is there.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import anybit
from anybit.common.files import read_json, write_json
from anybit.common.provenance import origin
from anybit.task.checkpoint import load_model

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks/strangers")]
import tools  # noqa: E402
from networks import STRANGERS  # noqa: E402
from task import Run, scores  # noqa: E402

from paper.cifar10 import load  # noqa: E402

OUT = ROOT / "results/ranges.json"
WIDTHS = ((8, 8), (8, 6), (8, 4), (8, 3), (8, 2))
WAYS: dict[str, dict[str, Any]] = {"6 standard deviations": {"sigmas": 6.0}, "for each width": {}}
STARTS = ("converged-vgg-like-base-0", "converged-resnet18-base-0", "laptop-mobilenet-v2-base-0")
TESTED = 5_000

Found = Iterator[tuple[str, float]]


def trained(start: str, options: dict[str, Any]) -> Found:
    """Give the accuracy of a network of ours at every width."""
    model, data = load_model(ROOT / "paper/checkpoints" / start / "model.safetensors")[0].eval(), load()
    net = anybit.prepare(model, data.test.x[:2], input_range=data.input_range, **options)
    test = [(data.test.x[i : i + 250], data.test.y[i : i + 250]) for i in range(0, TESTED, 250)]
    for row in anybit.sweep(net, test, widths=["FP", *WIDTHS]):
        yield str(row.bits), 100 * row.accuracy


def strange(name: str, make: Callable[[Path], Callable[[tuple[int, int]], Run]]) -> Found:
    """Give the part of decisions that stays at every width; `make` gives what runs the network there."""
    path = STRANGERS[name].file()
    task, floats, run_at = STRANGERS[name].task(path), tools.plain(path), make(path)
    wanted = [task.decide(floats, sample) for sample in task.samples]
    for bits in WIDTHS:
        yield f"W{bits[0]}A{bits[1]}", 100 * scores(task, run_at(bits), wanted)["score"]


def adopted(path: Path, options: dict[str, Any]) -> Callable[[tuple[int, int]], Run]:
    """Return what runs a file at a width."""
    out = Path(tempfile.mkdtemp()) / "m.onnx"
    anybit.adopt(path, out, sensitive="8-bit", **options)
    session = anybit.load(out, threads=1)
    return lambda bits: (session.set_bits(weights=bits[0], activations=bits[1]), tools.run_of(session))[1]


def prepared(name: str, options: dict[str, Any]) -> Callable[[tuple[int, int]], Run]:
    """Return what runs a PyTorch network at a width; its batch norm is not folded yet, as it is in the file."""
    from from_torch import NETWORKS

    model, example, _ = NETWORKS[name]()
    (x,) = (torch.from_numpy(array) for array in example.values())
    net = anybit.prepare(model, x, **options)
    return lambda bits: (net.set_bits(weights=bits[0], activations=bits[1]), tools.run_of_network(net))[1]


def main() -> None:
    """Measure what is missing."""
    torch.set_num_threads(1)
    jobs: dict[str, Callable[[dict[str, Any]], Found]] = {
        **{start: lambda options, start=start: trained(start, options) for start in STARTS},
        "PP-OCRv3's detector": lambda options: strange("ppocr-v3-det", lambda path: adopted(path, options)),
        "ResNet-50": lambda options: strange("resnet50", lambda path: prepared("resnet50", options)),
    }
    values = read_json(OUT, what="what was measured") if OUT.exists() else {"about": __doc__, "networks": {}}
    for name, job in jobs.items():
        for way, options in WAYS.items():
            if way in values["networks"].get(name, {}):
                continue
            found = {bits: round(value, 2) for bits, value in job(options)}
            values["networks"].setdefault(name, {})[way] = {**found, "origin": origin()}
            write_json(OUT, values)
            print(name, way, found, flush=True)


if __name__ == "__main__":
    main()
