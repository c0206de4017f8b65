"""Functions with kinks, and how to run them again on the same side of every kink.

The penalty's gradient is a derivative, and that of a kinked function is the derivative of the linear pieces in use. A
finite difference sees jumps instead, as soon as a shift takes some input to the other side. So the first pass records
which piece every entry was on (`record`), and the second runs those very pieces (`replay`).

An input exactly on a kink is on the piece whose slope PyTorch's backward pass takes there: `abs` has the slope zero at
zero, `clamp` the slope one at its bounds but `hardtanh` zero, `maximum` one half for each of two equal inputs, `amax`
an equal share for each of the largest, `max_pool2d` and `max(dim)` one for the index that they return.

To teach the penalty another kinked function, add a `Kink` to `KINKS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from anybit.objectives.activations import Arguments, Function, Named, spellings
from anybit.objectives.chunks import gated, signs


class Kink(NamedTuple):
    """How one kinked function is recorded and replayed."""

    record: Callable[[Function, Arguments, Named], tuple[Any, Any]]
    """Runs the function; returns its output and a memo of the pieces, or `None` to let it run live."""
    replay: Callable[[Any, Arguments, Named], Any]
    """Runs the recorded pieces on new inputs, out of place."""


def argument(args: Arguments, kwargs: Named, index: int, name: str, default: Any) -> Any:
    """Return an argument given by position or by name."""
    return args[index] if len(args) > index else kwargs.get(name, default)


def elementwise(sides: Callable[..., Any], pieces: Callable[..., Any], **defaults: Any) -> Kink:
    """Return the kink of a function of each entry by itself, and perhaps of settings, in their order.

    `sides` says which piece each entry is on, or `None` to let the function run live; `pieces` runs those pieces.
    """

    def settings(args: Arguments, kwargs: Named) -> list[Any]:
        return [argument(args, kwargs, i, name, default) for i, (name, default) in enumerate(defaults.items(), 1)]

    def record(func: Function, args: Arguments, kwargs: Named) -> tuple[Any, Any]:
        memo = sides(args[0].detach(), *settings(args, kwargs))  # first, since the function may overwrite its input
        return func(*args, **kwargs), memo

    return Kink(record, lambda memo, args, kwargs: pieces(memo, args[0], *settings(args, kwargs)))


def _rectified(func: Function, args: Arguments, kwargs: Named) -> tuple[Any, Any]:
    out = func(*args, **kwargs)
    return out, out.detach().to(torch.bool).view(torch.int8)


RECTIFIED = Kink(_rectified, lambda memo, args, kwargs: gate(args[0], memo, inplace=False))
"""ReLU: `x` where positive, zero elsewhere; the memo is one byte per entry, one where positive.

