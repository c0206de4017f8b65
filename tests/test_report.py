from __future__ import annotations

import base64
import csv
import dataclasses
import io
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import anybit
from anybit.cli import main
from anybit.errors import FileError, SpecError
from anybit.pages import draw, page
from anybit.pages.message import message as message_of
from anybit.pages.message import results, signed
from anybit.pages.rows import FORMAT, GRID, RowFile, read_rows, summarize, told_apart, write_rows
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
        ({"rows": [GOOD, GOOD, {**GOOD, "accurcy": 1}]}, "row 2: unknown key 'accurcy'; did you mean 'accuracy'"),
        ({"rows": [GOOD, {k: v for k, v in GOOD.items() if k != "loss"}]}, "row 1: missing key 'loss'"),
        ({"rows": [{**GOOD, "n": 0}]}, "row 0: a row is measured on at least one example"),
        ({"rows": [GOOD, {**GOOD, "n": "many"}]}, "row 1: 'n' must be a whole number"),
        ({"rows": [GOOD, {**GOOD, "weights": 1}]}, "row 1: weights must be 2 to 16"),
        ({"rows": [GOOD, {**GOOD, "activations": 64}]}, "row 1: activations must be 2 to 16"),
        ({"rows": [GOOD, {**GOOD, "label": None}]}, "row 1: 'label' must be a text"),
        ({"rows": [GOOD, {**GOOD, "accuracy": 98.2}]}, "row 1: accuracy of a row is from 0 to 1, got 98.2"),
        ({"rows": [GOOD, {**GOOD, "accuracy": float("nan")}]}, "row 1: accuracy of a row is from 0 to 1, got nan"),
        ({"rows": [GOOD, {**GOOD, "accuracy": None}]}, "row 1: 'accuracy' must be a number"),
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


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5))
@example([0.0985] * 3)
def test_a_mean_lies_among_its_seeds(accuracies: list[float]) -> None:
    (s,) = summarize(Row("a", seed, 4, 4, accuracy=a, loss=1.0, n=8) for seed, a in enumerate(accuracies))
    assert s.low <= s.mean <= s.high


# What a page says first


def rows_of(table: dict[str, dict[str, float]], *, seed: int = 0) -> list[Row]:
    """Make rows from accuracies in percent, by label and pair of widths."""
    return [
        Row(label, seed, bits.weights, bits.activations, accuracy=value / 100, loss=1.0, n=1000)
        for label, cells in table.items()
        for bits, value in ((Bits.parse(name), value) for name, value in cells.items())
    ]


@pytest.mark.parametrize(
    ("table", "head", "bits"),
    [
        # Where the runs differ most, in the words of the first run and the one that is furthest from it.
        ({"a": {"FP": 99, "W4A4": 97, "W3A3": 53}, "b": {"FP": 99, "W4A4": 98, "W3A3": 85}},
         "At W3A3: 53.0 % becomes 85.0 %", "W3A3"),
        # A loss is told as openly as a gain.
        ({"a": {"FP": 99, "W3A3": 85}, "b": {"FP": 99, "W3A3": 53}}, "At W3A3: 85.0 % becomes 53.0 %", "W3A3"),
        ({"a": {"W3A3": 50}, "b": {"W3A3": 55}, "c": {"W3A3": 30}}, "At W3A3: 50.0 % becomes 30.0 %", "W3A3"),
        # Equal widths come first; pairs count where nothing else is common.
        ({"a": {"W4A4": 90, "W4A2": 10}, "b": {"W4A4": 92, "W4A2": 60}}, "At W4A4: 90.0 % becomes 92.0 %", "W4A4"),
        ({"a": {"W8A8": 90, "W4A2": 10}, "b": {"W6A6": 92, "W4A2": 60}}, "At W4A2: 10.0 % becomes 60.0 %", "W4A2"),
        ({"a": {"FP": 90, "W4A4": 80}, "b": {"FP": 90, "W4A4": 80}}, "The runs do not differ at any width", "FP"),
        # Runs without a common width, and one run alone.
        ({"a": {"W8A8": 90}, "b": {"W4A4": 92}}, "At W8A8: 90.0 %", "W8A8"),
        ({"a": {"FP": 99, "W4A4": 93, "W8A8": 99, "W5A5": 98.5}}, "Down to W5A5 it loses less than a point", "W4A4"),
        ({"a": {"FP": 99, "W8A8": 99}}, "Down to W8A8 it loses less than a point", "W8A8"),
        ({"a": {"FP": 99, "W8A8": 95, "W4A4": 98.9}}, "At W8A8: 99.0 % becomes 95.0 %", "W8A8"),
        ({"a": {"W8A8": 95, "W4A4": 50}}, "At W4A4: 50.0 %", "W4A4"),
        ({"a": {"W4A8": 95}}, "At W4A8: 95.0 %", "W4A8"),
    ],
)  # fmt: skip
def test_the_message(table: dict[str, dict[str, float]], head: str, bits: str) -> None:
    said = message_of(results(rows_of(table)))
    assert (said.head.replace("\xa0", " "), str(said.bits)) == (head, bits)


