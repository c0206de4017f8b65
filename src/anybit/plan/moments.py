"""Ranges without data: mean, variance and interval of each value, channel by channel, from normalization alone.

A batch norm says that its output has mean β and standard deviation |γ| per channel, so `β ± nγ` holds nearly
all of it; layer and group norm say the same. From there the interval and the first two moments are carried through
what follows: a function of one value is applied to the bell curve itself, sums add means and variances, a concatenation
lines channels up. Two functions of the same value stay functions of that value, so `x · sigmoid(x)` is as exact as a
single operator. Where nothing is known, data must tell.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from anybit.graph.view import Graph, Node, Norm, by_output, stays

Array = npt.NDArray[np.float64]

ESTIMATED = " (estimated)"
"""Added to where a range came from when it was carried through a layer without batch norm."""
BOUNDED = " stays inside"
"""Where a range came from that nothing can leave: the function that made the value."""


def certain(source: str) -> bool:
    """Tell whether nothing can leave a range, by where it came from; that of a product names both factors.

    >>> certain("Sigmoid stays inside"), certain("batch norm a (estimated), Sigmoid stays inside")
    (True, False)
    """
    return all(part.endswith(BOUNDED) for part in source.split(", "))


BINS = 4096
"""Bins of a histogram over everything that a value can be."""

STEPS = 513
"""Points on each channel's bell curve: enough for moments of a kinked function to three digits."""


@dataclass(frozen=True, eq=False)
class Curve:
    """A value as a function of another one: at points along that one's bell curve, with their weights."""

    base: object
    values: Array
    density: Array


@dataclass(frozen=True, eq=False)
class Moments:
    """What is known of a value without data, one entry per index of dimension `axis`, or one for all."""

    mean: Array
    var: Array
    low: Array
    high: Array
    source: str
    axis: int | None = 1
    curve: Curve | None = None
    histogram: tuple[Array, Array] | None = None
    """How often values fall where, over all channels: counts and the borders of their bins."""

    @property
    def known(self) -> bool:
        """Whether mean and variance are known, not only the interval."""
        return not np.isnan(self.mean).any()

    @property
    def sure(self) -> bool:
        """Whether normalization alone tells them: a guess anywhere on the way is no ground for a correction."""
        return self.known and ESTIMATED not in self.source


def gaussian(mean: Any, std: Any, *, n: float, source: str, axis: int | None = 1) -> Moments:
    """Return the moments of a normal distribution and the interval of n standard deviations around its mean.

    >>> gaussian(np.ones(1), np.full(1, 0.5), n=6, source="bn").high.tolist()
    [4.0]
    """
    mean, std = np.asarray(mean, np.float64), np.abs(np.asarray(std, np.float64))
    return Moments(mean, std**2, mean - n * std, mean + n * std, source, axis)


def curve_of(x: Moments) -> Curve:
    """Return the curve of a value: the one it has, or its own bell curve inside its interval."""
    if x.curve is not None:
        return x.curve
    t = np.linspace(0, 1, STEPS)[:, None]
    grid = x.low + (x.high - x.low) * t
    std = np.maximum(np.sqrt(x.var), np.finfo(np.float64).tiny)
    with np.errstate(over="ignore"):
        density = np.exp(-0.5 * ((grid - x.mean) / std) ** 2)
    # A constant channel has no width: every grid point is the same value, and so is every weight.
    density = np.where(x.high > x.low, density, 1.0)
    density = np.where(np.isnan(x.mean), x.mean, density)
    with np.errstate(invalid="ignore"):  # a needle in its interval falls between the points, and is nowhere
        return Curve(object(), grid, density / density.sum(0))


def _from_curve(curve: Curve, source: str, axis: int | None) -> Moments:
    mean = (curve.density * curve.values).sum(0)
    var = (curve.density * (curve.values - mean) ** 2).sum(0)
    return Moments(mean, var, curve.values.min(0), curve.values.max(0), source, axis, curve)


