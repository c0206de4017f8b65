"""Biases as integer kernels add them: whole numbers, in units of the weight's scale times the input's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from anybit.quant.bias import CorrectedBias
from anybit.quant.ops import TRANSPOSED_CONVOLUTIONS, WEIGHTED, attribute, delete_attribute, groups_of, passed_on
from anybit.quant.points import ActivationPoint, WeightPoint
from anybit.quant.uniform import make_grid


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
            scale = weight.grid().scale
            ends = torch.tensor([source.range.low, source.range.high], device=scale.device)
            unit = make_grid(ends[0], ends[1], source.spec).scale * scale
            if unit.dim():
                unit = unit.reshape(-1).repeat(self.master.numel() // unit.numel())
            self._unit = key, unit
        return self._unit[1]


def round_biases(body: fx.GraphModule) -> None:
    """Let a network add its biases as whole numbers, as a master does at every width up to 8 bits."""
    for index, layer in enumerate(layer_biases(body)):
        bias = layer.corrected.master if layer.corrected is not None else attribute(body, layer.bias)
        # A bias that two layers share stays one parameter.
        own = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias, requires_grad=False)
        target = f"whole_bias_{index}"
        body.add_submodule(target, WholeBias(layer, own))
        with body.graph.inserting_before(layer.layer):
            inner = body.graph.call_module(target)
        inner.meta["val"] = bias
        layer.layer.update_arg(2, inner)
    before = {str(node.target) for node in body.graph.nodes if node.op == "get_attr"}
    body.graph.eliminate_dead_code()
    for target in before - {str(node.target) for node in body.graph.nodes if node.op == "get_attr"}:
        delete_attribute(body, target)  # the module has the bias now
    body.delete_all_unused_submodules()
    body.recompile()


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
