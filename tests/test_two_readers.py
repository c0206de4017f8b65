"""`prepare` reads a network from PyTorch, `adopt` the plain ONNX file of it: both must come to the same plan.

The passes behind them are the same, so what this compares is how the two readers see a network: the same points in the
same order, the same ranges, the same codes.
"""

from __future__ import annotations

import atexit
import copy
import functools
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from architectures import ARCHITECTURES
from cases import CASES, Case, cross_entropy, images
from numpy.typing import NDArray
from torch import fx, nn

import anybit
from anybit.artifact.adopt import adopt
from anybit.artifact.coverage import products
from anybit.artifact.master import Master, open_master
from anybit.errors import DataError
from anybit.graph.view import Graph, Node
from anybit.plan.numbers import Numbers
from anybit.plan.points import Plan
from anybit.simulate.capture import capture
from anybit.simulate.network import QuantizedNetwork
from anybit.spec import FLOAT, Bits

Array = NDArray[Any]


def _norms() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3), nn.InstanceNorm2d(8, affine=True),
        nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.PReLU(8), nn.Conv2d(8, 4, 3),
    )  # fmt: skip


NORMS = Case("norms", _norms, images(3, 12, 12), cross_entropy)
FOLDER = Path(tempfile.mkdtemp(prefix="anybit-readers-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
CAPTURED: dict[nn.Module, fx.GraphModule] = {}
ALL = {case.name: case for case in [*CASES, *ARCHITECTURES, NORMS]}


@functools.cache
def exported(name: str) -> tuple[Any, Path]:
    """Return a network of the table, and the plain ONNX file that PyTorch's exporter makes of it, both made once."""
    torch.manual_seed(0)
    case, path = ALL[name], FOLDER / f"{name}.onnx"
    model, inputs = case.build().eval(), case.inputs(4)
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        torch.onnx.export(
            model, args, path, kwargs=kwargs, dynamo=True, optimize=False, verbose=False, external_data=False
        )
    return model, path


@pytest.fixture(autouse=True)
def _networks_are_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `prepare` begin with a copy of what it captured of the same network before."""

    def copied(model: nn.Module, example: Any) -> fx.GraphModule:
        if model not in CAPTURED:
            CAPTURED[model] = capture(model, example)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's own
            return copy.deepcopy(CAPTURED[model])

    monkeypatch.setattr("anybit.simulate.prepare.capture", copied)


def feed(inputs: Any, names: tuple[str, ...]) -> dict[str, Any]:
    named = inputs if isinstance(inputs, dict) else dict(zip(names, inputs, strict=True))
    return {key: value.numpy() for key, value in named.items()}


def both(case: Case, out: Path, settings: dict[str, Any]) -> tuple[QuantizedNetwork, Master]:
    """Return a prepared network, and the master adopted from its plain file with the same calibration."""
    model, path = exported(case.name)
    torch.manual_seed(1)  # the same inputs whichever test comes first
    batches = None if case.data_free else [case.inputs(4) for _ in range(2)]
    names = tuple(value.name for value in onnx.load(path).graph.input)
    data = batches and [(batch, None) for batch in batches]
    net = anybit.prepare(model, case.inputs(4), calibration=data, **settings)
    feeds = batches and [feed(batch, names) for batch in batches]
    adopt(path, out, calibration=feeds, **settings)
    return net, open_master(out)


def compare_points(one: Plan, other: Plan) -> None:
    assert [(p.kind, p.floor, p.symmetric) for p in one.points] == [
        (p.kind, p.floor, p.symmetric) for p in other.points
    ]
    for a, b in zip(one.activations, other.activations, strict=True):
        assert [bits for bits, _ in a.ranges] == [bits for bits, _ in b.ranges], (a.name, b.name)
        for (bits, x), (_, y) in zip(a.ranges, b.ranges, strict=True):
            # A clipped range is the best of some candidates; where two are equally good, the last digit decides.
            close = 1e-5 if bits == FLOAT else 0.03
            size = max(abs(x.low), abs(x.high))
            assert (x.low, x.high) == (
                pytest.approx(y.low, close, close * size),
                pytest.approx(y.high, close, close * size),
            )


GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2)}
"""The gates of recurrent cells in the order of ONNX, each as its place in the order of PyTorch."""


def ways(values: Array, scale: Array) -> Iterator[tuple[Array, Array]]:
    """Yield codes and scales in each order in which a file may have those of a weight in PyTorch."""
    yield values, scale
    if values.ndim == 2:
        yield values.T, scale  # a linear layer as a product from the right
        for order in GATES.values():
            if len(values) % len(order) == 0:
                yield gates(values, order)[None], gates(scale, order) if scale.size > 1 else scale


def gates(values: Array, order: tuple[int, ...]) -> Array:
    parts = np.split(values, len(order))
    return np.concatenate([parts[gate] for gate in order])


def compare_codes(ours: Numbers, theirs: Numbers) -> None:
    """Every code is the same, in its place."""
    for one, other in zip(ours.plan.weights, theirs.plan.weights, strict=True):
        a, b = ours.codes(one.name), theirs.codes(other.name)
        found = [scale for values, scale in ways(a.values, a.scale) if np.array_equal(values, b.values)]
        assert found, (one.name, other.name)
        assert any(scale.ravel() == pytest.approx(b.scale.ravel(), rel=1e-5) for scale in found), (one.name, other.name)


def compare_biases(ours: Numbers, theirs: Numbers) -> None:
    """The same weights have a bias; the exporter gives convolutions without one a bias of zeros."""
    found = [[b.weight for b in n.plan.biases if np.any(n.tensors[b.name])] for n in (ours, theirs)]
    places = [[w.name for w in n.plan.weights] for n in (ours, theirs)]
    assert [places[0].index(name) for name in found[0]] == [places[1].index(name) for name in found[1]]


def nothing_made_up(*args: Any, **settings: Any) -> Any:
    """What `adopt` alone does: it makes inputs up where nobody hands it any."""
    raise DataError("without data, as `prepare` is")


SETTINGS: list[dict[str, Any]] = [
    {"preset": "paper"},
    {"preset": "paper", "per_channel": True},
    {"sensitive": "8-bit"},  # the rest by default; adopt also measures unless told not to
]


@pytest.mark.parametrize("name", ALL)
def test_both_readers_come_to_the_same_plan(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anybit.artifact.adopt.made_up_inputs", nothing_made_up)
    for settings in SETTINGS:
        net, master = both(ALL[name], tmp_path / "adopted.onnx", settings)
        compare_points(net.plan, master.plan)
        for width in (8, 4, 3):
            net.set_bits(weights=width, activations=8)
            ours, theirs = net.numbers(), master.plan.at(Bits(width, 8), tensors=master.tensors)
            compare_biases(ours, theirs)
            compare_codes(ours, theirs)


@pytest.mark.parametrize("name", ALL)
def test_both_count_the_same_multiplications(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which points get more bits hangs on the size of every product, folded layers among them."""
    case = ALL[name]
    model, path = exported(name)
    found: list[list[int]] = []

    def noted(graph: Graph, plans: list[Plan], joined: object, counts: dict[Node, int], run: object) -> Plan:
        found.append([counts.get(node, -1) for node in products(graph)])
        return plans[0]

    monkeypatch.setattr("anybit.simulate.few_runs.widened", noted)
    monkeypatch.setattr("anybit.plan.widen.widened", noted)
    torch.manual_seed(1)
    inputs = case.inputs(4)
    names = tuple(value.name for value in onnx.load(path).graph.input)
    anybit.prepare(model, inputs, calibration=[(inputs, None)])
    adopt(path, tmp_path / "adopted.onnx", calibration=[feed(inputs, names)])
    ours, theirs = found
    assert [4 * count for count in ours] == theirs
    assert min(theirs) > 0
