from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import typer
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from typer.testing import CliRunner

import anybit
from anybit.data import Dataset, load_dataset
from anybit.errors import CheckpointError, DataError, FileError, SpecError
from anybit.evaluate.sweep import kl_divergence
from anybit.spec import Bits, Row
from anybit.task.checkpoint import save_checkpoint
from anybit.train.loop import train
from anybit.train.recipe import DataRecipe, ModelRecipe, PenaltyRecipe, Recipe
from paper.figures import (
    balls,
    boundaries,
    divergence,
    drawing,
    first_order,
    gradient_norms,
    noise,
    progression,
    request,
    sweeps,
)
from paper.figures.__main__ import command
from paper.figures.make import FIGURES, kind_of, make_figure
from paper.figures.progression import Curve, Logged
from paper.figures.request import Request
from paper.runs import Run, default_runs, folded_weights, load_runs, predict, quantized, recipe_label

BASE = Recipe(
    name="base",
    epochs=3,
    model=ModelRecipe("small-conv", multiplier=0.25),
    data=DataRecipe("digits", batch=64, augment=False),
)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folders: a base network, another seed of it, and one that goes on with the penalty from its second epoch."""
    path = tmp_path_factory.mktemp("figures")
    data = load_dataset("digits")
    train(BASE, data, path / "base-0")
    train(dataclasses.replace(BASE, seed=1, epochs=1), data, path / "base-1")
    penalty = PenaltyRecipe(weight=1e-3, activation=1e-3, start=1)
    init = str(path / "base-0" / "model.safetensors")
    train(dataclasses.replace(BASE, name="l1", epochs=2, init=init, penalty=penalty), data, path / "l1-0")
    return path


@pytest.fixture
def pair(folder: Path) -> tuple[Path, Path]:
    return folder / "base-0", folder / "l1-0"


@pytest.fixture(autouse=True, scope="module")
def captured_once() -> Iterator[None]:
    """Capture each network once: it is the slow part, and a width set for a while is set back."""
    kept: dict[tuple[float, ...], Any] = {}

    def once(model: nn.Module, dataset: Dataset) -> Any:
        key = tuple(float(value.detach().double().sum()) for value in model.parameters())
        if key not in kept:
            kept[key] = quantized(model, dataset)
        assert kept[key].bits == Bits()
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        for module in (request, boundaries):
            patch.setattr(module, "quantized", once)
        yield


@pytest.fixture
def small_planes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundaries, "SIDE", 11)


# Every figure


@pytest.mark.usefixtures("small_planes")
@pytest.mark.parametrize("number", sorted(FIGURES))
def test_a_figure_is_a_picture_twice_and_its_numbers(number: int, pair: tuple[Path, Path], tmp_path: Path) -> None:
    request = Request(pair, examples=150, seed=3)
    paths = make_figure(number, tmp_path / "a", request)
    stem = f"figure-{number}-{FIGURES[number].name}"
    assert [path.name for path in paths] == [f"{stem}.png", f"{stem}.svg", f"{stem}.json"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted(path.name for path in paths)
    png, svg, numbers = paths
    assert png.read_bytes().startswith(b"\x89PNG")
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    values = json.loads(numbers.read_text())
    assert (values["format"], values["figure"], values["seed"]) == ("anybit-figure/1", number, 3)
    assert values["runs"] == ([] if number == 8 else [str(path) for path in pair])
    assert {"commit", "machine", "versions", "date"} <= set(values["origin"])
    assert values["data"]
    again = make_figure(number, tmp_path / "b", request)
    assert again[0].read_bytes() == png.read_bytes()
    assert again[1].read_bytes() == svg.read_bytes()
    assert json.loads(again[2].read_text())["data"] == values["data"]
    if number in (3, 5):  # drawn at random
        other = make_figure(number, tmp_path / "c", dataclasses.replace(request, seed=4))
        assert json.loads(other[2].read_text())["data"] != values["data"]


@pytest.mark.usefixtures("small_planes")
def test_a_progress_bar_reaches_its_end(pair: tuple[Path, Path], tmp_path: Path) -> None:
    bars: list[list[int]] = []

    def start(name: str, total: int) -> Any:
        bar = [total, 0]
        bars.append(bar)

        def advance(steps: int) -> None:
            bar[1] += steps

        return advance

    make_figure(1, tmp_path, Request(pair, examples=50, start=start))
    boundaries.measure(Request(pair, examples=50, start=start))
    assert len(bars) == 2
    assert all(total == done > 0 for total, done in bars)


def test_a_figure_uses_as_many_examples_as_it_needs_unless_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Request] = []
    kind = dataclasses.replace(FIGURES[8], measure=lambda r: asked.append(r) or balls.measure(r), examples=70)
    monkeypatch.setitem(FIGURES, 8, kind)
    for examples, want in ((None, 70), (5, 5)):
        *_, numbers = make_figure(8, tmp_path, Request(examples=examples))
        assert asked[-1].examples == json.loads(numbers.read_text())["examples"] == want


def test_a_number_that_is_no_figure() -> None:
    for number in (0, 9):
        with pytest.raises(SpecError, match=f"figures 1 to 8, got {number}"):
            kind_of(number)


def test_without_matplotlib_the_install_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(FileError, match=r"a figure needs matplotlib: pip install -r paper/requirements.txt"):
        make_figure(8, tmp_path, Request())
    assert not any(tmp_path.iterdir())


def test_drawing_opens_no_window_and_leaves_no_style(tmp_path: Path) -> None:
    code = f"""
