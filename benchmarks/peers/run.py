"""anybit beside other tools on trained networks: accuracy, time to a new width, forward time over floating point.

    make bench-peers

Every tool gets the same checkpoint, the same 512 unlabelled training images and the same test images, in a process and
an environment of its own. A tool that fails is shown with its own error. Writes results/peers.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from environment import TOOLS, CannotRun, Tool, run
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from anybit.common.files import write_json
from anybit.common.provenance import origin

ROOT = Path(__file__).parents[2]
WIDTHS = ("W8A8", "W6A6", "W4A8", "W4A4", "W3A8", "W3A3", "W2A8")
CHECKPOINTS = (ROOT / "paper/checkpoints/converged-vgg-like-base-0/model.safetensors",)
CALIBRATION = 512
Row = dict[str, Any]


def write_images(path: Path, count: int) -> None:
    """Write the images that every tool gets: some to calibrate with, some to test on."""
    sys.path.insert(0, str(ROOT))
    from paper.cifar10 import load

    data = load()
    tensors = {"calibration": data.train.x[:CALIBRATION], "x": data.test.x[:count], "y": data.test.y[:count]}
    save_file({n: t.contiguous() for n, t in tensors.items()}, path, {"input_range": json.dumps(data.input_range)})


def rows_of(tool: Tool, *arguments: str) -> list[Row]:
    """A tool's rows, or one row that says why there are none."""
    try:
        answer = run(tool, *arguments)
    except CannotRun as error:
        return [{"tool": tool.name, "bits": None, "reason": str(error)}]
    return [{"version": answer["version"], "threads": answer["threads"], **r} for r in answer["rows"]]


def shown(rows: list[Row], checkpoint: Path, widths: list[str]) -> Table:
    """Accuracy at every width, and the median of the seconds to a width."""
    floats = [r["float_accuracy"] for r in rows if "float_accuracy" in r]
    exact = f"; floating point {100 * floats[0]:.1f} %" if floats else ""
    table = Table(title=f"{checkpoint.parent.name}{exact}")
    for column in ("tool", *widths, "seconds a width", "forward"):
        table.add_column(column, justify="left" if column == "tool" else "right")
    for name in dict.fromkeys(r["tool"] for r in rows):
        own = {r["bits"]: r for r in rows if r["tool"] == name}
        if None in own:
            table.add_row(f"{name}: {own[None]['reason']}", *["-"] * (len(widths) + 2))
            continue
        done = [r for r in own.values() if "accuracy" in r]
        cells = [f"{100 * own[w]['accuracy']:.1f}" if "accuracy" in own.get(w, {}) else "-" for w in widths]
        seconds = f"{sum(r['seconds_to_width'] for r in done) / len(done):.1f}" if done else "-"
        forward = f"{sum(r['ratio'] for r in done) / len(done):.2f}x" if done else "-"
        table.add_row(name, *cells, seconds, forward)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tools", help=f"such as {TOOLS[0].name},{TOOLS[1].name}; default all")
    parser.add_argument("--checkpoint", type=Path, action="append", help="default: what the repository has")
    parser.add_argument("--widths", default=" ".join(WIDTHS))
    parser.add_argument("--images", type=int, default=10_000, help="test images")
    parser.add_argument("--out", default=ROOT / "results/peers.json", type=Path)
    options = parser.parse_args()
    console = Console(width=160)
    everything: list[Row] = []
    tools = [t for t in TOOLS if not options.tools or t.name in options.tools.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder) / "images.safetensors"
        write_images(images, options.images)
        for checkpoint in options.checkpoint or CHECKPOINTS:
            rows: list[Row] = []
            for tool in tools:
                console.print(f"running {tool.name}")
                rows += rows_of(tool, str(checkpoint), str(images), options.widths, str(options.rounds))
            console.print(shown(rows, checkpoint, options.widths.split()))
            for r in rows:
                if r["bits"] is not None and "reason" in r:
                    console.print(f"{r['tool']}, {r['bits']}: {r['reason']}", highlight=False)
            everything += [{"checkpoint": checkpoint.parent.name, **r} for r in rows]
            write_json(options.out, {**origin(), "threads": torch.get_num_threads(), "seed": 0, "rows": everything})
    console.print(f"written to {options.out}")


if __name__ == "__main__":
    main()
