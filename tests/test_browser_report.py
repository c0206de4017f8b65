"""The report page in a real browser: what it shows is what was measured, and it needs nothing but itself."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anybit.report.insight import Insight, Layer, read_insight, write_insight
from anybit.report.measured import Measured
from browser import Opened, chromium_or_skip, open_page
from test_report import FILE, HOSTILE, INSIGHT, run_folder

from anybit.cli import main
from anybit.pages.page import write_report
from anybit.pages.rows import RowFile, read_rows, write_rows
from anybit.policy import Chooser, Reading, battery
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
EXAMPLES = 100


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
        run("sweep", folder / name, "--examples", EXAMPLES)
    run("report", *(folder / name for name in NAMES))
    return folder


def ready(opened: Opened) -> Any:
    """Return the page once everything is drawn."""
    opened.page.wait_for_selector("html[data-ready=yes]")
    return opened.page


@pytest.fixture(scope="module")
def opened(folder: Path) -> Iterator[Opened]:
    with open_page(folder / "report.html") as opened:
        ready(opened)
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
def insights(folder: Path) -> dict[str, Insight]:
    return {name: read_insight(folder / name / "insight.json") for name in NAMES}


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
    assert (folder / "report.html").stat().st_size < 6_000_000
    assert opened.requests[0] == (folder / "report.html").as_uri()
    sections = opened.page.eval_on_selector_all("main section", "all => all.map((one) => one.id)")
    assert sections == ["one-width", "accuracy", "grid", "size", "layers", "training", "gradients", "examples"]
    assert opened.page.locator(".missing").count() == 0
    assert "[object" not in opened.page.inner_text("body")
    for word in ("undefined", "NaN", "null"):
        assert word not in opened.page.inner_text("main"), word


def slide(page: Any, slider: str, bits: int) -> None:
    values = page.evaluate(f"anybit.{slider}")
    page.locator(f"#{slider}").fill(str(values.index(bits)))


def card(page: Any, label: str) -> tuple[str, dict[str, str]]:
    """Return the accuracy and the facts on the card of a run."""
    card = page.locator(".card").filter(has=page.locator(f'.big[data-label="{label}"]'))
    facts = card.locator("dd").evaluate_all("all => all.map((one) => [one.dataset.fact, one.textContent])")
    return card.locator(".big").inner_text(), dict(facts)


def number(value: float) -> float:
    """Return what is left of a number when the page shows four digits of it."""
    return float(f"{value:.4g}")


def test_the_slider_shows_the_numbers_of_rows_json(folder: Path, opened: Opened) -> None:
    page = opened.page
    page.locator("#lock").check()
    seen = set()
    for name in NAMES:
        for row in json.loads((folder / name / "rows.json").read_text())["rows"]:
            assert row["weights"] == row["activations"]
            slide(page, "weights", row["weights"])
            assert page.inner_text("#now") == str(Bits(row["weights"], row["activations"]))
            accuracy, facts = card(page, name)
            assert accuracy == f"{100 * row['accuracy']:.1f} %"
            assert float(facts["loss"]) == pytest.approx(number(row["loss"]), rel=1e-6)
            assert f"{name} {accuracy}" in page.inner_text("#brief")
            seen.add(accuracy)
    assert len(seen) > 4


def test_other_pairs_come_from_the_grid(opened: Opened, insights: dict[str, Insight]) -> None:
    page = opened.page
    page.locator("#lock").uncheck()
    for w, a in ((3, 8), (8, 3), (32, 2), (4, 32)):
        slide(page, "weights", w)
        slide(page, "activations", a)
        for name, insight in insights.items():
            (cell,) = (c for c in insight.grid if (c.weights, c.activations) == (w, a))
            accuracy, facts = card(page, name)
            assert accuracy == f"{100 * cell.accuracy:.1f} %"
            assert float(facts["loss"]) == pytest.approx(number(cell.loss), rel=1e-6)
            size = insight.sizes[insight.widths.index(w)]
            assert facts["size"] == f"{size / 1000:.1f} kB"


def test_predicted_loss_and_its_bound_move_with_the_weights(opened: Opened, insights: dict[str, Insight]) -> None:
    page = opened.page
    for w in (2, 5, 8, 32):
        slide(page, "weights", w)
        for name, insight in insights.items():
            _, facts = card(page, name)
            float_loss = next(c.loss for c in insight.grid if (c.weights, c.activations) == (32, 32))
            found = [entry for entry in insight.first_order if entry.bits == w]
            mean = sum(found[0].predicted) / len(found[0].predicted) if found else 0.0
            shown = float(facts["loss predicted, weights rounded"])
            assert shown == pytest.approx(number(float_loss + mean), rel=1e-3, abs=1e-9)
            at = insight.narrow.index(w) if found else None
            bound = sum(layer.bounds[at] for layer in insight.layers if layer.bounds) if at is not None else 0.0
            assert float(facts["first-order bound on its growth"]) == pytest.approx(number(bound), rel=1e-3)


def test_examples_flip_as_measured(opened: Opened, insights: dict[str, Insight]) -> None:
    page = opened.page
    page.locator("#lock").check()
    flips = []
    for bits in (32, 4, 3, 2):
        slide(page, "weights", bits)
        for number_, insight in enumerate(insights.values()):
            place = {(c.weights, c.activations): i for i, c in enumerate(insight.grid)}
            here, there = place[bits, bits], place[32, 32]
            want = [
                f"{'✓' if e.predicted[here] == e.label else '✗'} {insight.classes[e.predicted[here]]} "
                f"{int(100 * e.confidence[here] + 0.5)}\u00a0%"
                f"{', flipped' if e.predicted[here] != e.predicted[there] else ''}"
                for e in insight.examples
            ]
            items = page.locator(f"#examples-{number_} li span")
            assert items.all_inner_texts() == want
            count = sum("flipped" in text for text in want)
            text = page.inner_text(f"#examples-{number_} .flips")
            assert text.startswith(f"{count} of {len(want)} predictions differ")
            assert page.locator(f"#examples-{number_} li.flipped").count() == count
            flips.append(count)
    assert flips[:2] == [0, 0]
    assert max(flips) > 5
    loaded = page.eval_on_selector_all(".pictures img", "all => all.map((one) => one.naturalWidth)")
    assert loaded == [8] * sum(len(insight.examples) for insight in insights.values())


def test_layers_show_ranges_bounds_and_widths(opened: Opened, insights: dict[str, Insight]) -> None:
    page = opened.page
    slide(page, "weights", 4)
    for number_, insight in enumerate(insights.values()):
        lines = (
            page.locator("#layers table")
            .nth(number_)
            .locator("tbody tr")
            .evaluate_all("all => all.map((row) => [...row.cells].map((cell) => cell.textContent))")
        )
        assert [line[0] for line in lines] == [layer.name for layer in insight.layers]
        for line, layer in zip(lines, insight.layers, strict=True):
            assert (float(line[3]), float(line[4])) == pytest.approx((layer.low, layer.high), rel=1e-5)
            assert line[5] == layer.source
            if layer.bounds:
                assert float(line[6]) == pytest.approx(layer.bounds[insight.narrow.index(4)], rel=1e-5)
            widths = [{e.name: e.bits for e in budget.layers}.get(layer.name) for budget in insight.budgets]
            assert line[7:] == ["" if bits is None else str(bits) for bits in widths]


def test_charts_follow_the_slider(opened: Opened, insights: dict[str, Insight]) -> None:
    page = opened.page
    for bits in (5, 3):
        slide(page, "weights", bits)

        def part(chart: str, path: str, page: Any = page) -> Any:
            page.locator(f"#{chart}").scroll_into_view_if_needed()  # what is out of sight is drawn when it is seen
            page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            return page.evaluate(f"document.getElementById({chart!r}).{path}")

        assert part("accuracy-weights-and-activations", "layout.shapes[0].x0") == bits
        box = part("grid-1", "layout.shapes[0]")
        assert (box["x0"] + 0.5, box["y0"] + 0.5) == (bits - 2, bits - 2)
        cells = [100 * cell.accuracy for cell in insights[NAMES[1]].grid]
        assert [value for line in part("grid-1", "data[0].z") for value in line] == pytest.approx(cells, abs=1e-4)
        assert [float(text) for text in part("grid-1", "data[1].text")] == pytest.approx(cells, abs=0.5001)
        (entry,) = (e for e in insights[NAMES[1]].first_order if e.bits == bits)
        assert part("first-order-1", "data[1].y") == pytest.approx(entry.measured)


def test_the_front_is_what_nothing_smaller_beats(opened: Opened, insights: dict[str, Insight]) -> None:
    for got, insight in zip(opened.page.evaluate("anybit.fronts()"), insights.values(), strict=True):
        points = {(insight.sizes[insight.widths.index(c.weights)], c.accuracy) for c in insight.grid}
        points |= {(budget.size, budget.accuracy) for budget in insight.budgets}
        best = {(s, a) for s, a in points if not any(t <= s and b >= a and (t, b) != (s, a) for t, b in points)}
        assert [(p["size"], p["accuracy"]) for p in got] == sorted(best)


ASK = """asked => asked.map(([percent, mains]) => {
  const [battery, cable] = ["battery", "mains"].map((id) => document.getElementById(id));
  cable.checked = mains;
  battery.value = percent;
  battery.dispatchEvent(new Event("input"));
  return ["policy", "now"].map((id) => document.getElementById(id).textContent);
})"""


def test_the_battery_drives_the_policy_as_in_python(folder: Path) -> None:
    """Down, up, hovering at every border, on and off the cable, and at random: with the same memory on both sides."""
    borders = [value for border in (20, 50, 100) for value in range(border - 5, min(border + 6, 101))]
    draw = random.Random(0)
    charges = [*range(100, -1, -9), *range(0, 101, 9), *borders, *reversed(borders)]
    charges += [draw.randrange(101) for _ in range(200)]
    asked = [(percent, index % 17 == 16) for index, percent in enumerate(charges)]
    chooser = Chooser(battery())
    with open_page(folder / "report.html") as opened:
        page = ready(opened)
        for percent in (19, 21, 22, 24):  # as a person moves it
            page.locator("#battery").fill(str(percent))
            want = str(chooser.choose(Reading(percent, on_mains=False)))
            assert (page.inner_text("#policy"), page.inner_text("#now")) == (want, want)
        page.locator("#mains").check()
        assert page.inner_text("#now") == str(chooser.choose(Reading(24, on_mains=True))) == "FP"
        got = page.evaluate(ASK, asked)
        want_all = [str(chooser.choose(Reading(percent, on_mains=mains))) for percent, mains in asked]
        assert got == [[want, want] for want in want_all]
        plain = [str(battery()(Reading(percent, on_mains=mains))) for percent, mains in asked]
        assert sum(a != b for a, b in zip(plain, want_all, strict=True)) > 3  # the hysteresis did something
        assert opened.errors == []


def test_the_policy_agrees_between_whole_percents(opened: Opened) -> None:
    draw = random.Random(1)
    asked = [(round(draw.uniform(-1, 101), 2), draw.random() < 0.1) for _ in range(3000)]
    walk = list(itertools.accumulate((draw.uniform(-2, 2) for _ in range(3000)), lambda a, b: min(100, max(0, a + b))))
    asked += [(percent, False) for percent in walk]
    code = "asked => { const choose = anybit.chooser(); return asked.map(([p, m]) => choose(p, m)); }"
    chooser = Chooser(battery())
    got = opened.page.evaluate(code, asked)
    want = [chooser.choose(Reading(percent, on_mains=mains)) for percent, mains in asked]
    assert [(entry["weights"], entry["activations"]) for entry in got] == [(b.weights, b.activations) for b in want]
    assert len(set(want)) == 4


def test_every_chart_has_its_data_as_a_table_and_a_file(folder: Path, opened: Opened) -> None:
    page = opened.page
    charts = page.eval_on_selector_all(".chart", "all => all.map((one) => one.id)")
    assert len(charts) >= 11
    assert len(set(charts)) == len(charts)
    for chart in charts:
        assert page.locator(f"#{chart} .main-svg").count() > 0, chart
        details = page.locator(f"#{chart}-data")
        details.locator("summary").click()
        details.locator("tbody tr").first.wait_for()  # the browser tells of an opened element a moment later
        lines = details.locator("tbody tr").count()
        with page.expect_download() as waiting:
            details.locator("button").click()
        assert waiting.value.suggested_filename == f"{chart}.csv"
        text = Path(waiting.value.path()).read_text()
        table = list(csv.reader(io.StringIO(text)))
        assert len(table) == lines + 1 > 2, chart
        assert table[0] == details.locator("th").all_inner_texts()
        assert {len(line) for line in table} == {len(table[0])}
        details.locator("summary").click()
        if chart == "accuracy-weights-and-activations":
            rows = [row for name in NAMES for row in read_rows(folder / name / "rows.json").rows if row.weights != 32]
            want = [(row.label, str(row.bits), pytest.approx(100 * row.accuracy, abs=1e-4), row.n) for row in rows]
            assert [(line[0], line[1], float(line[2]), int(line[-1])) for line in table[1:]] == want


def test_training_curves_are_those_of_the_log(folder: Path, opened: Opened) -> None:
    for index, name in enumerate(NAMES):
        log = [json.loads(line) for line in (folder / name / "log.jsonl").read_text().splitlines()]
        assert len(log) < 500  # one point for each step
        shown = opened.page.evaluate(f"document.getElementById('training-loss').data[{index}].y")
        assert shown == pytest.approx([entry["loss"] for entry in log], rel=1e-5)
    (penalty,) = opened.page.evaluate("document.getElementById('training-penalty').data.map((one) => one.y)")
    assert penalty == pytest.approx(
        [0.002 * (entry["weight_norm"] + entry["activation_norm"]) for entry in log], rel=1e-4
    )


def test_the_keyboard_reaches_and_moves_everything(opened: Opened) -> None:
    page = opened.page
    page.locator("#lock").check()
    slide(page, "weights", 4)
    page.focus("#theme")
    seen = []
    for _ in range(7):
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        if len(seen) > 1:
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", seen
        page.keyboard.press("Tab")
    assert seen == ["theme", "weights", "activations", "battery", "lock", "mains", "SUMMARY"]
    page.focus("#weights")
    before = page.inner_text("#now")
    page.keyboard.press("ArrowRight")
    assert (before, page.inner_text("#now")) == ("W4A4", "W5A5")
    assert page.get_attribute("#weights", "aria-valuetext") == "5 bits"
    page.keyboard.press("End")
    assert page.inner_text("#now") == "FP"
    page.focus("#lock")
    page.keyboard.press("Space")
    page.focus("#activations")
    page.keyboard.press("Home")
    assert page.inner_text("#now") == "W32A2"
    unnamed = page.eval_on_selector_all(
        "input, button, summary, [role=region], [role=img]",
        "all => all.filter((one) => !(one.labels?.length || one.textContent.trim() || one.ariaLabel)).length",
    )
    assert unnamed == 0


def light(page: Any, what: str, prop: str) -> float:
    """Return how bright a colour is, 0 to 255."""
    colour = page.evaluate(f"getComputedStyle(document.querySelector({what!r})).{prop}")
    red, green, blue = (float(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))
    return (2 * red + 7 * green + blue) / 10


def test_colours_follow_the_system_and_the_button(opened: Opened) -> None:
    page = opened.page

    def check(dark: bool) -> None:
        paper, ink = light(page, "body", "backgroundColor"), light(page, "body", "color")
        drawn = light(page, "#size-accuracy .xtitle", "fill")
        assert (paper < 60, ink > 180, drawn > 180) == (dark, dark, dark)
        assert abs(paper - ink) > 150
        assert page.get_attribute("#theme", "aria-pressed") == str(dark).lower()

    check(False)
    page.emulate_media(color_scheme="dark")
    check(True)
    page.focus("#theme")
    page.keyboard.press("Enter")
    check(False)
    page.emulate_media(color_scheme="light")
    page.keyboard.press("Enter")
    check(True)
    page.keyboard.press("Enter")
    check(False)


def test_a_phone_needs_no_scrolling_sideways(folder: Path) -> None:
    with open_page(folder / "report.html", width=360, height=740, is_mobile=True, has_touch=True) as opened:
        page = ready(opened)
        assert not opened.scrolls_sideways
        page.eval_on_selector_all("details", "all => all.forEach((one) => { one.open = true; })")
        page.wait_for_function("document.querySelectorAll('details table').length > 10")
        assert not opened.scrolls_sideways
        widths = page.eval_on_selector_all(
            ".chart .main-svg", "all => all.map((one) => one.getBoundingClientRect().right)"
        )
        assert 0 < max(widths) <= 360
        assert opened.errors == []
        assert opened.outside == []


def test_hostile_files_are_text_in_the_browser_too(tmp_path: Path) -> None:
    attack = HOSTILE + "<b onmouseover=alert(3)>=1+1</b>" + '"); window.pwned = 1; ("'
    rows = tuple(dataclasses.replace(row, label=attack + row.label) for row in FILE.rows)
    bad = dataclasses.replace(
        INSIGHT,
        label=rows[0].label,
        classes=(attack, "b"),
        layers=(Layer(attack, attack, attack, 2, attack, -1.0, 1.0, (0.5, 0.25)),),
    )
    file = RowFile(attack, rows, {**FILE.origin, "commit": attack}, (attack,))
    write_report([Measured(file, bad, missing=(attack,))], tmp_path / "bad.html")
    with open_page(tmp_path / "bad.html") as opened:
        dialogs: list[str] = []
        opened.page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
        page = ready(opened)
        page.eval_on_selector_all("details", "all => all.forEach((one) => { one.open = true; })")
        slide(page, "weights", 2)
        page.wait_for_timeout(300)
        assert dialogs == []
        assert page.evaluate("window.pwned") is None
        assert page.locator("b, img[onerror], [onmouseover]").count() == 0
        assert page.locator("script").count() == 3
        assert page.locator(".missing").inner_text().startswith("</script><script>")
        assert attack.replace("\u2028", "") in page.inner_text("#layers").replace("\u2028", "")
        cells = page.evaluate("anybit.csv({head: ['a'], rows: [['=1+1'], ['-x'], ['say \"hi\", you'], [-2.5]]})")
        assert cells == 'a\r\n\'=1+1\r\n\'-x\r\n"say ""hi"", you"\r\n-2.5\r\n'
        assert (opened.errors, opened.outside) == ([], [])


def test_rows_alone_make_a_page_that_says_what_is_missing(tmp_path: Path) -> None:
    rows = tuple(Row("a", s, w, w, accuracy=w / 50 + s / 100, loss=1.0, n=9) for s in (0, 1) for w in (32, 4, 3))
    write_rows(tmp_path / "rows.json", dataclasses.replace(FILE, rows=rows))
    run("report", tmp_path)
    with open_page(tmp_path / "report.html") as opened:
        page = ready(opened)
        texts = page.locator(".missing").all_inner_texts()
        assert len(texts) == 2
        assert texts[0].endswith("anybit sweep RUN")
        assert page.inner_text("#now") == "W4A4"
        assert card(page, "a") == ("8.5 %", {"lowest to highest seed": "8.0 to 9.0 %", "loss": "1"})
        slide(page, "weights", 3)
        assert card(page, "a")[0] == "6.5 %"
        page.locator("#battery").fill("90")
        assert page.inner_text("#policy") == "W8A8, which was not measured here"
        assert page.inner_text("#now") == "W3A3"
        page.locator("#lock").uncheck()
        slide(page, "activations", 32)
        assert card(page, "a")[0] == "not measured"
        assert (opened.errors, opened.outside) == ([], [])


def test_a_page_without_curves_and_one_without_examples(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    (folder / "log.jsonl").unlink()
    write_insight(folder / "insight.json", dataclasses.replace(INSIGHT, examples=(), budgets=()))
    run("report", folder)
    with open_page(folder / "report.html") as opened:
        page = ready(opened)
        sections = page.eval_on_selector_all("main section", "all => all.map((one) => one.id)")
        assert sections == ["one-width", "accuracy", "grid", "size", "layers", "gradients"]
        assert page.locator(".missing").count() == 1
        assert (opened.errors, opened.outside) == ([], [])
