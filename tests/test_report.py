from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from anybit.report import insight, page
from anybit.report.curves import POINTS, read_curves
from anybit.report.insight import (
    Budget,
    Cell,
    Example,
    FirstOrder,
    Insight,
    Layer,
    LayerWidth,
    insight_path,
    read_insight,
    write_insight,
)
from anybit.report.measured import ALONE, Measured, group_seeds, measured
from hypothesis import example, given
from hypothesis import strategies as st

from anybit.cli import main
from anybit.errors import FileError, MissingDependency, SpecError
from anybit.pages.rows import FORMAT, RowFile, read_rows, summarize, write_rows
from anybit.policy import BATTERY, Chooser, Reading, battery
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


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5))
@example([0.0985] * 3)
def test_a_mean_lies_among_its_seeds(accuracies: list[float]) -> None:
    (s,) = summarize(Row("a", seed, 4, 4, accuracy=a, loss=1.0, n=8) for seed, a in enumerate(accuracies))
    assert s.low <= s.mean <= s.high


def data_of(text: str) -> dict[str, Any]:
    """Return what the page's scripts are given."""
    start = text.index(mark := '<script type="application/json" id="data">') + len(mark)
    values: dict[str, Any] = json.loads(text[start : text.index("</script>", start)])
    return values


def test_the_page_needs_nothing_from_the_network() -> None:
    text = page.render(FILE)
    parsed = Page(text)
    scripts = [attributes for tag, attributes in parsed.tags if tag == "script"]
    assert len(scripts) == 3
    for tag, attributes in parsed.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base"), tag
        for name in ("src", "href", "srcset", "data", "action", "poster", "background"):
            assert name not in attributes, (tag, attributes)
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


def test_the_scripts_get_every_mean_and_spread() -> None:
    entries = data_of(page.render(FILE))["accuracy"]
    for entry, s in zip(entries, summarize(ROWS), strict=True):
        assert (entry["label"], entry["weights"], entry["activations"]) == (s.label, s.bits.weights, s.bits.activations)
        assert (entry["mean"], entry["low"], entry["high"], entry["seeds"]) == (s.mean, s.low, s.high, s.seeds)
        losses = [row.loss for row in ROWS if (row.label, row.bits) == (s.label, s.bits)]
        assert entry["loss"] == pytest.approx(sum(losses) / len(losses))


def test_one_seed_has_no_spread_and_a_label_without_a_measurement_an_empty_cell() -> None:
    rows = (*ROWS, Row("late", 0, 8, 8, accuracy=0.5, loss=1.0, n=450))
    text = page.render(dataclasses.replace(FILE, rows=rows))
    assert text.count("<td></td>") == 3
    assert "<td>50.0</td>" in text


HOSTILE = '</script><script>alert("x")</script><img src=x onerror=alert(2)><!--\u2028'


def test_text_of_others_is_shown_not_run() -> None:
    rows = tuple(dataclasses.replace(row, label=row.label + HOSTILE) for row in ROWS)
    origin = {**ORIGIN, "commit": HOSTILE, "versions": {HOSTILE: HOSTILE}}
    bad = dataclasses.replace(
        INSIGHT, label=rows[0].label, data=HOSTILE, classes=(HOSTILE, "b"), layers=(Layer(HOSTILE, HOSTILE, "1", 2),)
    )
    run = Measured(RowFile("t" + HOSTILE, rows, origin, (HOSTILE, HOSTILE)), bad, missing=(HOSTILE,))
    text = page.render([run])
    parsed, clean = Page(text), Page(page.render([Measured(FILE, INSIGHT)]))
    assert sorted({tag for tag, _ in parsed.tags}) == sorted({tag for tag, _ in clean.tags})
    assert not {"b", "i", "img"} & {tag for tag, _ in parsed.tags}
    assert len([tag for tag, _ in parsed.tags if tag == "script"]) == 3
    flat = "".join(parsed.text)
    assert "with <b>penalty</b> & co" + HOSTILE in flat
    assert "t" + HOSTILE in flat
    assert f"commit {HOSTILE}" in flat
    assert "A note with <script>alert(1)</script>." in "".join(clean.text)
    values = data_of(text)  # all of it is still there, as text
    assert values["runs"][0]["insight"]["classes"] == [HOSTILE, "b"]
    assert values["missing"] == [HOSTILE]


