"""NNCF: post-training quantization of a PyTorch network with its bias correction."""

from __future__ import annotations

import copy
import os
from pathlib import Path

# Both are read at import. Without the first, NNCF reports its use over the network; without the second, it gives up on
# compiling its extension after a minute.
os.environ.update(NNCF_CI="1", NNCF_EXTENSION_LOAD_TIMEOUT="0")

import nncf
import torch
from harness import Job, Made, Quantize, Setting, main, to_onnx
from nncf.quantization.advanced_parameters import AdvancedQuantizationParameters, OverflowFix, QuantizationParameters


def setting(*, per_channel: bool) -> Setting:
    """Each width is a run of its own."""

    def once(job: Job) -> Quantize:
        def quantize(weights: int, activations: int) -> Made:
            options = AdvancedQuantizationParameters(
                overflow_fix=OverflowFix.DISABLE,
                weights_quantization_params=QuantizationParameters(num_bits=weights, per_channel=per_channel),
                activations_quantization_params=QuantizationParameters(num_bits=activations, per_channel=False),
            )
            network = nncf.quantize(
                copy.deepcopy(job.model).eval(), nncf.Dataset(job.batches), subset_size=len(job.batches),
                advanced_parameters=options,
            )  # fmt: skip

            def export(path: Path) -> None:
                to_onnx(nncf.strip(network, example_input=job.x[:2]), path)

            return Made(network, export)

        return quantize

    return once


SETTINGS = {"per channel": setting(per_channel=True), "per tensor": setting(per_channel=False)}

if __name__ == "__main__":
    with torch.no_grad():
        main(SETTINGS, package="nncf")
