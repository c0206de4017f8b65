"""AIMET: cross-layer equalization, AdaRound and its quantization simulation; the ends at 8 bits."""

from __future__ import annotations

import copy
import tempfile
import time
from pathlib import Path
from typing import Any

import _vision  # noqa: F401
import aimet_torch.common.quantsim_config as configs
import torch
from aimet_torch.adaround.adaround_weight import Adaround, AdaroundParameters
from aimet_torch.cross_layer_equalization import equalize_model
from aimet_torch.model_preparer import prepare_model
from aimet_torch.quantsim import QuantizationSimModel
from harness import Job, Made, Quantize, Setting, ends, main

ITERATIONS = 1000
SHAPE = (1, 3, 32, 32)
WIDE = 8


def config(*, per_channel: bool) -> str:
    """Return the path of AIMET's own configuration."""
    name = "default_config_per_channel.json" if per_channel else "default_config.json"
    return str(Path(configs.__path__[0]) / name)


def simulation(model: Any, weights: int, activations: int, *, per_channel: bool) -> Any:
    """Return the simulation of a model, with 8 bits for the first and last layer."""
    simulated = QuantizationSimModel(
        model, torch.zeros(SHAPE), default_param_bw=weights,
        default_output_bw=activations, config_file=config(per_channel=per_channel),
    )  # fmt: skip
    for name in ends(model):
        layer = simulated.model.get_submodule(name)
        layer.param_quantizers["weight"].bitwidth = WIDE
        for quantizer in layer.input_quantizers:
            if quantizer is not None:
                quantizer.bitwidth = max(WIDE, activations)
    return simulated


def rounded(equalized: Any, job: Job, weights: int, *, per_channel: bool) -> tuple[Any, str]:
    """Learn which way each weight rounds; return the model and the file that says it."""
    loader, folder = [(x, None) for x in job.batches], tempfile.mkdtemp()
    parameters = AdaroundParameters(
        loader, len(loader), ITERATIONS, forward_fn=lambda network, batch: network(batch[0])
    )
    model = Adaround.apply_adaround(
        equalized, torch.zeros(SHAPE), parameters, folder, "adaround", default_param_bw=weights,
        param_bw_override_list=[(equalized.get_submodule(name), WIDE) for name in ends(equalized)],
        default_config_file=config(per_channel=per_channel),
    )  # fmt: skip
    return model, str(Path(folder) / "adaround.encodings")


def setting(*, per_channel: bool, adaround: bool) -> Setting:
    """Fold and equalize once; each width is a simulation, with the rounding learned before where asked for.

    Rounding is learned with activations in floating point, so widths that share their weights share it, and each
    counts the seconds that it took.
    """

    def once(job: Job) -> Quantize:
        equalized = prepare_model(copy.deepcopy(job.model).eval())
        equalize_model(equalized, dummy_input=torch.zeros(SHAPE))
        known: dict[int, tuple[Any, str, float]] = {}

        def quantize(weights: int, activations: int) -> Made:
            model, encodings, before = copy.deepcopy(equalized), None, 0.0
            simulation(
                copy.deepcopy(model), weights, activations, per_channel=per_channel
            )  # refuses what it does not have at once
            if adaround:
                if weights in known:
                    model, encodings, before = known[weights]
                else:
                    begin = time.process_time()
                    model, encodings = rounded(model, job, weights, per_channel=per_channel)
                    known[weights] = model, encodings, time.process_time() - begin
            simulated = simulation(copy.deepcopy(model), weights, activations, per_channel=per_channel)
            if encodings is not None:
                simulated.set_and_freeze_param_encodings(encodings)
            simulated.compute_encodings(lambda network: [network(x) for x in job.batches])

            def export(path: Path) -> None:
                simulated.onnx.export(
                    torch.zeros(SHAPE),
                    str(path),
                    input_names=["x"],
                    dynamic_axes={"x": {0: "n"}},
                    export_int32_bias=False,
                )

            return Made(simulated.model, export, before)

        return quantize

    return once


SETTINGS = {
    f"CLE{' and AdaRound' if adaround else ''}, {where}": setting(per_channel=where == "per channel", adaround=adaround)
    for where in ("per channel", "per tensor")
    for adaround in (True, False)
}

if __name__ == "__main__":
    main(SETTINGS, package="aimet-torch")
