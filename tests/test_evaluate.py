from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from cases import images, warmed_up
from torch import Tensor, nn

import anybit
from anybit.errors import DataError, SpecError
from anybit.evaluate.accuracy import Score, evaluate, kl_divergence, predict, score
from anybit.models import build_model
from anybit.spec import Bits

LOG = math.log


def test_score_by_hand() -> None:
    # softmax of (ln 3, 0) is (3/4, 1/4); of (0, ln 9) it is (1/10, 9/10)
    logits = torch.tensor([[LOG(3), 0.0], [LOG(3), 0.0], [0.0, LOG(9)]])
    got = score(logits, torch.tensor([0, 1, 1]))
    assert got.accuracy == pytest.approx(2 / 3, rel=1e-12)
    assert got.loss == pytest.approx(-(LOG(3 / 4) + LOG(1 / 4) + LOG(9 / 10)) / 3, rel=1e-6)
    assert got.n == 3


@pytest.mark.parametrize("labels", [[0, 2], [-1, 0], []])
def test_labels_that_no_class_has(labels: list[int]) -> None:
    with pytest.raises(DataError, match=r"labels go from 0 to 1|nothing to evaluate on"):
        score(torch.zeros(len(labels), 2), torch.tensor(labels, dtype=torch.int64))


def test_kl_by_hand() -> None:
    p = torch.tensor([[0.0, 0.0], [LOG(3), 0.0]])  # (1/2, 1/2), (3/4, 1/4)
    q = torch.tensor([[LOG(3), 0.0], [7.0, 7.0]])  # (3/4, 1/4), (1/2, 1/2)
    first = 0.5 * LOG(0.5 / 0.75) + 0.5 * LOG(0.5 / 0.25)
    second = 0.75 * LOG(0.75 / 0.5) + 0.25 * LOG(0.25 / 0.5)
    assert kl_divergence(p, q) == pytest.approx((first + second) / 2, rel=1e-6)
    assert kl_divergence(q, p) == pytest.approx((second + first) / 2, rel=1e-6)
    assert kl_divergence(p[:1], q[:1]) == pytest.approx(first, rel=1e-6)
    assert kl_divergence(q[:1], p[:1]) != pytest.approx(first, rel=1e-2)  # it is no distance
    assert kl_divergence(p, p) == 0.0
    assert kl_divergence(p, p + 5) == pytest.approx(0.0, abs=1e-12)  # adding to all logits changes nothing


