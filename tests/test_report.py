from __future__ import annotations

import dataclasses
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from anybit.errors import FileError, MissingDependency
from anybit.report import page
from anybit.report.rows import FORMAT, RowFile, read_rows, summarize, write_rows
from anybit.spec import Bits, Row

ROWS = tuple(
    Row(label, seed, bits, bits, accuracy=base + 0.0137 * bits + 0.0021 * seed, loss=1.5 / bits, n=450, kl=0.1)
    for label, base in (("plain", 0.3111), ("with <b>penalty</b> & co", 0.4321))
    for seed in (0, 1, 2)
    for bits in (32, 8, 4, 2)
)
ORIGIN = {"commit": "abc123+", "date": "2020-02-20", "machine": {"cpu": "A <fast> one", "cores": 2}, "versions": {}}
FILE = RowFile("Digits & <i>widths</i>", ROWS, ORIGIN, ("A note with <script>alert(1)</script>.", "λ = 0.004"))


class Page(HTMLParser):
    """All tags with their attributes, and the text outside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.code: list[str] = []
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        (self.code if self._inside in ("script", "style") else self.text).append(data)


def test_rows_go_there_and_back(tmp_path: Path) -> None:
    rows = (*ROWS, Row("no kl", 0, 4, 32, accuracy=1.0, loss=0.0, n=1))
    file = dataclasses.replace(FILE, rows=rows)
    write_rows(tmp_path / "rows.json", file)
    assert read_rows(tmp_path / "rows.json") == file
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]


def save(path: Path, change: dict[str, Any]) -> Path:
    write_rows(path, FILE)
    values = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
    return path


GOOD = ROWS[0].to_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "anybit-rows/99"}, f"not in the format '{FORMAT}'"),
        ({"format": ...}, "not in the format"),
        ({"rows": ...}, "rows and notes must be lists"),
        ({"rows": {"a": 1}}, "rows and notes must be lists"),
        ({"notes": "a note"}, "rows and notes must be lists"),
        ({"origin": []}, "origin a table"),
        ({"rows": []}, "holds no rows"),
        ({"rows": [GOOD, GOOD, {**GOOD, "accurcy": 1}]}, "row 2: a row has no field 'accurcy'"),
        ({"rows": [GOOD, {k: v for k, v in GOOD.items() if k != "loss"}]}, "row 1: a row lacks loss"),
        ({"rows": [{**GOOD, "n": 0}]}, "row 0: a row is measured on at least one example"),
        ({"rows": [GOOD, {**GOOD, "n": "many"}]}, "row 1: n of a row must be a whole number"),
        ({"rows": [GOOD, {**GOOD, "weights": 1}]}, "row 1: weights must be 2 to 16"),
        ({"rows": [GOOD, {**GOOD, "activations": 64}]}, "row 1: activations must be 2 to 16"),
        ({"rows": [GOOD, {**GOOD, "label": None}]}, "row 1: label of a row must be a text"),
        ({"rows": [GOOD, {**GOOD, "accuracy": 98.2}]}, "row 1: accuracy of a row is from 0 to 1, got 98.2"),
        ({"rows": [GOOD, {**GOOD, "accuracy": float("nan")}]}, "row 1: accuracy of a row is from 0 to 1, got nan"),
        ({"rows": [GOOD, {**GOOD, "accuracy": None}]}, "row 1: accuracy of a row must be a number"),
        ({"rows": [GOOD, 3]}, "row 1: a row is a table"),
        ({"rows": [GOOD, list(GOOD)]}, "row 1: a row is a table"),
    ],
)
def test_rows_that_cannot_be_read_are_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = save(tmp_path / "rows.json", change)
    with pytest.raises(FileError, match=re.escape(message)) as caught:
        read_rows(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_cut_short_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    write_rows(path, FILE)
    text = path.read_text()
    for length in [0, 1, 50, len(text) // 2, len(text) - 3]:
        path.write_text(text[:length])
        with pytest.raises(FileError, match="broken JSON") as caught:
            read_rows(path)
        assert str(caught.value).startswith(f"{path}: ")


def test_files_that_hold_no_rows(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "list").write_text("[1, 2]")
    (tmp_path / "noise").write_bytes(b"\xff\xfe\x00rows")
    for name, message in (
        ("missing", "no such file; rows.json of a run is expected here"),
        ("folder", "is a folder"),
        ("list", "not in the format"),
        ("noise", "cannot be read as"),
    ):
        with pytest.raises(FileError, match=message) as caught:
            read_rows(tmp_path / name)
        assert str(caught.value).startswith(f"{tmp_path / name}: ")


def test_summaries_by_hand() -> None:
    accuracies = {("b", 0, 4): 0.5, ("a", 0, 4): 0.25, ("b", 1, 4): 1.0, ("b", 0, 2): 0.125, ("b", 2, 4): 0.0}
    rows = [Row(label, seed, bits, 32, accuracy=a, loss=1.0, n=8) for (label, seed, bits), a in accuracies.items()]
    got = [(s.label, s.bits, s.mean, s.low, s.high, s.seeds) for s in summarize(rows)]
    assert got == [
        ("b", Bits(4, 32), 0.5, 0.0, 1.0, 3),
        ("a", Bits(4, 32), 0.25, 0.25, 0.25, 1),
        ("b", Bits(2, 32), 0.125, 0.125, 0.125, 1),
    ]
    assert summarize([]) == []


def test_the_page_needs_nothing_from_the_network() -> None:
    parsed = Page(page.render(FILE))
    scripts = [attributes for tag, attributes in parsed.tags if tag == "script"]
    assert scripts  # the chart is there
    for tag, attributes in parsed.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base"), tag
        for name in ("src", "href", "srcset", "data", "action", "poster", "background"):
            assert name not in attributes, (tag, attributes)
        assert "url(" not in (attributes.get("style") or "")
    assert "url(" not in page.STYLE
    assert "@import" not in page.STYLE


def test_the_parser_of_this_test_would_see_a_fetch() -> None:
    text = '<html><link href="https://a"><script src="https://b"></script><script>if (a < b) "</p>"</script></html>'
    assert Page(text).tags[1:3] == [("link", {"href": "https://a"}), ("script", {"src": "https://b"})]


def test_the_page_holds_every_number_as_formatted() -> None:
    text = page.render(FILE)
    table = text[text.index("<table>") : text.index("</table>")]
    summaries = summarize(ROWS)
    assert len(summaries) == 8
    for s in summaries:
        cell = f"<td>{100 * s.mean:.1f} <span class=spread>{100 * s.low:.1f} to {100 * s.high:.1f}</span></td>"
        assert cell in table
    lines = re.findall(r"<tr><td>(\w+)</td>((?:<td>.*?</td>)*)</tr>", table)
    assert [(bits, cells.count("<td>")) for bits, cells in lines] == [("FP", 2), ("W8A8", 2), ("W4A4", 2), ("W2A2", 2)]
    flat = "".join(Page(text).text)
    for fact in ("commit abc123+", "seeds 0, 1, 2", "n = 450 test examples", "2 cores of A <fast> one", "2020-02-20"):
        assert fact in flat


def test_a_label_without_a_measurement_has_an_empty_cell() -> None:
    rows = (*ROWS, Row("late", 0, 8, 8, accuracy=0.5, loss=1.0, n=450))
    text = page.render(dataclasses.replace(FILE, rows=rows))
    assert text.count("<td></td>") == 3


def test_text_of_others_is_shown_not_run() -> None:
    hostile = '</script><script>alert("x")</script><img src=x onerror=alert(2)>'
    rows = tuple(dataclasses.replace(row, label=row.label + hostile) for row in ROWS)
    origin = {**ORIGIN, "commit": hostile}
    parsed = Page(page.render(RowFile("t" + hostile, rows, origin, (hostile, hostile))))
    clean = Page(page.render(FILE))
    assert [tag for tag, _ in parsed.tags] == [tag for tag, _ in clean.tags]
    assert not {"b", "i", "img"} & {tag for tag, _ in parsed.tags}
    flat = "".join(parsed.text)
    assert "with <b>penalty</b> & co" + hostile in flat
    assert "t" + hostile in flat
    assert f"commit {hostile}" in flat
    assert "A note with <script>alert(1)</script>." in "".join(clean.text)
    # In the chart, where plotly reads a little HTML, the label is escaped before it is put into JSON.
    chart = "".join(parsed.code)
    assert "with \\u0026lt;b\\u0026gt;penalty" in chart or "with &lt;b&gt;penalty" in chart
    assert "with <b>penalty" not in chart
    assert "with \\u003cb\\u003epenalty" not in chart


def test_one_chart_for_each_way_of_narrowing() -> None:
    pairs = [(4, 4), (2, 2), (4, 32), (2, 32), (32, 4), (32, 2), (4, 8), (2, 8), (3, 16)]
    rows = tuple(Row("a", 0, w, a, accuracy=0.5, loss=1.0, n=9) for w, a in pairs)
    text = page.render(dataclasses.replace(FILE, rows=rows))
    heads = re.findall(r"<h2>(.*?)</h2>", text)
    assert heads == [
        "Accuracy against the width of weights and activations",
        "Accuracy against the width of weights only",
        "Accuracy against the width of activations only",
        "Accuracy against the width of weights, with activations at 8 bits",
        "The numbers",
    ]
    assert text.count("plotly.js v") == 1  # the library is in there once


def test_a_page_without_a_curve_needs_no_plotly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(MissingDependency, match=r"plotly.*pip install 'anybit\[report\]'"):
        page.write_report(FILE, tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []
    page.write_report(dataclasses.replace(FILE, rows=ROWS[:1]), tmp_path / "report.html")
    assert "<table>" in (tmp_path / "report.html").read_text()
