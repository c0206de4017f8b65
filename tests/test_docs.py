"""The documentation: it builds, its links hold, it loads nothing from elsewhere, and every block of it runs."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import doctest
import hashlib
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import numpy.typing as npt
import onnx
import pytest
import torch
import typer.main
import warm
from browser import open_page
from onnx import numpy_helper
from torch import nn

import anybit
from anybit.cli.main import app

Array = npt.NDArray[Any]

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
REASONS = {
    "needs CIFAR-10",
    "needs a graphics card",
    "runs until ctrl-C",
    "takes a minute",
    "changes your shell",
    "starts several processes",
}
"""Why a block may stand in the documentation without being run."""

VARIES = "<!-- numbers vary -->"
SKIPPED = re.compile(r"<!-- not run: (.*?) -->")


# The pages, block by block


@dataclass(frozen=True)
class Block:
    """A fenced block, the line it starts at, and the comment directly above it."""

    kind: str
    title: str
    text: str
    line: int
    above: str

    @property
    def skipped(self) -> str | None:
        """The reason why it is not run, if it is not."""
        found = SKIPPED.fullmatch(self.above)
        return found[1] if found else None


def blocks_of(text: str) -> list[Block]:
    """Return the fenced blocks of a page.

    >>> [(b.kind, b.title, b.text) for b in blocks_of('```toml title="a.toml"\\nx = 1\\n```\\n')]
    [('toml', 'a.toml', 'x = 1\\n')]
    """
    found, lines, start = [], text.splitlines(), None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        head = re.fullmatch(r'```(\w*)(?: title="(.*)")?', lines[start])
        assert head is not None, f"line {start + 1}: {lines[start]!r} opens no block that is known"
        above = next((above.strip() for above in reversed(lines[:start]) if above.strip()), "")
        body = "".join(f"{inner}\n" for inner in lines[start + 1 : number])
        found.append(Block(head[1], head[2] or "", body, start + 1, above))
        start = None
    assert start is None, f"the block at line {(start or 0) + 1} does not end"
    return found


def pages_with(*kinds: str) -> list[Path]:
    return [page for page in PAGES if kinds_of(page) & set(kinds)]


def kinds_of(page: Path) -> set[str]:
    return {block.kind for block in blocks_of(page.read_text(encoding="utf-8"))}


def name_of(page: Path) -> str:
    return str(page.relative_to(DOCS))


# Running them


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def run_python(block: Block, scope: dict[str, object], page: Path) -> str:
    code = compile("\n" * block.line + block.text, str(page), "exec")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, scope)
    return out.getvalue()


def run_shell(block: Block, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = warm.with_command({**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "80"})
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text], cwd=folder, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"line {block.line}: {block.text}{done.stderr}"
    return done.stdout


def roughly(text: str) -> str:
    """Return a text without its numbers, and without what moves when they get longer.

    >>> roughly("│  86.2 │ 1.5e-3 MB") == roughly("│ 7 │ -2 MB")
    True
    >>> roughly("accuracy 1") == roughly("loss 1")
    False
    """
    return re.sub(r"[\s━─-]+", " ", re.sub(r"[-+]?\d[\d.]*(e[-+]?\d+)?", "#", text)).strip()


def same(block: Block, shown: str, printed: str) -> None:
    lines = [[line.rstrip() for line in text.strip("\n").splitlines()] for text in (shown, printed)]
    if block.above == VARIES:
        assert roughly(shown) == roughly(printed), f"line {block.line}: {printed}"
    else:
        assert lines[0] == lines[1], f"line {block.line}: {printed}"


@pytest.mark.slow
@pytest.mark.timeout(900)  # the commands are a dozen programs, one after the other
@pytest.mark.parametrize("page", pages_with("python", "sh"), ids=name_of)
def test_every_block_runs(page: Path, tmp_path: Path) -> None:
    for name in ("paper", "results"):  # pages speak from the root of a clone
        shutil.copytree(ROOT / name, tmp_path / name)
    scope: dict[str, object] = {"__name__": page.stem}
    printed: str | None = None
    with working_in(tmp_path):
        for block in blocks_of(page.read_text(encoding="utf-8")):
            if block.skipped is not None:
                printed = None
            elif block.kind == "python":
                printed = run_python(block, scope, page)
            elif block.kind == "sh":
                printed = run_shell(block, tmp_path)
            elif block.kind == "text":
                assert printed is not None, f"line {block.line}: shows what no block printed"
                same(block, block.text, printed)
            elif block.title:
                (tmp_path / block.title).write_text(block.text, encoding="utf-8")


def test_every_block_is_of_a_known_kind() -> None:
    for page in PAGES:
        assert kinds_of(page) <= {"", "python", "sh", "text", "toml", "json"}, page


def skipped_blocks() -> list[tuple[Path, Block]]:
    return [(p, b) for p in PAGES for b in blocks_of(p.read_text(encoding="utf-8")) if b.skipped is not None]


def test_blocks_that_are_not_run_say_why() -> None:
    assert {block.skipped for _, block in skipped_blocks()} <= REASONS
    assert not [page for page, block in skipped_blocks() if block.kind != "sh"]
    marks = sum(page.read_text(encoding="utf-8").count("<!-- not run") for page in PAGES)
    assert marks == len(skipped_blocks()), "a mark stands directly above the block that it is about"


def commands_in(text: str) -> Iterator[list[str]]:
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("anybit "):
            yield shlex.split(line, comments=True)[1:]


@pytest.mark.parametrize(
    "words", [pytest.param(w, id=" ".join(w)) for _, b in skipped_blocks() for w in commands_in(b.text)]
)
def test_commands_that_are_not_run_are_understood(words: list[str]) -> None:
    understand(words)


def understand(words: list[str]) -> None:
    """Parse a command without running it; an option or a verb that is not there is an error."""
    command, context, rest = typer.main.get_command(app), None, list(words)
    if rest[0].startswith("--"):
        assert rest[0] in {name for option in command.params for name in option.opts}
        return
    while hasattr(command, "resolve_command"):
        context = command.make_context("anybit", list(rest), parent=context)
        name, command, rest = command.resolve_command(context, rest)
    command.make_context(name, rest, parent=context)


def test_commands_with_a_typing_error_are_not_understood() -> None:
    for words in (["serve", "m.onnx", "--opne"], ["srve", "m.onnx"], ["serves", "m.onnx"]):
        with pytest.raises(Exception, match=r"(?i)no such"):
            understand(words)


def test_every_verb_has_an_example() -> None:
    text = (DOCS / "commands.md").read_text(encoding="utf-8")
    shown = {words[0] for block in blocks_of(text) if block.kind == "sh" for words in commands_in(block.text)}
    assert set(typer.main.get_command(app).commands) <= shown


# The site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return out


class Addresses(HTMLParser):
    """Collects what a page loads, what it links to, and the names of its places."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        self.places |= {given[key] for key in ("id", "name") if key in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(given.get("href", ""))
        self.loads += [given[key] for key in ("src", "srcset", "data", "poster") if key in given]


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(PAGES)  # and one for what is not found
    for page in pages:
        for address in Addresses(page.read_text(encoding="utf-8")).loads:
            assert not urlsplit(address).scheme or address.startswith("data:"), f"{page.name} loads {address}"
            assert not urlsplit(address).netloc, f"{page.name} loads {address}"
    for sheet in site.rglob("*.css"):
        for address in re.findall(r"url\((.*?)\)|@import\s+(\S+)", sheet.read_text(encoding="utf-8")):
            assert not re.match(r"['\"]?(https?:)?//", "".join(address)), f"{sheet.name} loads {address}"


