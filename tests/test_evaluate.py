from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from cases import images, warmed_up
from torch import Tensor, nn

import anybit
from anybit.errors import DataError, SpecError
from anybit.evaluate.sweep import evaluate, kl_divergence
from anybit.models import build_model
from anybit.spec import Bits

LOG = math.log


def test_score_by_hand() -> None:
    # softmax of (ln 3, 0) is (3/4, 1/4); of (0, ln 9) it is (1/10, 9/10)
    logits = torch.tensor([[LOG(3), 0.0], [LOG(3), 0.0], [0.0, LOG(9)]])
    got = evaluate(nn.Identity(), [(logits, torch.tensor([0, 1, 1]))])
    assert got.accuracy == pytest.approx(2 / 3, rel=1e-12)
    assert got.loss == pytest.approx(-(LOG(3 / 4) + LOG(1 / 4) + LOG(9 / 10)) / 3, rel=1e-6)
    assert got.n == 3


@pytest.mark.parametrize("labels", [[0, 2], [-1, 0], []])
def test_labels_that_no_class_has(labels: list[int]) -> None:
    with pytest.raises(DataError, match=r"labels go from 0 to 1|nothing to evaluate on"):
        evaluate(nn.Identity(), [(torch.zeros(len(labels), 2), torch.tensor(labels, dtype=torch.int64))])


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
    assert (got.accuracy, got.n, got.metric) == (3 / 5, 5, "accuracy")
    assert got.loss == pytest.approx(sum(losses) / 5, rel=1e-6)


def predict(network: nn.Module, data: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return torch.cat([network(x) for x, _ in data]), torch.cat([y for _, y in data])


def test_evaluate_makes_no_graph_and_restores_every_mode() -> None:
    network = Halves().train()
    network.inner[1].eval()
    seen: list[Tensor] = []
    network.register_forward_hook(lambda module, args, outputs: seen.append(outputs))
    evaluate(network, LOADER)
    assert torch.equal(torch.cat(seen)[:, 1:], X)
    assert not any(outputs.requires_grad for outputs in seen)
    assert [m.training for m in (network, network.inner, *network.inner)] == [True, True, True, False]


def test_evaluate_restores_the_mode_when_the_network_raises() -> None:
    network = Halves().train()
    with pytest.raises(TypeError):
        evaluate(network, [("no tensor", Y)])
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
        assert row.accuracy == float((logits.argmax(1) == labels).double().mean())
        assert row.loss == pytest.approx(float(nn.functional.cross_entropy(logits.double(), labels)), rel=1e-12)
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


# Other metrics than accuracy


def small_net(*layers: nn.Module, shape: tuple[int, ...] = (4, 1, 8, 8)) -> anybit.simulate.network.QuantizedNetwork:
    torch.manual_seed(1)
    model = warmed_up(nn.Sequential(*layers), lambda n: (torch.randn(n, *shape[1:]),))
    return anybit.prepare(model, torch.randn(shape), input_range=(-4.0, 4.0))


def segmenter() -> anybit.simulate.network.QuantizedNetwork:
    return small_net(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 1))


def regressor() -> anybit.simulate.network.QuantizedNetwork:
    return small_net(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1), shape=(4, 6))


def test_a_class_for_every_pixel_gives_mean_overlap_by_default_and_not_seventeen() -> None:
    net, x = segmenter(), torch.randn(6, 1, 8, 8)
    with net.at(weights=32, activations=32):
        said = net(x).argmax(1)
    labels = said.clone()
    labels[:, :2] = (labels[:, :2] + 1) % 3
    labels[:, 7] = 255  # nobody knows
    (row,) = anybit.sweep(net, [(x[:4], labels[:4]), (x[4:], labels[4:])], widths=["FP"])
    known = labels != 255
    overlaps = []
    for c in range(3):
        a, b = (said == c) & known, (labels == c) & known
        overlaps.append(float((a & b).sum() / (a | b).sum()))
    assert row.metric == "mean IoU"
    assert row.accuracy == pytest.approx(sum(overlaps) / 3, rel=1e-6)
    assert (row.loss, row.kl, row.n) == (None, None, 6)
    (pixels,) = anybit.sweep(net, [(x, labels)], widths=["FP"], metric="pixel accuracy")
    assert pixels.accuracy == pytest.approx(5 / 7)


def test_inputs_alone_are_compared_with_floating_point() -> None:
    data = loader()
    net = anybit.prepare(network(), data[0][0], input_range=(0.0, 1.0))
    rows = anybit.sweep(net, [x for x, _ in data], widths=[(32, 32), (8, 8), (2, 2)])
    assert [row.metric for row in rows] == ["agreement"] * 3
    assert rows[0].accuracy == 1.0
    assert rows[0].accuracy >= rows[1].accuracy > rows[2].accuracy
    assert rows[2].loss is None
    assert rows[2].kl is not None
    reference, _ = predict(net, data)
    with net.at(weights=2, activations=2):
        narrow, _ = predict(net, data)
    assert rows[2].accuracy == pytest.approx(float((reference.argmax(1) == narrow.argmax(1)).float().mean()))


def test_a_regressor_says_what_it_needs_and_takes_it() -> None:
    net = regressor()
    x, y = torch.randn(20, 6), torch.randn(20)
    with pytest.raises(DataError, match="have no accuracy; take metric='mean absolute error', metric="):
        anybit.sweep(net, [(x, y)], widths=["W8A8"])
    with net.at(weights=32, activations=32):
        want = net(x)[:, 0].detach()
    with net.at(weights=4, activations=4):
        got = net(x)[:, 0].detach()
    data = [(x[:15], y[:15]), (x[15:], y[15:])]
    for metric, value in (
        ("mean absolute error", (got - y).abs().mean()),
        ("mean squared error", (got - y).square().mean()),
        ("relative error", (got - want).norm() / want.norm()),
        (lambda outputs, targets: float((outputs[:, 0] - targets).abs().mean()), (got - y).abs().mean()),
        (lambda outputs, targets: (float((outputs[:, 0] - targets).abs().sum()), len(targets)), (got - y).abs().mean()),
    ):
        (row,) = anybit.sweep(net, data, widths=["W4A4"], metric=metric)
        assert row.accuracy == pytest.approx(float(value), rel=1e-4)
        assert row.metric == (metric if isinstance(metric, str) else "lambda")


