"""How well a classifier does on labelled batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybit.errors import DataError
from anybit.evaluate.batches import Takes
from anybit.evaluate.metric import classes, plain
from anybit.simulate.capture import evaluating


@dataclass(frozen=True)
class Score:
    """Accuracy (0 to 1) and mean cross-entropy over n examples."""

    accuracy: float
    loss: float
    n: int


def score(logits: Tensor, labels: Tensor) -> Score:
    """Compare logits with labels.

    >>> score(torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1])).accuracy
    0.5
    """
    labels = classes(labels, logits)
    correct = int((logits.argmax(1) == labels).sum())
    loss = float(F.cross_entropy(logits.double(), labels))
    return Score(correct / len(labels), loss, len(labels))


@torch.no_grad()
def predict(network: nn.Module, loader: Iterable[Any]) -> tuple[Tensor, Tensor]:
    """Return the logits and labels of every example, with the network in evaluation mode for the time being."""
    takes = Takes.of(network)
    place = next((p.device for p in network.parameters()), torch.device("cpu"))
    pairs = []
    with evaluating(network):
        for batch in map(takes.split, loader):
            batch = batch.to(place)
            pairs.append((plain(network(*batch.args, **batch.kwargs)), batch.targets))
    if not pairs:
        raise DataError("there is nothing to evaluate on: the loader yields no batch")
    return torch.cat([p for p, _ in pairs]), torch.cat([y for _, y in pairs])


def evaluate(network: nn.Module, loader: Iterable[Any]) -> Score:
    """Return accuracy and loss of a network on labelled batches."""
    return score(*predict(network, loader))


def kl_divergence(reference: Tensor, logits: Tensor) -> float:
    """Return the mean of D(p‖q) over examples, p from the reference logits and q from the others, in nats.

    >>> kl_divergence(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 0.0]]))
    0.0
    """
    p, q = F.log_softmax(reference.double(), 1), F.log_softmax(logits.double(), 1)
    return float((p.exp() * (p - q)).sum(1).mean().clamp(min=0))