def test_the_message_tells_the_other_side_too() -> None:
    table = {
        "plain": {"FP": 99, "W3A3": 53, "W4A32": 98, "W32A2": 30},
        "tuned": {"FP": 98.5, "W3A3": 85, "W4A32": 90, "W32A2": 70},
    }
    assert message_of(results(rows_of(table))).more == (
        "“tuned” against “plain”: +32.0 points.",
        "In floating point the difference is −0.5.",
        "Over all 4 measured widths it goes from −8.0 (W4A32) to +40.0 (W32A2).",
    )


@given(st.floats(-100, 100))
def test_a_signed_number_reads_back(points: float) -> None:
    assert float(signed(points).replace("−", "-")) == pytest.approx(points, abs=0.0501)
    assert signed(points)[0] in "+−" or float(signed(points)) == 0


# The page


def test_the_page_needs_nothing_from_the_network() -> None:
    text = page.render([FILE])
    parsed = Page(text)
    for tag, attributes in parsed.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "img"), tag
        for name in ("src", "href", "srcset", "data", "action", "poster", "background"):
            assert (attributes.get(name) or "data:text/csv;").startswith("data:text/csv;"), (tag, attributes)
        assert "url(" not in (attributes.get("style") or "")
    (style,) = re.findall("<style>(.*?)</style>", text, re.DOTALL)
    assert "url(" not in style
    assert "@import" not in style
    (rule,) = [a["content"] for tag, a in parsed.tags if tag == "meta" and a.get("http-equiv")]
    assert rule is not None
    assert rule.startswith("default-src 'none';")  # the browser refuses whatever a script would fetch
    assert "http" not in rule


def test_the_parser_of_this_test_would_see_a_fetch() -> None:
    text = '<html><link href="https://a"><script src="https://b"></script><script>if (a < b) "</p>"</script></html>'
    assert Page(text).tags[1:3] == [("link", {"href": "https://a"}), ("script", {"src": "https://b"})]


def test_the_page_holds_every_number_once_in_its_table() -> None:
    text = page.render([FILE])
    found = results(ROWS)
    first, second = found.labels
    for bits in found.pairs:
        a, b = found.found[first, bits], found.found[second, bits]
        cells = [f"<td>{100 * s.mean:.1f}<small>{100 * s.low:.1f} to {100 * s.high:.1f}</small></td>" for s in (a, b)]
        gap = f'<td><em class="better">+{100 * (b.mean - a.mean):.1f}</em></td>'
        assert text.count(f'<tr data-bits="{bits}"><th scope="row">{bits}</th>{"".join(cells)}{gap}</tr>') == 1
    flat = "".join(Page(text).text)
    for fact in ("commit abc123+", "seeds 0, 1, 2", "2 cores of A <fast> one", "2020-02-20", "λ = 0.004"):
        assert fact in flat
    assert flat.count("450") == 1  # how many examples is said once
    assert "Test accuracy on 450 examples, mean of 3 seeds." in flat


def test_bars_stand_on_one_scale() -> None:
    text = page.render([FILE])
    shown = dict(re.findall(r'<div data-at="(\w+)"( hidden)?>', text))
    assert list(shown) == ["FP", "W8A8", "W4A4", "W2A2"]
    assert [bits for bits, hidden in shown.items() if not hidden] == [str(message_of(results(ROWS)).bits)]
    values = re.findall(r'style="--v:([\d.]+);--low:([\d.]+);--high:([\d.]+)"', text)
    want = [results(ROWS).found[label, bits] for bits in results(ROWS).equal for label in results(ROWS).labels]
    assert [tuple(map(float, value)) for value in values] == [
        pytest.approx((100 * s.mean, 100 * s.low, 100 * s.high), abs=0.006) for s in want
    ]


def test_runs_of_several_sizes_and_what_was_not_measured() -> None:
    rows = (*ROWS, Row("late", 0, 8, 8, accuracy=0.5, loss=1.0, n=9))
    text = page.render([dataclasses.replace(FILE, rows=rows)])
    assert text.count('<td class="many"></td>') == 3
    assert text.count("<span>not measured</span>") == 3
    assert '<td class="many">50.0<em' in text  # of more than two runs the difference stands in the cell
    assert "Test accuracy on 9 to 450 examples, mean of 1 to 3 seeds." in text


