"""Which parts of the any-width objective pay, one change at a time, on the validation split of CIFAR-10.

    python -m paper.any_width_trials            # every trial that results/any-width-trials.json does not hold yet
    python -m paper.any_width_trials --only plain start

VGG-like at an eighth of its width, from the start that the converged table shares, fine-tuned on all 45,000 training
images for one epoch. Every trial changes one thing against "start". Those from scratch have 15 epochs, the objective in
the last five of them. The test split is never read.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

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
from anybit.spec import FLOAT, Bits
from anybit.task.checkpoint import load_model
from anybit.train.schedule import learning_rate
from paper.cifar10 import load

OUT = Path("results/any-width-trials.json")
START = "paper/checkpoints/converged-vgg-like-base-0/model.safetensors"
BATCH, RATE, DECAY = 128, 0.02, 1e-4
FRESH_RATE, FRESH_DECAY = 0.1, 5e-4
"""Learning rate and weight decay of a training from scratch."""
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


class Gentle(AnyWidth):
    """What of the quantized pass's gradient works against that of the loss is taken out."""

    def _quantized_pass(self, parts: Any, parameters: Any, scaler: Any) -> Any:
        total, grads = super()._quantized_pass(parts, parameters, scaler)
        pairs = [(q, p.grad) for q, p in zip(grads, parameters, strict=True) if q is not None and p.grad is not None]
        against = sum(float((q * g).sum()) for q, g in pairs)
        if against < 0:
            length = sum(float(g.square().sum()) for _, g in pairs)
            for q, g in pairs:
                q.sub_(g, alpha=against / length)
        return total, grads


class OwnNorm(AnyWidth):
    """Each drawn width has a scale and a shift of its own for every batch norm; these learn from its passes alone."""

    def __init__(self, model: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__(model, *args, **options)
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self.norms = [p for m in norms for p in (m.weight, m.bias)]
        self.own: dict[Bits, list[Tensor]] = {}

    def put(self, values: list[Tensor]) -> None:
        """Put numbers into the model's batch norms."""
        for p, value in zip(self.norms, values, strict=True):
            p.data.copy_(value)

    def near(self, bits: Bits) -> list[Tensor]:
        """Return the numbers of the width that is nearest among those that were drawn."""
        reach = min(8, bits.activations)
        nearest = min(self.own, key=lambda w: abs(w.weights - bits.weights) + abs(w.activations - reach))
        return self.own[nearest]

    def _quantized_pass(self, parts: Any, parameters: Any, scaler: Any) -> Any:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self._steps)
        bits = self.widths[int(torch.randint(len(self.widths), (), generator=generator))]
        shared = [p.detach().clone() for p in self.norms]
        own = self.own.setdefault(bits, [p.detach().clone() for p in self.norms])
        self.put(own)
        try:
            total, grads = super()._quantized_pass(parts, parameters, scaler)
        finally:
            self.put(shared)
        where = {id(p): i for i, p in enumerate(parameters)}
        for p, value in zip(self.norms, own, strict=True):
            g = grads[where[id(p)]]
            if g is not None:
                value.sub_(g, alpha=RATE)
                grads[where[id(p)]] = None
        return total, grads


def changed(kind: type[AnyWidth], **options: Any) -> Make:
    """Return what makes a changed objective."""
    return lambda model, x: kind(model, x, **{"strength": 0.5, **options})


def beside(*parts: Make) -> Make:
    """Return what makes several penalties that add up."""
    return lambda model, x: Sum([made for part in parts if (made := part(model, x)) is not None])


def kurtosis(strength: float) -> Make:
    """Return what makes the kurtosis penalty."""
    return lambda model, x: KurtosisPenalty(model, strength=strength)


def l1(strength: float, every: int = 1) -> Make:
    """Return what makes the penalty of the paper."""
    return lambda model, x: GradientPenalty(model, weight=strength, activation=strength, every=every)


