"""`reconstruct`: fit rounding, ranges and biases of some widths to a few hundred inputs, without labels.

The layers are dealt with in the order of the network. ONNX Runtime runs it twice, piece by piece, in floating point
and at the width with all layers in front done already; `plan.reconstruct` decides the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper

from anybit.artifact.layers import Layer, Use, complete, layers_of
from anybit.artifact.master import Master, open_master, write_master
from anybit.artifact.model import names_in
from anybit.artifact.quantized_graph import quantized_graph
from anybit.artifact.runtime import compile_model
from anybit.artifact.segments import Known, behind, cut
from anybit.artifact.values import feed_of, kinds_of
from anybit.common.bars import progress_bars
from anybit.common.progress import Advance
from anybit.errors import DataError, SpecError
from anybit.plan.codes import encode
from anybit.plan.extras import Rounded, Shift, mark_of, pack
from anybit.plan.grid import make_grid, on_grid
from anybit.plan.numbers import Kept, Numbers
from anybit.plan.observe import MeanSquare, given
from anybit.plan.points import Activation, Bias, Plan, Weight, Widths
from anybit.plan.reconstruct import Seen, grouped, round_weight
from anybit.spec import FLOAT, Bits, Range, widths_of

Array = npt.NDArray[Any]
Feed = Mapping[str, Array]

ROWS, TIMES = 4096, 24
"""Rows of a layer's input that are looked at, at least, and for each input of its kernel."""

BATCH = 32
"""Inputs that are run at a time."""

FIRST = 8
"""Batches that choose the ranges of activations."""

NARROW = 8
"""From this width on rounding to nearest is as good."""

PARTS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
"""Parts of an activation's range that are tried as its range."""

CLEARLY = 0.95
"""A part of a range is taken if the error is less than this part of the whole range's: few inputs tell it."""

SOURCE = "reconstruction"
SETTLED = (SOURCE, f"calibration, {MeanSquare.name}")
"""Where ranges come from that already fit a width."""


class Network(Protocol):
    """A network that can be seen as a master, and takes a plan back: `QuantizedNetwork` is one."""

    plan: Plan

    def as_master(self) -> Master:
        """Return the network as a master in memory."""


def reconstruct(
    network: Network | str | Path,
    inputs: Iterable[Any],
    widths: Sequence[Bits | str | tuple[int, int]],
    *,
    out: str | Path | None = None,
) -> Plan:
    """Give some widths rounding, ranges and biases of their own, found on a few hundred inputs, and return the plan.

    Each pair of widths is fitted by itself, and all others round as before; a range below 8 bits that no inputs have
    told holds for all pairs with those activations. The weights themselves do not change: the plan says for each of
    these pairs which way every weight rounds, which takes about a bit a weight and a pair in the file. Weights that
    change later, by training, are rounded to nearest again.

    Args:
        network: What `anybit.prepare` returned, whose plan is replaced; or the path of a master.
        inputs: Batches of inputs as for calibration, 64 to 512 inputs in all, without labels (those of pairs are not
            looked at).
        widths: Pairs (weights, activations), or texts such as "W4A8".
        out: Where to write the master, if `network` is one; by default it is replaced.
    """
    chosen = widths_of(widths) if widths else []
    if not chosen or any(pair.weights == FLOAT for pair in chosen):
        raise SpecError("reconstruction is for widths of 2 to 16 bits for weights; give pairs as in widths=[(4, 8)]")
    if not isinstance(network, str | Path):
        if out is not None:
            raise SpecError("out is for masters; save a network with anybit.save")
        network.plan = plan = reconstructed(network.as_master(), inputs, chosen)
        return plan
    master = open_master(network)
    plan = reconstructed(master, inputs, chosen)
    return write_master(out or network, complete(master), replace(master.header, plan=plan, data=None)).plan


