"""Bars, curves and heat maps as HTML and SVG. Colours are names in `page.css`, so that a dark page has dark charts."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

from anybit.pages.message import Results, signed
from anybit.pages.rows import SHARES, lower_is_better, shown
from anybit.spec import FLOAT, Bits

WIDE, HIGH, LEFT, RIGHT, TOP, BOTTOM = 400, 230, 34, 6, 10, 24
"""A chart's size and margins, in its own units: about pixels on a telephone."""

LOOKS = 6
"""Colours, dashes and marks before they come again."""

MARKS = ("M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0", "M-4-4h8v8h-8z", "M0-5.5L5.5 0L0 5.5L-5.5 0z", "M0-5L5 4H-5z")
STRONG = 65
"""The share of a heat map's colour from which on its ink is that of the page's ground."""

MAIN = ("weights and activations", "weights only", "activations only")


def look(index: int) -> str:
    """Return the class that gives a run its colour and dash."""
    return f"run run-{index % LOOKS}"


def mark(index: int) -> str:
    """Return a run's mark as SVG."""
    return f'<path d="{MARKS[index % LOOKS % len(MARKS)]}"/>'


def legend(labels: Sequence[str]) -> str:
    """Return what each colour, dash and mark stands for."""
    items = "".join(
        f'<li class="{look(i)}"><svg viewBox="-16 -7 32 14" aria-hidden="true"><path class="line" d="M-15 0H15"/>'
        f"{mark(i)}</svg><span>{html.escape(label)}</span></li>"
        for i, label in enumerate(labels)
    )
    return f'<ul class="legend">{items}</ul>'


def bars(results: Results, bits: Bits, *, hidden: bool) -> str:
    """Return every run at one pair of widths, as bars on the scale of the metric, with the spread over seeds."""
    lines = []
    for i, label in enumerate(results.labels):
        s = results.found.get((label, bits))
        if s is None:
            lines.append(f'<div class="bar {look(i)}"><b>{html.escape(label)}</b><span>not measured</span></div>')
            continue
        spread, style = "", f"--v:{100 * results.at(s.mean):.2f}"
        if s.seeds > 1:
            spread = f" <small>{results.number(s.low)} to {results.number(s.high)}</small>"
            style += f";--low:{100 * results.at(s.low):.2f};--high:{100 * results.at(s.high):.2f}"
        points = results.points(label, bits)
        gap = f" {difference(results, points)}" if i and points is not None else ""
        lines.append(
            f'<div class="bar {look(i)}" style="{style}"><b>{html.escape(label)}</b>'
            f"<i></i><span>{shown(s.mean, results.metric)}{gap}{spread}</span></div>"
        )
    return f'<div data-at="{bits}"{" hidden" if hidden else ""}>{"".join(lines)}</div>'


def difference(results: Results, points: float) -> str:
    """Return a difference, coloured by whether it is better or worse; half a point of a share is neither."""
    least = 0.5 if results.metric in SHARES else 0.0
    better = (points > 0) is not lower_is_better(results.metric)
    tone = "" if abs(points) <= least else "better" if better else "worse"
    return f'<em class="{tone}">{results.signed(points)}</em>'


def family(bits: Bits) -> str:
    """Return the chart that a pair of widths belongs to.

    >>> family(Bits(4, 4)), family(Bits(4, 32)), family(Bits(4, 8))
    ('weights and activations', 'weights only', 'weights, with activations at 8 bits')
    """
    if bits.weights == bits.activations:
        return MAIN[0]
    if bits.activations == FLOAT:
        return MAIN[1]
    return MAIN[2] if bits.weights == FLOAT else f"weights, with activations at {bits.activations} bits"


def curves(results: Results, *, main_only: bool) -> list[str]:
    """Return a chart for each family of widths; floating point stands at the right of the first three."""
    families: dict[str, dict[int, Bits]] = {}
    for bits in results.pairs:
        name, width = family(bits), bits.activations if bits.weights == FLOAT else bits.weights
        if name in MAIN or not main_only:
            families.setdefault(name, {})[width] = bits
    worth = {name: at for name, at in families.items() if len(at) > 1}
    for name in MAIN[1:]:
        if name in worth and Bits() in results.pairs:
            worth[name][FLOAT] = Bits()
    names = sorted(worth, key=lambda name: MAIN.index(name) if name in MAIN else len(MAIN))
    return [_chart(results, name, dict(sorted(worth[name].items()))) for name in names]


