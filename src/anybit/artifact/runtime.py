"""ONNX Runtime, set up so that it computes what the master says and tells nobody about it."""

from __future__ import annotations

import os
from typing import Any

import onnx
from onnx import TensorProto

from anybit.artifact.bounds import limit_memory
from anybit.artifact.model import OnnxModel
from anybit.common.text import printable
from anybit.errors import FileError

EXACT = "session.x64quantprecision"
"""Without it, processors that lack VNNI add up products of 8-bit weights in 16 bits, and saturate."""

NOTHING = 4
"""What it has to say is in the exceptions that it raises."""


def onnxruntime() -> Any:
    """Import ONNX Runtime with its telemetry off; the switch only works before the first import."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    return onnxruntime


def plain_session(model: onnx.ModelProto) -> Any:
    """Return a session that runs a small model as it is written, node by node."""
    ort = onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = NOTHING
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    limit_memory(ort, options)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def compile_model(model: OnnxModel, *, exact: bool, threads: int | None, where: str) -> Any:
    """Return a session of ONNX Runtime for a model; one that it does not take is an error that names the file."""
    ort = onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = NOTHING
    limit_memory(ort, options)
    if threads is not None:
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
    if exact:
        options.add_session_config_entry(EXACT, "1")
    outside = [tensor for tensor in model.graph.initializer if tensor.data_location == TensorProto.EXTERNAL]
    values = [ort.OrtValue.ortvalue_from_numpy(model.array(tensor)) for tensor in outside]
    if outside:
        options.add_external_initializers([tensor.name for tensor in outside], values)
    try:
        data = model.proto.SerializeToString()
        engine = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime has no common base for its exceptions
        reason = printable(error, 200)
        raise FileError(f"{where}: ONNX Runtime does not take this graph ({reason})") from error
    engine.large_tensors = values  # it computes on the arrays themselves, so they must live as long as it does
    return engine
