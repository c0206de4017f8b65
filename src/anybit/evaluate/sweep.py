"""`sweep`: one network, many widths, one row each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybit.errors import DataError, SpecError
from anybit.evaluate.batches import Batch, Takes
from anybit.evaluate.metric import Function, Metric, classes, metric_of, plain, usual
from anybit.simulate.capture import evaluating
from anybit.simulate.network import QuantizedNetwork
from anybit.spec import Bits, Row, Widths, widths_of

Run = Callable[[Batch], Any]


@dataclass
class Total:
    """What one pass over a loader comes to, batch by batch."""

    metric: Metric | None
    sums: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    loss: float = 0.0
    kl: float = 0.0
    n: int = 0
    labelled: bool = True
    marks: list[str] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    """In floating point, as far as other widths are compared with them."""

    def add(self, outputs: Any, batch: Batch, reference: Any) -> None:
        """Count a batch in; without a metric the usual one is chosen by the first."""
        if self.metric is None:
            self.metric = usual(outputs, batch.targets)
        if batch.targets is None and not self.metric.floats:
            raise DataError(f"{self.metric.name} needs targets, and the loader has none; take metric='agreement'")
        against = reference if self.metric.floats else batch.targets
        part = self.metric.add(outputs, against)
        self.sums = part if not self.n else self.sums + part
        n, logits = len(batch), plain(outputs)
        if _has_classes(logits):
            self.kl += n * kl_divergence(plain(reference), logits)
        self.labelled &= _has_classes(logits) and _are_classes(batch.targets, logits)
        if self.labelled:
            self.loss += n * float(F.cross_entropy(logits.double(), classes(batch.targets, logits)))
        self.n += n
        self.marks.append(batch.mark())

    def row(self, bits: Bits, label: str, seed: int, kl: bool) -> Row:
        """Return it as a row."""
        assert self.metric is not None
        return Row(
            label,
            seed,
            bits.weights,
            bits.activations,
            self.metric.done(self.sums),
            self.loss / self.n if self.labelled else None,
            self.n,
            self.kl / self.n if kl else None,
            self.metric.name,
        )


def _has_classes(logits: Any) -> bool:
    return isinstance(logits, Tensor) and logits.dim() == 2 and logits.shape[1] > 1 and logits.is_floating_point()


def _are_classes(targets: Any, logits: Tensor) -> bool:
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.is_complex():
        return False
    return targets.numel() == len(logits) or targets.shape == logits.shape


def measure(
    at: Callable[[Bits], Run],
    loader: Iterable[Any],
    takes: Takes,
    *,
    widths: Widths,
    metric: str | Metric | Function | None = None,
    label: str = "network",
    seed: int = 0,
    place: torch.device | None = None,
) -> Iterator[Row]:
    """Yield a row for each pair of widths; `at(bits)` returns what runs one batch at them, on the device `place`.

    The loader is gone through once in floating point and once for each other pair, in the same order each time.
    """
    pairs, place = widths_of(widths), place or torch.device("cpu")
    if isinstance(loader, Iterator) and pairs != [Bits()]:
        raise DataError("the loader can be gone through once only; pass a list of batches or a DataLoader")
    floats = Total(None if metric is None else metric_of(metric))
    run = at(Bits())
    for batch in (takes.split(part).to(place) for part in loader):
        outputs = run(batch)
        floats.add(outputs, batch, outputs)
        logits = _has_classes(plain(outputs))
        floats.outputs.append(outputs if logits or (floats.metric and floats.metric.floats) else None)
    if not floats.n:
        raise DataError("there is nothing to evaluate on: the loader yields no batch")
    kl = all(_has_classes(plain(outputs)) for outputs in floats.outputs)
    for bits in pairs:
        if bits == Bits():
            yield floats.row(bits, label, seed, kl)
            continue
        total, run = Total(floats.metric), at(bits)
        for part, reference in zip(loader, floats.outputs, strict=False):
            batch = takes.split(part).to(place)
            total.add(run(batch), batch, reference)
        if total.marks != floats.marks:
            raise DataError("the loader gives other examples, or another order, each time; pass one without shuffling")
        yield total.row(bits, label, seed, kl)


@torch.no_grad()
def evaluate(network: nn.Module, loader: Iterable[Any], *, metric: str | Metric | Function | None = None) -> Row:
    """Return how good a network is as it stands, quantized or not; it is in evaluation mode for the time being."""

    def run(batch: Batch) -> Any:
        return network(*batch.args, **batch.kwargs)

    with evaluating(network):
        (row,) = measure(
            lambda bits: run, loader, Takes.of(network), widths=["FP"], metric=metric, place=device_of(network)
        )
    return row


def device_of(network: nn.Module) -> torch.device:
    """Return where the parameters of a network are."""
    return next((p.device for p in network.parameters()), torch.device("cpu"))


def kl_divergence(reference: Tensor, logits: Tensor) -> float:
    """Return the mean of D(p‖q) over examples, p from the reference logits and q from the others, in nats.

    >>> kl_divergence(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 0.0]]))
    0.0
    """
    p, q = F.log_softmax(reference.double(), 1), F.log_softmax(logits.double(), 1)
    return float((p.exp() * (p - q)).sum(1).mean().clamp(min=0))


def sweep(
    net: QuantizedNetwork,
    loader: Iterable[Any],
    *,
    widths: Widths = "FP W8A8 W4A8 W4A4",
    metric: str | Metric | Function | None = None,
    label: str = "network",
    seed: int = 0,
    on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Return how good a network is at each pair of widths (weights, activations).

    `loader` is gone through once per width and once in floating point, in the same order each time: do not shuffle.
    Its batches are pairs (inputs, targets), longer tuples whose rest is left alone, dicts with the targets under
    "labels" or the like, or inputs alone. Afterwards the network is at the widths it was at before.

    Args:
        net: A network from `anybit.prepare`.
        loader: The batches.
        widths: Pairs such as (4, 8), or texts such as "W4A8".
        metric: "accuracy", "top-5 accuracy", "pixel accuracy", "mean IoU", "mean absolute error", "mean squared error",
            "agreement" and "relative error" (both with the network in floating point, so that no targets are needed),
            or a function of outputs and targets that returns a number for a batch, or a sum and a count. Without it:
            accuracy for classes, mean IoU for a class per pixel, agreement for inputs alone.
        label: What the rows are called.
        seed: The seed that the network was trained with.
        on_row: Called with each row as it is measured.
    """
    if not isinstance(net, QuantizedNetwork):
        raise SpecError(f"sweep takes a network from anybit.prepare(model, example_input), got {type(net).__name__}")
    before, layers = net.bits, net.layers
    place = device_of(net)

    def at(bits: Bits) -> Run:
        net.set_bits(weights=bits.weights, activations=bits.activations)
        return lambda batch: net(*batch.args, **batch.kwargs)

    rows = []
    try:
        with evaluating(net), torch.no_grad():
            takes = Takes.of(net)
            for row in measure(at, loader, takes, widths=widths, metric=metric, label=label, seed=seed, place=place):
                rows.append(row)
                if on_row is not None:
                    on_row(row)
    finally:
        net.set_bits(weights=before.weights, activations=before.activations, layers=layers)
    return rows