import sys
from paper.figures.make import make_figure
from paper.figures.request import Request
assert "matplotlib" not in sys.modules
make_figure(8, {str(tmp_path)!r}, Request())
import matplotlib
assert "matplotlib.pyplot" not in sys.modules
assert matplotlib.rcParams["font.size"] == matplotlib.rcParamsDefault["font.size"]
"""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_a_figure_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot make this folder"):
        make_figure(8, tmp_path / "file", Request())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_series_are_told_apart_in_grey() -> None:
    def grey(color: str) -> float:
        red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
        return 0.3 * red + 0.59 * green + 0.11 * blue

    first, second = (grey(color) for color in drawing.COLORS[:2])
    assert abs(first - second) > 60
    for marks in (drawing.COLORS, drawing.LINES, drawing.MARKERS, drawing.HATCHES):
        assert len(set(marks)) == len(marks) >= 4


# 1: gradient norms


def test_gradient_norms_are_those_of_the_whole_vector(pair: tuple[Path, Path]) -> None:
    series = gradient_norms.measure(Request(pair, examples=150))
    data = load_dataset("digits")
    model = load_runs(pair)[0].model
    for index, part in enumerate((slice(0, 100), slice(100, 150))):
        model.zero_grad()
        F.cross_entropy(model(data.test.x[part]), data.test.y[part]).backward()
        vector = torch.cat([p.grad.flatten() for p in model.parameters() if p.dim() > 1 and p.grad is not None])
        assert series[0].l1[index] == pytest.approx(float(vector.abs().sum()), rel=1e-5)
        assert series[0].l2[index] == pytest.approx(float(vector.norm()), rel=1e-5)
    assert [(norms.label, len(norms.l1)) for norms in series] == [("no penalty", 2), ("l1 penalty", 2)]
    assert series[0].weights == vector.numel()
    for norms in series:
        for l1, l2 in zip(norms.l1, norms.l2, strict=True):
            assert l2 < l1 < math.sqrt(norms.weights) * l2


# 2: divergence


def test_divergence_is_averaged_over_each_batch(pair: tuple[Path, Path]) -> None:
    series = divergence.measure(Request(pair, examples=150))
    assert [(entry.label, entry.bits) for entry in series] == [
        (label, bits) for label in ("no penalty", "l1 penalty") for bits in ("W8A4", "W6A4", "W4A4", "W3A3")
    ]
    data = load_dataset("digits")
    net = quantized(load_runs(pair)[1].model, data)
    with torch.no_grad():
        reference = net(data.test.x[:150])
        with net.at(weights=4, activations=4):
            logits = net(data.test.x[:150])
    assert series[6].values == pytest.approx(
        (kl_divergence(reference[:100], logits[:100]), kl_divergence(reference[100:], logits[100:])), rel=1e-4
    )
    assert all(value > 0 for entry in series for value in entry.values)


def test_a_divergence_of_zero_can_be_drawn(tmp_path: Path) -> None:
    with drawing.canvas() as empty:
        divergence.draw(empty, [divergence.Divergence("a", "W8A8", (0.0, 0.1))])
        assert drawing.save(empty, tmp_path / "zero")


# 3: the first order


class Straight(nn.Module):
    """Logits that are linear in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=torch.float64, generator=seeded(0)))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


