"""`anybit serve model.onnx`: a local page on which the model runs at the width of a slider."""

from __future__ import annotations

import threading
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anybit.cli import options
from anybit.cli.show import say
from anybit.errors import MissingDependency
from anybit.policy import Reading, parse_steps, read_machine

if TYPE_CHECKING:
    from anybit.serve.app import App


def serve(
    master: options.Master,
    examples: Annotated[Path | None, typer.Option(help="A folder of pictures or arrays that the page offers.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port on 127.0.0.1; 0 takes any free one.")] = 0,
    steps: options.Steps = "",
    prefer: options.Prefer = "widths",
    threads: options.Threads = None,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
) -> None:
    """Serve a page on this machine where the model runs at any width, until interrupted.

    Only who has the printed address can use it, and only from this machine. What is uploaded, a picture or arrays in an
    .npy or .npz file, is not kept.

    Example: anybit serve model.onnx --examples images/
    """
    from anybit.serve.server import LiveServer

    app = make_app(master, examples=examples, steps=steps, threads=threads, prefer=prefer)
    with LiveServer(app, port=port) as server:
        say(server.url)
        say("ctrl-C ends it")
        if open_page:
            # Some browsers only return when they are closed.
            threading.Thread(target=webbrowser.open, args=[server.url], daemon=True).start()
        server.serve_forever()


def make_app(
    master: Path,
    *,
    examples: Path | None = None,
    steps: str = "",
    threads: int | None = None,
    prefer: str = "widths",
) -> App:
    """Return the page of a master."""
    from anybit.artifact.session import load
    from anybit.serve.app import App
    from anybit.serve.model import LiveModel
    from anybit.serve.upload import read_examples

    chosen = parse_steps(steps.split())
    model = LiveModel(load(master, threads=threads, prefer=prefer))
    offered = () if examples is None else read_examples(examples)
    return App(model, steps=chosen, examples=offered, machine=this_machine())


def this_machine() -> Reading | None:
    """Return what the machine says about its battery, or nothing where psutil is not installed."""
    try:
        return read_machine()
    except MissingDependency:
        return None
