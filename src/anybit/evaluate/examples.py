"""Which examples show best what narrow widths do: those whose prediction flips, at as many widths as possible."""

from __future__ import annotations

import base64
import struct
import zlib

import torch
from torch import Tensor

from anybit.errors import DataError

LARGEST = 64
"""Pixels of the longer side of a thumbnail."""


def first_flips(classes: Tensor, reference: Tensor) -> Tensor:
    """Return for each example the first row of predictions that differs from the reference, or the number of rows.

    Args:
        classes: Predicted classes, one row for each width, the widest first.
        reference: Predicted classes in floating point.

    >>> first_flips(torch.tensor([[1, 2, 3], [1, 0, 3]]), torch.tensor([9, 2, 3])).tolist()
    [0, 1, 2]
    """
    differs = classes != reference
    never = torch.full_like(reference, len(classes))
    return torch.where(differs.any(0), differs.int().argmax(0), never)


def choose_examples(flips: Tensor, count: int, *, never: int) -> list[int]:
    """Return `count` examples in turns from each width at which something flips; those that never do come last.

    >>> choose_examples(torch.tensor([2, 0, 1, 0, 0]), 4, never=2)
    [1, 2, 3, 4]
    >>> choose_examples(torch.tensor([2, 0, 2]), 9, never=2)
    [1, 0, 2]
    """
    groups = [torch.nonzero(flips == width).flatten().tolist() for width in range(never + 1)]
    *flipping, rest = groups
    chosen = []
    for turn in range(max(map(len, flipping), default=0)):
        chosen += [group[turn] for group in flipping if turn < len(group)]
    return [*chosen, *rest][:count]


def png_uri(pixels: Tensor) -> str:
    """Return an image of bytes, (channels, height, width) with 1 or 3 channels, as a PNG in a `data:` address.

    >>> png_uri(torch.zeros(1, 2, 2, dtype=torch.uint8))[:22]
    'data:image/png;base64,'
    """
    if pixels.dim() != 3 or pixels.shape[0] not in (1, 3) or pixels.dtype != torch.uint8:
        shape = tuple(pixels.shape)
        raise DataError(f"a picture has the shape (1 or 3, height, width) and 8-bit pixels; got {shape} {pixels.dtype}")
    channels, height, width = pixels.shape
    lines = pixels.permute(1, 2, 0).reshape(height, -1)
    raw = b"".join(b"\0" + bytes(line.tolist()) for line in lines)
    head = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    parts = [_chunk(b"IHDR", head), _chunk(b"IDAT", zlib.compress(raw, 9)), _chunk(b"IEND", b"")]
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode()


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def thumbnails(x: Tensor) -> list[str] | None:
    """Return inputs as small pictures, each channel stretched from its least to its largest value, or `None`.

    Only inputs of 1 or 3 channels are pictures.

    >>> len(thumbnails(torch.rand(2, 3, 4, 4))), thumbnails(torch.rand(2, 5))
    (2, None)
    """
    if x.dim() != 4 or x.shape[1] not in (1, 3):
        return None
    step = -(-max(x.shape[2:]) // LARGEST)
    low, high = x.amin((0, 2, 3), keepdim=True), x.amax((0, 2, 3), keepdim=True)
    small = torch.nn.functional.avg_pool2d(x, step) if step > 1 else x
    bright = (small - low) / (high - low).clamp(min=1e-12) * 255
    return [png_uri(image) for image in bright.round().clamp(0, 255).to(torch.uint8)]
