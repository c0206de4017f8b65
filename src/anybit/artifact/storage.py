"""A model on disk: one ONNX file, and a second one for its tensors where the first would pass 2 GB.

    write_model(path, model, seal)    atomic; the second file comes first, so that no file names one that is not there
    read_model(file, fields)          takes large tensors one by one, so that nothing is in memory twice

The second file is ONNX's "external data": raw little-endian numbers, each tensor at a multiple of 4096 bytes. Its name,
`model.onnx.<start of its SHA-256>.data`, says what is in it, so a new one never takes the place of one in use.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
from onnx import TensorProto

from anybit.artifact import protobuf_scan
from anybit.artifact.check import bytes_of
from anybit.artifact.header import Data
from anybit.artifact.model import LARGE, Array, Load, OnnxModel, location, shaped
from anybit.common.files import replacing
from anybit.errors import FileError

LIMIT = 2**31 - 2**16
"""Bytes from which on a model gets a second file: protobuf reads no message of 2 GiB."""

ALIGN = 4096
"""Tensors start at multiples of this, so that they can be mapped into memory."""

_FEW = 128
"""Tensors of less bytes stay in the graph even then: whoever follows shapes wants to see them."""

_CHUNK = 2**22
_MOST_FIELDS = 200_000

Seal = Callable[[BinaryIO, Data | None], object]
"""Appends metadata to a file that is complete otherwise."""


# Writing


def write_model(
    path: str | Path,
    model: OnnxModel,
    seal: Seal,
    *,
    spare: int,
    check: Callable[[Path], object] = lambda beside: None,
    limit: int = LIMIT,
) -> None:
    """Write a model, or leave everything as it was.

    Args:
        path: Where to write.
        model: The model; its arrays are written from where they are.
        seal: Appends the metadata.
        spare: How many bytes that takes, at most.
        check: Gets the file before it is renamed, and raises if it is not good.
        limit: Bytes from which on there is a second file.
    """
    path = Path(path)
    before = second_files(path)
    with _second_file(path, model, limit - spare) as (rest, data), replacing(path) as beside:
        with beside.open("w+b") as file:
            _write(file, rest)
            seal(file, data)
        check(beside)
    for name in before - {data.file if data else ""}:
        with contextlib.suppress(OSError):  # it takes room and does no harm otherwise
            path.with_name(name).unlink()


def _write(file: BinaryIO, model: OnnxModel) -> None:
    """Write a model in one piece; protobuf sees none of the large tensors."""
    if not model.arrays:
        file.write(model.proto.SerializeToString())
        return
    head, graph = onnx.ModelProto(), onnx.GraphProto()
    head.CopyFrom(model.proto)
    graph.CopyFrom(head.graph)
    head.ClearField("graph")
    del graph.initializer[:]
    graph.initializer.extend(t for t in model.graph.initializer if model.apart(t) is None)
    large = [_with_opening(t, array) for t in model.graph.initializer if (array := model.apart(t)) is not None]
    rest = graph.SerializeToString()
    length = len(rest) + sum(len(before) + len(data) for before, data in large)
    file.write(head.SerializeToString() + protobuf_scan.opening(protobuf_scan.GRAPH, length))
    file.write(rest)
    for before, data in large:
        file.write(before)
        file.write(data)


def _with_opening(tensor: TensorProto, array: Array) -> tuple[bytes, memoryview]:
    """Return everything that stands in front of a large tensor's numbers, and their bytes."""
    stub = TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type).SerializeToString()
    stub += protobuf_scan.opening(protobuf_scan.RAW_DATA, array.nbytes)
    return protobuf_scan.opening(protobuf_scan.INITIALIZER, len(stub) + array.nbytes) + stub, _bytes(array)