@pytest.mark.parametrize("sign", [1, -1])
def test_small_shifts_do_what_the_gradient_predicts(sign: int) -> None:
    network = Straight()
    x, y = torch.randn(6, 4, dtype=torch.float64, generator=seeded(1)), torch.arange(6) % 3
    shift = sign * 1e-6 * torch.randn(3, 4, dtype=torch.float64, generator=seeded(2))
    before = network.weight.detach().clone()
    predicted, measured = first_order.induced_losses(network, [network.weight], [shift], x, y)
    assert measured.tolist() == pytest.approx(predicted.tolist(), rel=1e-3)
    assert float(predicted.abs().min()) > 1e-9
    whole = torch.autograd.grad(F.cross_entropy(network(x), y), network.weight)[0]
    assert float(predicted.mean()) == pytest.approx(float((whole * shift).sum()), rel=1e-9)
    assert torch.equal(network.weight, before)
    assert network.weight.grad is None


def test_large_shifts_are_measured_not_predicted() -> None:
    network = Straight()
    x, y = torch.randn(6, 4, dtype=torch.float64, generator=seeded(1)), torch.arange(6) % 3
    shift = torch.randn(3, 4, dtype=torch.float64, generator=seeded(2))
    predicted, measured = first_order.induced_losses(network, [network.weight], [shift], x, y)
    now, before = (F.cross_entropy(x @ w.T, y, reduction="none") for w in (network.weight + shift, network.weight))
    assert measured.tolist() == pytest.approx((now - before).tolist())
    assert (measured > predicted).all()  # cross-entropy is convex in these weights


def test_weights_are_put_back_bit_for_bit_also_after_an_error() -> None:
    weight = nn.Parameter(torch.tensor([0.1, 1e-30, 3.0]))
    before = weight.detach().clone()
    shifts = [torch.tensor([1e10, 1.0, 0.5])]
    with first_order.shifted([weight], shifts):
        assert weight.tolist()[2] == 3.5
    assert torch.equal(weight, before)
    with pytest.raises(RuntimeError, match="meanwhile"), first_order.shifted([weight], shifts):
        raise RuntimeError("meanwhile")
    assert torch.equal(weight, before)


@given(bits=st.integers(2, 8), size=st.floats(0.01, 100), seed=st.integers(0, 1000))
def test_noise_fills_one_bin_of_each_tensor(bits: int, size: float, seed: int) -> None:
    weights = [size * torch.randn(400, generator=seeded(seed)), torch.randn(5, 80, generator=seeded(seed))]
    shifts = first_order.uniform_noise(weights, bits, seeded(seed))
    for weight, shift in zip(weights, shifts, strict=True):
        half = float(weight.abs().max()) / (2 ** (bits - 1) - 1) / 2
        assert shift.shape == weight.shape
        assert float(shift.abs().max()) <= half * (1 + 1e-6)
        assert float(shift.max()) > 0.9 * half
        assert float(shift.min()) < -0.9 * half
    assert not torch.equal(shifts[0] / float(shifts[0].abs().max()), shifts[1].flatten() / float(shifts[1].abs().max()))


def test_induced_losses_are_those_of_the_folded_network(pair: tuple[Path, Path]) -> None:
    series = first_order.measure(Request(pair, examples=150, bits=Bits(5, 4), seed=2))
    data = load_dataset("digits")
    net = quantized(load_runs(pair)[0].model, data)
    masters = folded_weights(net)
    generator = seeded(2)
    images, batches = series[:2]
    for index, part in enumerate((slice(0, 100), slice(100, 150))):
        shifts = first_order.uniform_noise([m.detach() for m in masters], 5, generator)
        found = first_order.induced_losses(net, masters, shifts, data.test.x[part], data.test.y[part])
        assert images.predicted[part] == pytest.approx(found[0].tolist(), rel=1e-3, abs=1e-6)
        assert images.measured[part] == pytest.approx(found[1].tolist(), rel=1e-3, abs=1e-6)
        means = [float(side.mean()) for side in found]
        assert [batches.predicted[index], batches.measured[index]] == pytest.approx(means, rel=1e-3)
    assert [(entry.label, entry.bits, entry.over) for entry in series] == [
        (label, 5, over) for label in ("no penalty", "l1 penalty") for over in ("images", "batches")
    ]
    entry = series[2]
    assert entry.correlation == pytest.approx(stats.pearsonr(entry.predicted, entry.measured)[0], abs=1e-6)


# 4: sweeps