class Trial(NamedTuple):
    """One way to go on: what it is, what makes its objective, how much of an average of weights a step keeps."""

    what: str
    make: Make
    average: float | None = None
    epochs: int = 1
    plain: int = 0
    """Epochs from scratch that come first, by the loss alone; with none it goes on from the shared start."""
    rate: float = RATE


def nothing(model: nn.Module, x: Tensor) -> None:
    """Stand for no objective but the loss."""


AVERAGED = 0.99
BEST = beside(any_width(strength="auto"), kurtosis(0.1))
TRIALS = {
    "plain": Trial("no objective but the loss", nothing),
    "start": Trial("any-width, strength 0.5, gradients cut to twice the usual length", any_width()),
    "limit 5": Trial("gradients are cut to 5 times the usual length", any_width(limit=5.0)),
    "limit 5, strength 0.25": Trial("the same, half as strong", any_width(limit=5.0, strength=0.25)),
    "no limit": Trial("long gradients are not cut", any_width(limit=math.inf)),
    "no limit, given ends": Trial(
        "the same, and no gradient reaches the ends of weight ranges", any_width(limit=math.inf, stretches=False)
    ),
    "auto": Trial("the strength follows the loss", any_width(strength="auto")),
    "2 bits": Trial("W2A8 is drawn too, once in nine steps", any_width(widths=(*WIDTHS, "W2A8"))),
    "kurtosis 0.1": Trial("kurtosis on top", beside(any_width(), kurtosis(0.1))),
    "averaged weights": Trial("an average of the weights over the last steps", any_width(), AVERAGED),
    "l1 + kurtosis": Trial("the default objective before this one", beside(l1(3e-4), kurtosis(0.3))),
    "l1 every fourth": Trial("the l1 penalty on top, at every fourth step", beside(any_width(), l1(3e-4, 4))),
    "two passes": Trial(
        "two quantized passes, each half as strong", beside(any_width(strength=0.25), any_width(strength=0.25, seed=1))
    ),
    "paper grids only": Trial("only the paper's grids are drawn", any_width(grids=("paper",))),
    "default grids only": Trial("only the default preset's grids are drawn", any_width(grids=("default",))),
    "averaged, auto": Trial(
        "an average of the weights, the strength follows the loss", any_width(strength="auto"), AVERAGED
    ),
    "averaged, auto, kurtosis 0.1": Trial(
        "an average of the weights, the strength follows the loss, kurtosis on top: the default", BEST, AVERAGED
    ),
    "averaged, auto, kurtosis 0.3": Trial(
        "the same with three times the kurtosis", beside(any_width(strength="auto"), kurtosis(0.3)), AVERAGED
    ),
    "averaged, plain": Trial("an average of the weights, no objective but the loss", nothing, AVERAGED),
    "no conflict": Trial("what works against the loss's gradient is taken out", changed(Gentle)),
    "averaged, auto, kurtosis 0.1, no conflict": Trial(
        "the default, and what works against the loss's gradient is taken out",
        beside(changed(Gentle, strength="auto"), kurtosis(0.1)),
        AVERAGED,
    ),
    "own batch norm": Trial("each width has its own scale and shift of batch norm", changed(OwnNorm)),
    "averaged 0.997, auto, kurtosis 0.1": Trial(
        "the default with an average that reaches back three times as far", BEST, 0.997
    ),
    "six epochs, plain": Trial("no objective but the loss, six epochs", nothing, epochs=6),
    "six epochs": Trial("the default, six epochs", BEST, AVERAGED, epochs=6),
    **{
        f"rate {rate:g}{name}": Trial(f"{what}, learning rate {rate:g}", make, average, rate=rate)
        for rate in (0.005, 0.001)
        for name, what, make, average in (
            (", plain", "no objective but the loss", nothing, None),
            ("", "the default", BEST, AVERAGED),
        )
    },
    "from scratch, plain": Trial("15 epochs from scratch, no objective but the loss", nothing, epochs=5, plain=10),
    "from scratch": Trial("15 epochs from scratch, the default in the last five", BEST, AVERAGED, epochs=5, plain=10),
}


