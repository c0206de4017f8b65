"""Rounding that preserves sums."""

from __future__ import annotations

import numpy as np
import pytest
from grids import kinds, spec_of, widths
from hypothesis import given, settings
from hypothesis import strategies as st

import anybit.plan.clip as clip
import anybit.plan.rows as rows
import anybit.plan.sums as squant_module
from anybit.errors import SpecError
from anybit.graph.view import by_output
from anybit.plan.clip import mse_range
from anybit.plan.grid import Array, Grid, make_grid, min_max, quantize
from anybit.plan.sums import squant
from anybit.spec import QuantSpec


def oracle_channel(kernels: list[list[float]], low: int, high: int) -> list[list[int]]:
    """All three stages for one output channel, by loops over plain numbers."""
    codes = [[max(low, min(high, round(v))) for v in kernel] for kernel in kernels]

    def errors(n: int) -> list[float]:
        return [c - v for c, v in zip(codes[n], kernels[n], strict=True)]

    def best(n: int, sign: int) -> int | None:
        found = [(sign * e, -i) for i, e in enumerate(errors(n)) if low <= kernels[n][i] <= high and sign * e > 0]
        return -max(found)[1] if found else None

    for n in range(len(kernels)):
        total = sum(errors(n))
        sign = 1 if total > 0 else -1
        for _ in range(round(abs(total))):
            # Elements that have moved have an error of the other sign, so none moves twice.
            if (i := best(n, sign)) is not None:
                codes[n][i] -= sign
    sums = [sum(errors(n)) for n in range(len(kernels))]
    sign = 1 if sum(sums) > 0 else -1
    willing = [n for n in range(len(kernels)) if sign * sums[n] > 0 and best(n, sign) is not None]
    if len(kernels) > 1:
        for n in sorted(willing, key=lambda n: (-sign * sums[n], n))[: round(abs(sum(sums)))]:
            i = best(n, sign)
            assert i is not None
            codes[n][i] -= sign
    return codes


def oracle(x: Array, grid: Grid, axis: int, groups: int = 1) -> Array:
    """Go through the output channels of a weight one by one."""
    result = np.empty_like(x)
    scale, zero = (np.broadcast_to(v, x.shape) for v in grid[:2])
    for channel in range(x.shape[axis]):
        for group in range(groups):
            size = x.shape[1 - axis] // groups
            place: tuple[object, ...] = (slice(group * size, (group + 1) * size), channel)
            place = place if axis == 1 else (channel, slice(None))
            ratio, nought = x[place] / scale[place], int(zero[place].flat[0])
            kernels = ratio.reshape(len(ratio), -1)
            if kernels.shape[1] == 1:
                kernels = kernels.reshape(1, -1)
            codes = oracle_channel(kernels.astype(float).tolist(), grid.low - nought, grid.high - nought)
            result[place] = np.reshape(codes, ratio.shape) + nought
    return result


WEIGHTS = {
    "linear": ((5, 40), 0, 1),
    "linear with inputs first": ((40, 5), 1, 1),
    "few inputs": ((6, 3), 0, 1),
    "conv1d": ((4, 6, 3), 0, 1),
    "conv2d": ((4, 7, 3, 3), 0, 1),
    "two inputs": ((9, 2, 3, 3), 0, 1),
    "many inputs": ((2, 70, 2, 2), 0, 1),
    "large kernels": ((3, 4, 7, 7), 0, 1),
    "conv3d": ((3, 4, 2, 2, 2), 0, 1),
    "pointwise": ((5, 36, 1, 1), 0, 1),
    "depthwise": ((8, 1, 3, 3), 0, 1),
    "one weight per channel": ((8, 1, 1, 1), 0, 1),
    "transposed": ((6, 4, 3, 3), 1, 1),
    "transposed in groups": ((6, 4, 3, 3), 1, 2),
    "transposed depthwise": ((6, 1, 3, 3), 1, 6),
}


