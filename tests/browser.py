"""A real browser for tests: Debian's Chromium, headless, driven by playwright without a browser of its own.

with open_page("file:///tmp/report.html") as opened:
    opened.page.fill("#weights", "3")
    assert opened.errors == []
    assert opened.outside == []
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
INSIDE = ("data", "blob", "about")
"""Addresses that no network is needed for."""


@dataclass
class Opened:
    """A page in the browser, what it complained about, and what it asked for."""

    page: Any
    """The page as playwright gives it: `click`, `fill`, `evaluate`, `locator`, `screenshot` and so on."""
    url: str
    errors: list[str] = field(default_factory=list)
    """Errors and warnings on the console, exceptions, and requests that failed."""
    requests: list[str] = field(default_factory=list)
    """The address of everything that was requested, in order."""

    @property
    def outside(self) -> list[str]:
        """The requests that left the page's own file, or its own server."""
        own = urlsplit(self.url)
        return [url for url in self.requests if not _is_own(url, own.scheme, own.netloc, self.url)]

    @property
    def scrolls_sideways(self) -> bool:
        """Whether the page is wider than the window."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"))


def _is_own(url: str, scheme: str, netloc: str, opened: str) -> bool:
    """Tell whether a request stays with the page that was opened.

    >>> _is_own("http://a:1/x.js", "http", "a:1", "http://a:1/"), _is_own("http://b/x.js", "http", "a:1", "http://a:1/")
    (True, False)
    >>> _is_own("file:///b.js", "file", "", "file:///a.html"), _is_own("data:,x", "file", "", "file:///a.html")
    (False, True)
    """
    parts = urlsplit(url)
    if parts.scheme in INSIDE:
        return True
    if scheme == "file":
        return url.partition("#")[0] == opened.partition("#")[0]
    return (parts.scheme, parts.netloc) in {(scheme, netloc), ("ws", netloc)}


def find_chromium() -> Path | None:
    """Return the browser that is installed here; ANYBIT_CHROMIUM names another one."""
    named = os.environ.get("ANYBIT_CHROMIUM")
    found = next(filter(None, map(shutil.which, (named,) if named else NAMES)), None)
    return Path(found) if found else None


def chromium_or_skip() -> Path:
    """Return the browser, or skip the test and say what to install."""
    pytest.importorskip("playwright", reason="no playwright here; pip install 'anybit[dev]'")
    found = find_chromium()
    if found is None:
        pytest.skip("no Chromium here; install it (Debian: apt-get install chromium) or set ANYBIT_CHROMIUM")
    return found


@contextlib.contextmanager
def open_page(
    url: str | Path, *, width: int = 1280, height: int = 900, scheme: str = "light", **context: Any
) -> Iterator[Opened]:
    """Open an address, or a file, in a headless browser; skips the test where there is none.

    Args:
        url: What to open; a path becomes a file address.
        width: Of the window, in pixels.
        height: Of the window, in pixels.
        scheme: The colours that the system asks for, "light" or "dark".
        context: More settings of playwright's `new_context`, such as `is_mobile=True`.
    """
    address = url.resolve().as_uri() if isinstance(url, Path) else url
    size: Any = {"width": width, "height": height}
    with _browser() as browser:
        window = browser.new_context(viewport=size, color_scheme=scheme, **context)
        try:
            opened = Opened(window.new_page(), address)
            _listen(opened)
            opened.page.goto(address)
            yield opened
        finally:
            window.close()


_running: list[Any] = []


@contextlib.contextmanager
def _browser() -> Iterator[Any]:
    """Start the browser, or give the one that runs already: playwright can be started once at a time."""
    found = chromium_or_skip()
    if _running:
        yield _running[-1]
        return
    from playwright.sync_api import sync_playwright

    # Containers have no sandbox and a small /dev/shm.
    args = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(found), headless=True, args=args)
        _running.append(browser)
        try:
            yield browser
        finally:
            _running.pop()
            browser.close()


def _listen(opened: Opened) -> None:
    page, errors = opened.page, opened.errors
    page.on("console", lambda m: errors.append(f"{m.type}: {m.text}") if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(f"exception: {error}"))
    page.on("requestfailed", lambda request: errors.append(f"failed: {request.url}"))
    page.on("request", lambda request: opened.requests.append(request.url))
