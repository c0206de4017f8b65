"""Brevitas: its layerwise backend as its own PTQ examples set it up, with GPTQ and without; the ends at 8 bits."""

from __future__ import annotations

import copy

from brevitas.graph.quantize import preprocess_for_quantize
from brevitas_examples.imagenet_classification.ptq.ptq_common import (
    apply_bias_correction,
    apply_gptq,
    calibrate,
    quantize_model,
)
from harness import Job, Quantize, main
from torch import nn

BIAS_BITS = 32
PERCENTILE = 99.999


def tool(*, granularity: str, gptq: bool) -> Quantize:
    """Equalize, quantize every layer, calibrate, correct biases; with GPTQ in between where asked for."""

    def quantize(job: Job, weights: int, activations: int) -> nn.Module:
        loader = [(x, None) for x in job.batches]
        network = quantize_model(
            preprocess_for_quantize(copy.deepcopy(job.model).eval(), equalize_iters=20),
            "layerwise",
            weights,
            activations,
            BIAS_BITS,
            granularity,
            PERCENTILE,
            "asym",
            "float_scale",
            "int",
            weight_param_method="mse",
            act_param_method="mse",
            device="cpu",
        ).eval()
        calibrate(loader, network)
        if gptq:
            apply_gptq(loader, network, act_order=True)
        apply_bias_correction(loader, network)
        return network

    return quantize


if __name__ == "__main__":
    main(
        {
            f"Brevitas{', GPTQ' if gptq else ''}, {granularity.replace('_', ' ')}": tool(
                granularity=granularity, gptq=gptq
            )
            for gptq in (False, True)
            for granularity in ("per_channel", "per_tensor")
        },
        package="brevitas",
    )
