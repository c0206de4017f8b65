from __future__ import annotations

import base64
import copy
import hashlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import anybit
from anybit.analysis import insight
from anybit.analysis.insight import NARROW, WIDTHS, Subject, gradient_norms, measure_insight
from anybit.cli import main
from anybit.data import Batches
from anybit.errors import DataError, SpecError
from anybit.evaluate.accuracy import evaluate, predict
from anybit.evaluate.examples import choose_examples, first_flips, png_uri, thumbnails
from anybit.report.insight import Insight, read_insight
from anybit.report.measured import measured
from anybit.report.rows import read_rows
from anybit.spec import Bits
from anybit.train.checkpoint import save_checkpoint
from anybit.train.loop import model_shape
from anybit.train.recipe import DataRecipe, ModelRecipe, Recipe
from paper.runs import quantized, small_run

N = 150


@pytest.fixture(scope="module")
def subject() -> Subject:
    model, dataset = small_run()
    return Subject(quantized(model, dataset), model, dataset, "small-0", 0)


@pytest.fixture(scope="module")
def found(subject: Subject) -> Insight:
    before = copy.deepcopy(subject.net.state_dict())
    subject.net.set_bits(weights=5, activations=6)
    bars: list[list[int]] = []

    def start(name: str, total: int) -> object:
        bars.append([total, 0])
        return lambda steps: bars[-1].__setitem__(1, bars[-1][1] + steps)

    made = measure_insight(subject, examples=N, origin={"commit": "abc"}, start=start)  # type: ignore[arg-type]
    assert all(total == done for total, done in bars)
    assert subject.net.bits == Bits(5, 6)
    for name, value in subject.net.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(parameter.grad is None for parameter in subject.model.parameters())
    subject.net.set_bits(weights=32, activations=32)
    return made


def part_of(subject: Subject) -> Batches:
    return Batches(insight._first(subject.dataset.test, N), 64)


def weights_of(subject: Subject) -> dict[str, Tensor]:
    return {point.name: point.master.detach() for point in subject.weight_points}


def test_the_grid_is_what_a_sweep_measures(subject: Subject, found: Insight) -> None:
    assert (found.n, found.label, found.seed, found.data, found.widths) == (N, "small-0", 0, "digits", WIDTHS)
    assert found.classes == tuple("0123456789")
    assert [(c.weights, c.activations) for c in found.grid] == [(w, a) for w in WIDTHS for a in WIDTHS]
    rows = anybit.sweep(subject.net, part_of(subject), widths=[(w, a) for w in WIDTHS for a in WIDTHS])
    for cell, row in zip(found.grid, rows, strict=True):
        assert cell.accuracy == row.accuracy, row.bits
        assert cell.loss == pytest.approx(row.loss, rel=1e-5, abs=1e-6)
        assert cell.kl == pytest.approx(row.kl, rel=1e-4, abs=1e-9)
    assert len({cell.accuracy for cell in found.grid}) > 5  # there is something to see


