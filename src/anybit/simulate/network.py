"""The simulated network: any width, as often as you like, from one set of weights."""

from __future__ import annotations

import contextlib
import copy
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from anybit.artifact.master import Master
from anybit.errors import SpecError
from anybit.graph.from_torch import to_numpy
from anybit.plan.allocation import Allocation
from anybit.plan.codes import Codes, Nearest
from anybit.plan.numbers import Kept, Numbers
from anybit.plan.points import Plan, Widths
from anybit.plan.text import plan_from_values, plan_to_values
from anybit.simulate.allocate import allocate
from anybit.simulate.modules import Activation, Weight, executors
from anybit.simulate.signature import Signature
from anybit.spec import FLOAT, Bits, LayerWidths, layer_bits

CACHE_BYTES = 512 * 2**20
"""How much memory the rounded weights of widths used before may take, so that going back to one costs nothing."""


class QuantizedNetwork(nn.Module):
    """A captured network with a switch for its bit width. `anybit.prepare` makes these.

    The weights in floating point are never changed by `set_bits`: any sequence of widths followed by 32 gives
    back the original output, bit for bit.
    """

    def __init__(self, body: fx.GraphModule, plan: Plan, takes: Signature) -> None:
        super().__init__()
        self.body = body
        self._parts = executors(body)
        self._plan, self._takes = plan, takes
        self._bits = Bits()
        self._layers: dict[str, Bits] = {}
        self.folded: dict[str, str] = {}
        """The batch norm that was folded into each weight, by the path it has in the model."""
        self._kept = Kept(CACHE_BYTES)
        self._seen: Tensor | None = None
        self._rounded = False
        """Whether the modules hold what the weights are at the current widths."""
        self.eval()

    @property
    def plan(self) -> Plan:
        """What is quantized, over which range, and where the range came from."""
        return self._plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        """Execute another plan of the same network."""
        parts = self._parts
        named = {entry.name: entry for entry in (*plan.points, *plan.biases)}
        if named.keys() != parts.keys():
            raise SpecError("this plan has other points than the network; prepare the network it was made for")
        for name, module in parts.items():
            module.point = named[name]
        self._plan = plan
        self._forget()
        self.set_bits(weights=self._bits.weights, activations=self._bits.activations, layers=self._layers)

    @property
    def takes(self) -> Signature:
        """What it is called with: the inputs of the example."""
        return self._takes

    @property
    def bits(self) -> Bits:
        """The widths that the network runs at, apart from layers with widths of their own."""
        return self._bits

    @property
    def layers(self) -> dict[str, Bits]:
        """The layers with widths of their own, as they were given to `set_bits`."""
        return dict(self._layers)

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The weights in floating point, by the names of their points."""
        return {name: m.master for name, m in self._parts.items() if isinstance(m, Weight)}

    def set_bits(
        self,
        pair: Bits | str | tuple[int, int] | None = None,
        /,
        *,
        weights: int | None = None,
        activations: int | None = None,
        layers: LayerWidths | None = None,
    ) -> None:
        """Run at these widths from now on; 32 means floating point.

        Args:
            pair: Both widths at once: "W4A8", (4, 8), or "FP".
            weights: The width of every weight.
            activations: The width of every activation. The input and what convolutions hand to sums never go
                below 8 bits.
            layers: Other widths for points whose name matches a pattern, as (weights, activations). A pattern names
                points as the plan does, or the layer that a weight belongs to; where several match the last one wins.

        Outside of training mode the weights are rounded now, not in the next forward pass.
        """
        bits, chosen = Bits.asked(pair, weights, activations), layer_bits(layers)
        self._plan.asked(bits, chosen)  # refuses patterns that match nothing, before anything changes
        self._bits, self._layers = bits, chosen
        self._execute()

    def numbers(self) -> Numbers:
        """Return everything that the plan says at the current widths: codes, scales, grids, biases."""
        self._look()
        return self._numbers()

    def _numbers(self, widths: Widths | None = None) -> Numbers:
        masters = {name: m.master for name, m in self._parts.items() if not isinstance(m, Activation)}
        tensors: Mapping[str, Any] = _Arrays(masters)
        if widths is None:
            return self._plan.at(self._bits, self._layers, tensors=tensors, kept=self._kept)
        return Numbers(self._plan, widths, tensors, self._kept)

    def execute(self, widths: Widths) -> None:
        """Run a network in floating point at these widths of its points, until the next `set_bits`."""
        assert self._bits == Bits(), "it would go back to its own widths"
        self._execute(widths)

    @torch.no_grad()
    def _look(self) -> None:
        """Forget what was made of weights that have changed since."""
        marks = self._marks()
        if self._seen is None or not torch.equal(marks, self._seen):
            self._forget()
            self._seen = marks

    @torch.no_grad()
    def _execute(self, widths: Widths | None = None) -> None:
        """Put what the plan says at the current widths, or at others, into the modules."""
        parts = self._parts
        if self.training:
            self._seen, self._rounded = None, False  # weights change with every step, and are rounded as they are then
        found = self._numbers(widths)
        for name, module in parts.items():
            if isinstance(module, Activation):
                bits = found.widths[name]
                module.set_grid(None if bits == FLOAT else found.grid(name), bits)
            elif isinstance(module, Weight) and (module.bits, module.fitted) != found.key_of(name):
                (module.bits, module.fitted), module.value = found.key_of(name), None
        if not self.training:
            self._round(found, parts)
            self._rounded = True

    def _round(self, found: Numbers, parts: dict[str, Any]) -> None:
        """Put every weight on its grid, and correct the biases that go with them."""
        masters = {name: parts[name].master for name in found.weights}
        keys = {name: ("value", name, *found.key_of(name)) for name in masters}

        def missing() -> int:
            made = {name for name in masters if parts[name].value is not None or keys[name] in self._kept}
            return sum(5 * m.numel() for name, m in masters.items() if name not in made)

        new = missing()
        known = self._seen is not None and all(found.bias_key(name) in self._kept for name in found.biases)
        if new or not known:  # what is there already waits for the forward pass, which looks before it runs
            self._look()
            new = missing()
        # Unless as much again fits beside them, nothing else is kept: a part of a network's weights is of no use.
        self._kept.make_room(new if 2 * new <= self._kept.limit else self._kept.limit)

        biases: dict[str, list[str]] = {}
        for bias in found.biases:
            biases.setdefault(self._plan.bias(bias).weight, []).append(bias)

        made: dict[str, Codes | Nearest] = {}

        def rounded(name: str) -> Codes | Nearest:
            if name not in made:  # once for weight and bias, however little is kept
                made[name] = found.rounded(name)
            return made[name]

        def put(name: str) -> None:
            def make() -> Tensor:
                room = torch.empty(masters[name].shape)  # numpy asks for huge pages, and the system takes long for them
                rounded(name).dequantized(room.numpy())
                return room.to(masters[name])

            if parts[name].value is None:
                parts[name].value = self._kept.get(keys[name], make, lambda t: t.numel() * t.element_size())
            for bias in biases.get(name, ()):
                parts[bias].set_value(found.bias(bias, lambda: rounded(name)))
            made.pop(name, None)

        large = sorted(masters, key=lambda name: -masters[name].numel())
        if not new or torch.get_num_threads() == 1:
            list(map(put, large))
            return
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # numpy lets others run while it computes
            list(pool.map(put, large))

    def _marks(self) -> Tensor:
        """Return a number for each weight and bias that changes with its content, however that was changed."""
        marks = [_mark(m.master.detach()) for m in self._parts.values() if not isinstance(m, Activation)]
        return torch.stack(marks) if marks and isinstance(marks[0], Tensor) else torch.from_numpy(np.array(marks))

    def _forget(self) -> None:
        self._kept.clear()
        self._seen, self._rounded = None, False
        for module in self._parts.values():
            if not isinstance(module, Activation):
                module.value = None

    @contextlib.contextmanager
    def at(self, *, weights: int, activations: int, layers: LayerWidths | None = None) -> Iterator[QuantizedNetwork]:
        """Run at these widths inside a `with` block, then at the old ones again."""
        before, apart = self._bits, self._layers
        self.set_bits(weights=weights, activations=activations, layers=layers)
        try:
            yield self
        finally:
            self.set_bits(weights=before.weights, activations=before.activations, layers=apart)

    def as_master(self) -> Master:
        """Return the network as a master in memory: what `anybit.save` would write, in float32."""
        from anybit.simulate.to_onnx import as_master

        return as_master(self)

    def allocate(self, *, budget: float, loader: Iterable[Any], **options: Any) -> Allocation:
        """Choose a width for every weight under a budget; see `anybit.simulate.allocate.allocate`."""
        return allocate(self, budget=budget, loader=loader, **options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network as the original was called in the example, with any sizes that it leaves free."""
        self._takes.check(args, kwargs)
        rounded = self._bits.weights != FLOAT or any(b.weights != FLOAT for b in self._layers.values())
        if rounded and not self.training:
            self._look()
            if not self._rounded:
                self._execute()
        return self.body(*args, **kwargs)

    def get_extra_state(self) -> Tensor:
        """Return the plan, so that a state dict holds the ranges: the bytes of its text, which every format stores."""
        return torch.from_numpy(np.frombuffer(json.dumps(plan_to_values(self._plan)).encode(), np.uint8).copy())

    def set_extra_state(self, state: Tensor) -> None:
        """Take over the plan of a state dict."""
        self.plan = plan_from_values(json.loads(bytes(state.cpu().numpy()).decode()), where="the state dict")

    def _apply(self, fn: Any, recurse: bool = True) -> QuantizedNetwork:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._forget()  # the network moves to another device or dtype
        self._execute()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedNetwork:
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        with warnings.catch_warnings():
            # The captured graph's own types warn about each other when copied.
            warnings.simplefilter("ignore", FutureWarning)
            new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new


class _Arrays(dict[str, nn.Parameter]):
    """Parameters by name that are handed out as float32 arrays, each when it is asked for."""

    def __getitem__(self, name: str) -> Any:
        return to_numpy(super().__getitem__(name)).astype(np.float32, copy=False)


COLUMNS = 509
"""A prime, so that channels that change places change columns."""


def _mark(x: Tensor) -> Any:
    """Return a number that changes with the content of a tensor: a weighted sum of its bits, column by column."""
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
    flat = x.contiguous().view(kinds[x.element_size()]).reshape(-1)
    size = flat.element_size()
    if flat.numel() and flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0:
        flat = flat.view(torch.int64)  # several entries at a time
    on_cpu = x.device.type == "cpu"
    bits: Any = flat.numpy() if on_cpu else flat  # numpy adds up columns in half of the time
    odd: Any = np.arange(1, 2 * COLUMNS, 2) if on_cpu else torch.arange(1, 2 * COLUMNS, 2, device=x.device)
    whole = len(bits) // COLUMNS * COLUMNS
    down = bits[:whole].reshape(-1, COLUMNS).sum(0)
    down[: len(bits) - whole] += 7 * bits[whole:]
    return (down * odd).sum()
