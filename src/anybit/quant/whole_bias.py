"""Biases as integer kernels add them: whole numbers, in units of the weight's scale times the input's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from anybit.quant.bias import CorrectedBias
from anybit.quant.network import QuantizedNetwork
from anybit.quant.ops import TRANSPOSED_CONVOLUTIONS, WEIGHTED, attribute, groups_of, passed_on
from anybit.quant.points import ActivationPoint, WeightPoint
from anybit.quant.uniform import make_grid
from anybit.quant.weights import weight_limits


@dataclass(frozen=True, eq=False)
class LayerBias:
    """A layer with a bias and a quantized weight: the node, its bias, and the points that feed it."""

    layer: fx.Node
    bias: fx.Node
    weight: WeightPoint
    source: ActivationPoint | None
    corrected: CorrectedBias | None
    groups: int
    transposed: bool


class WholeBias(nn.Module):
    """A bias in whole units of weight scale times input scale, where both are on grids of at most 8 bits.

    That is how integer kernels add it. Half a unit is little, but at low widths it moves activations across the
    border between two codes.
    """

    def __init__(self, layer: LayerBias, bias: nn.Parameter) -> None:
        super().__init__()
        self.__dict__["points"] = layer.weight, layer.source  # not submodules: they have places of their own
        self.master = bias
        self.corrected = layer.corrected
        self._unit: tuple[Any, Tensor] | None = None

    def forward(self) -> Tensor:
        """Return the bias that goes with the current widths; gradients go straight through."""
        bias: Tensor = self.master if self.corrected is None else self.corrected()
        unit = self._unit_now()
        return bias if unit is None else bias + (torch.round(bias / unit) * unit - bias).detach()

    def _unit_now(self) -> Tensor | None:
        weight: WeightPoint
        source: ActivationPoint | None
        weight, source = self.__dict__["points"]
        if source is None or source.range is None or max(source.bits, weight.bits) > 8:
            return None
        key = (weight.spec, weight.master._version, source.spec, source.range)
        if self._unit is None or self._unit[0] != key:
            low, high = weight_limits(weight.master.detach(), weight.spec, weight.rule)
            ends = torch.tensor([source.range.low, source.range.high], device=low.device)
            unit = make_grid(ends[0], ends[1], source.spec).scale * make_grid(low, high, weight.spec).scale
            if unit.dim():
                unit = unit.reshape(-1).repeat(self.master.numel() // unit.numel())
            self._unit = key, unit
        return self._unit[1]


def round_biases(net: QuantizedNetwork) -> None:
    """Let the simulation add biases as whole numbers, which a master does at every width up to 8 bits."""
    for layer in layer_biases(net.body):
        if isinstance(_module(net.body, layer.bias), WholeBias):
            continue
        bias = layer.corrected.master if layer.corrected is not None else attribute(net.body, layer.bias)
        target = f"whole_{len(list(net.body.children()))}"
        net.body.add_submodule(target, WholeBias(layer, cast(nn.Parameter, bias)))
        with net.body.graph.inserting_before(layer.layer):
            layer.layer.update_arg(2, net.body.graph.call_module(target))
    net.body.graph.eliminate_dead_code()
    net.body.delete_all_unused_submodules()
    net.body.recompile()


def layer_biases(body: fx.GraphModule) -> list[LayerBias]:
    """Return every layer whose bias an integer kernel would add in whole units of weight times input."""
    found = []
    for layer in body.graph.nodes:
        bias = layer.args[2] if layer.target in WEIGHTED and len(layer.args) > 2 else None
        if not isinstance(bias, fx.Node) or bias.op not in ("get_attr", "call_module"):
            continue
        weight, inner = _module(body, layer.args[1]), _module(body, bias)
        corrected = inner.corrected if isinstance(inner, WholeBias) else inner
        if isinstance(weight, WeightPoint):
            assert corrected is None or isinstance(corrected, CorrectedBias)
            groups = groups_of(layer)
            transposed = layer.target in TRANSPOSED_CONVOLUTIONS
            source = _source(body, layer.args[0])
            found.append(LayerBias(layer, bias, weight, source, corrected, groups, transposed))
    return found


def _module(body: fx.GraphModule, node: Any) -> nn.Module | None:
    is_module = isinstance(node, fx.Node) and node.op == "call_module"
    return body.get_submodule(str(node.target)) if is_module else None


def _source(body: fx.GraphModule, node: Any) -> ActivationPoint | None:
    """Return the activation that reaches a layer; several that meet in a concatenation are on one grid."""
    while isinstance(node, fx.Node):
        module = _module(body, node)
        if module is not None:
            return module if isinstance(module, ActivationPoint) else None
        if node.target is torch.ops.aten.cat.default:
            parts = node.args[0]
            sources = [_source(body, part) for part in parts] if isinstance(parts, list | tuple) else []
            return sources[0] if sources and None not in sources else None
        node = passed_on(node)
    return None
