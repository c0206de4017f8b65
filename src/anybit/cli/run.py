"""`anybit run model.onnx images/`: run on files, at the width that the machine can afford now."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anybit.cli import options
from anybit.cli.show import progress_bars, say
from anybit.common.text import printable
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
    master: options.Master,
    files: Annotated[list[str] | None, typer.Argument(help="What to run it on, as with --input.")] = None,
    inputs: options.What = None,
    policy: options.Policies = None,
    bits: options.Bits = None,
    steps: options.Steps = "",
    milliseconds: options.Milliseconds = 10.0,
    prefer: options.Prefer = "widths",
    threads: options.Threads = None,
    out: Annotated[Path | None, typer.Option(help="Write each input's outputs to this folder, as .npy files.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per input.")] = False,
) -> None:
    """Run a network on files one by one, and print what it says and which width served each.

    Scores of classes become the best class; text is told as it is, of other outputs shape and range. A machine without
    a battery counts as on mains: policy battery then runs in floating point.

    Example: anybit run model.onnx images/*.png --bits W4A8
    """
    from anybit.artifact.inputs import read_feeds
    from anybit.artifact.session import load

    session = load(master, threads=threads, prefer=prefer)
    name = policy or ("battery" if bits is None else "fixed")
    chooser = Chooser(find_policy(name, session, bits=bits, steps=steps, milliseconds=milliseconds))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    with progress_bars() as start:
        advance = start("inputs", 0)
        for i, (label, feed) in enumerate(
            read_feeds([*(files or []), *(inputs or [])], session.takes, session.feeding)
        ):
            wanted = chooser.choose(read_machine() if name in ASKING else Reading())
            if wanted != session.bits:
                session.set_bits(weights=wanted.weights, activations=wanted.activations)
            try:
                _tell(session, label, feed, None if out is None else out / f"{i:04d}", as_json=as_json)
            except DataError as error:
                raise DataError(f"{label}: {error}") from error
            advance(1)


def _tell(session: Session, label: str, feed: dict[str, Any], out: Path | None, *, as_json: bool) -> None:
    """Run one input, print what the network says, and write its outputs if asked."""
    import numpy as np

    from anybit.artifact.answers import answers, outputs_of
    from anybit.artifact.texts import storable

    outputs, used = outputs_of(session, feed)
    found = answers(outputs, len(session.feeding.labels))
    written: dict[str, str] = {}
    if out is not None:
        for answer in found:
            plain = "".join(c if c.isalnum() or c in "-_" else "-" for c in answer.name)[:60]
            path = out.with_name(f"{out.name}-{plain}.npy" if len(found) > 1 else f"{out.name}.npy")
            np.save(path, storable(outputs[answer.name]))
            written[answer.name] = str(path)
    best = next((answer.best for answer in found if answer.best is not None), None)
    if as_json:
        said: dict[str, Any] = {"file": label, "bits": str(used)}
        if best is not None:
            said |= {"class": best, "label": session.feeding.label(best)}
        said["outputs"] = [
            {"name": a.name, "shape": list(a.shape), "low": finite(a.low), "high": finite(a.high),
             **({} if a.texts is None else {"text": list(a.texts)}),
             **({"file": written[a.name]} if written else {})}
            for a in found
        ]  # fmt: skip
        typer.echo(json.dumps(said))
        return
    if any(answer.texts is not None for answer in found):  # the name of a class says more than its number
        best = None
    text = session.feeding.label(best) if best is not None else "; ".join(printable(a, 200) for a in found)
    say(f"{used!s:6} {text:16} {label}")


def finite(number: float) -> float | None:
    """Return a number that JSON has, or nothing.

    >>> finite(1.5), finite(float("nan"))
    (1.5, None)
    """
    return number if math.isfinite(number) else None


def find_policy(name: str, session: Session, *, bits: str | None, steps: str, milliseconds: float) -> Policy:
    """Return the policy of that name; "latency" measures the widths on this machine first."""
    if name not in POLICIES:
        raise SpecError(f"a policy is one of {', '.join(POLICIES)}; got {name!r}")
    if bits is not None and name not in ("fixed", "power"):
        raise SpecError(f"policy {name} chooses the widths itself; leave --bits or --policy {name} away")
    if steps and name != "battery":
        raise SpecError(f"--steps is for policy battery, not for {name}")
    chosen = Bits.parse(bits or "W8A8")
    if name == "battery":
        return battery(*parse_steps(steps.split()))
    if name == "power":
        return power(unplugged=chosen)
    if name == "latency":
        return latency(measured(session), budget=milliseconds / 1000)
    return lambda reading: chosen


def measured(session: Session) -> dict[Bits, float]:
    """Return the median time of a run at batch 1, in seconds, for a few widths."""
    feed, found = session.example(), {}
    for bits in CANDIDATES:
        session.set_bits(weights=bits.weights, activations=bits.activations)
        found[bits] = measure(lambda: session.run(feed))
    return found