def test_a_browser_asks_for_nothing_elsewhere(site: Path) -> None:
    for name in ("index.html", "two-pass.html"):
        with open_page(site / name) as opened:
            opened.page.wait_for_load_state("load")
            assert opened.page.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
        schemes = {urlsplit(url).scheme for url in opened.requests}
        assert "file" in schemes
        assert schemes <= {"file", "data", "blob"}, opened.requests


def test_every_link_leads_somewhere(site: Path) -> None:
    pages = {page: Addresses(page.read_text(encoding="utf-8")) for page in site.rglob("*.html")}
    for page, found in pages.items():
        if page.name == "404.html":  # it is shown at any address, so its links start at the root
            continue
        for link in found.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            assert target.is_file() or (target / "index.html").is_file(), f"{page.name}: {link}"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].places, f"{page.name}: {link}"


def test_the_reference_shows_every_public_name(site: Path) -> None:
    places = set().union(
        *(Addresses(p.read_text(encoding="utf-8")).places for p in (site / "reference").glob("*.html"))
    )
    missing = [n for n in anybit.__all__ if not any(place.rpartition(".")[2] == n for place in places)]
    assert missing == []


def tool(name: str) -> ModuleType:
    """One of the programs that stand beside the pages."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_filled_with_what_they_print() -> None:
    fill = tool("fill")
    assert doctest.testmod(fill) == (0, 1)
    varies = f"```python\nprint(1)\n```\n\n{VARIES}\n\n```text\n3\n```\n"
    assert fill.filled(varies) == varies
    silent = "```python\nx = 1\n```\n\nThen:\n\n```python\nprint(x)\n```\n\n```text\n```\n"
    assert fill.filled(silent) == silent.replace("```text\n", "```text\n1\n")


def test_doctests_are_shown_as_code(site: Path) -> None:
    assert doctest.testmod(tool("doctests")) == (0, 1)
    text = (site / "reference" / "values.html").read_text(encoding="utf-8")
    assert "<blockquote>" not in text
    assert 'class="gp"' in text  # a prompt, as the highlighter marks it


# A reader of masters, written from docs/format.md alone

LETTERS = {"fp32": "", "fp16": ".half", "int8": ".codes"}


def fields_of(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a protobuf message."""
    place = 0

    def number() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            place += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while place < len(data):
        tag = number()
        if tag & 7 == 0:
            yield tag >> 3, number()
            continue
        length = {1: 8, 5: 4}.get(tag & 7) or number()
        assert place + length <= len(data)
        yield tag >> 3, data[place : place + length]
        place += length


