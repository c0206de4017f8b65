"""Brevitas: its layerwise backend as its own PTQ examples set it up, with GPTQ and without; the ends at 8 bits."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from brevitas.export import export_onnx_qcdq
from brevitas.graph.quantize import preprocess_for_quantize
from brevitas_examples.imagenet_classification.ptq.ptq_common import (
    apply_bias_correction,
    apply_gptq,
    calibrate,
    quantize_model,
)
from harness import Job, Made, Quantize, Setting, main

BIAS_BITS = 32
PERCENTILE = 99.999


def setting(*, granularity: str, gptq: bool) -> Setting:
    """Equalize once; for each width quantize every layer, calibrate, with or without GPTQ, and correct biases."""

    def once(job: Job) -> Quantize:
        equalized = preprocess_for_quantize(copy.deepcopy(job.model).eval(), equalize_iters=20)
        loader = [(x, None) for x in job.batches]

        def quantize(weights: int, activations: int) -> Made:
            network = quantize_model(
                copy.deepcopy(equalized), "layerwise", weights, activations, BIAS_BITS, granularity, PERCENTILE,
                "asym", "float_scale", "int", weight_param_method="mse", act_param_method="mse",
            ).eval()  # fmt: skip
            with torch.no_grad():
                network(job.calibration[:EXAMPLES])  # sets the scales of the weights
            calibrate(loader, network)
            if gptq:
                apply_gptq(loader, network, act_order=True)
            apply_bias_correction(loader, network)

            def export(path: Path) -> None:
                export_onnx_qcdq(network, args=job.x[:EXAMPLES], export_path=str(path), dynamo=False, **DYNAMIC)

            return Made(network.eval(), export)

        return quantize

    return once


EXAMPLES = 2
DYNAMIC = {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": {"x": {0: "n"}}, "opset_version": 17}

SETTINGS = {
    f"{'GPTQ, ' if gptq else ''}{granularity.replace('_', ' ')}": setting(granularity=granularity, gptq=gptq)
    for granularity in ("per_channel", "per_tensor")
    for gptq in (True, False)
}

if __name__ == "__main__":
    main(SETTINGS, package="brevitas")