def test_widths_are_sorted_into_charts() -> None:
    pairs = [(4, 4), (2, 2), (4, 32), (2, 32), (32, 4), (32, 2), (4, 8), (3, 16), (32, 32)]
    rows = tuple(Row("a", 0, w, a, accuracy=0.5, loss=1.0, n=9) for w, a in pairs)
    text = page.render(dataclasses.replace(FILE, rows=rows))
    assert [(entry["family"], entry["width"]) for entry in data_of(text)["accuracy"]] == [
        ("weights and activations", 4),
        ("weights and activations", 2),
        ("weights only", 4),
        ("weights only", 2),
        ("activations only", 4),
        ("activations only", 2),
        ("weights, with activations at 8 bits", 4),
        ("weights, with activations at 16 bits", 3),
        ("weights and activations", 32),
    ]
    assert text.count("plotly.js v") == 1  # the library is in there once


def test_without_plotly_there_is_no_page_and_no_half_of_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(MissingDependency, match=r"plotly.*pip install 'anybit\[report\]'"):
        page.write_report(FILE, tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_a_page_of_nothing_and_a_page_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="at least one run"):
        page.render([])
    assert len(page.render([Measured(FILE, INSIGHT)]).encode()) < 6_000_000
    monkeypatch.setattr(page, "LARGEST", 1_000_000)
    with pytest.raises(SpecError, match=r"a page of 1 runs would take \d\.\d MB, more than 1; take fewer"):
        page.render(FILE)


def test_the_policy_of_the_page_is_that_of_the_package() -> None:
    values = data_of(page.render(FILE))["policy"]
    chooser = Chooser(battery())
    assert values["margin"] == chooser.margin
    assert [step["percent"] for step in values["steps"]] == sorted(step.percent for step in BATTERY)
    for step in values["steps"]:
        got = chooser.policy(Reading(step["percent"] - 0.5, on_mains=False))
        assert got == Bits(step["weights"], step["activations"])
    assert Bits(**values["mains"]) == chooser.policy(Reading())


# Insight


WIDTHS = (2, 4, 32)
PIXEL = "data:image/png;base64,iVBORw0KGgo="
INSIGHT = Insight(
    label="plain",
    seed=0,
    data="digits",
    classes=("zero", "one"),
    n=450,
    batch=9,
    widths=WIDTHS,
    grid=tuple(Cell(w, a, accuracy=w / 64 + a / 128, loss=3 / w + 1 / a, kl=0.01) for w in WIDTHS for a in WIDTHS),
    sizes=(200, 400, 3200),
    narrow=(2, 4),
    layers=(
        Layer("conv.weight", "weight", "4x1x3x3", 2, "weights", -1.5, 0.75, (0.5, 0.125)),
        Layer("conv", "activation", "Nx4x8x8", 2, "batch norm conv", 0.0, 6.0),
        Layer("x", "input", "Nx1x8x8", 8),
    ),
    budgets=(Budget(3.0, 2.875, 300, 0.25, 0.5, 0.625, 8, 0.75, (LayerWidth("conv.weight", 3),)),),
    weights=36,
    l1=(2.0, 3.0),
    l2=(1.0, 0.5),
    first_order=(
        FirstOrder(2, (0.5, 0.25), (0.75, 0.125), 0.875),
        FirstOrder(4, (0.0625, 0.0), (0.125, -0.5), 0.25),
    ),
    examples=(
        Example(3, 1, (0, 0, 0, 1, 1, 1, 1, 1, 1), (0.5, 0.25, 0.75, 0.5, 0.5, 0.5, 0.875, 0.875, 1.0), PIXEL),
        Example(7, 0, (1,) * 9, (0.75,) * 9),
    ),
    origin={"commit": "abc", "date": "2020-02-21", "checkpoint_sha256": "f00"},
)


def test_insight_goes_there_and_back(tmp_path: Path) -> None:
    path = tmp_path / "insight.json"
    write_insight(path, INSIGHT)
    assert read_insight(path) == INSIGHT
    assert json.loads(path.read_text())["format"] == insight.FORMAT
    assert [file.name for file in tmp_path.iterdir()] == ["insight.json"]


