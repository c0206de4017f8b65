"""`prepare`: capture, fold, find the points and their ranges, and return a network with a width switch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn

from anybit.errors import CaptureError, RangeError
from anybit.quant.capture import Example, call_arguments, capture, evaluating
from anybit.quant.fold import fold_graph
from anybit.quant.moments import Moments, propagate
from anybit.quant.network import QuantizedNetwork
from anybit.quant.ops import attribute
from anybit.quant.points import (
    ActivationPoint,
    InputPoint,
    Point,
    WeightPoint,
    find_points,
    point_name,
    weight_axis,
)
from anybit.quant.ranges import calibrate, from_moments
from anybit.spec import FLOAT, QuantSpec, Range

TOLERANCE = 1e-4
"""Largest difference, relative to the largest output, that folding may make at full precision."""


def prepare(
    model: nn.Module,
    example_input: Example,
    *,
    calibration: Iterable[Any] | None = None,
    method: str = "min-max",
    input_range: tuple[float, float] | None = None,
    symmetric: bool = True,
    per_channel: bool = False,
    sigmas: float = 6.0,
) -> QuantizedNetwork:
    """Return a copy of `model` that runs at any bit width; `model` itself stays as it is.

    Args:
        model: Any module that `torch.export` can follow.
        example_input: A tensor, a tuple of positional arguments, or a dict of keyword arguments. Only the shapes
            matter; the first dimension is the batch.
        calibration: A loader whose batches set the activation ranges. Without it they come from batch norm.
        method: How calibration sets a range: "min-max".
        input_range: The interval of the network's input, which is then quantized to 8 bits (or more, with wider
            activations). Without it the input stays in floating point unless there is calibration data.
        symmetric: Grids with zero in the middle (the paper) or fitted to both ends.
        per_channel: One scale per output channel of a weight instead of one per tensor (the paper).
        sigmas: How many standard deviations around the mean a range from batch norm covers.

    Raises:
        CaptureError: The network cannot be captured; the message names the module and the reason.
        RangeError: Some points are reached by no batch norm and there is no calibration data.
    """
    body = capture(model, example_input)
    known = fold_graph(body)
    moments = propagate(body, known, n=sigmas)
    points, missing = _insert(body, moments, symmetric=symmetric, per_channel=per_channel)
    network = QuantizedNetwork(body, points)
    _check_same(model, network, example_input)
    inputs = [p for p in points if isinstance(p, InputPoint)]
    if input_range is not None:
        for point in inputs:
            point.set_range(Range(*input_range, "given by the user"))
    if calibration is not None:
        wanted = [p for p in points if isinstance(p, ActivationPoint) and p.range is None]
        calibrate(network, wanted, calibration, method=method)
    elif missing:
        raise RangeError(
            "no batch norm tells the range of these points; pass calibration=loader, a few hundred inputs will do",
            missing,
        )
    return network


def _insert(
    body: fx.GraphModule, moments: dict[fx.Node, Moments], *, symmetric: bool, per_channel: bool
) -> tuple[list[Point], list[str]]:
    """Put a point module at every place to quantize; return the points and the names of those without range."""
    weights, activations = find_points(body)
    taken: set[str] = set()
    points: list[Point] = []
    missing: list[str] = []
    for node in list(body.graph.nodes):
        point: Point
        if node in weights:
            axis = weight_axis(weights[node], per_channel=per_channel)
            spec = QuantSpec(FLOAT, symmetric, axis=axis)
            point = WeightPoint(point_name(node, taken), attribute(body, node), spec)
        elif node in activations:
            kind = InputPoint if node.op == "placeholder" else ActivationPoint
            point = kind(point_name(node, taken), QuantSpec(FLOAT, symmetric), node.meta["val"].shape)
            if node in moments:
                point.set_range(from_moments(moments[node]))
            elif not isinstance(point, InputPoint):
                missing.append(point.name)
        else:
            continue
        _splice(body, node, point, len(points))
        points.append(point)
    body.graph.eliminate_dead_code()
    body.delete_all_unused_submodules()
    body.recompile()
    _detach(body)
    return points, missing


def _splice(body: fx.GraphModule, node: fx.Node, point: Point, index: int) -> None:
    target = f"{point.kind}_{index}"
    body.add_submodule(target, point)
    users = list(node.users)
    with body.graph.inserting_after(node):
        inner = body.graph.call_module(target, () if isinstance(point, WeightPoint) else (node,))
    inner.meta["val"] = node.meta.get("val")
    for user in users:
        user.replace_input_with(node, inner)


@torch.no_grad()
def _detach(body: fx.GraphModule) -> None:
    """Give the network parameters and buffers of its own, so that training the original leaves it alone."""
    copies: dict[int, Any] = {}
    for module in body.modules():
        if isinstance(module, Point):
            continue
        for name, value in list(module.named_parameters(recurse=False)):
            copy = copies.setdefault(id(value), nn.Parameter(value.detach().clone(), value.requires_grad))
            setattr(module, name, copy)
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, copies.setdefault(id(buffer), buffer.detach().clone()))


@torch.no_grad()
def _check_same(model: nn.Module, network: QuantizedNetwork, example: Example) -> None:
    """Refuse a capture that computes something else than the model did."""
    args, kwargs = call_arguments(example)
    with evaluating(model):
        want = torch.utils._pytree.tree_leaves(model(*args, **kwargs))
    got = torch.utils._pytree.tree_leaves(network(*args, **kwargs))
    for a, b in zip(want, got, strict=True):
        if isinstance(a, Tensor) and a.is_floating_point() and a.numel():
            scale = float(a.abs().max()) or 1.0
            error = float((a - b).abs().max()) / scale
            if not error <= TOLERANCE:
                raise CaptureError(
                    f"the captured network differs from the model by {error:.1e} of its largest output",
                    [
                        f"{type(model).__name__}: does its forward pass depend on random numbers, on state, "
                        "or on the values of its input? Are its weights finite?"
                    ],
                )