def grid_rows(label: str, shift: float) -> list[Row]:
    return [
        Row(label, 0, b.weights, b.activations, accuracy=(b.weights + b.activations) / 100 + shift, loss=1.0, n=9)
        for b in GRID
    ]


def test_heat_maps_of_every_pair() -> None:
    rows = [*grid_rows("a", 0.0), *grid_rows("b", 0.1), *grid_rows("c", -0.2)]
    text = page.render([RowFile("t", tuple(rows), {})])
    maps = re.findall(r"<figcaption>([^<]*)</figcaption><table class=\"heat\">(.*?)</table>", text)
    assert [title for title, _ in maps] == ["b minus a, points", "c minus a, points", "a, %", "b, %", "c, %"]
    for title, table in maps:
        cells = {
            bits: (kind, float(v), shown)
            for bits, kind, v, shown in re.findall(
                r'<td data-bits="(\w+)" title="\1"(?: class="([a-z ]+)")? style="--v:(\d+)">([^<]+)</td>', table
            )
        }
        assert list(cells) == [str(Bits(w, a)) for w in (32, *range(8, 1, -1)) for a in (32, *range(8, 1, -1))]
        if title[0] == "b" and "minus" in title:
            assert set(cells.values()) == {("", 50.0, "+10")}  # on one scale with the other difference
        elif "minus" in title:
            assert set(cells.values()) == {("minus strong", 100.0, "−20")}
        else:
            shift = {"a": 0, "b": 10, "c": -20}[title[0]]
            want = 4 + 6 + shift
            assert cells["W4A6"] == ("minus" if want < 0 else "", abs(want), f"{want:.0f}")
    assert "The other 56 pairs of widths" in text
    assert re.findall("<figcaption>(Bits of [^<]*)<", text) == [f"Bits of {name}" for name in draw.MAIN]


def test_curves_have_every_point_at_its_height() -> None:
    (chart,) = draw.curves(results(ROWS), main_only=False)
    points = re.findall(r'<g data-bits="(\w+)" transform="translate\(([\d.]+) ([\d.]+)\)"><title>(.*?)</title>', chart)
    assert [bits for bits, *_ in points] == ["W2A2", "W4A4", "W8A8", "FP"] * 2
    xs = [float(x) for _, x, _, _ in points[:4]]
    assert [b - a for a, b in itertools.pairwise(xs)] == pytest.approx([xs[1] - xs[0]] * 3, abs=0.11)
    for bits, _, y, said in points:
        label = html_label(said)
        mean = results(ROWS).found[label, Bits.parse(bits)].mean
        height = draw.HIGH - draw.TOP - draw.BOTTOM
        assert float(y) == pytest.approx(draw.TOP + (1 - mean) * height, abs=0.06)
        assert said.endswith(f"{100 * mean:.1f}\xa0%")


def html_label(said: str) -> str:
    return Page(said).text[0].rsplit(", ", 1)[0]


def test_widths_are_sorted_into_charts() -> None:
    pairs = [(4, 4), (2, 2), (4, 8), (3, 8), (32, 4), (32, 2), (4, 32), (32, 32), (3, 16)]
    rows = [Row("a", 0, w, a, accuracy=0.5, loss=1.0, n=9) for w, a in pairs]
    charts = draw.curves(results(rows), main_only=False)
    found = {re.findall("Bits of (.*?)<", chart)[0]: re.findall('data-bits="(.*?)"', chart) for chart in charts}
    assert found == {
        "weights and activations": ["W2A2", "W4A4", "FP"],
        "activations only": ["W32A2", "W32A4", "FP"],
        "weights, with activations at 8 bits": ["W3A8", "W4A8"],
    }


HOSTILE = '</script><script>alert("x")</script><img src=x onerror=alert(2)><!--\u2028'


def test_text_of_others_is_shown_not_run() -> None:
    rows = tuple(dataclasses.replace(row, label=row.label + HOSTILE) for row in ROWS)
    origin = {**ORIGIN, "commit": HOSTILE, "versions": {HOSTILE: HOSTILE}, "machine": {"cpu": HOSTILE}}
    text = page.render([RowFile("t" + HOSTILE, rows, origin, (HOSTILE,))])
    parsed, clean = Page(text), Page(page.render([FILE]))
    assert [tag for tag, _ in parsed.tags if tag != "li"] == [tag for tag, _ in clean.tags if tag != "li"]
    flat = "".join(parsed.text)
    for shown in ("with <b>penalty</b> & co" + HOSTILE, "t" + HOSTILE, f"commit {HOSTILE}"):
        assert shown in flat
    assert "A note with <script>alert(1)</script>." in "".join(clean.text)


