"""Thousands of broken masters, in a process of their own: a crash or a hang would end it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from anybit.artifact.format import DIGEST, KEY, Weight, write_header
from test_artifact_small import HEADER, MODEL, header_with, packed, write

from anybit.artifact import protobuf_scan as wire
from anybit.artifact.adopt import adopt
from anybit.artifact.session import Session, load
from anybit.errors import AnybitError
from anybit.spec import Bits

Rng = np.random.Generator


def broken(data: bytes, rng: Rng) -> bytes:
    """Change a few bytes: flip bits, write others, cut out, put in, repeat a piece, cut off the end."""
    out = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(0, len(out)))
        length = int(rng.integers(1, 9))
        match int(rng.integers(0, 6)):
            case 0:
                out[at] ^= 1 << int(rng.integers(0, 8))
            case 1:
                out[at : at + length] = rng.bytes(length)
            case 2:
                del out[at : at + length]
            case 3:
                out[at:at] = rng.bytes(length)
            case 4:
                out[at:at] = out[at : at + 8 * length]
            case _:
                del out[max(1, at) :]
        if not out:
            return b"\0"
    return bytes(out)


def sealed(graph: bytes, text: str) -> bytes:
    """Return a master with these contents and a digest that fits them, as somebody with bad intentions would."""
    data = b"\x08\x0a\x42\x04\x0a\x00\x10\x15\x3a" + wire.varint(len(graph)) + graph
    file = io.BytesIO(data)
    seal = wire.digest(file, wire.scan(file, len(data)), text)
    return data + wire.entry(KEY, text) + wire.entry(DIGEST, seal)


def masters(count: int) -> list[bytes]:
    """Return broken masters: a third damaged by accident, the rest with a digest that fits the damage."""
    rng = np.random.default_rng(0)
    weights = tuple(Weight(w.name, w.tensor, 0, symmetric=False) for w in HEADER.weights)
    headers = [HEADER, header_with(store="int8"), header_with(store="fp16"), header_with(weights=weights)]
    whole = [packed(header) for header in headers]
    graphs = [onnx.load_model_from_string(data).graph.SerializeToString() for data in whole]
    texts = [write_header(header) for header in headers]
    out = []
    for i in range(count):
        k = i % len(headers)
        match i % 3:
            case 0:
                out.append(broken(whole[k], rng))
            case 1:
                out.append(sealed(broken(graphs[k], rng), texts[k]))
            case _:
                out.append(sealed(graphs[k], broken(texts[k].encode(), rng).decode(errors="replace")))
    return out


def survives(path: Path) -> str:
    """Use a file as an unsuspecting user would; return what came of it."""
    message = ""
    try:
        session: Session = load(path, threads=1, keep=1)
        for bits in (Bits(8, 8), Bits(4, 4)):
            session.set_bits(weights=bits.weights, activations=bits.activations)
        session.run(np.ones((2, 1, 6, 6), np.float32))
    except AnybitError as error:
        message = str(error)
    assert not message or (str(path) in message and len(message) < 600), message
    return "refused" if message else "ran"


def plain(count: int) -> list[bytes]:
    """Return broken ONNX models of somebody else's."""
    rng = np.random.default_rng(1)
    data = MODEL.SerializeToString()
    return [broken(data, rng) for _ in range(count)]


def adopted(path: Path) -> str:
    """Make a master of a file; return what came of it."""
    feeds = [{"x": np.ones((2, 1, 6, 6), np.float32)}]
    message = ""
    try:
        adopt(path, path.with_name("adopted.onnx"), calibration=feeds)
    except AnybitError as error:
        message = str(error)
    assert len(message) < 1000, message
    return "refused" if message else "ran"


def main(folder: str, kind: str, count: str) -> None:
    path = Path(folder) / "fuzz.onnx"
    found = {"refused": 0, "ran": 0}
    make, use = {"masters": (masters, survives), "plain": (plain, adopted)}[kind]
    for i, data in enumerate(make(int(count))):
        path.write_bytes(data)
        try:
            found[use(path)] += 1
        except BaseException:
            print(f"number {i}", file=sys.stderr)
            raise
    print(json.dumps(found))


@pytest.mark.parametrize(("kind", "count"), [("masters", 2400), ("plain", 400)])
def test_broken_files_are_refused_and_never_crash(kind: str, count: int, tmp_path: Path) -> None:
    tests = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {tests!r}); import test_artifact_fuzz as fuzz; fuzz.main(*sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), kind, str(count)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert sum(found.values()) == count
    assert found["refused"] > count / 2
    assert found["ran"] > count / 100  # some damage is harmless: another name, another weight


def test_the_seal_is_the_one_that_saving_makes(tmp_path: Path) -> None:
    graph = MODEL.graph.SerializeToString()
    (tmp_path / "m.onnx").write_bytes(sealed(graph, write_header(HEADER)))
    assert survives(tmp_path / "m.onnx") == "ran"
    assert survives(write(tmp_path / "n.onnx")) == "ran"
