"""One self-contained HTML page from rows: it opens without a network and says where its numbers come from.

The page is made of the files beside this one: `page.html` is the frame, `page.css` the looks, `page.js` moves from one
width to another. What stands in a file of somebody else is shown as text and never run.
"""

from __future__ import annotations

import base64
import csv
import html
import io
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from anybit.common.files import write_text
from anybit.common.provenance import origin
from anybit.errors import SpecError
from anybit.pages import draw
from anybit.pages.message import Results, message, results
from anybit.pages.rows import GRID, RowFile, told_apart
from anybit.spec import Bits, Row

LARGEST = 1_500_000
"""Bytes that a page may take."""


def report(
    rows: Iterable[Row] | None = None,
    out: str | Path = "report.html",
    *,
    net: Any = None,
    loader: Any = None,
    widths: Iterable[Bits | tuple[int, int]] | None = None,
    title: str = "anybit",
    **sweeping: Any,
) -> Path:
    """Write one self-contained HTML page of rows that `anybit.sweep` measured, and return its path.

    Rows of several labels are runs side by side; the first label is what the others are compared with.

        plain = anybit.sweep(net, loader, widths=widths, label="plain")
        tuned = anybit.sweep(other, loader, widths=widths, label="tuned")
        anybit.report(plain + tuned, "report.html")

    Args:
        rows: What to show. Without rows, `net` is measured on `loader` first.
        out: The page.
        net: A network from `anybit.prepare`.
        loader: Labelled batches, in the same order each time.
        widths: Pairs (weights, activations) to measure; by default all 64 pairs of 2 to 8 bits and floating point, each
            of which goes through the loader once.
        title: A few words above the headline.
        sweeping: More settings of `anybit.sweep`, such as `label="mine"`.
    """
    if (rows is None) == (net is None) or (net is None) != (loader is None):
        raise SpecError("report takes either rows, as anybit.sweep returns them, or net and loader to measure them")
    if rows is None:
        import anybit

        rows = anybit.sweep(net, loader, widths=list(widths or GRID), **sweeping)
    elif widths is not None or sweeping:
        raise SpecError("report measures nothing when it is given rows; give widths and labels to anybit.sweep")
    if not isinstance(rows, Iterable):
        raise SpecError(f"report takes rows, or net= and loader= by name to measure them; got {type(rows).__name__}")
    found = tuple(rows)
    if strangers := [row for row in found if not isinstance(row, Row)]:
        raise SpecError(f"report takes rows, as anybit.sweep returns them; got {strangers[0]!r:.80}")
    return write_report([RowFile(title, found, origin())], out)


def write_report(files: Sequence[RowFile], path: str | Path, names: Sequence[str] = ()) -> Path:
    """Write the page of one or several files of rows, at once, and return its path."""
    write_text(path, render(files, names))
    return Path(path)


def render(files: Sequence[RowFile], names: Sequence[str] = ()) -> str:
    """Return the page as one string; `names` tell runs of the same label apart."""
    rows = told_apart(files, names or [file.title for file in files])
    found = results(rows)
    said = message(found)
    grid = draw.has_grid(found.pairs)
    page = Template(_part("page.html")).substitute(
        title=html.escape(files[0].title if len(files) == 1 else " and ".join(found.labels)),
        head=html.escape(said.head),
        more=" ".join(f"<span>{html.escape(sentence)}</span>" for sentence in (*said.more, _counts(rows, found))),
        style=_part("page.css"),
        options="".join(f"<option{' selected' * (b == said.bits)}>{b}</option>" for b in _ordered(found)),
        bars="".join(draw.bars(found, bits, hidden=bits != said.bits) for bits in _ordered(found)),
        charts=_charts(found, grid),
        maps=_maps(found) if grid else "",
        table=_tables(found, grid),
        unit=html.escape(_unit(found)),
        csv=base64.b64encode(_csv(rows).encode()).decode(),
        notes=_list(dict.fromkeys(note for file in files for note in file.notes)),
        origins=_list(dict.fromkeys(_origin(file) for file in files)),
        script=_part("page.js"),
    )
    if (size := len(page.encode())) > LARGEST:
        limit = LARGEST / 1e6
        raise SpecError(f"the page would take {size / 1e6:.1f} MB, more than {limit:g}; take fewer runs or widths")
    return page


