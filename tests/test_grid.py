"""The uniform grid: against the textbook, and the same for numpy and torch arrays."""

from __future__ import annotations

import itertools
import pkgutil
import subprocess
import sys

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from grids import KINDS, kinds, quantize_tensor, shapes, spec_of, tensors, widths
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracles import quantize_one

import anybit.plan
from anybit.errors import SpecError
from anybit.plan.grid import (
    FAINTEST,
    Array,
    bias_codes,
    bias_units,
    dequantize,
    fits,
    make_grid,
    mean_shift,
    min_max,
    on_grid,
    quantize,
    weight_grid,
)
from anybit.spec import QuantSpec

arrays = hnp.arrays(np.float64, shapes, elements=st.floats(-1e6, 1e6, allow_subnormal=False))


def test_nothing_in_plan_needs_torch_or_onnx() -> None:
    names = [f"anybit.plan.{m.name}" for m in pkgutil.iter_modules(anybit.plan.__path__)]
    assert len(names) > 10
    imports = ", ".join([*names, "anybit.graph.view"])
    code = f"import sys, {imports}; print([m for m in sys.modules if m.startswith(('torch', 'onnx'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@given(hnp.arrays(np.float32, shapes, elements=st.floats(-1e6, 1e6, width=32)), widths, kinds)
@settings(deadline=None, max_examples=100)
def test_in_one_array_or_in_several_it_is_the_same_grid(a: np.ndarray, bits: int, kind: tuple[bool, bool]) -> None:
    grid = make_grid(*min_max(a), spec_of(bits, kind))
    before = a.copy()
    assert np.array_equal(on_grid(a, grid), dequantize(quantize(a, grid), grid))
    assert np.array_equal(a, before)


# Against the textbook


@given(arrays, widths, kinds)
@example(np.array([5e-304, -3e4]), 2, (True, False))
@settings(deadline=None, max_examples=200)
def test_agrees_with_the_textbook_number_by_number(a: np.ndarray, bits: int, kind: tuple[bool, bool]) -> None:
    spec = spec_of(bits, kind)
    low, high = (float(end) for end in min_max(a))
    want = [quantize_one(v, low, high, bits, symmetric=kind[0], signed=kind[1]) for v in a.ravel()]
    for make in (make_grid, weight_grid):
        grid = make(*min_max(a), spec)
        np.testing.assert_allclose(dequantize(quantize(a, grid), grid).ravel(), want, rtol=1e-12, atol=1e-12)
    got = quantize_tensor(torch.from_numpy(a), spec)
    np.testing.assert_allclose(got.numpy().ravel(), want, rtol=1e-12, atol=1e-12)


@given(arrays, widths, kinds, st.booleans(), st.sampled_from([make_grid, weight_grid]))
@example(np.array([-354401.0, 9.04392232e-298]), 3, (True, False), True, weight_grid)
@settings(deadline=None, max_examples=200)
def test_codes_fit_and_errors_are_at_most_half_a_bin(
    x: Array, bits: int, kind: tuple[bool, bool], per_channel: bool, make: object
) -> None:
    spec = spec_of(bits, kind, axis=0 if per_channel else None)
    grid = make(*min_max(x, spec.axis), spec)  # type: ignore[operator]
    codes = quantize(x, grid)
    first, last = spec.levels
    assert first <= float(codes.min()) <= float(codes.max()) <= last
    assert np.array_equal(codes, codes.round())
    lowest, highest = (grid.low - grid.zero) * grid.scale, (grid.high - grid.zero) * grid.scale
    inside = (x >= lowest) & (x <= highest)
    with np.errstate(over="ignore"):  # of what lies far outside, in bins of next to nothing
        error = np.abs(dequantize(codes, grid) - x) / grid.scale
    assert (error[inside] <= 0.5 * (1 + 1e-9)).all()


@given(arrays, widths, kinds)
@settings(deadline=None, max_examples=100)
def test_quantizing_twice_changes_nothing(x: Array, bits: int, kind: tuple[bool, bool]) -> None:
    grid = make_grid(*min_max(x), spec_of(bits, kind))
    once = dequantize(quantize(x, grid), grid)
    assert np.array_equal(quantize(once, grid), quantize(x, grid))


