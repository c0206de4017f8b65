from __future__ import annotations

import itertools
import subprocess
import sys

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from anybit.quant import uniform
from anybit.rounding.bias import bias_shift
from anybit.rounding.grid import Array, Grid, dequantize, make_grid, min_max, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

import anybit.plan.clip as clip
import anybit.plan.rows as rows
import anybit.plan.sums as squant_module
from anybit.errors import SpecError
from anybit.plan.clip import mse_from_histogram, mse_range, percentile_from_histogram
from anybit.plan.sums import squant
from anybit.spec import QuantSpec

widths = st.integers(2, 16)
kinds = st.sampled_from([(True, True), (True, False), (False, True)])


def spec_of(bits: int, kind: tuple[bool, bool], axis: int | None = None) -> QuantSpec:
    return QuantSpec(bits, symmetric=kind[0], signed=kind[1], axis=axis)


def test_nothing_in_here_needs_torch() -> None:
    names = ", ".join(f"anybit.rounding.{name}" for name in ("bias", "clip", "grid", "rows", "squant"))
    code = f"import sys, {names}; print([m for m in sys.modules if m.startswith(('torch', 'onnx'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


# The grid


def same_bits(a: Array, b: torch.Tensor) -> bool:
    """Compare bit by bit, but for the sign of zero."""
    assert a.dtype == np.float32
    return a.shape == tuple(b.shape) and (a + np.float32(0)).tobytes() == (b.numpy() + np.float32(0)).tobytes()


floats = st.floats(-(2.0**126), 2.0**126, width=32, allow_subnormal=True)
small = st.floats(-2, 2, width=32, allow_subnormal=True)
shapes = hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=5)
tensors = st.one_of(
    hnp.arrays(np.float32, shapes, elements=e) for e in (floats, small, st.sampled_from([0.0, 0.5, 1e-45]))
)


@given(tensors, widths, kinds, st.integers(-4, 4), st.sampled_from([1.0, 0.5, 0.01]))
@settings(deadline=None, max_examples=400)
def test_the_same_bits_as_the_torch_version(
    x: Array, bits: int, kind: tuple[bool, bool], axis: int, part: float
) -> None:
    spec = spec_of(bits, kind, axis if -x.ndim <= axis < x.ndim else None)
    low, high = (np.float32(part) * end for end in min_max(x, spec.axis))
    low_, high_ = (part * end for end in uniform.min_max(torch.from_numpy(x), spec.axis))
    assert same_bits(np.asarray(low), low_)
    assert same_bits(np.asarray(high), high_)
    grid, grid_ = make_grid(low, high, spec), uniform.make_grid(low_, high_, spec)
    assert same_bits(grid.scale, grid_.scale)
    assert same_bits(grid.zero, grid_.zero)
    assert grid[2:] == grid_[2:] == spec.levels
    codes, codes_ = quantize(x, *grid), uniform.quantize(torch.from_numpy(x), *grid_)
    assert same_bits(codes, codes_)
    values_ = uniform.dequantize(codes_, grid_.scale, grid_.zero)
    assert same_bits(dequantize(codes, grid.scale, grid.zero), values_)


def test_the_same_bits_on_many_values() -> None:
    x = np.random.default_rng(0).standard_normal((40, 50, 3, 3), dtype=np.float32)
    for bits, kind, axis in itertools.product(range(2, 17), [(True, True), (True, False), (False, True)], [None, 0, 1]):
        spec = spec_of(bits, kind, axis)
        ours = quantize(x, *make_grid(*min_max(x, axis), spec))
        t = torch.from_numpy(x)
        assert same_bits(ours, uniform.quantize(t, *uniform.make_grid(*uniform.min_max(t, axis), spec)))


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_zero_falls_on_the_same_code_for_many_ranges(bits: int) -> None:
    rng = np.random.default_rng(bits)
    low, high = -rng.random(50_000, np.float32), rng.random(50_000, np.float32)
    spec = QuantSpec(bits, symmetric=False, axis=0)
    grid, grid_ = make_grid(low, high, spec), uniform.make_grid(torch.from_numpy(low), torch.from_numpy(high), spec)
    assert same_bits(grid.scale, grid_.scale)
    assert same_bits(grid.zero, grid_.zero)


