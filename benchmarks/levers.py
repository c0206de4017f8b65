"""What each lever gains on one network that was trained to the end: settings, a little data, and in what time.

    python benchmarks/levers.py [checkpoint]

VGG-like at an eighth of its width, CIFAR-10, all 10,000 test images (`python -m paper.cifar10` fetches them). Writes
results/levers.json and draws docs/levers.png from it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import anybit
from anybit.common.files import write_json
from anybit.common.provenance import origin
from anybit.task.checkpoint import load_model

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from paper.cifar10 import load  # noqa: E402

START = ROOT / "paper/checkpoints/converged-vgg-like-base-0/model.safetensors"
OUT, PICTURE = ROOT / "results/levers.json", ROOT / "docs/levers.png"
WIDTHS = ((8, 8), (6, 6), (4, 8), (4, 4), (3, 8), (3, 3), (2, 8))
IMAGES = 256


def ways(model: nn.Module, x: Tensor, seen: Tensor, span: tuple[float, float]) -> dict[str, Callable[[], Any]]:
    """Return what makes the network with each lever pulled, one more each time."""

    def fitted() -> Any:
        net = anybit.prepare(model, x, input_range=span, calibration=[seen])
        anybit.reconstruct(net, [seen], WIDTHS)
        return net

    return {
        "the paper's settings": lambda: anybit.prepare(model, x, preset="paper", input_range=span),
        "defaults, no data": lambda: anybit.prepare(model, x, input_range=span),
        f"defaults, {IMAGES} images": lambda: anybit.prepare(model, x, input_range=span, calibration=[seen]),
        f"reconstruct, {IMAGES} images": fitted,
    }


def measure(checkpoint: Path) -> dict[str, Any]:
    """Measure every lever at every width, and write it down as it comes."""
    model, data = load_model(checkpoint)[0].eval(), load()
    test = [(data.test.x[i : i + 500], data.test.y[i : i + 500]) for i in range(0, len(data.test.x), 500)]
    seen = data.train.x[:IMAGES]
    rows: list[dict[str, Any]] = []
    values = {**origin(), "checkpoint": checkpoint.parent.name, "test images": len(data.test.x), "rows": rows}
    for name, make in ways(model, data.test.x[:2], seen, data.input_range).items():
        begin = time.perf_counter()
        net = make()
        seconds = time.perf_counter() - begin
        found = anybit.sweep(net, test, widths=["FP", *WIDTHS], label=name)
        rows.append({"lever": name, "seconds": seconds, "accuracy": {str(r.bits): 100 * r.accuracy for r in found}})
        print(name, f"{seconds:.1f} s", {k: round(v, 1) for k, v in rows[-1]["accuracy"].items()}, flush=True)
        write_json(OUT, values)
    return values


def draw(values: dict[str, Any]) -> None:
    """Draw accuracy over widths, one line for each lever."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2), dpi=110)
    for row, color in zip(values["rows"], ("#b0b0b0", "#3b8", "#178", "#d62"), strict=True):
        accuracy = row["accuracy"]
        axes.plot(list(accuracy), list(accuracy.values()), marker="o", lw=2.2, color=color, label=row["lever"])
    axes.set_ylabel("test accuracy in %")
    axes.set_ylim(0, 100)
    axes.grid(axis="y", color="#ddd")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("One checkpoint, one file: VGG-like on CIFAR-10, 10,000 test images", loc="left", fontsize=11)
    axes.legend(frameon=False, loc="lower left")
    figure.tight_layout()
    figure.savefig(PICTURE)


if __name__ == "__main__":
    torch.set_num_threads(1)
    draw(json.loads(OUT.read_text()) if "--draw" in sys.argv else measure(Path((sys.argv[1:] or [START])[0])))