def test_sizes_by_hand(subject: Subject, found: Insight) -> None:
    # After folding a layer has one bias for each output, and nothing else beside its weight.
    weights = weights_of(subject)
    biases = sum(weight.shape[0] for weight in weights.values())
    count = sum(weight.numel() for weight in weights.values())
    for bits, got in zip(WIDTHS, found.sizes, strict=True):
        want = count * bits / 8 + 4 * biases
        assert want <= got < want + len(weights), bits  # each weight tensor ends at a whole byte
    mixed = {name: 2 + index % 3 for index, name in enumerate(weights)}
    want = sum(-(-weight.numel() * mixed[name] // 8) for name, weight in weights.items()) + 4 * biases
    assert insight.size(subject.net, mixed) == want
    assert found.weights == count


def test_layers_that_are_kept_wide_count_as_such(subject: Subject) -> None:
    wide = anybit.prepare(subject.model, subject.dataset.test.x[:2], input_range=(0.0, 1.0), ends="8-bit")
    first, *inner, last = weights_of(subject).values()
    difference = insight.size(wide, 2) - insight.size(subject.net, 2)
    assert difference == pytest.approx((first.numel() + last.numel()) * 6 / 8, abs=2)
    assert inner


def test_norms_are_those_of_the_figure(subject: Subject, found: Insight) -> None:
    assert found.batch == N // 50
    assert len(found.l1) == len(found.l2) == 50
    x, y = subject.dataset.test.x[3:6], subject.dataset.test.y[3:6]
    assert (found.l1[1], found.l2[1]) == pytest.approx(gradient_norms(subject.model, x, y), rel=1e-5)


def test_measured_changes_of_the_loss_are_those_of_the_rounded_network(subject: Subject, found: Insight) -> None:
    assert [entry.bits for entry in found.first_order] == list(NARROW)
    net = subject.net
    entry = found.first_order[NARROW.index(4)]
    for index in (0, 7):
        part = slice(found.batch * index, found.batch * (index + 1))
        x, y = subject.dataset.test.x[part], subject.dataset.test.y[part]
        with torch.no_grad(), net.at(weights=32, activations=32):
            before = float(F.cross_entropy(net(x).double(), y))
        with torch.no_grad(), net.at(weights=4, activations=32):
            after = float(F.cross_entropy(net(x).double(), y))
        assert entry.measured[index] == pytest.approx(after - before, rel=1e-4, abs=1e-7)


def test_predicted_changes_are_directional_derivatives(subject: Subject, found: Insight) -> None:
    """Along the rounding error, in float64, by a central difference."""
    net = copy.deepcopy(subject.net).double()
    points = [point for point in net.points if isinstance(point, type(subject.weight_points[0]))]
    with torch.no_grad():
        with net.at(weights=8, activations=32):
            shifts = [point.quantized() - point.master for point in points]
        x, y = subject.dataset.test.x[: found.batch].double(), subject.dataset.test.y[: found.batch]
        h, losses = 1e-4, []
        for sign in (h, -2 * h):  # there, and from there to the other side
            for point, shift in zip(points, shifts, strict=True):
                point.master.add_(sign * shift)
            losses.append(float(F.cross_entropy(net(x), y)))
    want = (losses[0] - losses[1]) / (2 * h)
    assert found.first_order[NARROW.index(8)].predicted[0] == pytest.approx(want, rel=1e-3, abs=1e-7)


def test_the_layer_table_is_the_plan_with_the_papers_bound(subject: Subject, found: Insight) -> None:
    assert [(layer.name, layer.kind) for layer in found.layers] == [(e.name, e.kind) for e in subject.net.plan]
    for layer, entry in zip(found.layers, subject.net.plan, strict=True):
        assert entry.range is not None
        assert (layer.low, layer.high, layer.source) == (entry.range.low, entry.range.high, entry.range.source)
        assert bool(layer.bounds) == (layer.kind == "weight")
    split = insight._first(subject.dataset.validation, insight.CHOSEN_ON)
    totals = dict.fromkeys(weights_of(subject), 0.0)
    batches = list(Batches(split, 128))
    masters = [point.master for point in subject.weight_points]
    for x, y in batches:
        grads = torch.autograd.grad(F.cross_entropy(subject.net(x), y), masters)
        for name, grad in zip(totals, grads, strict=True):
            totals[name] += float(grad.abs().sum()) / len(batches)
    bounds = {layer.name: layer.bounds for layer in found.layers if layer.bounds}
    for name, weight in weights_of(subject).items():
        for bits, got in zip(NARROW, bounds[name], strict=True):
            half = float(weight.abs().max()) / (2 ** (bits - 1) - 1) / 2
            assert got == pytest.approx(half * totals[name], rel=1e-4)


def test_budgets_are_kept_and_measured(subject: Subject, found: Insight) -> None:
    assert [b.budget for b in found.budgets] == list(insight.BUDGETS)
    counts = {name: weight.numel() for name, weight in weights_of(subject).items()}
    for budget in found.budgets:
        chosen = {entry.name: entry.bits for entry in budget.layers}
        assert list(chosen) == list(counts)
        average = sum(counts[name] * bits for name, bits in chosen.items()) / sum(counts.values())
        assert budget.average_bits == pytest.approx(average)
        assert average <= budget.budget
        assert budget.size == insight.size(subject.net, chosen)
        layers = {name: (bits, 8) for name, bits in chosen.items()}
        with subject.net.at(weights=8, activations=8, layers=layers):
            assert budget.accuracy == evaluate(subject.net, part_of(subject)).accuracy
    assert found.budgets[0].predicted > found.budgets[-1].predicted


def test_a_budget_that_no_width_meets_is_left_out(subject: Subject) -> None:
    net = anybit.prepare(subject.model, subject.dataset.test.x[:2], input_range=(0.0, 1.0), ends="float")
    wide = Subject(net, subject.model, subject.dataset, "wide")
    part = Batches(insight._first(subject.dataset.validation, 64), 64)
    assert insight.budgeted(wide, 2.0, part, part) == []
    assert [b.budget for b in insight.budgeted(wide, 31.0, part, part)] == [31.0]


def test_examples_flip_and_say_what_the_network_says(subject: Subject, found: Insight) -> None:
    assert len(found.examples) == insight.PICTURES
    assert len({example.index for example in found.examples}) == insight.PICTURES
    place = {(cell.weights, cell.activations): index for index, cell in enumerate(found.grid)}
    firsts = set()
    for example in found.examples:
        reference = example.predicted[place[32, 32]]
        flips = [bits for bits in reversed(NARROW) if example.predicted[place[bits, bits]] != reference]
        firsts.add(flips[0])
        assert example.label == int(subject.dataset.test.y[example.index])
    assert len(firsts) > 1  # not all at the same width
    for bits in ((3, 3), (8, 2), (32, 32)):
        with subject.net.at(weights=bits[0], activations=bits[1]):
            logits, _ = predict(subject.net, part_of(subject))
        for example in found.examples:
            sure = F.softmax(logits[example.index].double(), 0)
            assert example.confidence[place[bits]] == pytest.approx(float(sure.max()), abs=1e-3)
            if sure.topk(2).values.diff().abs() > 1e-3:  # no tie that the size of a batch could decide
                assert example.predicted[place[bits]] == int(sure.argmax())


def pixels(uri: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))))