@given(arrays, widths)
@settings(deadline=None, max_examples=100)
def test_asymmetric_grids_keep_zero_exactly(a: np.ndarray, bits: int) -> None:
    grid = make_grid(*min_max(a), QuantSpec(bits, symmetric=False))
    assert float(dequantize(quantize(np.zeros(()), grid), grid)) == 0.0


@pytest.mark.parametrize(
    ("low", "high", "bits", "message"),
    [
        (float("nan"), 1.0, 4, "must be finite"),
        (-float("inf"), 1.0, 4, "must be finite"),
        (0.0, float("inf"), 4, "must be finite"),
        (2.0, 1.0, 4, "wrong way round"),
        (0.0, 1.0, 32, "no grid"),
    ],
)
def test_bad_ranges(low: float, high: float, bits: int, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make_grid(np.float32(low), np.float32(high), QuantSpec(bits))


def test_floating_point_has_no_grid_and_empty_has_no_range() -> None:
    with pytest.raises(SpecError, match="no grid"):
        make_grid(torch.tensor(0.0), torch.tensor(1.0), QuantSpec(32))
    for empty in (torch.empty(0), torch.empty(0, 3), np.zeros((0, 3), np.float32)):
        with pytest.raises(SpecError, match="empty"):
            min_max(empty)


# Numpy and torch


def same_bits(a: Array, b: torch.Tensor) -> bool:
    """Compare bit by bit, but for the sign of zero."""
    assert isinstance(a, np.ndarray)
    assert a.dtype == np.float32
    return a.shape == tuple(b.shape) and (a + np.float32(0)).tobytes() == (b.numpy() + np.float32(0)).tobytes()


@given(tensors, widths, kinds, st.integers(-4, 4), st.sampled_from([1.0, 0.5, 0.01]), st.booleans())
@settings(deadline=None, max_examples=400)
def test_the_same_bits_for_numpy_and_torch(
    x: Array, bits: int, kind: tuple[bool, bool], axis: int, part: float, weight: bool
) -> None:
    spec = spec_of(bits, kind, axis if -x.ndim <= axis < x.ndim else None)
    t = torch.from_numpy(x)
    ends, ends_ = min_max(x, spec.axis), min_max(t, spec.axis)
    assert all(same_bits(a, b) for a, b in zip(ends, ends_, strict=True))
    low, high = (np.asarray(np.float32(part) * end) for end in ends)
    make = weight_grid if weight else make_grid
    grid, grid_ = make(low, high, spec), make(torch.from_numpy(low), torch.from_numpy(high), spec)
    assert same_bits(grid.scale, grid_.scale)
    assert same_bits(grid.zero, grid_.zero)
    assert grid[2:] == grid_[2:] == spec.levels
    codes, codes_ = quantize(x, grid), quantize(t, grid_)
    assert same_bits(codes, codes_)
    assert same_bits(dequantize(codes, grid), dequantize(codes_, grid_))


channel_sizes = st.lists(
    st.sampled_from([0.0, 1e-45, 1e-41, 1e-38, 1e-30, 2.0**-18, 2.0**-16, 2.0**-15, 1.0, 3.0, 1e4]),
    min_size=1,
    max_size=6,
)


@given(channel_sizes, widths, st.booleans(), st.sampled_from([2.0**-90, 1.0, 2.0**100]), st.integers(0, 2**32 - 1))
@example([1e-38, 1e-30], 12, False, 1.0, 0)
@settings(deadline=None, max_examples=400)
def test_faint_channels_of_a_weight_get_a_usable_scale_and_others_keep_theirs(
    sizes: list[float], bits: int, symmetric: bool, unit: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (len(sizes), 5)).astype(np.float32)
    x[:, 0] = -1
    x *= (np.array(sizes) * unit).astype(np.float32)[:, None]
    spec = QuantSpec(bits, symmetric, axis=0)
    grid = weight_grid(*min_max(x, 0), spec)
    grid_ = weight_grid(*min_max(torch.from_numpy(x), 0), spec)
    assert same_bits(grid.scale, grid_.scale)
    assert same_bits(grid.zero, grid_.zero)
    assert same_bits(quantize(x, grid), quantize(torch.from_numpy(x), grid_))
    own = make_grid(*min_max(x, 0), spec).scale[:, 0]
    span = np.abs(x).max(1) if symmetric else np.maximum(x.max(1), 0) - x.min(1)
    first, last = spec.levels
    usable = span / np.float32(last if symmetric else last - first) >= np.finfo(np.float32).tiny
    most = float(own[usable].max()) if usable.any() else 1.0
    scale = grid.scale[:, 0]
    assert scale.min() >= np.float32(FAINTEST * most)
    kept = usable & (own >= FAINTEST * most)
    assert np.array_equal(scale[kept], own[kept])
    assert (scale[~kept] == np.float32(max(FAINTEST * most, float(np.finfo(np.float32).tiny)))).all()
    # Nothing is lost by it: no entry moves by more than half a bin of the scale.
    error = np.abs(dequantize(quantize(x, grid), grid).astype(np.float64) - x)
    cut = 0.5 if symmetric else 1.0  # zero is put on the nearest code, which can cut off half a bin at an end
    assert (error <= cut * grid.scale.astype(np.float64) * (1 + 1e-3)).all()


def test_a_channel_of_almost_nothing_does_not_coarsen_the_others() -> None:
    x = np.array([[0.1, -0.05], [1e-41, 0.0]], np.float32)
    grid = weight_grid(*min_max(x, 0), QuantSpec(16, axis=0))
    assert float(grid.scale[0, 0]) == pytest.approx(0.1 / 32767, rel=1e-6)
    assert float(grid.scale[1, 0]) == pytest.approx(0.1 / 32767 / 65536, rel=1e-6)


def test_the_same_bits_on_many_values() -> None:
    x = np.random.default_rng(0).standard_normal((40, 50, 3, 3), dtype=np.float32)
    t = torch.from_numpy(x)
    for bits, kind, axis in itertools.product(range(2, 17), KINDS, [None, 0, 1]):
        spec = spec_of(bits, kind, axis)
        ours = quantize(x, make_grid(*min_max(x, axis), spec))
        assert same_bits(ours, quantize(t, make_grid(*min_max(t, axis), spec)))


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_zero_falls_on_the_same_code_for_many_ranges(bits: int) -> None:
    rng = np.random.default_rng(bits)
    low, high = -rng.random(50_000, np.float32), rng.random(50_000, np.float32)
    spec = QuantSpec(bits, symmetric=False, axis=0)
    grid, grid_ = make_grid(low, high, spec), make_grid(torch.from_numpy(low), torch.from_numpy(high), spec)
    assert same_bits(grid.scale, grid_.scale)
    assert same_bits(grid.zero, grid_.zero)


positive = st.floats(2.0**-149, 2.0**60, width=32, allow_subnormal=True)


@given(
    hnp.arrays(np.float32, st.integers(1, 6), elements=st.floats(-(2.0**60), 2.0**60, width=32)),
    positive,
    hnp.arrays(np.float32, st.sampled_from([(), (1,), (2, 1), (1, 3)]), elements=positive),
)
@settings(deadline=None, max_examples=300)
def test_biases_become_the_same_whole_numbers(bias: Array, input_scale: float, weight_scale: Array) -> None:
    bias = np.resize(bias, -(-len(bias) // weight_scale.size) * weight_scale.size)
    source = np.float32(input_scale)
    with np.errstate(under="ignore"):
        unit = bias_units(source, weight_scale, bias.size)
    unit_ = bias_units(torch.tensor(source), torch.from_numpy(weight_scale), bias.size)
    assert same_bits(unit, unit_)
    codes, codes_ = bias_codes(bias, unit), bias_codes(torch.from_numpy(bias), unit_)
    np.testing.assert_array_equal(codes, codes_.numpy())
    whole = bool(np.isfinite(codes).all() and np.abs(codes).max() <= 2**30)
    assert bool(fits(codes)) is bool(fits(codes_)) is whole
    if whole:
        assert (
            np.abs(codes * unit.astype(np.float64) - bias) <= 0.5001 * unit.astype(np.float64) + 2.0**-22 * np.abs(bias)
        ).all()


# The shift of the mean


LAYERS = {
    "linear": (F.linear, (5, 7), {}, ()),
    "conv1d": (F.conv1d, (6, 4, 3), {}, (9,)),
    "conv2d": (F.conv2d, (6, 4, 3, 2), {"stride": 2}, (9, 9)),
    "conv3d": (F.conv3d, (6, 4, 2, 2, 2), {}, (5, 5, 5)),
    "grouped": (F.conv2d, (6, 2, 3, 3), {"groups": 3}, (7, 7)),
    "depthwise": (F.conv2d, (8, 1, 3, 3), {"groups": 4}, (7, 7)),
    "transposed": (F.conv_transpose2d, (4, 6, 3, 3), {}, (9, 9)),
    "transposed in groups": (F.conv_transpose2d, (4, 3, 3, 3), {"groups": 2}, (9, 9)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_shift_is_the_output_for_a_constant_input(name: str) -> None:
    function, shape, options, space = LAYERS[name]
    rng = np.random.default_rng(len(name))
    transposed = "transpose" in function.__name__
    error, groups = rng.standard_normal(shape), int(options.get("groups", 1))
    mean = rng.standard_normal(shape[0] if transposed else shape[1] * groups)
    shift = mean_shift(error, mean, channels=int(transposed), groups=groups)
    there = mean_shift(torch.from_numpy(error), torch.from_numpy(mean), channels=int(transposed), groups=groups)
    np.testing.assert_allclose(there.numpy(), shift, rtol=1e-12)
    x = torch.from_numpy(mean).view(1, -1, *[1] * len(space)).expand(1, -1, *space)
    out = function(x, torch.from_numpy(error), **options)
    if transposed:  # away from the borders
        for d in range(2, out.dim()):
            out = out.narrow(d, 6, 2)
    np.testing.assert_allclose(out.flatten(2).mean(2).numpy()[0] if space else out.numpy()[0], shift, rtol=1e-9)


@pytest.mark.parametrize("name", ["linear", "conv2d", "depthwise"])
def test_the_corrected_layer_has_the_mean_of_the_exact_one(name: str) -> None:
    function, shape, options, space = LAYERS[name]
    torch.manual_seed(0)
    weight = torch.randn(shape, dtype=torch.float64)
    mean = torch.rand(shape[1] * int(options.get("groups", 1)), dtype=torch.float64) + 0.5
    x = torch.randn(4000, len(mean), *space, dtype=torch.float64) + mean.view(-1, *[1] * len(space))
    rounded = quantize_tensor(weight, QuantSpec(3))
    shift = mean_shift((rounded - weight).numpy(), mean.numpy(), groups=int(options.get("groups", 1)))
    change = function(x, rounded, **options) - function(x, weight, **options)
    change = change.flatten(2).mean(2) if space else change
    noise = 5 * change.std(0) / len(x) ** 0.5
    assert bool((change.mean(0) - torch.from_numpy(shift)).abs().lt(noise).all())
    assert bool(change.mean(0).abs().gt(2 * noise).any())


def test_the_shift_has_the_type_of_the_error_and_is_added_up_in_double() -> None:
    error = np.ones((1, 2, 3), np.float32) * np.array([[[1.0], [-1.0]]], np.float32)
    shift = mean_shift(error, np.array([1e8, 1e8 + 8], np.float32))
    assert shift.dtype == np.float32
    assert shift.tolist() == [-24.0]
    taps = np.array([[[1e8, 1.0, -1e8]]], np.float32)
    assert mean_shift(taps, np.ones(1, np.float32)).tolist() == [1.0]
    found = mean_shift(torch.from_numpy(taps), torch.ones(1))
    assert (found.dtype, found.tolist()) == (torch.float32, [1.0])
