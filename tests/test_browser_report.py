"""The report page in a real browser: what it shows is what was measured, and it needs nothing but itself."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Opened, chromium_or_skip, open_page
from test_report import FILE, HOSTILE

from anybit.cli import main
from anybit.pages.page import write_report
from anybit.pages.rows import GRID, RowFile, read_rows
from anybit.spec import Bits, Row

RECIPE = """
name = "{name}"
epochs = 4
[model]
name = "small-conv"
multiplier = 0.25
[data]
name = "digits"
batch = 64
[penalty]
weight = {strength}
activation = {strength}
"""
NAMES = ("plain-0", "l1-0")


def run(*words: object) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    assert stop.value.code in (0, None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small runs, trained, swept and reported by the commands that a user types."""
    chromium_or_skip()
    folder = tmp_path_factory.mktemp("runs")
    for name, strength in zip(NAMES, (0.0, 0.002), strict=True):
        (folder / "recipe.toml").write_text(RECIPE.format(name=name, strength=strength))
        run("train", folder / "recipe.toml", "--out", folder / name)
        run("sweep", folder / name)
    run("report", *(folder / name for name in NAMES))
    return folder


@pytest.fixture(scope="module")
def opened(folder: Path) -> Iterator[Opened]:
    with open_page(folder / "report.html") as opened:
        yield opened


