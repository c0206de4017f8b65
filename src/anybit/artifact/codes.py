"""A weight as whole numbers, and the ONNX tensors and nodes that make it a weight again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import NodeProto, TensorProto, helper

from anybit.artifact.bundle import Bundle
from anybit.artifact.format import Weight
from anybit.rounding.clip import mse_range
from anybit.rounding.grid import Grid, dequantize, make_grid, min_max, quantize
from anybit.rounding.squant import squant
from anybit.spec import QuantSpec

Floats = npt.NDArray[np.float32]
Whole = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Codes:
    """`(values - zero) · scale`; scale and zero are single, or one per index of `axis`."""

    values: Whole
    scale: Floats
    zero: Whole
    axis: int | None
    bits: int

    def tensors(self, name: str, into: Bundle, *, packed: bool = False, fused: bool = True) -> list[TensorProto]:
        """Return the initializers for a bundle; `packed` stores up to 4 bits as INT4, two codes to a byte."""
        if packed and self.fits_int4:
            values = TensorProto(name=f"{name}.codes", dims=self.values.shape, data_type=TensorProto.INT4)
            into.fill(values, pack_int4(self.values))
        else:
            values = into.tensor(self.values, f"{name}.codes")
        # ONNX Runtime fuses a matrix product only if its weight has a zero, even if that is zero.
        others = {"scale": self.scale, "zero": self.zero}
        if not fused:
            others = {part: self._along_axis(array).astype(np.float32) for part, array in others.items()}
        return [values, *(into.tensor(array, f"{name}.{part}") for part, array in others.items())]

    def nodes(self, name: str, *, packed: bool = False, fused: bool = True) -> list[NodeProto]:
        """Return the nodes from the initializers to a floating-point tensor called `name`.

        `fused` is for weights that are multiplied with whole numbers. For others a DequantizeLinear would run at every
        call, or make ONNX Runtime round the other factor to 8 bits; Cast, Sub and Mul are done once, at loading.
        """
        codes = f"{name}.codes"
        if not fused:
            cast = helper.make_node("Cast", [codes], [f"{name}.float"], name=f"{name}/Cast", to=TensorProto.FLOAT)
            sub = helper.make_node("Sub", [cast.output[0], f"{name}.zero"], [f"{name}.centred"], name=f"{name}/Sub")
            return [cast, sub, helper.make_node("Mul", [sub.output[0], f"{name}.scale"], [name], name=f"{name}/Mul")]
        before = []
        if packed and self.fits_int4:
            # ONNX Runtime folds this Cast when it loads; INT4 straight into DequantizeLinear would not fuse.
            before = [helper.make_node("Cast", [codes], [f"{name}.int8"], name=f"{name}/Cast", to=TensorProto.INT8)]
            codes = f"{name}.int8"
        inputs = [codes, f"{name}.scale", f"{name}.zero"]
        node = helper.make_node("DequantizeLinear", inputs, [name], name=f"{name}/DequantizeLinear")
        if self.axis is not None:
            node.attribute.append(helper.make_attribute("axis", self.axis))
        return [*before, node]

    def dequantized(self) -> Floats:
        """Return the weight in floating point.

        >>> Codes(np.array([-7, 2], np.int8), np.float32(0.5), np.int8(0), None, 4).dequantized().tolist()
        [-3.5, 1.0]
        """
        scale, zero = (self._along_axis(np.asarray(v, np.float32)) for v in (self.scale, self.zero))
        return np.asarray(dequantize(self.values.astype(np.float32), scale, zero), np.float32)

    def with_one_zero(self) -> Codes:
        """Move zeros that differ by channel into the codes: ONNX Runtime's convolutions know only one zero."""
        if self.axis is None or self.bits > 8 or not self.zero.any():
            return self
        values = self.values.astype(np.int16) - self._along_axis(self.zero).astype(np.int16)
        kind = np.int8 if self.bits <= 7 else np.int16
        return replace(self, values=values.astype(kind), zero=np.zeros_like(self.zero, kind))

    def _along_axis(self, vector: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if self.axis is None:
            return vector
        shape = [1] * self.values.ndim
        shape[self.axis] = -1
        return vector.reshape(shape)

    def unsigned(self) -> Codes:
        """Return the same weight with bytes from 0 to 255, which every processor multiplies exactly."""
        if self.values.dtype != np.int8:
            return self
        values, zero = (np.asarray(v.astype(np.int16) + 128, np.uint8) for v in (self.values, self.zero))
        return replace(self, values=values, zero=zero)

    def transposed(self, perm: tuple[int, ...]) -> Codes:
        """Return the codes of the transposed weight."""
        axis = None if self.axis is None else perm.index(self.axis)
        return replace(self, values=np.ascontiguousarray(self.values.transpose(perm)), axis=axis)

    @property
    def largest(self) -> int:
        """The largest magnitude of a code."""
        return max(-int(self.values.min()), int(self.values.max()))

    @property
    def fits_int4(self) -> bool:
        """Whether two codes fit in a byte."""
        return self.bits <= 4 and int(self.values.min()) >= -8 and int(self.values.max()) <= 7


def encode(weight: Floats, how: Weight, bits: int) -> Codes:
    """Put a weight on its grid: to the nearest codes or keeping sums, over its whole range or clipped.

    >>> encode(np.array([-3.0, 1.6, 3.0], np.float32), Weight("a", "a"), 3).values.tolist()
    [-3, 2, 3]
    """
    spec = how.spec(bits)
    grid = make_grid(*(mse_range(weight, spec) if how.clip else min_max(weight, spec.axis)), spec)
    if how.sums:
        return _whole(squant(weight, *grid, axis=how.channels, groups=how.groups), grid, spec)
    return _whole(quantize(weight, *grid), grid, spec)


def _whole(codes: npt.NDArray[np.floating[Any]], grid: Grid, spec: QuantSpec) -> Codes:
    kind: type[np.signedinteger[Any]] = np.int8 if spec.bits <= 8 else np.int16
    middle = 0 if spec.symmetric else 2 ** (spec.bits - 1)  # codes from 0 on would not fit in a signed byte
    values = (codes - codes.dtype.type(middle) if middle else codes).astype(kind)
    shape = () if spec.axis is None else (-1,)
    scale, zero = np.asarray(grid.scale, np.float32), np.asarray(grid.zero - middle, kind)
    return Codes(values, scale.reshape(shape), zero.reshape(shape), spec.axis, spec.bits)


def pack_int4(values: Whole) -> npt.NDArray[np.uint8]:
    """Return signed 4-bit numbers, two to a byte, the first in the lower half.

    >>> pack_int4(np.array([1, -1, 7], np.int8)).tobytes().hex()
    'f107'
    """
    low = np.ascontiguousarray(values).reshape(-1).astype(np.uint8) & 15
    if low.size % 2:
        low = np.append(low, np.uint8(0))
    return np.asarray(low[0::2] | low[1::2] << np.uint8(4), np.uint8)
