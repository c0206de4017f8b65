"""`anybit watch model.onnx`: see live which width the machine would run at."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from anybit.cli import options
from anybit.cli.show import console


def watch(
    master: options.Master,
    policy: options.Policies = None,
    bits: options.Bits = None,
    inputs: options.What = None,
    steps: options.Steps = "",
    milliseconds: options.Milliseconds = 10.0,
    prefer: options.Prefer = "widths",
    every: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
    times: Annotated[int | None, typer.Option(help="Stop after so many looks; by default go on until ctrl-C.")] = None,
) -> None:
    """Show battery, power source, width and time per run, until interrupted.

    What is run is the first of your inputs, or one that is made up.

    Example: anybit watch model.onnx --policy battery
    """
    from rich.live import Live
    from rich.table import Table

    from anybit.artifact.inputs import read_feeds
    from anybit.artifact.session import load
    from anybit.cli.run import find_policy
    from anybit.policy import Chooser, Reading, measure, read_machine

    session = load(master, prefer=prefer)
    name = policy or ("battery" if bits is None else "fixed")
    chooser = Chooser(find_policy(name, session, bits=bits, steps=steps, milliseconds=milliseconds))
    feed = next(read_feeds(inputs, session.takes, session.feeding))[1] if inputs else session.example()

    def look(reading: Reading) -> Table:
        wanted = chooser.choose(reading)
        session.set_bits(weights=wanted.weights, activations=wanted.activations)
        taken = measure(lambda: session.run(feed), repeats=5)
        table = Table("battery", "power", "width", "ms per run", title=str(master), title_justify="left")
        charge = "none" if reading.percent is None else f"{reading.percent:.0f}%"
        table.add_row(charge, "mains" if reading.on_mains else "battery", str(wanted), f"{1000 * taken:.2f}")
        return table

    looks = 0
    with Live(console=console, auto_refresh=False) as live:
        while times is None or looks < times:
            live.update(look(read_machine()), refresh=True)
            looks += 1
            if looks != times:
                time.sleep(every)