class Halves(nn.Module):
    """Class 1 for inputs above one half, with a dropout that would be noticed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Dropout(0.9), nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.cat([torch.full_like(x, 0.5), x], 1))


X, Y = torch.tensor([[0.1], [0.9], [0.2], [0.8], [0.7]]), torch.tensor([0, 1, 1, 1, 0])
LOADER = [(X[:2], Y[:2]), (X[2:], Y[2:])]


def test_evaluate_by_hand_weighs_examples_not_batches() -> None:
    got = evaluate(Halves(), LOADER)
    losses = [
        -LOG(math.exp(0.5 if y == 0 else x) / (math.exp(0.5) + math.exp(x)))
        for x, y in zip(X.flatten().tolist(), Y.tolist(), strict=True)
    ]
    assert got == Score(3 / 5, pytest.approx(sum(losses) / 5, rel=1e-6), 5)  # type: ignore[arg-type]


def test_predict_keeps_the_order_makes_no_graph_and_restores_every_mode() -> None:
    network = Halves().train()
    network.inner[1].eval()
    logits, labels = predict(network, LOADER)
    assert torch.equal(logits[:, 1:], X)
    assert torch.equal(labels, Y)
    assert not logits.requires_grad
    assert [m.training for m in (network, network.inner, *network.inner)] == [True, True, True, False]


def test_predict_restores_the_mode_when_the_network_raises() -> None:
    network = Halves().train()
    with pytest.raises(TypeError):
        predict(network, [("no tensor", Y)])  # type: ignore[list-item]
    assert all(module.training for module in network.modules())


def test_an_empty_loader_is_an_error() -> None:
    with pytest.raises(DataError, match="nothing to evaluate on"):
        evaluate(Halves(), [])


def network() -> nn.Module:
    torch.manual_seed(0)
    return warmed_up(build_model("small-conv", channels=1, classes=10, multiplier=0.5), images(1, 8, 8)).eval()


def loader() -> list[tuple[Tensor, Tensor]]:
    noise = torch.Generator().manual_seed(0)
    x, y = torch.rand(90, 1, 8, 8, generator=noise), torch.randint(0, 10, (90,), generator=noise)
    return list(zip(x.split(40), y.split(40), strict=True))


WIDTHS = [(32, 32), (8, 8), Bits(4, 8), (2, 2)]


def test_rows_say_what_was_measured() -> None:
    model, data = network(), loader()
    net = anybit.prepare(model, data[0][0], input_range=(0.0, 1.0), preset="paper")
    net.set_bits(weights=5, activations=6)
    seen: list[anybit.Row] = []
    rows = anybit.sweep(net, data, widths=WIDTHS, label="mine", seed=4, on_row=seen.append)
    assert rows == seen
    assert [(row.label, row.seed, row.n) for row in rows] == [("mine", 4, 90)] * 4
    assert [row.bits for row in rows] == [Bits(32, 32), Bits(8, 8), Bits(4, 8), Bits(2, 2)]
    assert net.bits == Bits(5, 6)

    want = evaluate(model, data)
    assert rows[0].accuracy == want.accuracy
    assert rows[0].loss == pytest.approx(want.loss, rel=1e-5)
    assert rows[0].kl == 0.0
    reference, labels = predict(model, data)
    for row in rows[1:]:
        with net.at(weights=row.weights, activations=row.activations):
            logits, _ = predict(net, data)
        got = score(logits, labels)
        assert (row.accuracy, row.loss) == (got.accuracy, got.loss)
        assert row.kl == pytest.approx(kl_divergence(reference, logits), rel=1e-4)
    kls = [row.kl for row in rows if row.kl is not None]
    assert kls[0] < kls[1] < kls[2] < kls[3]


def test_examples_are_gone_through_once_per_width_and_once_in_floating_point() -> None:
    class Counting(list[tuple[Tensor, Tensor]]):
        passes = 0

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            self.passes += 1
            return super().__iter__()

    data = Counting(loader())
    net = anybit.prepare(network(), data[0][0], input_range=(0.0, 1.0), preset="paper")
    anybit.sweep(net, data, widths=[(4, 4)])
    assert data.passes == 2
    anybit.sweep(net, data, widths=WIDTHS)
    assert data.passes == 2 + len(WIDTHS)  # floating point is one of them


def test_the_widths_are_restored_also_when_something_raises() -> None:
    data = loader()
    net = anybit.prepare(network(), data[0][0], input_range=(0.0, 1.0), preset="paper")
    net.set_bits(weights=5, activations=6)

    def stop(row: anybit.Row) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        anybit.sweep(net, data, widths=WIDTHS, on_row=stop)
    assert net.bits == Bits(5, 6)
    with pytest.raises(SpecError, match="argument 1 must have the shape"):
        anybit.sweep(net, [(torch.zeros(2, 3, 8, 8), torch.zeros(2).long())], widths=WIDTHS)
    assert net.bits == Bits(5, 6)


def test_sweeps_that_make_no_sense() -> None:
    data = loader()
    net = anybit.prepare(network(), data[0][0], input_range=(0.0, 1.0), preset="paper")
    with pytest.raises(SpecError, match="at least one pair of widths"):
        anybit.sweep(net, data, widths=[])
    with pytest.raises(DataError, match="nothing to evaluate on"):
        anybit.sweep(net, [], widths=WIDTHS)
    with pytest.raises(SpecError, match="weights must be 2 to 16"):
        anybit.sweep(net, data, widths=[(8, 8), (1, 8)])


class Shuffled:
    """A loader with a new order each time, as for training."""

    def __iter__(self):
        x, y = (torch.cat(parts) for parts in zip(*loader(), strict=True))
        order = torch.randperm(len(y))
        return iter([(x[order], y[order])])


def test_a_loader_that_shuffles_is_refused_instead_of_scored_against_other_labels() -> None:
    net = anybit.prepare(network(), loader()[0][0], input_range=(0.0, 1.0), preset="paper")
    with pytest.raises(DataError, match="without shuffling"):
        anybit.sweep(net, Shuffled(), widths=WIDTHS)
