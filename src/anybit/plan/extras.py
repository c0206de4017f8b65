"""What a pair of widths has of its own: which way each weight rounds, its grid, shifts of biases.

It holds where that very pair was asked for, for all layers or for this one, and nowhere else: it makes up for what the
layers in front do at those widths.

A weight's codes are stored as ranks: 0 is the code nearest to the weight, 1 its other neighbour, 2 the next one on the
nearest code's side, and so on. Most are 0 and nearly all others 1, so that bit planes, packed and compressed, take less
than a bit a weight. Whatever the bytes say, a code never leaves its grid.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from anybit.errors import SpecError
from anybit.plan.grid import Grid, quantize
from anybit.spec import Bits, QuantSpec, check_width

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

MOST_PLANES = 8


@dataclass(frozen=True)
class Rounded:
    """How a weight is rounded at one pair of widths, if `mark` is that of the weight: else it has changed since.

    `scale` and `zero` are its grid there, as bytes of float32; `ranks` are packed and compressed. Without a scale the
    weight is rounded as at any width, and only the bias has something of its own.
    """

    weights: int
    activations: int
    mark: int
    scale: bytes = b""
    zero: bytes = b""
    ranks: bytes = b""

    def __post_init__(self) -> None:
        check_width(self.weights)
        check_width(self.activations)
        if len(self.scale) != len(self.zero) or len(self.scale) % 4 or bool(self.scale) != bool(self.ranks):
            raise SpecError("scale, zero and ranks of a rounded weight do not go together")

    @property
    def pair(self) -> Bits:
        """The widths that it was found for. A layer that keeps more bits rounds its weight at those."""
        return Bits(self.weights, self.activations)

    @property
    def nbytes(self) -> int:
        """What it takes in a file, about: bytes are written as text, four signs for three."""
        return (len(self.scale) + len(self.zero) + len(self.ranks)) * 4 // 3

    def grid(self, rank: int, spec: QuantSpec) -> Grid:
        """Return the grid of the weight, which has so many dimensions."""
        scale, zero = (np.frombuffer(data, "<f4").astype(np.float32) for data in (self.scale, self.zero))
        shape = [] if spec.axis is None else [-1 if d == spec.axis else 1 for d in range(rank)]
        return Grid(scale.reshape(shape), zero.reshape(shape), *spec.levels)


@dataclass(frozen=True)
class Shift:
    """What is added to a layer's bias at one pair of widths, as bytes of float32."""

    weights: int
    activations: int
    values: bytes

    def __post_init__(self) -> None:
        check_width(self.weights)
        check_width(self.activations)

    @property
    def pair(self) -> Bits:
        """The widths that it was found for."""
        return Bits(self.weights, self.activations)

    def array(self) -> Floats:
        """Return the numbers."""
        return np.frombuffer(self.values, "<f4").astype(np.float32)


def mark_of(weight: Floats) -> int:
    """Return a number that changes with the content of a weight."""
    return zlib.crc32(np.ascontiguousarray(weight, "<f4").reshape(-1).view(np.uint8).data)


def pack(weight: Floats, codes: Array, grid: Grid, pair: Bits) -> Rounded:
    """Return codes of a weight, between the ends of its grid, as they are stored.

    >>> weight, grid = np.float32([0.2, 1.6, -0.9]), Grid(np.float32(1), np.float32(0), -3, 3)
    >>> packed = pack(weight, np.array([1, 2, -1]), grid, Bits(3, 8))
    >>> unpack(packed, weight, grid).tolist()
    [1.0, 2.0, -1.0]
    """
    nearest, towards = _sides(weight, grid)
    steps = codes - nearest
    ranks = np.where(steps * towards > 0, 2 * np.abs(steps) - 1, 2 * np.abs(steps))
    if ranks.max(initial=0) >= 2**MOST_PLANES:
        raise SpecError("codes are too far from the weight that they stand for")
    flat = ranks.reshape(-1).astype(np.uint8)
    planes = max(1, int(flat.max(initial=0)).bit_length())
    raw = b"".join(np.packbits(flat >> plane & 1).tobytes() for plane in range(planes))
    scale, zero = (np.asarray(value, "<f4").reshape(-1).tobytes() for value in (grid.scale, grid.zero))
    return Rounded(pair.weights, pair.activations, mark_of(weight), scale, zero, zlib.compress(raw, 9))


def unpack(rounded: Rounded, weight: Floats, grid: Grid) -> Floats:
    """Return the codes that were packed."""
    nearest, towards = _sides(weight, grid)
    ranks = unpack_ranks(rounded.ranks, weight.size).reshape(weight.shape)
    steps = (ranks.astype(np.float32) + 1) // 2
    np.negative(steps, out=steps, where=ranks % 2 == 0)
    steps *= towards
    steps += nearest
    return np.clip(steps, grid.low, grid.high)


def unpack_ranks(data: bytes, count: int) -> npt.NDArray[np.uint8]:
    """Return so many ranks, or say that the bytes are others."""
    raw, plane = decompress(data, count), -(-count // 8)
    ranks = np.zeros(count, np.uint8)
    for index in range(len(raw) // plane):
        part = np.frombuffer(raw, np.uint8, plane, index * plane)
        ranks |= np.unpackbits(part, count=count) << index
    return ranks


def decompress(data: bytes, count: int) -> bytes:
    """Return the bit planes of so many ranks; never makes more of the bytes than one for each rank."""
    plane = -(-count // 8)
    reader = zlib.decompressobj()
    try:
        raw = reader.decompress(data, MOST_PLANES * plane + 1)
    except zlib.error as error:
        raise SpecError(f"the ranks of a rounded weight cannot be decompressed ({error})") from error
    planes, odd = divmod(len(raw), plane)
    if odd or not 1 <= planes <= MOST_PLANES or not reader.eof or reader.unused_data:
        raise SpecError(f"the ranks of a rounded weight must be 1 to {MOST_PLANES} planes of {plane} bytes")
    return raw


def rebased(rounded: Rounded, old: Floats, new: Floats, spec: QuantSpec) -> Rounded:
    """Return the same codes for a weight that has changed a little, since it is stored in fewer bits."""
    if not rounded.scale or rounded.mark != mark_of(old):
        return replace(rounded, mark=mark_of(new)) if rounded.mark == mark_of(old) else rounded
    grid = rounded.grid(old.ndim, spec)
    return pack(new, unpack(rounded, old, grid), grid, rounded.pair)


def _sides(weight: Floats, grid: Grid) -> tuple[Floats, Floats]:
    """Return the nearest code of each entry, and on which side of it the entry lies: 1 above, -1 below."""
    nearest = quantize(weight, grid)
    with np.errstate(over="ignore"):
        above = weight / grid.scale + grid.zero >= nearest
    return nearest, np.where(above, np.float32(1), np.float32(-1))


def described(rounded: Mapping[str, tuple[Rounded, ...]]) -> list[str]:
    """Return what people should know of the widths with rounding of their own, by weight: how many, how large."""
    lines = []
    every = [own for all_own in rounded.values() for own in all_own if own.ranks]
    for pair in sorted({own.pair for own in every}, reverse=True):
        sizes = [own.nbytes for own in every if own.pair == pair]
        lines.append(f"rounding of its own at {pair}: {len(sizes)} of {len(rounded)} weights, {sum(sizes)} bytes")
    return lines
