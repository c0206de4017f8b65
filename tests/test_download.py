"""Fetching a large file from a server on this machine, one that breaks off, forgets, and tells nonsense."""

import contextlib
import fcntl
import hashlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from anybit.data import download
from anybit.data.download import fetch, npm_pack
from anybit.errors import DataError

WHOLE = np.random.default_rng(0).bytes(3_000_000)
SHA256 = hashlib.sha256(WHOLE).hexdigest()


@dataclass
class Served:
    """What the server does, and what it was asked for."""

    url: str = ""
    data: bytes = WHOLE
    ranges: bool = True
    code: int | None = None
    """Answer with this instead."""
    breaks: int | None = None
    """Close the connection after so many bytes of an answer."""
    length: str | None = None
    """Claim this length instead."""
    holds: int | None = None
    """Wait after so many bytes, until `going_on` is set."""
    going_on: threading.Event = field(default_factory=threading.Event)
    asked: list[int] = field(default_factory=list)
    """Where each request wanted to begin."""


class Handler(BaseHTTPRequestHandler):
    served: Served

    def do_GET(self) -> None:
        begin = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        self.served.asked.append(begin)
        begin = begin if self.served.ranges else 0
        if self.served.code or begin >= len(self.served.data):
            self.send_error(self.served.code or 416)
            return
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", self.served.length or str(len(self.served.data) - begin))
        self.end_headers()
        rest = self.served.data[begin:][: self.served.breaks]
        with contextlib.suppress(OSError):  # who asked may have gone
            self.wfile.write(rest[: self.served.holds])
            if self.served.holds is not None:
                self.served.going_on.wait()
                self.wfile.write(rest[self.served.holds :])

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    settings = Served()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Here", (Handler,), {"served": settings}))
    settings.url = f"http://127.0.0.1:{server.server_port}/files/big.tgz"
    thread = threading.Thread(target=server.serve_forever, args=[0.05])
    thread.start()
    yield settings
    settings.going_on.set()
    server.shutdown()
    thread.join()
    server.server_close()


class Bars:
    """Keeps what was drawn: for each bar how much there is, and how much was done."""

    def __init__(self) -> None:
        self.drawn: dict[str, list[int]] = {}

    def __call__(self, name: str, total: int) -> "Advance":
        self.drawn[name] = [total, 0]
        return Advance(self.drawn[name])


@dataclass
class Advance:
    bar: list[int]

    def __call__(self, steps: int) -> None:
        self.bar[1] += steps


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


@pytest.mark.parametrize("breaks", [None, 700_000])
@pytest.mark.parametrize("ranges", [True, False])
def test_what_comes_is_whole_and_the_bars_are_full(
    served: Served, tmp_path: Path, breaks: int | None, ranges: bool
) -> None:
    served.breaks, served.ranges, bars = breaks, ranges, Bars()
    path = tmp_path / "big.tgz"
    if breaks and not ranges:  # it never gets further than this
        with pytest.raises(DataError, match=r"cannot be fetched.*the next try goes on"):
            fetch(served.url, path, sha256=SHA256, start=bars)
        assert names(tmp_path) == ["big.tgz.partial"]
        return
    fetch(served.url, path, sha256=SHA256, start=bars)
    assert path.read_bytes() == WHOLE
    assert names(tmp_path) == ["big.tgz"]
    assert bars.drawn == {
        "connecting to 127.0.0.1": [1, 1],
        "downloading big.tgz": [len(WHOLE)] * 2,
        "checking the file": [len(WHOLE)] * 2,
    }
    assert served.asked == ([0, 700_000, 1_400_000, 2_100_000, 2_800_000] if breaks else [0])


@pytest.mark.parametrize("ranges", [True, False])
def test_an_interrupted_download_goes_on(served: Served, tmp_path: Path, ranges: bool) -> None:
    path = tmp_path / "big.tgz"

    def until_half(name: str, total: int):
        done = [0]

        def advance(steps: int) -> None:
            done[0] += steps
            if name.startswith("downloading") and done[0] > total / 2:
                raise KeyboardInterrupt

        return advance

    with pytest.raises(KeyboardInterrupt):
        fetch(served.url, path, sha256=SHA256, start=until_half)
    assert not path.exists()
    kept = beside(path).read_bytes()
    assert len(WHOLE) / 2 < len(kept) < len(WHOLE)
    assert WHOLE.startswith(kept)
    served.ranges, bars = ranges, Bars()
    fetch(served.url, path, sha256=SHA256, start=bars)
    assert served.asked == [0, len(kept)]
    assert path.read_bytes() == WHOLE
    assert bars.drawn["downloading big.tgz"] == [len(WHOLE)] * 2
    assert names(tmp_path) == ["big.tgz"]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_process_that_is_ended_leaves_what_came(served: Served, tmp_path: Path, end: signal.Signals) -> None:
    path, served.holds = tmp_path / "big.tgz", 1_000_000
    code = f"""
import signal
from pathlib import Path
from anybit.data.download import fetch
signal.signal(signal.SIGINT, signal.default_int_handler)
fetch({served.url!r}, Path({str(path)!r}), sha256={SHA256!r})
"""
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) as process:
        while process.poll() is None and not (beside(path).exists() and beside(path).stat().st_size > 500_000):
            time.sleep(0.01)
        process.send_signal(end)
    assert process.returncode != 0
    assert not path.exists()
    kept = beside(path).stat().st_size
    assert 500_000 < kept < len(WHOLE)
    served.holds = None
    fetch(served.url, path, sha256=SHA256)
    assert served.asked == [0, kept]
    assert path.read_bytes() == WHOLE


