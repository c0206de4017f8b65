"""Which functions are activation functions, and where their outputs are, wherever the model calls them.

PyTorch shows each of its functions to a mode before running it, whether it comes from a module, from
`torch.nn.functional` or from a method, in place or not. A mode leaves nothing behind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from anybit.objectives.checkpointing import in_backward

Function = Callable[..., Any]
Arguments = tuple[Any, ...]
Named = dict[str, Any]

_NAMES = [
    "celu", "elu", "gelu", "glu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid", "mish", "prelu",
    "relu", "relu6", "rrelu", "selu", "sigmoid", "silu", "softplus", "softsign", "tanh", "threshold",
]  # fmt: skip


def spellings(name: str) -> set[Function]:
    """Return the function of that name wherever PyTorch keeps it, in place and not.

    >>> spellings("relu") == {F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}
    True
    """
    places = (F, torch, Tensor, torch._C._nn)
    return {getattr(place, n) for place in places for n in (name, f"{name}_") if hasattr(place, n)}


ACTIVATIONS: frozenset[Function] = frozenset().union(*(spellings(name) for name in _NAMES))
"""The activation functions, under every name that PyTorch has for them."""


def with_graph(out: Tensor) -> Tensor:
    """Return `out` as part of the graph, also where everything in front of it is frozen."""
    return out if out.requires_grad else out.detach().requires_grad_().clone()


class Mode(TorchFunctionMode, ABC):
    """Is shown every function that PyTorch runs meanwhile."""

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Named | None = None) -> Any:
        return self.called(func, args, kwargs or {})

    @abstractmethod
    def called(self, func: Function, args: Arguments, kwargs: Named) -> Any:
        """Run a function, and do what there is to do about it."""


class EdgeTaps(Mode):
    """Notes where in the autograd graph each activation function's output is, and how far it reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.edges: list[GradientEdge] = []
        self.reaches: list[Tensor] = []

    def called(self, func: Function, args: Arguments, kwargs: Named) -> Any:
        """Run the function, and note its output if it is an activation function."""
        out = func(*args, **kwargs)
        watched = torch.is_grad_enabled() and func in ACTIVATIONS and not in_backward()
        if watched and isinstance(out, Tensor) and out.is_floating_point():
            out = with_graph(out)
            # An edge stays what it is when the tensor is changed in place later on.
            self.edges.append(get_gradient_edge(out))
            self.reaches.append(torch.linalg.vector_norm(out.detach(), ord=float("inf")))
        return out