def fine_tune(name: str, model: nn.Module, data: Dataset, steps: int | None = None) -> dict[str, float]:
    """Train in place; return the time per step of the part that is tried, and the last strength."""
    trial = TRIALS[name]
    torch.manual_seed(0)
    split = data.train
    batches = Batches(split, BATCH, generator=torch.Generator().manual_seed(0), augment=data.augment)
    peak, decay = (FRESH_RATE, FRESH_DECAY) if trial.plain else (trial.rate, DECAY)
    for module in model.modules() if trial.plain else ():
        getattr(module, "reset_parameters", lambda: None)()
    optimizer = torch.optim.SGD(model.parameters(), lr=peak, momentum=0.9, weight_decay=decay, nesterov=True)
    total, warmup = (trial.plain + trial.epochs) * len(batches), len(batches) if trial.plain else 0
    average: dict[str, Tensor] | None = None
    objective: Penalty | None = None
    number, spent, losses, last = 0, 0.0, [], None
    model.train()
    for epoch in range(trial.plain + trial.epochs):
        if epoch == trial.plain:
            objective, spent = trial.make(model, split.x[:2]), 0.0
            if trial.average is not None:
                average = {key: value.clone() for key, value in model.state_dict().items()}
        for x, y in batches:
            x = x.contiguous(memory_format=torch.channels_last)
            rate = learning_rate(number, steps=total, peak=peak, warmup=warmup, shape="cosine")
            optimizer.param_groups[0]["lr"] = rate

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
            if average is not None and trial.average is not None:
                for key, value in model.state_dict().items():
                    average[key] = average[key].lerp(value, 1 - trial.average) if value.is_floating_point() else value
            if steps and number % steps == 0:
                break
    if average is not None:
        model.load_state_dict(average)
    OWN[:] = [objective] if isinstance(objective, OwnNorm) else []
    tried = number * trial.epochs / (trial.plain + trial.epochs)
    found = {"seconds_per_step": spent / tried, "train_loss": sum(losses[-100:]) / len(losses[-100:])}
    strength = None if last is None else last.terms.get("strength")
    return found if strength is None else {**found, "strength": strength}


OWN: list[OwnNorm] = []
"""The objective whose widths have batch norms of their own, if the last trial had one."""


def swept(model: nn.Module, data: Dataset, options: dict[str, Any], widths: Any, batches: Batches) -> list[Any]:
    """Return a row for each width of a network whose widths may have batch norms of their own."""
    rows: list[Any] = []
    for group in [[pair] for pair in widths] if OWN else [widths]:
        shared = [p.detach().clone() for own in OWN for p in own.norms]
        for own in OWN:
            own.put(shared if Bits(*group[0]) == Bits(FLOAT, FLOAT) else own.near(Bits(*group[0])))
        net = prepare(model, data.validation.x[:2], input_range=data.input_range, **options)
        rows += sweep(net, batches, widths=group)
        for own in OWN:
            own.put(shared)
    return rows


def measure(model: nn.Module, data: Dataset) -> dict[str, Any]:
    """Return the validation accuracy in floating point and at the widths of each setting, in percent."""
    model.eval()
    batches = Batches(data.validation.first(VALIDATED), 250)
    found: dict[str, Any] = {}
    for name, (options, widths) in SETTINGS.items():
        rows = swept(model, data, options, widths, batches)
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
    parser.add_argument("--steps", type=int, help="of each epoch, to try the program")
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
        values["trials"][name] = {"what": TRIALS[name].what, **seen, **measure(model, data), "origin": origin()}
        write_json(args.out, values)
        print(name, {k: v for k, v in values["trials"][name].items() if k != "origin"}, flush=True)


if __name__ == "__main__":
    main()
