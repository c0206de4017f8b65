"""Which points keep more bits than asked for: those whose rounding costs a network's outputs most, by measurement.

The caller runs the network. Errors of several points nearly add up, so that halving whatever costs most leads to the
worst points without trying each of hundreds; what is wider takes at most a tenth of the multiplications.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from anybit.errors import DataError
from anybit.graph.view import Graph, Node, origins
from anybit.plan.observe import given
from anybit.plan.points import Activation, Plan, Widths
from anybit.spec import FLOAT, WIDEST, Bits

Array = npt.NDArray[Any]

SHARE = 0.1
"""The part of a network's multiplications that may be wider than asked for."""
DEAR = 2.0
"""Points get more bits if their part of the error is so many times their part of the multiplications."""
TRIES = 32
"""How often the outputs are looked at, at most."""
LITTLE = 0.01
"""Points that cost less than this part of the error are not worth more bits."""
SEEN, MOST_INPUTS = 16, 4
"""From how many inputs those that are run are taken, and how many these are, at most."""
WORK = 4e11
"""How many multiplications all runs may take together, if one input each is less: a minute or so of one core."""
MOST_WORK = 2e12
"""How many one input each may take: where that is only a few runs, nothing is looked for."""
MOST_NODES = 60_000
"""How many nodes may be made ready to run at a width in all: a loop that was written out has thousands."""
FEWEST = 4
"""With fewer looks at the outputs nothing is found."""
FINE = 1e-4
"""A squared error of the outputs, relative to their spread, below which nothing is done."""
COARSE = 2.5e-3
"""Above this, what sums hand on gets more bits too: that costs no multiplications, but time in the runtime."""
ROUNDS = (COARSE, 0.0)
"""The worst points are looked for twice then: those of outputs that are off, and then of all, which they may hide."""
STEPS = ((Bits(8, 8), WIDEST), (Bits(4, FLOAT), 8))
"""Widths at which points are looked at, and the width that those which cost most there never go below."""
IMPROBABLE = 1e-6
"""Classes that are less probable than this are all the same."""
LONE, RARE = 20.0, 10.0
"""Numbers of such a multiple of the spread are giants, where that is such a multiple of what most are."""
MEASURED = "measured error"
"""Why a point keeps more bits."""
SUM = "sum, measured error"
"""The same for what a convolution hands on, which is no operand of a multiplication."""

Error = Callable[[Collection[str]], float]
"""The squared error of the outputs, relative to their spread, when these points alone are rounded."""
Outputs = Callable[[Widths], list[Array]]
"""All outputs of the network at some widths, over a few inputs."""
Run = Callable[[Plan], Outputs]
"""What makes the outputs with a plan; floors of the plan do not matter there."""


@dataclass(frozen=True)
class Unit:
    """Points that have one width, and the products that have it with them, by output."""

    names: tuple[str, ...]
    products: frozenset[str]


def units_of(graph: Graph, plan: Plan, joined: Iterable[Sequence[str]], products: Iterable[Node]) -> list[Unit]:
    """Return what can be made wider, in the order of the network; whatever feeds no product that is known is left out.

    What a convolution hands to a sum counts as that convolution. An input whose range the user gave stays as asked.
    """
    makers = graph.makers()
    fed: dict[str, set[str]] = {}
    for node in products:
        for operand in (*node.inputs[: 1 if node.weights else 2], *node.weights):
            for source, _ in origins(graph, operand, None, makers):
                fed.setdefault(source, set()).add(node.output)
    known = {output for outputs in fed.values() for output in outputs}
    together = {name: tuple(group) for group in joined for name in group}
    found: dict[tuple[str, ...], set[str]] = {}
    for point in plan.points:
        if isinstance(point, Activation) and point.kind == "input" and given(point):
            continue
        place = point.place.removesuffix(".input") if point.kind == "input" else point.place
        own = fed.get(place, set())
        if point.kind == "accumulator":
            maker = makers.get(place)
            while maker is not None and maker.output not in known and maker.inputs:
                maker = makers.get(maker.inputs[0])
            own = own | ({maker.output} if maker is not None else set())
        found.setdefault(together.get(point.name, (point.name,)), set()).update(own)
    return [Unit(names, frozenset(outputs)) for names, outputs in found.items() if outputs]


