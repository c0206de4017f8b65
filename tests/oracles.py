"""Slow, obvious versions of what the package does fast. Everything in float64, one number at a time where it helps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def round_half_even(value: float) -> int:
    return round(value)  # Python's round is to even


def quantize_one(x: float, low: float, high: float, bits: int, *, symmetric: bool, signed: bool) -> float:
    """One number on the grid that covers [low, high], written as in a textbook."""
    x = float(x)  # a quotient too large for a float is infinite, and beyond every code
    low, high = min(low, 0.0), max(high, 0.0)
    if symmetric and signed:
        last = 2 ** (bits - 1) - 1
        scale = max(-low, high) / last
        code = round_half_even(max(-last, min(last, x / scale))) if scale else 0
        return code * scale
    if symmetric:
        last = 2**bits - 1
        scale = high / last
        code = round_half_even(max(0, min(last, x / scale))) if scale else 0
        return code * scale
    last = 2**bits - 1
    scale = (high - low) / last
    if not scale:
        return 0.0
    zero = max(0, min(last, round_half_even(-low / scale)))
    code = max(0, min(last, round_half_even(x / scale) + zero))
    return (code - zero) * scale


def finite_difference(function: Callable[[], float], tensors: Sequence[Tensor], h: float = 1e-5) -> list[Tensor]:
    """The gradient of a function of tensors by central differences, one entry at a time."""
    result = []
    for tensor in tensors:
        flat = tensor.data.view(-1)
        gradient = torch.empty_like(flat)
        for i in range(len(flat)):
            keep = flat[i].item()
            flat[i] = keep + h
            above = function()
            flat[i] = keep - h
            below = function()
            flat[i] = keep
            gradient[i] = (above - below) / (2 * h)
        result.append(gradient.view_as(tensor))
    return result
