"""NNCF: post-training quantization of a PyTorch network, min-max ranges, symmetric, per tensor."""

from __future__ import annotations

import os

# Both are read at import. Without the first, NNCF reports its use over the network; without the second, it gives up on
# compiling its extension after a minute.
os.environ.update(NNCF_CI="1", NNCF_EXTENSION_LOAD_TIMEOUT="0")

import nncf
import torch
from harness import Job, folded, main
from nncf.quantization.advanced_parameters import AdvancedQuantizationParameters, OverflowFix, QuantizationParameters
from torch import Tensor, nn


class Plain(nn.Module):
    """Hides that the network is a traced graph, which NNCF would take for one of torch.export's."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        """Return what the graph returns."""
        return self.body(x)


@torch.no_grad()
def quantize(job: Job, weights: int, activations: int) -> nn.Module:
    options = AdvancedQuantizationParameters(
        overflow_fix=OverflowFix.DISABLE,
        weights_quantization_params=QuantizationParameters(num_bits=weights, per_channel=False),
        activations_quantization_params=QuantizationParameters(num_bits=activations, per_channel=False),
    )
    data = nncf.Dataset(job.batches)
    network = Plain(folded(job.model)).eval()
    return nncf.quantize(network, data, subset_size=len(job.batches), advanced_parameters=options)


if __name__ == "__main__":
    main({"NNCF": quantize}, package="nncf")
