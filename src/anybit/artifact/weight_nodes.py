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
    offset = offset_of(codes) if packed else None
    # ONNX Runtime fuses a matrix product only if its weight has a zero, even if that is zero.
    others: dict[str, npt.NDArray[Any]] = {"scale": codes.scale, "zero": codes.zero}
    if not fused:
        others = {part: codes.along_axis(array).astype(np.float32) for part, array in others.items()}
    if offset is None:
        values = into.tensor(codes.values, f"{name}.codes")
    else:
        values = TensorProto(name=f"{name}.codes", dims=codes.values.shape, data_type=TensorProto.INT4)
        into.fill(values, pack_int4(codes.values - offset))
        if offset.any() and fused:
            others["offset"] = offset
        elif not fused:
            others["zero"] = others["zero"] - offset.astype(np.float32)
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
    offset = offset_of(codes) if packed else None
    if offset is not None and offset.any():
        cast = helper.make_node("Cast", [source], [f"{name}.int32"], name=f"{name}/Cast.0", to=TensorProto.INT32)
        add = helper.make_node("Add", [cast.output[0], f"{name}.offset"], [f"{name}.moved"], name=f"{name}/Add")
        before, source = [cast, add], add.output[0]
    if offset is not None:
        # ONNX Runtime folds this Cast when it loads; INT4 straight into DequantizeLinear would not fuse.
        before += [helper.make_node("Cast", [source], [f"{name}.int8"], name=f"{name}/Cast", to=TensorProto.INT8)]
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


def offset_of(codes: Codes) -> npt.NDArray[np.int32] | None:
    """Return what is to be added to numbers of 4 bits to get the codes, channel by channel; nothing if they have more.

    >>> codes = Codes(np.array([[-15, 0], [0, 15]], np.int8), np.ones(2, np.float32), np.zeros(2, np.int8), 0, 4)
    >>> offset_of(codes).tolist()
    [[-7], [8]]
    """
    if codes.bits > 4:
        return None
    rest = tuple(d for d in range(codes.values.ndim) if d != codes.axis)
    low, high = (np.asarray(end(axis=rest, keepdims=True), np.int32) for end in (codes.values.min, codes.values.max))
    return np.zeros_like(low) if low.min() >= -8 and high.max() <= 7 else low + 8


def pack_int4(values: Whole) -> npt.NDArray[np.uint8]:
    """Return signed 4-bit numbers, two to a byte, the first in the lower half.

    >>> pack_int4(np.array([1, -1, 7], np.int8)).tobytes().hex()
    'f107'
    """
    low = np.ascontiguousarray(values).reshape(-1).astype(np.uint8) & 15
    if low.size % 2:
        low = np.append(low, np.uint8(0))
    return np.asarray(low[0::2] | low[1::2] << np.uint8(4), np.uint8)
