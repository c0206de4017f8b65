"""onnxruntime.quantization: `quantize_static` in QDQ form, after its own preprocessing; the file is all there is."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
from harness import Job, Made, NotOffered, Quantize, Setting, main, run_file, to_onnx
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process


class Reader(CalibrationDataReader):
    """The calibration images, batch by batch."""

    def __init__(self, job: Job) -> None:
        self.left: Iterator[Any] = iter(job.batches)

    def get_next(self) -> dict[str, Any] | None:
        """Return the next batch, or nothing at the end."""
        x = next(self.left, None)
        return None if x is None else {"x": x.numpy()}


WEIGHTS = {8: QuantType.QInt8, 4: QuantType.QInt4}


def setting(*, per_channel: bool) -> Setting:
    """Export and preprocess once; each width is a file."""

    def once(job: Job) -> Quantize:
        folder = Path(tempfile.mkdtemp())
        to_onnx(job.model, folder / "float.onnx")
        quant_pre_process(str(folder / "float.onnx"), str(folder / "ready.onnx"))
        names = [n.name for n in onnx.load(folder / "ready.onnx").graph.node if n.op_type in ("Conv", "Gemm", "MatMul")]

        def quantize(weights: int, activations: int) -> Made:
            if weights not in WEIGHTS or activations != 8:
                raise NotOffered("quantize_static has weights of 4, 8 or 16 bits and activations of 8 or 16")
            out = folder / f"w{weights}.onnx"
            # 4 bits for all layers but the ends, as the others do.
            wide = [] if weights == 8 else [names[0], names[-1]]
            overrides = {weight_of(folder / "ready.onnx", n): [{"quant_type": QuantType.QInt8}] for n in wide}
            quantize_static(
                str(folder / "ready.onnx"), str(out), Reader(job), quant_format=QuantFormat.QDQ,
                per_channel=per_channel, activation_type=QuantType.QUInt8, weight_type=WEIGHTS[weights],
                calibrate_method=CalibrationMethod.MinMax, extra_options={"TensorQuantOverrides": overrides},
            )  # fmt: skip
            return Made(run_file(out))

        return quantize

    return once


def weight_of(path: Path, name: str) -> str:
    """Return the name of a layer's weight."""
    (node,) = [n for n in onnx.load(path).graph.node if n.name == name]
    return str(node.input[1])


SETTINGS = {"per channel": setting(per_channel=True), "per tensor": setting(per_channel=False)}

if __name__ == "__main__":
    main(SETTINGS, package="onnxruntime")
