"""The expected case beside the worst case: train under noise of one quantization bin, of a width drawn at random.

Rounding error is close to uniform over the bin (the paper, appendix A). The bins are those of the network that will be
quantized: batch norm is folded into the weights first, so a weight in front of one is perturbed by what a bin of the
folded tensor means for it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from anybit.errors import SpecError
from anybit.objectives.base import Closure, Perturbation, eagerly
from anybit.objectives.pieces import pieces
from anybit.objectives.select import quantizable_weights
from anybit.objectives.state import buffers_kept, random_state, replaced, set_random_state
from anybit.objectives.taps import Function, is_activation
from anybit.spec import FLOAT, QuantSpec, check_width

LAYERS = frozenset({F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, F.linear})
TRANSPOSED = frozenset({F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d})


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


class FindFoldings(TorchFunctionMode):
    """Notes which weight's output goes straight into which batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.foldings: dict[int, Folding] = {}
        self._outputs: list[tuple[Tensor, Tensor, int]] = []

    def __torch_function__(
        self, func: Function, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            self._note(args, kwargs)
        out = func(*args, **kwargs)
        if func in LAYERS and len(args) > 1:
            self._outputs.append((out, args[1], 1 if func in TRANSPOSED else 0))
        return out

    def _note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
        call = {"eps": 1e-5, **dict(zip(names, args, strict=False)), **kwargs}
        for out, weight, axis in self._outputs:
            variance = call.get("running_var")
            if out is call["input"] and variance is not None and weight.shape[axis] == len(variance):
                self.foldings[id(weight)] = Folding(variance, call.get("weight"), float(call["eps"]), axis)


def bin_noise(
    weight: Tensor, bits: int, folding: Folding | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """Return noise for a weight: uniform over the bin that the folded tensor has at this width.

    A channel that folding makes tiny is rounded to zero at worst, so its noise stays below its own largest entry.
    """
    _, last = QuantSpec(bits).levels
    factor = torch.ones((), dtype=weight.dtype) if folding is None else folding.factor(weight.dim())
    half = (weight * factor).abs().max() / last / 2
    others = [d for d in range(weight.dim()) if folding is None or d != folding.axis]
    own = weight.abs().amax(others, keepdim=True)
    reach = torch.minimum(half / factor.abs().clamp(min=torch.finfo(weight.dtype).tiny), own)
    noise = torch.empty_like(weight).uniform_(-1.0, 1.0, generator=generator)
    return noise.mul_(reach)


class ActivationNoise(TorchFunctionMode):
    """Adds uniform noise of one bin to the output of every activation function."""

    def __init__(self, bits: int, strength: float = 1.0) -> None:
        super().__init__()
        self.bits, self.strength = bits, strength

    def __torch_function__(
        self, func: Function, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not (torch.is_grad_enabled() and is_activation(func)):
            return func(*args, **kwargs)
        inplace = writes(func, args, kwargs)
        # The function may keep its result for the backward pass, so the noise goes into a copy of that.
        out = func(args[0].clone(), *args[1:], **kwargs) if inplace else func(*args, **kwargs)
        if not (isinstance(out, Tensor) and out.is_floating_point()):
            return out
        noisy = out.clone()
        with torch.no_grad():  # a constant is added: the graph stays as it is
            half = self.strength * self._half_bin(noisy)
            for (part,) in pieces(noisy):
                part.add_(torch.empty_like(part).uniform_(-half, half))
        return args[0].copy_(noisy) if inplace else noisy

    def _half_bin(self, x: Tensor) -> float:
        low, high = (float(v) for v in torch.aminmax(x))
        _, last = QuantSpec(self.bits, signed=False).levels
        if -low > high / last:  # more than a bin below zero: a signed grid
            _, last = QuantSpec(self.bits).levels
        return max(-low, high) / last / 2


def writes(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a call of an activation function overwrites its input.

    >>> x = torch.zeros(1)
    >>> [writes(f, a, k) for f, a, k in ((torch.relu_, (x,), {}), (F.relu, (x, True), {}), (F.relu, (x,), {}))]
    [True, True, False]
    """
    return func.__name__.endswith("_") or bool(kwargs.get("inplace")) or any(arg is True for arg in args[1:])


class UniformNoise(Perturbation):
    """Trains on weights and activations perturbed by uniform noise of one bin, at a width drawn anew each step.

    Args:
        model: The network.
        strength: How far the noise reaches, in units of the bin: one is what rounding does.
        widths: The widths to draw from, for weights and for activations.
        weights: Perturb the weights.
        activations: Perturb the outputs of activation functions.
        layers: Names or patterns of the weights to perturb. Default: all that will be quantized.

    The gradient is that at the perturbed point; the weights themselves are put back bit for bit after each step.
    """

    name = "noise"

    def __init__(
        self,
        model: nn.Module,
        *,
        strength: float = 1.0,
        widths: Sequence[int] = (2, 3, 4, 5, 6, 8),
        weights: bool = True,
        activations: bool = True,
        layers: str | list[str] | None = None,
    ) -> None:
        if not 0 <= strength < math.inf:
            raise SpecError(f"strength is zero or more, in units of the bin; got {strength!r}")
        self.strength = float(strength)
        self.widths = [check_width(width, "widths") for width in widths]
        if not self.widths:
            raise SpecError("noise needs at least one width to draw from")
        if not (weights or activations):
            raise SpecError("noise on neither weights nor activations does nothing; drop it")
        self.model = model
        self.weights = list(quantizable_weights(model, layers).values()) if weights else []
        self.activations = activations
        self._foldings: dict[int, Folding] | None = None

    def _draw(self) -> int:
        return self.widths[int(torch.randint(len(self.widths), ()))]

    @contextlib.contextmanager
    def around(self, closures: Sequence[Closure]) -> Iterator[Sequence[Closure]]:
        """Perturb for one step, forward and backward."""
        if self._foldings is None:
            self._foldings = self._find(closures[0])
        strength = self.factor * self.strength
        weight_bits, activation_bits = self._draw(), self._draw()
        weights = [] if weight_bits == FLOAT else [w for w in self.weights if w.requires_grad]
        with torch.no_grad():
            drawn = (bin_noise(w.data, weight_bits, self._foldings.get(id(w))) for w in weights)
            values = [w.data + noise.mul_(strength) for w, noise in zip(weights, drawn, strict=True)]

        def noisy(closure: Closure) -> Tensor:
            if not self.activations or activation_bits == FLOAT:
                return closure()
            with ActivationNoise(activation_bits, strength):
                return closure()

        with replaced(weights, values), eagerly(self.activations):
            yield [functools.partial(noisy, closure) for closure in closures]

    def _find(self, closure: Closure) -> dict[int, Folding]:
        """Run the closure once to see which weights a batch norm will be folded into."""
        state = random_state()
        try:
            with torch.no_grad(), eagerly(), buffers_kept(self.model), FindFoldings() as found:
                closure()
            return dict(found.foldings)
        finally:
            set_random_state(state)
