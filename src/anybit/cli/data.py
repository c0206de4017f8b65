"""`anybit data NAME`: a data set as training will see it."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from anybit.cli.needs import needs_torch
from anybit.cli.show import console


def data(
    name: Annotated[
        str, typer.Argument(help="digits, a folder of images, an .npz file, or a function: my_data.py:load.")
    ],
) -> None:
    """Say what is in a data set: how it is split, the shape and the range of its inputs, and how even its classes are.

    Example: anybit data digits
    """
    with needs_torch("anybit data"):
        from anybit.data import load_dataset
    found = load_dataset(name, code=True)
    low, high = found.input_range
    lines = [
        f"inputs of {'x'.join(map(str, found.shape))}, from {low:g} to {high:g}, in {len(found.classes)} classes"
        + ("" if found.augment is None else "; training images can be augmented")
    ]
    for part in ("train", "validation", "test"):
        labels = getattr(found, part).y.tolist()
        count = Counter(labels)
        each = [count.get(label, 0) for label in range(len(found.classes))]
        lines.append(f"{part:<10} {len(labels):,} examples, {min(each):,} to {max(each):,} of a class")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
