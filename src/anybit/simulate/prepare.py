"""`prepare`: capture, plan, and return a network with a width switch that executes the plan."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sized
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from anybit.artifact.adopt import given_intervals
from anybit.errors import CaptureError, SpecError
from anybit.graph.from_torch import FRESH, attribute, read_torch, value_name
from anybit.graph.view import Graph
from anybit.plan.build import Built, Interval, Settings, build, check_ranges, joined, unknown, with_inputs
from anybit.plan.observe import MADE_UP, Calibration
from anybit.plan.points import Activation as ActivationPoint
from anybit.plan.points import Plan
from anybit.simulate.capture import Example, call_arguments, capture, evaluating, moved_to
from anybit.simulate.constants import fold_constants
from anybit.simulate.few_runs import Call, calls_of, made_up_calls, with_more_bits
from anybit.simulate.modules import Activation, Bias, Weight, executors
from anybit.simulate.network import QuantizedNetwork
from anybit.simulate.signature import output_names, signature

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 2e-1}
"""Largest difference, relative to the largest output, that folding may make at full precision."""

FAINT = 1e-30
"""Outputs below this are nothing: few of their digits are left."""
REAL_INPUTS = "calibration=loader (--calibrate 256 in a shell), a few hundred inputs will do"


def prepare(
    model: nn.Module,
    example_input: Example,
    *,
    preset: str = "default",
    calibration: Iterable[Any] | None = None,
    method: str | None = None,
    input_range: Interval | Mapping[str, Interval] | None = None,
    symmetric: bool | None = None,
    per_channel: bool | None = None,
    sigmas: float | None = None,
    sensitive: Literal["same", "8-bit", "measured", "float"] | None = None,
    helpers: str | Iterable[str] | None = None,
) -> QuantizedNetwork:
    """Return a copy of `model` that runs at any bit width; `model` itself stays as it is.

    Args:
        model: Any module that `torch.export` can follow, on any device.
        example_input: A tensor, a tuple of positional arguments, or a dict of keyword arguments. The first dimension
            is the batch, and other sizes stay free where the network allows it. Only the shapes matter, unless ranges
            have to be guessed: then its numbers say how large inputs are.
        preset: What the settings below are unless you give them: "default" is what does best on real networks, "paper"
            the protocol of the paper (one symmetric grid per tensor, 6 standard deviations, every layer alike).
        calibration: A loader whose batches set the activation ranges. Without it they come from normalization layers
            and, where those tell nothing, from made-up inputs like the example, which a warning and the plan say.
        method: How calibration sets a range: "mse" (the smallest squared error, for each width its own range; the
            default), "min-max" (the paper), or "percentile" (99.99 % of the values).
        input_range: The interval of the network's input, which is then quantized to 8 bits (or more, with wider
            activations); for several inputs a dict by name. Without it the input stays in floating point unless
            there is calibration data.
        symmetric: Grids with zero in the middle (the paper) or fitted to both ends (the default).
        per_channel: One scale per output channel of a weight (the default) or one per tensor (the paper).
        sigmas: How many standard deviations around the mean a range from batch norm covers: 6 in the paper; by default
            for each width as many as give the smallest expected error.
        sensitive: How the first and last layers, depthwise ones and those of squeeze-and-excite are treated: at 8 bits
            or more ("8-bit"), like the rest ("same", the paper), or never quantized ("float"). "measured", the default,
            is "8-bit" and, with calibration, more bits for the points that cost the outputs most: 16 at W8A8, 8 for
            weights of 4, for at most a tenth of the multiplications; the plan says which.
        helpers: What to do for accuracy without data, one or several of: "equalize" (move scale from channel to
            channel between layers; the function stays the same), "bias" (take back the shift that rounding causes in
            each layer's mean), "sums" (round so that the errors of each kernel and channel add up to nearly zero),
            "clip" (the weight range with the smallest squared error). Or "all".

    Raises:
        CaptureError: The network cannot be captured; the message names the modules and the reasons.
        RangeError: With `preset="paper"`: no normalization reaches some points, and there is no calibration data.
    """
    settings = Settings.of(
        preset, method=method, symmetric=symmetric, per_channel=per_channel, sigmas=sigmas, sensitive=sensitive,
        helpers=helpers,
    )  # fmt: skip
    body = capture(model, example_input)
    fold_constants(body)
    graph = read_torch(body)
    built = build(graph, settings)
    built = replace(built, plan=_beside_outputs(built.plan, body))
    apply_changes(body, graph)
    splice(body, graph, built)
    network = QuantizedNetwork(body, built.plan, signature(body, *call_arguments(example_input)))
    network.folded = {layer.inputs[1]: norm.path for norm, layer in graph.removed}
    _check_same(model, network, example_input)
    plan = with_inputs(built.plan, input_range)
    some: list[Call] = []
    clipped = plan
    if calibration is not None:
        total = len(calibration) if isinstance(calibration, Sized) else 0
        watch = Calibration(plan, settings.method, fed=built.fed)
        plan, clipped = _calibrated(network, watch, calls_of(calibration, network, some), total)
    elif preset != "paper" and unknown(plan):
        plan = _guessed(network, plan, settings.method, call_arguments(example_input))
    check_ranges(plan, advice=f"pass {REAL_INPUTS}")
    network.plan = joined(plan, built.joined)
    if some and settings.sensitive == "measured":
        network.plan = with_more_bits(network, joined(clipped, built.joined), graph, built, some)
    return network


def _guessed(network: QuantizedNetwork, plan: Plan, method: str, example: Call) -> Plan:
    """Return the plan with ranges from calls that are made up, where nothing else tells them, and say so."""
    calls = list(made_up_calls(network.body, example, given_intervals(plan)))
    found, _ = _calibrated(network, Calibration(plan, method, made_up=True), calls, len(calls))
    guesses = [a.name for a in found.activations if a.ranges and a.ranges[0][1].source == MADE_UP]
    more = len(guesses) - 1
    warnings.warn(
        f"no normalization tells the range of {guesses[0]}{f' and {more} more' if more else ''}: guessed from made-up "
        f"inputs; to be sure pass {REAL_INPUTS}",
        stacklevel=3,
    )
    return found


def _beside_outputs(plan: Plan, body: fx.GraphModule) -> Plan:
    """Return the plan with other places in a file for values that are called like one of the network's outputs."""
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(body.graph.output_node().args) if leaf is not None]
    taken = set(output_names(body, len(leaves)))
    points = (
        replace(p, value=f"{p.name}.value") if isinstance(p, ActivationPoint) and p.place in taken else p
        for p in plan.points
    )
    return replace(plan, points=tuple(points))


