"""Operators that hide products, written out: attention and einsum become plain ones.

An integer accelerator quantizes the operands of every product, so the products must be there to be seen.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return `softmax(scale · Q Kᵀ + mask) V`, as scaled_dot_product_attention does in evaluation mode.

    Queries and keys each take the root of the scale, as in ONNX: then both have the range that a file has for them.
    """
    root = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = torch.matmul(query * root, key.transpose(-2, -1) * root)
    if is_causal:
        seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(seen.logical_not(), -math.inf)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return torch.matmul(torch.softmax(scores, -1), value)


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return what `ExportedProgram.run_decompositions` needs: operator to function."""
    from torch.export import default_decompositions

    einsum = default_decompositions()[aten.einsum.default]
    return {aten.einsum.default: einsum, aten.scaled_dot_product_attention.default: attention}
