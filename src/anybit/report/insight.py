"""What the page shows and rows cannot say: every pair of widths, sizes, layers, gradients, examples.

`anybit sweep` writes it beside the rows. It is read strictly: a page is only as good as what is in it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anybit.common.files import read_json, write_json
from anybit.common.strict import from_mapping
from anybit.errors import FileError, RecipeError, SpecError
from anybit.spec import Bits, check_width

FORMAT = "anybit-insight/1"

PICTURE = re.compile(r"data:image/png;base64,[A-Za-z0-9+/]+=*\Z")


def _finite(what: str, values: Iterable[float]) -> None:
    if not all(map(math.isfinite, values)):
        raise SpecError(f"{what} must be finite numbers")


def _same(what: str, *lengths: int) -> None:
    if len(set(lengths)) > 1:
        raise SpecError(f"{what} must be equally many, got {' and '.join(map(str, lengths))}")


@dataclass(frozen=True)
class Cell:
    """One pair of widths, measured."""

    weights: int
    activations: int
    accuracy: float
    loss: float
    kl: float

    def __post_init__(self) -> None:
        Bits(self.weights, self.activations)
        _finite("accuracy, loss and kl", (self.accuracy, self.loss, self.kl))
        if not 0 <= self.accuracy <= 1:
            raise SpecError(f"accuracy is from 0 to 1, got {self.accuracy}")


@dataclass(frozen=True)
class Layer:
    """One quantization point. `bounds` holds the first-order bound on the loss at each narrow width, for weights."""

    name: str
    kind: str
    shape: str
    floor: int
    source: str = ""
    low: float | None = None
    high: float | None = None
    bounds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _finite("low, high and bounds", [*self.bounds, *(v for v in (self.low, self.high) if v is not None)])


@dataclass(frozen=True)
class LayerWidth:
    """The width of one weight."""

    name: str
    bits: int


@dataclass(frozen=True)
class Budget:
    """Widths per layer under a budget of bits per weight, chosen on the validation split, and what they come to."""

    budget: float
    average_bits: float
    size: int
    """Bytes of the network, weights at their widths and the rest in 32 bits."""
    predicted: float
    """The first-order bound on the growth of the validation loss."""
    loss: float
    measured: float
    """The validation loss in floating point, and at these widths."""
    activations: int
    accuracy: float
    """On the same test examples as the grid."""
    layers: tuple[LayerWidth, ...]

    def __post_init__(self) -> None:
        _finite("a budget's numbers", (self.budget, self.average_bits, self.predicted, self.loss, self.measured))
        if not 0 <= self.accuracy <= 1:
            raise SpecError(f"accuracy is from 0 to 1, got {self.accuracy}")


@dataclass(frozen=True)
class FirstOrder:
    """Change of the loss of each test batch when all weights are rounded: predicted by the gradient, and measured."""

    bits: int
    predicted: tuple[float, ...]
    measured: tuple[float, ...]
    correlation: float

    def __post_init__(self) -> None:
        check_width(self.bits)
        _same("predicted and measured", len(self.predicted), len(self.measured))
        _finite("predicted, measured and correlation", (*self.predicted, *self.measured, self.correlation))


@dataclass(frozen=True)
class Example:
    """One test example, with the predicted class and its probability at each cell of the grid."""

    index: int
    label: int
    predicted: tuple[int, ...]
    confidence: tuple[float, ...]
    image: str | None = None

    def __post_init__(self) -> None:
        _same("predicted and confidence", len(self.predicted), len(self.confidence))
        _finite("confidence", self.confidence)
        if self.image is not None and not PICTURE.match(self.image):
            raise SpecError(f"image must be a PNG in a data: address, got {self.image[:40]!r}")


@dataclass(frozen=True)
class Insight:
    """Everything about one network that the page lets one play with."""

    label: str
    seed: int
    data: str
    classes: tuple[str, ...]
    n: int
    batch: int
    """Test examples of the grid, and of each batch behind a point of the scatters."""
    widths: tuple[int, ...]
    """Of weights and of activations, narrowest first; the grid has every pair of them."""
    grid: tuple[Cell, ...]
    sizes: tuple[int, ...]
    """Bytes of the network at each width of the weights."""
    narrow: tuple[int, ...]
    """The widths of the layers' bounds."""
    layers: tuple[Layer, ...]
    budgets: tuple[Budget, ...]
    weights: int
    """How many there are."""
    l1: tuple[float, ...]
    l2: tuple[float, ...]
    """Norms of the gradient over all weights, batch by batch."""
    first_order: tuple[FirstOrder, ...]
    examples: tuple[Example, ...]
    origin: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for width in (*self.widths, *self.narrow):
            check_width(width)
        _same("widths and sizes", len(self.widths), len(self.sizes))
        _same("l1 and l2", len(self.l1), len(self.l2))
        _finite("l1 and l2", (*self.l1, *self.l2))
        for example in self.examples:
            _same("predictions of an example and cells of the grid", len(example.predicted), len(self.grid))
            if not all(0 <= index < len(self.classes) for index in (*example.predicted, example.label)):
                raise SpecError(f"example {example.index} names a class that is not one of {len(self.classes)}")
        for layer in self.layers:
            if layer.bounds:
                _same(f"bounds of {layer.name} and narrow widths", len(layer.bounds), len(self.narrow))


def insight_path(rows: Path) -> Path:
    """Return where the insight of a file of rows is.

    >>> str(insight_path(Path("a/rows.json"))), str(insight_path(Path("a/wide.json")))
    ('a/insight.json', 'a/wide.insight.json')
    """
    return rows.with_name("insight.json" if rows.name == "rows.json" else f"{rows.stem}.insight.json")


def to_dict(insight: Insight) -> dict[str, Any]:
    """Return plain values, ready for JSON, without what is not known."""

    def known(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {key: value for key, value in pairs if value is not None}

    return dataclasses.asdict(insight, dict_factory=known)


def write_insight(path: str | Path, insight: Insight) -> None:
    """Write an insight as JSON, at once."""
    write_json(path, {"format": FORMAT, **to_dict(insight)})


def read_insight(path: str | Path) -> Insight:
    """Read what `write_insight` wrote; an error names the file and the entry."""
    what = "insight.json of a run"
    values = read_json(path, what=what)
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise FileError(f"{path}: not in the format {FORMAT!r}; {what} is expected here")
    origin = values.pop("origin", {})
    if not isinstance(origin, dict):
        raise FileError(f"{path}: origin must be a table; {what} is expected here")
    try:
        return dataclasses.replace(from_mapping(Insight, values), origin=origin)
    except (RecipeError, SpecError) as error:
        raise FileError(f"{path}: {error}; write it again with: anybit sweep") from error