def test_sweeps_are_averaged_over_seeds(folder: Path, pair: tuple[Path, Path]) -> None:
    rows = sweeps.measure(Request((*pair, folder / "base-1"), examples=60))
    assert {(row.label, row.seed) for row in rows} == {("no penalty", 0), ("no penalty", 1), ("l1 penalty", 0)}
    assert {row.n for row in rows} == {60}
    _, data = Request(pair, examples=60).load()
    net = quantized(load_runs(pair)[1].model, data)
    (want,) = anybit.sweep(net, [(data.test.x, data.test.y)], widths=[(4, 4)])
    (got,) = [row for row in rows if row.label == "l1 penalty" and (row.weights, row.activations) == (4, 4)]
    assert (got.accuracy, got.n) == (want.accuracy, want.n)
    pairs = {(row.weights, row.activations) for row in rows}
    assert pairs == {(w, a) for w in (32, 8, 6, 5, 4, 3, 2) for a in (32, 4)}


def test_bars_go_from_the_worst_seed_to_the_best() -> None:
    means, (below, above) = sweeps.bars([[0.5, 0.9, 0.4]])
    assert (means, below, above) == ([pytest.approx(60.0)], [pytest.approx(20.0)], [pytest.approx(30.0)])
    rows = [Row("a", seed, w, a, accuracy, 1.0, 9)
            for seed, accuracy in enumerate((0.2, 0.8)) for a in (32, 4) for w in sweeps.WEIGHTS]  # fmt: skip
    with drawing.canvas() as empty:
        sweeps.draw(empty, rows)
        axes = empty.axes[0]
        ((bar, *_),) = [c.get_segments() for c in axes.collections]
        assert [round(float(y)) for y in bar[:, 1]] == [20, 80]
        assert axes.get_legend_handles_labels()[1] == ["a (2 seeds)"]


# 5: decision boundaries


def test_points_of_a_plane_are_as_far_as_they_say() -> None:
    basis = boundaries.directions((3, 4, 4), seeded(0))
    center = torch.randn(3, 4, 4, generator=seeded(1))
    points = boundaries.plane_points(center, basis, 2.0, 5)
    assert points.shape == (25, 3, 4, 4)
    assert torch.allclose(points[12], center)
    away = (points - center).flatten(1)
    across, down = (away @ direction.flatten() for direction in basis)
    steps = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])
    assert torch.allclose(across, steps.repeat(5), atol=1e-5)
    assert torch.allclose(down, steps.repeat_interleave(5), atol=1e-5)


def test_images_are_chosen_by_what_the_networks_make_of_them() -> None:
    right = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 1], [1, 1, 1, 1], [1, 1, 1, 1]]).bool()
    chosen = {boundaries.choose(right, torch.tensor([True] * 4), seeded(seed)) for seed in range(20)}
    assert chosen == {0, 3}
    assert boundaries.choose(right, torch.tensor([True, False, True, True]), seeded(0)) == 1
    assert boundaries.choose(right, torch.tensor([False, True, True, True]), seeded(0)) is None


@pytest.mark.usefixtures("small_planes")
def test_the_middle_of_a_plane_is_the_image(folder: Path) -> None:
    """A network of one epoch, quantized hard, gets enough wrong to fill both rows."""
    request = Request((folder / "base-1", folder / "base-0"), bits=Bits(3, 3), seed=1)
    planes = boundaries.measure(request)
    assert [plane.case for plane in planes] == [boundaries.ALL_RIGHT, boundaries.SAVED]
    pair, data = request.load()
    for plane in planes:
        assert plane.names == data.classes
        assert plane.label == data.classes[int(data.test.y[plane.example])]
        assert len({section.network for section in plane.sections}) == 4
        right = [plane.names[section.classes[5][5]] == plane.label for section in plane.sections]
        assert right == [True, plane.case == boundaries.ALL_RIGHT, True, True]
        for section in plane.sections:
            assert (len(section.classes), len(section.classes[0])) == (11, 11)
            assert all(0.1 <= value <= 1 for row in section.confidence for value in row)
    assert planes[0].sections[1].network.endswith(", W3A3")
    net = quantized(pair[0].model, data)
    with net.at(weights=3, activations=3):
        logits, _ = predict(net, [(data.test.x[[planes[1].example]], data.test.y[[planes[1].example]])])
    confidence, label = logits.softmax(1).max(1)
    assert planes[1].sections[1].classes[5][5] == int(label)
    assert planes[1].sections[1].confidence[5][5] == pytest.approx(float(confidence), abs=1e-3)


class Ring(nn.Module):
    """Class 0 between a distance of 2.5 and one of 40 from the origin, class 1 inside and outside."""

    def forward(self, x: Tensor) -> Tensor:
        between = (x.flatten(1).norm(dim=1) - 2.5).sign() * (40 - x.flatten(1).norm(dim=1))
        return torch.stack([between, torch.zeros(len(x))], 1)