def reconstructed(master: Master, inputs: Iterable[Any], widths: Sequence[Bits]) -> Plan:
    """Return the plan of a master with what these widths have of their own."""
    feeds = list(feeds_of(master, inputs))
    plan = master.plan
    for point in plan.weights:
        if not point.shape:  # a master of an earlier version does not tell it
            plan = _with(plan, replace(point, shape=master.weights[point.name].shape))
    master = replace(master, header=replace(master.header, plan=plan))
    layers = layers_of(master)
    if not layers:
        raise SpecError(
            f"{master.path}: no weight here can be fitted; those in branches and loops, and all that are no product "
            "with rows of their input, are rounded to nearest"
        )
    with progress_bars() as start:
        for bits in widths:
            advance = start(f"reconstructing {bits}", len(layers))
            plan = _Width(master, plan, bits, feeds).run(layers, advance)
    return plan


def feeds_of(master: Master, inputs: Iterable[Any], most: int = BATCH) -> Iterator[dict[str, Array]]:
    """Yield inputs by name, a few at a time where the network leaves their number free."""
    kinds = {value.name: value.type.tensor_type for value in master.graph.graph.input}
    first = [next(iter(kind.shape.dim), None) for kind in kinds.values()]
    free = bool(first) and all(size is not None and not size.HasField("dim_value") for size in first)
    seen = False
    for batch in inputs:
        given = batch[0] if isinstance(batch, tuple | list) and len(batch) == 2 and len(kinds) == 1 else batch
        named = given if isinstance(given, Mapping) else dict(zip(kinds, _listed(given), strict=False))
        if not named.keys() <= kinds.keys():
            raise DataError(f"{master.path}: the network takes {', '.join(kinds)}; got {', '.join(map(str, named))}")
        arrays = feed_of(named, kinds_of(master.graph.graph))
        seen = True
        count = len(next(iter(arrays.values()))) if free else 1
        for begin in range(0, count, most):
            yield {name: x[begin : begin + most] if free else x for name, x in arrays.items()}
    if not seen:
        raise DataError("reconstruction saw no data; at least one batch of inputs is expected")


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, tuple | list) else [given]


def runner(
    master: Master,
    plan: Plan,
    widths: Widths,
    names: Sequence[str],
    kept: Kept | None = None,
    known: Collection[str] = (),
    asked: Mapping[str, Bits] | None = None,
) -> Callable[[Feed], dict[str, Array]]:
    """Return what runs a master with these widths, no further than it must, and gives the values that are named.

    Values that are `known` are given to it, and nothing in front of them is run. What weights have of their own for the
    pairs that are `asked` for holds.
    """
    piece, used = cut(replace(master, header=replace(master.header, plan=plan)), names, known)
    # Weights that the piece does not have need no codes.
    apart = {weight.name: FLOAT for weight in plan.weights if weight.place not in used}
    numbers = Numbers(plan, {**widths, **apart}, master.tensors, Kept(2**28) if kept is None else kept, asked or {})
    model, exact = quantized_graph(piece, numbers, packed=False)
    used = names_in(model.graph)
    model.set_initializers([tensor for tensor in model.graph.initializer if tensor.name in used])
    inner = [name for name in names if name not in master.inputs and name not in known]
    ends = {value.name: value for value in model.graph.output}
    wanted = [ends.get(name) or helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in inner]
    del model.graph.output[:]
    model.graph.output.extend(wanted)
    engine = compile_model(model, exact=exact, threads=None, spin=False, where=str(master.path)) if inner else None

    def run(feed: Feed) -> dict[str, Array]:
        values = {name: feed[name] for name in names if name in feed}
        if engine is None:
            return values
        taken = {value.name for value in engine.get_inputs()}
        try:
            found = engine.run(inner, {name: x for name, x in feed.items() if name in taken})
        except Exception as error:  # ONNX Runtime has no common base for its exceptions
            reason = " ".join(str(error).split())[:200]
            raise DataError(f"{master.path}: an input cannot be run ({reason})") from error
        return values | dict(zip(inner, found, strict=True))

    return run


# One width


