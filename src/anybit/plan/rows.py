"""A tensor seen as rows: one per grid that it needs, cut into blocks that stay in the processor's cache."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anybit.plan.grid import Array

BLOCK = 1 << 18
"""Entries worked on at a time: a few arrays of that many fit the cache, and each operation on them takes long enough
that two threads seldom wait for the interpreter."""


def as_rows(x: Array, axis: int | None) -> Array:
    """Return `x` with one row per index of `axis`, or as a single row.

    >>> as_rows(np.arange(4.0).reshape(2, 2), 1).tolist()
    [[0.0, 2.0], [1.0, 3.0]]
    """
    if axis in (None, 0):
        return x.reshape(1 if axis is None else len(x), -1)
    return np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)


def per_row(values: Array, x: Array, axis: int | None) -> Array:
    """Return one value per row of `as_rows(x, axis)`, shaped to broadcast with `x`.

    >>> per_row(np.array([1.0, 2.0]), np.zeros((3, 2)), 1).shape
    (1, 2)
    """
    if axis is None:
        return values.reshape(())
    return values.reshape([-1 if d == axis % x.ndim else 1 for d in range(x.ndim)])


def blocks(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Cut a matrix into pieces of about `BLOCK` entries: several whole rows, or a part of one.

    >>> list(blocks(1, BLOCK + 1))[1]
    (slice(0, 1, None), slice(262144, 262145, None))
    """
    height = max(1, BLOCK // max(columns, 1))
    for top in range(0, rows, height):
        for left in range(0, columns, BLOCK):
            yield slice(top, min(top + height, rows)), slice(left, min(left + BLOCK, columns))
