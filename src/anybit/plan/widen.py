"""Which points keep more bits than asked for: those whose rounding costs a network's outputs most, by measurement.

The caller says what rounding some points alone does to the outputs. Errors of several points nearly add up, so that
halving whatever costs most leads to the worst points without trying each of hundreds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from anybit.graph.view import Graph, Node, origins
from anybit.plan.observe import given
from anybit.plan.points import Activation, Plan

SHARE = 0.1
"""The part of a network's multiplications that may be wider than asked for."""
TRIES = 32
"""How often the outputs are looked at, at most."""
LITTLE = 0.01
"""Points that cost less than this part of the error are not worth more bits."""
MEASURED = "measured error"
"""Why a point keeps more bits."""
SUM = "sum, measured error"
"""The same for what a convolution hands on, which is no operand of a multiplication."""

Error = Callable[[Collection[str]], float]
"""The squared error of the outputs, relative to their spread, when these points alone are rounded."""


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


def worth_it(blamed: Sequence[tuple[float, Unit]], sizes: Mapping[str, int], taken: Collection[str] = ()) -> list[Unit]:
    """Return the units that take most of the error away for the products that become wider, at most a tenth of all.

    `sizes` has the multiplications of every product; those of `taken` are wider already.

    >>> blamed = [(5.0, Unit(("a",), frozenset({"x"}))), (4.0, Unit(("b",), frozenset({"y"})))]
    >>> [unit.names for unit in worth_it(blamed, {"x": 20, "y": 10, "z": 100})]
    [('b',)]
    """
    room, done, left = SHARE * sum(sizes.values()), set(taken), list(blamed)
    room -= sum(sizes[output] for output in done)
    found: list[Unit] = []
    while True:
        new = {unit: sum(sizes[output] for output in unit.products - done) for _, unit in left}
        fits = [(cost, unit) for cost, unit in left if new[unit] <= room]
        if not fits:
            return found
        _, best = max(fits, key=lambda entry: entry[0] / (new[entry[1]] or 1e-9))
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
