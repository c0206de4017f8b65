"""optimum-quanto: integer tensors instead of simulated ones; weights always have a scale per channel."""

from __future__ import annotations

import torch
from harness import Job, NotOffered, folded, main
from optimum.quanto import Calibration, freeze, qint2, qint4, qint8
from optimum.quanto import quantize as replace_modules
from torch import nn

WEIGHTS = {2: qint2, 4: qint4, 8: qint8}


@torch.no_grad()
def quantize(job: Job, weights: int, activations: int) -> nn.Module:
    if weights not in WEIGHTS:
        raise NotOffered(f"weights have 2, 4 or 8 bits, not {weights}")
    if activations != 8:
        raise NotOffered(f"activations have 8 bits, not {activations}")
    network = folded(job.model)
    replace_modules(network, weights=WEIGHTS[weights], activations=qint8)
    with Calibration():
        for x in job.batches:
            network(x)
    freeze(network)
    return network


if __name__ == "__main__":
    main({"optimum-quanto, per channel": quantize}, package="optimum-quanto")