def through_function(x: Moments, function: Callable[[Any], Any]) -> Moments:
    """Return the moments of `function(x)`, taking `x` as normal inside its interval.

    The rectified normal has mean `1/sqrt(2π)` and second moment `1/2`:

    >>> x = gaussian(np.zeros(1), np.ones(1), n=6, source="bn")
    >>> y = through_function(x, lambda v: np.maximum(v, 0))
    >>> [round(float(v[0]), 3) for v in (y.mean, y.var, y.low, y.high)]
    [0.399, 0.341, 0.0, 6.0]
    """
    curve = curve_of(x)
    return _from_curve(replace(curve, values=np.asarray(function(curve.values), np.float64)), x.source, x.axis)


def add(x: Moments, y: Moments) -> Moments:
    """Return the moments of an independent sum: means and variances add.

    Above and below the mean the interval grows as the standard deviations of a sum do, by the root of the squares.
    For two normal tensors that is n standard deviations of the sum; for a rectified one, whose upper tail is longer
    than its variance says, it still covers that tail.

    >>> one = gaussian(np.array([1.0]), np.array([3.0]), n=2, source="a")
    >>> two = gaussian(np.array([0.0]), np.array([4.0]), n=2, source="b")
    >>> s = add(one, two)
    >>> float(s.low[0]), float(s.high[0]), s.source
    (-9.0, 11.0, 'a, b')
    """
    mean, var = x.mean + y.mean, x.var + y.var
    low = mean - np.hypot(x.mean - x.low, y.mean - y.low)
    high = mean + np.hypot(x.high - x.mean, y.high - y.mean)
    # Where only intervals are known they add up as they are.
    low, high = np.where(np.isnan(mean), x.low + y.low, low), np.where(np.isnan(mean), x.high + y.high, high)
    return Moments(mean, var, low, high, _sources(x, y), _axis(x, y))


def multiply(x: Moments, y: Moments) -> Moments:
    """Return the moments of an independent product.

    >>> half = gaussian(np.array([0.5]), np.array([0.0]), n=6, source="a")
    >>> two = gaussian(np.array([2.0]), np.array([1.0]), n=2, source="a")
    >>> p = multiply(half, two)
    >>> [float(v[0]) for v in (p.mean, p.var, p.low, p.high)]
    [1.0, 0.25, 0.0, 2.0]
    """
    corners = np.stack([x.low * y.low, x.low * y.high, x.high * y.low, x.high * y.high])
    var = x.var * y.var + x.var * y.mean**2 + y.var * x.mean**2
    return Moments(x.mean * y.mean, var, corners.min(0), corners.max(0), _sources(x, y), _axis(x, y))


def negated(x: Moments) -> Moments:
    """Return the moments of `-x`."""
    return replace(x, mean=-x.mean, low=-x.high, high=-x.low, curve=None)


def inverted(x: Moments) -> Moments | None:
    """Return what is known of `1 / x`: an interval, if zero is not in that of x."""
    if (x.low <= 0).any() and (x.high >= 0).any():
        return None
    return replace(x, mean=x.mean * np.nan, var=x.var * np.nan, low=1 / x.high, high=1 / x.low, curve=None)


def _sources(*parts: Moments) -> str:
    return ", ".join(dict.fromkeys(word for part in parts for word in part.source.split(", ")))


def _axis(x: Moments, y: Moments) -> int | None:
    return y.axis if x.axis is None else x.axis


def within(low: float, high: float, source: str) -> Moments:
    """Return what is known of a tensor that stays inside an interval: nothing else, so mean and variance are NaN."""
    nan = np.full(1, math.nan)
    return Moments(nan, nan, np.full(1, low), np.full(1, high), source, None)


def pooled(x: Moments) -> Moments:
    """Forget which channel is which: one entry for all.

    >>> x = pooled(gaussian(np.array([1.0, -1.0]), np.zeros(2), n=6, source="a"))
    >>> [float(v[0]) for v in (x.mean, x.var, x.low, x.high)]
    [0.0, 1.0, -1.0, 1.0]
    """
    mean = x.mean.mean(keepdims=True)
    var = (x.var + x.mean**2).mean(keepdims=True) - mean**2
    return Moments(mean, var, x.low.min(keepdims=True), x.high.max(keepdims=True), x.source, None)