@pytest.mark.parametrize(("typical", "reach"), [(1.0, 2.0), (3.0, 3.0), (8.0, 4.0), (32.0, 4.0), (200.0, 25.0)])
def test_a_plane_is_as_large_as_its_middle_allows(typical: float, reach: float) -> None:
    """A disc of radius 2.5 fills two thirds of a square of side 5.4."""
    basis = boundaries.directions((1, 3, 3), seeded(0))
    assert boundaries.fitting_reach(Ring(), torch.zeros(1, 3, 3), basis, typical) == reach


def test_boundaries_compare_two_runs(pair: tuple[Path, Path]) -> None:
    with pytest.raises(SpecError, match=r"two runs.*got 1"):
        boundaries.measure(Request(pair[:1], examples=10))


def test_networks_that_learned_nothing_have_no_boundaries(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boundaries, "choose", lambda *args: None)
    with pytest.raises(DataError, match="right by all four"):
        boundaries.measure(Request(pair, examples=10))


@given(rows=st.integers(1, 9), columns=st.integers(1, 9), top=st.integers(0, 3), left=st.integers(0, 3))
def test_the_middle_of_a_rectangle(rows: int, columns: int, top: int, left: int) -> None:
    region = torch.zeros(15, 15, dtype=torch.bool)
    region[top + 1 : top + 1 + rows, left + 1 : left + 1 + columns] = True
    row, column, depth = boundaries.middle_of(region)
    assert bool(region[row, column])
    assert depth == (min(rows, columns) - 1) // 2
    square = region[row - depth : row + depth + 1, column - depth : column + depth + 1]
    assert bool(square.all())


def test_a_region_that_touches_the_border_has_its_middle_inside() -> None:
    assert boundaries.middle_of(torch.ones(5, 5, dtype=torch.bool)) == (2, 2, 2)


def test_smoothing_keeps_the_level() -> None:
    assert torch.allclose(boundaries.smooth(torch.full((7, 7), 0.4)), torch.tensor(0.4))


# 6: quantization noise


@given(bits=st.integers(2, 8), seed=st.integers(0, 1000))
def test_rounding_errors_are_what_the_grid_leaves(bits: int, seed: int) -> None:
    weight = torch.randn(7, 30, generator=seeded(seed))
    errors = noise.rounding_errors(weight, bits)
    scale = float(weight.abs().max()) / (2 ** (bits - 1) - 1)
    assert float(errors.abs().max()) <= 0.5
    on_grid = weight.flatten().double() / scale - errors.double()
    assert torch.allclose(on_grid, on_grid.round(), atol=1e-4)


@given(seed=st.integers(0, 1000), n=st.integers(1, 50), power=st.floats(0.3, 3))
def test_the_distance_is_that_of_kolmogorov_and_smirnov(seed: int, n: int, power: float) -> None:
    errors = torch.rand(n, generator=seeded(seed)).double() ** power - 0.5
    want = stats.kstest(errors.numpy(), "uniform", args=(-0.5, 1)).statistic
    assert noise.distance_to_uniform(errors) == pytest.approx(want)


