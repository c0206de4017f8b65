"""An ONNX file, looked at without loading it: which fields it has and where, and what parsing it would cost.

A file of gigabytes that is no ONNX model is refused after a few reads, a damaged one before anybody parses it, and one
that would unfold in memory (millions of empty nodes, of numbers that take a byte there and eight here) before it does.
Refusing or loading any file takes at most a second plus two for each 100 MB, and 200 MB plus three times its size.
"""

from __future__ import annotations

import hashlib
import mmap
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import onnx

from anybit.common.text import printable
from anybit.errors import FileError

IR_VERSION, GRAPH, OPSET, METADATA = 1, 7, 8, 14
"""Field numbers of `ModelProto` that a master is made of."""

INITIALIZER, RAW_DATA = 5, 9
"""Field numbers of `GraphProto` and of `TensorProto`: where the bytes of a file lie."""

_NUMBER, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MOST_FIELDS = 10_000
_LONGEST_ENTRY = 64 * 2**20
_MOST_VALUES = 2_000_000
_CHUNK = 2**20

_MOST_PARTS = 400_000
_MESSAGE = 3
"""Fields of a whole model, over all depths, and as how many more a message counts. A thousand nodes have 30,000."""
_MOST_UNFOLDING = 4 * 2**20
"""Bytes of numbers that may take eight times as much in memory; shapes and the like are short."""

_NUMBERS = "numbers"


def _messages(message: Any) -> dict[str, dict[int, str]]:
    """Return by name what lies inside a message and inside those in there: a message's name, or that of long numbers.

    >>> _messages(onnx.TensorProto.DESCRIPTOR)["TensorProto"][13], _messages(onnx.TensorProto.DESCRIPTOR)["Segment"]
    ('StringStringEntryProto', {1: 'numbers', 2: 'numbers'})
    """
    found: dict[str, dict[int, str]] = {}
    waiting = [message]
    while waiting:
        kind = waiting.pop()
        below = {f.number: f.message_type for f in kind.fields if f.message_type is not None}
        long = {f.number: _NUMBERS for f in kind.fields if f.type in (f.TYPE_INT64, f.TYPE_UINT64)}
        found[kind.name] = {**{number: inner.name for number, inner in below.items()}, **long}
        waiting += [inner for inner in below.values() if inner.name not in found]
    return found


_PARTS = _messages(onnx.ModelProto.DESCRIPTOR)
"""The messages of ONNX, and where in them, by field number, are others and numbers that may be packed."""


class Field(NamedTuple):
    """One field of a message: its number, where its bytes start and end, and where the field itself begins.

    A field that is a number has its value in `start`; its bytes are those from `begin` to `end`.
    """

    number: int
    start: int
    end: int
    begin: int
    is_number: bool = False

    @property
    def length(self) -> int:
        """How many bytes the field holds."""
        return self.end - self.start

    def _moved(self, by: int) -> Field:
        start = self.start if self.is_number else self.start + by
        return Field(self.number, start, self.end + by, self.begin + by, self.is_number)


def varint(value: int) -> bytes:
    """Return a whole number as protobuf writes it.

    >>> varint(300).hex()
    'ac02'
    """
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def opening(number: int, length: int) -> bytes:
    """Return what stands in front of the bytes of a field.

    >>> opening(GRAPH, 1).hex()
    '3a01'
    """
    return varint(number << 3 | _BYTES) + varint(length)


def entry(key: str, value: str) -> bytes:
    """Return one metadata entry as it stands in a model file, ready to be appended.

    >>> entry("a", "b").hex()
    '72060a0161120162'
    """
    key_, value_ = key.encode(), value.encode()
    body = opening(1, len(key_)) + key_ + opening(2, len(value_)) + value_
    return opening(METADATA, len(body)) + body


def scan(file: BinaryIO, size: int, start: int = 0, *, most: int = _MOST_FIELDS) -> list[Field]:
    """Return the fields between `start` and `size`; raises `ValueError` where the bytes make no sense.

    >>> import io
    >>> [tuple(field) for field in scan(io.BytesIO(bytes.fromhex("080a3a0141")), 5)]
    [(1, 10, 2, 0, True), (7, 4, 5, 2, False)]
    """
    fields: list[Field] = []
    position = start
    while position < size:
        if len(fields) >= most:
            raise ValueError(f"more than {most} fields")
        file.seek(position)
        head = file.read(min(_LONGEST_HEAD, size - position))
        fields.append(field := _field(head, 0, len(head), size - position)._moved(position))
        position = field.end
    return fields


_LONGEST_HEAD = 20
"""Bytes of a field's number and of its length, or of its value."""