PyTorch converts floats to booleans faster than it compares them, and multiplies a float by a boolean tensor many times
slower than it converts bytes and multiplies floats.
"""


def gate(x: Tensor, memo: Tensor, *, inplace: bool, shift: Tensor | None = None, by: float = 0.0) -> Tensor:
    """Let the recorded entries of `x` through and add `by` times `shift`, in `x` itself if wanted."""
    out: Tensor = _Gate.apply(x, memo, inplace, shift, by)  # type: ignore[no-untyped-call]
    return out


class _Gate(torch.autograd.Function):
    """Multiply by zeros and ones that are kept as bytes, and add a constant that is kept as bytes too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, inplace: bool, shift: Tensor | None, by: float) -> Tensor:
        ctx.save_for_backward(gate)
        if inplace:
            ctx.mark_dirty(x)
        return gated(x, gate, shift, by, out=x if inplace else torch.empty_like(x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gate,) = ctx.saved_tensors
        return gated(grads[0], gate, None, 0.0, out=torch.empty_like(grads[0])), None, None, None, None


def overwrite(x: Tensor, new: Tensor) -> Tensor:
    """Put `new` into `x`; what the gradient is and how it lies in memory is left to `new` alone."""
    out: Tensor = _Overwrite.apply(x, new)  # type: ignore[no-untyped-call]
    return out


class _Overwrite(torch.autograd.Function):
    """`x.copy_(new)` without the zeros that PyTorch adds to the gradient of `x`, which lie in another layout."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, new: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.copy_(new)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, grads[0]


def _positive(x: Tensor, *_: Any) -> Tensor:
    return x > 0


def _parametric(memo: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    if weight.numel() > 1:
        weight = weight.view(-1, *[1] * (x.dim() - 2))
    return torch.where(memo, x, weight * x)


def _exponential(memo: Tensor, x: Tensor, alpha: float, scale: float = 1.0) -> Tensor:
    negative = torch.where(memo, torch.zeros_like(x), x)
    return scale * torch.where(memo, x, alpha * torch.expm1(negative))


SELU = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
"""Its alpha and its scale."""


def _outside(x: Tensor, low: Any, high: Any) -> tuple[Any, Any] | None:
    """Return which entries are below `low` and which above `high`; those on a bound are inside."""
    if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
        return None  # a constant
    return None if low is None else x < low, None if high is None else x > high


def _outside_or_on(x: Tensor, low: Any, high: Any) -> tuple[Any, Any]:
    return x <= low, x >= high


def _clamped(memo: tuple[Any, Any], x: Tensor, low: Any, high: Any) -> Tensor:
    x = x if low is None else torch.where(memo[0], low, x)
    return x if high is None else torch.where(memo[1], high, x)


SIXTH = float(torch.tensor(1 / 6, dtype=torch.float32))


def _hard_sigmoid(memo: tuple[Any, Any], x: Tensor) -> Tensor:
    inside = _clamped(memo, x, -3.0, 3.0)
    if x.dtype == torch.float64:  # its slope is a sixth in single precision, whatever the format
        return inside * SIXTH + inside.detach() * (1 / 6 - SIXTH) + 0.5
    return inside / 6 + 0.5


def _beyond(x: Tensor, bound: float) -> Tensor:
    return torch.where(x.abs() > bound, signs(x), 0)


def _order(x: Tensor, other: Tensor) -> Tensor:
    """Return 1 where the first of two is larger, -1 where it is smaller, 0 where they are equal."""
    return (x > other).to(torch.int8) - (x < other).to(torch.int8)


def _larger(memo: Tensor, x: Tensor, other: Tensor) -> Tensor:
    return torch.where(memo > 0, x, torch.where(memo < 0, other, (x + other) / 2))


def _l1_sides(x: Tensor, target: Tensor, reduction: Any) -> Tensor | None:
    return signs(x - target.detach()) if reduction in ("none", "mean", "sum") else None


def _l1_loss(memo: Tensor, x: Tensor, target: Tensor, reduction: str) -> Tensor:
    distance = (x - target) * memo
    return distance if reduction == "none" else distance.sum() if reduction == "sum" else distance.mean()


def max_pool(dims: int, function: Function, *, always: bool = False) -> Kink:
    """Return the kink of pooling by maximum; the memo is where each maximum was."""

    def record(func: Function, args: Arguments, kwargs: Named) -> tuple[Any, Any]:
        wanted = always or bool(kwargs.get("return_indices", False))
        out, index = function(*args, **{**kwargs, "return_indices": True})
        return ((out, index) if wanted else out), (index.to(torch.int32), wanted)

    def replay(memo: tuple[Tensor, bool], args: Arguments, kwargs: Named) -> Any:
        index, wanted = memo
        out: Tensor = _Take.apply(args[0], index, dims)  # type: ignore[no-untyped-call]
        return (out, index.to(torch.int64)) if wanted else out

    return Kink(record, replay)


class _Take(torch.autograd.Function):
    """`x.gather` over the last dimensions taken as one, keeping the index in four bytes instead of eight.

    Results have the layout of `x`: what follows is several times slower where layouts are mixed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, dims: int) -> Tensor:
        last = x.dim() == dims + 2 and x.movedim(1, -1).is_contiguous()
        ctx.save_for_backward(index)
        ctx.shape, ctx.dims, ctx.last = x.shape, dims, last
        places, dim = _places(index, dims, last)
        out = _places(x, dims, last)[0].gather(dim, places.to(torch.int64))
        return _unflatten(out, index.shape, last)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        places, dim = _places(index, ctx.dims, ctx.last)
        size = list(places.shape)
        size[dim] = math.prod(ctx.shape[-ctx.dims :])
        grad = _places(grads[0], ctx.dims, ctx.last)[0]
        out = grad.new_zeros(size).scatter_add_(dim, places.to(torch.int64), grad)
        return _unflatten(out, ctx.shape, ctx.last), None, None


def _places(x: Tensor, dims: int, last: bool) -> tuple[Tensor, int]:
    """Return a tensor with its last dimensions as one, in its order of memory, and which dimension that is."""
    return (x.movedim(1, -1).flatten(1, dims), 1) if last else (x.flatten(-dims), -1)


def _unflatten(x: Tensor, shape: torch.Size, last: bool) -> Tensor:
    return x.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1) if last else x.view(shape)


def ordered(place: int = 1) -> Kink:
    """Return the kink of what returns values and their indices along a dimension; the memo is the indices."""

    def record(func: Function, args: Arguments, kwargs: Named) -> tuple[Any, Any]:
        out = func(*args, **kwargs)
        return out, (type(out), out[1])

    def replay(memo: tuple[Any, Tensor], args: Arguments, kwargs: Named) -> Any:
        kind, index = memo
        x, dim = args[0], argument(args, kwargs, place, "dim", -1)
        kept = index.dim() == x.dim()
        taken = x.gather(dim, index if kept else index.unsqueeze(dim))
        return kind((taken if kept else taken.squeeze(dim), index))

    return Kink(record, replay)


