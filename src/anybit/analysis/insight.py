"""What the report lets one play with: every pair of widths, sizes, layers, gradients, and examples that flip.

Accuracies are of the first test examples; widths per layer are chosen on the validation split, as everything that
is chosen is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybit.analysis.figures.first_order import correlation, induced_loss
from anybit.analysis.figures.gradient_norms import gradient_norms
from anybit.common.progress import Start, quiet
from anybit.data import Batches, Dataset, Split
from anybit.errors import SpecError
from anybit.evaluate.accuracy import evaluate
from anybit.evaluate.examples import choose_examples, first_flips, thumbnails
from anybit.evaluate.sweep import Prediction, predictions
from anybit.objectives.quantizable import quantizable_weights
from anybit.quant.allocate import bounds
from anybit.quant.network import QuantizedNetwork
from anybit.quant.points import WeightPoint
from anybit.report.insight import Budget, Cell, Example, FirstOrder, Insight, Layer, LayerWidth
from anybit.spec import FLOAT, Bits

T = TypeVar("T")

NARROW = (2, 3, 4, 5, 6, 7, 8)
WIDTHS = (*NARROW, FLOAT)
BUDGETS = (3.0, 4.0, 5.0, 6.0)
"""Bits per weight on average."""
ACTIVATIONS = 8
"""The width of activations beside weights of mixed widths."""

EXAMPLES = 1000
POINTS = 50
"""Batches behind a scatter: one point each."""
PICTURES = 24
CHOSEN_ON = 512
"""Validation examples that widths per layer are chosen on."""


@dataclass(frozen=True)
class Subject:
    """A network that was prepared, the one it was made of, its data, and what to call it."""

    net: QuantizedNetwork
    model: nn.Module
    dataset: Dataset
    label: str
    seed: int = 0

    @property
    def weight_points(self) -> list[WeightPoint]:
        """The weights, in the order of the network."""
        return [point for point in self.net.points if isinstance(point, WeightPoint)]


def measure_insight(
    subject: Subject, *, examples: int = EXAMPLES, origin: dict[str, Any] | None = None, start: Start = quiet
) -> Insight:
    """Measure everything on the first so many test examples; the network's widths are not changed."""
    if examples < 1:
        raise SpecError(f"an insight needs one test example or more, got {examples}")
    test = _first(subject.dataset.test, examples)
    chosen_on = Batches(_first(subject.dataset.validation, CHOSEN_ON), 128)
    batch = max(1, len(test) // POINTS)
    parts, large = Batches(test, batch), Batches(test, 500)
    advance = start("insight", len(WIDTHS) ** 2 + len(NARROW) + len(BUDGETS) + 1)
    pairs = [(w, a) for w in WIDTHS for a in WIDTHS]
    found = list(_counted(predictions(subject.net, large, pairs), advance))
    subject.model.eval()
    (about_layers,) = _counted([layers(subject, chosen_on)], advance)
    norms = [gradient_norms(subject.model, x, y) for x, y in parts]
    induced = _counted((first_order(subject, parts, bits) for bits in NARROW), advance)
    budgets = _counted((budgeted(subject, budget, chosen_on, large) for budget in BUDGETS), advance)
    return Insight(
        label=subject.label,
        seed=subject.seed,
        data=subject.dataset.name,
        classes=_classes(subject.dataset, found[0].logits.shape[1]),
        n=len(test),
        batch=batch,
        widths=WIDTHS,
        grid=tuple(_cell(prediction) for prediction in found),
        sizes=tuple(size(subject.net, bits) for bits in WIDTHS),
        narrow=NARROW,
        layers=about_layers,
        budgets=tuple(itertools.chain.from_iterable(budgets)),
        weights=sum(weight.numel() for weight in quantizable_weights(subject.model).values()),
        l1=tuple(l1 for l1, _ in norms),
        l2=tuple(l2 for _, l2 in norms),
        first_order=tuple(induced),
        examples=tuple(flipping(found, thumbnails(test.tensors()[0]))),
        origin=origin or {},
    )


def _counted(values: Iterable[T], advance: Callable[[int], None]) -> Iterator[T]:
    """Move a progress bar on after each value."""
    for value in values:
        yield value
        advance(1)


def _first(split: Split, count: int) -> Split:
    """Return the first examples in memory: they are gone through once for every pair of widths."""
    return Split(*split.first(count).tensors())


def _classes(dataset: Dataset, outputs: int) -> tuple[str, ...]:
    """Return a name for every output; a network may have more of them than the data has classes."""
    return (*dataset.classes, *(f"output {index}" for index in range(len(dataset.classes), outputs)))


def _cell(prediction: Prediction) -> Cell:
    row = prediction.row("", 0)
    return Cell(row.weights, row.activations, row.accuracy, row.loss, row.kl or 0.0)


def size(net: QuantizedNetwork, bits: int | dict[str, int]) -> int:
    """Return the bytes of a network with its weights at a width, or each at its own, and the rest in 32 bits.

    Points that never go below some width are counted at that width. Scales and the file's own structure are left out.
    """
    points = [point for point in net.points if isinstance(point, WeightPoint)]
    widths = {p.name: max(bits if isinstance(bits, int) else bits[p.name], p.floor) for p in points}
    masters = {id(point.master) for point in points}
    tensors = [*net.parameters(), *net.buffers()]
    rest = {id(t): t.numel() for t in tensors if id(t) not in masters and t.is_floating_point()}
    return sum(-(-p.master.numel() * widths[p.name] // 8) for p in points) + 4 * sum(rest.values())


def first_order(subject: Subject, batches: Iterable[tuple[Tensor, Tensor]], bits: int) -> FirstOrder:
    """Round all weights to a width: the change of each batch's loss as the gradient predicts it, and as it is."""
    net, points = subject.net, subject.weight_points
    with net.at(weights=bits, activations=FLOAT), torch.no_grad():
        shifts = [point.quantized() - point.master for point in points]
    masters = [point.master for point in points]
    with net.at(weights=FLOAT, activations=FLOAT):
        pairs = [induced_loss(net, masters, shifts, x, y) for x, y in batches]
    predicted, measured = (tuple(side) for side in zip(*pairs, strict=True))
    return FirstOrder(bits, predicted, measured, correlation(predicted, measured))


def layers(subject: Subject, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[Layer, ...]:
    """Return every quantization point with its range and, for weights, the first-order bound at each narrow width."""
    found = bounds(subject.net, batches, NARROW)
    table = []
    for point, entry in zip(subject.net.points, subject.net.plan, strict=True):
        known = entry.range
        table.append(
            Layer(
                name=entry.name,
                kind=entry.kind,
                shape="x".join(map(str, entry.shape)),
                floor=point.floor,
                source=known.source if known else "",
                low=known.low if known else None,
                high=known.high if known else None,
                bounds=tuple(found.get(entry.name, ())),
            )
        )
    return tuple(table)


def budgeted(
    subject: Subject,
    budget: float,
    chosen_on: Iterable[tuple[Tensor, Tensor]],
    test: Iterable[tuple[Tensor, Tensor]],
) -> list[Budget]:
    """Choose widths per layer under a budget and measure them; nothing where layers kept wide make it impossible."""
    net = subject.net
    try:
        best = net.allocate(budget=budget, loader=chosen_on, activations=ACTIVATIONS, widths=NARROW)
    except SpecError:
        return []
    widths = {name: bits.weights for name, bits in best.layers.items()}
    with net.at(weights=NARROW[-1], activations=ACTIVATIONS, layers=best.layers):
        accuracy = evaluate(net, test).accuracy
    return [
        Budget(
            budget=budget,
            average_bits=best.average_bits,
            size=size(net, widths),
            predicted=best.predicted,
            loss=best.loss,
            measured=best.measured,
            activations=ACTIVATIONS,
            accuracy=accuracy,
            layers=tuple(LayerWidth(name, bits) for name, bits in widths.items()),
        )
    ]


def flipping(found: Sequence[Prediction], pictures: Sequence[str] | None, count: int = PICTURES) -> list[Example]:
    """Return the examples whose prediction flips, at as many equal widths of weights and activations as possible."""
    classes = torch.stack([prediction.logits.argmax(1) for prediction in found])
    sure = torch.stack([F.softmax(prediction.logits.double(), 1).amax(1) for prediction in found])
    places = {prediction.bits: index for index, prediction in enumerate(found)}
    equal = [places[bits] for width in reversed(NARROW) if (bits := Bits(width, width)) in places]
    reference, labels = found[0].reference.argmax(1), found[0].labels
    chosen = choose_examples(first_flips(classes[equal], reference), count, never=len(equal))
    return [
        Example(
            index=index,
            label=int(labels[index]),
            predicted=tuple(classes[:, index].tolist()),
            confidence=tuple(round(value, 4) for value in sure[:, index].tolist()),
            image=pictures[index] if pictures else None,
        )
        for index in chosen
    ]
