"""torch.ao: the fake-quantize modules that FX graph mode puts in, min-max observers."""

from __future__ import annotations

import torch
from harness import Job, folded, main, without_relu
from torch import nn
from torch.ao.quantization import (
    FakeQuantize,
    MinMaxObserver,
    QConfig,
    QConfigMapping,
    disable_fake_quant,
    disable_observer,
    enable_fake_quant,
)
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig
from torch.ao.quantization.quantize_fx import prepare_qat_fx


def config(weights: int, activations: int) -> QConfig:
    top = 2 ** (weights - 1) - 1
    return QConfig(
        weight=FakeQuantize.with_args(
            observer=MinMaxObserver,
            quant_min=-top,
            quant_max=top,
            dtype=torch.qint8,
            qscheme=torch.per_tensor_symmetric,
        ),
        activation=FakeQuantize.with_args(
            observer=MinMaxObserver,
            quant_min=0,
            quant_max=2**activations - 1,
            dtype=torch.quint8,
            qscheme=torch.per_tensor_affine,
        ),
    )


@torch.no_grad()
def quantize(job: Job, weights: int, activations: int) -> nn.Module:
    """Outputs of layers without ReLU keep 8 bits and the input stays as it is: so do ours."""
    model = folded(job.model)
    chosen = QConfigMapping().set_global(config(weights, activations))
    for name in without_relu(model):
        chosen.set_module_name(name, config(weights, max(8, activations)))
    inputs = PrepareCustomConfig().set_input_quantized_indexes([0])
    # Only the training variant puts the weights on a grid too; nothing is trained.
    network = prepare_qat_fx(model.train(), chosen, (job.x[:2],), prepare_custom_config=inputs).eval()
    network.apply(disable_fake_quant)
    for x in job.batches:
        network(x)
    network.apply(disable_observer)
    network.apply(enable_fake_quant)
    return network


if __name__ == "__main__":
    main({"torch.ao": quantize}, package="torch")
