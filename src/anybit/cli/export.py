"""`anybit export model.onnx out.onnx --bits W4A8`: one width of a master, for any runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anybit.cli import options
from anybit.cli.show import say
from anybit.spec import Bits


def export(
    master: options.Master,
    out: Annotated[Path, typer.Argument(help="The ONNX file to write.")],
    bits: Annotated[str, typer.Option(help="Widths of weights and activations.")] = "W8A8",
    signed: Annotated[
        bool, typer.Option("--signed", help="Signed bytes: faster, and right only on processors with VNNI.")
    ] = False,
) -> None:
    """Write a master at one width as a plain ONNX file, with standard operators only.

    Example: anybit export model.onnx model-w4a8.onnx --bits W4A8
    """
    from anybit.artifact.export import export as write
    from anybit.artifact.storage import size_on_disk

    pair = Bits.parse(bits)
    write(master, out, weights=pair.weights, activations=pair.activations, signed=signed)
    before, after = size_on_disk(master), size_on_disk(out)
    say(f"{out}: {pair}, {after / 1e6:.2f} MB, {after / before:.2f} of the master")
