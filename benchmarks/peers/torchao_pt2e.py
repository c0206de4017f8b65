"""torchao: PT2E with its X86 inductor quantizer's places and integer ranges narrowed to each width."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from harness import Job, Made, Quantize, Setting, main
from torch import fx
from torchao.quantization.pt2e import HistogramObserver, MinMaxObserver, PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer

LAYERS = (torch.ops.aten.conv2d.default, torch.ops.aten.linear.default)
ADD = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
KEY = "quantization_annotation"


class AnyWidth(Quantizer):
    """Weights and inputs of every layer and both sides of every sum; the first and last layers at 8 bits."""

    def __init__(self, weights: int, activations: int, *, per_channel: bool) -> None:
        super().__init__()
        self.bits, self.per_channel = (weights, activations), per_channel

    def weight(self, bits: int) -> QuantizationSpec:
        """The spec of a weight."""
        observer = PerChannelMinMaxObserver if self.per_channel else MinMaxObserver
        scheme = torch.per_channel_symmetric if self.per_channel else torch.per_tensor_symmetric
        top = 2 ** (bits - 1) - 1
        return QuantizationSpec(torch.int8, observer.with_args(eps=2**-12), -top, top, scheme, 0)

    def activation(self, bits: int) -> QuantizationSpec:
        """The spec of an activation."""
        observer = HistogramObserver.with_args(eps=2**-12)
        return QuantizationSpec(torch.uint8, observer, 0, 2**bits - 1, torch.per_tensor_affine)

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        """Say what is quantized."""
        layers = [n for n in model.graph.nodes if n.target in LAYERS]
        for node in model.graph.nodes:
            weights, activations = (max(8, b) if node in (layers[0], layers[-1]) else b for b in self.bits)
            if node in layers:
                specs = {node.args[0]: self.activation(activations), node.args[1]: self.weight(weights)}
            elif node.target in ADD:
                specs = {value: self.activation(8) for value in node.args if isinstance(value, fx.Node)}
            else:
                continue
            node.meta[KEY] = QuantizationAnnotation(input_qspec_map=specs, _annotated=True)
        return model

    def validate(self, model: fx.GraphModule) -> None:
        """Everything is fine."""


def setting(*, per_channel: bool) -> Setting:
    """Capture once; each width is prepared, calibrated and converted."""

    def once(job: Job) -> Quantize:
        batch = torch.export.Dim("batch", min=2, max=4096)
        captured = torch.export.export(
            copy.deepcopy(job.model).eval(), (job.x[:4],), dynamic_shapes=({0: batch},), strict=True
        ).module()

        def quantize(weights: int, activations: int) -> Made:
            quantizer = AnyWidth(weights, activations, per_channel=per_channel)
            network = prepare_pt2e(copy.deepcopy(captured), quantizer)
            for x in job.batches:
                network(x)
            network = convert_pt2e(network)

            def export(path: Path) -> None:
                torch.onnx.export(
                    torch.export.export(network, (job.x[:4],), dynamic_shapes=({0: batch},)), (), str(path), dynamo=True
                )

            return Made(network, export)

        return quantize

    return once


SETTINGS = {"per channel": setting(per_channel=True), "per tensor": setting(per_channel=False)}

if __name__ == "__main__":
    with torch.no_grad():
        main(SETTINGS, package="torchao")
