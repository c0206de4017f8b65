"""More bits where a few inputs show that they are needed, for at most a tenth of a network's multiplications."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from onnx import helper

from anybit.artifact.coverage import counted, products
from anybit.artifact.layers import complete
from anybit.artifact.master import Master
from anybit.artifact.output_error import outputs_at, relative_errors
from anybit.errors import DataError
from anybit.graph.from_onnx import read_onnx
from anybit.plan.numbers import Kept
from anybit.plan.points import Plan, Widths
from anybit.plan.widen import SHARE, SUM, TRIES, Unit, costs_most, units_of, with_floors, worth_it
from anybit.spec import FLOAT, WIDEST, Bits

Array = npt.NDArray[Any]
Feed = Mapping[str, Array]
T = TypeVar("T")

SEEN, MOST_INPUTS = 16, 4
"""From how many inputs those that are run are taken, and how many these are, at most."""
WORK = 5e10
"""How many multiplications all runs may take together, if one input each is less: a minute or so."""
FINE = 1e-4
"""A squared error of the outputs, relative to their spread, below which nothing is done."""
COARSE = 1e-2
"""Above this, what sums hand on gets more bits too: that costs no multiplications, but time in the runtime."""
ROUNDS = 2
"""How often the worst points are looked for then: those that cost most at first hide others."""

STEPS = ((Bits(8, 8), WIDEST), (Bits(4, FLOAT), 8))
"""Widths at which points are looked at, and the width that those which cost most there never go below."""


def remembered(inputs: Iterable[T], some: list[T]) -> Iterator[T]:
    """Hand on inputs, and keep the first few.

    >>> some: list[int] = []
    >>> sum(remembered(range(100), some)), len(some)
    (4950, 16)
    """
    for given in inputs:
        if len(some) < SEEN:
            some.append(given)
        yield given


def widened(master: Master, joined: Sequence[Sequence[str]], feeds: Sequence[Feed]) -> Plan:
    """Return the plan of a master with more bits for the points whose rounding costs the outputs most.

    Args:
        master: The network, calibrated.
        joined: Points that share their grid.
        feeds: Inputs that are ready to run.
    """
    model = complete(master)
    graph = read_onnx(model.proto, {tensor.name: model.array(tensor) for tensor in model.graph.initializer})
    counts = counted(model, products(graph), feeds[0], where=str(master.path))
    sizes = {node.output: count for node, count in counts.items()}
    total = sum(sizes.values())
    if not total:
        return master.plan
    most = max(1, min(MOST_INPUTS, len(feeds), int(WORK / (len(STEPS) * TRIES * total))))
    kinds = {v.name: helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type) for v in master.graph.graph.input}
    chosen = (feeds[i] for i in np.linspace(0, len(feeds) - 1, most).round().astype(int))
    some = [{name: np.asarray(feed[name], kind) for name, kind in kinds.items()} for feed in chosen]
    units = [
        unit
        for unit in units_of(graph, master.plan, joined, counts)
        if sum(sizes[output] for output in unit.products) <= SHARE * total
    ]
    look = _Widening(master, some, sizes)
    with contextlib.suppress(DataError):  # a network that does not run at some width keeps the plan that it has
        look.run(units)
    return look.master.plan


class _Widening:
    """A plan on its way to more bits."""

    def __init__(self, master: Master, feeds: Sequence[Feed], sizes: Mapping[str, int]) -> None:
        self.master, self.feeds, self.sizes = master, feeds, sizes
        self.plain = dict.fromkeys((point.name for point in master.plan.points), FLOAT)
        self.kept = Kept(2**28)
        self.exact: list[Array] = []
        self.taken: set[str] = set()

    def run(self, units: Sequence[Unit]) -> None:
        """Look at one width after the other."""
        self.exact = outputs_at(self.master, self.feeds, self.plain, self.kept)
        for bits, floor in STEPS:
            start = self.master.plan
            self._step(units, floor, bits)
            if floor == WIDEST and max(self._errors(bits)) > COARSE:
                self._start_over(start, units, bits)

    def _start_over(self, plan: Plan, units: Sequence[Unit], bits: Bits) -> None:
        """Give all sums more bits first, which shows what else costs most, and keep that if the error is smaller."""
        before, old, taken = sum(self._errors(bits)), self.master, self.taken
        sums = [Unit((p.name,), frozenset()) for p in plan.activations if p.kind == "accumulator" and p.ranges]
        self._take(with_floors(plan, sums, WIDEST, SUM))
        self.taken = set()
        for _ in range(ROUNDS):
            self._step(units, WIDEST, bits)
        if sum(self._errors(bits)) >= before:
            self.master, self.taken = old, taken

    def _step(self, units: Sequence[Unit], floor: int, bits: Bits) -> None:
        """Give the units that cost most at a width another floor, if that makes the error smaller."""
        before, widths = self._errors(bits), self.master.plan.widths(bits)
        if max(before) <= FINE:
            return

        def share(errors: Sequence[float]) -> float:  # of all outputs alike: one may be off by far more than the others
            return sum(new / old for new, old in zip(errors, before, strict=True) if old > 0)

        def alone(names: Collection[str]) -> float:
            return share(self._errors_at(self.plain | {name: widths[name] for name in names}))

        narrow = [unit for unit in units if any(widths[name] == bits.weights for name in unit.names)]
        found = worth_it(costs_most(narrow, alone), self.sizes, self.taken)
        old = self.master
        self._take(with_floors(old.plan, found, floor))
        if found and share(self._errors(bits)) < sum(error > 0 for error in before):
            self.taken |= {output for unit in found for output in unit.products}
        else:
            self.master = old

    def _take(self, plan: Plan) -> None:
        self.master = replace(self.master, header=replace(self.master.header, plan=plan))

    def _errors(self, bits: Bits) -> list[float]:
        return self._errors_at(self.master.plan.widths(bits))

    def _errors_at(self, widths: Widths) -> list[float]:
        return relative_errors(self.exact, outputs_at(self.master, self.feeds, widths, self.kept))
