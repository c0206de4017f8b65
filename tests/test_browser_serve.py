"""The live page in a real browser, with a network that was trained on digits behind it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Opened, open_page
from test_feeding import read_one
from test_serve import Client, encoded, served

from anybit.artifact.header import Header
from anybit.artifact.master import write_master
from anybit.artifact.session import load
from anybit.cli.serve import make_app
from anybit.policy import Chooser, Reading, battery
from anybit.serve.app import App
from anybit.spec import Bits

image = pytest.importorskip("PIL.Image")
torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

NAMES = [f"<img src=x onerror='document.title=1'>{i}" for i in range(10)]
"""Names from a stranger's file: the page must show them as they are."""

MARKUP = "<b>nine & &amp; ten.png"
STOPS = [2, 3, 4, 5, 6, 7, 8, 32]


@pytest.fixture(scope="module")
def browser() -> Iterator[Opened]:
    """Start the browser once: that takes longer than any test here."""
    with open_page("about:blank") as opened:
        yield opened


def visit(browser: Opened, url: str) -> Opened:
    """Open an address afresh."""
    browser.url = url
    browser.page.goto(url)
    return browser


@pytest.fixture(autouse=True)
def _clean(browser: Opened) -> Iterator[None]:
    """See that a test left no error behind, and that it asked nobody but its server."""
    browser.page.goto("about:blank")
    browser.errors.clear()
    browser.requests.clear()
    yield
    assert browser.errors == []
    assert browser.outside == []
    assert all(url.startswith((browser.url, "blob:")) for url in browser.requests)
    assert len(browser.requests) > 5


@pytest.fixture(scope="module")
def digits() -> Any:
    from anybit.data import load_dataset

    return load_dataset("digits")


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory, digits: Any) -> Path:
    """Write a network that knows the digits, more or less."""
    from anybit.models import build_model
    from anybit.simulate.prepare import prepare
    from anybit.simulate.to_onnx import translate

    torch.manual_seed(0)
    model = build_model("small-conv", channels=1, classes=10, multiplier=0.25)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(60):
        part = slice(step % 10 * 100, step % 10 * 100 + 100)
        torch.nn.functional.cross_entropy(model(digits.train.x[part]), digits.train.y[part]).backward()
        optimizer.step()
        optimizer.zero_grad()
    net = prepare(model.eval(), digits.test.x[:2], input_range=(0.0, 1.0), preset="paper")
    graph = translate(net)
    path = tmp_path_factory.mktemp("live") / "digits.onnx"
    write_master(path, graph, Header(net.plan, about={"classes": NAMES, "measured": {"W4A8": 0.875}}))
    return path


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory, digits: Any) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    for i, name in enumerate(["a.png", "b.png", "c.png", MARKUP]):
        pixels = (digits.test.x[i, 0].numpy() * 255).round().astype(np.uint8)
        image.fromarray(pixels).save(folder / name)
    return folder


@pytest.fixture(scope="module")
def app(master: Path, examples: Path) -> App:
    return make_app(master, examples=examples, threads=1)


@pytest.fixture(scope="module")
def live(app: App) -> Iterator[Client]:
    with served(app) as client:
        yield client


@pytest.fixture
def opened(browser: Opened, live: Client) -> Opened:
    visit(browser, live.server.url)
    wait(browser, Bits(8, 8))
    return browser


def wait(opened: Opened, bits: Bits, *ids: str) -> None:
    """Wait until the page shows the numbers of a pair of widths."""
    for name in ids or ("answer", "latency"):
        opened.page.wait_for_selector(f"#{name}[data-bits='{bits}']:not(.waiting)", timeout=20_000)


def shows(page: Any, place: str, text: str) -> None:
    """Wait until a text is somewhere, without code in the page: its policy lets none in from elsewhere."""
    from playwright.sync_api import expect

    expect(page.locator(place)).to_contain_text(text, timeout=20_000)


