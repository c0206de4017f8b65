"""Whether a start was trained to the end: the loss on training images there, and after the epochs of a plain row.

    python -m paper.starts

Takes every network and seed of the converged table whose row without a penalty is trained here, and writes them to
results/starts.json beside what is there of others. Images are those that training saw, as they are and not varied at
random.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer

from anybit.common.files import read_json, write_json
from anybit.common.provenance import origin
from anybit.data import Batches, Split
from anybit.task.checkpoint import load_model
from paper.command import run_command
from paper.runs import load_data, predict
from paper.tables import Job, Table, find_table

BATCH = 250


def scores(checkpoint: Path, split: Split) -> dict[str, float]:
    """Return the mean loss, in nats, and the accuracy of a checkpoint on some images."""
    logits, labels = predict(load_model(checkpoint)[0], Batches(split, BATCH))
    right = (logits.argmax(1) == labels).double().mean()
    return {"loss": float(F.cross_entropy(logits.double(), labels)), "accuracy": float(right)}


def measured(table: Table, images: int) -> list[dict[str, Any]]:
    """Return what start and plain row have of each network and seed, on images of training and of validation."""
    found = []
    for path in sorted((table.runs / f"{table.name}-{table.scale}").glob("*-*/none/model.safetensors")):
        network, _, seed = path.parts[-3].rpartition("-")
        data = load_data(table.recipe(network, "base").data.name)
        splits = {"training": data.train.first(images), "validation": data.validation}
        places = {
            "start": table.base(network, int(seed)),
            "after the row": table.folder(Job(network, int(seed), table.row("none"))) / path.name,
        }
        own = {name: {part: scores(place, split) for part, split in splits.items()} for name, place in places.items()}
        came = {key: value for key, value in origin().items() if key != "versions"}
        found.append({"network": network, "seed": int(seed), "images": images, **own, **came})
    return found


def merged(rows: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """Return rows together with those of other networks and seeds in a file, if there is one."""
    known = read_json(path, what="losses at the starts")["rows"] if path.is_file() else []
    return list({(row["network"], row["seed"]): row for row in (*known, *rows)}.values())


def command(
    runs: Annotated[Path, typer.Option(help="Where the table keeps its checkpoints.")] = Path("runs"),
    out: Annotated[Path, typer.Option(help="Where the numbers go.")] = Path("results/starts.json"),
    images: Annotated[int, typer.Option(help="Training images, the first ones.", min=1)] = 10_000,
) -> None:
    """Measure the loss on training images at the start of the converged table's rows and after the plain one."""
    torch.set_grad_enabled(False)
    rows = measured(find_table("table1", "converged", runs=runs), images)
    write_json(out, {"versions": origin()["versions"], "rows": merged(rows, out)})
    for row in rows:
        for name in ("start", "after the row"):
            parts = "  ".join(f"{part} {v['loss']:.4f} ({100 * v['accuracy']:.2f} %)" for part, v in row[name].items())
            print(f"{row['network']}, seed {row['seed']}, {name}: {parts}")


if __name__ == "__main__":
    run_command(command)
