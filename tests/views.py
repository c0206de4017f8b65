"""A captured network together with its view, and the one brought into line with the other."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from anybit.graph.from_torch import read_torch
from anybit.graph.view import Graph
from anybit.simulate.capture import capture
from anybit.simulate.prepare import apply_changes


def viewed(model: nn.Module, example: Any) -> tuple[fx.GraphModule, Graph]:
    body = capture(model, example)
    return body, read_torch(body)


def applied(body: fx.GraphModule, graph: Graph) -> fx.GraphModule:
    """Put what passes did to the view into the network."""
    apply_changes(body, graph)
    body.graph.lint()
    body.recompile()
    return body
