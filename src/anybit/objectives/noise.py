"""The expected case beside the worst case: train under noise of one quantization bin, of a width drawn at random.

Rounding error is close to uniform over the bin (the paper, appendix A). The bins are those of the network that will be
quantized: batch norm is folded into the weights first, so a weight in front of one is perturbed by what a bin of the
folded tensor means for it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anybit.errors import SpecError
from anybit.objectives.activations import ACTIVATIONS, Arguments, Function, Mode, Named
from anybit.objectives.base import Closure, Perturbation, Under, eagerly
from anybit.objectives.checkpointing import recomputing
from anybit.objectives.chunks import chunks
from anybit.objectives.quantizable import Folding, WeightChoice, products_in
from anybit.objectives.restore import replaced
from anybit.spec import FLOAT, QuantSpec, check_width


def bin_noise(weight: Tensor, bits: int, folding: Folding | None = None) -> Tensor:
    """Return noise for a weight: uniform over the bin that the folded tensor has at this width.

    A channel that folding makes tiny is rounded to zero at worst, so its noise stays below its own largest entry.
    """
    _, last = QuantSpec(bits).levels
    factor = weight.new_ones(()) if folding is None else folding.factor(weight.dim())
    half = (weight * factor).abs().max() / last / 2
    others = [d for d in range(weight.dim()) if folding is None or d != folding.axis]
    own = weight.abs().amax(others, keepdim=True)
    reach = torch.minimum(half / factor.abs().clamp(min=torch.finfo(weight.dtype).tiny), own)
    return torch.empty_like(weight).uniform_(-1.0, 1.0).mul_(reach)


class ActivationNoise(Mode):
    """Adds uniform noise of one bin to the output of every activation function."""

    def __init__(self, bits: int, strength: float = 1.0) -> None:
        super().__init__()
        self.bits, self.strength = bits, strength

    def called(self, func: Function, args: Arguments, kwargs: Named) -> Any:
        """Run the function, and add noise to its output if it is an activation function."""
        if not (torch.is_grad_enabled() and func in ACTIVATIONS):
            return func(*args, **kwargs)
        recomputing()  # refuses a part that ran without noise in the forward pass, where nobody could see it
        inplace = writes(func, args, kwargs)
        # The function may keep its result for the backward pass, so the noise goes into a copy of that.
        out = func(args[0].clone(), *args[1:], **kwargs) if inplace else func(*args, **kwargs)
        if not (isinstance(out, Tensor) and out.is_floating_point()):
            return out
        noisy = out.clone()
        with torch.no_grad():  # a constant is added: the graph stays as it is
            half = self.strength * self._half_bin(noisy)
            for (part,) in chunks(noisy):
                part.add_(torch.empty_like(part).uniform_(-1.0, 1.0).mul_(half))
        return args[0].copy_(noisy) if inplace else noisy

    def _half_bin(self, x: Tensor) -> Tensor:
        """Return half a bin of the grid for `x`, without waiting for the device."""
        low, high = torch.aminmax(x)
        (_, unsigned), (_, signed) = QuantSpec(self.bits, signed=False).levels, QuantSpec(self.bits).levels
        beyond = -low > high / unsigned  # more than a bin below zero: a signed grid
        return torch.maximum(-low, high) / torch.where(beyond, float(signed), float(unsigned)) / 2


def writes(func: Function, args: Arguments, kwargs: Named) -> bool:
    """Tell whether a call of an activation function overwrites its input.

    >>> x, relu = torch.zeros(1), nn.functional.relu
    >>> [writes(f, a, k) for f, a, k in ((torch.relu_, (x,), {}), (relu, (x, True), {}), (relu, (x,), {}))]
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
        self.model, self.activations = model, activations
        self._choice = WeightChoice(model, layers, required=False) if weights else None
        self._seen: tuple[list[nn.Parameter], dict[int, Folding]] | None = None

    def _draw(self) -> int:
        return self.widths[int(torch.randint(len(self.widths), ()))]

    @contextlib.contextmanager
    def around(self, closures: Sequence[Closure]) -> Iterator[Sequence[Closure]]:
        """Perturb for one step, forward and backward."""
        strength = self.factor * self.strength
        weight_bits, activation_bits = self._draw(), self._draw()
        weights, foldings = self._look(closures[0])
        weights = [] if weight_bits == FLOAT else weights
        with torch.no_grad():
            drawn = (bin_noise(w.data, weight_bits, foldings.get(id(w))) for w in weights)
            values = [w.data + noise.mul_(strength) for w, noise in zip(weights, drawn, strict=True)]
        noisy = self.activations and activation_bits != FLOAT
        with replaced(weights, values), eagerly(self.activations):
            yield [Under(c, ActivationNoise(activation_bits, strength)) for c in closures] if noisy else closures

    def _look(self, closure: Closure) -> tuple[list[nn.Parameter], dict[int, Folding]]:
        """Return the weights to perturb and the batch norms behind them, from a run of the closure if need be."""
        if self._choice is None:
            return [], {}
        parameters = list(self.model.parameters())
        if self._seen is None or [id(p) for p in self._seen[0]] != [id(p) for p in parameters]:
            seen = products_in(self.model, closure)
            self._choice.look(closure, seen)
            self._seen = parameters, seen.foldings
        return [w for w in self._choice.weights().values() if w.requires_grad], self._seen[1]
