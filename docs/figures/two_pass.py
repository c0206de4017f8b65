"""Draws docs/figures/two-pass.svg: how well two passes agree with double backward, with live and with frozen kinks.

Run from the root of a clone, a minute or two on one core:

    python docs/figures/two_pass.py

The network is the paper's VGG-like one at a quarter of its width, trained for one epoch on digits blown up to 32x32
pixels. For every h the gradient of the penalty alone is compared with double backward in float64. The numbers go into
two-pass.json beside the picture.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybit
from anybit.common.provenance import origin
from anybit.data import load_dataset
from anybit.models import build_model
from anybit.objectives import two_pass

STRENGTH = 2e-3
STEPS = [float(10 ** (k / 2)) for k in range(-14, 1)]
"""Values of h to try, half a decade apart."""


def trained(epochs: int = 1) -> tuple[nn.Module, Tensor, Tensor]:
    """Return the network and one batch of 64 images that it was trained on."""
    torch.manual_seed(0)
    model, data = build_model("vgg-like", channels=1, classes=10, multiplier=0.25), load_dataset("digits").train
    images = data.x.repeat_interleave(4, 2).repeat_interleave(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(epochs):
        for part in torch.randperm(len(data.y)).split(64):
            F.cross_entropy(model(images[part]), data.y[part]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, images[:64], data.y[:64]


def gradient(model: nn.Module, x: Tensor, y: Tensor, **settings: Any) -> Tensor:
    """Return the gradient of loss and penalty in one long vector; a fresh copy, so that nothing is left behind."""
    model = copy.deepcopy(model)
    penalty = anybit.GradientPenalty(model, **settings)
    penalty.backward(lambda: F.cross_entropy(model(x), y))
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def frozen(model: nn.Module, x: Tensor, y: Tensor, plain: Tensor, h: float | None) -> Tensor:
    """Return the penalty's gradient from two passes with frozen kinks; without `h`, with the step that is chosen."""
    chosen = two_pass.step_size
    if h is not None:
        two_pass.step_size = lambda shifts, loss, eps: h
    try:
        return gradient(model, x, y, weight=STRENGTH, activation=STRENGTH) - plain
    finally:
        two_pass.step_size = chosen


def live(model: nn.Module, x: Tensor, y: Tensor, plain: Tensor, h: float) -> Tensor:
    """Return the same with live kinks: the gradient at the shifted point, less that at the old one, over h."""
    size = h * STRENGTH
    return (gradient(model, x, y, weight=size, activation=size, objective="worst-case") - plain) / h


def step_chosen(run: Callable[[], object]) -> float:
    """Return the h that a step chooses by itself."""
    chosen, seen = two_pass.step_size, []

    def watched(*args: Any) -> float:
        seen.append(chosen(*args))
        return seen[-1]

    two_pass.step_size = watched
    try:
        run()
    finally:
        two_pass.step_size = chosen
    return float(seen[0])


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine of the angle between two vectors."""
    return float(a @ b / (a.norm() * b.norm()))


def measure() -> dict[str, Any]:
    """Return the cosines by h, and the h that the engine chooses."""
    model, x, y = trained()
    plain = gradient(model, x, y)
    exact_model, exact_x = copy.deepcopy(model).double(), x.double()
    exact = gradient(
        exact_model, exact_x, y, weight=STRENGTH, activation=STRENGTH, engine="double-backward"
    ) - gradient(exact_model, exact_x, y)
    rows = [
        {
            "h": h,
            "live": cosine(live(model, x, y, plain, h), exact),
            "frozen": cosine(frozen(model, x, y, plain, h), exact),
        }
        for h in STEPS
    ]
    own = frozen(model, x, y, plain, None)
    h = step_chosen(lambda: frozen(model, x, y, plain, None))
    chosen = {"h": h, "cosine": cosine(own, exact), "length": float(own.norm() / exact.norm())}
    return {
        "network": "vgg-like, width 1/4, on digits of 32x32 pixels, batch 64, float32",
        "strength": STRENGTH,
        "rows": rows,
        "chosen": chosen,
        "origin": origin(),
    }


def draw(measured: dict[str, Any], path: Path) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "anybit", "svg.fonttype": "none"})
    import matplotlib.pyplot as plt

    rows, chosen = measured["rows"], measured["chosen"]
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    axes.semilogx([r["h"] for r in rows], [r["frozen"] for r in rows], "o-", color="#0f6b3c", ms=4)
    axes.semilogx([r["h"] for r in rows], [r["live"] for r in rows], "s--", color="#b3401f", ms=4)
    axes.axvline(chosen["h"], color="#555555", lw=1, ls=":")
    axes.annotate(" the h that is chosen", (chosen["h"], 0.55), color="#555555", fontsize=9)
    axes.annotate("frozen kinks", (1e-5, 0.92), color="#0f6b3c")
    axes.annotate("live kinks", (1.3e-4, 0.05), color="#b3401f")
    axes.set(xlabel="h", ylabel="cosine to double backward", ylim=(-0.05, 1.05))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measure, write the numbers and draw them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="the folder to write to")
    out: Path = parser.parse_args().out
    measured = measure()
    (out / "two-pass.json").write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    draw(measured, out / "two-pass.svg")
    print(json.dumps(measured["chosen"]))


if __name__ == "__main__":
    main()
