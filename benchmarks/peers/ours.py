"""anybit: with data and without, per tensor and per channel, and with widths fitted to the images that all get."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

from harness import Job, Made, Quantize, Setting, main

import anybit


def setting(*, data: bool, fitted: bool = False, **options: Any) -> Setting:
    """Prepare once, and save; every width after that is a `set_bits`, or first its reconstruction in that one file."""

    def once(job: Job) -> Quantize:
        loader = job.batches if data else None
        net = anybit.prepare(job.model, job.x[:2], input_range=job.input_range, calibration=loader, **options)
        folder = Path(tempfile.mkdtemp())
        if fitted:
            anybit.save(net, folder / "master.onnx")

        def quantize(weights: int, activations: int) -> Made:
            own = copy.deepcopy(net) if fitted else net
            if fitted:
                inputs, widths = [x.numpy() for x in job.batches], [(weights, activations)]
                own.plan = anybit.reconstruct(folder / "master.onnx", inputs, widths)
            own.set_bits(weights=weights, activations=activations)

            def export(path: Path) -> None:
                with tempfile.TemporaryDirectory() as folder:
                    anybit.save(own, Path(folder) / "master.onnx")
                    anybit.export(Path(folder) / "master.onnx", path, weights=weights, activations=activations)

            return Made(own, export)

        return quantize

    return once


CHANNEL: dict[str, Any] = {"per_channel": True, "sensitive": "8-bit"}
"""Other tools choose no layers by measurement, so neither is it done here."""
TENSOR = CHANNEL | {"per_channel": False}
SAME = CHANNEL | {"sensitive": "same"}

SETTINGS = {
    "reconstructed, per channel": setting(data=True, fitted=True, **CHANNEL),
    "per channel": setting(data=True, **CHANNEL),
    "no data, per channel": setting(data=False, **CHANNEL),
    "reconstructed, per channel, all layers": setting(data=True, fitted=True, **SAME),
    "no data, per channel, all layers": setting(data=False, **SAME),
    "reconstructed, per tensor": setting(data=True, fitted=True, **TENSOR),
    "per tensor": setting(data=True, **TENSOR),
    "no data, per tensor": setting(data=False, **TENSOR),
    "no data, the paper's settings": setting(data=False, preset="paper"),
}

if __name__ == "__main__":
    main(SETTINGS, package="anybit")
