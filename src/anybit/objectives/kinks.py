"""Functions with kinks, and how to run them again on the same side of every kink.

The penalty's gradient is a derivative, and at a point where no input sits exactly on a kink it is that of the linear
pieces in use. A finite difference sees jumps instead, as soon as a shift takes some input to the other side. So the
first pass records which piece every entry was on (`record`), and the second runs those very pieces (`replay`).

To teach the penalty another kinked function, add a `Kink` to `KINKS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anybit.objectives.pieces import gated
from anybit.objectives.taps import Function, spellings


class Kink(ABC):
    """How one kinked function is recorded and replayed."""

    @abstractmethod
    def record(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Run the function; return its output and a memo of the pieces, or `None` to let it run live."""

    @abstractmethod
    def replay(self, memo: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the recorded pieces on new inputs, out of place."""


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str, default: Any) -> Any:
    """Return an argument given by position or by name."""
    return args[index] if len(args) > index else kwargs.get(name, default)


class Masked(Kink):
    """`x` where positive, something smooth in `x` elsewhere; the memo is the mask of the positive entries."""

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold

    def record(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Note which entries are above the threshold."""
        mask = args[0].detach() > self.bound(args, kwargs)
        return func(*args, **kwargs), mask

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        """Return where the kink is."""
        return self.threshold


class Rectified(Kink):
    """ReLU: `x` where positive, zero elsewhere; the memo is one byte per entry, one where positive.

    PyTorch converts floats to booleans faster than it compares them, and multiplies a float by a boolean tensor many
    times slower than it converts bytes and multiplies floats.
    """

    def record(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Note which entries came through."""
        out = func(*args, **kwargs)
        return out, out.detach().to(torch.bool).view(torch.int8)

    def replay(self, memo: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Let the same entries through."""
        return self.gate(args[0], memo, inplace=False)

    def gate(self, x: Tensor, memo: Tensor, *, inplace: bool, shift: Tensor | None = None, by: float = 0.0) -> Tensor:
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


class Leaky(Masked):
    """`slope · x` elsewhere."""

    def replay(self, memo: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Keep `x` or multiply it by the slope."""
        x: Tensor = args[0]
        return torch.where(memo, x, argument(args, kwargs, 1, "negative_slope", 0.01) * x)


class Parametric(Masked):
    """`w · x` elsewhere, with a learned w per channel."""

    def replay(self, memo: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Multiply by one or by the channel's weight."""
        x, weight = args[0], argument(args, kwargs, 1, "weight", None)
        if weight.numel() > 1:
            weight = weight.view(-1, *[1] * (x.dim() - 2))
        return torch.where(memo, x, weight * x)


class Threshold(Masked):
    """A constant elsewhere."""

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        """Return where the kink is."""
        return float(argument(args, kwargs, 1, "threshold", 0.0))

    def replay(self, memo: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Keep `x` or put the value."""
        return torch.where(memo, args[0], float(argument(args, kwargs, 2, "value", 0.0)))


class ScaledExponential(Masked):
    """SELU, whose slope jumps at zero."""

    ALPHA, SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946

    def replay(self, memo: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Scale `x` or its exponential."""
        x: Tensor = args[0]
        negative = torch.where(memo, torch.zeros_like(x), x)
        return self.SCALE * torch.where(memo, x, self.ALPHA * torch.expm1(negative))


class Absolute(Masked):
    """The absolute value."""

    def replay(self, memo: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Multiply by the recorded sign."""
        return torch.where(memo, args[0], -args[0])


class Clamped(Kink):
    """Constant below `low` and above `high`; the memo is whether inside, and whether above."""

    def __init__(
        self, low: float | None = None, high: float | None = None, names: tuple[str, str] | None = None
    ) -> None:
        self.low, self.high, self.names = low, high, names

    def bounds(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the two kinks, from the call if it gives them."""
        if self.names is None:
            return self.low, self.high
        low = argument(args, kwargs, 1, self.names[0], self.low)
        high = argument(args, kwargs, 2, self.names[1], self.high)
        return low, high

    def record(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Note which entries are inside, and the constant of those that are not."""
        x, (low, high) = args[0].detach(), self.bounds(args, kwargs)
        if isinstance(low, Tensor) or isinstance(high, Tensor):
            return func(*args, **kwargs), None
        below = torch.zeros_like(x, dtype=torch.bool) if low is None else x <= low
        above = torch.zeros_like(x, dtype=torch.bool) if high is None else x >= high
        return func(*args, **kwargs), (below, above)

    def replay(self, memo: tuple[Tensor, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Keep `x` inside, the recorded bound outside."""
        below, above = memo
        low, high = self.bounds(args, kwargs)
        x = args[0]
        if low is not None:
            x = torch.where(below, torch.as_tensor(low, dtype=x.dtype), x)
        return x if high is None else torch.where(above, torch.as_tensor(high, dtype=x.dtype), x)


class HardSigmoid(Clamped):
    """`x/6 + 1/2` between -3 and 3, 0 and 1 outside."""

    def replay(self, memo: tuple[Tensor, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Run the recorded pieces."""
        return super().replay(memo, args, kwargs) / 6 + 0.5


class HardSwish(Clamped):
    """`x · hard-sigmoid(x)`."""

    def replay(self, memo: tuple[Tensor, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Run the recorded pieces."""
        x: Tensor = args[0]
        return x * (super().replay(memo, args, kwargs) / 6 + 0.5)


class MaxPool(Kink):
    """Pooling by maximum; the memo is where each maximum was."""

    def __init__(self, dims: int, function: Function, *, always: bool = False) -> None:
        self.dims, self.function, self.always = dims, function, always

    def record(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Ask for the indices, whether or not the caller did."""
        wanted = self.always or bool(kwargs.get("return_indices", False))
        out, index = self.function(*args, **{**kwargs, "return_indices": True})
        return ((out, index) if wanted else out), (index.to(torch.int32), wanted)

    def replay(self, memo: tuple[Tensor, bool], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take the entries that were the maxima."""
        index, wanted = memo
        x: Tensor = args[0]
        out: Tensor = _Take.apply(x, index, self.dims)  # type: ignore[no-untyped-call]
        return (out, index.to(torch.int64)) if wanted else out


class _Take(torch.autograd.Function):
    """`x.gather` over the last dimensions taken as one, keeping the index in four bytes instead of eight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, dims: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.dims = x.shape, dims
        return x.flatten(-dims).gather(-1, index.flatten(-dims).to(torch.int64)).view(index.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        out = grads[0].new_zeros(ctx.shape)
        flat = index.flatten(-ctx.dims).to(torch.int64)
        out.view(*ctx.shape[: -ctx.dims], -1).scatter_add_(-1, flat, grads[0].flatten(-ctx.dims))
        return out, None, None


class ExtremeAlong(Kink):
    """`x.max(dim)` and `x.min(dim)`; the full reduction and the two-tensor form go elsewhere."""

    def record(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Note where the extremes are, or which of two tensors won."""
        out = func(*args, **kwargs)
        if isinstance(out, tuple):
            return out, ("along", out[1])
        other = argument(args, kwargs, 1, "other", None)
        if isinstance(other, Tensor):
            return out, ("pair", (out == args[0]).detach())
        return out, ("all", (args[0] == out).detach().flatten().to(torch.int8).argmax())

    def replay(self, memo: tuple[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take the recorded entries."""
        kind, index = memo
        x: Tensor = args[0]
        if kind == "pair":
            return torch.where(index, x, argument(args, kwargs, 1, "other", None))
        if kind == "all":
            return x.flatten()[index]
        dim = argument(args, kwargs, 1, "dim", -1)
        keep = argument(args, kwargs, 2, "keepdim", False)
        taken = x.gather(dim, index if keep else index.unsqueeze(dim))
        return torch.return_types.max((taken if keep else taken.squeeze(dim), index))


def _table() -> dict[Function, Kink]:
    kinds: dict[str, Kink] = {
        "relu": Rectified(),
        "leaky_relu": Leaky(),
        "prelu": Parametric(),
        "threshold": Threshold(),
        "selu": ScaledExponential(),
        "abs": Absolute(),
        "absolute": Absolute(),
        "relu6": Clamped(0.0, 6.0),
        "hardtanh": Clamped(-1.0, 1.0, ("min_val", "max_val")),
        "clamp": Clamped(None, None, ("min", "max")),
        "clip": Clamped(None, None, ("min", "max")),
        "clamp_min": Clamped(None, None, ("min", "unused")),
        "hardsigmoid": HardSigmoid(-3.0, 3.0),
        "hardswish": HardSwish(-3.0, 3.0),
        "max": ExtremeAlong(),
        "min": ExtremeAlong(),
        "maximum": ExtremeAlong(),
        "minimum": ExtremeAlong(),
    }
    table = {func: kind for name, kind in kinds.items() for func in spellings(name)}
    for dims in (1, 2, 3):
        for prefix in ("max_pool", "adaptive_max_pool"):
            name = f"{prefix}{dims}d"
            pool = getattr(F, name)
            table[pool] = MaxPool(dims, pool)
            table[getattr(F, f"{name}_with_indices")] = MaxPool(dims, pool, always=True)
            if hasattr(torch, name):
                table[getattr(torch, name)] = MaxPool(dims, pool, always=prefix.startswith("adaptive"))
    return table


KINKS: dict[Function, Kink] = _table()
"""The functions that are replayed: add one here."""
