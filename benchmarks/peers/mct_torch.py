"""MCT: post-training quantization for a target description of our own, with its correction of shifted negatives.

Every layer has the width: a target description does not tell the first and the last layer from the others. The file
is written by PyTorch's older exporter, which MCT was made for; the newer one, now the default, refuses its network.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import _vision  # noqa: F401
import model_compression_toolkit as mct
import torch
from harness import Job, Made, Quantize, Setting, main
from model_compression_toolkit.target_platform_capabilities.constants import KERNEL_ATTR
from model_compression_toolkit.target_platform_capabilities.tpc_models.qnnpack_tpc.v1_0 import tpc


def target(weights: int, activations: int, *, per_channel: bool) -> Any:
    """Describe a target with these widths: symmetric weights, activations with a zero point."""
    linear, others, _ = tpc.get_op_quantization_configs()
    kernel = linear.attr_weights_configs_mapping[KERNEL_ATTR].model_copy(
        update={"weights_n_bits": weights, "weights_per_channel_threshold": per_channel}
    )
    widths = {"activation_n_bits": activations, "supported_input_activation_n_bits": (activations, 8)}
    mapping = {**linear.attr_weights_configs_mapping, KERNEL_ATTR: kernel}
    linear = linear.model_copy(update={**widths, "attr_weights_configs_mapping": mapping})
    # Of this description only the default has an effect; that of its own leaves all weights as they are.
    return tpc.generate_tpc(linear, linear, others, name="any width")


def setting(*, per_channel: bool) -> Setting:
    """Each width is a run of its own."""

    def once(job: Job) -> Quantize:
        def images() -> Iterator[list[Any]]:
            yield from ([x.numpy()] for x in job.batches)

        def quantize(weights: int, activations: int) -> Made:
            network, _ = mct.ptq.pytorch_post_training_quantization(
                copy.deepcopy(job.model).eval(), images,
                target_platform_capabilities=target(weights, activations, per_channel=per_channel),
            )  # fmt: skip

            def export(path: Path) -> None:
                with mock.patch.object(torch.onnx, "export", partial(torch.onnx.export, dynamo=False)):
                    mct.exporter.pytorch_export_model(
                        network, str(path), images,
                        serialization_format=mct.exporter.PytorchExportSerializationFormat.ONNX,
                        quantization_format=mct.exporter.QuantizationFormat.FAKELY_QUANT,
                    )  # fmt: skip

            return Made(network.eval(), export)

        return quantize

    return once


SETTINGS = {
    "per channel, all layers": setting(per_channel=True),
    "per tensor, all layers": setting(per_channel=False),
}

if __name__ == "__main__":
    with torch.no_grad():
        main(SETTINGS, package="model-compression-toolkit")