def _bytes(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


@contextlib.contextmanager
def _second_file(path: Path, model: OnnxModel, limit: int) -> Iterator[tuple[OnnxModel, Data | None]]:
    """Write the second file, if there has to be one, and take it away again if the block raises."""
    size = model.proto.ByteSize() + sum(array.nbytes + 64 for array in model.arrays.values())
    if size <= limit:
        yield model, None
        return
    rest, outside = _taken_out(model)
    if not outside:
        raise FileError(f"{path}: not written, its graph and header alone have more than {limit} bytes; shorten about")
    total = hashlib.sha256()
    length = 0
    for chunk in _laid_out(outside):
        total.update(chunk)
        length += len(chunk)
    data = Data(f"{path.name}.{total.hexdigest()[:16]}.data", length, total.hexdigest())
    for tensor in rest.graph.initializer:
        for entry in tensor.external_data:
            entry.value = data.file if entry.key == "location" else entry.value
    target = path.with_name(data.file)
    there = target.exists()
    try:
        with replacing(target) as beside, beside.open("wb") as file:
            for chunk in _laid_out(outside):
                file.write(chunk)
        yield rest, data
    except BaseException:
        if not there:
            target.unlink(missing_ok=True)
        raise


def _taken_out(model: OnnxModel) -> tuple[OnnxModel, dict[int, Array]]:
    """Return a model whose tensors name a place in the second file, and what lies there, by place."""
    rest = OnnxModel(model.copy().proto)
    outside: dict[int, Array] = {}
    places: dict[str, int] = {}
    end = 0
    for tensor in rest.graph.initializer:
        array = model.apart(tensor)
        if array is None and (len(tensor.raw_data) < _FEW or tensor.data_type == TensorProto.INT64):
            continue
        key = location(tensor) or f"/{tensor.name}"  # what several tensors share is written once
        array = np.frombuffer(tensor.raw_data, np.uint8) if array is None else array
        if key not in places:
            places[key], outside[end] = end, array
            end += -(-array.nbytes // ALIGN) * ALIGN
        tensor.ClearField("raw_data")
        del tensor.external_data[:]
        tensor.data_location = TensorProto.EXTERNAL
        for name, value in (("location", ""), ("offset", places[key]), ("length", array.nbytes)):
            tensor.external_data.add(key=name, value=str(value))
    return rest, outside


def _laid_out(outside: dict[int, Array]) -> Iterator[memoryview]:
    """Yield the bytes of the second file."""
    for array in outside.values():
        whole = _bytes(array)
        for start in range(0, len(whole), _CHUNK):
            yield whole[start : start + _CHUNK]
        yield memoryview(bytes(-len(whole) % ALIGN))


def second_files(path: Path) -> set[str]:
    """Return the names of the second files that were written with a model and that it still names."""
    pattern = re.compile(re.escape(path.name) + r"\.[0-9a-f]{16}\.data")
    try:
        found = {other.name for other in path.parent.iterdir() if pattern.fullmatch(other.name)}
        if not found or not path.is_file() or path.stat().st_size > LIMIT:
            return set()
        model = onnx.load(path, load_external_data=False)
    except Exception:  # whatever is there is about to be replaced
        return set()
    return found & {location(tensor) for tensor in model.graph.initializer}


def size_on_disk(path: Path) -> int:
    """Return how many bytes a model takes, with its second file if it has one."""
    return path.stat().st_size + sum(path.with_name(name).stat().st_size for name in second_files(path))


# Reading


def read_model(
    file: BinaryIO, fields: list[protobuf_scan.Field], data: Data | None, *, path: Path, where: str, hold: bool
) -> OnnxModel:
    """Read a model whose digest was checked, with the tensors that its header says are in a second file.

    Args:
        file: The model.
        fields: The outermost fields of it.
        data: What the header says about the second file.
        path: Where the file is, and the second one beside it.
        where: What errors call it.
        hold: Whether large tensors are held in memory, or read each time that somebody looks at them.

    Raises:
        FileError: A tensor or the second file is not what it should be.
        ValueError: The bytes make no sense.
    """
    (graph,) = [field for field in fields if field.number == protobuf_scan.GRAPH]
    rest, large = bytearray(), []
    for field in protobuf_scan.scan(file, graph.end, graph.start, most=_MOST_FIELDS):
        raw = _raw_data(file, field)
        if raw is None:
            rest += protobuf_scan.read(file, field.begin, field.end)
        else:
            large.append(
                (protobuf_scan.read(file, field.start, raw.begin) + protobuf_scan.read(file, raw.end, field.end), raw)
            )
    head = b"".join(
        protobuf_scan.read(file, field.begin, field.end) for field in fields if field.number != protobuf_scan.GRAPH
    )
    model = OnnxModel(onnx.ModelProto())
    try:
        model.proto.ParseFromString(head + protobuf_scan.opening(protobuf_scan.GRAPH, len(rest)) + rest)
        stubs = [(TensorProto.FromString(stub), raw) for stub, raw in large]
    except Exception as error:  # protobuf has several implementations, each with its own exception
        raise FileError(f"{where}: the graph cannot be parsed ({error})") from error
    del rest
    _fill_from_second(model, data, path, where, hold=hold)
    for stub, raw in stubs:
        spot = f"{where}: tensor {stub.name[:60]!r}"
        if stub.data_location == TensorProto.EXTERNAL or stub.external_data or stub.HasField("segment"):
            raise FileError(f"{spot}: has its data in two places")
        load = partial(np.fromfile, path, np.uint8, raw.length, offset=raw.start)
        _fill(model, stub, raw.length, load, load, spot, hold=hold)
        model.graph.initializer.append(stub)
    return model


def _raw_data(file: BinaryIO, field: protobuf_scan.Field) -> protobuf_scan.Field | None:
    """Return where the numbers of a large initializer lie; nothing for all other fields of a graph."""
    if field.number != protobuf_scan.INITIALIZER or field.is_number or field.length < LARGE:
        return None
    parts = protobuf_scan.scan(file, field.end, field.start, most=_MOST_FIELDS)  # text has a field for each entry
    found = [part for part in parts if part.number == protobuf_scan.RAW_DATA]
    return found[0] if len(found) == 1 and not found[0].is_number and found[0].length >= LARGE else None


def _fill(
    model: OnnxModel, tensor: TensorProto, length: int, load: Load, later: Load, where: str, *, hold: bool
) -> None:
    """Give a tensor its bytes: those of `load` now, or of `later` each time that somebody looks at them."""
    wanted = bytes_of(tensor, where=where)
    if length != wanted:
        raise FileError(f"{where}: shape {list(tensor.dims)[:8]} needs {wanted} bytes, there are {length}")
    if hold or length < LARGE:
        model.fill(tensor, shaped(load(), tensor))
    else:
        kind = TensorProto(dims=tensor.dims, data_type=tensor.data_type)
        model.fill_later(tensor, lambda: shaped(later(), kind))


def _fill_from_second(model: OnnxModel, data: Data | None, path: Path, where: str, *, hold: bool) -> None:
    """Give every tensor that names the second file its numbers from there."""
    outside = [t for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL or t.external_data]
    if not outside and data is None:
        return
    if data is None:
        spot = f"tensor {outside[0].name[:60]!r}"
        raise FileError(f"{where}: {spot}: its data lie in another file, which the header does not name")
    second = _second(path.parent, data, where)
    mapped = np.memmap(second, np.uint8, "r")
    for tensor in outside:
        spot = f"{where}: tensor {tensor.name[:60]!r}"
        start, length = _place(tensor, data, spot)
        if tensor.raw_data:
            raise FileError(f"{spot}: has its data in two places")
        load = partial(mapped.__getitem__, slice(start, start + length))
        later = partial(np.fromfile, second, np.uint8, length, offset=start)  # a map would be held, page by page
        _fill(model, tensor, length, load, later, spot, hold=hold)


def _place(tensor: TensorProto, data: Data, where: str) -> tuple[int, int]:
    """Return where the numbers of a tensor start in the second file, and how many bytes they take."""
    given = {entry.key: entry.value for entry in tensor.external_data}
    if set(given) != {"location", "offset", "length"} or len(given) != len(tensor.external_data):
        raise FileError(f"{where}: external_data must be location, offset and length, got {sorted(given)[:5]}")
    if given["location"] != data.file:
        raise FileError(f"{where}: its data lie in another file than {data.file!r}, got {given['location'][:80]!r}")
    numbers = [given[key] for key in ("offset", "length")]
    if not all(re.fullmatch(r"[0-9]{1,15}", number) for number in numbers):
        raise FileError(f"{where}: offset and length must be whole numbers, got {numbers[0][:20]!r}")
    start, length = map(int, numbers)
    if start % ALIGN or start + length > data.bytes:
        raise FileError(
            f"{where}: offset must be a multiple of {ALIGN} and the data end before byte {data.bytes}, "
            f"got {start} and {length} bytes"
        )
    return start, length


def _second(folder: Path, data: Data, where: str) -> Path:
    """Return the path of the second file, once it is known to be the one that was written with the first."""
    path = folder / data.file
    again = "both files belong together; get both again, into one folder"
    try:
        if path.resolve().parent != folder.resolve():
            raise FileError(f"{where}: its second file {data.file} leads out of the folder; {again}")
        if not path.is_file():
            raise FileError(f"{where}: its second file {data.file} is missing; {again}")
        if path.stat().st_size != data.bytes:
            found = path.stat().st_size
            raise FileError(f"{where}: its second file {data.file} has {found} bytes, not {data.bytes}; {again}")
        with path.open("rb") as file:
            total = hashlib.file_digest(file, "sha256")
    except OSError as error:
        reason = error.strerror or error
        raise FileError(f"{where}: its second file {data.file} cannot be read ({reason}); {again}") from error
    if total.hexdigest() != data.sha256:
        raise FileError(f"{where}: its second file {data.file} is damaged or was changed; {again}")
    return path