def _extremes(func: Function, args: Arguments, kwargs: Named) -> tuple[Any, Any]:
    out = func(*args, **kwargs)
    dim = argument(args, kwargs, 1, "dim", ())
    full = func(args[0].detach(), dim=dim, keepdim=True) if isinstance(dim, int) or dim else out.detach()
    return out, args[0].detach() == full


def _mean_of_extremes(memo: Tensor, args: Arguments, kwargs: Named) -> Any:
    dim = argument(args, kwargs, 1, "dim", ())
    dims = dim if isinstance(dim, int) or dim else tuple(range(memo.dim()))
    keep = bool(argument(args, kwargs, 2, "keepdim", False))
    return torch.where(memo, args[0], 0).sum(dims, keepdim=keep) / memo.sum(dims, keepdim=keep)


EXTREME = Kink(_extremes, _mean_of_extremes)
"""The largest or smallest entry along dimensions or of all: equal ones share; the memo is which they are."""


def overloaded(pair: Kink) -> Kink:
    """Return the kink of `max` or `min`, which are three functions: along a dimension, of two tensors, of all."""

    def record(func: Function, args: Arguments, kwargs: Named) -> tuple[Any, Any]:
        other = argument(args, kwargs, 1, "other", None)
        along = "dim" in kwargs or isinstance(other, int)
        kind = ordered() if along else pair if isinstance(other, Tensor) else EXTREME
        out, memo = kind.record(func, args, kwargs)
        return out, (kind, memo)

    return Kink(record, lambda memo, args, kwargs: memo[0].replay(memo[1], args, kwargs))


def _table() -> dict[Function, Kink]:
    larger = elementwise(_order, _larger, other=None)
    smaller = elementwise(lambda x, other: _order(other, x), _larger, other=None)
    kinds: dict[str, Kink] = {
        "relu": RECTIFIED,
        "leaky_relu": elementwise(_positive, lambda m, x, s: torch.where(m, x, s * x), negative_slope=0.01),
        "prelu": elementwise(_positive, _parametric, weight=None),
        "threshold": elementwise(
            lambda x, t, _: x > t, lambda m, x, _, v: torch.where(m, x, v), threshold=0.0, value=0.0
        ),
        "selu": elementwise(_positive, lambda m, x: _exponential(m, x, *SELU)),
        "elu": elementwise(lambda x, alpha: None if alpha == 1.0 else x > 0, _exponential, alpha=1.0),
        "abs": elementwise(signs, lambda m, x: x * m),
        "relu6": elementwise(lambda x: _outside_or_on(x, 0.0, 6.0), lambda m, x: _clamped(m, x, 0.0, 6.0)),
        "hardtanh": elementwise(_outside_or_on, _clamped, min_val=-1.0, max_val=1.0),
        "clamp": elementwise(_outside, _clamped, min=None, max=None),
        "clamp_min": elementwise(lambda x, low: _outside(x, low, None), lambda m, x, v: _clamped(m, x, v, None), min=0),
        "clamp_max": elementwise(lambda x, v: _outside(x, None, v), lambda m, x, v: _clamped(m, x, None, v), max=0),
        "hardsigmoid": elementwise(lambda x: _outside_or_on(x, -3.0, 3.0), _hard_sigmoid),
        "hardswish": elementwise(
            lambda x: _outside_or_on(x, -3.0, 3.0), lambda m, x: x * (_clamped(m, x, -3.0, 3.0) / 6 + 0.5)
        ),
        "softshrink": elementwise(_beyond, lambda m, x, v: torch.where(m != 0, x - v * m, 0), lambd=0.5),
        "hardshrink": elementwise(_beyond, lambda m, x, _: torch.where(m != 0, x, 0), lambd=0.5),
        "maximum": larger,
        "minimum": smaller,
        "max": overloaded(larger),
        "min": overloaded(smaller),
        "amax": EXTREME,
        "amin": EXTREME,
        "sort": ordered(),
        "topk": ordered(place=2),
    }
    kinds.update({"absolute": kinds["abs"], "clip": kinds["clamp"]})
    table = {func: kind for name, kind in kinds.items() for func in spellings(name)}
    table[F.l1_loss] = elementwise(_l1_sides, _l1_loss, target=None, reduction="mean")
    for dims in (1, 2, 3):
        for prefix in ("max_pool", "adaptive_max_pool"):
            name = f"{prefix}{dims}d"
            pool = getattr(F, name)
            table[pool] = max_pool(dims, pool)
            table[getattr(F, f"{name}_with_indices")] = max_pool(dims, pool, always=True)
            if hasattr(torch, name):
                table[getattr(torch, name)] = max_pool(dims, pool, always=prefix.startswith("adaptive"))
    return table


KINKS: dict[Function, Kink] = _table()
"""The functions that are replayed: add one here."""
