"""anybit beside other tools on trained networks: accuracy, time to a new width, forward time over floating point.

    make bench-peers                                     goes on where it stopped
    make bench-peers ARGS="--tools anybit,Brevitas --widths W4A8,W4A4"
    make bench-peers ARGS=--show                         only prints what results/peers.json has

Every tool gets the same checkpoint, the same 512 unlabelled training images and the same test images, in a process and
an environment of its own. Each row is written to results/peers.json as it comes, a tool that fails with its own error.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from environment import TOOLS, CannotRun, Tool, rows_of
from peer_rows import WIDTHS, Results, Row, shown

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

CHECKPOINTS = (
    *(ROOT / f"paper/checkpoints/converged-resnet18-base-{seed}" for seed in (0, 1)),
    *(Path(__file__).parent / f"checkpoints/peers-mobilenet-v2-{seed}" for seed in (0, 1)),
)
"""Each network trained with two seeds."""
CALIBRATION = 512
ROUNDS = 3


def write_images(count: int) -> Path:
    """Write the images that every tool gets, some to calibrate with, some to test on, and return where."""
    path = TOOLS[0].folder.parent / f"images-{count}.safetensors"
    if not path.is_file():
        from paper.cifar10 import load

        data = load()
        tensors = {"calibration": data.train.x[:CALIBRATION], "x": data.test.x[:count], "y": data.test.y[:count]}
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({n: t.contiguous() for n, t in tensors.items()}, path, {"input_range": json.dumps(data.input_range)})
    return path


def float_row(checkpoint: Path, images: Path) -> Row:
    """Return the accuracy of a network in floating point."""
    from harness import answers, read_job

    job = read_job(str(checkpoint / "model.safetensors"), str(images))
    found = float((answers(job.reference, job.x) == job.y).double().mean())
    return {"tool": "floating point", "setting": "", "bits": "FP", "accuracy": found, "n": len(job.y)}


def measure(results: Results, tool: Tool, checkpoint: Path, images: Path, asked: list[tuple[str, str]]) -> None:
    """Add the rows that were asked for; those that did not come say why."""
    common = {"network": checkpoint.name, "tool": tool.name}
    left = list(asked)
    job = {"checkpoint": str(checkpoint / "model.safetensors"), "images": str(images), "rounds": ROUNDS, "rows": asked}
    try:
        for row in rows_of(tool, job):
            results.add({**common, **row})
            left.remove((row["setting"], row["bits"]))
            print(checkpoint.name, tool.name, row["setting"], row["bits"], row.get("accuracy", row.get("error")))
    except CannotRun as reason:
        for setting, bits in left:
            results.add({**common, "setting": setting, "bits": bits, "error": str(reason)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", help=f"such as {TOOLS[0].name},{TOOLS[1].name}; default all")
    parser.add_argument("--settings", default="", help="what the settings' names match, such as 'per channel$'")
    parser.add_argument("--checkpoint", type=Path, action="append", help="a folder; default: what the repository has")
    parser.add_argument("--widths", default=",".join(WIDTHS))
    parser.add_argument("--images", type=int, default=10_000, help="test images")
    parser.add_argument("--out", default=ROOT / "results/peers.json", type=Path)
    parser.add_argument("--again", action="store_true", help="try once more what failed")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results, console = Results(options.out), Console(width=170)
    checkpoints = options.checkpoint or [c for c in CHECKPOINTS if c.is_dir()]
    for checkpoint in [] if options.show else checkpoints:
        images = write_images(options.images)
        if not any((r["network"], r["bits"], r["n"]) == (checkpoint.name, "FP", options.images) for r in results.rows):
            results.add({"network": checkpoint.name, **float_row(checkpoint, images)})
        for tool in (t for t in TOOLS if not options.tools or t.name in options.tools.split(",")):
            widths = options.widths.split(",")
            asked = results.missing(checkpoint.name, tool, widths, options.images, again=options.again)
            if asked := [pair for pair in asked if re.search(options.settings, pair[0])]:
                measure(results, tool, checkpoint, images, asked)
    for network in dict.fromkeys(r["network"] for r in results.rows):
        console.print(shown(results.rows, network))
    for r in results.rows:
        if "error" in r or "export_error" in r:
            failed = r.get("error") or f"the file: {r['export_error']}"
            console.print(f"{r['network']}, {r['tool']}, {r['setting']}, {r['bits']}: {failed}", highlight=False)


if __name__ == "__main__":
    main()