def costs_most(units: Sequence[Unit], error: Error, tries: int = TRIES) -> list[tuple[float, Unit]]:
    """Return units with what each adds to the error, neighbours together where a few tries do not tell them apart.

    >>> harm = {"a": 1.0, "b": 9.0, "c": 0.0, "d": 0.0}
    >>> units = [Unit((name,), frozenset()) for name in harm]
    >>> costs_most(units, lambda names: sum(harm[name] for name in names), tries=4)
    [(1.0, Unit(names=('a',), products=frozenset())), (9.0, Unit(names=('b',), products=frozenset()))]
    """

    def cost(group: Sequence[Unit]) -> float:
        return error([name for unit in group for name in unit.names])

    if not units:
        return []
    whole = cost(units)
    groups = [(whole, list(units))]
    while tries > 1:
        worst = max((entry for entry in groups if len(entry[1]) > 1), key=lambda entry: entry[0], default=(0.0, []))
        if worst[0] <= LITTLE * whole:
            break
        at, half = groups.index(worst), len(worst[1]) // 2
        groups[at : at + 1] = [(cost(part), part) for part in (worst[1][:half], worst[1][half:])]
        tries -= 2
    return [(found, _together(group)) for found, group in groups if found > LITTLE * whole]


def _together(units: Sequence[Unit]) -> Unit:
    names = tuple(name for unit in units for name in unit.names)
    return Unit(names, frozenset().union(*(unit.products for unit in units)))


def worth_it(
    blamed: Sequence[tuple[float, Unit]], sizes: Mapping[str, int], taken: Collection[str] = (), dear: float = DEAR
) -> list[Unit]:
    """Return the units that take most of the error away for the products that become wider, at most a tenth of all.

    `sizes` has the multiplications of every product; those of `taken` are wider already.

    >>> blamed = [(5.0, Unit(("a",), frozenset({"x"}))), (4.0, Unit(("b",), frozenset({"y"})))]
    >>> [unit.names for unit in worth_it(blamed, {"x": 20, "y": 10, "z": 100})]
    [('b',)]
    >>> [unit.names for unit in worth_it([(9.0, blamed[0][1]), (1.0, blamed[1][1])], {"x": 2, "y": 8, "z": 100})]
    [('a',)]
    """
    total, whole = sum(sizes.values()), sum(cost for cost, _ in blamed)
    done, left = set(taken), list(blamed)
    room = SHARE * total - sum(sizes[output] for output in done)
    found: list[Unit] = []
    while True:
        new = {unit: sum(sizes[output] for output in unit.products - done) for _, unit in left}
        # With a product, everything that feeds nothing else comes for free.
        gain = {u: sum(c for c, other in left if other.products <= done | u.products) for _, u in left}
        fits = [u for _, u in left if new[u] <= room and gain[u] * total >= dear * whole * new[u]]
        if not fits:
            return found
        best = max(fits, key=lambda unit: gain[unit] / (new[unit] or 1e-9))
        left = [entry for entry in left if entry[1] is not best]
        room -= new[best]
        done |= best.products
        found.append(best)


def with_floors(plan: Plan, units: Iterable[Unit], floor: int, because: str = MEASURED) -> Plan:
    """Return the plan with these points never below a width."""
    names = {name for unit in units for name in unit.names}
    points = (
        replace(p, floor=floor, because=because) if p.name in names and p.floor < floor else p for p in plan.points
    )
    return replace(plan, points=tuple(points))


def chosen(count: int, multiplications: int) -> list[int]:
    """Return which of the first inputs are run: a few, of a large network fewer.

    >>> chosen(16, 10**6), chosen(16, 10**12), chosen(2, 10**6)
    ([0, 5, 10, 15], [0], [0, 1])
    """
    most = max(1, min(MOST_INPUTS, count, int(WORK / (len(STEPS) * TRIES * max(1, multiplications)))))
    return [int(i) for i in np.linspace(0, count - 1, most).round()]