def through_layer(
    x: Moments, weight: npt.NDArray[Any], bias: npt.NDArray[Any] | None, *, n: float, axis: int = 0, groups: int = 1
) -> Moments:
    """Return the moments of a layer's output where no batch norm follows.

    Channels are taken as independent, so the interval grows as in a sum of them, by the root of the squares, and is at
    least n standard deviations to either side. The taps of one channel's kernel see neighbours, which are alike, so
    their standard deviations add: the wider of the two extremes. The interval never exceeds what the input's allows.

    >>> x = gaussian(np.array([1.0, 0.0]), np.array([3.0, 4.0]), n=2, source="a")
    >>> y = through_layer(x, np.ones((1, 2)), None, n=2)
    >>> [float(v[0]) for v in (y.mean, y.var, y.low, y.high)]
    [1.0, 25.0, -9.0, 11.0]
    """
    kernel = by_output(np.asarray(weight, np.float64), axis, groups)
    outs, ins, _ = kernel.shape
    index = np.arange(outs) // (outs // groups)

    def inputs(values: Array) -> Array:
        return np.asarray(np.broadcast_to(values, (groups * ins,)).reshape(groups, ins)[index])

    positive, negative = np.maximum(kernel, 0).sum(2), np.minimum(kernel, 0).sum(2)
    shift = np.zeros(outs) if bias is None else np.asarray(bias, np.float64)
    mean = ((positive + negative) * inputs(x.mean)).sum(1) + shift
    var = ((positive - negative) ** 2 * inputs(x.var)).sum(1)
    below, above = inputs(x.mean - x.low), inputs(x.high - x.mean)
    # A rectified input has a long tail above and next to none below, which its variance does not tell apart.
    up = np.maximum(np.sqrt(((positive * above - negative * below) ** 2).sum(1)), n * np.sqrt(var))
    down = np.maximum(np.sqrt(((positive * below - negative * above) ** 2).sum(1)), n * np.sqrt(var))
    low, high = np.minimum(inputs(x.low), 0), np.maximum(inputs(x.high), 0)  # the border is padded with zeros
    lowest, highest = (positive * low + negative * high).sum(1), (positive * high + negative * low).sum(1)
    low, high = np.maximum(mean - down, lowest + shift), np.minimum(mean + up, highest + shift)
    return Moments(mean, var, low, high, x.source.removesuffix(ESTIMATED) + ESTIMATED)


def histogram_of(x: Moments) -> tuple[Array, Array] | None:
    """Return how often a value falls where, over all channels: counts, and the borders of their bins.

    >>> counts, edges = histogram_of(gaussian(np.zeros(1), np.ones(1), n=6, source="bn"))
    >>> round(float(counts[np.abs(edges[:-1]) < 1].sum()), 2), float(edges[0])
    (0.68, -6.0)
    """
    curve = curve_of(x)
    reach = float(np.abs(curve.values).max()) or 1.0
    counts = np.zeros(BINS)
    between = (np.arange(8)[:, None, None] + 0.5) / 8  # a value is anywhere between its neighbours on the curve
    for top in range(0, curve.values.shape[1], 64):  # channels at a time
        values, density = curve.values[:, top : top + 64], curve.density[:, top : top + 64]
        places = (values[:-1] + between * np.diff(values, axis=0) + reach) * (BINS / 2 / reach)
        mass = np.broadcast_to((density[:-1] + density[1:]) / 16, places.shape)
        # Shared between the two nearest bins, so that counts do not jump where a value moves a little.
        left = np.clip(np.floor(places - 0.5), 0, BINS - 2)
        right = np.clip(places - 0.5 - left, 0, 1)
        index = left.astype(np.intp).ravel()
        counts += np.bincount(index, (mass * (1 - right)).ravel(), minlength=BINS)
        counts += np.bincount(index + 1, (mass * right).ravel(), minlength=BINS)
    if not np.isfinite(counts).all():  # the curve is a needle in its interval
        return None
    return counts / curve.values.shape[1], np.linspace(-reach, reach, BINS + 1)