def digest_of(data: bytes, header: str) -> str:
    total = hashlib.sha256(header.encode())
    for number, value in fields_of(data):
        if number in (1, 7, 8):
            total.update(f"/{number}:{value if isinstance(value, int) else len(value)}/".encode())
            total.update(b"" if isinstance(value, int) else value)
    return total.hexdigest()


@dataclass(frozen=True)
class Scale:
    """A grid, shaped to broadcast."""

    scale: Array
    zero: Array
    lowest: int
    highest: int

    def codes(self, x: Array) -> Array:
        return np.clip(np.rint(x / self.scale) + self.zero, np.float32(self.lowest), np.float32(self.highest))

    def values(self, codes: Array) -> Array:
        return (codes - self.zero) * self.scale


def grid_of(low: Array, high: Array, bits: int, *, symmetric: bool, signed: bool) -> Scale:
    low, high = np.minimum(np.float32(low), np.float32(0)), np.maximum(np.float32(high), np.float32(0))
    highest = 2 ** (bits - 1) - 1 if symmetric and signed else 2**bits - 1
    lowest = -highest if symmetric and signed else 0
    span = (np.maximum(-low, high) if signed else high) if symmetric else high - low
    scale = np.asarray(span / np.float32(highest if symmetric else highest - lowest), np.float32)
    scale = np.where(scale < np.float32(2.0**-126), np.float32(1), scale)
    zero = np.clip(np.rint(np.float32(lowest) - low / scale), lowest, highest) if not symmetric else 0 * scale
    return Scale(scale, np.asarray(zero, np.float32), lowest, highest)


