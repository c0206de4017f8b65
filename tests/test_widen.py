"""More bits for what costs the outputs most: which points get them, and that they stay below a tenth of the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from stranger_builder import Net
from stranger_graphs import CASES
from torch import Tensor, nn

import anybit
from anybit.artifact import widen as widen_master
from anybit.artifact.coverage import Coverage, summary
from anybit.artifact.master import Master, open_master
from anybit.artifact.output_error import outputs_at
from anybit.errors import DataError
from anybit.plan import widen
from anybit.plan.points import Plan, Weight, Widths
from anybit.plan.widen import MEASURED, SHARE, SUM, Unit, costs_most, relative_errors, worth_it
from anybit.spec import Bits


def bottleneck(folder: Path) -> tuple[Path, list[dict[str, np.ndarray]]]:
    """Write a network whose last product, 6 of 8000 multiplications, sees values of very different size."""
    net = Net(3)
    feeds = [{"x": np.random.default_rng(i).normal(size=(4, 16)).astype(np.float32)} for i in range(4)]
    x = net.input("x", feeds[0]["x"])
    for ins in (16, 64, 64):
        x = net.node("Relu", net.node("MatMul", x, net.hold(net.draw(64, ins).T.copy())))
    few = net.node("Exp", net.node("MatMul", x, net.hold(net.draw(2, 64).T.copy() * 4)))
    y = net.node("MatMul", few, net.hold(np.array([[1.0, 0.5, 0.1], [0.2, 1.0, 0.3]], np.float32)))
    net.output(net.node("Log", net.node("Abs", y)))
    path = folder / "plain.onnx"
    onnx.save(net.model(), path)
    return path, feeds


def measured(plan: Plan) -> list[str]:
    return [point.name for point in plan.points if point.because == MEASURED]


def error(path: Path, feeds: list[dict[str, np.ndarray]], **bits: int) -> float:
    session = anybit.load(path)
    exact = [session.run(feed) for feed in feeds]
    session.set_bits(**bits)
    return float(np.mean([np.square(session.run(feed) - want).mean() for feed, want in zip(feeds, exact, strict=True)]))


def test_what_costs_most_gets_more_bits_and_the_error_falls(tmp_path: Path) -> None:
    plain, feeds = bottleneck(tmp_path)
    wide, same = tmp_path / "wide.onnx", tmp_path / "same.onnx"
    plan = anybit.adopt(plain, wide, calibration=feeds)
    usual = anybit.adopt(plain, same, calibration=feeds, sensitive="8-bit")
    assert any(name.startswith("exp") for name in measured(plan))
    assert measured(usual) == []
    assert 0 < Coverage(**open_master(wide).header.about["quantized"]).measured <= SHARE
    for bits in ({"weights": 8, "activations": 8}, {"weights": 4, "activations": 8}):
        assert error(wide, feeds, **bits) < error(same, feeds, **bits)


def test_a_network_too_large_for_a_few_runs_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, feeds = bottleneck(tmp_path)
    monkeypatch.setattr("anybit.plan.widen.MOST_WORK", 50_000)
    monkeypatch.setattr("anybit.artifact.widen.outputs_at", None)  # nothing is run
    with pytest.warns(UserWarning, match="too many to measure"):
        plan = anybit.adopt(plain, tmp_path / "large.onnx", calibration=feeds)
    assert measured(plan) == []


def test_the_same_points_every_time_and_none_for_the_paper(tmp_path: Path) -> None:
    plain, feeds = bottleneck(tmp_path)
    for inputs in (feeds, None):  # made-up inputs tell it too
        plans = [anybit.adopt(plain, tmp_path / f"{i}.onnx", calibration=inputs) for i in range(2)]
        assert plans[0] == plans[1]
        assert measured(plans[0])
    assert measured(anybit.adopt(plain, tmp_path / "paper.onnx", preset="paper", calibration=feeds)) == []


@pytest.mark.parametrize("norm", [nn.Identity, nn.BatchNorm1d], ids=["alone", "in front of batch norm"])
def test_prepare_measures_where_it_has_inputs(norm: type[nn.Module]) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 64), norm(64), nn.ReLU(), nn.Linear(64, 64), norm(64), nn.ReLU(), nn.Linear(64, 4), norm(4)]
    model = nn.Sequential(*layers, nn.Tanh(), nn.Linear(4, 3)).eval()
    with torch.no_grad():
        layers[6].weight *= 120  # what feeds it must be known well
    batches = [torch.randn(8, 16) for _ in range(2)]
    usual = anybit.prepare(model, batches[0], calibration=batches, helpers="sums", sensitive="8-bit")
    net = anybit.prepare(model, batches[0], calibration=batches, helpers="sums")
    assert measured(usual.plan) == []
    assert measured(net.plan)
    assert net.bits == Bits()
    with torch.no_grad():
        assert torch.equal(net(batches[0]), usual(batches[0]))
    found = {}
    for name, network in {"usual": usual, "measured": net}.items():
        network.set_bits(weights=8, activations=8)
        with torch.no_grad():
            found[name] = float((network(batches[0]) - model(batches[0])).square().mean())
    assert found["measured"] < found["usual"]


class Odd(nn.Module):
    """Takes two inputs, one of them a lone number, and returns numbers and a class."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor, size: Tensor) -> dict[str, Tensor]:
        y = self.b(torch.relu(self.a(x))) * 3 + size
        return {"y": torch.tanh(y), "best": y.argmax(1)}


