"""`prepare` reads a network from PyTorch, `adopt` the plain ONNX file of it: both must come to the same plan.

The passes behind them are the same, so what this compares is how the two readers see a network: the same points in the
same order, the same ranges, the same codes.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from architectures import ARCHITECTURES
from cases import CASES, Case

import anybit
from anybit.artifact.adopt import adopt
from anybit.artifact.master import open_master
from anybit.plan.points import Plan
from anybit.simulate.network import QuantizedNetwork
from anybit.spec import Bits

ALL = {case.name: case for case in [*CASES, *ARCHITECTURES]}


def exported(case: Case, folder: Path) -> tuple[Any, Path]:
    """Return a network of the table, and the plain ONNX file that PyTorch's exporter makes of it."""
    torch.manual_seed(0)
    model, path = case.build().eval(), folder / "plain.onnx"
    inputs = case.inputs(4)
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        torch.onnx.export(
            model, args, path, kwargs=kwargs, dynamo=True, optimize=False, verbose=False, external_data=False
        )
    return model, path


def feed(inputs: Any, names: tuple[str, ...]) -> dict[str, Any]:
    named = inputs if isinstance(inputs, dict) else dict(zip(names, inputs, strict=True))
    return {key: value.numpy() for key, value in named.items()}


def both(case: Case, folder: Path, *, per_channel: bool) -> tuple[QuantizedNetwork, Path]:
    """Return a prepared network, and the master adopted from its plain file with the same calibration."""
    model, path = exported(case, folder)
    batches = None if case.data_free else [case.inputs(4) for _ in range(2)]
    names = tuple(value.name for value in onnx.load(path).graph.input)
    net = anybit.prepare(
        model,
        case.inputs(4),
        per_channel=per_channel,
        calibration=batches and [(batch, None) for batch in batches],
        preset="paper",
    )
    feeds = batches and [feed(batch, names) for batch in batches]
    adopt(path, folder / "adopted.onnx", calibration=feeds, per_channel=per_channel, symmetric=True)
    return net, folder / "adopted.onnx"


def compare_points(one: Plan, other: Plan) -> None:
    assert [(p.kind, p.floor, p.symmetric) for p in one.points] == [
        (p.kind, p.floor, p.symmetric) for p in other.points
    ]
    for a, b in zip(one.activations, other.activations, strict=True):
        if not a.ranges and all(r.source == "made-up inputs" for _, r in b.ranges):
            continue  # what `prepare` leaves in floating point without data, `adopt` makes inputs up for
        assert [bits for bits, _ in a.ranges] == [bits for bits, _ in b.ranges], (a.name, b.name)
        for (_, x), (_, y) in zip(a.ranges, b.ranges, strict=True):
            size = max(abs(x.low), abs(x.high))
            assert (x.low, x.high) == (
                pytest.approx(y.low, 1e-5, 1e-5 * size),
                pytest.approx(y.high, 1e-5, 1e-5 * size),
            )


@pytest.mark.parametrize("per_channel", [False, True], ids=["tensor", "channel"])
@pytest.mark.parametrize("name", ALL)
def test_both_readers_come_to_the_same_plan(name: str, per_channel: bool, tmp_path: Path) -> None:
    net, path = both(ALL[name], tmp_path, per_channel=per_channel)
    master = open_master(path)
    compare_points(net.plan, master.plan)
    net.set_bits(weights=4, activations=8)
    ours, theirs = net.numbers(), master.plan.at(Bits(4, 8), tensors=master.tensors)
    # The exporter gives convolutions without a bias one of zeros.
    found = [[b.weight for b in n.plan.biases if np.any(n.tensors[b.name])] for n in (ours, theirs)]
    places = [[w.name for w in n.plan.weights] for n in (ours, theirs)]
    assert [places[0].index(name) for name in found[0]] == [places[1].index(name) for name in found[1]]
    for one, other in zip(net.plan.weights, master.plan.weights, strict=True):
        a, b = ours.codes(one.name), theirs.codes(other.name)
        assert a.values.size == b.values.size
        # A file may keep a weight turned around, and a recurrent cell's gates in another order.
        moved = np.sort(a.values, axis=None) != np.sort(b.values, axis=None)
        assert moved.mean() <= 1e-3, (one.name, other.name)  # a code on the border, where folding rounds otherwise
        assert np.sort(a.scale, axis=None) == pytest.approx(np.sort(b.scale, axis=None), rel=1e-5)