def test_what_is_whole_already_is_only_checked(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "big.tgz"
    beside(path).write_bytes(WHOLE)
    fetch(served.url, path, sha256=SHA256)
    assert (served.asked, path.read_bytes() == WHOLE) == ([len(WHOLE)], True)


@pytest.mark.parametrize("there", [b"", b"something else", bytes(len(WHOLE)), bytes(len(WHOLE) + 5)])
def test_a_wrong_checksum_leaves_nothing_behind(served: Served, tmp_path: Path, there: bytes) -> None:
    path = tmp_path / "big.tgz"
    if there:
        beside(path).write_bytes(there)
    else:
        served.data = WHOLE[::-1]
    with pytest.raises(DataError, match="checksum"):
        fetch(served.url, path, sha256=SHA256)
    assert names(tmp_path) == []
    served.data = WHOLE
    fetch(served.url, path, sha256=SHA256)
    assert path.read_bytes() == WHOLE


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"code": 404}, "404"),
        ({"code": 503}, "503"),
        ({"breaks": 0}, "the connection broke"),
        ({"length": "many"}, "many"),
        ({"length": str(2**40)}, "bytes are expected, the server has 1099511627776"),
        ({"length": "0"}, "bytes are expected, the server has 0"),
    ],
)
def test_a_server_that_fails_is_named(
    served: Served, tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    for name, value in settings.items():
        setattr(served, name, value)
    with pytest.raises(DataError, match=f"{served.url}.*{message}"):
        fetch(served.url, tmp_path / "big.tgz", sha256=SHA256)
    assert names(tmp_path) == []


def test_only_the_web_is_asked(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(WHOLE)
    with pytest.raises(DataError, match="http or https is expected"):
        fetch((tmp_path / "secret").as_uri(), tmp_path / "big.tgz", sha256=SHA256)
    with pytest.raises(DataError, match="cannot be fetched"):
        fetch("http://127.0.0.1:1/x", tmp_path / "big.tgz", sha256=SHA256)
    assert names(tmp_path) == ["secret"]


def test_two_do_not_write_the_same_file(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "big.tgz"
    with beside(path).open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another process is downloading it"):
            fetch(served.url, path, sha256=SHA256)
    assert served.asked == []
    fetch(served.url, path, sha256=SHA256)
    assert path.read_bytes() == WHOLE


def fake_npm(folder: Path, script: str) -> str:
    npm = folder / "npm"
    npm.write_text(f"#!/bin/sh\n{script}\n")
    npm.chmod(0o755)
    return str(npm)


def test_the_bar_follows_what_npm_writes(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (tmp_path / "whole").write_bytes(WHOLE)
    script = f"""
mkdir npm
head -c 1000000 {tmp_path}/whole > npm/part; sleep 0.7
head -c 2000000 {tmp_path}/whole > npm/part; sleep 0.7
cp {tmp_path}/whole big.tgz"""
    seen: list[int] = []

    def start(name: str, total: int):
        assert total == len(WHOLE)
        return lambda steps: seen.append(steps) if name.startswith("npm pack") and steps else None

    path = cache / "big.tgz"
    npm_pack(fake_npm(tmp_path, script), "some@1", path, sha256=SHA256, size=len(WHOLE), start=start)
    assert sum(seen) == len(WHOLE)
    assert len(seen) > 1  # on the way, not at the end alone
    assert path.read_bytes() == WHOLE
    assert names(cache) == ["big.tgz"]


def test_npm_that_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "NPM_SECONDS", 0.3)
    cache = tmp_path / "cache"
    cache.mkdir()
    npm = fake_npm(tmp_path, "exec sleep 100")
    with pytest.raises(DataError, match=r"pack some@1 took more than 0.3 s"):
        npm_pack(npm, "some@1", cache / "big.tgz", sha256=SHA256, size=1)
    with pytest.raises(DataError, match=r"npm view some@1 took more than 0.3 s"):
        download.npm_address(npm, "some@1")
    assert names(cache) == []