def test_what_is_measured_fits_any_way_to_call_a_network() -> None:
    torch.manual_seed(0)
    batches = [{"size": torch.tensor(2.0), "x": torch.randn(3, 16)} for _ in range(3)]
    net = anybit.prepare(Odd().eval(), batches[0], calibration=batches)
    assert net(**batches[1])["y"].shape == (3, 4)
    assert all(point.floor >= 8 for point in net.plan.weights)  # the first and the last layer


@pytest.mark.parametrize("seed", range(30))
def test_never_more_than_a_tenth(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 40))
    harm, numbers = rng.exponential(size=count), rng.integers(1, 50, count)
    units = [Unit((str(i),), frozenset({str(i), str(i // 2)})) for i in range(count)]
    sizes = {str(i): int(size) for i, size in enumerate(numbers)} | {"rest": 100}
    before = {"0"} if seed % 2 and sizes["0"] <= SHARE * sum(sizes.values()) else set()
    blamed = costs_most(units, lambda names: sum(harm[int(name)] for name in names))
    found = worth_it(blamed, sizes, before)
    wider = before.union(*(unit.products for unit in found))
    assert sum(sizes[output] for output in wider) <= SHARE * sum(sizes.values()) + 1e-9


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def test_a_single_tie_does_not_hide_an_error_of_all_probabilities() -> None:
    """One flipped decision, or a little error everywhere: by their squares the first would count far more."""
    rng = np.random.default_rng(0)
    scores = 6 * rng.normal(size=(200, 10))
    scores[0, :2] = scores[0].max() + np.array([0.1, 0.0])
    flipped = scores.copy()
    flipped[0, :2] += [-0.5, 0.5]
    noisy = scores + 0.05 * rng.normal(size=scores.shape)
    one, everywhere = (relative_errors([softmax(scores)], [softmax(x)])[0] for x in (flipped, noisy))
    assert 0 < one < everywhere < 1e-3
    plain = [float(np.square(softmax(x) - softmax(scores)).mean()) for x in (flipped, noisy)]
    assert plain[0] > plain[1]


def test_giants_do_not_hide_an_error_of_what_decides() -> None:
    """Scores of a heatmap: a thousand times as large at its edges as around zero, which is where a cell begins."""
    rng = np.random.default_rng(0)
    scores = np.append(rng.normal(-5, 3, 10_000), [6e4, -6e4])
    rounded = np.append(np.zeros(10_000), scores[-2:])
    (found,) = relative_errors([scores], [rounded])
    assert found > 0.5
    (plain,) = relative_errors([scores[:-2]], [scores[:-2] * 1.01])
    assert plain == pytest.approx(np.square(0.01 * scores[:-2]).mean() / scores[:-2].var())


def test_outputs_that_are_off_come_first_where_sums_are_not_enough() -> None:
    """Two outputs, each of a layer of its own, and room for one of them: the one that is far off gets it."""
    plan = Plan((Weight("a"), Weight("b")))
    exact = np.array([1.0, -1.0, 2.0, -2.0])

    def outputs(widths: Widths) -> list[np.ndarray]:
        return [exact * (1 + size * (widths[name] == 8)) for name, size in (("a", 0.04), ("b", 0.5))]

    look = widen._Widening(plan, outputs, {"a": 8, "b": 9, "rest": 90}, 8)
    look.exact = [exact, exact]
    units = [Unit((name,), frozenset({name})) for name in "ab"]
    look._step(units, 16, Bits(8, 8), dear=0, least=widen.COARSE)
    assert {point.name: point.floor for point in look.plan.points}["b"] == 16
    assert {point.name: point.floor for point in look.plan.points}["a"] < 16


@pytest.mark.parametrize("worst", [0, 5, 99])
def test_one_bad_point_of_a_hundred_is_found_in_a_few_tries(worst: int) -> None:
    units, tries = [Unit((str(i),), frozenset({str(i)})) for i in range(100)], []

    def harm(names: list[str]) -> float:
        tries.append(names)
        return sum(1.0 if name == str(worst) else 1e-5 for name in names)

    assert [unit.names for _, unit in costs_most(units, harm)] == [(str(worst),)]
    assert len(tries) < 20


def swishing(folder: Path, depth: int) -> tuple[Path, list[dict[str, np.ndarray]]]:
    """Write a network whose sums are far larger than what a hard-swish lets through: 8 bits are few for them."""
    net = Net(5)
    feeds = [{"x": np.random.default_rng(i).normal(size=(1, 8, 12, 12)).astype(np.float32)} for i in range(4)]
    x = net.input("x", feeds[0]["x"])
    for _ in range(depth):
        x = net.node("HardSwish", net.node("Conv", x, net.hold(6 * net.draw(8, 8, 1, 1))))
        x = net.node("Tanh", x)
    net.output(net.node("Conv", x, net.hold(net.draw(8, 8, 1, 1))))
    path = folder / "plain.onnx"
    onnx.save(net.model(), path)
    return path, feeds


def test_sums_get_more_bits_where_a_tenth_of_the_products_is_not_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, feeds = swishing(tmp_path, 12)
    plan = anybit.adopt(plain, tmp_path / "wide.onnx", calibration=feeds)
    usual = anybit.adopt(plain, tmp_path / "same.onnx", calibration=feeds, sensitive="8-bit")
    sums = [point.name for point in usual.activations if point.kind == "accumulator"]
    assert sums
    assert {plan.activation(name).floor for name in sums} == {16}
    assert {plan.activation(name).because for name in sums} == {SUM}  # they take no room away from operands
    assert measured(plan)
    found = Coverage(**open_master(tmp_path / "wide.onnx").header.about["quantized"])
    assert found.measured is not None
    assert found.measured <= SHARE
    assert any(SUM in line for line in summary(plan, found))
    bits = {"weights": 8, "activations": 8}
    assert error(tmp_path / "wide.onnx", feeds, **bits) < error(tmp_path / "same.onnx", feeds, **bits)
    monkeypatch.setattr(widen, "COARSE", np.inf)
    anybit.adopt(plain, tmp_path / "tenth.onnx", calibration=feeds)
    assert error(tmp_path / "wide.onnx", feeds, **bits) < error(tmp_path / "tenth.onnx", feeds, **bits)
    monkeypatch.undo()
    shallow, feeds = swishing(tmp_path, 1)
    assert SUM not in {p.because for p in anybit.adopt(shallow, tmp_path / "m.onnx", calibration=feeds).points}


def test_sums_that_do_not_run_with_more_bits_keep_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, feeds = swishing(tmp_path, 12)
    usual = anybit.adopt(plain, tmp_path / "same.onnx", calibration=feeds, sensitive="8-bit")
    sums = [point.name for point in usual.activations if point.kind == "accumulator"]
    run = widen_master.outputs_at

    def outputs_at(*args: Any) -> Any:
        if all(args[2][name] == 16 for name in sums):
            raise DataError("no kernel")
        return run(*args)

    monkeypatch.setattr(widen_master, "outputs_at", outputs_at)
    plan = anybit.adopt(plain, tmp_path / "wide.onnx", calibration=feeds)
    assert measured(plan)
    assert SUM not in {point.because for point in plan.points}


def test_what_a_loop_reads_is_compared_beside_what_it_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that differs in one letter may differ in all that follow: by itself it does not tell whom to blame."""
    case = CASES["loop_with_layers"]
    onnx.save(case.build(), tmp_path / "plain.onnx")
    seen: set[tuple[str, ...]] = set()

    def noted(master: Master, feeds: Any, widths: Any, kept: Any, names: list[str]) -> list[np.ndarray]:
        seen.add(tuple(names))
        return outputs_at(master, feeds, widths, kept, names)

    monkeypatch.setattr(widen_master, "outputs_at", noted)
    anybit.adopt(tmp_path / "plain.onnx", tmp_path / "m.onnx", calibration=[case.feed()])
    master = open_master(tmp_path / "m.onnx")
    (names,) = seen
    assert names[: len(master.outputs)] == tuple(master.outputs)
    makers = {output: node.op_type for node in master.graph.graph.node for output in node.output}
    assert [makers[name] for name in names[len(master.outputs) :]] == ["Tanh"], "the state that it starts from"