@pytest.fixture(autouse=True)
def _clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test with the shared page: no error so far, and nothing left the page."""
    yield
    if "opened" in request.fixturenames:
        shared = request.getfixturevalue("opened")
        assert shared.errors == []
        assert shared.outside == []


@pytest.fixture(scope="module")
def rows(folder: Path) -> dict[tuple[str, str], Row]:
    return {(name, str(row.bits)): row for name in NAMES for row in read_rows(folder / name / "rows.json").rows}


def test_the_listener_hears_errors_and_requests(tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    path.write_text(
        "<script>console.error('loud'); fetch('http://127.0.0.1:8009/x').catch(() => 0); missing()</script>"
        "<img src='file:///nowhere.png'><div style='width: 4000px'>wide</div>"
    )
    with open_page(path) as opened:
        opened.page.wait_for_load_state("networkidle")
        assert any("loud" in error for error in opened.errors)
        assert any("missing is not defined" in error for error in opened.errors)
        assert {"http://127.0.0.1:8009/x", "file:///nowhere.png"} <= set(opened.outside)
        assert opened.scrolls_sideways


def test_the_page_is_small_and_asks_for_nothing(folder: Path, opened: Opened) -> None:
    assert (folder / "report.html").stat().st_size < 150_000
    assert opened.requests == [(folder / "report.html").as_uri()]
    sections = opened.page.eval_on_selector_all("main section", "all => all.map((one) => one.id)")
    assert sections == ["at", "curves", "maps", "numbers", "origins"]
    for word in ("undefined", "NaN", "null", "None", "[object"):
        assert word not in opened.page.inner_text("body"), word


def shown(page: Any) -> dict[str, tuple[float, float]]:
    """Return for each run what is written beside its bar, in %, and how long the bar is, in % of its track."""
    from playwright.sync_api import expect

    expect(page.locator("[data-at]:not([hidden])")).to_have_count(1)
    code = """all => all.map((bar) => {
      const [track, full] = ["i", "i"].map((tag) => bar.querySelector(tag));
      const wide = parseFloat(getComputedStyle(track, "::before").width) / full.getBoundingClientRect().width;
      return [bar.querySelector("b").textContent, parseFloat(bar.querySelector("span").textContent), 100 * wide];
    })"""
    found = page.eval_on_selector_all("[data-at]:not([hidden]) .bar", code)
    return {name: (said, long) for name, said, long in found}


def check(page: Any, rows: dict[tuple[str, str], Row], bits: str) -> None:
    assert page.input_value("#width") == bits
    assert page.get_attribute("[data-at]:not([hidden])", "data-at") == bits
    for name, (said, long) in shown(page).items():
        accuracy = 100 * rows[name, bits].accuracy
        assert said == pytest.approx(accuracy, abs=0.051)
        assert long == pytest.approx(accuracy, abs=0.5)  # all on one scale, from 0 to 100
    marked = page.eval_on_selector_all(".now", "all => all.map((one) => one.dataset.bits)")
    assert set(marked) == {bits}


def test_it_opens_where_the_runs_differ_most(opened: Opened, rows: dict[tuple[str, str], Row]) -> None:
    first, second = NAMES
    gaps = {str(b): rows[second, str(b)].accuracy - rows[first, str(b)].accuracy for b in GRID}
    bits = max((b for b in gaps if b in {str(Bits(w, w)) for w in (32, *range(2, 9))}), key=lambda b: abs(gaps[b]))
    before, after = (100 * rows[name, bits].accuracy for name in NAMES)
    assert opened.page.inner_text("h1").replace("\xa0", " ") == f"At {bits}: {before:.1f} % becomes {after:.1f} %"
    check(opened.page, rows, bits)


def test_every_width_is_in_the_list(opened: Opened, rows: dict[tuple[str, str], Row]) -> None:
    options = opened.page.eval_on_selector_all("#width option", "all => all.map((one) => one.value)")
    assert sorted(options) == sorted(map(str, GRID))
    for bits in ("FP", "W2A2", "W8A3", "W32A4"):
        opened.page.select_option("#width", bits)
        check(opened.page, rows, bits)
    opened.page.focus("#width")
    opened.page.keyboard.press("ArrowDown")
    assert opened.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    check(opened.page, rows, options[options.index("W32A4") + 1])


def test_cells_marks_and_lines_choose_a_width(opened: Opened, rows: dict[tuple[str, str], Row]) -> None:
    page = opened.page
    for place in (
        '.heat >> nth=0 >> td[data-bits="W3A6"]',
        '.chart >> nth=1 >> g[data-bits="W4A32"] >> nth=1',
        '.numbers >> nth=0 >> tr[data-bits="W5A5"]',
    ):
        page.click(place)
        check(page, rows, place.split('"')[1])


def test_heat_maps_hold_what_was_measured(opened: Opened, rows: dict[tuple[str, str], Row]) -> None:
    code = (
        "all => all.map((map) => [...map.querySelectorAll('td[data-bits]')].map((c) => [c.dataset.bits, c.innerText]))"
    )
    difference, *each = opened.page.eval_on_selector_all(".heat", code)
    for name, cells in zip(NAMES, each, strict=True):
        assert len(cells) == 64
        for bits, text in cells:
            assert float(text) == pytest.approx(100 * rows[name, bits].accuracy, abs=0.501)
    for bits, text in difference:
        gap = 100 * (rows[NAMES[1], bits].accuracy - rows[NAMES[0], bits].accuracy)
        assert float(text.replace("−", "-")) == pytest.approx(gap, abs=0.051 if abs(gap) < 9.9 else 0.501)


def test_the_table_and_its_file(folder: Path, opened: Opened, rows: dict[tuple[str, str], Row]) -> None:
    code = "all => all.map((row) => [...row.cells].map((cell) => cell.innerText))"
    lines = opened.page.locator(".numbers").first.locator("tr[data-bits]").evaluate_all(code)
    assert [line[0] for line in lines] == ["FP", *(f"W{w}A{w}" for w in range(8, 1, -1))]
    for bits, *values, gap in lines:
        want = [100 * rows[name, bits].accuracy for name in NAMES]
        assert [float(value) for value in values] == pytest.approx(want, abs=0.051)
        assert float(gap.replace("−", "-")) == pytest.approx(want[1] - want[0], abs=0.051)
    with opened.page.expect_download() as waiting:
        opened.page.click("a[download]")
    table = list(csv.DictReader(io.StringIO(Path(waiting.value.path()).read_text())))
    assert [float(line["accuracy"]) for line in table] == [
        row["accuracy"] for name in NAMES for row in json.loads((folder / name / "rows.json").read_text())["rows"]
    ]


def light(colour: str) -> float:
    """Return how bright a colour is, 0 to 1, as the rules for readable pages weigh it."""
    inner = colour[colour.index("(") + 1 : -1].replace("srgb ", "").replace(",", " ").split()
    parts = [float(part) / (1 if colour.startswith("color(") else 255) for part in inner[:3]]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_follow_the_system_while_the_page_is_open(opened: Opened) -> None:
    page = opened.page

    def colour(what: str, name: str) -> str:
        return str(page.evaluate(f"getComputedStyle(document.querySelector({what!r})).{name}"))

    seen = []
    for scheme in ("light", "dark", "light"):
        page.emulate_media(color_scheme=scheme)
        paper = colour("body", "backgroundColor")
        assert (light(paper) < 0.1) == (scheme == "dark")
        assert contrast(paper, colour("body", "color")) > 10
        assert contrast(paper, colour(".soft", "color")) > 4.5
        assert contrast(paper, colour(".chart text", "fill")) > 4.5
        for name in ("run-0", "run-1"):
            assert contrast(paper, colour(f".chart .{name} .line", "stroke")) > 3
        code = "all => all.map((one) => { const c = getComputedStyle(one); return [c.backgroundColor, c.color]; })"
        for ground, ink in page.eval_on_selector_all(".heat td[data-bits]", code):
            assert contrast(ground, ink) > 4.4
        seen.append(colour(".chart .run-1 .line", "stroke"))
    assert seen[0] == seen[2] != seen[1]


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("runs", [1, 2, 5])
def test_nothing_is_cut_off(width: int, runs: int, tmp_path: Path) -> None:
    rows = tuple(
        Row(f"a-rather-long-name-{i}", s, b.weights, b.activations, accuracy=0.1 * i + 0.01 * s + 0.4, loss=1.0, n=9)
        for i in range(runs)
        for s in (0, 1)
        for b in GRID
    )
    write_report([dataclasses.replace(FILE, rows=rows)], tmp_path / "page.html")
    with open_page(tmp_path / "page.html", width=width, is_mobile=width < 500) as opened:
        page = opened.page
        page.eval_on_selector_all("details", "all => all.forEach((one) => { one.open = true; })")
        assert not opened.scrolls_sideways
        cut = "all => all.filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.className)"
        assert page.eval_on_selector_all(".scroll, table, td, th, figure, .bar, .bar span, h1, p", cut) == []
        edges = page.eval_on_selector_all("table, svg, .bar", "all => all.map((a) => a.getBoundingClientRect().right)")
        assert max(edges) <= width
        assert (opened.errors, opened.outside) == ([], [])


def test_hostile_files_are_text_in_the_browser_too(tmp_path: Path) -> None:
    attack = HOSTILE + "<b onmouseover=alert(3)>=1+1</b>" + '"); window.pwned = 1; ("'
    rows = tuple(dataclasses.replace(row, label=attack + row.label) for row in FILE.rows)
    write_report([RowFile(attack, rows, {**FILE.origin, "commit": attack}, (attack,))], tmp_path / "bad.html")
    with open_page(tmp_path / "bad.html") as opened:
        dialogs: list[str] = []
        opened.page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
        opened.page.select_option("#width", "W2A2")
        opened.page.wait_for_timeout(300)
        assert dialogs == []
        assert opened.page.evaluate("window.pwned") is None
        assert opened.page.locator("img, [onerror], [onmouseover]").count() == 0
        assert opened.page.locator("script").count() == 1
        assert attack.replace("\u2028", "") in opened.page.inner_text("#origins").replace("\u2028", "")
        assert (opened.errors, opened.outside) == ([], [])


def test_without_scripts_the_message_and_all_numbers_are_there(folder: Path) -> None:
    with open_page(folder / "report.html", java_script_enabled=False) as opened:
        page = opened.page
        assert page.inner_text("h1").startswith("At ")
        assert page.locator("[data-at]").locator("visible=true").count() == 1
        assert page.locator(".numbers").first.locator("tr").count() == 9
