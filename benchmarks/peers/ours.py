"""anybit: with data and without, per tensor and per channel, and with widths fitted to the images that all get."""

from __future__ import annotations

import copy
from typing import Any

from harness import Job, Quantize, main
from torch import nn

import anybit


def tool(*, data: bool, fitted: bool = False, **settings: Any) -> Quantize:
    """Prepare once; every width after that is a `set_bits`, or the reconstruction of that width first."""
    prepared: list[Any] = []

    def quantize(job: Job, weights: int, activations: int) -> nn.Module:
        if not prepared:
            loader = job.batches if data else None
            prepared.append(
                anybit.prepare(job.model, job.x[:2], input_range=job.input_range, calibration=loader, **settings)
            )
        network = copy.deepcopy(prepared[0])
        if fitted:
            anybit.reconstruct(network, job.batches, widths=[(weights, activations)])
        network.set_bits(weights=weights, activations=activations)
        return network

    return quantize


WAYS: dict[str, dict[str, Any]] = {
    "the paper's settings, no data": {"data": False, "preset": "paper"},
    "no data": {"data": False},
    "512 images": {"data": True},
    "512 images, reconstructed": {"data": True, "fitted": True},
}

if __name__ == "__main__":
    tools = {}
    for name, way in WAYS.items():
        if way.get("preset") == "paper":
            tools[f"anybit, {name}"] = tool(**way)
            continue
        for per_channel, where in ((True, "per channel"), (False, "per tensor")):
            tools[f"anybit, {name}, {where}"] = tool(**way, per_channel=per_channel)
    main(tools, package="anybit")