def test_the_rows_come_back_from_the_page() -> None:
    rows = tuple(dataclasses.replace(row, label=f"={row.label}") for row in ROWS)
    text = page.render([dataclasses.replace(FILE, rows=rows)])
    (coded,) = re.findall('href="data:text/csv;base64,([^"]*)"', text)
    lines = list(csv.DictReader(io.StringIO(base64.b64decode(coded).decode())))
    for line, row in zip(lines, rows, strict=True):
        want = {key: str(value) for key, value in row.to_dict().items()}
        assert line == {**want, "label": f"'{row.label}"}  # no formula for a spreadsheet


def test_a_page_of_nothing_and_a_page_too_large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="at least one row"):
        page.render([])
    rows = [dataclasses.replace(row, label=f"run {i}", accuracy=0.5) for i in range(6) for row in grid_rows("", 0)]
    assert len(page.render([RowFile("t", tuple(rows), {})]).encode()) < 400_000
    monkeypatch.setattr(page, "LARGEST", 10_000)
    with pytest.raises(SpecError, match=r"the page would take 0\.\d MB, more than 0\.01; take fewer runs or widths"):
        page.write_report([FILE], tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


# From Python


def test_rows_from_python(tmp_path: Path) -> None:
    rows = [*grid_rows("plain", 0.0), *grid_rows("tuned", 0.25)]
    assert anybit.report(iter(rows), tmp_path / "a" / "out.html") == tmp_path / "a" / "out.html"
    text = (tmp_path / "a" / "out.html").read_text()
    assert "becomes" in text
    assert "difference, points" in text
    assert "anybit " + anybit.__version__ in text  # the versions of this machine


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "either rows, as anybit.sweep returns them, or net and loader"),
        ({"net": 1}, "either rows"),
        ({"loader": 1}, "either rows"),
        ({"rows": ROWS, "net": 1, "loader": 1}, "either rows"),
        ({"rows": []}, "at least one row"),
        ({"rows": [ROWS[0], {"accuracy": 1}]}, "takes rows, as anybit.sweep returns them; got {'accuracy': 1}"),
        ({"rows": "rows.json"}, "takes rows, as anybit.sweep returns them; got 'r'"),
        ({"rows": [*ROWS, ROWS[0]]}, "2 rows are of 'plain', seed 0, at FP; give each run a label of its own"),
        ({"rows": ROWS, "widths": [(4, 4)]}, "measures nothing when it is given rows"),
        ({"rows": ROWS, "label": "a"}, "measures nothing when it is given rows"),
    ],
)
def test_what_is_no_report(settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=re.escape(reason)):
        anybit.report(**settings, out=tmp_path / "out.html")
    assert list(tmp_path.iterdir()) == []


def test_a_network_and_a_loader_from_python(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3, bias=False), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
    model = torch.nn.Sequential(*model, torch.nn.Flatten(), torch.nn.Linear(16, 3)).eval()
    loader = [(torch.rand(20, 1, 4, 4), torch.randint(3, (20,)))]
    net = anybit.prepare(model, loader[0][0][:2], input_range=(0.0, 1.0), preset="paper")
    text = anybit.report(net=net, loader=loader, out=tmp_path / "all.html", label="mine").read_text()
    rows = anybit.sweep(net, loader, widths=GRID, label="mine")
    assert "mine, %" in text
    for row in rows:
        assert f'data-bits="{row.bits}"' in text
        assert f"{100 * row.accuracy:.1f}" in text
    text = anybit.report(net=net, loader=loader, out=tmp_path / "few.html", widths=[(8, 8), (4, 4)]).read_text()
    assert re.findall('<tr data-bits="(.*?)">', text) == ["W8A8", "W4A4"]


# From the command line


def run_folder(path: Path, file: RowFile = FILE) -> Path:
    write_rows(path / "rows.json", file)
    return path


def labels_of(text: str) -> list[str]:
    return [Page(label).text[0] for label in re.findall(r"</svg><span>(.*?)</span></li>", text)]


def report(*words: object) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["report", *map(str, words)])
    assert stop.value.code in (0, None)


