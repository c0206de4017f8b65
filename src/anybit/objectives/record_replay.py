"""The two passes over the closure: one that records kinks and directions, one that replays and shifts."""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from typing import Any, Literal

import torch
from torch import Tensor

from anybit.errors import PenaltyError
from anybit.objectives.activations import ACTIVATIONS, Arguments, Function, Mode, Named, with_graph
from anybit.objectives.checkpointing import CallOrder, recomputing
from anybit.objectives.chunks import l1_norm, signs_and_l1, wide_format
from anybit.objectives.kinks import KINKS, RECTIFIED, gate, overwrite

Norm = Literal["l1", "l2"]

SHORT = (torch.bfloat16, torch.float16)
"""Formats with too few digits for a finite difference."""


def unit(grad: Tensor) -> Tensor:
    """Return a gradient over its length, the direction in which its l2 norm grows; for l1 that is its sign.

    >>> unit(torch.tensor([3.0, -4.0]))
    tensor([ 0.6000, -0.8000])
    """
    found: Tensor = grad / torch.linalg.vector_norm(grad).clamp(min=torch.finfo(grad.dtype).tiny)
    return found


def root_mean_square(x: Tensor) -> Tensor:
    """Return the typical size of an entry, without waiting for the device.

    >>> root_mean_square(torch.tensor([3.0, 4.0, 0.0, 0.0]))
    tensor(2.5000)
    """
    size: Tensor = torch.linalg.vector_norm(x, dtype=wide_format(x)) / math.sqrt(max(1, x.numel()))
    return size


class Operand:
    """One weight or activation output in the first pass: its size, and in the end which way its gradient points."""

    __slots__ = ("direction", "eps", "norm", "numel", "reach", "size")

    def __init__(self, value: Tensor, *, reach: bool, sample: bool = False) -> None:
        value = value.detach()
        # Two examples stand for the batch, of which one may be blank: the step needs the order of magnitude only.
        self.size = root_mean_square(
            value[:: (len(value) + 1) // 2] if sample and value.dim() and len(value) else value
        )
        self.reach = torch.linalg.vector_norm(value, ord=math.inf) if reach else None
        self.numel, self.eps = value.numel(), torch.finfo(value.dtype).eps
        self.direction: Tensor | None = None
        self.norm: Tensor | None = None

    def take(self, grad: Tensor, norm: Norm, *, directed: bool) -> None:
        """Note the norm of the gradient, and its direction if that is wanted."""
        if norm == "l2":
            self.direction, self.norm = unit(grad) if directed else None, torch.linalg.vector_norm(grad)
        elif directed:
            self.direction, self.norm = signs_and_l1(grad)
        else:
            self.norm = l1_norm(grad)


class Call:
    """One call of a watched function in the first pass: what the second needs to run it again."""

    __slots__ = ("func", "inplace", "memo", "output")

    def __init__(self, func: Function, memo: Any, *, inplace: bool) -> None:
        self.func, self.memo, self.inplace = func, memo, inplace
        self.output: Operand | None = None


class Watch(Mode):
    """Sees every watched call of a closure in order, and knows a recomputed one from a new one.

    `short` is a format with too few digits for a finite difference, if the closure computes in one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.order = CallOrder()
        self.short: torch.dtype | None = None

    def watching(self, wanted: bool) -> contextlib.AbstractContextManager[Any]:
        """Watch, or do not."""
        return self if wanted else contextlib.nullcontext()

    def called(self, func: Function, args: Arguments, kwargs: Named) -> Any:
        """Run the function, as one that matters or plainly."""
        if torch.is_grad_enabled() and (func in KINKS or func in ACTIVATIONS):
            out = self.watched(func, args, kwargs)
        else:
            out = func(*args, **kwargs)
        if isinstance(out, Tensor) and out.dtype in SHORT:
            self.short = out.dtype
        return out

    @abstractmethod
    def watched(self, func: Function, args: Arguments, kwargs: Named) -> Any:
        """Run a function that matters."""


class FirstPass(Watch):
    """Records kinks, and hooks every activation output to catch its gradient's direction."""

    def __init__(self, norm: Norm, *, directions: bool, kinks: bool, reach: bool = False) -> None:
        super().__init__()
        self.norm, self.directions, self.kinks, self.reach = norm, directions, kinks, reach
        self.calls: list[Call] = []

    @property
    def activations(self) -> list[Operand]:
        """The activation outputs that the loss depends on, in the order of the calls."""
        return [call.output for call in self.calls if call.output is not None and call.output.norm is not None]

    def watched(self, func: Function, args: Arguments, kwargs: Named) -> Any:
        """Run the function, note its pieces, and hook its output."""
        if recomputing():
            return func(*args, **kwargs)
        kink = KINKS.get(func) if self.kinks else None
        out, memo = kink.record(func, args, kwargs) if kink is not None else (func(*args, **kwargs), None)
        call = Call(func, memo, inplace=bool(args) and out is args[0])
        self.order.advance()
        self.calls.append(call)
        if func in ACTIVATIONS and isinstance(out, Tensor) and out.is_floating_point():
            out = with_graph(out)
            call.output = operand = Operand(out, reach=self.reach, sample=True)
            out.register_hook(lambda grad: operand.take(grad, self.norm, directed=self.directions))  # type: ignore[no-untyped-call]
        return out


class SecondPass(Watch):
    """Replays the kinks of a first pass and shifts every activation output by its factor times its direction."""

    def __init__(self, first: FirstPass, factors: dict[Operand, float]) -> None:
        super().__init__()
        self.calls, self.factors = first.calls, factors

    def watched(self, func: Function, args: Arguments, kwargs: Named) -> Any:
        """Run the function on its recorded pieces, then shift its output."""
        call = self._next(func)
        kink = KINKS[func] if call.memo is not None else None
        shift, factor = self._shift_of(call)
        if kink is RECTIFIED:  # the common case: in one go, without a copy
            together = shift is not None and shift.dtype == torch.int8
            out = gate(args[0], call.memo, inplace=call.inplace, shift=shift if together else None, by=factor)
            return out if together or shift is None else out.add_(shift, alpha=factor)
        given = (args[0].clone(), *args[1:]) if call.inplace else args
        out = func(*given, **kwargs) if kink is None else kink.replay(call.memo, given, kwargs)
        out = out if shift is None else torch.add(out, shift, alpha=factor)
        return overwrite(args[0], out) if call.inplace else out

    def _next(self, func: Function) -> Call:
        index = self.order.position()
        if index >= len(self.calls) or self.calls[index].func is not func:
            raise PenaltyError(
                "the second pass took another way through the model than the first; the closure must do the same "
                "each time it is called with the same random state"
            )
        return self.calls[index]

    def _shift_of(self, call: Call) -> tuple[Tensor | None, float]:
        """Return the direction to move the call's output in, and how far."""
        output = call.output
        factor = self.factors.get(output, 0.0) if output is not None else 0.0
        if output is None or not factor:
            return None, 0.0
        shift = output.direction
        if not self.order.in_region():
            output.direction = None  # one byte less per entry while the graph grows
        return shift, factor