def without_means(plan: Plan, biases: Container[str]) -> Plan:
    """Return the plan with nothing taken back by some biases."""
    found = (replace(bias, mean=None) if bias.name in biases else bias for bias in plan.biases)
    return replace(plan, biases=tuple(found))


def ways(plan: Plan, clipped: Plan, biases: Container[str]) -> list[Plan]:
    """Return what can be tried: biases that take nothing back or do, and ranges that clip at 8 bits more or less often.

    The first is what stands where nothing can be measured.
    """
    return list(dict.fromkeys(p for some in (plan, clipped) for p in (without_means(some, biases), some)))


def least_off(plans: Sequence[Plan], run: Run) -> Plan:
    """Return the plan with which the outputs are off least at the widths that are looked at, compared to the first."""
    floats = dict.fromkeys((point.name for point in plans[0].points), FLOAT)
    exact = run(plans[0])(floats) if len(plans) > 1 else []

    def errors(plan: Plan) -> Array:
        outputs = run(plan)
        return np.array([relative_errors(exact, outputs(plan.widths(bits))) for bits, _ in STEPS])

    before = np.maximum(errors(plans[0]), FINE) if exact else np.ones(1)
    return min(plans, key=lambda plan: float((np.maximum(errors(plan), FINE) / before).mean())) if exact else plans[0]


