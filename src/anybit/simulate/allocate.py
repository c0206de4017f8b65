"""Mixed widths under a budget, with labels or without: a share of the cost for each weight and width, then a knapsack.

Two ways to know the shares. The first-order bound: rounding moves no entry of a weight by more than half a bin δ, so to
first order a layer adds at most `δ ‖∇L‖₁` to the loss (the paper's section 3); where there are no labels, the network's
own predictions stand in. Or the error of the network's output with one weight rounded, measured for each: no labels, no
loss, and more accurate. The widths that make the sum smallest are a knapsack problem with a handful of choices per
layer, small enough to solve exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from anybit.artifact import output_error
from anybit.artifact.latency import Clock, choose_in_time
from anybit.artifact.reconstruct import feeds_of
from anybit.errors import DataError, SpecError
from anybit.graph.from_torch import to_numpy
from anybit.plan.allocation import Allocation, Unit, check_choices, choose
from anybit.plan.codes import limits
from anybit.plan.grid import weight_grid
from anybit.simulate.capture import moved_to
from anybit.spec import FLOAT, Bits

if TYPE_CHECKING:
    from anybit.simulate.network import QuantizedNetwork

Loss = Callable[[Any, Any], Tensor]


def half_bin(net: QuantizedNetwork, name: str, bits: int) -> Tensor:
    """Return the largest error that rounding to a width makes in an entry of a weight, per tensor or per channel."""
    point, master = net.plan.weight(name), net.weights[name]
    ends = limits(to_numpy(master).astype(np.float32, copy=False), point, bits)
    return torch.from_numpy(np.asarray(weight_grid(*ends, point.spec(bits)).scale)).to(master) / 2


def bounds(
    net: QuantizedNetwork, loader: Iterable[Any], widths: Sequence[int], *, loss: Loss = F.cross_entropy
) -> dict[str, list[float]]:
    """Return for each weight and width the most that rounding it adds to the loss, to first order.

    The gradient's l1 norm is taken batch by batch and averaged: at a minimum the mean gradient vanishes, those of the
    batches do not.
    """
    weights = net.weights
    halves = {name: [half_bin(net, name, bits) for bits in widths] for name in weights}
    nothing = torch.zeros((), device=next(iter(weights.values())).device)
    totals = {name: [nothing] * len(widths) for name in weights}
    batches = 0
    with net.at(weights=FLOAT, activations=FLOAT):
        for x, y in _pairs(loader, net):
            with torch.enable_grad():
                value = loss(net(x), y)
                grads = torch.autograd.grad(value, list(weights.values()), allow_unused=True)
            for name, grad in zip(weights, grads, strict=True):
                for index, half in enumerate(halves[name]):
                    totals[name][index] = totals[name][index] + (0 if grad is None else (grad.abs() * half).sum())
            batches += 1
    return {name: (torch.stack(values) / batches).tolist() for name, values in totals.items()}


def _pairs(loader: Iterable[Any], net: QuantizedNetwork) -> Iterable[tuple[Any, Any]]:
    """Yield inputs and targets; where there are none, what the network itself predicts in floating point."""
    device = next(net.parameters()).device
    empty = True
    for batch in loader:
        empty = False
        if isinstance(batch, tuple | list) and len(batch) == 2 and batch[1] is not None:
            yield moved_to(device, batch[0]), moved_to(device, batch[1])
            continue
        x = moved_to(device, batch[0] if isinstance(batch, tuple | list) else batch)
        with torch.no_grad(), net.at(weights=FLOAT, activations=FLOAT):
            scores = net(x)
        if not isinstance(scores, Tensor) or scores.dim() < 2 or not scores.is_floating_point():
            raise DataError('this output is no scores of classes, so it gives no labels; use by="output"')
        yield x, scores.argmax(1)
    if empty:
        raise DataError("allocation saw no data; the loader yields at least one batch")


@torch.no_grad()
def mean_loss(net: QuantizedNetwork, loader: Iterable[Any], loss: Loss) -> float:
    """Return the loss over a loader, batches weighted by their size."""
    total, count = 0.0, 0
    for x, y in _pairs(loader, net):
        total += float(loss(net(x), y)) * len(y)
        count += len(y)
    return total / count


def allocate(
    net: QuantizedNetwork,
    *,
    budget: float,
    loader: Iterable[Any],
    unit: Unit = "bits",
    activations: int = 8,
    widths: Sequence[int] = (2, 3, 4, 5, 6, 7, 8),
    loss: Loss = F.cross_entropy,
    by: Literal["bound", "output"] = "bound",
    threads: int | None = None,
) -> Allocation:
    """Choose a width for every weight so that the harm done is smallest under a budget, which is never exceeded.

    Args:
        net: A prepared network; its widths are not changed.
        budget: How much the weights may take: bits per weight on average, or bytes in all; or how many seconds a run of
            the first input may take in ONNX Runtime on this machine, which is measured.
        loader: Pairs of inputs and targets, or inputs alone, the same ones each time it is iterated; a few hundred
            examples will do. Without targets the network's own predictions stand in for them.
        unit: What the budget counts: "bits" (on average), "bytes" or "seconds".
        activations: The width of all activations when the loss is measured.
        widths: What to choose from.
        loss: A function of the network's output and the targets.
        by: What harm is: "bound" (the first-order bound on the loss) or "output" (the squared error of the output with
            one weight rounded at a time; needs no labels and takes as many runs as there are weights and widths).
        threads: How many threads a run may use when it is timed; all cores by default.
    """
    choices = check_choices(widths, unit, activations)
    if by == "output":
        inputs = [batch[0] if isinstance(batch, tuple | list) else batch for batch in loader]
        return output_error.allocate(
            net, inputs, budget=budget, unit=unit, activations=activations, widths=choices, threads=threads
        )
    if by != "bound":
        raise SpecError(f'by is "bound" (of the loss) or "output" (its error); got {by!r}')
    costs, seconds = bounds(net, loader, choices, loss=loss), None
    if unit == "seconds":
        master = net.as_master()
        clock = Clock.of(master, next(feeds_of(master, loader)), activations, threads)
        found, seconds = choose_in_time(clock, costs, choices, budget)
    else:
        found = choose(net.plan.weights, costs, choices, budget, unit)
    layers = {name: Bits(width, activations) for name, width in found.widths.items()}
    with net.at(weights=FLOAT, activations=FLOAT):
        before = mean_loss(net, loader, loss)
    with net.at(weights=choices[-1], activations=activations, layers=layers):
        after = mean_loss(net, loader, loss)
    return Allocation(layers, found.average, found.size, found.cost, before, after, seconds=seconds)
