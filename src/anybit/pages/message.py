"""What rows come to: every run at every pair of widths, the differences between runs, and what to say first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from anybit.errors import SpecError
from anybit.pages.rows import SHARES, Summary, shown, summarize
from anybit.spec import Bits, Row

CLOSE = 1.0
"""Points of accuracy that one run may lose and still count as close to floating point."""


@dataclass(frozen=True)
class Results:
    """Runs and pairs of widths in the order in which they were measured, and what was found at each."""

    labels: tuple[str, ...]
    pairs: tuple[Bits, ...]
    found: dict[tuple[str, Bits], Summary]
    metric: str = "accuracy"

    @property
    def factor(self) -> int:
        """What values are multiplied by to be shown: shares are shown in percent."""
        return 100 if self.metric in SHARES else 1

    @property
    def unit(self) -> str:
        """What stands behind a shown value, and `points` behind a difference."""
        return "%" if self.metric in SHARES else ""

    def number(self, value: float) -> str:
        """Return a value without its unit, as tables show it."""
        return f"{100 * value:.1f}" if self.metric in SHARES else f"{value:.4g}"

    def gap(self, points: float) -> str:
        """Return a difference with its sign and unit."""
        return f"{signed(points)} points" if self.metric in SHARES else self.signed(points)

    def signed(self, points: float) -> str:
        """Return a difference with its sign."""
        return signed(points) if self.metric in SHARES else f"{points:+.3g}".replace("-", "−")

    @property
    def ends(self) -> tuple[float, float]:
        """Where a chart begins and ends: a share from 0 to 1, anything else where its values do, with zero."""
        if self.metric in SHARES:
            return 0.0, 1.0
        low, high = min(s.low for s in self.found.values()), max(s.high for s in self.found.values())
        return min(0.0, low), max(0.0, high) or 1.0

    def at(self, value: float) -> float:
        """Return where a value is between the ends, from 0 to 1."""
        low, high = self.ends
        return (value - low) / (high - low)

    @property
    def equal(self) -> list[Bits]:
        """The pairs with the same width for weights and activations, the widest first."""
        return sorted((bits for bits in self.pairs if bits.weights == bits.activations), reverse=True)

    def points(self, label: str, bits: Bits) -> float | None:
        """Return by how much a run is above the first one, of a share in points."""
        here, first = self.found.get((label, bits)), self.found.get((self.labels[0], bits))
        return self.factor * (here.mean - first.mean) if here and first else None

    def gaps(self, pairs: Sequence[Bits]) -> list[tuple[float, str, Bits]]:
        """Return how far each other run is from the first one at each pair, where both were measured."""
        every = [(self.points(label, bits), label, bits) for bits in pairs for label in self.labels[1:]]
        return [(points, label, bits) for points, label, bits in every if points is not None]


def results(rows: Sequence[Row]) -> Results:
    """Return what rows come to, mean and spread over seeds."""
    if not rows:
        raise SpecError("a report needs at least one row, as anybit.sweep returns them")
    if len(metrics := sorted({row.metric for row in rows})) > 1:
        raise SpecError(f"rows of {' and of '.join(metrics)} do not belong on one page; report them apart")
    (most, times), *_ = Counter((row.label, row.seed, row.bits) for row in rows).most_common(1)
    if times > 1:
        label, seed, bits = most
        raise SpecError(
            f"{times} rows are of {label!r}, seed {seed}, at {bits}; give each run a label of its own, "
            'as in anybit.sweep(net, loader, label="mine")'
        )
    found = {(s.label, s.bits): s for s in summarize(rows)}
    labels, pairs = (tuple(dict.fromkeys(key[part] for key in found)) for part in (0, 1))
    return Results(tuple(map(str, labels)), tuple(b for b in pairs if isinstance(b, Bits)), found, metrics[0])


@dataclass(frozen=True)
class Message:
    """What a page opens with: a headline, a few sentences, and the pair of widths that they are about."""

    head: str
    more: tuple[str, ...]
    bits: Bits


def signed(points: float, digits: int = 1) -> str:
    """Return a difference with its sign; a rounded zero has none.

    >>> signed(18.64), signed(-0.4), signed(-0.04)
    ('+18.6', '−0.4', '0.0')
    """
    text = f"{points:+.{digits}f}"
    return text.replace("-", "−") if float(text) else f"{0:.{digits}f}"


def message(results: Results) -> Message:
    """Return what to say first: of several runs where they differ most, of one run how far down it holds.

    Equal widths are looked at first: the width of a network is one number to most people.
    """
    gaps = results.gaps(results.equal) or results.gaps(results.pairs)
    return _several(results, gaps) if gaps else _one(results)


def _several(results: Results, gaps: list[tuple[float, str, Bits]]) -> Message:
    points, label, bits = max(gaps, key=lambda gap: abs(gap[0]))
    first = results.labels[0]
    before, after = results.found[first, bits].mean, results.found[label, bits].mean
    more = [f"“{label}” against “{first}”: {results.gap(points)}."]
    floating = results.points(label, Bits())
    if floating is not None and bits != Bits():
        more.append(f"In floating point the difference is {results.signed(floating)}.")
    every = [gap for gap in results.gaps(results.pairs) if gap[1] == label]
    if len(every) > 2:
        low, high = min(every), max(every)
        more.append(
            f"Over all {len(every)} measured widths it goes from {results.signed(low[0])} ({low[2]}) "
            f"to {results.signed(high[0])} ({high[2]})."
        )
    if abs(points) < (0.05 if results.metric in SHARES else 1e-12):
        return Message("The runs do not differ at any width", tuple(more), bits)
    return Message(f"At {bits}: {_becomes(results, before, after)}", tuple(more), bits)


def _becomes(results: Results, before: float, after: float) -> str:
    """Say what one value becomes, with the name of the metric unless it is the usual one."""
    name = "" if results.metric == "accuracy" else f"{results.metric} "
    return f"{name}{shown(before, results.metric)} becomes {shown(after, results.metric)}"


def _one(results: Results) -> Message:
    label = results.labels[0]
    own = [bits for bits in results.equal if (label, bits) in results.found]
    narrow = [bits for bits in own if bits != Bits()]
    if Bits() not in own or not narrow:
        bits = (own or [bits for bits in results.pairs if (label, bits) in results.found])[-1]
        name = "" if results.metric == "accuracy" else f"{results.metric} "
        return Message(f"At {bits}: {name}{shown(results.found[label, bits].mean, results.metric)}", (), bits)
    top = results.found[label, Bits()].mean
    if results.metric not in SHARES:
        last = results.found[label, narrow[-1]].mean
        return Message(f"At {narrow[-1]}: {_becomes(results, top, last)}", (), narrow[-1])
    lost = {bits: 100 * (top - results.found[label, bits].mean) for bits in narrow}
    far = next((bits for bits in narrow if lost[bits] >= CLOSE), None)
    held = narrow[: narrow.index(far)] if far else narrow
    more = () if far is None else (f"At {far} it is {shown(results.found[label, far].mean)}.",)
    said = f"Floating point has {shown(top)}."
    if held:
        return Message(f"Down to {held[-1]} it loses less than a point", (said, *more), far or held[-1])
    return Message(f"At {narrow[0]}: {_becomes(results, top, top - lost[narrow[0]] / 100)}", (), narrow[0])
