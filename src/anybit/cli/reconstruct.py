"""`anybit reconstruct model.onnx --calibrate images/ --bits W4A4,W3A3`: a master that rounds better at some widths."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anybit.cli import options
from anybit.cli.show import progress_bars, say
from anybit.errors import SpecError
from anybit.spec import widths_of


def reconstruct(
    master: options.Master,
    calibrate: options.Inputs = None,
    bits: Annotated[str, typer.Option(help="Pairs of widths, separated by commas or blanks.")] = "W4A4",
    limit: options.Limit = 256,
    out: Annotated[
        Path | None, typer.Option(help="The master to write.", show_default="MASTER-reconstructed.onnx")
    ] = None,
) -> None:
    """Fit rounding, ranges and biases of some widths to a few hundred inputs, without labels and without PyTorch.

    The other widths stay as they are. The file grows by about a bit for each weight and width.

    Example: anybit reconstruct model.onnx --calibrate images/ --bits W4A4,W3A3 --out better.onnx
    """
    from anybit.artifact.inputs import read_feeds
    from anybit.artifact.reconstruct import reconstruct as run
    from anybit.artifact.session import load
    from anybit.artifact.storage import size_on_disk

    if not calibrate:
        raise SpecError("anybit reconstruct needs inputs, 64 to 512 of them: say --calibrate WHAT")
    target = out or master.with_name(f"{master.stem}-reconstructed.onnx")
    pairs = widths_of(bits)
    session = load(master)
    with progress_bars():
        feeds = [feed for _, feed in read_feeds(calibrate, session.takes, session.feeding, limit=limit)]
        run(master, feeds, pairs, out=target)
    say(f"{target}: {size_on_disk(target) / 1e6:.2f} MB, {' '.join(map(str, pairs))} fitted to {len(feeds)} inputs")
