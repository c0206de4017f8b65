"""What each data-free helper does for accuracy, at each width, on the trained CIFAR-10 networks.

    make bench-helpers

Test accuracy of runs/laptop-vgg-like-base-0 and runs/laptop-resnet18-base-0, quantized without data, one helper at a
time and all together, per tensor and per channel. Writes results/helpers.json after every line.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from anybit.common.files import write_json
from anybit.common.provenance import origin
from anybit.data import Batches, load_dataset
from anybit.evaluate.sweep import sweep
from anybit.plan.build import HELPERS
from anybit.simulate.prepare import prepare
from anybit.spec import Bits
from anybit.task.checkpoint import load_model

RUNS = ("runs/laptop-vgg-like-base-0", "runs/laptop-resnet18-base-0")
WIDTHS = [Bits.parse(word) for word in ("FP", "W8A8", "W6A6", "W4A8", "W4A4", "W3A8", "W3A3", "W2A8")]
SETTINGS: dict[str, tuple[str, ...]] = {
    "none": (),
    **{name: (name,) for name in HELPERS},
    "all": HELPERS,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", nargs="+", default=list(RUNS))
    parser.add_argument("--n", type=int, default=5000, help="how many test images")
    parser.add_argument("--out", default="results/helpers.json")
    options = parser.parse_args()
    console = Console()
    results = []
    for run in options.runs:
        model, about = load_model(Path(run) / "model.safetensors")
        data = load_dataset(about["data"])
        test = data.test.first(options.n).channels_last()
        for per_channel in (False, True):
            scales = "per channel" if per_channel else "per tensor"
            table = Table(title=f"{run}, {scales}: test accuracy in %, n = {len(test)}")
            for column in ("helpers", *map(str, WIDTHS)):
                table.add_column(column, justify="left" if column == "helpers" else "right")
            for name, helpers in SETTINGS.items():
                net = prepare(
                    model,
                    test.x[:2],
                    input_range=data.input_range,
                    per_channel=per_channel,
                    helpers=helpers,
                    preset="paper",
                )
                rows = sweep(net, Batches(test, 100), widths=WIDTHS, label=name, seed=about["seed"])
                table.add_row(name, *(f"{100 * row.accuracy:.1f}" for row in rows))
                for row in rows:
                    results.append({"run": run, "model": about["model"], "scales": scales, **row.to_dict()})
                write_json(options.out, {**origin(), "threads": torch.get_num_threads(), "rows": results})
                console.print(f"{scales}, {name}: done")
            console.print(table)
    console.print(f"written to {options.out}")


if __name__ == "__main__":
    main()
