"""More bits where a few inputs show that they are needed, for at most a tenth of a network's multiplications."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
MOST_WORK = 2e12
"""How many they may take at all: of a network for which that is a few runs, little can be found out."""
FINE = 1e-4
"""A squared error of the outputs, relative to their spread, below which nothing is done."""
FEWEST = 4
"""With fewer looks at the outputs nothing is found."""
COARSE = 1e-2
"""Above this, what sums hand on gets more bits too: that costs no multiplications, but time in the runtime."""

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
    tries = min(TRIES, int(MOST_WORK / (len(STEPS) * total)))
    if tries < FEWEST:
        return master.plan
    look = _Widening(master, some, sizes, tries)
    with contextlib.suppress(DataError):  # a network that does not run at some width keeps the plan that it has
        look.run(units)
    return look.master.plan


class _Widening:
    """A plan on its way to more bits."""

    def __init__(self, master: Master, feeds: Sequence[Feed], sizes: Mapping[str, int], tries: int) -> None:
        self.master, self.feeds, self.sizes, self.tries = master, feeds, sizes, tries
        self.plain = dict.fromkeys((point.name for point in master.plan.points), FLOAT)
        self.kept = Kept(2**28)
        self.exact: list[Array] = []
        self.taken: set[str] = set()

    def run(self, units: Sequence[Unit]) -> None:
        """Look at one width after the other."""
        self.exact = outputs_at(self.master, self.feeds, self.plain, self.kept)
        for bits, floor in STEPS:
            widths = self.master.plan.widths(bits)
            before = self._errors(widths)
            if max(before) > FINE:
                narrow = [unit for unit in units if any(widths[name] == bits.weights for name in unit.names)]
                self._step(narrow, floor, bits, before)
            if floor == WIDEST and max(self._errors(self.master.plan.widths(bits))) > COARSE:
                self._widen_sums(bits)

    def _widen_sums(self, bits: Bits) -> None:
        """Give all sums more bits, if that makes the error smaller."""
        plan = self.master.plan
        sums = [Unit((p.name,), frozenset()) for p in plan.activations if p.kind == "accumulator" and p.ranges]
        wider = with_floors(plan, sums, WIDEST, SUM)
        if sum(self._errors(wider.widths(bits))) < sum(self._errors(plan.widths(bits))):
            self.master = replace(self.master, header=replace(self.master.header, plan=wider))

    def _step(self, units: Sequence[Unit], floor: int, bits: Bits, before: Sequence[float]) -> None:
        """Give the units that cost most at a width another floor, if that makes the error smaller."""
        widths = self.master.plan.widths(bits)

        def share(widths: Widths) -> float:  # of all outputs alike: one may be off by far more than the others
            return sum(new / old for new, old in zip(self._errors(widths), before, strict=True) if old > 0)

        blamed = costs_most(units, lambda names: share(self.plain | {n: widths[n] for n in names}), self.tries)
        found = worth_it(blamed, self.sizes, self.taken)
        plan = with_floors(self.master.plan, found, floor)
        if found and share(plan.widths(bits)) < sum(old > 0 for old in before):
            self.master = replace(self.master, header=replace(self.master.header, plan=plan))
            self.taken |= {output for unit in found for output in unit.products}

    def _errors(self, widths: Widths) -> list[float]:
        return relative_errors(self.exact, outputs_at(self.master, self.feeds, widths, self.kept))
