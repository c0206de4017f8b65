"""Brevitas: its graph mode with scale factors per tensor, calibrated with its own context managers."""

from __future__ import annotations

import copy

import torch
from brevitas.graph.calibrate import calibration_mode
from brevitas.graph.quantize import (
    COMPUTE_LAYER_MAP,
    QUANT_ACT_MAP,
    QUANT_IDENTITY_MAP,
    preprocess_for_quantize,
)
from brevitas.graph.quantize import (
    quantize as insert_quantizers,
)
from harness import Job, main
from torch import nn

Entry = tuple[type[nn.Module], dict[str, object]]
"""A layer of Brevitas and the options it is made with."""


@torch.no_grad()
def quantize(job: Job, weights: int, activations: int) -> nn.Module:
    """The input and what goes into sums keeps 8 bits (Brevitas' signed tensors): so do ours."""
    layers, acts, identities = dict(COMPUTE_LAYER_MAP), dict(QUANT_ACT_MAP), dict(QUANT_IDENTITY_MAP)
    for kind in (nn.Conv2d, nn.Linear):
        layers[kind] = with_bits(layers[kind], weight_bit_width=weights)
    acts[nn.ReLU] = with_bits(acts[nn.ReLU], bit_width=activations)
    identities["signed"] = with_bits(identities["signed"], bit_width=max(8, activations))
    identities["unsigned"] = with_bits(identities["unsigned"], bit_width=activations)
    network = insert_quantizers(
        preprocess_for_quantize(copy.deepcopy(job.model)),
        quant_identity_map=identities,
        compute_layer_map=layers,
        quant_act_map=acts,
    ).eval()
    with calibration_mode(network):
        for x in job.batches:
            network(x)
    return network


def with_bits(entry: Entry, **bits: int) -> Entry:
    kind, options = entry
    return kind, {**options, **bits}


if __name__ == "__main__":
    main({"Brevitas": quantize}, package="brevitas")
