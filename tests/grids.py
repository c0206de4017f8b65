"""Widths, kinds of grids and tensors that property tests draw from."""

from __future__ import annotations

import hypothesis.extra.numpy as hnp
import numpy as np
from hypothesis import strategies as st
from torch import Tensor

from anybit.plan.grid import min_max, weight_grid
from anybit.simulate.rounding import fake_quantize
from anybit.spec import FLOAT, QuantSpec

KINDS = [(True, True), (True, False), (False, True)]
"""Symmetric or not, with negative codes or without."""

widths = st.integers(2, 16)
kinds = st.sampled_from(KINDS)
shapes = hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=5)
floats = st.floats(-(2.0**126), 2.0**126, width=32, allow_subnormal=True)
small = st.floats(-2, 2, width=32, allow_subnormal=True)
tensors = st.one_of(
    hnp.arrays(np.float32, shapes, elements=e) for e in (floats, small, st.sampled_from([0.0, 0.5, 1e-45]))
)


def spec_of(bits: int, kind: tuple[bool, bool], axis: int | None = None) -> QuantSpec:
    return QuantSpec(bits, symmetric=kind[0], signed=kind[1], axis=axis)


def quantize_tensor(x: Tensor, spec: QuantSpec) -> Tensor:
    """Return `x` on the grid that its own smallest and largest entries span."""
    return x if spec.bits == FLOAT else fake_quantize(x, weight_grid(*min_max(x.detach(), spec.axis), spec))