def move(opened: Opened, slider: str, width: int) -> None:
    """Move a slider to a width as somebody without a mouse does."""
    opened.page.focus(f"#{slider}")
    opened.page.keyboard.press("Home")
    for _ in range(STOPS.index(width)):
        opened.page.keyboard.press("ArrowRight")


def probabilities(master: Path, picture: Path, bits: Bits) -> Any:
    """Return what the session itself says."""
    session = load(master, threads=1)
    session.set_bits(weights=bits.weights, activations=bits.activations)
    x = read_one(picture, (1, 8, 8))
    parts = np.exp(session.run(x)[0].astype(np.float64))
    return parts / parts.sum()


def percent(x: float) -> str:
    return f"{100 * x:.1f} %"


def rows(opened: Opened, table: str) -> list[list[str]]:
    script = "t => [...t.tBodies[0].rows].map(r => [...r.cells].map(c => c.textContent))"
    return opened.page.locator(table).evaluate(script)  # type: ignore[no-any-return]


def check_prediction(opened: Opened, want: Any) -> None:
    from playwright.sync_api import expect

    order = np.argsort(-want, kind="stable")[:5]
    # Widths on a slider's way may still be answered when the last one has been.
    expect(opened.page.locator("#answer")).to_have_text(f"{NAMES[order[0]]}, {percent(want[order[0]])}", timeout=20_000)
    assert rows(opened, "#guesses") == [[NAMES[i], "", percent(want[i])] for i in order]
    bars = opened.page.locator("#guesses meter").evaluate_all("bars => bars.map(bar => bar.value)")
    np.testing.assert_allclose(bars, want[order], rtol=1e-4, atol=1e-9)


def test_the_sliders_show_what_the_session_gives(opened: Opened, master: Path, examples: Path) -> None:
    assert opened.page.title() == "digits.onnx – anybit"
    shown = set()
    for bits in (Bits(8, 8), Bits(4, 8), Bits(3, 3), Bits(2, 32), Bits(32, 2), Bits()):
        move(opened, "weights", bits.weights)
        move(opened, "activations", bits.activations)
        wait(opened, bits)
        check_prediction(opened, probabilities(master, examples / MARKUP, bits))
        assert opened.page.inner_text("#bits") == str(bits)
        said = "floating point" if bits.weights == 32 else f"{bits.weights} bits"
        assert opened.page.inner_text("#weights-said") == said
        assert opened.page.get_attribute("#weights", "aria-valuetext") == said
        assert opened.page.inner_text("#accuracy") == ("87.5 %" if bits == Bits(4, 8) else "not in the file")
        assert float(opened.page.inner_text("#latency").removesuffix(" ms")) > 0
        shown.add(opened.page.inner_text("#answer"))
    assert len(shown) > 3  # the widths do differ
    tried = {row[0]: row for row in rows(opened, "#tried table")}  # and what was shown on the way
    assert {"W8A8", "W4A8", "W3A3", "W2A32", "W32A2", "FP"} <= tried.keys()
    assert tried["FP"][1] == opened.page.inner_text("#answer")


def test_memory_and_file_size_are_those_of_the_width(opened: Opened, app: App) -> None:
    for bits in (Bits(8, 8), Bits(4, 8)):
        move(opened, "weights", bits.weights)
        wait(opened, bits, "memory", "size")
        found = app.model.footprint(bits)  # measured once: the page has seen the same numbers
        assert opened.page.inner_text("#size") == f"{found['file_bytes'] / 1e3:.1f} kB"
        assert opened.page.inner_text("#memory") == f"{found['resident_bytes'] / 1e6:.2f} MB"
    tried = {row[0]: row[3:] for row in rows(opened, "#tried table")}
    assert tried["W4A8"] == [opened.page.inner_text("#memory"), opened.page.inner_text("#size")]
    assert tried["W8A8"][1] not in ("", tried["W4A8"][1])


