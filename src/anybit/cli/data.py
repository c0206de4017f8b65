"""`anybit data NAME`: a data set as training will see it."""

from __future__ import annotations

from collections import Counter
from operator import length_hint
from typing import Annotated

import typer

from anybit.cli import options
from anybit.cli.show import say


def data(
    name: Annotated[
        str, typer.Argument(help="digits, a folder of images, an .npz file, or a function: my_data.py:loaders.")
    ],
    size: options.Size = None,
) -> None:
    """Say what is in a data set: how it is split, the shape and the range of its inputs, and how even its classes are.

    Example: anybit data digits
    """
    with options.needs_torch("anybit data"):
        from anybit.data import Given, load_dataset
    found = load_dataset(name, code=True, size=size)
    low_high = "" if found.input_range is None else f", from {found.input_range[0]:g} to {found.input_range[1]:g}"
    classes = f", in {len(found.classes)} classes" if found.classes else ""
    more = "" if found.augment is None else "; training images can be augmented"
    say(f"inputs of {'x'.join(map(str, found.shape))}{low_high}{classes}{more}")
    for part in ("train", "validation", "test"):
        split = getattr(found, part)
        if split is None:
            say(f"{part:<10} none")
        elif isinstance(split, Given):
            sizes = {"examples": getattr(split.loader, "dataset", ()), "batches": split.loader}
            counts = [f"{length_hint(of):,} {what}" for what, of in sizes.items() if length_hint(of)]
            say(f"{part:<10} {' in '.join(counts) or 'a loader without a length'}")
        else:
            count = Counter(split.y.tolist())
            each = [count.get(label, 0) for label in range(len(found.classes))]
            say(f"{part:<10} {len(split):,} examples, {min(each):,} to {max(each):,} of a class")
