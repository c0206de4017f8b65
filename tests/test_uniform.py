from __future__ import annotations

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from anybit.quant.uniform import dequantize, fake_quantize, make_grid, min_max, quantize, quantize_tensor
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracles import quantize_one

from anybit.errors import SpecError
from anybit.spec import QuantSpec

widths = st.integers(2, 16)
kinds = st.sampled_from([(True, True), (True, False), (False, True)])
arrays = hnp.arrays(
    np.float64,
    hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=5),
    elements=st.floats(-1e6, 1e6, allow_subnormal=False),
)


def spec_of(bits: int, kind: tuple[bool, bool], axis: int | None = None) -> QuantSpec:
    return QuantSpec(bits, symmetric=kind[0], signed=kind[1], axis=axis)


@given(arrays, widths, kinds)
@example(np.array([5e-304, -3e4]), 2, (True, False))
@settings(deadline=None, max_examples=200)
def test_agrees_with_the_textbook_number_by_number(a: np.ndarray, bits: int, kind: tuple[bool, bool]) -> None:
    x = torch.from_numpy(a)
    spec = spec_of(bits, kind)
    low, high = min_max(x)
    got = quantize_tensor(x, spec)
    want = [quantize_one(v, float(low), float(high), bits, symmetric=kind[0], signed=kind[1]) for v in a.ravel()]
    torch.testing.assert_close(got.ravel(), torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("axis", [None, 1])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3, 1, 2), (3, 2, 1, 0)])
def test_the_order_in_memory_does_not_matter(order: tuple[int, ...], axis: int | None) -> None:
    x = torch.randn(3, 4, 5, 6, generator=torch.Generator().manual_seed(0)).permute(order)
    spec = spec_of(3, (True, True), axis)
    want = quantize_tensor(x.contiguous(), spec)
    assert torch.equal(quantize_tensor(x, spec), want)
    assert torch.equal(quantize_tensor(x.to(memory_format=torch.channels_last), spec), want)
    gaps = torch.stack([x, x], -1)[..., 0]
    assert not gaps.is_contiguous()
    assert torch.equal(quantize_tensor(gaps, spec), want)
    row = x[:, :1].expand(-1, 4, -1, -1)  # one memory for four channels
    assert torch.equal(quantize_tensor(row, spec), quantize_tensor(row.contiguous(), spec))


@given(arrays, widths, kinds, st.booleans())
@settings(deadline=None, max_examples=200)
def test_codes_fit_and_errors_are_at_most_half_a_bin(
    a: np.ndarray, bits: int, kind: tuple[bool, bool], per_channel: bool
) -> None:
    x = torch.from_numpy(a)
    spec = spec_of(bits, kind, axis=0 if per_channel else None)
    grid = make_grid(*min_max(x, spec.axis), spec)
    codes = quantize(x, *grid)
    first, last = spec.levels
    assert first <= float(codes.min()) <= float(codes.max()) <= last
    assert torch.equal(codes, codes.round())
    lowest, highest = (grid.low - grid.zero) * grid.scale, (grid.high - grid.zero) * grid.scale
    inside = (x >= lowest) & (x <= highest)
    error = (dequantize(codes, grid.scale, grid.zero) - x).abs() / grid.scale
    assert bool((error[inside] <= 0.5 * (1 + 1e-9)).all())


@given(arrays, widths, kinds)
@settings(deadline=None, max_examples=100)
def test_quantizing_twice_changes_nothing(a: np.ndarray, bits: int, kind: tuple[bool, bool]) -> None:
    x = torch.from_numpy(a)
    spec = spec_of(bits, kind)
    grid = make_grid(*min_max(x), spec)
    once = fake_quantize(x, *grid)
    assert torch.equal(quantize(once, *grid), quantize(x, *grid))


@given(arrays, widths)
@settings(deadline=None, max_examples=100)
def test_symmetric_grids_are_odd_and_keep_zero(a: np.ndarray, bits: int) -> None:
    x = torch.from_numpy(a)
    spec = QuantSpec(bits)
    assert torch.equal(quantize_tensor(-x, spec), -quantize_tensor(x, spec))
    assert torch.equal(fake_quantize(torch.zeros(3), *make_grid(*min_max(x.float()), spec)), torch.zeros(3))


@given(arrays, widths)
@settings(deadline=None, max_examples=100)
def test_asymmetric_grids_keep_zero_exactly(a: np.ndarray, bits: int) -> None:
    grid = make_grid(*min_max(torch.from_numpy(a)), QuantSpec(bits, symmetric=False))
    assert float(fake_quantize(torch.zeros((), dtype=torch.float64), *grid)) == 0.0


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_per_channel_is_per_tensor_on_each_slice(axis: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, 5) * torch.logspace(-2, 2, 3)[:, None, None]
    for symmetric in (True, False):
        got = quantize_tensor(x, QuantSpec(4, symmetric, axis=axis))
        want = [quantize_tensor(part, QuantSpec(4, symmetric)) for part in x.unbind(axis)]
        torch.testing.assert_close(got, torch.stack(want, axis), rtol=0, atol=0)


def test_per_channel_of_a_vector_keeps_every_entry() -> None:
    x = torch.tensor([1.0, -2.0, 0.0])
    torch.testing.assert_close(quantize_tensor(x, QuantSpec(4, axis=0)), x)


def test_straight_through_gradient_is_one_inside_and_zero_outside() -> None:
    x = torch.tensor([-3.0, -0.4, 0.0, 0.7, 3.0], dtype=torch.float64, requires_grad=True)
    grid = make_grid(torch.tensor(-1.0).double(), torch.tensor(1.0).double(), QuantSpec(3))
    y = fake_quantize(x, *grid)
    with torch.no_grad():
        torch.testing.assert_close(y, fake_quantize(x, *grid), rtol=0, atol=0)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("value", [0.0, 1e-45])
def test_a_tensor_of_nothing_stays_nothing(value: float) -> None:
    x = torch.full((4,), value)
    for spec in (QuantSpec(4), QuantSpec(4, symmetric=False), QuantSpec(4, signed=False)):
        assert torch.equal(quantize_tensor(x, spec), torch.zeros(4))


def test_finer_grids_err_less() -> None:
    torch.manual_seed(0)
    x = torch.randn(1000, dtype=torch.float64)
    errors = [float((quantize_tensor(x, QuantSpec(b)) - x).abs().mean()) for b in range(2, 17)]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [(float("nan"), 1.0, "finite"), (-float("inf"), 1.0, "finite"), (2.0, 1.0, "wrong way round")],
)
def test_bad_ranges(low: float, high: float, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make_grid(torch.tensor(low), torch.tensor(high), QuantSpec(4))


def test_floating_point_has_no_grid_and_empty_has_no_range() -> None:
    with pytest.raises(SpecError, match="no grid"):
        make_grid(torch.tensor(0.0), torch.tensor(1.0), QuantSpec(32))
    with pytest.raises(SpecError, match="empty"):
        min_max(torch.empty(0))
    x = torch.randn(3)
    assert quantize_tensor(x, QuantSpec(32)) is x