@torch.no_grad()
def apply_changes(body: fx.GraphModule, graph: Graph) -> None:
    """Bring a captured network into line with what passes did to its view."""
    like = next(iter(body.parameters()), None)
    for name in graph.changed:
        owner, _, last = name.rpartition(".")
        old = getattr(body.get_submodule(owner), last, None)
        # A new bias takes after the weight beside it.
        near = old if isinstance(old, Tensor) else like
        assert near is not None
        new = torch.from_numpy(graph.constants[name]).to(near.device, near.dtype)
        setattr(body.get_submodule(owner), last, nn.Parameter(new, near.requires_grad))
    for node, layer in graph.removed:
        node.origin.replace_all_uses_with(layer.origin)
        norm = node.origin.args[0]
        body.graph.erase_node(node.origin)
        body.graph.erase_node(norm)
    for node in graph.nodes:
        bias = graph.bias(node) if node.kind == "layer" else None
        if bias in graph.changed and bias is not None:
            with body.graph.inserting_before(node.origin):
                inner = body.graph.get_attr(bias)
            inner.meta["val"] = attribute(body, bias)
            node.origin.args = (*node.origin.args[:2], inner, *node.origin.args[3:])
    body.graph.eliminate_dead_code()


def splice(body: fx.GraphModule, graph: Graph, built: Built) -> None:
    """Put modules that execute the plan in place of weights and biases and behind activations."""
    makers = {node.output: node.origin for node in graph.nodes}
    holders: dict[str, list[fx.Node]] = {}
    for node in body.graph.nodes:
        holders.setdefault(value_name(node), []).append(node)
    parts: dict[str, Any] = {}
    for index, point in enumerate(built.plan.points):
        place = built.places[point.name]
        if point.kind == "weight":
            tensor = _finite(body, place)
            parts[point.name] = Weight(point, tensor)  # type: ignore[arg-type]
            for node in holders[place]:
                _replace(body, node, f"weight_{index}", parts[point.name], (), list(node.users))
        else:
            node = makers.get(place) or holders[place][0]
            parts[point.name] = Activation(point, fresh=node.target in FRESH)  # type: ignore[arg-type]
            _replace(body, node, f"{point.kind}_{index}", parts[point.name], (node,), list(node.users))
    shared: dict[int, nn.Parameter] = {}
    for index, bias in enumerate(built.plan.biases):
        layer = built.layers[bias.name].origin
        tensor = _finite(body, built.places[bias.name])
        own = shared.setdefault(id(tensor), nn.Parameter(tensor.detach().clone(), tensor.requires_grad))
        module = Bias(bias, own, parts[bias.weight], parts.get(bias.input))
        _replace(body, layer.args[2], f"bias_{index}", module, (), [layer])
    body.graph.eliminate_dead_code()
    used = {str(node.target) for node in body.graph.nodes if node.op == "get_attr"}
    for name in {*(name for name, _ in body.named_parameters()), *(name for name, _ in body.named_buffers())}:
        owner, _, last = name.rpartition(".")
        if name not in used and not isinstance(body.get_submodule(owner), Weight | Bias):
            delattr(body.get_submodule(owner), last)  # a module has it now
    body.delete_all_unused_submodules()
    body.graph.lint()
    body.recompile()
    _detach(body)


