"""anybit: ranges from batch norm or from the same images as the others', nearest rounding or every helper."""

from __future__ import annotations

import copy

from harness import Job, Quantize, main
from torch import nn

from anybit.simulate.network import QuantizedNetwork
from anybit.simulate.prepare import prepare


def tool(*, data: bool, helpers: str = "") -> Quantize:
    """Prepare once; every width after that is a `set_bits`."""
    prepared: list[QuantizedNetwork] = []

    def quantize(job: Job, weights: int, activations: int) -> nn.Module:
        if not prepared:
            loader = job.batches if data else None
            chosen = helpers or ()
            prepared.append(
                prepare(job.model, job.x[:2], input_range=job.input_range, calibration=loader, helpers=chosen)
            )
        network = copy.deepcopy(prepared[0])
        network.set_bits(weights=weights, activations=activations)
        return network

    return quantize


if __name__ == "__main__":
    main(
        {
            "anybit, no data": tool(data=False),
            "anybit, 512 images": tool(data=True),
            "anybit, all helpers, no data": tool(data=False, helpers="all"),
            "anybit, all helpers, 512 images": tool(data=True, helpers="all"),
        },
        package="anybit",
    )