CELL, LAYER, EXAMPLE = (insight.to_dict(INSIGHT)[name][0] for name in ("grid", "layers", "examples"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "anybit-insight/99"}, "not in the format 'anybit-insight/1'"),
        ({"origin": []}, "origin must be a table"),
        ({"n": "many"}, "'n' must be a whole number, got 'many'"),
        ({"grid": ...}, "missing key 'grid'"),
        ({"grdi": []}, "unknown key 'grdi'; did you mean 'grid'?"),
        ({"grid": [{**CELL, "accuracy": 98.0}]}, "accuracy is from 0 to 1, got 98.0"),
        ({"grid": [{**CELL, "weights": 1}]}, "weights must be 2 to 16"),
        ({"grid": [{**CELL, "loss": math.nan}]}, "must be finite numbers"),
        ({"grid": [3]}, "'grid[0]' must be a table"),
        ({"widths": [2, 4, 64]}, "bits must be 2 to 16"),
        ({"sizes": [1]}, "widths and sizes must be equally many, got 3 and 1"),
        ({"l1": [1.0]}, "l1 and l2 must be equally many"),
        ({"l1": [1.0, math.inf]}, "l1 and l2 must be finite numbers"),
        ({"layers": [{**LAYER, "bounds": [1.0]}]}, "bounds of conv.weight and narrow widths must be equally many"),
        ({"examples": [{**EXAMPLE, "image": "https://example.org/a.png"}]}, "image must be a PNG in a data: address"),
        ({"examples": [{**EXAMPLE, "image": 'data:image/png;base64,AA" x="'}]}, "image must be a PNG"),
        ({"examples": [{**EXAMPLE, "label": 2}]}, "example 3 names a class that is not one of 2"),
        ({"examples": [{**EXAMPLE, "predicted": [0]}]}, "predicted and confidence must be equally many"),
        ({"examples": [{**EXAMPLE, "predicted": [0], "confidence": [1]}]}, "predictions of an example and cells"),
        ({"first_order": [{"bits": 4, "predicted": [1], "measured": [], "correlation": 1}]}, "equally many"),
        ({"budgets": [{"budget": 3}]}, "missing key"),
    ],
)
def test_insight_that_cannot_be_read_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "insight.json"
    write_insight(path, INSIGHT)
    values = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
    with pytest.raises(FileError, match=re.escape(message)) as caught:
        read_insight(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value).splitlines()) == 1


# What lies beside the rows


