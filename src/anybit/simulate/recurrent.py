"""Recurrent cells stay one operator: a loop over time, whose length is free, in the captured network and in the file.

`torch.export` would write an LSTM out step by step. While a network is captured or translated, its recurrent cells are
operators of our own, of which only the shapes are known; in the captured network they are PyTorch's again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

_CELLS = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN", "rnn_relu": "RNN"}
_ARGUMENTS = (
    "Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, bool bidirectional, bool batch_first"
)


def _register() -> dict[str, Any]:
    """Define an operator for each cell, with shapes and nothing else."""
    for name in _CELLS:
        states = "Tensor[] hx" if name == "lstm" else "Tensor hx"
        results = "(Tensor, Tensor, Tensor)" if name == "lstm" else "(Tensor, Tensor)"
        torch.library.define(f"anybit::{name}", f"(Tensor x, {states}, {_ARGUMENTS}) -> {results}")
        torch.library.register_fake(f"anybit::{name}", _shapes)
    return {name: getattr(torch.ops.anybit, name).default for name in _CELLS}


def _shapes(
    x: Tensor, hx: Any, params: Any, biases: bool, layers: int, dropout: float, train: bool, both: bool, first: bool
) -> Any:
    states = hx if isinstance(hx, list | tuple) else [hx]
    return (
        x.new_empty(*x.shape[:-1], states[0].shape[-1] * (2 if both else 1)),
        *(s.new_empty(s.shape) for s in states),
    )


OPERATORS: dict[str, Any] = _register()
_BUILT_IN = {name: getattr(torch.ops.aten, name).input for name in _CELLS}


@contextlib.contextmanager
def as_operators() -> Iterator[None]:
    """Let modules call our operators in place of PyTorch's cells for the time being."""
    before = {name: getattr(torch._VF, name) for name in _CELLS}

    def cell(name: str) -> Callable[..., Any]:
        def call(x: Any, states: Any, params: Any, *rest: Any) -> Any:
            if isinstance(params, bool) or not isinstance(rest[0], bool):  # packed sequences have their sizes in front
                return before[name](x, states, params, *rest)
            return OPERATORS[name](x, list(states) if name == "lstm" else states, list(params), *rest)

        return call

    for name in _CELLS:
        setattr(torch._VF, name, cell(name))
    try:
        yield
    finally:
        for name in _CELLS:
            delattr(torch._VF, name)


def to_built_in(graph: fx.Graph) -> None:
    """Put PyTorch's cells in place of our operators, which cannot run."""
    _swap(graph, {OPERATORS[name]: target for name, target in _BUILT_IN.items()})


def to_operators(graph: fx.Graph) -> None:
    """Put our operators in place of PyTorch's cells, for whoever must not see through them."""
    _swap(graph, {target: OPERATORS[name] for name, target in _BUILT_IN.items()})


def _swap(graph: fx.Graph, targets: dict[Any, Any]) -> None:
    for node in graph.nodes:
        node.target = targets.get(node.target, node.target)


# In ONNX

_GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}
"""PyTorch's gates in the order in which ONNX wants them."""


def translations() -> dict[Any, Callable[..., Any]]:
    """Return for each of our operators the function that writes it with ONNX's."""

    def translation(name: str) -> Callable[..., Any]:
        return lambda x, hx, params, biases, layers, dropout, train, both, first: _in_onnx(
            name, x, hx if name == "lstm" else [hx], params, biases=biases, layers=layers, both=both, first=first
        )

    return {OPERATORS[name]: translation(name) for name in _CELLS}


def _in_onnx(
    name: str,
    x: Any,
    states: Sequence[Any],
    params: Sequence[Any],
    *,
    biases: bool,
    layers: int,
    both: bool,
    first: bool,
) -> Any:
    from onnxscript import opset21

    op: Any = opset21
    kind, directions, each = _CELLS[name], 2 if both else 1, 4 if biases else 2
    size = int(params[1].shape[1])
    settings: dict[str, Any] = {"hidden_size": size, "direction": "bidirectional" if both else "forward"}
    if kind == "GRU":
        settings["linear_before_reset"] = 1
    if name == "rnn_relu":
        settings["activations"] = ["Relu"] * directions

    def ordered(part: Any) -> Any:
        rows = [op.Slice(part, [k * size], [(k + 1) * size], [0]) for k in _GATES[kind]]
        return rows[0] if len(rows) == 1 else op.Concat(*rows, axis=0)

    def stacked(parts: list[Any]) -> Any:
        rows = [op.Unsqueeze(part, [0]) for part in parts]
        return rows[0] if len(rows) == 1 else op.Concat(*rows, axis=0)

    x = op.Transpose(x, perm=[1, 0, 2]) if first else x
    last: list[list[Any]] = [[] for _ in states]
    for layer in range(layers):
        own = [params[i * each : (i + 1) * each] for i in range(layer * directions, (layer + 1) * directions)]
        shift = stacked([op.Concat(ordered(p[2]), ordered(p[3]), axis=0) for p in own]) if biases else None
        begin = [op.Slice(s, [layer * directions], [(layer + 1) * directions], [0]) for s in states]
        inputs = [x, stacked([ordered(p[0]) for p in own]), stacked([ordered(p[1]) for p in own]), shift, None, *begin]
        results = getattr(op, kind)(*inputs, **settings)
        x = op.Reshape(op.Transpose(results[0], perm=[0, 2, 1, 3]), [0, 0, -1])
        for kept, result in zip(last, results[1:], strict=True):
            kept.append(result)
    x = op.Transpose(x, perm=[1, 0, 2]) if first else x
    return x, *(parts[0] if layers == 1 else op.Concat(*parts, axis=0) for parts in last)
