"""A rounded weight in ONNX: the tensors that hold its codes, and the nodes that make it a weight again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import NodeProto, TensorProto, helper

from anybit.artifact.model import OnnxModel
from anybit.plan.codes import Codes, Whole


def weight_tensors(
    codes: Codes, name: str, into: OnnxModel, *, packed: bool = False, fused: bool = True
) -> list[TensorProto]:
    """Return the initializers of a weight for a model; `packed` stores up to 4 bits as INT4, two codes to a byte."""
    if packed and fits_int4(codes):
        values = TensorProto(name=f"{name}.codes", dims=codes.values.shape, data_type=TensorProto.INT4)
        into.fill(values, pack_int4(codes.values))
    else:
        values = into.tensor(codes.values, f"{name}.codes")
    # ONNX Runtime fuses a matrix product only if its weight has a zero, even if that is zero.
    others: dict[str, npt.NDArray[Any]] = {"scale": codes.scale, "zero": codes.zero}
    if not fused:
        others = {part: codes.along_axis(array).astype(np.float32) for part, array in others.items()}
    return [values, *(into.tensor(array, f"{name}.{part}") for part, array in others.items())]


def weight_nodes(codes: Codes, name: str, *, packed: bool = False, fused: bool = True) -> list[NodeProto]:
    """Return the nodes from the initializers to a floating-point tensor called `name`.

    `fused` is for weights that are multiplied with whole numbers. For others a DequantizeLinear would run at every
    call, or make ONNX Runtime round the other factor to 8 bits; Cast, Sub and Mul are done once, at loading.
    """
    source = f"{name}.codes"
    if not fused:
        cast = helper.make_node("Cast", [source], [f"{name}.float"], name=f"{name}/Cast", to=TensorProto.FLOAT)
        sub = helper.make_node("Sub", [cast.output[0], f"{name}.zero"], [f"{name}.centred"], name=f"{name}/Sub")
        return [cast, sub, helper.make_node("Mul", [sub.output[0], f"{name}.scale"], [name], name=f"{name}/Mul")]
    before = []
    if packed and fits_int4(codes):
        # ONNX Runtime folds this Cast when it loads; INT4 straight into DequantizeLinear would not fuse.
        before = [helper.make_node("Cast", [source], [f"{name}.int8"], name=f"{name}/Cast", to=TensorProto.INT8)]
        source = f"{name}.int8"
    inputs = [source, f"{name}.scale", f"{name}.zero"]
    node = helper.make_node("DequantizeLinear", inputs, [name], name=f"{name}/DequantizeLinear")
    if codes.axis is not None:
        node.attribute.append(helper.make_attribute("axis", codes.axis))
    return [*before, node]


def with_one_zero(codes: Codes) -> Codes:
    """Move zeros that differ by channel into the codes: ONNX Runtime's convolutions know only one zero."""
    if codes.axis is None or codes.bits > 8 or not codes.zero.any():
        return codes
    values = codes.values.astype(np.int16) - codes.along_axis(codes.zero).astype(np.int16)
    kind = np.int8 if codes.bits <= 7 else np.int16
    return replace(codes, values=values.astype(kind), zero=np.zeros_like(codes.zero, kind))


def unsigned(codes: Codes) -> Codes:
    """Return the same weight with bytes from 0 to 255, which every processor multiplies exactly."""
    if codes.values.dtype != np.int8:
        return codes
    values, zero = (np.asarray(v.astype(np.int16) + 128, np.uint8) for v in (codes.values, codes.zero))
    return replace(codes, values=values, zero=zero)


def transposed(codes: Codes, perm: tuple[int, ...]) -> Codes:
    """Return the codes of the transposed weight."""
    axis = None if codes.axis is None else perm.index(codes.axis)
    return replace(codes, values=np.ascontiguousarray(codes.values.transpose(perm)), axis=axis)


def largest(codes: Codes) -> int:
    """Return the largest magnitude of a code."""
    return max(-int(codes.values.min()), int(codes.values.max()))


def fits_int4(codes: Codes) -> bool:
    """Tell whether two codes fit in a byte."""
    return codes.bits <= 4 and int(codes.values.min()) >= -8 and int(codes.values.max()) <= 7


def pack_int4(values: Whole) -> npt.NDArray[np.uint8]:
    """Return signed 4-bit numbers, two to a byte, the first in the lower half.

    >>> pack_int4(np.array([1, -1, 7], np.int8)).tobytes().hex()
    'f107'
    """
    low = np.ascontiguousarray(values).reshape(-1).astype(np.uint8) & 15
    if low.size % 2:
        low = np.append(low, np.uint8(0))
    return np.asarray(low[0::2] | low[1::2] << np.uint8(4), np.uint8)