def _chart(results: Results, name: str, at: dict[int, Bits]) -> str:
    step = (WIDE - LEFT - RIGHT) / len(at)
    x = {width: LEFT + (i + 0.5) * step for i, width in enumerate(at)}

    low, high = results.ends

    def y(value: float) -> float:
        return TOP + (1 - results.at(value)) * (HIGH - TOP - BOTTOM)

    parts = [
        f'<path class="grid" d="M{LEFT} {y(value):.1f}H{WIDE - RIGHT}"/>'
        f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{results.factor * value:.3g}</text>'
        for value in (low + (high - low) * s / 4 for s in range(5))
    ]
    parts += [
        f'<text x="{at_x:.1f}" y="{HIGH - 6}" text-anchor="middle">{"FP" if width == FLOAT else width}</text>'
        for width, at_x in x.items()
    ]
    for i, label in enumerate(results.labels):
        own = [(x[w], s, bits) for w, bits in at.items() if (s := results.found.get((label, bits)))]
        line = "L".join(f"{px:.1f} {y(s.mean):.1f}" for px, s, _ in own)
        edge = [(px, s.high) for px, s, _ in own] + [(px, s.low) for px, s, _ in reversed(own)]
        band = "L".join(f"{px:.1f} {y(share):.1f}" for px, share in edge)
        marks = "".join(
            f'<g data-bits="{bits}" transform="translate({px:.1f} {y(s.mean):.1f})">'
            f"<title>{html.escape(label)}, {bits}: {shown(s.mean, results.metric)}</title>"
            f'<circle class="touch" r="12"/>{mark(i)}</g>'
            for px, s, bits in own
        )
        if own:
            parts.append(
                f'<g class="{look(i)}"><path class="band" d="M{band}z"/><path class="line" d="M{line}"/>{marks}</g>'
            )
    unit = f" in {results.unit}" if results.unit else ""
    title = html.escape(f"Test {results.metric}{unit} against bits of {name}")
    return (
        f'<figure><figcaption>Bits of {name}</figcaption><svg class="chart" viewBox="0 0 {WIDE} {HIGH}" '
        f'role="img" aria-label="{title}; the numbers are in the table below">{"".join(parts)}</svg></figure>'
    )


def heat(title: str, values: Mapping[Bits, float | None], *, most: float, difference: bool = False) -> str:
    """Return a table of weights by activations, each cell coloured by its value as a share of `most`."""
    found = {bits: value for bits, value in values.items() if value is not None}
    rows = sorted({bits.weights for bits in found}, reverse=True)
    columns = sorted({bits.activations for bits in found}, reverse=True)
    lines = [f"<tr><td></td>{''.join(f'<th scope=col>A{a}</th>' for a in columns)}</tr>"]
    for w in rows:
        cells = [_cell(Bits(w, a), found.get(Bits(w, a)), most, difference) for a in columns]
        lines.append(f'<tr><th scope="row">W{w}</th>{"".join(cells)}</tr>')
    return f'<figure><figcaption>{html.escape(title)}</figcaption><table class="heat">{"".join(lines)}</table></figure>'


def _cell(bits: Bits, value: float | None, most: float, difference: bool) -> str:
    if value is None:
        return "<td></td>"
    share = min(100.0, 100 * abs(value) / most) if most else 0.0
    digits = f"{value:.0f}" if abs(most) >= 50 else f"{value:.2g}"
    text = signed(value, 0 if abs(value) >= 9.95 else 1 if most >= 1 else 3) if difference else digits
    kinds = [kind for kind, yes in (("minus", value < 0), ("strong", share >= STRONG)) if yes]
    css = f' class="{" ".join(kinds)}"' if kinds else ""
    return f'<td data-bits="{bits}" title="{bits}"{css} style="--v:{share:.0f}">{text}</td>'


def has_grid(pairs: Iterable[Bits]) -> bool:
    """Tell whether more than half of all pairs of these widths were measured: enough for a map.

    >>> has_grid([Bits(8, 8), Bits(4, 4)]), has_grid([Bits(8, 8), Bits(8, 4), Bits(4, 8), Bits(4, 4)])
    (False, True)
    """
    pairs = list(pairs)
    rows, columns = {bits.weights for bits in pairs}, {bits.activations for bits in pairs}
    return min(len(rows), len(columns)) > 1 and 2 * len(pairs) > len(rows) * len(columns)


def numbers(results: Results, pairs: Sequence[Bits]) -> str:
    """Return the table: widths, every run, and by how much the others differ from the first one."""
    first, *others = results.labels
    heads = [*results.labels, "differ\u00adence"] if len(others) == 1 else list(results.labels)
    lines = [f"<tr><th>widths</th>{''.join(f'<th scope=col>{html.escape(name)}</th>' for name in heads)}</tr>"]
    for bits in pairs:
        cells = []
        for label in results.labels:
            s, points = results.found.get((label, bits)), results.points(label, bits)
            spread = f"<small>{results.number(s.low)} to {results.number(s.high)}</small>" if s and s.seeds > 1 else ""
            gap = difference(results, points) if points is not None and label != first else ""
            several = len(others) > 1
            value = f"{results.number(s.mean)}{gap if several else ''}{spread}" if s else ""
            cells.append(f'<td class="many">{value}</td>' if several else f"<td>{value}</td>")
            if label != first and not several:
                cells.append(f"<td>{gap}</td>")
        lines.append(f'<tr data-bits="{bits}"><th scope="row">{bits}</th>{"".join(cells)}</tr>')
    return f'<div class="scroll"><table class="numbers">{"".join(lines)}</table></div>'
