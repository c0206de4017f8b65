"""From a graph to a plan: fold, equalize, follow ranges, find the places, and say for each what will happen to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from anybit.errors import RangeError, SpecError
from anybit.graph.view import Graph, Node, origins
from anybit.plan.checked import input_of, relative_error, spread_of, worth_equalizing
from anybit.plan.clip import mse_from_histogram
from anybit.plan.equalize import equalize
from anybit.plan.fold import bias_name, fold
from anybit.plan.moments import Moments, propagate
from anybit.plan.observe import CLIPPED_WIDTHS, OBSERVERS, SIGNAL, Channels
from anybit.plan.points import FLOORS, Activation, Bias, Left, Plan, Weight
from anybit.plan.sites import Sites, find_sites, inner_weights, sensitive, signals
from anybit.plan.spectra import SPECTRUM, spectra
from anybit.spec import FLOAT, NARROWEST, WIDEST, QuantSpec, Range

HELPERS = ("equalize", "bias", "sums", "clip")
"""What can be done for accuracy without data: see `anybit.prepare`."""

SENSITIVE: dict[str, int] = {"same": NARROWEST, "8-bit": 8, "measured": 8, "float": FLOAT}
"""How sensitive layers can be treated, and the width that they then never go below."""

WIDE = 6.0
"""Standard deviations that a range covers where nothing is gained by clipping."""

Interval = tuple[float, float]
Ranges = tuple[tuple[int, Range], ...]


@dataclass(frozen=True)
class Settings:
    """How a network is to be quantized; what each means stands in `anybit.prepare`."""

    method: str = "mse"
    symmetric: bool = False
    per_channel: bool = True
    sigmas: float | None = None
    sensitive: str = "measured"
    helpers: frozenset[str] = frozenset({"bias", "sums"})

    @classmethod
    def of(cls, preset: str, *, helpers: str | Iterable[str] | None = None, **given: Any) -> Settings:
        """Return the settings of a preset with what the user said of them, checked.

        >>> Settings.of("paper", per_channel=True, sigmas=None).sigmas
        6.0
        """
        if preset not in PRESETS:
            raise SpecError(f"a preset is one of {', '.join(PRESETS)}; got {preset!r}")
        chosen = {name: value for name, value in given.items() if value is not None}
        if helpers is not None:
            names = [helpers] if isinstance(helpers, str) else list(helpers)
            names = list(HELPERS) if names == ["all"] else names
            if unknown := [name for name in names if name not in HELPERS]:
                raise SpecError(f"a helper is one of {', '.join(HELPERS)}, or all; got {unknown[0]!r}")
            chosen["helpers"] = frozenset(names)
        settings = replace(PRESETS[preset], **chosen)
        if settings.sensitive not in SENSITIVE:
            raise SpecError(f"sensitive is one of {', '.join(SENSITIVE)}; got {settings.sensitive!r}")
        if settings.method not in OBSERVERS:
            raise SpecError(f"a calibration method is one of {', '.join(OBSERVERS)}; got {settings.method!r}")
        return settings


PRESETS = {
    "default": Settings(),
    "paper": Settings("min-max", symmetric=True, per_channel=False, sigmas=6.0, sensitive="same", helpers=frozenset()),
}
"""Settings by name: what does best on real networks, and the protocol of the paper."""


@dataclass(frozen=True, eq=False)
class Built:
    """A plan and where its points are in the graph: constants and values by point, the layer of each bias.

    `fed` says of biases that data can correct where the means are seen that it takes.
    """

    plan: Plan
    places: dict[str, str]
    layers: dict[str, Node]
    joined: list[list[str]]
    fed: dict[str, Channels]


def build(graph: Graph, settings: Settings) -> Built:
    """Run all passes over a graph, which changes with folding and equalizing, and return the plan.

    Activations that no normalization reaches have no range yet.
    """
    known = fold(graph)
    sites = find_sites(graph)
    if "equalize" in settings.helpers:
        moments = propagate(graph, known, n=settings.sigmas or WIDE)
        equalize(graph, known, worth_equalizing(graph, moments, lambda layer: _plain(graph, sites, layer, settings)))
    fitted = sites.activations if settings.sigmas is None else ()
    moments = propagate(graph, known, n=settings.sigmas or WIDE, histograms=fitted)
    floors = _floors(graph, sites, settings)
    places: dict[str, str] = {}
    points: list[Weight | Activation] = []
    names: dict[str, str] = {}
    for place, path in _in_order(graph, sites):
        point = _point(graph, sites, place, settings, floors.get(place, (NARROWEST, "")), moments)
        name = place if place in sites.weights else _fresh(path, {*places, *graph.constants} - {place})
        points.append(replace(point, name=name))
        places[name], names[place] = place, name
    means = {value: x for value, x in moments.items() if x.sure} if "bias" in settings.helpers else {}
    _add_biases(graph, sites, means)
    biases, layers = _biases(graph, sites, names, means)
    places |= {name: str(graph.bias(layer)) for name, layer in layers.items()}
    plan = Plan(tuple(points), tuple(biases), tuple(_left(graph)))
    measured = "bias" in settings.helpers and settings.sensitive == "measured"
    fed = {
        bias.name: Channels(bias.input, 1 if layer.convolution else -1, layer.stride if layer.transposed else 1)
        for bias, layer in zip(biases, layers.values(), strict=True)
        if measured and bias.mean is None and bias.input and names.get(layer.inputs[0]) == bias.input
    }
    return Built(plan, places, layers, [[names[value] for value in group] for group in sites.joined], fed)


def _in_order(graph: Graph, sites: Sites) -> list[tuple[str, str]]:
    """Return the places to quantize with what a person calls them; a weight with the layer that uses it first."""
    position = {node.output: i for i, node in enumerate(graph.nodes)}
    paths = {node.output: node.path for node in graph.nodes}
    found = [(position[nodes[0].output], 0, name, name) for name, nodes in sites.weights.items()]
    for value in dict.fromkeys([*sites.activations, *sites.accumulators]):
        found.append((position.get(value, -1), 1, value, paths.get(value, value)))
    return [(place, path) for _, _, place, path in sorted(found, key=lambda entry: entry[:2])]


def _fresh(stem: str, taken: set[str]) -> str:
    """Return a name that a person recognizes, numbered where one module is used often."""
    name, count = stem, 1
    while name in taken:
        count += 1
        name = f"{stem}:{count}"
    return name


def _point(
    graph: Graph,
    sites: Sites,
    place: str,
    settings: Settings,
    least: tuple[int, str],
    moments: dict[str, Moments],
) -> Weight | Activation:
    floor, because = least
    if place in sites.weights:
        layer = sites.weights[place][0]
        plain = replace(_plain(graph, sites, layer, settings, place), floor=floor, because=because)
        return _helped(graph, plain, layer, settings, moments) if sites.axis(place) in (0, 1) else plain
    kind = "input" if place in graph.inputs else "accumulator" if place in sites.accumulators else "activation"
    found = moments.get(place)
    ranges: Ranges = () if found is None else _ranges(found, settings.symmetric)
    shape = graph.shapes.get(place, ())
    # An input itself cannot be rounded in a file, what a node makes of it can.
    value = f"{place}.input" if kind == "input" else ""
    return Activation(place, kind, value, shape, ranges, settings.symmetric, max(floor, FLOORS[kind]), because)


def _plain(graph: Graph, sites: Sites, layer: Node, settings: Settings, place: str = "") -> Weight:
    """Return how the weight of a layer is rounded without any helper."""
    place = place or layer.inputs[1]
    axis = sites.axis(place)
    return Weight(
        place,
        shape=graph.constants[place].shape,
        axis=axis if settings.per_channel else None,
        symmetric=settings.symmetric,
        centred=settings.per_channel and not settings.symmetric,
        channels=axis or 0,
        groups=layer.groups,
    )


def _helped(graph: Graph, plain: Weight, layer: Node, settings: Settings, moments: dict[str, Moments]) -> Weight:
    """Return a weight with those of the wanted helpers that lower the error of its layer's output."""
    if layer.kind != "layer":  # what a cell's weights do to its output is not so simple: their own error counts
        return replace(plain, clip=layer.kind != "table" and not settings.helpers.isdisjoint(("sums", "clip")))
    ways = [plain]
    if "sums" in settings.helpers:
        ways += [replace(way, sums=True) for way in ways]
    if "clip" in settings.helpers:
        ways += [replace(way, clip=True) for way in ways]
    if len(ways) == 1:
        return plain
    spread = spread_of(input_of(graph, layer, moments))
    return min(ways, key=lambda how: relative_error(graph.constants[plain.name], how, layer, spread))


