"""The outermost layer of an ONNX file, read without loading it: which fields there are and where.

A file of gigabytes that is no master is refused after a few reads, and a damaged one before anybody parses it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO, NamedTuple

from anybit.errors import FileError

IR_VERSION, GRAPH, OPSET, METADATA = 1, 7, 8, 14
"""Field numbers of `ModelProto` that a master is made of."""

INITIALIZER, RAW_DATA = 5, 9
"""Field numbers of `GraphProto` and of `TensorProto`: where the bytes of a file lie."""

_NUMBER, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MOST_FIELDS = 10_000
_LONGEST_ENTRY = 64 * 2**20
_CHUNK = 2**20


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
        begin = position
        tag, position = _read_varint(file, position, size)
        number, kind = tag >> 3, tag & 7
        if kind == _NUMBER:
            value, position = _read_varint(file, position, size)
            fields.append(Field(number, value, position, begin, is_number=True))
            continue
        if kind == _BYTES:
            length, position = _read_varint(file, position, size)
        elif kind in (_FIXED64, _FIXED32):
            length = 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"byte {position} starts no field")
        if number == 0 or length > size - position:
            raise ValueError(f"a field at byte {position} reaches beyond the end")
        fields.append(Field(number, position, position + length, begin))
        position += length
        if len(fields) > most:
            raise ValueError(f"more than {most} fields")
    return fields


def _read_varint(file: BinaryIO, position: int, size: int) -> tuple[int, int]:
    file.seek(position)
    value = 0
    for i, byte in enumerate(file.read(min(10, size - position))):
        value |= (byte & 127) << 7 * i
        if byte < 128:
            return value, position + i + 1
    raise ValueError(f"the number at byte {position} does not end")


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
            raise ValueError(f"metadata {key[:60]!r} is there twice")
        found[key] = parts.get(2, b"").decode()
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
