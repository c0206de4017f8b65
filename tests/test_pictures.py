"""Pictures and arrays from strangers: by value, within limits, or refused in one sentence."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from test_feeding import read_one

from anybit.artifact.arrays import read_array
from anybit.artifact.pictures import LARGEST, MOST_SCANS, count_scans, decode
from anybit.errors import DataError

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")

GREY = np.linspace(0, 255, 64).astype(np.uint8).reshape(8, 8)


def encoded(picture: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


def pgm(values: np.ndarray, most: int) -> bytes:
    return f"P5 {values.shape[1]} {values.shape[0]} {most}\n".encode() + values.astype(">u2").tobytes()


def pfm(values: np.ndarray) -> bytes:
    return f"Pf\n{values.shape[1]} {values.shape[0]}\n-1.0\n".encode() + values[::-1].astype("<f4").tobytes()


@pytest.mark.parametrize(
    "data",
    [
        encoded(Image.fromarray(GREY), "PNG"),
        encoded(Image.fromarray(GREY.astype(np.uint16) * 257), "PNG"),
        pgm(GREY.astype(np.uint16) * 257, 65535),
        pgm(GREY.astype(np.uint16) * 4, 1020),
        pfm(GREY / 255),
    ],
    ids=["8 bits", "16 bits", "16 bits in PGM", "10 bits in PGM", "float"],
)
def test_grey_keeps_its_value_however_many_bits_it_has(data: bytes) -> None:
    found = decode(data)
    assert found.mode == "L"
    assert np.array_equal(np.asarray(found), GREY)


@pytest.mark.parametrize("value", [np.nan, np.inf, 2.0, -0.5])
def test_floating_point_pixels_outside_of_the_scale_are_refused(value: float) -> None:
    pixels = (GREY / 255).astype(np.float32)
    pixels[3, 3] = value
    with pytest.raises(DataError, match="not from 0 to 1"):
        decode(pfm(pixels))


@pytest.mark.parametrize("kind", ["EPS", "TIFF", "PDF", "ICO", "TGA", "PCX", "SGI"])
def test_no_other_reader_of_pillow_is_tried_whatever_the_name(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encoded(Image.new("RGB", (8, 8)), kind))
    with pytest.raises(DataError, match=r"a\.png: is no picture of a known type"):
        read_one(path, (3, 8, 8))


def progressive(side: int, scans: int) -> bytes:
    """Return a JPEG that refines the same picture again and again."""
    data = encoded(Image.effect_noise((side, side), 50), "JPEG", progressive=True)
    first = data.index(b"\xff\xda")
    second = data.index(b"\xff\xda", first + 2)
    third = data.index(b"\xff\xda", second + 2)
    return data[:second] + data[second:third] * scans + b"\xff\xd9"


def test_a_progressive_picture_has_few_passes() -> None:
    usual = encoded(Image.effect_noise((64, 64), 50).convert("RGB"), "JPEG", progressive=True)
    assert 5 < count_scans(usual) < 20
    assert decode(usual).size == (64, 64)
    assert count_scans(encoded(Image.new("L", (8, 8)), "JPEG")) == 1
    with pytest.raises(DataError, match=f"JPEG of {MOST_SCANS + 2} passes"):
        decode(progressive(64, MOST_SCANS + 1))
    with pytest.raises(DataError, match="would take too long"):
        decode(progressive(4000, 60))


@pytest.mark.parametrize(
    "junk", [b"\xff\xd8", b"\xff\xd8\xff", b"\xff\xd8\xff\xff\xff\xff", b"\xff\xd8\xff\xe0\0\0" * 9]
)
def test_counting_passes_ends(junk: bytes) -> None:
    assert count_scans(b"\xff\xd8" + junk) == 0
    with pytest.raises(DataError):
        decode(b"\xff\xd8" + junk)


def test_a_picture_that_claims_a_great_size() -> None:
    chunk = struct.pack(">II5B", 60_000, 60_000, 8, 0, 0, 0, 0)
    data = encoded(Image.new("L", (1, 1)), "PNG")
    data = data[:16] + chunk + struct.pack(">I", zlib.crc32(b"IHDR" + chunk)) + data[33:]
    with pytest.raises(DataError, match=rf"{LARGEST:,}"):
        decode(data)


# Arrays


def header(shape: str, kind: str = "<f4") -> bytes:
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}}}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


BAD = {
    "nothing": b"",
    "text": b"hello",
    "pickle": b"\x80\x04K\x01.",
    "a picture": encoded(Image.new("L", (8, 8)), "PNG"),
    "an archive": b"PK\x05\x06" + bytes(18),
    "a shape that fills the memory": header("(1, 1, 9999999, 9999999)"),
    "a shape without end": header("(" + "9" * 400 + ",)"),
    "a negative shape": header("(-1, 1, 2, 2)") + bytes(16),
    "deep brackets": header("(" * 3000),
    "cut short": header("(1, 1, 2, 2)") + bytes(15),
    "objects": header("(1, 1, 2, 2)", "|O") + bytes(32),
    "texts": header("(1, 1, 2, 2)", "<U1") + bytes(16),
    "complex numbers": header("(1, 1, 2, 2)", "<c8") + bytes(32),
    "no rows": header("(0, 1, 2, 2)"),
    "NaN": header("(1, 1, 2, 2)") + struct.pack("<4f", 1, 2, float("nan"), 3),
    "infinity": header("(1, 2, 2)") + struct.pack("<4f", 1, 2, float("-inf"), 3),
    "too large for 32 bits": header("(1, 2, 2)", "<f8") + struct.pack("<4d", 1, 2, 1e300, 3),
}


@pytest.mark.parametrize("name", BAD)
def test_arrays_that_are_none_are_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(BAD[name])
    with pytest.raises(DataError) as caught:
        read_one(path, (1, 2, 2))
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value)) < 500 + len(str(path))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("kind", ["<f4", ">f4", "<f8", "<f2", "|u1", "<i8", "|b1"])
def test_arrays_of_all_numbers_are_taken(kind: str, tmp_path: Path) -> None:
    want = np.array([[[0, 1], [1, 0]]])
    np.save(tmp_path / "a.npy", want.astype(kind))
    found = read_one(tmp_path / "a.npy", (1, 2, 2))
    assert found.dtype == np.float32
    assert np.array_equal(found[0], want)
    assert np.array_equal(read_array(tmp_path / "a.npy"), want)