def dyadic(rng: np.random.Generator, shape: tuple[int, ...], reach: float) -> Array:
    """Multiples of 1/16, of which any sum is exact, and many are equal."""
    return (rng.integers(-16 * reach, 16 * reach, shape, endpoint=True) / 16).astype(np.float32)


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("reach", [0.5, 3, 7, 12])
@pytest.mark.parametrize("per_channel", [False, True])
def test_squant_agrees_with_the_slow_version(name: str, reach: float, per_channel: bool) -> None:
    shape, axis, groups = WEIGHTS[name]
    rng = np.random.default_rng(len(name))
    for zero, (low, high) in ((0, (-7, 7)), (5, (0, 15)), (0, (0, 15)), (0, (-1, 1))):
        x = dyadic(rng, shape, reach)
        one = np.ones([shape[axis] if d == axis and per_channel else 1 for d in range(len(shape))], np.float32)
        scale = one * rng.choice(np.array([0.25, 1.0, 4.0], np.float32), one.shape) if per_channel else np.ones(())
        zeros = rng.integers(0, 9, one.shape) * one if per_channel and zero else np.full((), float(zero))
        grid = Grid(scale.astype(np.float32), zeros.astype(np.float32), low, high)
        x = x * grid.scale
        got = squant(x, *grid, axis=axis, groups=groups)
        np.testing.assert_array_equal(got, oracle(x, grid, axis, groups))
        assert got.dtype == np.float32


@given(
    st.sampled_from(sorted(WEIGHTS)), widths, kinds, st.booleans(), st.integers(0, 2**32 - 1), st.sampled_from("nlu")
)
@settings(deadline=None, max_examples=200)
def test_the_constraint_of_every_stage(
    name: str, bits: int, kind: tuple[bool, bool], per_channel: bool, seed: int, law: str
) -> None:
    shape, axis, groups = WEIGHTS[name]
    rng = np.random.default_rng(seed)
    draw = {"n": rng.standard_normal, "l": rng.standard_cauchy, "u": rng.random}[law]
    x = draw(shape).astype(np.float32)
    if not kind[1]:
        x = np.abs(x)
    grid = make_grid(*min_max(x, axis if per_channel else None), spec_of(bits, kind))
    codes = squant(x, *grid, axis=axis, groups=groups)
    assert np.array_equal(codes, np.rint(codes))
    assert grid.low <= codes.min() <= codes.max() <= grid.high
    ratio = x / grid.scale + grid.zero
    fuzz = 2e-6 * 2**bits  # what float32 leaves of a ratio's fraction
    inside = np.clip(ratio, grid.low, grid.high)
    assert np.abs(codes - inside).max() < 1 + fuzz
    if np.abs(inside - ratio).max() > fuzz:
        return  # an asymmetric range was shifted to have zero on the grid, and an end was cut off
    error = by_output(codes - ratio, axis, groups).astype(np.float64)
    many = fuzz * np.sqrt(error.shape[1] * error.shape[2])
    assert np.abs(error.sum((1, 2))).max() <= 0.5 + many
    if error.shape[2] > 1:
        assert np.abs(error.sum(2)).max() < 1 + many


def test_the_kernel_stage_alone_halves_and_the_channel_stage_moves_one_element_a_kernel() -> None:
    x = np.random.default_rng(0).standard_normal((8, 30, 3, 3), dtype=np.float32)
    grid = make_grid(*min_max(x), QuantSpec(4))
    nearest = quantize(x, grid)
    alone = squant(x.reshape(240, 1, 3, 3), *grid).reshape(x.shape)  # every kernel a channel of its own
    both = squant(x, *grid)
    ratio = x / grid.scale
    sums = [np.abs((codes - ratio).sum((2, 3))) for codes in (nearest, alone, both)]
    assert sums[0].max() > 1
    assert sums[1].max() <= 0.5 + 1e-5
    assert 0.5 < sums[2].max() < 1
    assert np.abs(both - alone).sum((2, 3)).max() == 1
    assert np.abs((nearest - ratio).sum((1, 2, 3))).max() > 2
    assert np.abs((both - ratio).sum((1, 2, 3))).max() <= 0.5 + 1e-4


