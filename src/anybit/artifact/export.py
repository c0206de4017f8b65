"""`export`: a master at one width, as a plain ONNX file for any runtime."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from anybit.artifact import protobuf_scan
from anybit.artifact.master import open_master
from anybit.artifact.quantized_graph import quantized_graph
from anybit.artifact.runtime import EXACT
from anybit.artifact.storage import write_model
from anybit.spec import Bits, LayerWidths

NOTE = "anybit.export"
"""The metadata entry of an exported file: what it is, and what a runtime must set to run it."""


def export(
    master: str | Path,
    out: str | Path,
    *,
    weights: int,
    activations: int,
    layers: LayerWidths | None = None,
    signed: bool = False,
) -> None:
    """Write a master at one width, with standard operators only; weights of up to 4 bits take half a byte each.

    The file is right on every processor. ONNX Runtime adds two products of an unsigned and a signed byte in 16 bits
    where the processor lacks VNNI, and saturates. So weights of 8 bits, whose sums could, are stored as unsigned bytes:
    the same numbers, with a kernel that is exact everywhere and slower there. Weights of 7 bits or fewer are fast and
    exact in either form.

    Args:
        master: What `anybit.save` wrote.
        out: Where to write; the file is either complete or not there.
        weights: The width of every weight; 32 means floating point.
        activations: The width of every activation.
        layers: Other widths for points whose name matches a pattern, as (weights, activations).
        signed: Store all weights as signed bytes: for processors with VNNI, or runtimes that set the option which the
            file's metadata then names.
    """
    opened = open_master(master)
    bits = Bits(weights, activations)
    numbers = opened.plan.at(bits, layers, tensors=opened.tensors)
    model, exact = quantized_graph(opened, numbers, packed=True, anywhere=not signed)
    about: dict[str, Any] = {"bits": str(bits), "session_options": {EXACT: "1"} if exact else {}}
    if exact:
        about["why"] = (
            "ONNX Runtime on processors without VNNI adds two products of 8-bit numbers in 16 bits and saturates; "
            "with this session option it does not"
        )
    note = protobuf_scan.entry(NOTE, json.dumps(about, ensure_ascii=False))
    write_model(out, model, lambda file, data: file.write(note), spare=len(note))
