"""What rows come to: every run at every pair of widths, the differences between runs, and what to say first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from anybit.errors import SpecError
from anybit.pages.rows import Summary, summarize
from anybit.spec import Bits, Row

CLOSE = 1.0
"""Points of accuracy that one run may lose and still count as close to floating point."""


@dataclass(frozen=True)
class Results:
    """Runs and pairs of widths in the order in which they were measured, and what was found at each."""

    labels: tuple[str, ...]
    pairs: tuple[Bits, ...]
    found: dict[tuple[str, Bits], Summary]

    @property
    def equal(self) -> list[Bits]:
        """The pairs with the same width for weights and activations, the widest first."""
        return sorted((bits for bits in self.pairs if bits.weights == bits.activations), reverse=True)

    def points(self, label: str, bits: Bits) -> float | None:
        """Return by how many points of accuracy a run is above the first one."""
        here, first = self.found.get((label, bits)), self.found.get((self.labels[0], bits))
        return 100 * (here.mean - first.mean) if here and first else None

    def gaps(self, pairs: Sequence[Bits]) -> list[tuple[float, str, Bits]]:
        """Return how far each other run is from the first one at each pair, where both were measured."""
        every = [(self.points(label, bits), label, bits) for bits in pairs for label in self.labels[1:]]
        return [(points, label, bits) for points, label, bits in every if points is not None]


def results(rows: Sequence[Row]) -> Results:
    """Return what rows come to, mean and spread over seeds."""
    if not rows:
        raise SpecError("a report needs at least one row, as anybit.sweep returns them")
    (most, times), *_ = Counter((row.label, row.seed, row.bits) for row in rows).most_common(1)
    if times > 1:
        label, seed, bits = most
        raise SpecError(
            f"{times} rows are of {label!r}, seed {seed}, at {bits}; give each run a label of its own, "
            'as in anybit.sweep(net, loader, label="mine")'
        )
    found = {(s.label, s.bits): s for s in summarize(rows)}
    labels, pairs = (tuple(dict.fromkeys(key[part] for key in found)) for part in (0, 1))
    return Results(tuple(map(str, labels)), tuple(b for b in pairs if isinstance(b, Bits)), found)


@dataclass(frozen=True)
class Message:
    """What a page opens with: a headline, a few sentences, and the pair of widths that they are about."""

    head: str
    more: tuple[str, ...]
    bits: Bits


def percent(value: float) -> str:
    r"""Return a share in percent.

    >>> percent(0.5312)
    '53.1\xa0%'
    """
    return f"{100 * value:.1f}\xa0%"


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
    more = [f"“{label}” against “{first}”: {signed(points)} points."]
    floating = results.points(label, Bits())
    if floating is not None and bits != Bits():
        more.append(f"In floating point the difference is {signed(floating)}.")
    every = [gap for gap in results.gaps(results.pairs) if gap[1] == label]
    if len(every) > 2:
        low, high = min(every), max(every)
        more.append(
            f"Over all {len(every)} measured widths it goes from {signed(low[0])} ({low[2]}) "
            f"to {signed(high[0])} ({high[2]})."
        )
    if abs(points) < 0.05:
        return Message("The runs do not differ at any width", tuple(more), bits)
    return Message(f"At {bits}: {percent(before)} becomes {percent(after)}", tuple(more), bits)


def _one(results: Results) -> Message:
    label = results.labels[0]
    own = [bits for bits in results.equal if (label, bits) in results.found]
    narrow = [bits for bits in own if bits != Bits()]
    if Bits() not in own or not narrow:
        bits = (own or [bits for bits in results.pairs if (label, bits) in results.found])[-1]
        return Message(f"At {bits}: {percent(results.found[label, bits].mean)}", (), bits)
    top = results.found[label, Bits()].mean
    lost = {bits: 100 * (top - results.found[label, bits].mean) for bits in narrow}
    far = next((bits for bits in narrow if lost[bits] >= CLOSE), None)
    held = narrow[: narrow.index(far)] if far else narrow
    more = () if far is None else (f"At {far} it is {percent(results.found[label, far].mean)}.",)
    said = f"Floating point has {percent(top)}."
    if held:
        return Message(f"Down to {held[-1]} it loses less than a point", (said, *more), far or held[-1])
    return Message(f"At {narrow[0]}: {percent(top)} becomes {percent(top - lost[narrow[0]] / 100)}", (), narrow[0])