def propagate(
    graph: Graph, known: dict[str, Norm], *, n: float = 6.0, histograms: Container[str] = ()
) -> dict[str, Moments]:
    """Return the moments of every value that some normalization reaches, and the interval of what is bounded anyway.

    The values in `histograms` get one where their mean is known.
    """
    moments: dict[str, Moments] = {}
    left = Counter(name for node in graph.nodes for name in node.inputs)
    for node in graph.nodes:
        found: Moments | None = None
        if node.output in known or node.kind == "standard":
            norm = known.get(node.output, node.norm)
            assert norm is not None
            word = "batch norm" if node.output in known else node.name
            found = gaussian(norm.beta, norm.gamma, n=n, source=f"{word} {node.path}", axis=norm.axis)
        else:
            found = _APPLY[node.kind](graph, node, moments, n) if node.kind in _APPLY else None
        if found is None and node.bounds is not None:
            found = within(*node.bounds, node.name + BOUNDED)
        if found is not None and np.isfinite(found.low).all() and np.isfinite(found.high).all():
            if node.output in histograms and found.known:
                found = replace(found, histogram=histogram_of(found))
            moments[node.output] = found
        for name in node.inputs:
            left[name] -= 1
            if not left[name] and name in moments:  # curves take room, and nobody needs this one any more
                moments[name] = replace(moments[name], curve=None)
    return moments


def _drawn(moments: dict[str, Moments], value: str) -> Moments | None:
    """Return the moments of a value with its curve, which from now on all functions of it share."""
    if value in moments and moments[value].curve is None:
        moments[value] = replace(moments[value], curve=curve_of(moments[value]))
    return moments.get(value)


def _function(graph: Graph, node: Node, moments: dict[str, Moments], n: float) -> Moments | None:
    x = _drawn(moments, node.inputs[0])
    return None if x is None or node.function is None else through_function(x, node.function)


def _slopes(graph: Graph, node: Node, moments: dict[str, Moments], n: float) -> Moments | None:
    """Follow a function that is straight on either side of zero, with slopes below it: one, or one per channel."""
    x, slopes = _drawn(moments, node.inputs[0]), graph.constants.get(node.inputs[1])
    if x is None or slopes is None:
        return None
    below = slopes.reshape(-1).astype(np.float64)
    if below.size in (1, len(x.mean)) and (below.size == 1 or x.axis == 1):
        return through_function(x, lambda values: np.where(values > 0, values, below * values))
    ends = [0.0, *(s * x.low.min() for s in (below.min(), below.max())), float(x.high.max())]
    return within(min(ends), max(ends), x.source)


_PLAIN: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide
}  # fmt: skip


def _arithmetic(graph: Graph, node: Node, moments: dict[str, Moments], n: float) -> Moments | None:
    first, second = node.inputs[:2]
    operate = _PLAIN[node.kind]
    for value, constant, turned in ((first, second, False), (second, first, True)):
        if constant in graph.constants:
            return _with_constant(graph, node, _drawn(moments, value), graph.constants[constant], operate, turned)
    x, y = moments.get(first), moments.get(second)
    if x is None or y is None:
        return None
    if first == second:
        return through_function(x, lambda values: operate(values, values))
    one, two = x.curve, y.curve
    if one is not None and two is not None and one.base is two.base and one.values.shape == two.values.shape:
        with np.errstate(divide="ignore", invalid="ignore"):
            return _from_curve(replace(one, values=operate(one.values, two.values)), x.source, x.axis)
    x, y = _lined_up(graph, node, x, y)
    if node.kind in ("sub", "add"):
        return add(x, negated(y) if node.kind == "sub" else y)
    inverse = inverted(y) if node.kind == "div" else y
    return None if inverse is None else multiply(x, inverse)


def _with_constant(
    graph: Graph,
    node: Node,
    x: Moments | None,
    constant: npt.NDArray[Any],
    operate: Callable[[Any, Any], Any],
    turned: bool,
) -> Moments | None:
    """Follow a sum or product with a constant: a number, or one per channel."""
    if x is None or (constant.dtype.kind != "f" and constant.size != 1):
        return None
    if constant.size == 1:
        c: Any = float(constant.reshape(()))
    else:
        rank = graph.rank(node.output)
        shape = (1,) * (rank - constant.ndim) + constant.shape
        places = [d for d, size in enumerate(shape) if size != 1]
        if len(places) != 1 or (x.axis is not None and places[0] != x.axis) or not rank:
            x, c = pooled(x), np.asarray([constant.min(), constant.max()], np.float64)
            ends = [operate(*((c[:, None], v) if turned else (v, c[:, None]))) for v in (x.low, x.high)]
            low, high = np.min(ends), np.max(ends)
            return within(float(low), float(high), x.source)
        c = constant.reshape(-1).astype(np.float64)
        x = replace(x, axis=places[0])
    with np.errstate(divide="ignore", invalid="ignore"):
        return through_function(x, lambda values: operate(c, values) if turned else operate(values, c))


