"""`sweep`: one network, many widths, one row each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from anybit.errors import DataError, SpecError
from anybit.evaluate.accuracy import kl_divergence, predict, score
from anybit.simulate.network import QuantizedNetwork
from anybit.spec import Bits, Row


@dataclass(frozen=True)
class Prediction:
    """What a network says at one pair of widths, beside what it says in floating point and what is true."""

    bits: Bits
    logits: Tensor
    reference: Tensor
    labels: Tensor

    def row(self, label: str, seed: int) -> Row:
        """Return accuracy, loss and divergence from floating point."""
        s = score(self.logits, self.labels)
        kl = kl_divergence(self.reference, self.logits)
        return Row(label, seed, self.bits.weights, self.bits.activations, s.accuracy, s.loss, s.n, kl)


def predictions(
    net: QuantizedNetwork, loader: Iterable[tuple[Tensor, Tensor]], widths: Iterable[Bits | tuple[int, int]]
) -> Iterator[Prediction]:
    """Give the logits of every example at each pair of widths; `loader` is gone through once for each, and for floats.

    Afterwards the network is at the widths it was at before.
    """
    pairs = [w if isinstance(w, Bits) else Bits(*w) for w in widths]
    if not pairs:
        raise SpecError("a sweep needs at least one pair of widths, such as (8, 8)")
    with net.at(weights=32, activations=32):
        reference, labels = predict(net, loader)
    for bits in pairs:
        if bits == Bits():
            yield Prediction(bits, reference, reference, labels)
            continue
        with net.at(weights=bits.weights, activations=bits.activations):
            logits, again = predict(net, loader)
        if not torch.equal(again, labels):
            raise DataError("the loader gives other examples, or another order, each time; pass one without shuffling")
        yield Prediction(bits, logits, reference, labels)


def sweep(
    net: QuantizedNetwork,
    loader: Iterable[tuple[Tensor, Tensor]],
    *,
    widths: Iterable[Bits | tuple[int, int]],
    label: str = "network",
    seed: int = 0,
    on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Return accuracy, loss and divergence from floating point at each pair of widths (weights, activations).

    `loader` is gone through once per width and once in floating point, in the same order each time: do not shuffle.
    Afterwards the network is at the widths it was at before.
    """
    rows = []
    for prediction in predictions(net, loader, widths):
        row = prediction.row(label, seed)
        rows.append(row)
        if on_row is not None:
            on_row(row)
    return rows
