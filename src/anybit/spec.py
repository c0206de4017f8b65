"""The frozen value types that everything else speaks in: `Bits`, `QuantSpec`, `Range`, `Row`.

Nothing in here knows torch: the runtime without PyTorch uses the same types.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from anybit.common.strict import from_mapping
from anybit.common.text import printable, quoted
from anybit.errors import SpecError

FLOAT = 32
"""The width that means "leave in floating point"."""

NARROWEST, WIDEST = 2, 16


def check_width(bits: int, what: str = "bits") -> int:
    """Return `bits` if a tensor can be stored at that width, else say what would work.

    >>> check_width(4)
    4
    >>> check_width(1)
    Traceback (most recent call last):
    anybit.errors.SpecError: bits must be 2 to 16, or 32 for floating point; got 1: use 2 for ternary
    """
    if isinstance(bits, bool) or not isinstance(bits, int):
        raise SpecError(f"{what} must be a whole number, got {quoted(bits)}")
    if bits == FLOAT or NARROWEST <= bits <= WIDEST:
        return bits
    hint = ": use 2 for ternary" if bits == 1 else ""
    raise SpecError(f"{what} must be {NARROWEST} to {WIDEST}, or {FLOAT} for floating point; got {quoted(bits)}{hint}")


@dataclass(frozen=True, order=True)
class Bits:
    """A pair of widths, one for the weights and one for the activations.

    >>> Bits(4, 8)
    Bits(weights=4, activations=8)
    >>> str(Bits(4, 8)), str(Bits(32, 32))
    ('W4A8', 'FP')
    >>> Bits.parse("w4a8") == Bits.parse("4,8") == Bits(4, 8)
    True
    """

    weights: int = FLOAT
    activations: int = FLOAT

    def __post_init__(self) -> None:
        check_width(self.weights, "weights")
        check_width(self.activations, "activations")

    @classmethod
    def parse(cls, text: str) -> Bits:
        """Read `"w4a8"`, `"4,8"`, or `"fp"`."""
        if text.strip().lower() in ("fp", "fp32", "float"):
            return cls()
        match = re.fullmatch(r"\s*[wW]?(\d{1,9})\s*(?:[aA]|,|/)\s*(\d{1,9})\s*", text)
        if match is None:
            raise SpecError(f"a pair of widths looks like W4A8 or 4,8 (or FP); got {text[:60]!r}")
        return cls(int(match[1]), int(match[2]))

    @classmethod
    def of(cls, value: object, what: str = "widths are") -> Bits:
        """Return widths given as a pair of numbers, as a text such as "W4A8", or as `Bits`.

        >>> Bits.of((4, 8)) == Bits.of("W4A8") == Bits.of(Bits(4, 8))
        True
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        if isinstance(value, tuple | list) and len(value) == 2:
            return cls(*value)
        raise SpecError(f'{what} a pair (weights, activations) such as (8, 8) or "W8A8"; got {value!r:.60}')

    @classmethod
    def asked(cls, pair: Bits | str | tuple[int, int] | None, weights: int | None, activations: int | None) -> Bits:
        """Return widths that are given as a pair or one by one.

        >>> Bits.asked("W4A8", None, None) == Bits.asked(None, 4, 8)
        True
        """
        if pair is not None and weights is None and activations is None:
            return cls.of(pair)
        if pair is not None or weights is None or activations is None:
            raise SpecError('widths are "W4A8", or weights=4 and activations=8, both of them')
        return cls(weights, activations)

    def __str__(self) -> str:
        if self.weights == self.activations == FLOAT:
            return "FP"
        return f"W{self.weights}A{self.activations}"


Widths = Iterable["Bits | str | tuple[int, int]"] | str
"""Pairs of widths, each given as a pair of numbers, a text such as "W4A8", or `Bits`; or all in one text."""


def widths_of(widths: Widths) -> list[Bits]:
    """Return pairs of widths as values.

    >>> widths_of(["FP", (8, 8)]) == widths_of("FP W8A8") == widths_of("FP,W8A8")
    True
    """
    if isinstance(widths, str):
        widths = [word for word in re.split(r"[\s,]+(?=[a-zA-Z])|\s+", widths) if word]
    elif isinstance(widths, Bits) or not isinstance(widths, Iterable):
        raise SpecError(
            'widths are a list of pairs (weights, activations), such as [(8, 8), (4, 4)] or "W8A8 W4A4"; got '
            f"{widths!r:.60}"
        )
    if not (pairs := [Bits.of(width, "each of the widths is") for width in widths]):
        raise SpecError("at least one pair of widths is needed, such as (8, 8)")
    return pairs