def test_noise_of_many_weights_is_uniform_at_8_bits_and_a_heap_at_2() -> None:
    weights = [torch.randn(20_000, generator=seeded(0)), 0.01 * torch.randn(20_000, generator=seeded(1))]
    fine, coarse = (noise.describe("a", weights, bits) for bits in (8, 2))
    assert fine.weights == 40_000
    assert fine.distance < 0.02
    assert coarse.distance > 0.1
    for entry in (fine, coarse):
        assert len(entry.density) == noise.BINS
        assert sum(entry.density) / noise.BINS == pytest.approx(1)
    assert max(coarse.density) == pytest.approx(max(coarse.density[noise.BINS // 2 - 5 : noise.BINS // 2 + 5]))
    assert min(fine.density) > 0.8


def test_noise_is_that_of_all_weights(pair: tuple[Path, Path]) -> None:
    series = noise.measure(Request(pair))
    assert [(entry.label, entry.bits) for entry in series] == [
        (label, bits) for label in ("no penalty", "l1 penalty") for bits in noise.WIDTHS
    ]
    model = load_runs(pair)[0].model
    assert series[0].weights == sum(p.numel() for p in model.parameters() if p.dim() > 1)


# 7: the penalty over training


def write_run(path: Path, steps: list[dict[str, Any]], **recipe: Any) -> Path:
    path.mkdir()
    (path / "run.json").write_text(json.dumps({"recipe": recipe}))
    (path / "log.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return path


def logged(step: int, epoch: int, weight: float, activation: float | None, on: bool = False) -> dict[str, Any]:
    return {"step": step, "epoch": epoch, "weight_norm": weight, "activation_norm": activation, "penalized": on}


def test_a_log_goes_on_where_the_one_before_ended(tmp_path: Path) -> None:
    base = write_run(tmp_path / "base", [logged(i, i // 2, 8.0 - i, 1.0) for i in range(4)])
    tuned = write_run(
        tmp_path / "tuned",
        [
            logged(0, 0, 4.0, 1.0),
            logged(1, 0, 2.0, None, True),
            logged(2, 0, 1.0, 0.5, True),
            logged(3, 0, 1.0, 0.0, True),
        ],
        init=str(base / "model.safetensors"),
        penalty={"weight": 0.1},
    )
    steps = progression.whole_log(tuned)
    assert [(s.epoch, s.penalty, s.penalized) for s in steps] == [
        (0.0, 9.0, False), (0.5, 8.0, False), (1.0, 7.0, False), (1.5, 6.0, False),
        (2.0, 5.0, False), (2.5, 1.5, True), (2.75, 1.0, True),
    ]  # fmt: skip
    curves = progression.measure(Request((base, tuned)))
    assert [(curve.label, curve.on) for curve in curves] == [("no penalty", None), ("l1 penalty", 2.5)]
    assert curves[1].mean == (9.0, 8.0, 7.0, 6.0, 5.0, 1.5, 1.0)


def test_a_start_that_is_gone_and_one_that_goes_in_a_circle(tmp_path: Path) -> None:
    steps = [logged(0, 0, 1.0, 1.0), logged(1, 0, 1.0, 1.0)]
    alone = write_run(tmp_path / "alone", steps, init=str(tmp_path / "gone" / "model.safetensors"))
    assert [s.epoch for s in progression.whole_log(alone)] == [0.0, 0.5]
    ring = write_run(tmp_path / "ring", steps, init=str(tmp_path / "ring" / "model.safetensors"))
    assert [s.epoch for s in progression.whole_log(ring)] == [0.0, 0.5]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "no step has the norms"),
        ("{}\n", "line 1 is no step"),
        (json.dumps(logged(0, 0, 1.0, 1.0)) + "\n{", "line 2 is no step"),
        ("[1]\n", "line 1 is no step"),
        (json.dumps(logged(0, 0, math.nan, 1.0)), "no step has the norms"),
    ],
)
def test_a_broken_log_is_named(tmp_path: Path, text: str, match: str) -> None:
    path = write_run(tmp_path / "run", [])
    (path / "log.jsonl").write_text(text)
    with pytest.raises(FileError, match=match) as error:
        progression.measure(Request((path,)))
    assert str(path / "log.jsonl") in str(error.value)


@pytest.mark.parametrize("text", ["[]", '{"recipe": 3}', "{"])
def test_a_broken_summary_is_named(tmp_path: Path, text: str) -> None:
    path = write_run(tmp_path / "run", [logged(0, 0, 1.0, 1.0)])
    (path / "run.json").write_text(text)
    with pytest.raises(FileError, match=r"run\.json"):
        progression.measure(Request((path,)))
    (path / "run.json").unlink()
    with pytest.raises(FileError, match="no such file"):
        progression.measure(Request((path,)))


@given(n=st.integers(1, 400), points=st.integers(1, 50), seed=st.integers(0, 100))
def test_a_curve_is_thinned_out_to_means(n: int, points: int, seed: int) -> None:
    values = torch.rand(n, generator=seeded(seed)).tolist()
    steps = [Logged(index / 10, value, False) for index, value in enumerate(values)]
    curve = progression.thin_out("a", steps, points=points)
    assert len(curve.mean) == len(curve.epochs) <= points
    assert min(curve.low) == min(values)
    assert max(curve.high) == max(values)
    tolerance = 1e-9
    for low, mean, high in zip(curve.low, curve.mean, curve.high, strict=True):
        assert low - tolerance <= mean <= high + tolerance
    size = -(-n // points)
    assert curve.mean[0] == pytest.approx(sum(values[:size]) / size if n >= size else sum(values) / n)
    assert list(curve.epochs) == sorted(curve.epochs)


def test_the_log_of_a_real_run(pair: tuple[Path, Path]) -> None:
    base, tuned = progression.measure(Request(pair))
    assert base.on is None
    assert tuned.on == 4.0  # three epochs of the base run, one without penalty
    assert base.epochs[-1] < 3 < tuned.epochs[-1] < 5


def test_runs_of_one_kind_get_one_panel() -> None:
    curves = [
        Curve(label, (0.0, 1.0), (2.0, 1.0), (1.0, 0.5), (3.0, 2.0), on) for label, on in (("a", None), ("b", 0.5))
    ]
    for chosen, titles in (
        (curves, [progression.NEVER, progression.LATE]),
        (curves[:1], [progression.NEVER]),
        (curves[1:], [progression.LATE]),
    ):
        with drawing.canvas() as empty:
            progression.draw(empty, chosen)
            assert [axes.get_title() for axes in empty.axes] == titles


# 8: balls


@given(order=st.floats(1, 20), corners=st.integers(3, 50))
def test_every_unit_vector_is_inside_the_cube(order: float, corners: int) -> None:
    points = balls.sphere(order, corners)
    assert torch.equal(points[0], points[-1])
    assert len(points) == corners + 1
    for x, y in points.abs().tolist():
        assert (x**order + y**order) ** (1 / order) == pytest.approx(1)
        assert max(x, y) <= 1 + 1e-12
        assert x + y >= 1 - 1e-12


def test_the_cube_has_corners() -> None:
    assert [1.0, 1.0] in balls.sphere(math.inf, 8).round(decimals=9).tolist()


# Runs


@pytest.mark.parametrize(
    ("recipe", "label"),
    [
        ({"penalty": {"weight": 0.0, "activation": 0.1, "norm": "l2"}}, "l2 penalty"),
        ({"penalty": {"orthogonal": 0.1, "noise": True, "kurtosis": 0.0}}, "orthogonal + noise"),
        ({"penalty": None, "quantize": {"widths": []}}, "no penalty"),
        ({"penalty": "odd", "quantize": {"widths": ["W4A4"]}}, "straight-through W4A4"),
    ],
)
def test_a_recipe_in_a_few_words(recipe: dict[str, Any], label: str) -> None:
    assert recipe_label(recipe) == label


def test_runs_with_one_label_are_told_apart(folder: Path, pair: tuple[Path, Path]) -> None:
    paths = [*pair, folder / "base-1"]
    assert [run.label for run in load_runs(paths, merge_seeds=True)] == ["no penalty", "l1 penalty", "no penalty"]
    assert [run.label for run in load_runs(paths)] == [
        f"no penalty, {folder / 'base-0'}", "l1 penalty", f"no penalty, {folder / 'base-1'}"
    ]  # fmt: skip
    twice = load_runs([pair[0], pair[0]], merge_seeds=True)
    assert [run.label for run in twice] == [f"no penalty, {pair[0]}"] * 2
    assert load_runs([pair[0] / "model.safetensors"])[0].seed == 0


def test_only_so_many_test_examples(pair: tuple[Path, Path]) -> None:
    _, whole = Request(pair).load()
    _, few = Request(pair, examples=7).load()
    assert (len(whole.test), len(few.test)) == (450, 7)
    assert torch.equal(few.test.x, whole.test.x[:7])
    assert torch.equal(few.test.y, whole.test.y[:7])
    assert len(Request(pair, examples=10_000).load()[1].test) == 450
    with pytest.raises(SpecError, match="one test example or more, got 0"):
        Request(pair, examples=0).load()
    with pytest.raises(SpecError, match="--runs DIR once for each; got 0"):
        Request().load()
    with pytest.raises(SpecError, match="pass --runs"):
        progression.measure(Request())
    with pytest.raises(SpecError, match="two runs, the one without penalty first; got 1"):
        Request(pair[:1]).load(pair=True)


def stored(path: Path, model: nn.Module, **about: Any) -> Path:
    shape = {"name": "small-conv", "channels": 1, "classes": 10, "multiplier": 0.25}
    values = {"model": shape, "data": "digits", "seed": 0, "recipe": {}, **about}
    save_checkpoint(path / "model.safetensors", model, {k: v for k, v in values.items() if v is not None})
    return path


def test_runs_that_cannot_be_compared_or_read(pair: tuple[Path, Path], tmp_path: Path) -> None:
    model = load_runs(pair)[0].model
    with pytest.raises(DataError, match="runs on digits and on other cannot be compared"):
        load_runs([pair[0], stored(tmp_path / "other", model, data="other")])
    for name, about in (("a", {"data": None}), ("b", {"recipe": 3}), ("c", {"seed": "one"})):
        with pytest.raises(CheckpointError, match="lacks the recipe, the seed or the data set"):
            load_runs([stored(tmp_path / name, model, **about)])
    with pytest.raises(CheckpointError, match="no such file"):
        load_runs([tmp_path / "nowhere"])


def test_networks_that_do_not_fit_their_data(pair: tuple[Path, Path]) -> None:
    run, data = load_runs(pair)[0], load_dataset("digits")
    odd = nn.Sequential(nn.Flatten(), nn.Linear(10, 10))
    with pytest.raises(DataError, match=r"cannot take the inputs of digits, \(1, 8, 8\)"):
        request._check_fit(dataclasses.replace(run, model=odd), data)
    few = nn.Sequential(nn.Flatten(), nn.Linear(64, 9))
    with pytest.raises(DataError, match="tells 9 classes apart, digits has 10"):
        request._check_fit(dataclasses.replace(run, model=few), data)


def test_a_loaded_run_is_ready_to_predict(pair: tuple[Path, Path]) -> None:
    run = load_runs(pair)[1]
    assert isinstance(run, Run)
    assert not run.model.training
    assert (run.label, run.seed, run.data, run.path) == ("l1 penalty", 0, "digits", pair[1])


def test_the_table_s_runs_are_the_default(tmp_path: Path) -> None:
    def make(*parts: str) -> None:
        path = tmp_path.joinpath(*parts, "model.safetensors")
        path.parent.mkdir(parents=True)
        path.write_bytes(b"")

    with pytest.raises(FileError, match=r"rows none and l1 here; make them with: make table1.*--runs DIR"):
        default_runs(tables=[tmp_path])
    make("vgg-like-0", "none")  # the other row is still being trained
    with pytest.raises(FileError, match="make table1"):
        default_runs(tables=[tmp_path])
    for network in ("resnet18-0", "resnet18-1", "vgg-like-1", "vgg-like-2"):
        for row in ("none", "l1", "kurtosis"):
            make(network, row)
    assert default_runs(tables=[tmp_path]) == [tmp_path / "vgg-like-1" / row for row in ("none", "l1")]
    assert default_runs(tables=[tmp_path], seeds=True) == [
        tmp_path / f"vgg-like-{seed}" / row for seed in (1, 2) for row in ("none", "l1")
    ]


def test_without_vgg_the_first_network_is_taken(tmp_path: Path) -> None:
    for row in ("none", "l1"):
        (tmp_path / "resnet18-0" / row).mkdir(parents=True)
        (tmp_path / "resnet18-0" / row / "model.safetensors").write_bytes(b"")
    want = [tmp_path / "resnet18-0" / row for row in ("none", "l1")]
    assert default_runs(tables=[tmp_path]) == want
    assert default_runs(tables=[tmp_path / "none yet", tmp_path]) == want


# The verb


def invoke(*words: object) -> tuple[int, str]:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_the_verb_draws_and_names_what_it_wrote(pair: tuple[Path, Path], tmp_path: Path) -> None:
    words = (
        "3",
        "--runs",
        pair[0],
        "--runs",
        pair[1],
        "--out",
        tmp_path,
        "--examples",
        50,
        "--seed",
        7,
        "--bits",
        "W3A8",
    )
    code, out = invoke(*words)
    assert code == 0
    names = [f"figure-3-first-order.{ending}" for ending in ("png", "svg", "json")]
    assert out.splitlines() == [str(tmp_path / name) for name in names]
    values = json.loads((tmp_path / names[2]).read_text())
    assert (values["seed"], values["bits"], values["examples"]) == (7, "W3A8", 50)
    assert values["runs"] == [str(path) for path in pair]
    assert values["data"][0]["bits"] == 3


def test_the_verb_takes_the_table_s_runs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileError, match=r"runs/table1-laptop: .*make table1"):
        invoke("6", "--out", "figures")
    for seed in (0, 1):
        network = tmp_path / "runs" / "table1-laptop" / f"vgg-like-{seed}"
        network.mkdir(parents=True)
        (network / "none").symlink_to(folder / f"base-{seed}")
        (network / "l1").symlink_to(folder / "l1-0")
    assert invoke("6", "--out", "figures")[0] == 0
    values = json.loads((tmp_path / "figures" / "figure-6-noise.json").read_text())
    assert values["runs"] == ["runs/table1-laptop/vgg-like-0/none", "runs/table1-laptop/vgg-like-0/l1"]


def test_words_that_make_no_figure(tmp_path: Path) -> None:
    for words in (["one"], ["1", "--examples", "0"], ["1", "--seed", "-1"]):
        assert invoke(*words)[0] == 2
    with pytest.raises(SpecError, match="1 to 8, got 11"):
        invoke("11", "--out", tmp_path)
    with pytest.raises(SpecError, match="W4A8 or 4,8"):
        invoke("8", "--out", tmp_path, "--bits", "four")