def _ranges(moments: Moments, symmetric: bool) -> Ranges:
    """Return the interval that covers every channel's, and the best part of it at each width that is known to need one.

    The fewer the bits, the more it pays to clip: of a bell curve 3 bits keep about 3 standard deviations, 8 bits all 6.
    """
    whole = Range(float(moments.low.min()), float(moments.high.max()), moments.source)
    if moments.histogram is None:
        return ((FLOAT, whole),)
    found: Ranges = ((FLOAT, whole),)
    for bits in CLIPPED_WIDTHS:
        spec = QuantSpec(bits, symmetric, signed=whole.low < 0)
        low, high = mse_from_histogram(*moments.histogram, spec)
        found += ((bits, Range(max(low, whole.low), min(high, whole.high), moments.source)),)
    return found


def _floors(graph: Graph, sites: Sites, settings: Settings) -> dict[str, tuple[int, str]]:
    """Return the width that points do not go below, with the reason: those that few bits hurt most, and signals."""
    floor = SENSITIVE[settings.sensitive]
    if floor == NARROWEST:
        return {}
    layers = sensitive(graph)
    floors = {
        place: (floor, layers[nodes[0]])
        for place, nodes in (sites.weights | sites.activations).items()
        if all(node in layers and place not in inner_weights(node, layers[node]) for node in nodes)
    }
    tables = [name for name, nodes in sites.weights.items() if any(node.kind == "table" for node in nodes)]
    floors |= dict.fromkeys(tables, (floor, "lookup table"))
    wide, near = (max(floor, WIDEST), SIGNAL), signals(graph)
    values = {*sites.activations, *sites.accumulators}
    floors |= dict.fromkeys(near & values, wide) | dict.fromkeys(spectra(graph) & values, (FLOAT, SPECTRUM))
    for node in graph.nodes:  # a cell adds up over time what rounding does to the weight that a signal meets first
        if node.kind == "recurrent" and node.inputs[0] in near:
            first = node.weights[: max(1, len(node.weights) // (2 * node.depth))]  # what the signal is multiplied by
            floors |= {name: wide for name in first if name in sites.weights}
    return floors


def _add_biases(graph: Graph, sites: Sites, moments: Mapping[str, Moments]) -> None:
    """Give layers without a bias one of zeros, where the mean of their input is known: it is there to be corrected."""
    for layer in [n for n in graph.nodes if n.kind == "layer" and n.inputs[1] in sites.weights]:
        x = moments.get(layer.inputs[0])
        if any(layer.inputs[2:]) or x is None or _input_mean(graph, layer, x) is None:
            continue
        weight = graph.constants[layer.inputs[1]]
        name = graph.fresh(bias_name(layer.inputs[1]))
        outs = weight.shape[layer.axis] * (layer.groups if layer.transposed else 1)
        graph.set_constant(name, np.zeros(outs, weight.dtype))
        layer.inputs[2:] = [name]


def _biases(
    graph: Graph, sites: Sites, names: dict[str, str], moments: Mapping[str, Moments]
) -> tuple[list[Bias], dict[str, Node]]:
    makers = graph.makers()
    found: list[Bias] = []
    layers: dict[str, Node] = {}
    for layer in graph.nodes:
        tensor = graph.bias(layer) if layer.kind == "layer" else None
        if tensor is None or layer.inputs[1] not in sites.weights:
            continue
        fed = [value for value, _ in origins(graph, layer.inputs[0], None, makers)]
        # Rows of a table have scales of their own, so that no one unit fits all.
        source = names.get(fed[0]) if fed and all(v in names and v not in sites.weights for v in fed) else None
        name = _fresh(tensor, set(layers) | set(names.values()))
        x = moments.get(layer.inputs[0])
        mean = None if x is None else _input_mean(graph, layer, x)
        found.append(Bias(name, names[layer.inputs[1]], source or "", mean=mean))
        layers[name] = layer
    return found, layers


def _input_mean(graph: Graph, layer: Node, x: Moments) -> tuple[float, ...] | None:
    """Return the mean of each input channel of a layer, if its channels are where the moments have them."""
    place = 1 if layer.convolution else graph.rank(layer.inputs[0]) - 1
    weight = graph.constants[layer.inputs[1]]
    ins = weight.shape[1 - layer.axis] * (layer.groups if layer.axis == 0 else 1)
    if not x.known or (x.axis is not None and (x.axis != place or len(x.mean) != ins)):
        return None
    mean = np.broadcast_to(x.mean, (ins,)) / (layer.stride if layer.transposed else 1)
    return tuple(mean.astype(np.float32).astype(float).tolist())


def _left(graph: Graph) -> list[Left]:
    return [
        Left(node.path, f"{node.name} is not known here")
        for node in graph.nodes
        if node.kind == "other"
        and any(name in graph.constants and graph.constants[name].ndim > 1 for name in node.inputs)
    ]


# Ranges


def with_inputs(plan: Plan, given: Interval | Mapping[str, Interval] | None) -> Plan:
    """Return the plan with the intervals that the user gave for the network's inputs."""
    inputs = [a.name for a in plan.activations if a.kind == "input"]
    if given is not None and not isinstance(given, Mapping) and not _is_pair(given):
        raise SpecError(
            f"input_range is a pair of numbers (low, high), or one by name for several inputs; got {given!r}"
        )
    chosen = given if isinstance(given, Mapping) else {} if given is None else dict.fromkeys(inputs, given)
    for name, interval in chosen.items():
        if name not in inputs:
            raise SpecError(f"no input {name!r} feeds a layer; those that do are {', '.join(inputs) or 'none'}")
        if not _is_pair(interval):
            raise SpecError(f"the range of input {name!r} is a pair of numbers (low, high); got {interval!r}")
    asked = plan.with_ranges(
        {n: ((FLOAT, Range(float(r[0]), float(r[1]), "given by the user")),) for n, r in chosen.items()}
    )
    # Whoever names the range of a signal wants it rounded like a picture.
    points = (
        replace(p, floor=FLOORS["input"], because="") if p.name in chosen and p.because == SIGNAL else p
        for p in asked.points
    )
    return replace(asked, points=tuple(points))


def _is_pair(value: Any) -> bool:
    numbers = isinstance(value, tuple | list) and len(value) == 2
    return numbers and all(isinstance(v, int | float) and not isinstance(v, bool) for v in value)


def joined(plan: Plan, groups: Iterable[list[str]]) -> Plan:
    """Give activations that meet in a concatenation one range, so that they are on one grid there."""
    points = {a.name: a for a in plan.activations}
    found: dict[str, Ranges] = {}
    for group in groups:
        members = [points[name] for name in group]
        if not all(member.ranges for member in members):
            continue
        own: Ranges = ()
        for bits in sorted({bits for member in members for bits, _ in member.ranges}):
            ranges = [r for member in members if (r := member.range_at(bits)) is not None]
            sources = " | ".join(dict.fromkeys(r.source for r in ranges))
            own += ((bits, Range(min(r.low for r in ranges), max(r.high for r in ranges), sources)),)
        found |= dict.fromkeys(group, own)
    return plan.with_ranges(found)


def check_ranges(plan: Plan, *, advice: str) -> None:
    """Refuse a plan with activations of unknown range; inputs and accumulators may stay in floating point."""
    if missing := unknown(plan):
        raise RangeError(f"no normalization tells the range of these points; {advice}", missing)


def unknown(plan: Plan) -> list[str]:
    """Return the activations whose range nothing tells."""
    return [a.name for a in plan.activations if not a.ranges and a.kind == "activation"]
