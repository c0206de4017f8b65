"""Which parameters are weights that will be quantized: the operands of matrix products and convolutions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from anybit.errors import PenaltyError, SpecError
from anybit.objectives.activations import Arguments, Function, Mode, Named, spellings
from anybit.objectives.base import Closure, eagerly
from anybit.objectives.restore import buffers_kept, random_kept
from anybit.spec import names_point

TRANSPOSED = frozenset({F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d})
LAYERS = frozenset({F.conv1d, F.conv2d, F.conv3d, F.linear, F.bilinear}) | TRANSPOSED
"""Functions whose second operand is the weight (bilinear: the third)."""

PRODUCTS: frozenset[Function] = frozenset().union(
    {F.multi_head_attention_forward, F.scaled_dot_product_attention, torch.einsum},
    *(spellings(name) for name in ("matmul", "mm", "bmm", "mv", "addmm", "addmv", "addbmm", "baddbmm", "tensordot")),
    *(spellings(name) for name in ("__matmul__", "__rmatmul__", "lstm", "gru", "rnn_tanh", "rnn_relu")),
)
"""Functions each of whose operands may be a weight."""

KNOWN = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
OWN_NAMES = re.compile(r"weight(_(ih|hh|hr).*)?|.*proj_weight")
"""PyTorch's layers of these types, and how they call their weights."""

OTHERS = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
"""Layers that look up, scale and shift."""


def quantizable_weights(model: nn.Module, layers: str | list[str] | None = None) -> dict[str, nn.Parameter]:
    """Return the weight tensors of matrix products and convolutions, by name, each once.

    PyTorch's own layers tell what is a weight. In other modules each matrix or larger tensor may be one; whether it is
    multiplied, or added or looked up as bias tables and learned tokens are, only a run can tell (`WeightChoice`).
    `layers` keeps those whose name matches one of the patterns; a pattern may name the layer or the weight.

    >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2))
    >>> list(quantizable_weights(net)), list(quantizable_weights(net, "2"))
    (['0.weight', '2.weight'], ['2.weight'])
    """
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter, _ in _candidates(model):
        found.setdefault(id(parameter), (name, parameter))
    weights = dict(found.values())
    if layers is None:
        return weights
    patterns = [layers] if isinstance(layers, str) else list(layers)
    for pattern in patterns:
        if not any(names_point(pattern, name, weight=True) for name in weights):
            some = ", ".join(list(weights)[:5])
            raise SpecError(f"no weight matches the pattern {pattern!r}; the weights are {some}, ...")
    return {n: p for n, p in weights.items() if any(names_point(pattern, n, weight=True) for pattern in patterns)}


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, bool]]:
    """Yield the name and parameter of each weight, and whether its module's type makes sure that it is one."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False) if not isinstance(module, OTHERS) else ():
            sure = isinstance(module, KNOWN) and OWN_NAMES.fullmatch(name) is not None
            # A tensor with one dimension to speak of is a scale per channel, a token or a bias.
            maybe = sum(size > 1 for size in parameter.shape) > 1
            if parameter.is_floating_point() and parameter.dim() >= 2 and (sure or maybe):
                yield f"{path}.{name}".lstrip("."), parameter, sure


class WeightChoice:
    """The weights of a model that a penalty works on, looked up anew each time: parameters may be replaced."""

    def __init__(self, model: nn.Module, layers: str | list[str] | None, *, required: bool) -> None:
        self.model, self.layers = model, layers
        self._known: dict[str, bool] = {}
        if required and not self.weights():
            raise PenaltyError(f"{type(model).__name__} has no weight of two or more dimensions to penalize")

    def weights(self) -> dict[str, nn.Parameter]:
        """Return them by name, without those that were seen not to be multiplied."""
        found = quantizable_weights(self.model, self.layers)
        return {name: weight for name, weight in found.items() if self._known.get(name, True)}

    def look(self, closure: Closure, seen: Products | None = None) -> None:
        """Run the closure once, without a trace, if there is a parameter of which only a run can tell."""
        unsure = {name: p for name, p, sure in _candidates(self.model) if not sure and name not in self._known}
        if unsure:
            seen = seen or products_in(self.model, closure)
            self._known.update({name: id(p) in seen.multiplied for name, p in unsure.items()})


@dataclass(frozen=True)
class Folding:
    """The batch norm behind a weight: the factor by which folding will multiply each output channel."""

    variance: Tensor
    gamma: Tensor | None
    eps: float
    axis: int

    def factor(self, dims: int) -> Tensor:
        """Return γ/σ, shaped to broadcast with the weight."""
        scale = 1.0 if self.gamma is None else self.gamma.detach()
        shape = [1] * dims
        shape[self.axis] = -1
        return (scale * torch.rsqrt(self.variance + self.eps)).view(shape)


class Products(Mode):
    """Notes which parameters are multiplied, and which one's output goes straight into which batch norm.

    A parameter that was reshaped, masked or normalized on the way, with no activation involved, still counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.multiplied: set[int] = set()
        self.foldings: dict[int, Folding] = {}
        self._outputs: list[tuple[Tensor, Tensor, int]] = []
        self._made: dict[int, tuple[Tensor, set[int]]] = {}

    def called(self, func: Function, args: Arguments, kwargs: Named) -> Any:
        """Run the function, and note what it multiplies or normalizes."""
        if func is F.batch_norm:
            self._note_batch_norm(args, kwargs)
        out = func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        operands = [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
        if func in LAYERS:
            weight = kwargs["weight"] if "weight" in kwargs else args[2 if func is F.bilinear else 1]
            self.multiplied |= self._sources(weight) or set()
            self._outputs.append((out, weight, 1 if func in TRANSPOSED else 0))
        elif func in PRODUCTS:
            self.multiplied = self.multiplied.union(*(self._sources(x) or () for x in operands))
        elif operands and isinstance(out, Tensor) and out.is_floating_point():
            sources = [self._sources(x) for x in operands]
            if all(s is not None for s in sources):
                self._made[id(out)] = (out, set().union(*(s for s in sources if s is not None)))
        return out

    def _sources(self, x: Tensor) -> set[int] | None:
        """Return the parameters that a tensor is made of, or `None` if there is more to it."""
        if isinstance(x, nn.Parameter):
            return {id(x)}
        made = self._made.get(id(x))
        return made[1] if made is not None and made[0] is x else None

    def _note_batch_norm(self, args: Arguments, kwargs: Named) -> None:
        names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
        call = {"eps": 1e-5, **dict(zip(names, args, strict=False)), **kwargs}
        for out, weight, axis in self._outputs:
            variance = call.get("running_var")
            if out is call["input"] and variance is not None and weight.shape[axis] == len(variance):
                self.foldings[id(weight)] = Folding(variance, call.get("weight"), float(call["eps"]), axis)


def products_in(model: nn.Module, closure: Closure) -> Products:
    """Run the closure once to see what it multiplies, and leave everything as it was."""
    seen = Products()
    with torch.no_grad(), eagerly(), random_kept(), buffers_kept(model), seen:
        closure()
    return seen