def test_pictures_are_the_inputs(subject: Subject, found: Insight) -> None:
    for example in found.examples[:5]:
        assert example.image is not None
        image = subject.dataset.test.x[example.index, 0]
        assert np.array_equal(pixels(example.image), (image * 255).round().numpy().astype(np.uint8))


def test_pictures_in_colour_and_large_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (3, 5, 7), generator=generator, dtype=torch.uint8)
    assert np.array_equal(pixels(png_uri(image)), image.permute(1, 2, 0).numpy())
    (small,) = thumbnails(torch.rand(1, 3, 200, 130, generator=generator)) or []
    assert pixels(small).shape == (50, 32, 3)
    same = thumbnails(torch.zeros(2, 1, 4, 4)) or []
    assert pixels(same[0]).max() == 0  # nothing but one value, and no division by zero
    assert thumbnails(torch.rand(2, 4, 8, 8)) is None


@pytest.mark.parametrize(
    "bad", [torch.zeros(2, 4, 4, dtype=torch.uint8), torch.zeros(4, 4, dtype=torch.uint8), torch.zeros(1, 4, 4)]
)
def test_what_is_no_picture_is_refused(bad: Tensor) -> None:
    with pytest.raises(DataError, match="a picture has the shape"):
        png_uri(bad)


def test_first_flips_by_hand() -> None:
    classes = torch.tensor([[5, 5, 5, 1], [5, 1, 5, 5], [1, 5, 5, 5]])
    assert first_flips(classes, torch.tensor([5, 5, 5, 5])).tolist() == [2, 1, 3, 0]
    assert choose_examples(torch.tensor([1, 1, 1, 0, 3]), 3, never=3) == [3, 0, 1]
    assert choose_examples(torch.tensor([], dtype=torch.int64), 3, never=3) == []


class Wide(nn.Module):
    """More outputs than the data has classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.classifier = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.norm(self.conv(x)).relu().mean((2, 3)))
        return out


def test_outputs_without_a_class_have_a_name_and_few_examples_will_do(subject: Subject) -> None:
    torch.manual_seed(0)
    model = Wide().eval()
    net = anybit.prepare(model, subject.dataset.test.x[:2], input_range=(0.0, 1.0))
    got = measure_insight(Subject(net, model, subject.dataset, "wide"), examples=3)
    assert got.classes[-2:] == ("output 10", "output 11")
    assert (got.n, got.batch, len(got.l1), len(got.examples)) == (3, 1, 3, 3)
    with pytest.raises(SpecError, match="one test example or more, got 0"):
        measure_insight(subject, examples=0)


# The verb


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, subject: Subject) -> Path:
    """A run folder as training leaves it, without its log."""
    path = tmp_path_factory.mktemp("runs") / "small-0"
    recipe = Recipe(name="small", epochs=1, model=ModelRecipe("small-conv", multiplier=0.25), data=DataRecipe("digits"))
    about = {"model": model_shape(recipe, subject.dataset), "data": "digits", "seed": 0, "recipe": recipe.to_dict()}
    save_checkpoint(path / "model.safetensors", subject.model, about)
    return path


def sweep(*words: object) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["sweep", *map(str, words)])
    assert stop.value.code in (0, None)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_sweeping_a_run_folder_writes_rows_and_insight(
    folder: Path, found: Insight, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep(folder / "model.safetensors", "--widths", "W4A4", "--json")
    assert names(folder) == {"model.safetensors"}  # a checkpoint alone has no folder to write to
    sweep(folder, "--widths", "FP W4A4", "--no-insight")
    assert names(folder) == {"model.safetensors", "rows.json"}
    assert capsys.readouterr().out.endswith(f"{folder / 'rows.json'}\n")
    sweep(folder, "--widths", "FP W4A4", "--examples", N)
    assert names(folder) == {"model.safetensors", "rows.json", "insight.json"}
    assert capsys.readouterr().out.endswith(f"{folder / 'rows.json'}\n{folder / 'insight.json'}\n")
    got = read_insight(folder / "insight.json")
    assert [cell.accuracy for cell in got.grid] == [cell.accuracy for cell in found.grid]
    assert got.examples == found.examples
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    file = read_rows(folder / "rows.json")
    assert got.origin["checkpoint_sha256"] == file.origin["checkpoint_sha256"] == digest
    assert {"commit", "date", "machine", "versions"} <= set(got.origin)
    assert measured(file, folder / "rows.json").insight == got


def test_rows_elsewhere_have_their_insight_beside_them(folder: Path, tmp_path: Path) -> None:
    words = ("--widths", "W3A32", "--examples", 20, "--per-channel", "--json")
    sweep(folder, "--out", tmp_path / "channel.json", *words)
    assert names(tmp_path) == {"channel.json", "channel.insight.json"}
    assert read_insight(tmp_path / "channel.insight.json").n == 20
    file = read_rows(tmp_path / "channel.json")
    assert file.notes == ("Quantized with: one scale per output channel.",)
    assert json.loads((tmp_path / "channel.json").read_text())["origin"]["settings"]["per_channel"] is True
