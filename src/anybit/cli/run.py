"""`anybit run model.onnx --input images/`: classify files, at the width that the machine can afford now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anybit.cli.show import console, progress_bars
from anybit.common.text import printable, quoted
from anybit.errors import DataError, SpecError
from anybit.policy import Chooser, Policy, Reading, battery, latency, measure, parse_steps, power, read_machine
from anybit.spec import Bits

if TYPE_CHECKING:
    from anybit.artifact.session import Session

POLICIES = ("battery", "power", "latency", "fixed")
CANDIDATES = (Bits(), Bits(8, 8), Bits(4, 8), Bits(4, 4))

ASKING = ("battery", "power")
"""The policies that ask the machine; the others need no psutil."""


def run(
    master: Annotated[Path, typer.Argument(help="A master, as anybit save writes it.")],
    inputs: Annotated[Path, typer.Option("--input", help="A picture, a .npy file, or a folder of them.")],
    policy: Annotated[str, typer.Option(help="battery, power, latency (see --milliseconds), or fixed.")] = "battery",
    bits: Annotated[str, typer.Option(help="The widths of policy fixed, or of power without mains.")] = "W8A8",
    steps: Annotated[str, typer.Option(help="Steps of policy battery: below so many percent at those widths.")] = "",
    milliseconds: Annotated[float, typer.Option(help="The time budget of policy latency, at batch 1.")] = 10.0,
    threads: Annotated[int | None, typer.Option(help="Threads that a run may use; all cores by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per file.")] = False,
) -> None:
    """Classify files one by one and print which width served each.

    A machine without a battery counts as on mains: policy battery then runs in floating point.

    Example: anybit run model.onnx --input images/ --policy battery --steps "20:W4A4 60:W8A8"
    """
    import numpy as np

    from anybit.artifact.bench import input_shapes
    from anybit.artifact.pictures import find_inputs, read_inputs
    from anybit.artifact.session import load

    session = load(master, threads=threads)
    shapes = list(input_shapes(session).values())
    if len(shapes) != 1:
        raise DataError(f"{master}: the network takes {len(shapes)} inputs; run takes files for networks with one")
    about = session.master.header.about
    chooser = Chooser(find_policy(policy, session, bits=bits, steps=steps, milliseconds=milliseconds))
    files = find_inputs(inputs)
    with progress_bars() as start:
        advance = start("files", len(files))
        for path, x in read_inputs(files, shapes[0], **normalization(about, master)):
            wanted = chooser.choose(read_machine() if policy in ASKING else Reading())
            if wanted != session.bits:
                session.set_bits(weights=wanted.weights, activations=wanted.activations)
            logits, used = session.run_with_bits(x)
            rows = np.atleast_2d(logits if not isinstance(logits, dict) else next(iter(logits.values())))
            if not rows.size or not np.isfinite(rows).all():
                raise DataError(f"{path}: at {used} the network says nothing finite about it; try a wider width")
            for row in rows:
                found = int(row.argmax())
                label = class_name(about, found)
                if as_json:
                    typer.echo(json.dumps({"file": str(path), "class": found, "label": label, "bits": str(used)}))
                else:
                    console.print(f"{used!s:6} {label:16} {path}", highlight=False, markup=False, soft_wrap=True)
            advance(1)


def normalization(about: dict[str, Any], master: Path) -> dict[str, list[float]]:
    """Return mean and deviation of the pixels that the network was trained on, as the master tells them.

    >>> normalization({}, Path("m.onnx"))
    {}
    """
    values = about.get("input", {})
    if not isinstance(values, dict) or not set(values) <= {"mean", "std"}:
        raise DataError(f"{master}: about.input must hold mean and std, got {quoted(values)}")
    for key, value in values.items():
        numbers = isinstance(value, list) and all(isinstance(v, int | float) and abs(v) < 1e6 for v in value)
        if not numbers or len(value) not in (1, 3) or (key == "std" and min(value) <= 0):
            raise DataError(f"{master}: about.input.{key} must be one or three numbers, got {quoted(value)}")
    return values


def class_name(about: dict[str, Any], index: int) -> str:
    """Return the name of a class, or its number.

    >>> class_name({"classes": ["cat", "dog"]}, 1), class_name({}, 1)
    ('dog', '1')
    """
    names = about.get("classes")
    return printable(names[index], 60) if isinstance(names, list) and index < len(names) else str(index)


def find_policy(name: str, session: Session, *, bits: str, steps: str, milliseconds: float) -> Policy:
    """Return the policy of that name; "latency" measures the widths on this machine first."""
    if name == "battery":
        return battery(*parse_steps(steps.split()))
    if name == "power":
        return power(unplugged=Bits.parse(bits))
    if name == "latency":
        return latency(measured(session), budget=milliseconds / 1000)
    if name == "fixed":
        fixed = Bits.parse(bits)
        return lambda reading: fixed
    raise SpecError(f"a policy is one of {', '.join(POLICIES)}; got {name!r}")


def measured(session: Session) -> dict[Bits, float]:
    """Return the median time of a run at batch 1, in seconds, for a few widths."""
    import numpy as np

    from anybit.artifact.bench import input_shapes

    feed = {name: np.zeros((1, *shape), np.float32) for name, shape in input_shapes(session).items()}
    found = {}
    for bits in CANDIDATES:
        session.set_bits(weights=bits.weights, activations=bits.activations)
        found[bits] = measure(lambda: session.run(feed))
    return found