def keeping_sums(weight: Array, grid: Scale, channels: int, groups: int) -> Array:
    def ordered(x: Array) -> Array:
        if channels == 0:
            return x.reshape(x.shape[0], x.shape[1] if x.ndim > 1 else 1, -1)
        parts = x.reshape(groups, x.shape[0] // groups, x.shape[1], -1).swapaxes(1, 2)
        return parts.reshape(groups * x.shape[1], x.shape[0] // groups, -1)

    full = [np.broadcast_to(v, weight.shape) for v in (grid.scale, grid.zero)]
    x, scale, zero = (ordered(np.ascontiguousarray(v)) for v in (weight, *full))
    ratio = x / scale
    inside = np.clip(ratio, grid.lowest - zero, grid.highest - zero)
    q = np.rint(inside)
    e = q - inside
    sums = e.sum(2) + (inside - ratio).sum(2)
    for kernel in np.ndindex(sums.shape):
        d = np.sign(sums[kernel])
        for tap in taken(e[kernel] * d, np.rint(min(abs(sums[kernel]), x.shape[2]))):
            q[kernel][tap] -= d
            e[kernel][tap] -= d
            sums[kernel] -= d
    for channel, own in enumerate(sums):
        d = np.sign(own.sum())
        movable = (e[channel] * d > 0).any(1)
        for kernel in taken(np.where(movable, own * d, 0), np.rint(min(abs(own.sum()), x.shape[1]))):
            q[channel, kernel, np.argmax(e[channel, kernel] * d)] -= d
    codes = q + zero
    if channels == 0:
        return codes.reshape(weight.shape)
    back = codes.reshape(groups, weight.shape[1], weight.shape[0] // groups, -1)
    return back.swapaxes(1, 2).reshape(weight.shape)


def taken(values: Array, count: float) -> list[int]:
    """Return where the largest positive values are, of equal ones the first."""
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    return [i for i in order[: int(count)] if values[i] > 0]


def clipped_scale(row: Array, bits: int) -> float:
    last = 2 ** (bits - 1) - 1
    u = float(np.abs(row).max())
    if u < 2.0**32 * 2.0**-126:
        return u / last
    every = -(-len(row) // 2**17) | 1
    bins = np.clip(np.floor(row[::every] * np.float32(1024 / u)), -1024, 1023).astype(int)
    mass = np.bincount(np.where(bins < 0, -bins - 1, bins), minlength=1024)
    parts = [1 - k / 100 for k in range(20)] + [0.8 * (1 / 256 / 0.8) ** (k / 107) for k in range(108)]
    edges = np.arange(1025) / 1024

    def integral(t: Array, step: float) -> Array:
        """Of the squared distance to the nearest multiple, from 0 to t."""
        whole = np.rint(t / step)
        return whole * step**3 / 12 + (t - whole * step) ** 3 / 3

    def error(f: float) -> float:
        total = integral(np.minimum(edges, f), f / last) + np.maximum(edges - f, 0) ** 3 / 3
        return float(mass @ np.diff(total)) * 1024

    errors = np.array([error(f) for f in parts])
    f = parts[int(np.argmax(errors <= errors.min() * (1 + 1e-9)))]
    found = []
    for scale in (u / last, f * u / last):
        r = row.astype(float) / scale
        k = np.clip(np.rint(r), -last, last)
        found.append((scale**2 * ((r - k) ** 2).sum(), scale * (r * k).sum() / (k * k).sum()))
    return float(found[1][1] if found[1][0] < found[0][0] else found[0][1])


ACTIVATIONS = 8
"""The width of activations in every export here."""


class Reader:
    """A master as docs/format.md describes it."""

    def __init__(self, path: Path) -> None:
        data = path.read_bytes()
        model = onnx.load_from_string(data)
        (text,) = [entry.value for entry in model.metadata_props if entry.key == "anybit"]
        (digest,) = [entry.value for entry in model.metadata_props if entry.key == "anybit.digest"]
        assert digest == digest_of(data, text)
        self.header = json.loads(text)
        assert self.header["version"] == 5
        plan = self.header["plan"]
        self.weights = [point for point in plan["points"] if point["kind"] == "weight"]
        self.activations = [point for point in plan["points"] if point["kind"] != "weight"]
        self.biases = plan["biases"]
        self.held = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}

    @staticmethod
    def width(entry: dict[str, Any], bits: int) -> int:
        return max(bits, entry.get("floor", 2))

    def weight(self, entry: dict[str, Any]) -> Array:
        name, store = entry.get("tensor", entry["name"]), self.header["store"]
        stored = self.held[name + LETTERS[store]]
        if store != "int8":
            return stored.astype(np.float32)
        scale, zero = (self.along(entry, self.held[f"{name}.{part}"], stored.ndim) for part in ("scale", "zero"))
        return (stored.astype(np.float32) - zero.astype(np.float32)) * scale

    @staticmethod
    def along(entry: dict[str, Any], values: Array, ndim: int) -> Array:
        return values.reshape([-1 if d == entry["axis"] else 1 for d in range(ndim)]) if "axis" in entry else values

    @staticmethod
    def symmetric(entry: dict[str, Any], bits: int) -> bool:
        return entry.get("symmetric", True) or (entry.get("centred", False) and bits == 8)

    def grid(self, entry: dict[str, Any], weight: Array, bits: int) -> Scale:
        own, bits = self.fitted(entry, weight, bits), self.width(entry, bits)
        if own is not None and own[0]:
            scale, zero = (self.along(entry, np.frombuffer(part, "<f4"), weight.ndim) for part in own[:2])
            whole = grid_of(np.float32(-1), np.float32(1), bits, symmetric=self.symmetric(entry, bits), signed=True)
            return dataclasses.replace(whole, scale=scale, zero=zero)
        others = tuple(d for d in range(weight.ndim) if d != entry.get("axis"))
        keep = "axis" in entry
        low, high = (f(weight, axis=others, keepdims=keep) for f in (np.min, np.max))
        if entry.get("clip"):
            rows = np.moveaxis(weight, entry["axis"], 0) if keep else weight[None]
            ends = [np.float32((2 ** (bits - 1) - 1) * clipped_scale(row.ravel(), bits)) for row in rows]
            high = np.reshape(np.array(ends, np.float32), np.shape(high))
            low = -high
        grid = grid_of(low, high, bits, symmetric=self.symmetric(entry, bits), signed=True)
        own = np.where((low == 0) & (high == 0), np.float32(0), grid.scale)
        most = own.max() if own.max() > 0 else np.float32(1)
        return dataclasses.replace(grid, scale=np.maximum(own, np.float32(2.0**-16) * most))

    @staticmethod
    def fitted(entry: dict[str, Any], weight: Array, bits: int) -> list[bytes] | None:
        """Scale, zero and ranks of a pair that was fitted to data, if the weight is still the one that it was."""
        mark = zlib.crc32(np.ascontiguousarray(weight, "<f4").tobytes())
        found = [own for own in entry.get("rounded", []) if own[:3] == [bits, ACTIVATIONS, mark]]
        return [base64.b64decode(part) for part in found[0][3:]] if found else None

    def codes(self, entry: dict[str, Any], weight: Array, grid: Scale, bits: int) -> Array:
        if (own := self.fitted(entry, weight, bits)) is not None and own[2]:
            planes = np.frombuffer(zlib.decompress(own[2]), np.uint8).reshape(-1, -(-weight.size // 8))
            flags = np.unpackbits(planes, axis=1)[:, : weight.size].astype(int)
            rank = (flags << np.arange(len(flags))[:, None]).sum(0).reshape(weight.shape)
            near = grid.codes(weight)
            side = np.where(weight / grid.scale + grid.zero >= near, 1, -1)
            return np.clip(near + side * np.where(rank % 2, (rank + 1) // 2, -(rank // 2)), grid.lowest, grid.highest)
        if entry.get("sums"):
            return keeping_sums(weight, grid, entry.get("channels", 0), entry.get("groups", 1))
        return grid.codes(weight)

    def activation(self, entry: dict[str, Any], bits: int) -> Scale:
        ranges = {width: (low, high) for width, low, high, _ in entry["ranges"]}
        bits = self.width(entry, bits)
        low, high = ranges.get(bits, ranges.get(32, (0, 0)))
        return grid_of(low, high, bits, symmetric=entry.get("symmetric", True), signed=low < 0)

    def bias(self, entry: dict[str, Any], error: Array, bits: int) -> Array:
        bias = self.held[entry.get("tensor", entry["name"])]
        (weight,) = [point for point in self.weights if point["name"] == entry["weight"]]
        if self.fitted(weight, self.weight(weight), bits) is not None:
            for _, _, values in (own for own in entry.get("shifts", []) if own[:2] == [bits, ACTIVATIONS]):
                return bias + np.frombuffer(base64.b64decode(values), "<f4")
        if "mean" not in entry:
            return bias
        mean, groups = np.array(entry["mean"], np.float32), weight.get("groups", 1)
        outputs = len(bias) // groups
        shift = np.empty_like(bias)
        for o in range(len(bias)):
            first = o // outputs * (len(mean) // groups)
            inputs = slice(first, first + len(mean) // groups)
            own = error[inputs, o % outputs] if weight.get("channels", 0) == 1 else error[o]
            shift[o] = (own.reshape(own.shape[0], -1).sum(1) * mean[inputs]).sum()
        return bias - shift


def small_network() -> nn.Module:
    """Convolutions with groups, a transposed one, a residual sum and a linear layer, with statistics that differ."""
    torch.manual_seed(1)
    model = Zoo()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.normal_(module.bias, 0, 0.5)
    nn.init.zeros_(model.first[0].weight[3:4])  # a channel whose scale would be zero
    model.last.weight.data = torch.linspace(-7, 7, 20).mul(2).round().div(2).reshape(5, 4)  # ties at 4 bits
    return model.eval()


class Zoo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.BatchNorm2d(8))
        self.up = nn.Sequential(nn.ConvTranspose2d(8, 4, 2, stride=2), nn.BatchNorm2d(4), nn.ReLU())
        self.last = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(self.up(torch.relu(x + self.second(x))).mean((2, 3)))


CASES = {
    "by itself": ({"preset": "default"}, "fp32"),
    "plain": ({}, "fp32"),
    "asymmetric, per channel": ({"symmetric": False, "per_channel": True}, "fp16"),
    "from bytes": ({"symmetric": False}, "int8"),
    "from bytes, per channel": ({"per_channel": True}, "int8"),
    "sums and bias": ({"helpers": ["sums", "bias"]}, "fp32"),
    "all helpers, per channel": ({"helpers": "all", "per_channel": True}, "fp32"),
}
"""Settings of `prepare`, and how the weights are stored."""


@pytest.mark.parametrize(("options", "store"), CASES.values(), ids=CASES)
def test_a_reader_written_from_the_page_gets_the_same_codes(
    options: dict[str, Any], store: str, tmp_path: Path
) -> None:
    options = {"preset": "paper", **options}
    net = anybit.prepare(small_network(), torch.zeros(2, 1, 6, 6), input_range=(-1, 1), **options)
    master = tmp_path / "master.onnx"
    anybit.save(net, master, store=store)
    for bits in (4, 7):
        anybit.export(master, tmp_path / "out.onnx", weights=bits, activations=8)
        model = onnx.load(tmp_path / "out.onnx")
        out = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer}
        compare(Reader(master), out, bits)


@pytest.mark.parametrize("preset", ["default", "paper"])
def test_the_reader_knows_widths_that_were_fitted_to_data(preset: str, tmp_path: Path) -> None:
    net = anybit.prepare(small_network(), torch.zeros(2, 1, 6, 6), input_range=(-1, 1), preset=preset)
    inputs = torch.rand(32, 1, 6, 6, generator=torch.Generator().manual_seed(0)) * 2 - 1
    anybit.reconstruct(net, [inputs], widths=[(4, 8), (4, 4)])
    master = tmp_path / "master.onnx"
    anybit.save(net, master)
    reader = Reader(master)
    assert any(own[5] for entry in reader.weights for own in entry.get("rounded", []))
    assert any(entry.get("shifts") for entry in reader.biases)
    for bits in (4, 5):
        anybit.export(master, tmp_path / "out.onnx", weights=bits, activations=8)
        model = onnx.load(tmp_path / "out.onnx")
        out = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer}
        compare(reader, out, bits)


def compare(reader: Reader, out: dict[str, Array], bits: int) -> None:
    """Compare what the reader makes of a master with the tensors of an exported file."""
    grids: dict[str, Scale] = {}
    errors: dict[str, Array] = {}
    for entry in reader.weights:
        name, weight = entry.get("tensor", entry["name"]), reader.weight(entry)
        grid = reader.grid(entry, weight, bits)
        stored = np.reshape(out[f"{name}.scale"].astype(np.float32), grid.scale.shape)
        if entry.get("clip"):  # sums in any order: nearly the same scale, from which the codes follow
            np.testing.assert_allclose(grid.scale, stored, rtol=1e-5)
            grid = dataclasses.replace(grid, scale=stored)
        np.testing.assert_array_equal(grid.scale, stored)
        codes = reader.codes(entry, weight, grid, bits)
        zero = reader.along(entry, out[f"{name}.zero"], weight.ndim)
        found = out[f"{name}.codes"] + out.get(f"{name}.offset", 0)
        np.testing.assert_array_equal(found - zero, codes - grid.zero)
        grids[entry["name"]], errors[entry["name"]] = grid, grid.values(codes) - weight
    for entry in reader.activations:
        value, grid = entry.get("value", entry["name"]), reader.activation(entry, ACTIVATIONS)
        grids[entry["name"]] = grid
        offset = 128 if grid.lowest < 0 else 0
        assert out[f"{value}.scale"] == grid.scale
        assert out[f"{value}.zero"] == grid.zero + offset
        assert out.get(f"{value}.low", 0) == grid.lowest + offset
        assert out.get(f"{value}.high", 255) == grid.highest + offset
    assert len(reader.biases) == len(reader.weights)
    for entry in reader.biases:
        tensor = entry.get("tensor", entry["name"])
        bias = reader.bias(entry, errors[entry["weight"]], bits)
        scale = grids[entry["weight"]].scale.ravel()
        unit = grids[entry["input"]].scale * np.tile(scale, len(bias) // scale.size)
        codes = np.rint(bias / unit)
        if np.abs(codes).max() > 2**30:
            np.testing.assert_allclose(out[tensor], bias, rtol=1e-6)
            continue
        np.testing.assert_array_equal(np.broadcast_to(out[f"{tensor}.scale"], unit.shape), unit)
        difference = np.abs(out[f"{tensor}.codes"] - codes).max()
        assert difference <= (1 if "mean" in entry else 0)


def test_the_reader_notices_damage(tmp_path: Path) -> None:
    net = anybit.prepare(small_network(), torch.zeros(2, 1, 6, 6), input_range=(-1, 1), preset="paper")
    anybit.save(net, tmp_path / "master.onnx")
    data = bytearray((tmp_path / "master.onnx").read_bytes())
    data[data.index(b"first.0.weight")] ^= 1  # a letter of a name: still an ONNX file
    (tmp_path / "master.onnx").write_bytes(data)
    with pytest.raises(AssertionError):
        Reader(tmp_path / "master.onnx")