def test_the_battery_drives_the_policy(opened: Opened) -> None:
    page = opened.page
    page.uncheck("#mains")
    chooser = Chooser(battery(), margin=3)
    chooser.choose(Reading(100, on_mains=True))
    for charge in (100, 60, 50, 49, 51, 52, 53, 19, 20, 22, 23, 5, 100):
        page.fill("#battery", str(charge))
        page.wait_for_selector(f"#policy[data-seen='{charge} false']")
        assert page.inner_text("#policy") == str(chooser.choose(Reading(charge, on_mains=False)))
        assert page.inner_text("#battery-said") == f"{charge} %"
    assert page.inner_text("#bits") == "W8A8"  # nobody said to follow it
    page.check("#follow")
    wait(opened, Bits())
    page.fill("#battery", "10")
    wait(opened, Bits(4, 4))
    assert page.inner_text("#weights-said") == page.inner_text("#activations-said") == "4 bits"
    page.check("#mains")
    wait(opened, Bits())
    move(opened, "weights", 3)
    assert not page.is_checked("#follow")  # who moves a slider is in charge again
    wait(opened, Bits(3, 32))


def test_examples_and_uploads(opened: Opened, master: Path, examples: Path, tmp_path: Path) -> None:
    page = opened.page
    assert page.inner_text("#chosen") == MARKUP
    names = sorted(path.name for path in examples.iterdir())
    assert page.locator("#examples img").evaluate_all("all => all.map(i => i.alt)") == names
    page.click("#examples button:nth-child(3)")
    shows(page, "#chosen", names[2])
    wait(opened, Bits(8, 8))
    check_prediction(opened, probabilities(master, examples / names[2], Bits(8, 8)))
    assert page.get_attribute("#examples button:nth-child(3)", "aria-pressed") == "true"
    (tmp_path / "mine.jpg").write_bytes(encoded("JPEG"))
    page.set_input_files("#file", tmp_path / "mine.jpg")
    wait(opened, Bits(8, 8))
    assert page.inner_text("#chosen") == "mine.jpg"
    check_prediction(opened, probabilities(master, tmp_path / "mine.jpg", Bits(8, 8)))
    assert page.locator("[aria-pressed=true]").count() == 0


SEEN = """async e => {
  await e.decode();
  const canvas = Object.assign(document.createElement("canvas"), { width: e.naturalWidth, height: e.naturalHeight });
  const brush = canvas.getContext("2d");
  brush.drawImage(e, 0, 0);
  return [...brush.getImageData(0, 0, canvas.width, canvas.height).data].filter((_, i) => i % 4 === 0);
}"""


def test_the_picture_is_shown_as_the_network_sees_it(opened: Opened, tmp_path: Path) -> None:
    page = opened.page
    (tmp_path / "mine.png").write_bytes(encoded("PNG"))
    page.set_input_files("#file", tmp_path / "mine.png")
    shows(page, "#chosen", "mine.png")
    wait(opened, Bits(8, 8))
    x = read_one(tmp_path / "mine.png", (1, 8, 8))
    assert page.locator("#seen").evaluate(SEEN) == np.rint(255 * x.ravel()).tolist()
    assert page.locator("#seen").evaluate("e => getComputedStyle(e).imageRendering") == "pixelated"
    assert page.locator("#seen").bounding_box()["width"] >= 10 * 8  # each of its pixels can be seen
    assert page.inner_text("#seen-said") == "as the network sees it: 8 x 8 pixels"


def test_a_picture_can_be_dropped(opened: Opened, master: Path, tmp_path: Path) -> None:
    (tmp_path / "dropped.png").write_bytes(encoded("PNG"))
    script = """bytes => {
      const transfer = new DataTransfer();
      transfer.items.add(new File([new Uint8Array(bytes)], "dropped.png", { type: "image/png" }));
      const event = new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true });
      return document.getElementById("drop").dispatchEvent(event);
    }"""
    assert opened.page.evaluate(script, list(encoded("PNG"))) is False  # or the browser would leave the page
    wait(opened, Bits(8, 8))
    assert opened.page.inner_text("#chosen") == "dropped.png"
    check_prediction(opened, probabilities(master, tmp_path / "dropped.png", Bits(8, 8)))


