"""ONNX Runtime, set up so that it computes what the master says and tells nobody about it."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from anybit.artifact.model import OnnxModel
from anybit.artifact.values import shape_of
from anybit.common.text import explaining, printable
from anybit.errors import DataError, FileError, SpecError

EXACT = "session.x64quantprecision"
"""Without it, processors that lack VNNI add up products of 8-bit weights in 16 bits, and saturate."""

NOTHING = 4
"""What it has to say is in the exceptions that it raises."""

WORKING_MEMORY, MEMORY_SETTING = 4 * 2**30, "ANYBIT_MEMORY_GB"
"""Bytes that all runs of a process may work with at a time, weights not counted, and what sets another limit."""

SECONDS, SETTING = 300.0, "ANYBIT_SECONDS"
"""How long one run on a calibration input may take, and the environment variable that sets another limit."""


def onnxruntime() -> Any:
    """Import ONNX Runtime with its telemetry off; the switch only works before the first import."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    return onnxruntime


def compile_model(
    model: OnnxModel, *, exact: bool, threads: int | None, where: str, optimize: bool = True, spin: bool = True
) -> Any:
    """Return a session of ONNX Runtime for a model; one that it does not take is an error that names the file.

    Without `optimize` it runs node by node, as it is written; without `spin` its threads sleep between runs, and leave
    the processor to whoever looks at the results.
    """
    ort = onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = NOTHING
    limit_memory(ort, options)
    if threads is not None:
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
    if not spin:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if exact and sums_saturate():
        options.add_session_config_entry(EXACT, "1")
    outside = [tensor for tensor in model.graph.initializer if tensor.data_location == TensorProto.EXTERNAL]
    values = [ort.OrtValue.ortvalue_from_numpy(model.array(tensor)) for tensor in outside]
    if outside:
        options.add_external_initializers([tensor.name for tensor in outside], values)
    with explaining(FileError, f"{where}: ONNX Runtime does not take this graph"):
        data = model.proto.SerializeToString()
        engine = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    engine.large_tensors = values  # it computes on the arrays themselves, so they must live as long as it does
    return engine


@functools.cache
def sums_saturate() -> bool:
    """Tell whether this processor needs `EXACT`, by adding up the largest products of bytes, one row and several.

    Where it does not, the option would cost half of the speed and change nothing.
    """
    rows = helper.make_tensor_value_info("a", TensorProto.UINT8, ["n", 64])
    sums = helper.make_tensor_value_info("y", TensorProto.INT32, ["n", 32])
    weight = helper.make_tensor("b", TensorProto.INT8, [64, 32], [127] * (64 * 32))
    node = helper.make_node("MatMulInteger", ["a", "b"], ["y"])
    graph = helper.make_graph([node], "sums", [rows], [sums], [weight])
    model = OnnxModel(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8))
    session = compile_model(model, exact=False, threads=1, where="sums of bytes")
    found = [session.run(None, {"a": np.full((n, 64), 255, np.uint8)})[0] for n in (1, 16)]
    return any((y != 64 * 127 * 255).any() for y in found)


class TooSlow(DataError):  # noqa: N818
    """A run that was stopped because its time was over."""


def time_limit() -> float:
    """Return how many seconds one run on a calibration input may take."""
    return setting(SETTING, SECONDS, 1e6, "seconds")


def run_in_time(engine: Any, outputs: Sequence[str] | None, feed: Mapping[str, Any], seconds: float) -> list[Any]:
    """Run a compiled network and stop it when it takes too long: a loop in a stranger's file may have no end.

    Raises:
        TooSlow: The time is over.
        DataError: The network does not take the input.
    """
    options = onnxruntime().RunOptions()
    options.log_severity_level = NOTHING
    over = threading.Event()

    def stop() -> None:
        over.set()
        options.terminate = True

    clock = threading.Timer(seconds, stop)
    clock.daemon = True
    clock.start()
    try:
        found: list[Any] = engine.run(outputs, dict(feed), options)
    except Exception as error:  # ONNX Runtime has no common base for its exceptions
        if over.is_set():
            raise TooSlow(f"a run took more than {seconds:g} s and was stopped; {SETTING} sets another limit") from None
        raise DataError(printable(" ".join(str(error).split()), 200) + memory_advice(str(error))) from error
    finally:
        clock.cancel()
    return found


# Limits


def setting(name: str, usual: float, most: float, unit: str) -> float:
    """Return the number that an environment variable sets, or the usual one."""
    text = os.environ.get(name, "")
    try:
        found = float(text or usual)
    except ValueError:
        found = 0.0
    if not 0 < found < most:  # NaN is not
        raise SpecError(f"{name} must be a number of {unit} such as {usual:g}, got {printable(text, 40)!r}")
    return found


def memory_limit() -> int:
    """Return how many bytes all runs of this process may work with at a time."""
    return int(setting(MEMORY_SETTING, WORKING_MEMORY / 2**30, 2**20, "gigabytes") * 2**30)


_limited: list[int] = []


def limit_memory(ort: Any, options: Any) -> None:
    """Let a session of ONNX Runtime share the pool of working memory of this process, which has a limit."""
    if not _limited:
        info = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
        ort.create_and_register_allocator(info, ort.OrtArenaCfg({"max_mem": memory_limit()}))
        _limited.append(memory_limit())
    options.add_session_config_entry("session.use_env_allocators", "1")


def batch_advice(reason: str, feed: Mapping[str, Any]) -> str:
    """Return what to do if a network failed on one example, inside of it: it may want several at once.

    >>> batch_advice("Got invalid dimensions", {"x": np.zeros((1, 3))})
    ''
    """
    alone = "while running" in reason and all(len(s) < 2 or s[0] == 1 for s in map(shape_of, feed.values()))
    return "; if it takes several examples together, save them in one array with a further dimension in front" * alone


def memory_advice(reason: str) -> str:
    """Return what to do about a run that failed, if it failed for want of working memory; else nothing.

    >>> memory_advice("Available memory of 5 is smaller than requested bytes of 9")
    '; it wants more than 4 GB to work with: take smaller batches or pictures, or set ANYBIT_MEMORY_GB'
    >>> memory_advice("Got invalid dimensions")
    ''
    """
    if "smaller than requested bytes" not in reason and "Failed to allocate memory" not in reason:
        return ""
    limit = f"{(_limited[0] if _limited else WORKING_MEMORY) / 2**30:g} GB"
    return f"; it wants more than {limit} to work with: take smaller batches or pictures, or set {MEMORY_SETTING}"