class Two(nn.Module):
    """Two inputs, one output for each of three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 8), nn.Linear(5, 8), nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.a(left) + self.b(right))))


def test_batches_of_every_form() -> None:
    x, y = torch.rand(12, 1, 8, 8), torch.arange(12) % 10
    net = anybit.prepare(network(), x, input_range=(0.0, 1.0))
    (want,) = anybit.sweep(net, [(x, y)], widths=["W8A8"])
    names = [f"{i}.png" for i in range(12)]
    for batch in (
        (x, y, names),
        [x, y],
        {"image": x, "label": y},
        {"labels": y, "pixel_values": x},
        (x, nn.functional.one_hot(y, 10)),
        (x, nn.functional.one_hot(y, 10).float()),
        (x, y[:, None]),
    ):
        (row,) = anybit.sweep(net, [batch], widths=["W8A8"])
        assert (row.accuracy, row.metric) == (want.accuracy, "accuracy")
    both = (torch.randn(12, 4), torch.randn(12, 5))
    labels = torch.arange(12) % 3
    model = Two().eval()
    by_place = anybit.prepare(model, both, calibration=[(both, labels)])
    named = {"left": both[0], "right": both[1]}
    by_name = anybit.prepare(model, named, calibration=[named])
    rows = [
        anybit.sweep(by_place, [batch], widths=["W8A8"])[0].accuracy
        for batch in ((*both, labels), (both, labels), (*both, labels, names))
    ]
    rows += [anybit.sweep(by_name, [{"right": both[1], "left": both[0], "y": labels}], widths=["W8A8"])[0].accuracy]
    assert len(set(rows)) == 1
    with pytest.raises(DataError, match="takes inputs called left, right: name them alike"):
        anybit.sweep(by_name, [{"first": both[0], "second": both[1], "y": labels}], widths=["W8A8"])


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = torch.relu(self.norm(self.conv(x)))
        return {"boxes": y.mean((2, 3)), "scores": y.amax((2, 3))}


def test_a_detector_says_what_it_needs_and_takes_it() -> None:
    net = anybit.prepare(Detector().eval(), torch.randn(2, 1, 8, 8), input_range=(-4.0, 4.0))
    data = [(torch.randn(3, 1, 8, 8), [{"boxes": 1}] * 3)]
    with pytest.raises(DataError, match=r"as detectors do, which has no accuracy; take metric='relative"):
        anybit.sweep(net, data, widths=["W8A8"])
    x = data[0][0]
    with net.at(weights=32, activations=32):
        want = torch.cat(list(net(x).values()), 1).detach()
    with net.at(weights=8, activations=8):
        got = torch.cat(list(net(x).values()), 1).detach()
    for batch, metric in ((data[0], "relative error"), (x, None)):
        (row,) = anybit.sweep(net, [batch], widths=["W8A8"], metric=metric)
        assert row.accuracy == pytest.approx(float((got - want).norm() / want.norm()), rel=1e-4)
        assert (row.metric, row.n) == ("relative error", 3)
    with pytest.raises(DataError, match=r"no scores of classes; take metric='relative error'"):
        anybit.sweep(net, data, widths=["W8A8"], metric="agreement")

    def found(outputs: dict[str, Tensor], targets: list[object]) -> tuple[float, int]:
        return float((outputs["scores"] > 0).float().mean(1).sum()), len(targets)

    (row,) = anybit.sweep(net, data, widths=["W8A8"], metric=found)
    assert (row.metric, row.n) == ("found", 3)


def test_what_cannot_be_measured_is_said_in_a_sentence() -> None:
    data = loader()
    net = anybit.prepare(network(), data[0][0], input_range=(0.0, 1.0))
    x, y = data[0]
    with pytest.raises(DataError, match=r"convert labels with y.long\(\) if they are classes"):
        anybit.sweep(net, [(x, y.float())], widths=["W8A8"])
    with pytest.raises(DataError, match="accuracy needs targets, and the loader has none"):
        anybit.sweep(net, [x], widths=["W8A8"], metric="accuracy")
    with pytest.raises(SpecError, match="did you mean 'agreement'"):
        anybit.sweep(net, data, widths=["W8A8"], metric="agrement")
    with pytest.raises(SpecError, match="a metric returns a number, or a sum and a count"):
        anybit.sweep(net, data, widths=["W8A8"], metric=lambda outputs, targets: "good")
    with pytest.raises(SpecError, match=r"sweep takes a network from anybit.prepare\(.*\), got VGGLike"):
        anybit.sweep(network(), data, widths=["W8A8"])  # type: ignore[arg-type]
    for widths in (4, [4], Bits(4, 4), [(4, 4, 4)]):
        with pytest.raises(SpecError, match=r'a pair (.*) such as \(8, 8\) or "W8A8"|such as .* or "W8A8 W4A4"'):
            anybit.sweep(net, data, widths=widths)  # type: ignore[arg-type]
    rows = [anybit.sweep(net, data, widths=widths)[0] for widths in ("W4A4", ["4,4"], [(4, 4)])]  # type: ignore[arg-type]
    assert rows[0] == rows[1] == rows[2]
