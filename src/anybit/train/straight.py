"""Straight-through training: quantized forward, and backward as if nothing had been rounded.

Batch norm is folded first and stays folded, as it will be when the network is used: what is trained are the weights and
biases of the folded layers, and the ranges of the activations stay those that batch norm gave at the start. The weight
grid follows the weights (it always spans their largest absolute value) instead of staying where it was at the start:
that is the grid which quantizing the trained weights will choose, so the network is trained on the very numbers that it
is evaluated on, and no weight is ever clipped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from anybit.objectives.base import Closure, Perturbation
from anybit.simulate.modules import executors
from anybit.simulate.network import QuantizedNetwork
from anybit.spec import Bits

SMALLEST = 1e-8
"""What stands in for a batch norm's scale of zero, through which no weight could be written back."""


class DrawnWidth(Perturbation):
    """Runs each step at a pair of widths drawn at random; gradients go straight through the rounding."""

    name = "straight-through"

    def __init__(self, network: QuantizedNetwork, pairs: Sequence[Bits]) -> None:
        self.network, self.pairs = network, tuple(pairs)

    @contextlib.contextmanager
    def around(self, closures: Sequence[Closure]) -> Iterator[Sequence[Closure]]:
        """Quantize for one step, forward and backward."""
        bits = self.pairs[int(torch.randint(len(self.pairs), ()))]
        with self.network.at(weights=bits.weights, activations=bits.activations):
            yield closures


@torch.no_grad()
def unfold(network: QuantizedNetwork, model: nn.Module) -> None:
    """Write the weights of a folded network into the model it came from, so that folding the model gives them again.

    A layer with batch norm behind it takes `W = W' σ/γ`, and the batch norm the mean `μ = b + (β - b') σ/γ`. Scale and
    shift of the batch norm stay, and with them the ranges of the activations.
    """
    parts = executors(network.body)
    biases = {bias.weight: parts[bias.name].master for bias in network.plan.biases}
    for point in network.plan.weights:
        name, weight = point.name, parts[point.name].master
        layer = model.get_submodule(name.rpartition(".")[0])
        if name not in network.folded:
            _copy(layer, weight, biases.get(name))
        else:
            _copy_through(layer, model.get_submodule(network.folded[name]), weight, biases[name], point.channels)


def _copy(layer: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
    layer.get_parameter("weight").copy_(weight)
    if bias is not None:
        layer.get_parameter("bias").copy_(bias)


def _copy_through(layer: nn.Module, norm: nn.Module, weight: Tensor, bias: Tensor, axis: int) -> None:
    gamma = norm.get_parameter("weight")
    gamma.copy_(torch.where(gamma.abs() < SMALLEST, torch.full_like(gamma, SMALLEST), gamma))
    variance, mean = norm.get_buffer("running_var"), norm.get_buffer("running_mean")
    factor = gamma / torch.sqrt(variance + float(norm.eps))  # type: ignore[arg-type]
    shape = [1] * weight.dim()
    shape[axis] = -1
    layer.get_parameter("weight").copy_(weight / factor.view(shape))
    own = layer.bias if isinstance(layer.bias, Tensor) else torch.zeros_like(mean)
    mean.copy_(own + (norm.get_parameter("bias") - bias) / factor)
