"""What the batches of a loader mean: which part a network is called with, and which part it is compared with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from anybit.data.base import checksum
from anybit.errors import DataError
from anybit.simulate.capture import moved_to
from anybit.simulate.network import QuantizedNetwork

TARGETS = ("labels", "label", "targets", "target", "y")
"""What the targets are called in a batch that is a dict."""


@dataclass(frozen=True)
class Batch:
    """The arguments of one call, and what its outputs are compared with, if anything."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: Any

    @property
    def inputs(self) -> Any:
        """The arguments as `anybit.prepare` takes them for an example."""
        return self.kwargs or (self.args[0] if len(self.args) == 1 else self.args)

    def __len__(self) -> int:
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 1)

    def to(self, device: torch.device) -> Batch:
        """Return the same batch on a device."""
        return Batch(*moved_to(device, (self.args, self.kwargs, self.targets)))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return the same batch with another tensor in the place of each."""
        return Batch(*pytree.tree_map_only(Tensor, change, (self.args, self.kwargs, self.targets)))

    def mark(self) -> str:
        """Return a checksum that tells this batch from others."""
        leaves = pytree.tree_leaves((self.args, self.kwargs, self.targets))
        return checksum(leaf for leaf in leaves if isinstance(leaf, Tensor))


@dataclass(frozen=True)
class Takes:
    """What a network is called with: so many arguments by place, or arguments by name."""

    places: int = 1
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, network: nn.Module) -> Takes:
        """Find it out from the example that a network was prepared with, or from the forward pass of a module."""
        if isinstance(network, QuantizedNetwork):
            named = [name for name in network.takes.shapes if not name.startswith("argument ")]
            numbers = {name.split()[1].partition("[")[0] for name in network.takes.shapes if name not in named}
            return cls(len(numbers), tuple(dict.fromkeys(name.partition("[")[0] for name in named)))
        inner = getattr(network, "module", network)  # of those that train together
        known = inspect.signature(inner.forward).parameters.values()
        places = [p for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        needed = sum(p.default is p.empty for p in places)
        return cls(max(1, needed), tuple(p.name for p in places if p.name not in TARGETS))

    def split(self, batch: Any) -> Batch:
        """Take a batch apart: a tensor, a tuple (inputs, targets, whatever else), or a dict with the targets by name.

        >>> Takes().split((torch.zeros(2, 3), torch.zeros(2), ["a.png", "b.png"])).targets
        tensor([0., 0.])
        """
        if isinstance(batch, Mapping):
            return self._by_name(batch)
        if not isinstance(batch, tuple | list):
            return Batch((batch,), {}, None)
        if len(batch) == 2 and isinstance(batch[0], Mapping | tuple | list):
            inner = Takes.split(self, batch[0])
            return Batch(inner.args, inner.kwargs, batch[1])
        if len(batch) < self.places:
            raise DataError(f"a batch has {len(batch)} parts, and the network takes {self.places} inputs")
        rest = batch[self.places :]
        return Batch(tuple(batch[: self.places]), {}, rest[0] if rest else None)

    def _by_name(self, batch: Mapping[str, Any]) -> Batch:
        inputs = {key: value for key, value in batch.items() if key not in TARGETS and value is not None}
        targets = next((batch[key] for key in TARGETS if key in batch), None)
        if chosen := {key: value for key, value in inputs.items() if key in self.names}:
            return Batch((), chosen, targets)
        if len(inputs) == self.places:
            return Batch(tuple(inputs.values()), {}, targets)
        has = f"a batch is a dict with {', '.join(map(str, batch))}"
        if self.names:
            raise DataError(f"{has}; the network takes inputs called {', '.join(self.names)}: name them alike")
        raise DataError(f"{has}; the network was prepared with inputs without names: prepare it with such a dict")
