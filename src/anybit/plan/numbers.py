"""Everything at one width: what `Plan.at` returns, and the memory of what was made for widths used before."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from anybit.plan.codes import (
    Codes,
    Ends,
    Nearest,
    RoundedBias,
    encode,
    limits,
    round_bias,
    round_weight,
    rounded_at,
)
from anybit.plan.grid import Grid
from anybit.plan.points import Plan, Weight, Widths
from anybit.spec import FLOAT, Bits

T = TypeVar("T")


class Kept:
    """What was made for widths used before, up to so many bytes and entries; the least recently used goes first."""

    def __init__(self, limit: int, most: float = math.inf) -> None:
        self.limit, self.most = limit, most
        self.nbytes = 0
        self._entries: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, (self.limit, self.most)  # a copy starts empty

    def get(self, key: Any, make: Callable[[], T], nbytes: Callable[[T], int]) -> T:
        """Return what is kept under a key, or make it and keep it; what is larger than all the room is not kept."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key][0]  # type: ignore[no-any-return]
        made = make()  # others may look and make meanwhile
        size = nbytes(made)
        if size <= self.limit:
            self.make_room(size)
            with self._lock:
                self.nbytes += size - self._entries.get(key, (None, 0))[1]
                self._entries[key] = made, size
        return made

    def __contains__(self, key: Any) -> bool:
        return key in self._entries

    def make_room(self, nbytes: int) -> None:
        """Drop what was not used for long until one more entry of so many bytes fits."""
        with self._lock:
            while self._entries and (self.nbytes + nbytes > self.limit or len(self._entries) >= self.most):
                _, (_, size) = self._entries.popitem(last=False)
                self.nbytes -= size

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(frozen=True, eq=False)
class Numbers:
    """A network's numbers at some widths, by the names of its points, each computed when it is asked for.

    Points at 32 bits have none: they stay in floating point. `asked` is the pair that was asked for each weight, of
    which what the weight has of its own for that pair holds.
    """

    plan: Plan
    widths: Widths
    tensors: Mapping[str, npt.NDArray[Any]]
    kept: Kept
    asked: Mapping[str, Bits] = field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells these numbers from others of the same plan."""
        weights = {weight.name for weight in self.plan.weights}
        return tuple(self.key_of(name) if name in weights else width for name, width in self.widths.items())

    def key_of(self, name: str) -> tuple[int, Bits | None]:
        """Return what tells the codes of a weight from others: its width, and the pair that has its own, if any."""
        pair = self.asked.get(name)
        return self.widths[name], pair if self.plan.weight(name).own(pair) else None

    @property
    def weights(self) -> tuple[str, ...]:
        """The weights that are rounded."""
        return tuple(w.name for w in self.plan.weights if self.widths[w.name] != FLOAT)

    @property
    def activations(self) -> tuple[str, ...]:
        """The activations that are rounded."""
        return tuple(a.name for a in self.plan.activations if self.widths[a.name] != FLOAT)

    @property
    def biases(self) -> tuple[str, ...]:
        """The biases of layers whose weight is rounded."""
        return tuple(b.name for b in self.plan.biases if self.widths[b.weight] != FLOAT)

    def codes(self, name: str) -> Codes:
        """Return the codes and scale of a weight."""
        how, bits = self.plan.weight(name), self.widths[name]
        array = np.asarray(self.tensors[name], np.float32)
        key = ("codes", name, *self.key_of(name))

        def make() -> Codes:
            return encode(array, how, bits, self._ends(how, array), rounded_at(how, array, self.asked.get(name)))

        return self.kept.get(key, make, lambda codes: codes.nbytes)

    def rounded(self, name: str) -> Codes | Nearest:
        """Return a weight on its grid, for those who want it in floating point: codes only where they come first."""
        how = self.plan.weight(name)
        if how.sums or how.own(self.asked.get(name)):
            return self.codes(name)
        array = np.asarray(self.tensors[name], np.float32)
        return round_weight(array, how, self.widths[name], self._ends(how, array))

    def _ends(self, how: Weight, array: npt.NDArray[np.float32]) -> Ends | None:
        """Return the ends of a weight's grid if all widths have the same."""
        if how.clip:
            return None
        return self.kept.get(("ends", how.name), lambda: limits(array, how, FLOAT), lambda ends: 2 * ends[0].nbytes)

    def grid(self, name: str) -> Grid:
        """Return the grid of an activation."""
        bits = self.widths[name]
        return self.kept.get(("grid", name, bits), lambda: self.plan.activation(name).grid(bits), lambda grid: 64)

    def bias(self, name: str, weight: Callable[[], Codes | Nearest] | None = None) -> RoundedBias:
        """Return the bias of a layer: corrected, and in whole units where integer kernels add it.

        `weight` gives that on its grid, for callers that have it.
        """
        own = weight or (lambda: self.codes(self.plan.bias(name).weight))
        key = self.bias_key(name)
        return self.kept.get(key, lambda: self._bias(name, key[-1], own()), lambda found: 3 * found.values.nbytes)

    def bias_key(self, name: str) -> tuple[str, str, int, Bits | None, int]:
        """Return under what a bias is kept: its name, what tells the codes of its weight, the width of the input."""
        bias = self.plan.bias(name)
        return "bias", name, *self.key_of(bias.weight), self.widths.get(bias.input, FLOAT)

    def _bias(self, name: str, width: int, weight: Codes | Nearest) -> RoundedBias:
        bias = self.plan.bias(name)
        exact, master = (np.asarray(self.tensors[n], np.float32) for n in (name, bias.weight))
        mean = None if bias.mean is None else np.asarray(bias.mean, np.float32)
        source = self.grid(bias.input) if width != FLOAT else None
        how = self.plan.weight(bias.weight)
        pair = self.asked.get(how.name)
        own = next((shift for shift in bias.shifts if shift.pair == pair), None)
        shift = own.array() if own and rounded_at(how, master, pair) else None
        return round_bias(exact, how, weight, master, mean, source, width, shift)
