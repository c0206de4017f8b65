"""`prepare`: capture, fold, find the points and their ranges, and return a network with a width switch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from anybit.errors import CaptureError, RangeError, SpecError
from anybit.quant.bias import CorrectedBias
from anybit.quant.capture import Example, call_arguments, capture, evaluating
from anybit.quant.equalize import equalize
from anybit.quant.fold import fold_graph
from anybit.quant.moments import Moments, propagate
from anybit.quant.network import QuantizedNetwork
from anybit.quant.ops import (
    CONVOLUTIONS,
    FRESH,
    TRANSPOSED_CONVOLUTIONS,
    WEIGHTED,
    attribute,
    delete_attribute,
    groups_of,
)
from anybit.quant.points import (
    AccumulatorPoint,
    ActivationPoint,
    InputPoint,
    Point,
    WeightCache,
    WeightPoint,
)
from anybit.quant.ranges import calibrate, from_moments, join
from anybit.quant.signature import signature
from anybit.quant.sites import Sites, ends_of, find_sites, point_name
from anybit.quant.weights import Rule
from anybit.quant.whole_bias import round_biases
from anybit.spec import FLOAT, QuantSpec, Range

TOLERANCE = 1e-4
"""Largest difference, relative to the largest output, that folding may make at full precision."""

HELPERS = ("equalize", "bias", "sums", "clip")
"""What can be done for accuracy without data: see `prepare`."""

ENDS = {"same": None, "8-bit": 8, "float": FLOAT}
"""How the first and the last layer can be treated, and the width that they then never go below."""

Interval = tuple[float, float]


def prepare(
    model: nn.Module,
    example_input: Example,
    *,
    calibration: Iterable[Any] | None = None,
    method: str = "min-max",
    input_range: Interval | Mapping[str, Interval] | None = None,
    symmetric: bool = True,
    per_channel: bool = False,
    sigmas: float = 6.0,
    ends: Literal["same", "8-bit", "float"] = "same",
    helpers: str | Iterable[str] = (),
) -> QuantizedNetwork:
    """Return a copy of `model` that runs at any bit width; `model` itself stays as it is.

    Args:
        model: Any module that `torch.export` can follow.
        example_input: A tensor, a tuple of positional arguments, or a dict of keyword arguments. Only the shapes
            matter; the first dimension is the batch.
        calibration: A loader whose batches set the activation ranges. Without it they come from batch norm.
        method: How calibration sets a range: "min-max", "percentile" (99.99 % of the values), or "mse" (the
            smallest squared error, for each width its own range).
        input_range: The interval of the network's input, which is then quantized to 8 bits (or more, with wider
            activations); for several inputs a dict by name. Without it the input stays in floating point unless
            there is calibration data.
        symmetric: Grids with zero in the middle (the paper) or fitted to both ends.
        per_channel: One scale per output channel of a weight instead of one per tensor (the paper).
        sigmas: How many standard deviations around the mean a range from batch norm covers.
        ends: How the first and last layers are treated: like the rest ("same", the paper), at 8 bits or more
            ("8-bit"), or never quantized ("float").
        helpers: What to do for accuracy without data, one or several of: "equalize" (move scale from channel to
            channel between layers; the function stays the same), "bias" (take back the shift that rounding causes in
            each layer's mean), "sums" (round so that the errors of each kernel and channel add up to nearly zero),
            "clip" (the weight range with the smallest squared error). Or "all".

    Raises:
        CaptureError: The network cannot be captured; the message names the modules and the reasons.
        RangeError: Some points are reached by no batch norm and there is no calibration data.
    """
    chosen = _helpers(helpers)
    if ends not in ENDS:
        raise SpecError(f"ends is one of {', '.join(ENDS)}; got {ends!r}")
    body = capture(model, example_input)
    known = fold_graph(body)
    if "equalize" in chosen:
        equalize(body, known)
    moments = propagate(body, known, n=sigmas)
    sites = find_sites(body)
    placed = _place(body, sites, moments, symmetric=symmetric, per_channel=per_channel, helpers=chosen)
    _raise_ends(body, sites, placed, ENDS[ends])
    if "bias" in chosen:
        _correct_biases(body, sites, placed, moments)
    _splice_all(body, placed)
    round_biases(body)
    points = list(placed.values())
    network = QuantizedNetwork(body, points, signature(*call_arguments(example_input)))
    _check_same(model, network, example_input)
    _set_ranges(network, input_range, calibration, method)
    for group in sites.joined:
        join([p for p in (placed[node] for node in group) if isinstance(p, ActivationPoint)])
    return network


def _helpers(helpers: str | Iterable[str]) -> set[str]:
    names = [helpers] if isinstance(helpers, str) else list(helpers)
    if names == ["all"]:
        return set(HELPERS)
    if unknown := [name for name in names if name not in HELPERS]:
        raise SpecError(f"a helper is one of {', '.join(HELPERS)}, or all; got {unknown[0]!r}")
    return set(names)


def _place(
    body: fx.GraphModule,
    sites: Sites,
    moments: dict[fx.Node, Moments],
    *,
    symmetric: bool,
    per_channel: bool,
    helpers: set[str],
) -> dict[fx.Node, Point]:
    """Make a point for every place to quantize, in the order of the network, with the ranges that are known."""
    taken: set[str] = set()
    cache = WeightCache()
    placed: dict[fx.Node, Point] = {}
    position = {node: index for index, node in enumerate(body.graph.nodes)}
    # A weight is listed with the layer that uses it first, not where the graph declares it.
    for node in sorted(body.graph.nodes, key=lambda n: position[sites.weights.get(n, [n])[0]]):
        if node in sites.weights:
            axis = sites.axis(node)
            spec = QuantSpec(FLOAT, symmetric, axis=axis if per_channel else None)
            weight = attribute(body, node)
            groups = groups_of(sites.weights[node][0])
            rule = Rule("sums" in helpers and axis is not None, "clip" in helpers, axis or 0, groups)
            placed[node] = WeightPoint(point_name(node, taken), weight, spec, cache=cache, rule=rule)
        elif node in sites.activations or node in sites.accumulators:
            kind = AccumulatorPoint if node in sites.accumulators else ActivationPoint
            kind = InputPoint if node.op == "placeholder" else kind
            fresh = node.target in FRESH
            # The batch dimension is free: it has a name instead of a size.
            shape = [size if isinstance(size, int) else "N" for size in node.meta["val"].shape]
            point = kind(point_name(node, taken), QuantSpec(FLOAT, symmetric), shape, fresh=fresh)
            if node in moments:
                point.set_range(from_moments(moments[node]))
            placed[node] = point
    return placed


def _raise_ends(body: fx.GraphModule, sites: Sites, placed: dict[fx.Node, Point], floor: int | None) -> None:
    """Give the points of the first and last layers a width that they do not go below."""
    if floor is None:
        return
    outer = ends_of(body)
    for node, layers in [*sites.weights.items(), *sites.activations.items()]:
        if outer.intersection(layers):
            placed[node].floor = max(placed[node].floor, floor)


def _correct_biases(
    body: fx.GraphModule, sites: Sites, placed: dict[fx.Node, Point], moments: dict[fx.Node, Moments]
) -> None:
    """Put a corrected bias into every layer whose weight is quantized and whose input's mean is known."""
    for weight, layers in sites.weights.items():
        for layer in layers:
            x = moments.get(layer.args[0]) if isinstance(layer.args[0], fx.Node) else None
            if layer.target not in WEIGHTED or layer.args[1] is not weight or x is None or bool(x.mean.isnan().any()):
                continue
            dims = layer.args[0].meta["val"].dim()  # type: ignore[union-attr]
            if layer.target not in CONVOLUTIONS and dims != 2:
                continue  # the channels are not in dimension 1
            point = placed[weight]
            assert isinstance(point, WeightPoint)
            transposed = layer.target in TRANSPOSED_CONVOLUTIONS
            groups = groups_of(layer)
            outs = point.master.shape[1] * groups if transposed else point.master.shape[0]
            ins = point.master.shape[0] if transposed else point.master.shape[1] * groups
            old = layer.args[2] if len(layer.args) > 2 else None
            bias = attribute(body, old) if isinstance(old, fx.Node) else point.master.detach().new_zeros(outs)
            # A bias that two layers share stays one parameter.
            own = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias)
            mean = x.mean.expand(ins) / (_strides(layer) if transposed else 1)
            module = CorrectedBias(point, own, mean, groups=groups, transposed=transposed)
            target = f"bias_{len(list(body.children()))}"
            body.add_submodule(target, module)
            with body.graph.inserting_before(layer):
                inner = body.graph.call_module(target)
            inner.meta["val"] = bias
            layer.args = (*layer.args[:2], inner, *layer.args[3:])