def _part(name: str) -> str:
    return resources.files("anybit.pages").joinpath(name).read_text(encoding="utf-8")


def _ordered(found: Results) -> list[Bits]:
    """Return the equal widths first, and then the others as they were measured."""
    return [*found.equal, *(bits for bits in found.pairs if bits.weights != bits.activations)]


def _counts(rows: Sequence[Row], found: Results) -> str:
    """Say what was measured on how many examples: the one place of a page that does."""
    n = sorted({row.n for row in rows})
    seeds = sorted({s.seeds for s in found.found.values()})
    examples = f"{n[0]:,}" if len(n) == 1 else f"{n[0]:,} to {n[-1]:,}"
    several = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    return f"Test {found.metric} on {examples} examples" + (f", mean of {several} seeds." if seeds[-1] > 1 else ".")


def _unit(found: Results) -> str:
    unit = " in %" + ", differences in points" * (len(found.labels) > 1) if found.unit else ""
    return f"Test {found.metric}{unit}"


def _charts(found: Results, grid: bool) -> str:
    made = draw.curves(found, main_only=grid)
    if not made:
        return ""
    text = "The shade goes from the lowest to the highest seed. " * any(s.seeds > 1 for s in found.found.values())
    return (
        f'<section id="curves"><h2>{html.escape(found.metric[:1].upper() + found.metric[1:])} against width</h2>'
        f'<p class="soft">{text}FP is floating point.</p>'
        f'{draw.legend(found.labels)}<div class="panels">{"".join(made)}</div></section>'
    )


def _maps(found: Results) -> str:
    first, *others = found.labels
    most = max((abs(gap[0]) for gap in found.gaps(found.pairs)), default=0.0)
    points, unit = (", points", ", %") if found.unit else ("", "")
    made = [
        draw.heat(
            f"difference{points}" if len(others) == 1 else f"{other} minus {first}{points}",
            {bits: found.points(other, bits) for bits in found.pairs},
            most=most,
            difference=True,
        )
        for other in others
    ]
    made += [
        draw.heat(
            f"{label}{unit}",
            {b: found.factor * s.mean for (o, b), s in found.found.items() if o == label},
            most=found.factor * max(map(abs, found.ends)),
        )
        for label in found.labels
    ]
    return (
        '<section id="maps"><h2>Every pair of widths</h2><p class="soft">Bits of weights down, bits of activations '
        "across; 32 is floating point. Choose a cell to see it at the top.</p>"
        f'<div class="panels">{"".join(made)}</div></section>'
    )


def _tables(found: Results, grid: bool) -> str:
    ordered = _ordered(found)
    if not grid or not found.equal:
        return draw.numbers(found, ordered)
    rest = ordered[len(found.equal) :]
    more = f"<details><summary>The other {len(rest)} pairs of widths</summary>{draw.numbers(found, rest)}</details>"
    return draw.numbers(found, found.equal) + more


def _csv(rows: Sequence[Row]) -> str:
    """Return every row as a line; a text that starts like a formula does not become one in a spreadsheet."""
    file = io.StringIO()
    lines = csv.DictWriter(file, list(rows[0].to_dict()))
    lines.writeheader()
    for row in rows:
        label = f"'{row.label}" if row.label.startswith(("=", "+", "-", "@", "\t", "\r")) else row.label
        lines.writerow({**row.to_dict(), "label": label})
    return file.getvalue()


def _list(lines: Iterable[str]) -> str:
    return "".join(f"<li>{html.escape(line)}</li>" for line in lines)


def _origin(file: RowFile) -> str:
    """Say in one line where rows come from."""
    known = file.origin
    machine, versions = (v if isinstance(v := known.get(key), dict) else {} for key in ("machine", "versions"))
    facts = [
        file.title,
        f"seeds {', '.join(map(str, sorted({row.seed for row in file.rows})))}",
        f"commit {known.get('commit', 'unknown')}",
        str(known.get("date", "unknown date")),
        f"{machine.get('cores', '?')} cores of {machine.get('cpu', 'an unknown machine')}",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
    ]
    return " · ".join(filter(None, facts))