@pytest.mark.parametrize(
    ("low", "high", "bits", "message"),
    [
        (float("nan"), 1.0, 4, "must be finite"),
        (0.0, float("inf"), 4, "must be finite"),
        (2.0, 1.0, 4, "wrong way round"),
        (0.0, 1.0, 32, "no grid"),
    ],
)
def test_bad_ranges(low: float, high: float, bits: int, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make_grid(np.float32(low), np.float32(high), QuantSpec(bits))


def test_an_empty_tensor_has_no_range() -> None:
    with pytest.raises(SpecError, match="empty"):
        min_max(np.zeros((0, 3), np.float32))


# Rounding that preserves sums


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
    error = squant_module._by_channel(codes - ratio, axis, groups).astype(np.float64)
    many = fuzz * np.sqrt(error.shape[1] * error.shape[2])
    assert np.abs(error.sum((1, 2))).max() <= 0.5 + many
    if error.shape[2] > 1:
        assert np.abs(error.sum(2)).max() < 1 + many


def test_the_kernel_stage_alone_halves_and_the_channel_stage_moves_one_element_a_kernel() -> None:
    x = np.random.default_rng(0).standard_normal((8, 30, 3, 3), dtype=np.float32)
    grid = make_grid(*min_max(x), QuantSpec(4))
    nearest = quantize(x, *grid)
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
    assert kernel.mean() < 0.7 * np.abs((quantize(x, *grid) - ratio).sum((2, 3))).mean()


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


# Clipping


def squared_error(x: Array, low: Array, high: Array, spec: QuantSpec) -> Array:
    """The squared error on the grid that covers [low, high], per grid."""
    grid = make_grid(np.asarray(low), np.asarray(high), spec)
    square = (dequantize(quantize(x, *grid), grid.scale, grid.zero) - x) ** 2
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
        np.testing.assert_allclose(dequantize(quantize(x, *grid), *grid[:2]), np.full_like(x, want), rtol=1e-6)


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


# Bias correction

LAYERS = {
    "linear": (F.linear, (5, 7), {}, ()),
    "conv1d": (F.conv1d, (6, 4, 3), {}, (9,)),
    "conv2d": (F.conv2d, (6, 4, 3, 2), {"stride": 2}, (9, 9)),
    "conv3d": (F.conv3d, (6, 4, 2, 2, 2), {}, (5, 5, 5)),
    "grouped": (F.conv2d, (6, 2, 3, 3), {"groups": 3}, (7, 7)),
    "depthwise": (F.conv2d, (8, 1, 3, 3), {"groups": 4}, (7, 7)),
    "transposed": (F.conv_transpose2d, (4, 6, 3, 3), {}, (9, 9)),
    "transposed in groups": (F.conv_transpose2d, (4, 3, 3, 3), {"groups": 2}, (9, 9)),
    "transposed with stride": (F.conv_transpose2d, (4, 6, 4, 2), {"stride": (2, 2)}, (9, 9)),
    "transposed 1d with stride": (F.conv_transpose1d, (4, 6, 5), {"stride": 3}, (20,)),
}


def shift_of(name: str) -> tuple[Array, Array, dict[str, int], Array]:
    function, shape, options, _ = LAYERS[name]
    rng = np.random.default_rng(len(name))
    transposed = "transpose" in function.__name__
    error = rng.standard_normal(shape)
    groups = int(options.get("groups", 1))
    mean = rng.standard_normal(shape[0] if transposed else shape[1] * groups)
    stride = options.get("stride", 1) if transposed else 1
    return error, mean, options, bias_shift(error, mean, groups=groups, transposed=transposed, stride=stride)


@pytest.mark.parametrize("name", LAYERS)
def test_the_shift_is_the_output_for_a_constant_input(name: str) -> None:
    function, _, options, space = LAYERS[name]
    error, mean, _, shift = shift_of(name)
    x = torch.from_numpy(mean).view(1, -1, *[1] * len(space)).expand(1, -1, *space)
    out = function(x, torch.from_numpy(error), **options)
    if space and "transpose" in function.__name__:
        # Away from the borders, over whole periods of the stride.
        for d in range(2, out.dim()):
            out = out.narrow(d, 6, 12 if out.shape[d] > 20 else 2)
    np.testing.assert_allclose(out.flatten(2).mean(2).numpy()[0] if space else out.numpy()[0], shift, rtol=1e-9)


@pytest.mark.parametrize("name", ["linear", "conv2d", "depthwise"])
def test_the_corrected_layer_has_the_mean_of_the_exact_one(name: str) -> None:
    function, shape, options, space = LAYERS[name]
    torch.manual_seed(0)
    weight = torch.randn(shape, dtype=torch.float64)
    mean = torch.rand(shape[1] * int(options.get("groups", 1)), dtype=torch.float64) + 0.5
    x = torch.randn(4000, len(mean), *space, dtype=torch.float64) + mean.view(-1, *[1] * len(space))
    rounded = uniform.quantize_tensor(weight, QuantSpec(3))
    shift = bias_shift((rounded - weight).numpy(), mean.numpy(), groups=int(options.get("groups", 1)))
    change = function(x, rounded, **options) - function(x, weight, **options)
    change = change.flatten(2).mean(2) if space else change
    noise = 5 * change.std(0) / len(x) ** 0.5
    assert bool((change.mean(0) - torch.from_numpy(shift)).abs().lt(noise).all())
    assert bool(change.mean(0).abs().gt(2 * noise).any())


def test_the_shift_has_the_type_of_the_error_and_is_added_up_in_double() -> None:
    error = np.ones((1, 2, 3), np.float32) * np.array([[[1.0], [-1.0]]], np.float32)
    shift = bias_shift(error, np.array([1e8, 1e8 + 8], np.float32))
    assert shift.dtype == np.float32
    assert shift.tolist() == [-24.0]
    taps = np.array([[[1e8, 1.0, -1e8]]], np.float32)
    assert bias_shift(taps, np.ones(1, np.float32)).tolist() == [1.0]


@pytest.mark.parametrize(
    ("shape", "mean", "options", "message"),
    [
        ((4,), 4, {}, "at least two dimensions"),
        ((4, 3), 4, {}, r"has 3 input channels, .* got the shape \(4,\)"),
        ((4, 3, 1), 3, {"groups": 2}, "has 6 input channels"),
        ((5, 3, 1), 6, {"groups": 2}, "5 output and 6 input channels cannot be split into 2 groups"),
        ((5, 3, 1), 5, {"groups": 2, "transposed": True}, "6 output and 5 input channels"),
    ],
)
def test_means_that_do_not_fit(shape: tuple[int, ...], mean: int, options: dict[str, int], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        bias_shift(np.ones(shape), np.ones(mean), **options)