def _strides(layer: fx.Node) -> int:
    """Return of how many outputs of a transposed convolution one sees a given tap."""
    strides: Any = layer.args[3] if len(layer.args) > 3 else [1]
    return math.prod(strides)


def _splice_all(body: fx.GraphModule, placed: dict[fx.Node, Point]) -> None:
    for index, (node, point) in enumerate(placed.items()):
        _splice(body, node, point, index)
    body.graph.eliminate_dead_code()
    used = {str(node.target) for node in body.graph.nodes if node.op == "get_attr"}
    for node, point in placed.items():
        if isinstance(point, WeightPoint) and str(node.target) not in used:
            delete_attribute(body, str(node.target))  # the point has the weight now
    body.delete_all_unused_submodules()
    body.recompile()
    _detach(body)


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


def _set_ranges(
    network: QuantizedNetwork,
    input_range: Interval | Mapping[str, Interval] | None,
    calibration: Iterable[Any] | None,
    method: str,
) -> None:
    inputs = {p.name: p for p in network.points if isinstance(p, InputPoint)}
    given = input_range if isinstance(input_range, Mapping) else dict.fromkeys(inputs, input_range)
    for name, interval in given.items():
        if name not in inputs:
            raise SpecError(f"no input {name!r} feeds a layer; those that do are {', '.join(inputs) or 'none'}")
        if interval is not None:
            inputs[name].set_range(Range(interval[0], interval[1], "given by the user"))
    points = [p for p in network.points if isinstance(p, ActivationPoint)]
    if calibration is not None:
        wanted = [p for p in points if not (isinstance(p, InputPoint) and p.range is not None)]
        calibrate(network, wanted, calibration, method=method)
    missing = [p.name for p in points if p.range is None and not isinstance(p, InputPoint | AccumulatorPoint)]
    if missing:
        raise RangeError(
            "no batch norm tells the range of these points; pass calibration=loader, a few hundred inputs will do",
            missing,
        )


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