def _field(data: bytes | mmap.mmap, at: int, end: int, room: int | None = None) -> Field:
    """Return the field that begins at a byte of `data`, of which `end` are there; it may reach up to `room`."""
    tag, position = _varint(data, at, end)
    number, kind = tag >> 3, tag & 7
    if number == 0:
        raise ValueError(f"byte {at} starts no field")
    if kind == _NUMBER:
        value, position = _varint(data, position, end)
        return Field(number, value, position, at, is_number=True)
    if kind == _BYTES:
        length, position = _varint(data, position, end)
    elif kind in (_FIXED64, _FIXED32):
        length = 8 if kind == _FIXED64 else 4
    else:
        raise ValueError(f"byte {position} starts no field")
    if length > (end if room is None else room) - position:
        raise ValueError(f"a field at byte {position} reaches beyond the end")
    return Field(number, position, position + length, at)


def _varint(data: bytes | mmap.mmap, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    for position in range(at, min(at + 10, end)):
        byte = data[position]
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position + 1
        shift += 7
    raise ValueError(f"the number at byte {at} does not end")


def check_cost(file: BinaryIO, size: int) -> None:
    """Refuse a model that would take much more memory than its size; raises `ValueError`.

    Counts the fields of all messages inside messages, without parsing any: the bytes of tensors are jumped over.
    """
    parts = unfolding = 0
    waiting = [("ModelProto", 0, size, 0)]
    with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
        while waiting:
            kind, position, end, depth = waiting.pop()
            if depth > _DEEPEST:
                raise ValueError(f"messages inside messages, more than {_DEEPEST} deep")
            inside = _PARTS[kind]
            expands = kind in ("AttributeProto", "TensorProto")
            while position < end:
                parts += 1
                if parts > _MOST_PARTS or unfolding > _MOST_UNFOLDING:
                    raise ValueError(f"more than {_MOST_PARTS} fields, or numbers that would unfold in memory")
                tag, length = data[position], data[position + 1] if position + 1 < end else 255
                # Nearly all fields are short ones with a small number, which need no loop to be read.
                if tag & 135 == _BYTES and tag > 7 and length < min(128, end - position - 1):
                    number, start, position = tag >> 3, position + 2, position + 2 + length
                elif tag & 135 == _NUMBER and tag > 7 and length < 128:
                    unfolding += expands
                    position += 2
                    continue
                else:
                    number, start, position, _, is_number = _field(data, position, end)
                    if is_number:
                        unfolding += expands
                        continue
                below = inside.get(number)
                if below == _NUMBERS:
                    unfolding += position - start
                elif below is not None:
                    parts += _MESSAGE
                    waiting.append((below, start, position, depth + 1))


_DEEPEST = 100


def metadata(file: BinaryIO, fields: list[Field]) -> dict[str, str]:
    """Return the metadata entries; raises `ValueError` for one that is broken or listed twice."""
    found: dict[str, str] = {}
    for field in fields:
        if field.number != METADATA or field.is_number:
            continue
        if field.length > _LONGEST_ENTRY:
            raise ValueError(f"a metadata entry of more than {_LONGEST_ENTRY >> 20} MB")
        parts = {
            part.number: read(file, part.start, part.end)
            for part in scan(file, field.end, field.start)
            if not part.is_number
        }
        key = parts.get(1, b"").decode()
        if key in found:
            raise ValueError(f"metadata {printable(key, 60)!r} is there twice")
        found[key] = parts.get(2, b"").decode()
        if sum(map(found[key].count, ",[{")) > _MOST_VALUES:
            raise ValueError(f"metadata {printable(key, 60)!r} lists more than {_MOST_VALUES} values")
    return found


def read(file: BinaryIO, start: int, end: int) -> bytes:
    """Return the bytes of a file from one place to another."""
    file.seek(start)
    return file.read(end - start)


def digest(file: BinaryIO, fields: list[Field], header: str) -> str:
    """Return the SHA-256 of all that a master's numbers depend on: graph, operator versions, header."""
    total = hashlib.sha256(header.encode())
    for field in fields:
        if field.number not in (IR_VERSION, GRAPH, OPSET):
            continue
        total.update(f"/{field.number}:{field.start if field.is_number else field.length}/".encode())
        if not field.is_number:
            _update(total, file, field)
    return total.hexdigest()


def _update(total: hashlib._Hash, file: BinaryIO, field: Field) -> None:
    file.seek(field.start)
    left = field.end - field.start
    while left:
        chunk = file.read(min(left, _CHUNK))
        if not chunk:
            raise ValueError("the file became shorter while it was read")
        total.update(chunk)
        left -= len(chunk)


def size_of(path: Path, *, what: str) -> int:
    """Return the size of a plain file, or say what is wrong with it."""
    try:
        if path.is_dir():
            raise FileError(f"{path}: is a folder; {what} is expected here")
        if not path.exists():
            raise FileError(f"{path}: no such file; {what} is expected here")
        if not path.is_file():  # a pipe or a device would block, or never end
            raise FileError(f"{path}: is no plain file; {what} is expected here")
        size = path.stat().st_size
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror or error})") from error
    if size == 0:
        raise FileError(f"{path}: is empty; {what} is expected here")
    if size >= 2**31:
        raise FileError(f"{path}: has {size / 2**30:.1f} GB; an ONNX file in one piece has less than 2")
    return size
