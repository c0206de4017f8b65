"""Which parts of the any-width objective pay, one change at a time, on the validation split of CIFAR-10.

    python -m paper.any_width_trials            # every trial that results/any-width-trials.json does not hold yet
    python -m paper.any_width_trials --only plain start

VGG-like at an eighth of its width, from the start that the converged table shares, fine-tuned on all 45,000 training
images for one epoch. Every trial changes one thing against "start". The test split is never read.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybit.common.files import write_json
from anybit.common.provenance import origin
from anybit.data import Batches, Dataset
from anybit.evaluate.sweep import sweep
from anybit.objectives.any_width import WIDTHS, AnyWidth
from anybit.objectives.base import Penalty, Sum
from anybit.objectives.gradient import GradientPenalty
from anybit.objectives.kurtosis import KurtosisPenalty
from anybit.simulate.modules import executors
from anybit.simulate.prepare import prepare
from anybit.task.checkpoint import load_model
from anybit.train.schedule import learning_rate
from paper.cifar10 import load

OUT = Path("results/any-width-trials.json")
START = "paper/checkpoints/converged-vgg-like-base-0/model.safetensors"
EPOCHS, BATCH, RATE, DECAY = 1, 128, 0.02, 1e-4
VALIDATED = 2_500

FEW = ((4, 4), (3, 3), (2, 8))
SETTINGS: dict[str, tuple[dict[str, Any], tuple[tuple[int, int], ...]]] = {
    "per tensor": ({"preset": "paper"}, ((32, 32), (8, 8), (4, 4), (3, 32), (3, 3))),
    "per tensor, helpers": ({"preset": "paper", "helpers": "all"}, ((4, 4), (3, 3))),
    "per channel": ({"preset": "paper", "per_channel": True}, FEW),
    "per channel, helpers": ({"preset": "paper", "per_channel": True, "helpers": "all"}, FEW),
    "default": ({}, ((8, 8), *FEW)),
}

Make = Callable[[nn.Module, Tensor], Penalty | None]


def any_width(*, stretches: bool = True, **options: Any) -> Make:
    """Return what makes the objective itself; without `stretches` the ends of weight ranges are given."""

    def make(model: nn.Module, x: Tensor) -> Penalty:
        made = AnyWidth(model, x, **{"strength": 0.5, **options})
        for part in executors(made.live.body).values():
            part.stretches = stretches
        return made

    return make


def beside(*parts: Make) -> Make:
    """Return what makes several penalties that add up."""
    return lambda model, x: Sum([made for part in parts if (made := part(model, x)) is not None])


def kurtosis(strength: float) -> Make:
    """Return what makes the kurtosis penalty."""
    return lambda model, x: KurtosisPenalty(model, strength=strength)


def l1(strength: float, every: int = 1) -> Make:
    """Return what makes the penalty of the paper."""
    return lambda model, x: GradientPenalty(model, weight=strength, activation=strength, every=every)


TRIALS: dict[str, tuple[str, Make]] = {
    "plain": ("no objective but the loss", lambda model, x: None),
    "start": ("any-width, strength 0.5, gradients cut to twice the usual length", any_width()),
    "limit 5": ("gradients are cut to 5 times the usual length", any_width(limit=5.0)),
    "limit 5, strength 0.25": ("the same, half as strong", any_width(limit=5.0, strength=0.25)),
    "no limit": ("long gradients are not cut", any_width(limit=math.inf)),
    "no limit, given ends": (
        "the same, and no gradient reaches the ends of weight ranges", any_width(limit=math.inf, stretches=False)
    ),
    "auto": ("the strength follows the loss", any_width(strength="auto")),
    "2 bits": ("W2A8 is drawn too, once in nine steps", any_width(widths=(*WIDTHS, "W2A8"))),
    "kurtosis 0.1": ("kurtosis on top", beside(any_width(), kurtosis(0.1))),
    "averaged weights": ("an average of the weights over the last steps", any_width()),
    "l1 + kurtosis": ("the default objective before this one", beside(l1(3e-4), kurtosis(0.3))),
    "l1 every fourth": ("the l1 penalty on top, at every fourth step", beside(any_width(), l1(3e-4, 4))),
    "two passes": ("two quantized passes, each half as strong", beside(
        any_width(strength=0.25), any_width(strength=0.25, seed=1)
    )),
    "paper grids only": ("only the paper's grids are drawn", any_width(grids=("paper",))),
    "averaged, auto": ("an average of the weights, the strength follows the loss", any_width(strength="auto")),
    "averaged, auto, kurtosis 0.1": (
        "an average of the weights, the strength follows the loss, kurtosis on top",
        beside(any_width(strength="auto"), kurtosis(0.1)),
    ),
    "averaged, auto, kurtosis 0.3": (
        "the same with three times the kurtosis", beside(any_width(strength="auto"), kurtosis(0.3))
    ),
    "averaged, plain": ("an average of the weights, no objective but the loss", lambda model, x: None),
    "default grids only": ("only the default preset's grids are drawn", any_width(grids=("default",))),
}  # fmt: skip

AVERAGED = 0.99
"""How much of an average of weights a step keeps."""


def fine_tune(name: str, model: nn.Module, data: Dataset, steps: int | None = None) -> dict[str, float]:
    """Train in place; return the time per step and the last strength."""
    torch.manual_seed(0)
    split = data.train
    batches = Batches(split, BATCH, generator=torch.Generator().manual_seed(0), augment=data.augment)
    objective = TRIALS[name][1](model, split.x[:2])
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=DECAY, nesterov=True)
    total = EPOCHS * len(batches)
    average = {key: value.clone() for key, value in model.state_dict().items()} if "averaged" in name else None
    number, spent, losses, last = 0, 0.0, [], None
    model.train()
    for _ in range(EPOCHS):
        for x, y in batches:
            x = x.contiguous(memory_format=torch.channels_last)
            optimizer.param_groups[0]["lr"] = learning_rate(number, steps=total, peak=RATE, warmup=0, shape="cosine")

            def closure(x: Tensor = x, y: Tensor = y) -> tuple[Tensor, Tensor]:
                out = model(x)
                return F.cross_entropy(out, y), out

            begin = time.process_time()
            if objective is None:
                loss = closure()[0]
                loss.backward()  # type: ignore[no-untyped-call]
                losses.append(float(loss.detach()))
            else:
                last = objective.backward(closure)
                losses.append(last.loss)
            optimizer.step()
            optimizer.zero_grad()
            spent += time.process_time() - begin
            number += 1
            if average is not None:
                for key, value in model.state_dict().items():
                    average[key] = average[key].lerp(value, 1 - AVERAGED) if value.is_floating_point() else value
            if number == steps:
                break
    if average is not None:
        model.load_state_dict(average)
    found = {"seconds_per_step": spent / number, "train_loss": sum(losses[-100:]) / len(losses[-100:])}
    strength = None if last is None else last.terms.get("strength")
    return found if strength is None else {**found, "strength": strength}


def measure(model: nn.Module, data: Dataset) -> dict[str, Any]:
    """Return the validation accuracy in floating point and at the widths of each setting, in percent."""
    model.eval()
    batches = Batches(data.validation.first(VALIDATED), 250)
    found: dict[str, Any] = {}
    for name, (options, widths) in SETTINGS.items():
        net = prepare(model, data.validation.x[:2], input_range=data.input_range, **options)
        rows = sweep(net, batches, widths=widths)
        values = {"FP" if r.weights == 32 == r.activations else f"W{r.weights}A{r.activations}": r for r in rows}
        found[name] = {key: round(100 * row.accuracy, 2) for key, row in values.items()}
    found["FP"] = found["per tensor"].pop("FP")
    narrow = [value for name in SETTINGS for key, value in found[name].items() if key != "W8A8"]
    found["mean at 4 bits and less"] = round(sum(narrow) / len(narrow), 2)
    return found


def read(path: Path) -> dict[str, Any]:
    """Return what was measured so far."""
    values: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"about": __doc__, "trials": {}}
    return values


def main() -> None:
    """Run the trials and write their numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(TRIALS), default=list(TRIALS))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--steps", type=int, help="stop an epoch early, to try the program")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = load()
    for name in args.only:
        if name in read(args.out)["trials"]:
            continue
        model, _ = load_model(Path(START))
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        seen = fine_tune(name, model, data, args.steps)
        values = read(args.out)  # several of these may run at once
        values["trials"][name] = {"what": TRIALS[name][0], **seen, **measure(model, data), "origin": origin()}
        write_json(args.out, values)
        print(name, {k: v for k, v in values["trials"][name].items() if k != "origin"}, flush=True)


if __name__ == "__main__":
    main()
