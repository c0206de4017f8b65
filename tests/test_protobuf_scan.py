"""Files from strangers cost no more than their size: looked at in a process with little memory and processor time."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest
from test_artifact_small import MODEL, write

from anybit.artifact import protobuf_scan as scan

MANY = 2**22
SHORT = r"beyond the end|does not end|starts no field"


def inside(number: int, data: bytes) -> bytes:
    return scan.opening(number, len(data)) + data


def graph(data: bytes) -> bytes:
    return b"\x08\x0a\x42\x04\x0a\x00\x10\x15" + inside(scan.GRAPH, data)


HOSTILE: dict[str, Callable[[BinaryIO], object]] = {
    "16 MB of zeros": lambda file: file.truncate(2**24),
    "2 GB of zeros, without a byte on disk": lambda file: file.truncate(2**31 - 1),
    "millions of numbers": lambda file: file.write(b"\x08\x01" * MANY),
    "millions of empty nodes": lambda file: file.write(graph(b"\x0a\x00" * MANY)),
    "millions of empty attributes": lambda file: file.write(graph(inside(1, b"\x2a\x00" * MANY))),
    "millions of empty tensors": lambda file: file.write(graph(b"\x2a\x00" * MANY)),
    "millions of empty inputs": lambda file: file.write(graph(b"\x5a\x00" * MANY)),
    "millions of dimensions": lambda file: file.write(graph(inside(5, b"\x08\x01" * MANY))),
    "numbers that take eight times as much": lambda file: file.write(graph(inside(5, inside(7, b"\x01" * 10**8)))),
    "whole numbers of an attribute": lambda file: file.write(graph(inside(1, inside(5, inside(8, b"\x01" * 10**8))))),
    "functions": lambda file: file.write(b"\xca\x01\x00" * MANY),
    "a header of empty lists": lambda file: file.write(scan.entry("anybit", "[" + "[]," * MANY + "[]]")),
    "a header of many entries": lambda file: file.write(b"\x72\x00" * MANY),
    "graphs in graphs": lambda file: file.write(nested(3000)),
}

TRY = """
import resource, sys
from pathlib import Path
from anybit.artifact.plain import read_model_file
from anybit.artifact.master import open_master
from anybit.errors import FileError
import onnxruntime

path = Path(sys.argv[1])
pages = int(Path("/proc/self/statm").read_text().split()[0])
# Mapping the file takes addresses and no memory.
room = pages * resource.getpagesize() + 2 * path.stat().st_size + 3 * path.stat().st_size + 200 * 10**6
resource.setrlimit(resource.RLIMIT_AS, (room, room))
used = resource.getrusage(resource.RUSAGE_SELF)
for read in (open_master, read_model_file):
    before = resource.getrusage(resource.RUSAGE_SELF)
    try:
        read(path)
    except FileError as error:
        assert str(error).startswith(f"{path}: "), error
        assert len(str(error)) < 500 + len(str(path)), error
    else:
        raise AssertionError("taken")
    after = resource.getrusage(resource.RUSAGE_SELF)
    print(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
"""


def nested(depth: int) -> bytes:
    """Return a model whose attribute holds a graph, whose attribute holds a graph, and so on."""
    data = b""
    for _ in range(depth):
        data = inside(1, inside(5, inside(6, data)))
    return graph(data)


@pytest.mark.parametrize("name", HOSTILE)
def test_refusing_a_file_takes_no_more_than_its_size(name: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.onnx"
    with path.open("wb") as file:
        HOSTILE[name](file)
    done = subprocess.run([sys.executable, "-c", TRY, str(path)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    # Of the processor, not of the clock; a busy machine makes that twice as much as a quiet one.
    assert max(map(float, done.stdout.split())) < 3 * (1 + 2 * path.stat().st_size / 10**8)


def test_whole_files_are_within_the_limits(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx")
    with path.open("rb") as file:
        scan.check_cost(file, path.stat().st_size)
    (tmp_path / "many.onnx").write_bytes(
        graph(inside(1, inside(4, b"Relu") + inside(1, b"x") + inside(2, b"y")) * 9000)
    )
    with (tmp_path / "many.onnx").open("rb") as file:
        scan.check_cost(file, (tmp_path / "many.onnx").stat().st_size)


@pytest.mark.parametrize("end", [1, 2, 3, 5, 8, 13, 40, 100])
def test_a_file_that_is_cut_short_is_noticed(end: int, tmp_path: Path) -> None:
    data = MODEL.SerializeToString()
    path = tmp_path / "short.onnx"
    path.write_bytes(data[:-end])
    with path.open("rb") as file, pytest.raises(ValueError, match=SHORT):
        scan.check_cost(file, len(data) - end)
    with pytest.raises(ValueError, match=SHORT):
        scan.scan(io.BytesIO(data[:-end]), len(data) - end)


def test_number_fields_count_too() -> None:
    data = b"\x08\x01" * 20_000
    with pytest.raises(ValueError, match="more than 10000 fields"):
        scan.scan(io.BytesIO(data), len(data))
    assert len(scan.scan(io.BytesIO(data), 20_000)) == 10_000
