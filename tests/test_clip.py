"""Ranges with the smallest squared error, and percentiles."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from grids import kinds, spec_of, tensors, widths
from hypothesis import given, settings
from hypothesis import strategies as st

import anybit.plan.clip as clip
import anybit.plan.rows as rows
from anybit.errors import SpecError
from anybit.plan.clip import mse_from_histogram, mse_range, percentile_from_histogram
from anybit.plan.grid import Array, dequantize, make_grid, min_max, quantize
from anybit.spec import QuantSpec


def squared_error(x: Array, low: Array, high: Array, spec: QuantSpec) -> Array:
    """The squared error on the grid that covers [low, high], per grid."""
    grid = make_grid(np.asarray(low), np.asarray(high), spec)
    square = (dequantize(quantize(x, grid), grid) - x) ** 2
    return rows.as_rows(square, spec.axis).sum(1)


def brute_force(x: Array, spec: QuantSpec) -> float:
    """The least squared error of hundreds of scales at every zero, one tensor."""
    first, last = spec.levels
    widest = float(np.abs(x).max()) * (2 if spec.symmetric and not spec.signed else 1) * 2.2 / (last - first)
    scales = np.geomspace(widest / 40, widest, 600)[:, None]
    errors = []
    for zero in range(last + 1) if not spec.symmetric else [0]:
        codes = np.clip(np.rint(x.ravel() / scales), first - zero, last - zero)
        errors.append(((codes * scales - x.ravel()) ** 2).sum(1).min())
    return float(min(errors))


def samples(law: str, size: int, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    x: Array = {
        "normal": lambda: rng.standard_normal(size),
        "laplace": lambda: rng.laplace(size=size),
        "heavy": lambda: rng.standard_t(3, size),
        "uniform": lambda: rng.uniform(-1, 1, size),
        "shifted": lambda: rng.standard_normal(size) + 1.5,
        "rectified": lambda: np.maximum(rng.standard_normal(size), 0),
        "negative": lambda: -rng.gamma(2, size=size),
        "outlier": lambda: np.concatenate([rng.standard_normal(size - 1), [30.0]]),
    }[law]()
    return x


@pytest.mark.parametrize(
    "law", ["normal", "laplace", "heavy", "uniform", "shifted", "rectified", "negative", "outlier"]
)
@pytest.mark.parametrize("bits", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", [(True, True), (True, False), (False, True)])
def test_clipping_is_nearly_the_best_there_is(law: str, bits: int, kind: tuple[bool, bool]) -> None:
    spec = spec_of(bits, kind)
    for size, slack in ((300, 1.03), (3000, 1.015)):
        x = samples(law, size, bits)
        found = float(squared_error(x, *mse_range(x, spec), spec)[0])
        assert found <= slack * brute_force(x, spec) + 1e-12 * size
        counts, edges = np.histogram(x, 2048)
        from_counts = float(
            squared_error(x, *(np.float64(v) for v in mse_from_histogram(counts, edges, spec)), spec)[0]
        )
        assert from_counts <= (slack + 0.02) * brute_force(x, spec)


@given(tensors, widths, kinds, st.integers(-4, 4))
@settings(deadline=None, max_examples=200)
def test_clipping_is_never_worse_than_not_to(x: Array, bits: int, kind: tuple[bool, bool], axis: int) -> None:
    spec = spec_of(bits, kind, axis if -x.ndim <= axis < x.ndim else None)
    unit = np.abs(x).max() or np.float32(1)
    x = (x / unit).astype(np.float64) if unit > 1e-30 else x.astype(np.float64)
    low, high = mse_range(x, spec)
    whole = min_max(x, spec.axis)
    assert low.shape == whole[0].shape == high.shape
    assert (low <= 0).all()
    assert (high >= 0).all()
    clipped, before = squared_error(x, low, high, spec), squared_error(x, *whole, spec)
    assert (clipped <= before * (1 + 1e-9) + 1e-15).all()


@given(tensors, widths, kinds)
@settings(deadline=None, max_examples=100)
def test_clipping_float32_of_any_size_gives_a_grid(x: Array, bits: int, kind: tuple[bool, bool]) -> None:
    spec = spec_of(bits, kind)
    low, high = mse_range(x, spec)
    assert low.dtype == high.dtype == np.float32
    assert np.isfinite(make_grid(low, high, spec).scale).all()


def test_values_that_are_on_a_grid_keep_it() -> None:
    x = np.random.default_rng(0).integers(-7, 8, 20000) / 8.0
    x[0] = 7 / 8
    for spec in (QuantSpec(4), QuantSpec(8), QuantSpec(5, symmetric=False)):
        low, high = mse_range(x, spec)
        assert squared_error(x, low, high, spec)[0] <= squared_error(x, *min_max(x), spec)[0] + 1e-20
    np.testing.assert_allclose(mse_range(x, QuantSpec(4)), [-7 / 8, 7 / 8], rtol=1e-12)


@pytest.mark.parametrize("bits", [8, 10, 11])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_bell_of_codes_with_a_far_end_is_not_clipped(bits: int, symmetric: bool) -> None:
    """The histogram says that clipping pays; the values themselves, all on the grid, say that it does not."""
    last = 2 ** (bits - 1) - 1
    codes = np.rint(np.random.default_rng(bits).standard_normal(200_000) * last / 8)
    x = np.concatenate([np.clip(codes, -last, last), [-last, last if symmetric else last + 1]])
    spec = QuantSpec(bits, symmetric)
    assert squared_error(x, *mse_range(x, spec), spec)[0] < 1e-12


def test_of_nearly_equal_errors_the_first_wins() -> None:
    assert clip._first_best(np.array([[2.0, 1 + 1e-12, 1.0], [1.0, 2.0, 0.5]])).tolist() == [1, 2]


def test_negative_values_have_no_say_where_there_are_no_negative_codes() -> None:
    edges = np.arange(-4.0, 5.0)
    counts = np.array([0, 0, 0, 0, 70, 20, 9, 1])
    want = mse_from_histogram(counts, edges, QuantSpec(3, signed=False))
    counts[:4] = [1000, 10, 500, 9000]
    assert mse_from_histogram(counts, edges, QuantSpec(3, signed=False)) == want


@pytest.mark.parametrize("symmetric", [True, False])
def test_from_8_bits_on_hardly_anything_is_cut_off(symmetric: bool) -> None:
    x = samples("normal", 5000, 0)
    top = np.abs(x).max()
    ratios = []
    for bits in (2, 4, 8, 10, 12, 16):
        spec = QuantSpec(bits, symmetric)
        low, high = mse_range(x, spec)
        ratios.append(float(max(-low, high) / top))
    assert ratios[0] < 0.6
    assert ratios[1] < 0.85
    assert min(ratios[2:]) > 0.9
    assert min(ratios[3:]) > 0.98
    assert ratios[:3] == sorted(ratios[:3])


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("kind", [(True, True), (True, False), (False, True)])
def test_clipping_per_channel_is_clipping_each_slice(axis: int, kind: tuple[bool, bool]) -> None:
    x = np.random.default_rng(0).standard_normal((6, 7, 8)) * np.logspace(-3, 3, 6)[:, None, None]
    x[3] = 0
    got = [np.moveaxis(end, axis, 0).ravel() for end in mse_range(x, spec_of(3, kind, axis))]
    want = [mse_range(part, spec_of(3, kind)) for part in np.moveaxis(x, axis, 0)]
    np.testing.assert_allclose(np.transpose(got), [[float(low), float(high)] for low, high in want], rtol=1e-9)


@pytest.mark.parametrize("kind", [(True, True), (True, False), (False, True)])
def test_clipping_follows_the_unit_of_its_input(kind: tuple[bool, bool]) -> None:
    x = samples("heavy", 2000, 0).astype(np.float32)
    low, high = mse_range(x, spec_of(3, kind))
    for factor in (2.0**-40, 2.0**40):
        np.testing.assert_array_equal(
            mse_range(x * np.float32(factor), spec_of(3, kind)), [low * factor, high * factor]
        )


@pytest.mark.parametrize("size", [1e-37, 1e-33, 1e-28, 1e30])
def test_clipping_very_small_and_very_large_values(size: float) -> None:
    x = (samples("heavy", 500, 0) * size).astype(np.float32)
    for bits, kind in itertools.product((2, 8, 16), [(True, True), (True, False), (False, True)]):
        low, high = mse_range(x, spec_of(bits, kind))
        assert low <= 0 < high <= x.max() * 3
        assert high > 0.01 * x.max()


@pytest.mark.parametrize("value", [0.0, 1e-45, 0.25, -3.0])
def test_constants_are_covered(value: float) -> None:
    x = np.full((3, 4), value, np.float32)
    for spec in (QuantSpec(4), QuantSpec(4, symmetric=False), QuantSpec(2, axis=0)):
        grid = make_grid(*mse_range(x, spec), spec)
        want = 0 if abs(value) < 1e-40 else value
        np.testing.assert_allclose(dequantize(quantize(x, grid), grid), np.full_like(x, want), rtol=1e-6)


def test_rows_are_counted_in_even_bins() -> None:
    x = np.random.default_rng(0).uniform(-1, 1, (3, 5000)) * [[1.0], [0.01], [300.0]]
    unit = np.array([1.0, 0.02, 300.0])
    want = [np.histogram(row, 2 * clip.BINS, (-u, u))[0] for row, u in zip(x, unit, strict=True)]
    assert np.abs(clip._histogram(x, unit) - want).sum() <= 4  # values on an edge may fall on either side


@pytest.mark.parametrize("shape", [(1, 1), (1, 200_000), (70_000, 1), (100, 3000), (3, 65_536), (3, 0)])
def test_blocks_are_small_and_cover_all(shape: tuple[int, int]) -> None:
    seen = np.zeros(shape, np.int64)
    for down, across in rows.blocks(*shape):
        assert 0 < seen[down, across].size <= rows.BLOCK
        seen[down, across] += 1
    assert (seen == 1).all()


def test_a_range_from_a_histogram_stays_within_the_values() -> None:
    counts, edges = np.array([0, 5, 80, 10, 1, 0, 0]), np.array([-9.0, -0.5, 0, 1, 2, 3, 50, 99])
    for bits, kind in itertools.product((2, 4, 8, 16), [(True, True), (True, False), (False, True)]):
        low, high = mse_from_histogram(counts, edges, spec_of(bits, kind))
        assert -0.5 - (not kind[0]) * high / 2 <= low <= 0 < high <= 3.2
        assert high - low <= 3.5
    low, high = mse_from_histogram(counts, edges, QuantSpec(16, symmetric=False))
    assert low == pytest.approx(-0.5, rel=0.05)
    assert high == pytest.approx(3, rel=0.05)


def test_the_unit_of_a_histogram_is_arbitrary() -> None:
    counts, edges = np.histogram(samples("rectified", 1000, 0), 100)
    one = mse_from_histogram(counts, edges, QuantSpec(4, signed=False))
    np.testing.assert_allclose(
        mse_from_histogram(counts * 7, edges * 4, QuantSpec(4, signed=False)), np.multiply(one, 4)
    )


@pytest.mark.parametrize("percent", [50, 90, 99, 99.9])
def test_percentiles_are_those_of_the_values(percent: float) -> None:
    x = samples("laplace", 20000, 0)
    counts, edges = np.histogram(x, 4000)
    want = np.quantile(x, [0.5 - percent / 200, 0.5 + percent / 200])
    np.testing.assert_allclose(percentile_from_histogram(counts, edges, percent), want, rtol=0.02)


def test_all_percent_is_everything_that_was_counted() -> None:
    counts, edges = np.array([0, 0, 3, 0, 0, 4, 0]), np.arange(-4.0, 4.0)
    assert percentile_from_histogram(counts, edges, 100) == (-2.0, 2.0)
    # Half of what is left out is on either side, and neither end falls into a gap.
    low, high = percentile_from_histogram(np.array([1, 0, 0, 1]), np.arange(5.0) - 2, 1e-9)
    assert (low, high) == (pytest.approx(-1.0), pytest.approx(1.0))


def test_a_percentile_of_rectified_values_starts_at_zero() -> None:
    low, high = percentile_from_histogram(np.array([900, 90, 10]), np.array([0.0, 1.0, 2.0, 3.0]), 98)
    assert (low, high) == (0.0, pytest.approx(2.0))
    assert percentile_from_histogram(np.array([1, 1]), np.array([-3.0, -2.0, -1.0]), 100) == (-3.0, 0.0)


@pytest.mark.parametrize(
    ("counts", "edges", "message"),
    [
        ([1, 2], [0, 1], r"n \+ 1 edges; got counts \(2,\) and edges \(2,\)"),
        ([[1]], [0, 1], r"got counts \(1, 1\)"),
        ([1, 2], [0, 1, 1], "go up"),
        ([1, 2], [0, 1, np.inf], "finite"),
        ([0, 0], [0, 1, 2], "seen no data"),
        ([3, -1], [0, 1, 2], "zero or more"),
        ([3, np.nan], [0, 1, 2], "zero or more"),
    ],
)
def test_broken_histograms(counts: list[float], edges: list[float], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        mse_from_histogram(np.array(counts), np.array(edges), QuantSpec(4))
    with pytest.raises(SpecError, match=message):
        percentile_from_histogram(np.array(counts), np.array(edges), 99)


@pytest.mark.parametrize("percent", [0, -1, 101, float("nan")])
def test_percentages_that_are_none(percent: float) -> None:
    with pytest.raises(SpecError, match="above 0 and at most 100"):
        percentile_from_histogram(np.array([1]), np.array([0.0, 1.0]), percent)


@pytest.mark.parametrize("spec", [QuantSpec(4), QuantSpec(4, symmetric=False, axis=0)])
def test_clipping_refuses_what_has_no_range(spec: QuantSpec) -> None:
    with pytest.raises(SpecError, match="finite"):
        mse_range(np.array([[1.0, np.nan], [0.0, 1.0]]), spec)
    with pytest.raises(SpecError, match="empty"):
        mse_range(np.zeros((0, 3)), spec)
