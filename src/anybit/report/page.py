"""One self-contained HTML page from rows: it opens without a network and says where its numbers come from.

The page is made of the files beside this one: `page.html` is the frame, `page.css` the looks, and the scripts draw and
move. Everything measured goes in as JSON; what stands in a file of somebody else is shown as text and never run.
"""

from __future__ import annotations

import dataclasses
import html
import json
import statistics
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from anybit.common.files import write_text
from anybit.errors import MissingDependency, SpecError
from anybit.policy import BATTERY, FULL, Chooser, battery
from anybit.report.insight import to_dict
from anybit.report.measured import ALONE, Measured, group_seeds, grouped_rows
from anybit.report.rows import RowFile, Summary, summarize
from anybit.spec import FLOAT, Bits, Row

SCRIPTS = ("model.js", "draw.js", "parts.js", "widths.js", "network.js", "examples.js", "page.js")

LARGEST = 6_000_000
"""Bytes that a page may take; most of them are the drawing library."""


def _part(name: str) -> str:
    return resources.files("anybit.report").joinpath(name).read_text(encoding="utf-8")


def _library() -> str:
    try:
        from plotly import offline
    except ImportError as error:
        raise MissingDependency("plotly", "report", "a report") from error
    return str(offline.get_plotlyjs())


def family(bits: Bits) -> str:
    """Return the chart that a pair of widths belongs to.

    >>> family(Bits(4, 4)), family(Bits(4, 32)), family(Bits(4, 8))
    ('weights and activations', 'weights only', 'weights, with activations at 8 bits')
    """
    if bits.weights == bits.activations:
        return "weights and activations"
    if bits.activations == FLOAT:
        return "weights only"
    if bits.weights == FLOAT:
        return "activations only"
    return f"weights, with activations at {bits.activations} bits"


def width(bits: Bits) -> int:
    """Return where a pair of widths stands in its chart.

    >>> width(Bits(4, 8)), width(Bits(32, 8))
    (4, 8)
    """
    return bits.activations if bits.weights == FLOAT else bits.weights


def _accuracy(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return one entry per label and pair of widths, mean and spread over seeds."""
    entries = []
    for s in summarize(rows):
        own = [row for row in rows if (row.label, row.bits) == (s.label, s.bits)]
        entry = {
            "label": s.label,
            "weights": s.bits.weights,
            "activations": s.bits.activations,
            "family": family(s.bits),
            "width": width(s.bits),
            "mean": s.mean,
            "low": s.low,
            "high": s.high,
            "seeds": s.seeds,
            "loss": statistics.fmean(row.loss for row in own),
            "n": min(row.n for row in own),
        }
        entries.append(entry)
    return entries


def policy() -> dict[str, Any]:
    """Return the battery policy of `anybit run`: its steps, its widths on mains, and the margin of its hysteresis."""
    steps = [{"percent": step.percent, **dataclasses.asdict(step.bits)} for step in sorted(BATTERY)]
    return {"steps": steps, "mains": dataclasses.asdict(FULL), "margin": Chooser(battery()).margin}


def _payload(runs: Sequence[Measured], groups: dict[str, str]) -> dict[str, Any]:
    return {
        "accuracy": _accuracy(grouped_rows([run.file for run in runs], groups)),
        "groups": groups,
        "missing": list(dict.fromkeys(text for run in runs for text in run.missing)),
        "policy": policy(),
        "runs": [
            {
                "name": run.name,
                "insight": to_dict(run.insight) if run.insight else None,
                "curves": dataclasses.asdict(run.curves) if run.curves else None,
            }
            for run in runs
        ],
    }


def script_json(value: Any) -> str:
    r"""Return JSON that can stand inside a script element, whatever texts are in it.

    >>> script_json({"a": "</script>&"})
    '{"a":"\\u003c/script\\u003e\\u0026"}'
    """
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _table(summaries: Sequence[Summary]) -> str:
    labels = list(dict.fromkeys(s.label for s in summaries))
    found = {(s.label, s.bits): s for s in summaries}
    head = "".join(f"<th scope=col>{html.escape(label)}</th>" for label in labels)
    lines = [f"<tr><th scope=col>widths</th>{head}</tr>"]
    for bits in dict.fromkeys(s.bits for s in summaries):
        cells = []
        for label in labels:
            s = found.get((label, bits))
            spread = f" <span class=spread>{100 * s.low:.1f} to {100 * s.high:.1f}</span>" if s and s.seeds > 1 else ""
            cells.append(f"<td>{100 * s.mean:.1f}{spread}</td>" if s else "<td></td>")
        lines.append(f"<tr><td>{bits}</td>{''.join(cells)}</tr>")
    table = f"<table>{''.join(lines)}</table>"
    return f'<div class=scroll tabindex=0 role=region aria-label="The numbers">{table}</div>'


def _facts(origin: dict[str, Any]) -> list[str]:
    machine = origin.get("machine", {}) if isinstance(origin.get("machine", {}), dict) else {}
    return [
        f"commit {origin.get('commit', 'unknown')}",
        f"{machine.get('cores', '?')} cores of {machine.get('cpu', 'an unknown machine')}",
        str(origin.get("date", "unknown date")),
    ]


def _origin(file: RowFile) -> str:
    """Say in one line where rows come from."""
    seeds = sorted({row.seed for row in file.rows})
    counts = sorted({row.n for row in file.rows})
    commit, *others = _facts(file.origin)
    n = f"n = {', '.join(map(str, counts))} test examples"
    return " · ".join([commit, f"seeds {', '.join(map(str, seeds))}", n, *others])


def _origins(run: Measured) -> str:
    """Say where everything about one run comes from, with the versions of the libraries."""
    lines = [f"Rows: {_origin(run.file)}"]
    if run.insight:
        facts = [f"seed {run.insight.seed}", f"n = {run.insight.n} test examples of {run.insight.data}"]
        lines.append(f"Insight: {' · '.join([*_facts(run.insight.origin), *facts])}")
    versions = run.file.origin.get("versions", {})
    if isinstance(versions, dict) and versions:
        lines.append("Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<h3>{html.escape(run.file.title)}</h3><ul class=origin>{items}</ul>"


def render(what: RowFile | Sequence[Measured]) -> str:
    """Return the page as one string, of one file of rows or of several runs side by side."""
    runs = [Measured(what, missing=(ALONE,))] if isinstance(what, RowFile) else list(what)
    if not runs:
        raise SpecError("a report needs at least one run")
    files = [run.file for run in runs]
    groups = group_seeds(files)
    title = files[0].title if len(files) == 1 else "anybit: " + " and ".join(dict.fromkeys(groups.values()))
    notes = dict.fromkeys(note for file in files for note in file.notes)
    page = Template(_part("page.html")).substitute(
        title=html.escape(title),
        style=_part("page.css"),
        origin="<br>".join(html.escape(line) for line in dict.fromkeys(map(_origin, files))),
        notes="".join(f"<p>{html.escape(note)}</p>" for note in notes),
        table=_table(summarize(grouped_rows(files, groups))),
        origins="".join(map(_origins, runs)),
        data=script_json(_payload(runs, groups)),
        library=_library(),
        script="\n".join(map(_part, SCRIPTS)),
    )
    if (size := len(page.encode())) > LARGEST:
        raise SpecError(
            f"a page of {len(runs)} runs would take {size / 1e6:.1f} MB, more than {LARGEST / 1e6:.0f}; "
            "take fewer runs, or sweep some of them with --no-insight"
        )
    return page


def write_report(what: RowFile | Sequence[Measured], path: str | Path) -> None:
    """Write the page, at once."""
    write_text(path, render(what))