def _lined_up(graph: Graph, node: Node, x: Moments, y: Moments) -> tuple[Moments, Moments]:
    """Return both with their channels in the same dimension, or forget which is which."""
    ranks = [graph.rank(name) for name in node.inputs[:2]]
    rank = max(ranks)

    def moved(m: Moments, own: int) -> Moments:
        return m if m.axis is None else replace(m, axis=m.axis + rank - own)

    x, y = moved(x, ranks[0]), moved(y, ranks[1])
    sizes = {len(m.mean) for m in (x, y) if m.axis is not None}
    if x.axis is not None and y.axis is not None and (x.axis != y.axis or len(sizes) > 1):
        return pooled(x), pooled(y)
    return x, y


def _concat(graph: Graph, node: Node, moments: dict[str, Moments], n: float) -> Moments | None:
    parts = [moments.get(name) for name in node.inputs]
    found = [part for part in parts if part is not None]
    if len(found) != len(parts):
        return None
    source = " | ".join(dict.fromkeys(part.source for part in found))
    along = all(part.axis == node.axis for part in found)
    rows = found if along else [pooled(part) for part in found]
    mean, var, low, high = (np.concatenate([getattr(p, k) for p in rows]) for k in ("mean", "var", "low", "high"))
    joined = Moments(mean, var, low, high, source, node.axis)
    return joined if along else pooled(joined)


def _layer(graph: Graph, node: Node, moments: dict[str, Moments], n: float) -> Moments | None:
    x = moments.get(node.inputs[0])
    weight = graph.constants.get(node.inputs[1])
    bias = graph.bias(node)
    if x is None or weight is None or not x.known or (len(node.inputs) > 2 and node.inputs[2] and bias is None):
        return None
    rank = graph.rank(node.inputs[0])
    place = 1 if node.convolution else rank - 1
    ins = by_output(weight, node.axis, node.groups).shape[1] * node.groups
    x = x if x.axis == place and len(x.mean) == ins else pooled(x)
    shift = None if bias is None else graph.constants[bias]
    found = through_layer(x, weight, shift, n=n, axis=node.axis, groups=node.groups)
    return replace(found, axis=1 if node.convolution else graph.rank(node.output) - 1)


def _looked_up(graph: Graph, node: Node, moments: dict[str, Moments], n: float) -> Moments | None:
    """Look at all rows of a table; which of them come how often nobody knows."""
    rows = np.asarray(graph.constants[node.weights[0]], np.float64)
    if rows.ndim != 2 or not rows.size:
        return None
    ends = rows.min(0), rows.max(0)
    return Moments(rows.mean(0), rows.var(0), *ends, f"table {node.path}{ESTIMATED}", graph.rank(node.output) - 1)


def _handed_on(graph: Graph, node: Node, moments: dict[str, Moments], n: float) -> Moments | None:
    x = moments.get(node.inputs[0])
    if x is None or node.follow is stays:
        return x
    x = replace(x, curve=None)  # entries may meet others now
    if x.axis is None:
        return x
    where = node.follow(x.axis) if node.follow is not None else None
    if where is None:
        return pooled(x)
    axis, repeat = where
    if repeat == 1:
        return replace(x, axis=axis)
    parts: dict[str, Any] = {name: np.repeat(getattr(x, name), repeat) for name in ("mean", "var", "low", "high")}
    return replace(x, axis=axis, **parts)


_APPLY: dict[str, Callable[[Graph, Node, dict[str, Moments], float], Moments | None]] = {
    "function": _function,
    "slopes": _slopes,
    **dict.fromkeys(_PLAIN, _arithmetic),
    "concat": _concat,
    "layer": _layer,
    "table": _looked_up,
    "pass": _handed_on,
    "average": _handed_on,
}
