"""Elementwise work on large tensors, a cacheful at a time.

A chain of PyTorch operators on a large tensor writes every intermediate result to memory that it has to ask the system
for, which on a CPU costs several times the arithmetic. Going through the tensor in chunks keeps the intermediate
results in the cache. On other devices, and for small tensors, each function is the plain chain.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK = 2**17
"""Elements to a chunk for each thread: half a megabyte, so that intermediate results stay in a core's own cache, and
starting the thread costs little beside its share."""


def chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield matching flat chunks of tensors of one shape, in the order of memory, or all at once where that is as good.

    >>> size = CHUNK * torch.get_num_threads()
    >>> [len(p) // size for p, _ in chunks(torch.zeros(size * 2 + 1), torch.ones(size * 2 + 1))]
    [1, 1, 0]
    """
    size = CHUNK * torch.get_num_threads()
    first = tensors[0]
    same = all(t.stride() == first.stride() and t.device.type == "cpu" for t in tensors)
    if not same or first.numel() < 2 * size or not _dense(first):
        yield tensors
        return
    flat = [t.as_strided((t.numel(),), (1,)) for t in tensors]
    yield from zip(*(torch.split(t, size) for t in flat), strict=True)


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
    for part, to in chunks(x, out):
        to.copy_(torch.sign(part))
    return out


def wide_format(x: Tensor) -> torch.dtype:
    """Return the format to add up in: float32, or that of the tensor if it is longer."""
    return torch.promote_types(x.dtype, torch.float32)


def l1_norm(x: Tensor) -> Tensor:
    """Return the sum of absolute values.

    >>> l1_norm(torch.tensor([-3.0, 0.0, 0.5]))
    tensor(3.5000)
    """
    return torch.stack([part.abs().sum(dtype=wide_format(part)) for (part,) in chunks(x)]).sum()


def signs_and_l1(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return both, going through the tensor once.

    >>> signs_and_l1(torch.tensor([-3.0, 0.0, 0.5]))
    (tensor([-1,  0,  1], dtype=torch.int8), tensor(3.5000))
    """
    out = torch.empty_like(x, dtype=torch.int8)
    sums = []
    for part, to in chunks(x, out):
        scratch = torch.sign(part)
        to.copy_(scratch)
        sums.append(torch.abs(part, out=scratch).sum(dtype=wide_format(part)))
    return out, torch.stack(sums).sum()


def gated(x: Tensor, gate: Tensor, shift: Tensor | None, by: float, out: Tensor) -> Tensor:
    """Write `x · gate + by · shift` to `out`, which may be `x`; gate and shift are bytes.

    >>> x, gate, shift = torch.tensor([2.0, 3.0]), torch.tensor([1, 0]).byte(), torch.tensor([1, -1]).char()
    >>> gated(x, gate, shift, 0.5, out=x)
    tensor([ 2.5000, -0.5000])
    """
    rest = () if shift is None else (shift,)
    for to, part, through, *more in chunks(out, x, gate, *rest):
        torch.mul(part, through.to(x.dtype), out=to)
        for sign in more:
            to.add_(sign.to(x.dtype), alpha=by)
    return out


def extrapolate_(new: Tensor, old: Tensor, h: float) -> None:
    """Turn `new` into `old + (new - old) / h`, in place.

    >>> new = torch.tensor([1.5])
    >>> extrapolate_(new, torch.tensor([1.0]), 0.25)
    >>> new
    tensor([3.])
    """
    for part, start in chunks(new, old):
        part.sub_(start).mul_(1 / h).add_(start)
