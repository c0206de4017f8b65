"""Elementwise work on large tensors, a cacheful at a time.

A chain of PyTorch operators on a large tensor writes every intermediate result to memory that it has to ask the system
for, which on a CPU costs several times the arithmetic. Going through the tensor in pieces keeps the intermediate
results in the cache. On other devices, and for small tensors, each function is the plain chain.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

PIECE = 2**15
"""Elements to a piece: their intermediate results fit into a core's own cache."""


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield matching flat pieces of tensors of one shape, in the order of memory, or all at once where that is as good.

    >>> [tuple(len(p) for p in pair) for pair in pieces(torch.zeros(PIECE * 4 + 1), torch.ones(PIECE * 4 + 1))]
    [(32768, 32768), (32768, 32768), (32768, 32768), (32768, 32768), (1, 1)]
    """
    first = tensors[0]
    same = all(t.stride() == first.stride() and t.device.type == "cpu" for t in tensors)
    if not same or first.numel() < 4 * PIECE or not _dense(first):
        yield tensors
        return
    flat = [t.as_strided((t.numel(),), (1,)) for t in tensors]
    yield from zip(*(torch.split(t, PIECE) for t in flat), strict=True)


def _dense(x: Tensor) -> bool:
    """Tell whether a tensor fills its memory without gaps or overlaps, in whatever order of dimensions."""
    size = 1
    for stride, length in sorted(zip(x.stride(), x.shape, strict=True)):
        if length == 1:
            continue
        if stride != size:
            return False
        size *= length
    return True


def signs(x: Tensor) -> Tensor:
    """Return the sign of every entry, one byte each.

    >>> signs(torch.tensor([-3.0, 0.0, 0.5]))
    tensor([-1,  0,  1], dtype=torch.int8)
    """
    out = torch.empty_like(x, dtype=torch.int8)
    for part, to in pieces(x, out):
        to.copy_(torch.sign(part))
    return out


def l1_norm(x: Tensor) -> Tensor:
    """Return the sum of absolute values.

    >>> l1_norm(torch.tensor([-3.0, 0.0, 0.5]))
    tensor(3.5000)
    """
    return torch.stack([part.abs().sum() for (part,) in pieces(x)]).sum()


def add_signs_(x: Tensor, sign: Tensor, factor: float) -> None:
    """Add `factor` times bytes to `x`, in place.

    >>> x = torch.tensor([1.0, 1.0])
    >>> add_signs_(x, torch.tensor([1, -1], dtype=torch.int8), 0.5)
    >>> x
    tensor([1.5000, 0.5000])
    """
    for part, by in pieces(x, sign):
        part.add_(by.to(x.dtype), alpha=factor)


def multiply_(x: Tensor, gate: Tensor) -> None:
    """Multiply `x` by bytes, in place.

    >>> x = torch.tensor([2.0, 3.0])
    >>> multiply_(x, torch.tensor([1, 0], dtype=torch.uint8))
    >>> x
    tensor([2., 0.])
    """
    for part, by in pieces(x, gate):
        part.mul_(by.to(x.dtype))


def extrapolate_(new: Tensor, old: Tensor, h: float) -> None:
    """Turn `new` into `old + (new - old) / h`, in place.

    >>> new = torch.tensor([1.5])
    >>> extrapolate_(new, torch.tensor([1.0]), 0.25)
    >>> new
    tensor([3.])
    """
    for part, start in pieces(new, old):
        part.sub_(start).mul_(1 / h).add_(start)