def test_a_bad_upload_is_a_message(opened: Opened, tmp_path: Path) -> None:
    page = opened.page
    (tmp_path / "bad.png").write_bytes(b"<script>alert(1)</script>")
    page.set_input_files("#file", tmp_path / "bad.png")
    page.wait_for_selector("#error:not([hidden])")
    assert "no picture of a known type" in page.inner_text("#error")
    assert page.inner_text("#answer") == "No prediction."
    assert page.is_hidden("#guesses")
    assert page.is_hidden("#preview")
    assert page.is_hidden("#seen")
    (tmp_path / "large.png").write_bytes(bytes(10_000_001))
    before = len(opened.requests)
    page.set_input_files("#file", tmp_path / "large.png")
    shows(page, "#error", "up to 10 MB")
    assert len(opened.requests) == before  # it was not even sent
    (tmp_path / "good.png").write_bytes(encoded("PNG"))
    page.set_input_files("#file", tmp_path / "good.png")
    page.wait_for_selector("#error", state="hidden")
    wait(opened, Bits(8, 8))
    assert len(opened.errors) == 1
    assert "status of 400" in opened.errors.pop()  # browsers log every refusal


def test_a_server_that_does_not_know_the_page_any_more(browser: Opened, app: App) -> None:
    with served(app) as client:
        visit(browser, client.server.url)
        wait(browser, Bits(8, 8), "answer", "memory")
        client.server.token = "changed"  # as after a restart on the same port
        move(browser, "weights", 2)
        browser.page.wait_for_selector("#error:not([hidden])")
        assert "open the address that was printed" in browser.page.inner_text("#error")
        wait(browser, Bits(2, 8), "memory")
        assert browser.page.inner_text("#memory") == "not measured"
        assert all("status of 403" in error for error in browser.errors)
        browser.errors.clear()


def test_a_server_that_is_gone(browser: Opened, app: App) -> None:
    with served(app) as client:
        visit(browser, client.server.url)
        wait(browser, Bits(8, 8), "answer", "memory")
    move(browser, "weights", 7)
    browser.page.wait_for_selector("#error:not([hidden])")
    assert "is anybit serve still running?" in browser.page.inner_text("#error")
    browser.errors.clear()


def test_without_examples_there_is_the_drop_zone(browser: Opened, master: Path) -> None:
    with served(make_app(master, threads=1)) as client:
        page = visit(browser, client.server.url).page
        shows(page, "#bits", "W8A8")
        assert page.inner_text("#answer") == "No picture yet."
        assert page.is_visible("#drop")
        assert page.is_hidden("#preview")
        wait(browser, Bits(8, 8), "memory", "size")
        assert page.is_hidden("#tried")


COLOURS = "(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone(opened: Opened, scheme: Any) -> None:
    opened.page.set_viewport_size({"width": 360, "height": 740})
    opened.page.emulate_media(color_scheme=scheme)
    try:
        wait(opened, Bits(8, 8), "memory", "size")
        assert not opened.scrolls_sideways
        right = opened.page.locator("#tried table").evaluate("e => e.getBoundingClientRect().right")
        assert right <= 360 - 16  # inside of its card: nothing is cut off
        colours = opened.page.evaluate(COLOURS)
        ink, paper = (sum(int(part) for part in text.strip("rgb()").split(",")) for text in colours)
        assert (ink < paper) == (scheme == "light")
        assert abs(ink - paper) > 450
    finally:
        opened.page.set_viewport_size({"width": 1280, "height": 900})
        opened.page.emulate_media(color_scheme="light")


OUTLINED = "e => [e, e.closest('label')].some(x => x && getComputedStyle(x).outlineStyle !== 'none')"


def test_everything_can_be_reached_by_tab(opened: Opened) -> None:
    found = []
    for _ in range(10):
        opened.page.keyboard.press("Tab")
        focused = opened.page.locator(":focus")
        found.append(focused.evaluate("e => e.id || e.className || e.tagName.toLowerCase()"))
        assert focused.evaluate(OUTLINED)
    buttons = 4 * ["button"]
    assert found == ["file", *buttons, "weights", "activations", "battery", "mains", "follow"]