class _Width:
    """The reconstruction of one width: a plan that grows layer by layer."""

    def __init__(self, master: Master, plan: Plan, bits: Bits, feeds: Sequence[Feed]) -> None:
        self.master, self.plan, self.bits = master, _without(plan, bits), bits
        self.widths, self.asked = dict(plan.widths(bits)), plan.asked(bits)
        self.now, self.exact = (Known(master.model.graph, feeds) for _ in range(2))

    def run(self, layers: list[Layer], advance: Advance) -> Plan:
        """Deal with all layers, those together that do not see each other, and return the plan."""
        todo = [layer for layer in layers if self.widths[layer.weight.name] != FLOAT]
        needs = behind(self.master.model.graph, {layer.weight.place for layer in todo})
        while todo:
            left = {layer.weight.place for layer in todo}
            settled = {use.value for layer in todo for use in layer.uses if not left & needs.get(use.value, set())}
            # The first one may see itself: a weight that is used twice, or in a loop.
            stage = [layer for layer in todo if layer is todo[0] or all(use.value in settled for use in layer.uses)]
            todo = [layer for layer in todo if layer not in stage]
            self._stage(stage, settled)
            for known in (self.now, self.exact):
                known.forget_all_but([use.value for layer in todo for use in layer.uses])
            advance(len(stage))
        return self.plan

    def _stage(self, stage: list[Layer], settled: set[str]) -> None:
        """Deal with some layers; `settled` are their inputs that no later layer changes."""
        uses = [(layer, use) for layer in stage for use in layer.uses]
        seen = {id(use): Seen() for _, use in uses}
        fresh = {point for _, use in uses for point in use.points if self.widths[point] != FLOAT}
        draw = np.random.default_rng(0)
        count = len(self.now.feeds)
        rows = {w.name: -(-max(ROWS, TIMES * _inputs(w)) // count) for w in (layer.weight for layer in stage)}
        runs = self._values([use.value for _, use in uses], fresh)
        first = list(islice(runs, FIRST))
        self._set_ranges(uses, [now for now, _ in first])
        for index, (now, exact) in enumerate(chain(first, runs)):
            now = {use.value: self._on_grid(now[use.value], use.points) for _, use in uses}
            for known, values in ((self.now, now), (self.exact, exact)):
                known.keep(index, {name: value for name, value in values.items() if name in settled})
            for layer, use in uses:
                seed, most = int(draw.integers(2**32)), rows[layer.weight.name]
                seen[id(use)].add(*(use.rows(v[use.value], layer.weight.shape, most, seed) for v in (now, exact)))
        for layer in stage:
            self._round(layer, [seen[id(use)] for use in layer.uses])

    def _on_grid(self, x: Array, points: tuple[str, ...]) -> Array:
        """Return an input on its grid; all points that it is put together from share it."""
        known = [p for p in points if self.widths[p] != FLOAT]
        return on_grid(x, self.plan.activation(known[0]).grid(self.widths[known[0]])) if known else x

    def _values(self, names: list[str], loose: set[str]) -> Iterator[tuple[dict[str, Array], dict[str, Array]]]:
        """Run all inputs, at the width (but for some points) and in floating point; yield the values named."""
        names = list(dict.fromkeys(names))
        widths = self.widths | dict.fromkeys(loose, FLOAT)
        now = runner(self.master, self.plan, widths, names, known=self.now.names, asked=self.asked)
        exact = runner(self.master, self.plan, dict.fromkeys(widths, FLOAT), names, known=self.exact.names)
        for ours, theirs in zip(self.now, self.exact, strict=True):
            yield now(ours), exact(theirs)

    def _set_ranges(self, uses: list[tuple[Layer, Use]], first: list[Feed]) -> None:
        """Choose for each input of less than 8 bits the part of its range with the least error of layers' outputs."""
        for ranges in dict.fromkeys(self.plan.activation(p).ranges for _, use in uses for p in use.points):
            group = [a for a in self.plan.activations if a.ranges == ranges]  # joined points share their range
            width = self.widths[group[0].name]
            old = group[0].range_at(width)
            if old is None or old.source in SETTLED or given(group[0]):
                continue
            if width >= NARROW or len({self.widths[a.name] for a in group}) > 1:
                continue
            names = {a.name for a in group}
            fed = [
                (
                    grouped(self.master.weights[layer.weight.name], layer.weight, stacked=layer.stacked),
                    np.concatenate(
                        [
                            use.rows(now[use.value], layer.weight.shape, ROWS // len(first), i)
                            for i, now in enumerate(first)
                        ],
                        1,
                    ),
                )
                for layer, use in uses
                if names.intersection(use.points)
            ]
            costs = {part: _cost(_part(old, part), group[0], width, fed) for part in PARTS}
            best = min(costs, key=lambda part: costs[part])
            best = best if costs[best] < CLEARLY * costs[1.0] else 1.0
            own = (*((b, r) for b, r in ranges if b != width), (width, replace(_part(old, best), source=SOURCE)))
            self.plan = self.plan.with_ranges(dict.fromkeys(names, own))

    def _round(self, layer: Layer, seen: list[Seen]) -> None:
        """Decide the codes of a weight and the shifts of the biases that go with it."""
        point = self.plan.weight(layer.weight.name)
        weight = np.asarray(self.master.weights[point.name], np.float32)
        bits = self.widths[point.name]
        biased, stacked = all(use.bias for use in layer.uses), layer.stacked
        own = Rounded(self.bits.weights, self.bits.activations, mark_of(weight))
        if bits < NARROW:
            found = round_weight(weight, point, bits, Seen.of(seen, centred=biased), stacked=stacked)
            own = pack(weight, found.codes, found.grid, self.bits)
        self.plan = _with(self.plan, replace(point, rounded=(*point.rounded, own)))
        rounded = encode(weight, point, bits, own=own if own.scale else None).dequantized()
        kernels, exact = (grouped(array, point, stacked=stacked) for array in (rounded, weight))
        for use, own_seen in zip(layer.uses, seen, strict=True):
            if use.bias:
                bias = self.plan.bias(use.bias)
                shift = own_seen.shift(exact, kernels).astype("<f4").tobytes()
                new = Shift(self.bits.weights, self.bits.activations, shift)
                self.plan = _with(self.plan, replace(bias, shifts=(*bias.shifts, new)))


def _inputs(weight: Weight) -> int:
    """Return of how many inputs an output is a sum."""
    outs = weight.shape[weight.channels] * (weight.groups if weight.channels else 1)
    return math.prod(weight.shape) // outs


def _without(plan: Plan, pair: Bits) -> Plan:
    """Return a plan without what was fitted to a pair of widths before."""

    def others(extras: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(extra for extra in extras if extra.pair != pair)

    points = (replace(p, rounded=others(p.rounded)) if isinstance(p, Weight) else p for p in plan.points)
    biases = (replace(bias, shifts=others(bias.shifts)) for bias in plan.biases)
    return replace(plan, points=tuple(points), biases=tuple(biases))


def _with(plan: Plan, new: Weight | Bias) -> Plan:
    """Return a plan with one entry replaced."""
    if isinstance(new, Bias):
        return replace(plan, biases=tuple(new if b.name == new.name else b for b in plan.biases))
    return replace(plan, points=tuple(new if p.name == new.name else p for p in plan.points))


def _part(old: Range, part: float) -> Range:
    return Range(old.low * part, old.high * part, old.source)


def _cost(part: Range, point: Activation, width: int, fed: list[tuple[Array, Array]]) -> float:
    """Return the error of the outputs of layers if their input is on the grid of a range."""
    grid = make_grid(np.float32(part.low), np.float32(part.high), point.spec(width))
    total = 0.0
    for kernels, x in fed:
        error = (on_grid(x, grid) - x) @ np.swapaxes(kernels, 1, 2)
        total += float(np.square(error).sum())
    return total
