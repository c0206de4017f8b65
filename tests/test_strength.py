"""Strengths that follow the loss: where the optimum is known, under noise, and on real data."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybit.data import Batches, load_dataset
from anybit.errors import SpecError
from anybit.evaluate.sweep import sweep
from anybit.models import build_model
from anybit.objectives.any_width import AnyWidth
from anybit.objectives.gradient import GradientPenalty
from anybit.objectives.kurtosis import KurtosisPenalty
from anybit.objectives.orthogonal import OrthogonalPenalty
from anybit.objectives.strength import LOOK, Auto, Shares
from anybit.simulate.prepare import prepare


def descend(auto: Auto, *, noise: float = 0.0, steps: int = 20_000) -> tuple[float, float]:
    """Minimize F + sQ with F = 1 + θ²/2 and Q = (θ - 1)²/2; return θ and s, averaged over the last quarter."""
    generator = torch.Generator().manual_seed(0)
    errors = (noise * torch.randn(steps, generator=generator, dtype=torch.float64)).tolist()
    theta, seen = 0.0, []
    for error in errors:
        auto.update(loss=(1 + theta**2 / 2) * (1 + error), value=(theta - 1) ** 2 / 2)
        theta -= 0.1 * (theta + auto.value * (theta - 1))
        seen.append((theta, auto.value))
    late = seen[3 * steps // 4 :]
    return sum(t for t, _ in late) / len(late), sum(s for _, s in late) / len(late)


@pytest.mark.parametrize("allowed", [0.001, 0.01, 0.1])
@pytest.mark.parametrize("start", [1e-4, 0.05, 5.0])
def test_the_strength_finds_the_constrained_optimum(allowed: float, start: float) -> None:
    """θ_s = s / (1 + s), and F = 1 + ε at θ = √(2ε): so s = √(2ε) / (1 - √(2ε))."""
    theta, strength = descend(Auto(start=start, most=10.0, loss=allowed))
    at = math.sqrt(2 * allowed)
    assert theta == pytest.approx(at, rel=0.02)
    assert strength == pytest.approx(at / (1 - at), rel=0.03)


def test_noise_is_not_held_against_the_objective_and_hides_little() -> None:
    """Batches that scatter by 10 % leave the average uncertain by 0.7 %: F ends within ε and a few of these."""
    theta, strength = descend(Auto(start=0.01, most=10.0, loss=0.01), noise=0.1)
    assert strength > 0.05
    assert theta**2 / 2 < 0.01 + 4 * 0.1 / math.sqrt(200)


def test_the_strength_stays_between_what_is_safe_and_the_most() -> None:
    """An objective that costs nothing grows to the most; one that ruins the loss falls to what cannot hurt."""
    auto = Auto(start=0.1, most=2.0, loss=0.02)
    for _ in range(1000):
        auto.update(loss=1.0, value=4.0)
    assert auto.value == 2.0
    for _ in range(2000):
        auto.update(loss=3.0, value=4.0)
    assert auto.value == auto.least == pytest.approx(0.02 * 1.0 / 4.0)
    twin = Auto(start=0.1, most=2.0, loss=0.02)
    twin.load_state_dict(auto.state_dict())
    for a in (auto, twin):
        a.update(loss=0.9, value=4.0)
    assert auto.state_dict() == twin.state_dict()


def test_the_least_strength_keeps_the_bound_by_itself() -> None:
    """F(θ_s) - F* <= s Q(θ*), whatever the functions: here for many pairs of parabolas."""
    for curve in (0.01, 0.3, 1.0, 7.0, 100.0):
        for where in (0.1, 1.0, 30.0):  # F = 1 + θ²/2, Q = curve (θ - where)²/2
            strength = 0.01 / (curve * where**2 / 2)
            theta = strength * curve * where / (1 + strength * curve)
            assert theta**2 / 2 <= 0.01


def test_shares_start_where_nothing_can_be_lost() -> None:
    shares = Shares(2, loss=0.05)
    for _ in range(LOOK):
        assert shares.strengths == (0.0, 0.0)
        shares.update(2.0, [10.0, 0.0])
    assert shares.strengths == (pytest.approx(0.05 * 2.0 / 2 / 10.0), 0.0)
    twin = Shares(2, loss=0.05)
    twin.load_state_dict(shares.state_dict())
    for _ in range(300):
        for s in (shares, twin):
            s.update(1.9, [10.0, 0.0])
    assert shares.strengths == twin.strengths
    assert shares.strengths[0] > 0.05 * 2.0 / 2 / 10.0


def small() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))
    x = torch.randn(64, 6)
    return model, x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


@pytest.mark.parametrize(
    "make",
    [
        lambda model: GradientPenalty(model),
        lambda model: GradientPenalty(model, weight="auto"),
        lambda model: KurtosisPenalty(model),
        lambda model: OrthogonalPenalty(model) + KurtosisPenalty(model),
    ],
    ids=["gradient", "weights only", "kurtosis", "two at once"],
)
def test_penalties_without_a_strength_find_their_own(make) -> None:  # type: ignore[no-untyped-def]
    model, x, y = small()
    penalty = make(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    plain = copy.deepcopy(model)
    for step in range(LOOK + 2):
        if step == LOOK:
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)  # until now it only looked
        penalty.backward(lambda: F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        with torch.no_grad():
            for q in plain.parameters():
                q -= 0.05 * q.grad
        plain.zero_grad()
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_the_paper_s_penalty_has_the_same_share_in_both_parts() -> None:
    model, x, y = small()
    penalty = GradientPenalty(model)
    assert penalty.weight == penalty.activation == 0.0
    steps = [penalty.backward(lambda: F.cross_entropy(model.eval()(x), y)) for _ in range(LOOK)]
    last = steps[-1]
    assert penalty.weight * last.weight_norm == pytest.approx(0.005 * last.loss, rel=1e-4)
    assert penalty.activation * (last.activation_norm or 0) == pytest.approx(0.005 * last.loss, rel=1e-4)
    again = GradientPenalty(model)
    again.load_state_dict(penalty.state_dict())
    assert (again.weight, again.activation) == (penalty.weight, penalty.activation)


def test_bad_strengths_get_a_sentence() -> None:
    model = small()[0]
    with pytest.raises(SpecError, match="strength is a strength of zero or more, or 'auto'; got 'much'"):
        KurtosisPenalty(model, strength="much")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="a part of the loss above zero"):
        GradientPenalty(model, loss=-1.0)


@pytest.mark.slow
def test_on_digits_floating_point_keeps_its_loss_and_few_bits_gain() -> None:
    data = load_dataset("digits")
    torch.manual_seed(0)
    start = build_model(name="small-conv", channels=1, classes=10, multiplier=1.0)
    scores = {}
    trained(start, data, epochs=10, lr=0.1, objective=None)
    for name in ("plain", "any-width"):
        model = copy.deepcopy(start)
        objective = AnyWidth(model, data.train.x[:2]) if name == "any-width" else None
        trained(model, data, epochs=8, lr=0.02, objective=objective)
        net = prepare(model.eval(), data.train.x[:2], preset="paper")
        rows = sweep(net, Batches(data.validation, 500), widths=[(32, 32), (3, 3)])
        scores[name] = [row.accuracy for row in rows]
    assert scores["any-width"][0] >= scores["plain"][0] - 0.01
    assert scores["any-width"][1] >= scores["plain"][1] + 0.02


def trained(model: nn.Module, data, *, epochs: int, lr: float, objective: AnyWidth | None) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    batches = Batches(data.train, 64, generator=torch.Generator().manual_seed(0))
    model.train()
    for _ in range(epochs):
        for x, y in batches:

            def closure(x: Tensor = x, y: Tensor = y) -> tuple[Tensor, Tensor]:
                out = model(x)
                return F.cross_entropy(out, y), out

            if objective is None:
                closure()[0].backward()
            else:
                objective.backward(closure)
            optimizer.step()
            optimizer.zero_grad()