def run_folder(path: Path, *, steps: int = 40, strengths: bool = True) -> Path:
    """Make what training and sweeping leave, with numbers that are easy to follow."""
    path.mkdir(parents=True)
    write_rows(path / "rows.json", dataclasses.replace(FILE, origin={**ORIGIN, "checkpoint_sha256": "f00"}))
    lines = [
        {"step": s, "epoch": s // 10, "lr": 0.1, "loss": 2.0 + s, "weight_norm": 4.0, "activation_norm": 8.0,
         "penalized": s >= 10}
        for s in range(steps)
    ]  # fmt: skip
    (path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if strengths:
        (path / "run.json").write_text('{"recipe": {"penalty": {"weight": 0.5, "activation": 0.25}}}')
    return path


def test_curves_by_hand(tmp_path: Path) -> None:
    curves = read_curves(run_folder(tmp_path / "run"), points=4)
    assert curves.epochs == (0.45, 1.45, 2.45, 3.45)
    assert curves.values == {
        "loss": (6.5, 16.5, 26.5, 36.5),
        "weight_norm": (4.0,) * 4,
        "activation_norm": (8.0,) * 4,
        "penalty": (None, 4.0, 4.0, 4.0),
    }
    whole = read_curves(tmp_path / "run")
    assert whole.values["loss"] == tuple(2.0 + s for s in range(40))
    assert "penalty" not in read_curves(run_folder(tmp_path / "plain", strengths=False)).values
    assert len(read_curves(run_folder(tmp_path / "long", steps=1999)).epochs) <= POINTS


def test_what_cannot_be_drawn_in_a_log_is_left_out(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", steps=4)
    line = '{"step": 4, "epoch": 0, "loss": NaN, "weight_norm": null, "activation_norm": Infinity, "note": "x"}\n'
    with (folder / "log.jsonl").open("a") as file:
        file.write(line)
    curves = read_curves(folder)
    assert curves.values["loss"] == (2.0, 3.0, 4.0, 5.0, None)
    assert curves.values["activation_norm"][-1] is None
    assert "note" not in curves.values


@pytest.mark.parametrize("line", ["{", "3", "[]", "{}", '{"epoch": "x"}', '{"epoch": -1}', '{"epoch": null}'])
def test_a_broken_log_is_named_with_its_line(line: str, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", steps=2)
    with (folder / "log.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(FileError, match=r"log\.jsonl: line 3 is no step of a training log"):
        read_curves(folder)
    (folder / "log.jsonl").write_text("")
    with pytest.raises(FileError, match="holds no step"):
        read_curves(folder)


def test_rows_alone_still_make_a_page_that_says_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    write_rows(path, FILE)
    found = measured(FILE, path)
    assert (found.insight, found.curves) == (None, None)
    first, second = data_of(page.render([found]))["missing"]
    assert first == ALONE
    assert f"There is no {tmp_path / 'log.jsonl'}" in second
    assert data_of(page.render(FILE))["missing"] == [ALONE]
    (tmp_path / "model.safetensors").touch()  # with a checkpoint beside them there is a command to name
    first, _ = measured(FILE, path).missing
    assert first.startswith(f"There is no {tmp_path / 'insight.json'}")
    assert first.endswith(f"anybit sweep {tmp_path}")


def test_runs_of_one_name_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = run_folder(tmp_path / "a" / "x"), run_folder(tmp_path / "b" / "x")
    write_insight(two / "insight.json", INSIGHT)
    report(one, two, one)
    values = data_of((tmp_path / "report.html").read_text())
    labels = list(dict.fromkeys(entry["label"] for entry in values["accuracy"]))
    assert labels == [f"{label} ({folder})" for folder in (one, two) for label in dict.fromkeys(r.label for r in ROWS)]
    assert {entry["seeds"] for entry in values["accuracy"]} == {3}
    assert values["runs"][1]["insight"]["label"] == f"plain ({two})"


def test_insight_of_another_checkpoint_is_left_out(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    path = folder / "rows.json"
    write_insight(insight_path(path), INSIGHT)
    found = measured(read_rows(path), path)
    assert found.insight == INSIGHT
    assert found.missing == ()
    write_insight(insight_path(path), dataclasses.replace(INSIGHT, origin={"checkpoint_sha256": "bad"}))
    found = measured(read_rows(path), path)
    assert found.insight is None
    assert "was measured on another checkpoint than the rows" in found.missing[0]


def test_runs_that_differ_in_the_seed_are_one_line_with_a_spread(tmp_path: Path) -> None:
    def file(label: str, seed: int, accuracy: float) -> RowFile:
        return RowFile(label, (Row(label, seed, 4, 4, accuracy=accuracy, loss=1.0, n=9),), ORIGIN)

    files = [file("base-0", 0, 0.5), file("base-1", 1, 0.75), file("l1-0", 0, 0.875), file("w-4", 0, 0.25)]
    assert group_seeds(files) == {"base-0": "base", "base-1": "base", "l1-0": "l1-0", "w-4": "w-4"}
    text = page.render([Measured(f) for f in files])
    assert "<td>62.5 <span class=spread>50.0 to 75.0</span></td><td>87.5</td><td>25.0</td>" in text
    assert "<h1>anybit: base and l1-0 and w-4</h1>" in text


def report(*words: object) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["report", *map(str, words)])
    assert stop.value.code in (0, None)


def test_the_verb_puts_runs_side_by_side_and_opens_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    one, two = run_folder(tmp_path / "runs" / "one"), run_folder(tmp_path / "runs" / "deep" / "two")
    write_insight(one / "insight.json", INSIGHT)
    report(one, two / "rows.json")
    target = tmp_path / "runs" / "report.html"
    assert capsys.readouterr().out == f"{target}\n"
    values = data_of(target.read_text())
    assert [bool(run["insight"]) for run in values["runs"]] == [True, False]
    assert [bool(run["curves"]) for run in values["runs"]] == [True, True]
    want = insight.to_dict(dataclasses.replace(INSIGHT, label=f"plain ({one})"))
    assert values["runs"][0]["insight"] == json.loads(json.dumps(want))
    assert opened == []
    report(one, "--open")
    assert capsys.readouterr().out == f"{one / 'report.html'}\n"
    assert opened == [(one / "report.html").as_uri()]


def test_a_broken_insight_is_one_line_and_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path / "run")
    (folder / "insight.json").write_text("{")
    with pytest.raises(SystemExit) as stop:
        main(["report", str(folder)])
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert err.startswith(f"error: {folder / 'insight.json'}: broken JSON")
    assert len(err.splitlines()) == 1
    assert not (folder / "report.html").exists()