def test_what_is_cut_off_is_made_up_for() -> None:
    x = np.array([[9.0, 0.3, 0.4, 0.2, -0.4, 0.0]], np.float32)
    one, zero = np.ones((), np.float32), np.zeros((), np.float32)
    # 9 becomes 7 and the rest is short by 0.5: two and a half are missing, and two of the three can be had by moving.
    assert squant(x, one, zero, -7, 7).tolist() == [[7, 1, 1, 0, 0, 0]]
    # All that can move do, if more is missing: those that would be rounded down, as far as their other neighbour.
    assert squant(x + np.array([[50, 0, 0, 0, 0, 0]], np.float32), one, zero, -7, 7).tolist() == [[7, 1, 1, 1, 0, 0]]
    # In a convolution the kernels next to it help out, one element each.
    rest = np.array([[0.4, 0.0]] * 3)
    y = np.concatenate([[[30.0, 0.0]], rest]).reshape(1, 4, 2)
    assert squant(y, one, zero, -7, 7).reshape(4, 2).tolist() == [[7, 0], [1, 0], [1, 0], [1, 0]]


def test_elements_outside_the_grid_never_move() -> None:
    x = np.random.default_rng(1).standard_normal((16, 20, 3, 3), dtype=np.float32)
    grid = make_grid(np.float32(-1), np.float32(1), QuantSpec(3))
    codes = squant(x, *grid)
    outside = np.abs(x) > 1.001
    assert np.array_equal(codes[outside], 3 * np.sign(x[outside]))
    ratio = x / grid.scale
    assert np.abs(codes - ratio)[np.abs(x) < 0.999].max() < 1
    kernel = np.abs((codes - ratio).sum((2, 3)))
    assert kernel.mean() < 0.7 * np.abs((quantize(x, grid) - ratio).sum((2, 3))).mean()


@pytest.mark.parametrize("shape", [(30, 20, 3, 3), (30, 200), (2, 3000, 5)])
def test_blocks_do_not_show(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(2).standard_normal(shape)
    spec = QuantSpec(3, axis=0)
    grid = make_grid(*min_max(x, 0), spec)
    codes, ends = squant(x, *grid), mse_range(x, spec)
    monkeypatch.setattr(squant_module, "BLOCK", 1000)
    monkeypatch.setattr(rows, "BLOCK", 1000)
    monkeypatch.setattr(clip, "HEIGHT", 7)
    np.testing.assert_array_equal(squant(x, *grid), codes)
    np.testing.assert_allclose(mse_range(x, spec), ends, rtol=1e-9)


def test_squant_leaves_its_input_alone_and_takes_any_layout() -> None:
    x = np.random.default_rng(3).standard_normal((6, 4, 3, 3), dtype=np.float32)
    grid = make_grid(*min_max(x, 0), QuantSpec(4, axis=0))
    before, codes = x.copy(), squant(x, *grid)
    assert np.array_equal(x, before)
    assert np.array_equal(squant(np.asfortranarray(x), *grid), codes)
    other = squant(x.swapaxes(0, 1), grid.scale.swapaxes(0, 1), grid.zero.swapaxes(0, 1), *grid[2:], axis=1)
    assert np.array_equal(other.swapaxes(0, 1), codes)


def test_squant_of_what_is_on_the_grid_changes_nothing() -> None:
    x = np.random.default_rng(4).integers(-7, 7, (5, 6, 3, 3)).astype(np.float32)
    assert np.array_equal(squant(x, np.ones((), np.float32), np.zeros((), np.float32), -7, 7), x)
    assert squant(np.zeros((3, 0), np.float32), np.ones(()), np.zeros(()), -7, 7).shape == (3, 0)


@pytest.mark.parametrize(
    ("shape", "scale", "options", "message"),
    [
        ((4, 3), (), {"axis": 2}, "dimension 0 or 1; got 2 of 2"),
        ((4,), (), {"axis": 1}, "dimension 0 or 1; got 1 of 1"),
        ((4, 3), (1, 3), {"axis": 0}, r"4 of them along dimension 0 .* got scales of shape \(1, 3\)"),
        ((4, 3), (4,), {"axis": 0}, "got scales of shape"),
        ((4, 3, 2), (), {"axis": 1, "groups": 3}, "4 input channels cannot be split into 3 groups"),
    ],
)
def test_squant_says_what_does_not_fit(
    shape: tuple[int, ...], scale: tuple[int, ...], options: dict[str, int], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        squant(np.ones(shape), np.ones(scale), np.zeros(scale), -7, 7, **options)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_squant_refuses_what_is_not_finite(value: float) -> None:
    x = np.ones((4, 3))
    x[2, 1] = value
    with pytest.raises(SpecError, match="must be finite"):
        squant(x, np.ones(()), np.zeros(()), -7, 7)