LayerWidths = Mapping[str, Bits | tuple[int, int]]
"""Widths of some layers, by name or pattern, as (weights, activations)."""


def layer_bits(layers: LayerWidths | None) -> dict[str, Bits]:
    """Return the widths by pattern, checked.

    >>> layer_bits({"layer4.*": (8, 8)})
    {'layer4.*': Bits(weights=8, activations=8)}
    >>> layer_bits({"layer4.*": 8})
    Traceback (most recent call last):
    anybit.errors.SpecError: the widths of 'layer4.*' are a pair (weights, activations) such as (8, 8) or "W8A8"; got 8
    """
    return {pattern: Bits.of(pair, f"the widths of {pattern!r} are") for pattern, pair in (layers or {}).items()}


def names_point(pattern: str, name: str, *, weight: bool) -> bool:
    """Tell whether a pattern names a point, or the layer that a weight belongs to.

    >>> names_point("conv1", "conv1.weight", weight=True), names_point("conv1", "conv1.relu", weight=False)
    (True, False)
    """
    return fnmatchcase(name, pattern) or (weight and fnmatchcase(name.rpartition(".")[0], pattern))


@dataclass(frozen=True)
class QuantSpec:
    """How one tensor is put on a uniform grid.

    `symmetric` grids have zero in the middle and drop the lowest code, so that `-x` is representable whenever
    `x` is; `signed=False` is for tensors that are never negative (after a ReLU). `axis` is the dimension that
    gets a scale of its own per index, or `None` for one scale per tensor.

    >>> QuantSpec(bits=4).levels
    (-7, 7)
    >>> QuantSpec(bits=4, signed=False).levels, QuantSpec(bits=4, symmetric=False).levels
    ((0, 15), (0, 15))
    """

    bits: int
    symmetric: bool = True
    signed: bool = True
    axis: int | None = None

    def __post_init__(self) -> None:
        check_width(self.bits)

    @property
    def levels(self) -> tuple[int, int]:
        """The lowest and the highest code."""
        if self.bits == FLOAT:
            raise SpecError("a tensor in floating point has no levels; check `bits` before asking")
        if self.symmetric and self.signed:
            high = 2 ** (self.bits - 1) - 1
            return -high, high
        return 0, 2**self.bits - 1


@dataclass(frozen=True)
class Range:
    """The interval that a tensor is expected to stay in, and where that expectation came from.

    >>> Range(0.0, 2.5, "batch norm")
    Range(low=0.0, high=2.5, source='batch norm')
    >>> Range(1.0, -1.0, "typo")
    Traceback (most recent call last):
    anybit.errors.SpecError: a range goes from low to high, both finite; got 1.0 to -1.0 (typo)
    """

    low: float
    high: float
    source: str

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high):
            raise SpecError(
                f"a range goes from low to high, both finite; got {self.low} to {self.high} "
                f"({printable(self.source, 60)})"
            )

    def __str__(self) -> str:
        return f"[{self.low:.4g}, {self.high:.4g}]"


@dataclass(frozen=True)
class Row:
    """One measurement: this network at these widths scored this much on so many examples.

    `accuracy` is the value of the metric, whatever that is called.
    """

    label: str
    seed: int
    weights: int
    activations: int
    accuracy: float
    loss: float | None
    """Mean cross-entropy, where there are classes."""
    n: int
    kl: float | None = None
    """Mean Kullback-Leibler divergence from the floating-point predictions to these, in nats."""
    metric: str = "accuracy"

    def __post_init__(self) -> None:
        if self.n < 1:
            raise SpecError(f"a row is measured on at least one example, got n={self.n}")

    @property
    def bits(self) -> Bits:
        """The widths as one value."""
        return Bits(self.weights, self.activations)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Row:
        """Read what `to_dict` wrote; unknown or missing fields and wrong types are an error that names them."""
        return from_mapping(cls, values, error=SpecError)