def _replace(
    body: fx.GraphModule, node: fx.Node, target: str, module: nn.Module, args: tuple[fx.Node, ...], users: list[fx.Node]
) -> None:
    """Let users of a node see what a module makes instead."""
    body.add_submodule(target, module)
    with body.graph.inserting_after(node):
        inner = body.graph.call_module(target, args)
    inner.meta["val"] = node.meta.get("val")
    for user in users:
        user.replace_input_with(node, inner)


def _finite(body: fx.GraphModule, target: str) -> Tensor:
    value = attribute(body, target)
    if not bool(torch.isfinite(value).all()):
        raise SpecError(f"{target} has infinite or NaN entries; a network with such weights cannot be quantized")
    return value


@torch.no_grad()
def _detach(body: fx.GraphModule) -> None:
    """Give the network parameters and buffers of its own, so that training the original leaves it alone."""
    copies: dict[int, Any] = {}
    for module in body.modules():
        if isinstance(module, Weight | Bias):
            continue
        for name, value in list(module.named_parameters(recurse=False)):
            copy = copies.setdefault(id(value), nn.Parameter(value.detach().clone(), value.requires_grad))
            setattr(module, name, copy)
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, copies.setdefault(id(buffer), buffer.detach().clone()))


@torch.no_grad()
def _calibrated(network: QuantizedNetwork, watch: Calibration, calls: Iterable[Call], total: int) -> tuple[Plan, Plan]:
    """Call the network and return its plan with the ranges that were found, and one that clips more."""
    from anybit.common.bars import progress_bars

    watched = [m for n, m in executors(network.body).items() if n in watch.observers]
    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    for module in watched:
        module.calibration = watch
    try:
        with progress_bars() as start:
            advance = start("calibrating", total)
            for args, kwargs in calls:
                network(*moved_to(device, args), **moved_to(device, kwargs))
                advance(1)
    finally:
        for module in watched:
            module.calibration = None
    return watch.both()


@torch.no_grad()
def _check_same(model: nn.Module, network: QuantizedNetwork, example: Example) -> None:
    """Refuse a capture that computes something else than the model did."""
    args, kwargs = call_arguments(example)
    with evaluating(model):
        want = torch.utils._pytree.tree_leaves(model(*args, **kwargs))
    got = torch.utils._pytree.tree_leaves(network(*args, **kwargs))
    for a, b in zip(want, got, strict=True):
        if isinstance(a, Tensor) and a.is_floating_point() and a.numel():
            scale = max(float(a.abs().max()), FAINT)
            error = float((a - b).abs().max()) / scale
            if not error <= TOLERANCE.get(a.dtype, 1e-4):
                raise CaptureError(
                    f"the captured network differs from the model by {error:.1e} of its largest output",
                    [
                        f"{type(model).__name__}: does its forward pass depend on random numbers, on state, "
                        "or on the values of its input? Are its weights finite?"
                    ],
                )
