"""Rounding in PyTorch: on the plan's grid, with gradients straight through."""

from __future__ import annotations

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from grids import KINDS, kinds, quantize_tensor, shapes, spec_of, tensors, widths
from hypothesis import given, settings
from hypothesis import strategies as st

from anybit.plan.grid import dequantize, make_grid, min_max, quantize
from anybit.simulate.rounding import CHUNK, fake_quantize, gapless, snap_
from anybit.spec import QuantSpec

arrays = hnp.arrays(np.float64, shapes, elements=st.floats(-1e6, 1e6, allow_subnormal=False))


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


@given(tensors, widths, kinds, st.integers(-4, 4))
@settings(deadline=None, max_examples=200)
def test_with_or_without_gradients_the_values_are_those_of_the_grid(
    a: np.ndarray, bits: int, kind: tuple[bool, bool], axis: int
) -> None:
    spec = spec_of(bits, kind, axis if -a.ndim <= axis < a.ndim else None)
    x = torch.from_numpy(a)
    grid = make_grid(*min_max(x, spec.axis), spec)
    want = dequantize(quantize(x, grid), grid)
    assert torch.equal(fake_quantize(x, grid), want)
    followed = fake_quantize(x.clone().requires_grad_(), grid)
    assert followed.requires_grad
    assert torch.equal(followed.detach(), want)
    if spec.axis is None:
        kept = x.clone()
        assert snap_(kept, grid, centred=not bool(grid.zero.any())) is kept
        assert torch.equal(kept, want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("last", [False, True])
def test_snapping_many_values_in_place(kind: tuple[bool, bool], last: bool) -> None:
    x = torch.randn(3, 8, 61, 59, generator=torch.Generator().manual_seed(0))
    x = x.to(memory_format=torch.channels_last) if last else x
    assert x.numel() > CHUNK
    assert gapless(x)
    grid = make_grid(torch.tensor(-1.5), torch.tensor(2.0), spec_of(5, kind))
    want = fake_quantize(x, grid)
    assert torch.equal(snap_(x, grid, centred=kind[0]), want)


@given(arrays, widths, kinds)
@settings(deadline=None, max_examples=100)
def test_rounding_twice_changes_nothing(a: np.ndarray, bits: int, kind: tuple[bool, bool]) -> None:
    x = torch.from_numpy(a)
    grid = make_grid(*min_max(x), spec_of(bits, kind))
    once = fake_quantize(x, grid)
    assert torch.equal(quantize(once, grid), quantize(x, grid))


@given(arrays, widths)
@settings(deadline=None, max_examples=100)
def test_symmetric_grids_are_odd_and_keep_zero(a: np.ndarray, bits: int) -> None:
    x = torch.from_numpy(a)
    spec = QuantSpec(bits)
    assert torch.equal(quantize_tensor(-x, spec), -quantize_tensor(x, spec))
    assert torch.equal(fake_quantize(torch.zeros(3), make_grid(*min_max(x.float()), spec)), torch.zeros(3))


@given(arrays, widths)
@settings(deadline=None, max_examples=100)
def test_asymmetric_grids_keep_zero_exactly(a: np.ndarray, bits: int) -> None:
    grid = make_grid(*min_max(torch.from_numpy(a)), QuantSpec(bits, symmetric=False))
    assert float(fake_quantize(torch.zeros((), dtype=torch.float64), grid)) == 0.0


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
    y = fake_quantize(x, grid)
    with torch.no_grad():
        torch.testing.assert_close(y, fake_quantize(x, grid), rtol=0, atol=0)
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


def test_floating_point_stays_as_it_is() -> None:
    x = torch.randn(3)
    assert quantize_tensor(x, QuantSpec(32)) is x