def widened(
    graph: Graph, plans: Sequence[Plan], joined: Iterable[Sequence[str]], counts: Mapping[Node, int], run: Run
) -> Plan:
    """Return the best of some plans, with more bits for the points whose rounding costs the outputs most.

    Args:
        graph: The network.
        plans: Its plans, calibrated; the first where nothing can be measured.
        joined: Points that share their grid.
        counts: The multiplications of every product.
        run: What the network makes of a few inputs.
    """
    plan = plans[0]
    sizes = {node.output: count for node, count in counts.items()}
    total = sum(sizes.values())
    most, tries = SHARE * total, min(TRIES, int(MOST_WORK / (len(STEPS) * max(1, total))))
    if total and tries < FEWEST:
        warnings.warn(
            f"one input takes {total / 1e9:.0f} billion multiplications: too many to measure which points need more "
            "bits, so only the kinds of layers that usually do keep 8; anybit bench tells what each width loses",
            stacklevel=2,
        )
    if not total or tries < FEWEST:
        return plan
    tries = max(FEWEST, min(tries, MOST_NODES // len(graph.nodes)))
    units = [u for u in units_of(graph, plan, joined, counts) if sum(sizes[name] for name in u.products) <= most]
    with contextlib.suppress(DataError):  # a network that does not run at some width keeps the plan that it has
        plan = least_off(plans, run)
    look = _Widening(plan, run(plan), sizes, tries)
    with contextlib.suppress(DataError):
        look.run(units)
    return look.plan


class _Widening:
    """A plan on its way to more bits."""

    def __init__(self, plan: Plan, outputs: Outputs, sizes: Mapping[str, int], tries: int) -> None:
        self.plan, self.outputs, self.sizes, self.tries = plan, outputs, sizes, tries
        self.plain = dict.fromkeys((point.name for point in plan.points), FLOAT)
        self.exact: list[Array] = []
        self.taken: set[str] = set()

    def run(self, units: Sequence[Unit]) -> None:
        """Look at one width after the other."""
        self.exact = self.outputs(self.plain)
        for bits, floor in STEPS:
            start = self.plan
            self._step(units, floor, bits)
            if floor == WIDEST and max(self._errors(self.plan.widths(bits)), default=0.0) > COARSE:
                self._start_over(start, units, bits)

    def _start_over(self, plan: Plan, units: Sequence[Unit], bits: Bits) -> None:
        """Give all sums more bits first, which shows what else costs most, and keep that if the error is smaller."""
        sums = [Unit((p.name,), frozenset()) for p in plan.activations if p.kind == "accumulator" and p.ranges]
        other = _Widening(with_floors(plan, sums, WIDEST, SUM), self.outputs, self.sizes, self.tries)
        other.exact = self.exact
        for least in ROUNDS:
            other._step(units, WIDEST, bits, dear=0, least=least)  # 8 bits are few here, and need all the room
        if sum(other._errors(other.plan.widths(bits))) < sum(self._errors(self.plan.widths(bits))):
            self.plan, self.taken = other.plan, other.taken

    def _step(self, units: Sequence[Unit], floor: int, bits: Bits, dear: float = DEAR, least: float = 0.0) -> None:
        """Give the units that cost most at a width another floor, if that makes the error smaller.

        Outputs whose error is `least` or less do not count, unless all are.
        """
        widths = self.plan.widths(bits)
        before = self._errors(widths)
        if max(before, default=0.0) <= FINE:
            return
        least = least if max(before) > least else 0.0

        def share(widths: Widths) -> float:  # of all outputs alike: one may be off by far more than the others
            return sum(new / old for new, old in zip(self._errors(widths), before, strict=True) if old > least)

        narrow = [unit for unit in units if any(widths[name] == bits.weights for name in unit.names)]
        blamed = costs_most(narrow, lambda names: share(self.plain | {n: widths[n] for n in names}), self.tries)
        found = worth_it(blamed, self.sizes, self.taken, dear)
        plan = with_floors(self.plan, found, floor)
        if found and share(plan.widths(bits)) < sum(old > least for old in before):
            self.plan = plan
            self.taken |= {output for unit in found for output in unit.products}

    def _errors(self, widths: Widths) -> list[float]:
        return relative_errors(self.exact, self.outputs(widths))


def as_one(parts: Sequence[Array]) -> Array:
    """Return an output over several inputs: rows of its last dimension, or, where that differs, all its numbers.

    >>> as_one([np.zeros((1, 5, 3)), np.zeros((1, 2, 3))]).shape, as_one([np.zeros(2), np.zeros(3)]).shape
    ((7, 3), (5,))
    """
    lasts = {part.shape[-1] if part.ndim and part.size else 0 for part in parts}
    last = lasts.pop() if len(lasts) == 1 else 0
    return np.concatenate([part.reshape(-1, last) if last else part.reshape(-1) for part in parts])


def relative_errors(exact: list[Array], found: list[Array]) -> list[float]:
    """Return the squared error of each output, relative to how far it spreads.

    Of whole numbers those that differ count; of an answer that became longer or shorter, all of it. Probabilities of
    classes are compared by their logarithms: else the few examples that are near a tie would decide everything. So are
    scores of which a few are giants, and most lie near the zero that decides.

    >>> relative_errors([np.array([1.0, -1.0]), np.array([1, 2])], [np.array([1.0, -2.0]), np.array([1, 3])])
    [0.5, 0.5]
    """
    errors = []
    for want, got in zip(exact, found, strict=True):
        if want.shape != got.shape:
            errors.append(1.0)
            continue
        if _sums_to_one(want):
            want, got = (np.log(np.maximum(x, IMPROBABLE)) for x in (want, got))
        if _has_giants(want):
            most = float(np.median(np.abs(want))) or 1.0
            want, got = (np.arcsinh(x / most) for x in (want, got))
        if want.dtype.kind != "f":
            errors.append(float((want != got).mean()) if want.size else 0.0)
        else:
            spread = max(float(want.var(dtype=np.float64)), 1e-30)
            error = float(np.square(got.astype(np.float64) - want).mean()) / spread if want.size else 0.0
            errors.append(error if error < np.inf else 1.0)  # NaN is not
    return errors


def _sums_to_one(x: Array) -> bool:
    """Tell whether an output is what a softmax over its last dimension gives."""
    if x.dtype.kind != "f" or x.ndim < 2 or x.shape[-1] < 2 or not x.size or not x.min() >= 0:
        return False
    return bool(np.abs(x.sum(-1, dtype=np.float64) - 1).max() < 1e-3)


def _has_giants(x: Array) -> bool:
    """Tell whether a few numbers of both signs make all of the spread.

    >>> _has_giants(np.array([1.0, -1.0] * 5000 + [1e4])), _has_giants(np.array([1.0, -1.0] * 5000 + [10.0]))
    (True, False)
    """
    if x.dtype.kind != "f" or not x.size or not x.min() < 0:
        return False
    size, spread = np.abs(x), float(x.std(dtype=np.float64))
    return bool(size.max() > LONE * spread > LONE * RARE * np.median(size))
