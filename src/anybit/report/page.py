"""One self-contained HTML page from rows: it opens without a network and says where its numbers come from."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anybit.errors import MissingDependency
from anybit.files import write_text
from anybit.report.rows import RowFile, Summary, summarize
from anybit.spec import FLOAT

COLOURS = ("#1f6feb", "#d9480f", "#2b8a3e", "#862e9c", "#a17900", "#495057")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "cross")

STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --paper: #ffffff; --soft: #667080; --line: #d8dde3; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --paper: #14171a; --soft: #98a2ae; --line: #333a41; } }
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem; font: 1rem/1.5 system-ui, sans-serif;
       color: var(--ink); background: var(--paper); }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p.origin { color: var(--soft); font-size: .875rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .75rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } .spread { color: var(--soft); font-size: .8125rem; }
"""


def _family(summary: Summary) -> str:
    """Return the chart that a measurement belongs to."""
    bits = summary.bits
    if bits.weights == bits.activations:
        return "weights and activations"
    if bits.activations == FLOAT:
        return "weights only"
    if bits.weights == FLOAT:
        return "activations only"
    return f"weights, with activations at {bits.activations} bits"


def _width(summary: Summary) -> int:
    return min(summary.bits.weights, summary.bits.activations) if summary.bits.activations == FLOAT or (
        summary.bits.weights == FLOAT
    ) else summary.bits.weights  # fmt: skip


def _figure(summaries: Sequence[Summary], labels: Sequence[str]) -> Any:
    """Draw accuracy against width, one line per label, bars from the lowest to the highest seed."""
    try:
        from plotly import graph_objects
    except ImportError as error:
        raise MissingDependency("plotly", "report", "a report") from error
    figure = graph_objects.Figure()
    for index, label in enumerate(labels):
        own = sorted((s for s in summaries if s.label == label and _width(s) != FLOAT), key=_width)
        style = index % len(COLOURS)
        figure.add_scatter(
            x=[_width(s) for s in own],
            y=[100 * s.mean for s in own],
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [100 * (s.high - s.mean) for s in own],
                "arrayminus": [100 * (s.mean - s.low) for s in own],
            },
            name=html.escape(label),
            mode="lines+markers",
            line={"color": COLOURS[style], "dash": DASHES[style], "width": 2},
            marker={"symbol": MARKERS[style], "size": 8},
            hovertemplate="%{x} bits: %{y:.1f} %<extra>" + html.escape(label) + "</extra>",
        )
    figure.update_layout(
        xaxis={"title": "bits", "dtick": 1, "gridcolor": "rgba(128,128,128,.25)", "zeroline": False},
        yaxis={"title": "test accuracy, %", "gridcolor": "rgba(128,128,128,.25)", "zeroline": False},
        legend={"orientation": "h", "y": 1.12},
        margin={"l": 60, "r": 20, "t": 40, "b": 50},
        height=400,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": "#808890", "size": 13},
    )
    return figure


def _table(summaries: Sequence[Summary], labels: Sequence[str]) -> str:
    found = {(s.label, s.bits): s for s in summaries}
    head = "".join(f"<th scope=col>{html.escape(label)}</th>" for label in labels)
    lines = [f"<tr><th scope=col>widths</th>{head}</tr>"]
    for bits in dict.fromkeys(s.bits for s in summaries):
        cells = []
        for label in labels:
            s = found.get((label, bits))
            spread = f" <span class=spread>{100 * s.low:.1f} to {100 * s.high:.1f}</span>" if s else ""
            cells.append(f"<td>{100 * s.mean:.1f}{spread}</td>" if s else "<td></td>")
        lines.append(f"<tr><td>{bits}</td>{''.join(cells)}</tr>")
    return f"<div class=scroll><table>{''.join(lines)}</table></div>"


def render(file: RowFile) -> str:
    """Return the page as one string."""
    summaries = summarize(file.rows)
    labels = list(dict.fromkeys(s.label for s in summaries))
    families: dict[str, list[Summary]] = {}
    for summary in summaries:
        families.setdefault(_family(summary), []).append(summary)
    parts = [f"<h1>{html.escape(file.title)}</h1>", f"<p class=origin>{_origin(file)}</p>"]
    parts += [f"<p>{html.escape(note)}</p>" for note in file.notes]
    script: Any = True
    for name, members in families.items():
        if len({_width(s) for s in members} - {FLOAT}) < 2:
            continue
        parts.append(f"<h2>Accuracy against the width of {html.escape(name)}</h2>")
        config = {"displayModeBar": False, "responsive": True}
        parts.append(_figure(members, labels).to_html(full_html=False, include_plotlyjs=script, config=config))
        script = False
    parts += ["<h2>The numbers</h2>", "<p>Mean test accuracy in %, with the lowest and highest seed.</p>"]
    parts.append(_table(summaries, labels))
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(file.title)}</title><style>{STYLE}</style>"
    )
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _origin(file: RowFile) -> str:
    o = file.origin
    machine = o.get("machine", {}) if isinstance(o.get("machine", {}), dict) else {}
    seeds = sorted({row.seed for row in file.rows})
    counts = sorted({row.n for row in file.rows})
    facts = [
        f"commit {o.get('commit', 'unknown')}",
        f"seeds {', '.join(map(str, seeds))}",
        f"n = {', '.join(map(str, counts))} test examples",
        f"{machine.get('cores', '?')} cores of {machine.get('cpu', 'an unknown machine')}",
        str(o.get("date", "unknown date")),
    ]
    return html.escape(" · ".join(facts))


def write_report(file: RowFile, path: str | Path) -> None:
    """Write the page, at once."""
    write_text(path, render(file))
