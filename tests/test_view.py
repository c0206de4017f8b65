"""Where dimensions go: label one by its index, do the real thing with numpy, and see where the labels are."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anybit.graph.view import Shape, by_output, except_for, permuted, reduced, reshaped, scale_outputs, stays

SIZES = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=5).map(tuple)


def labelled(shape: tuple[int, ...], d: int) -> Any:
    """An array whose every entry is its own index along one dimension."""
    index = np.arange(shape[d]).reshape([-1 if i == d else 1 for i in range(len(shape))])
    return np.broadcast_to(index, shape)


def is_at(labels: Any, place: int, repeat: int) -> bool:
    """Tell whether a dimension is at `place`, so many entries in a row for each of its indices."""
    return np.array_equal(labels, labelled(labels.shape, place) // repeat)


@given(SIZES.flatmap(lambda s: st.tuples(st.just(s), st.permutations(range(len(s))))))
@settings(deadline=None, max_examples=200)
def test_a_permutation_moves_every_dimension(drawn: tuple[tuple[int, ...], list[int]]) -> None:
    shape, order = drawn
    for d in range(len(shape)):
        where = permuted(order)(d)
        assert where is not None
        assert shape[d] == [shape[o] for o in order][where[0]]
        assert is_at(labelled(shape, d).transpose(order), *where)
        assert stays(d) == (d, 1)


@given(
    SIZES.flatmap(lambda s: st.tuples(st.just(s), st.sets(st.integers(0, len(s) - 1)))), st.booleans(), st.booleans()
)
@settings(deadline=None, max_examples=200)
def test_what_is_not_reduced_stays_in_order(
    drawn: tuple[tuple[int, ...], set[int]], keep: bool, choosing: bool
) -> None:
    shape, gone = drawn
    follow, other = reduced(gone, keep=keep), except_for(gone)
    for d in range(len(shape)):
        labels = labelled(shape, d).astype(float)
        where = follow(d)
        assert (where is None) is (d in gone)
        assert other(d) == (None if d in gone else (d, 1))
        if where is not None:
            reduce = np.max if choosing else np.mean
            assert is_at(reduce(labels, axis=tuple(gone), keepdims=keep) if gone else labels, *where)


def grouped(factors: list[int], rng: random.Random) -> tuple[int, ...]:
    """Neighbouring factors multiplied, here and there."""
    parts = [1]
    for factor in factors:
        if rng.random() < 0.5:
            parts.append(factor)
        else:
            parts[-1] *= factor
    return tuple(parts)


def hidden(shape: tuple[int, ...], rng: random.Random) -> Shape:
    """A shape as a reader may know it: some sizes by a name that stands for the same number everywhere, some not."""
    return tuple(rng.choice([size, size, f"s{size}", None]) for size in shape)


def reshapes(factors: list[int], rng: random.Random) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Pairs of shapes with as many entries: the same factors, put together in two ways."""
    for _ in range(10):
        yield grouped(factors, rng), grouped(factors, rng)
        yield grouped(factors, rng), grouped(rng.sample(factors, len(factors)), rng)


FACTORS = st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=6)


@given(FACTORS, st.integers(0, 2**32 - 1).map(random.Random))
@settings(deadline=None, max_examples=100)
def test_reshaping_never_says_what_is_not_so(factors: list[int], rng: random.Random) -> None:
    for before, after in reshapes(factors, rng):
        for known in ((before, after), (hidden(before, rng), hidden(after, rng))):
            follow = reshaped(*known)
            for d in range(len(before)):
                if (where := follow(d)) is not None:
                    assert is_at(labelled(before, d).reshape(after), *where), (before, after, known, d)


@given(FACTORS, st.integers(0, 2**32 - 1).map(random.Random))
@settings(deadline=None, max_examples=50)
def test_reshaping_finds_what_stays_whole_or_is_flattened_to_the_end(factors: list[int], rng: random.Random) -> None:
    for before, after in reshapes(factors, rng):
        for d in (d for d, size in enumerate(before) if size > 1):
            labels = labelled(before, d).reshape(after)
            rest = math.prod(before[d + 1 :])
            kept = [p for p, size in enumerate(after) if size == before[d] and is_at(labels, p, 1)]
            flat = [p for p, size in enumerate(after) if size == before[d] * rest and is_at(labels, p, rest)]
            assert (reshaped(before, after)(d) is not None) is bool(kept or flat), (before, after, d)


@pytest.mark.parametrize(
    ("before", "after", "d", "where"),
    [
        (("N", 8, 4, 4), ("N", 128), 1, (1, 16)),
        (("N", 8, 1, 1), ("N", 8), 1, (1, 1)),
        ((None, 8, 4, 4), (None, 128), 1, (1, 16)),  # the only unknown size, so it is the same one
        ((None, 8, 4, 4), (None, 8), 1, None),  # images became pixels, or were cut: nobody knows
        ((None, 8, None), (None, 8, None), 1, None),
        (("N", 8, "H", "W"), ("N", 8, "H*W"), 1, (1, 1)),
        (("N", 8, "H", "W"), ("N", "8*H*W"), 1, None),
        (("N", "L", 12), ("N", "L", 3, 4), 2, None),
        (("N", "L", 12), ("N", "L", 3, 4), 1, (1, 1)),
        (("N", "L", 12), ("L", "N", 12), 2, (2, 1)),
        (("N", "L", 12), ("L", "N", 12), 0, None),
    ],
)
def test_reshaping_with_free_sizes(before: Shape, after: Shape, d: int, where: tuple[int, int] | None) -> None:
    assert reshaped(before, after)(d) == where


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.sampled_from([(), (2,), (3, 2)]), st.booleans())
@settings(deadline=None, max_examples=100)
def test_outputs_of_a_weight(outs: int, ins: int, groups: int, taps: tuple[int, ...], transposed: bool) -> None:
    shape = (groups * ins, outs, *taps) if transposed else (groups * outs, ins, *taps)
    weight = np.random.default_rng(0).standard_normal(shape)
    axis = int(transposed)
    rows = by_output(weight, axis, groups)
    assert rows.shape == (groups * outs, ins, math.prod(taps))
    for group in range(groups):
        for out in range(outs):
            own = weight[group * ins : (group + 1) * ins, out] if transposed else weight[group * outs + out]
            assert np.array_equal(rows[group * outs + out], own.reshape(ins, -1))
    factor = np.arange(1.0, groups * outs + 1)
    scaled = by_output(scale_outputs(weight, factor, axis, groups), axis, groups)
    np.testing.assert_array_equal(scaled, rows * factor[:, None, None])