def test_runs_of_one_name_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = run_folder(tmp_path / "a" / "x"), run_folder(tmp_path / "b" / "x")
    report(one, two, one)
    text = (tmp_path / "report.html").read_text()
    names = dict.fromkeys(row.label for row in ROWS)
    assert labels_of(text) == [f"{label} ({folder})" for folder in (one, two) for label in names]
    assert "mean of 3 seeds" in text
    write_rows(one / "again.json", FILE)
    report(one, one / "again.json", "--out", tmp_path / "same.html")
    assert f"plain ({one / 'again.json'})" in labels_of((tmp_path / "same.html").read_text())


def test_runs_that_differ_in_the_seed_are_one_line_with_a_spread() -> None:
    def file(label: str, seed: int, accuracy: float) -> RowFile:
        return RowFile(label, (Row(label, seed, 4, 4, accuracy=accuracy, loss=1.0, n=9),), ORIGIN)

    files = [file("base-0", 0, 0.5), file("base-1", 1, 0.75), file("l1-0", 0, 0.875), file("w-4", 0, 0.25)]
    assert [row.label for row in told_apart(files, list("abcd"))] == ["base", "base", "l1-0", "w-4"]
    text = page.render(files)
    assert '<td class="many">62.5<small>50.0 to 75.0</small></td><td class="many">87.5<em' in text
    assert "At W4A4: 62.5\xa0% becomes 25.0\xa0%" in text


def test_the_verb_puts_runs_side_by_side_and_opens_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    one, two = run_folder(tmp_path / "runs" / "one"), run_folder(tmp_path / "runs" / "deep" / "two")
    report(one, two / "rows.json")
    assert capsys.readouterr().out == f"{tmp_path / 'runs' / 'report.html'}\n"
    assert opened == []
    report(one, "--open")
    assert capsys.readouterr().out == f"{one / 'report.html'}\n"
    assert opened == [(one / "report.html").as_uri()]


def test_a_page_of_one_run_speaks_of_no_differences() -> None:
    rows = [Row("a", 0, 4, 4, accuracy=0.5, loss=1.0, n=9), Row("b", 0, 4, 4, accuracy=0.6, loss=1.0, n=9)]
    assert "differences in points" not in page.render([RowFile("t", tuple(rows[:1]), {})])
    assert "differences in points" in page.render([RowFile("t", tuple(rows), {})])


def test_a_page_about_an_error_has_no_percent_and_lower_is_better() -> None:
    def rows(label: str, values: dict[int, float]) -> tuple[Row, ...]:
        return tuple(
            Row(label, 0, b, b, accuracy=v, loss=None, n=9, metric="relative error") for b, v in values.items()
        )

    files = [
        RowFile("a", rows("plain", {32: 0.0, 8: 0.01, 4: 2.5}), {}),
        RowFile("b", rows("tuned", {32: 0.0, 8: 0.02, 4: 0.5}), {}),
    ]
    text = page.render(files)
    head = re.search(r"<h1[^>]*>(.*?)</h1>", text, re.S)
    assert head is not None
    assert "At W4A4: relative error 2.5 becomes 0.5" in head[1]
    body = text[text.index("</style>") : text.index("<script")]
    assert "accuracy" not in body.lower()
    words = re.sub(r"<[^>]*>", " ", body)
    assert "%" not in words
    assert "points" not in words
    assert '<em class="better">−2</em>' in text  # less of an error
    assert '<em class="worse">+0.01</em>' in text
    with pytest.raises(SpecError, match="rows of accuracy and of relative error do not belong on one page"):
        page.render([*files, RowFile("c", (Row("x", 0, 4, 4, accuracy=0.5, loss=1.0, n=9),), {})])


def test_rows_of_any_metric_are_written_and_read_and_old_ones_too(tmp_path: Path) -> None:
    row = Row("a", 0, 4, 4, accuracy=17.5, loss=None, n=9, metric="mean absolute error")
    write_rows(tmp_path / "rows.json", RowFile("t", (row,), {}))
    assert read_rows(tmp_path / "rows.json").rows == (row,)
    values = json.loads((tmp_path / "rows.json").read_text())
    old = {"label": "a", "seed": 0, "weights": 4, "activations": 4, "accuracy": 0.5, "loss": 1.0, "n": 9}
    (tmp_path / "rows.json").write_text(json.dumps({**values, "rows": [old]}))
    assert read_rows(tmp_path / "rows.json").rows[0].metric == "accuracy"
    (tmp_path / "rows.json").write_text(json.dumps({**values, "rows": [{**old, "accuracy": 17.0}]}))
    with pytest.raises(FileError, match=r"accuracy of a row is from 0 to 1, got 17.0"):
        read_rows(tmp_path / "rows.json")
