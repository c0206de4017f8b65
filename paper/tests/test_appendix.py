from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from typer.testing import CliRunner

from anybit.errors import FileError, SpecError
from anybit.objectives.orthogonal import orthogonality
from anybit.task.checkpoint import save_checkpoint
from paper import hoeffding, second_order, singular_values
from paper.appendix import appendix_rows, command
from paper.runs import small_run
from paper.second_order import enclose, hessian_block, proven_bound, relax, round_randomly, worst_case
from paper.singular_values import (
    circular_values,
    fourth_power,
    growth,
    layer_values,
    operator_norm,
    reshaped_values,
)

sizes = st.integers(1, 200)
positive = st.floats(0.01, 100)
shares = st.floats(0.001, 0.999)
seeds = st.integers(0, 2**32 - 1)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def symmetric(n: int, seed: int) -> Tensor:
    """A random matrix with eigenvalues of both signs."""
    half = torch.randn(n, n, dtype=torch.float64, generator=seeded(seed))
    return half + half.T


def semidefinite(n: int, seed: int, rank: int | None = None) -> Tensor:
    root = torch.randn(n, rank or n, dtype=torch.float64, generator=seeded(seed))
    return root @ root.T


# A: Hoeffding's bound


def tail_bound(n: int, delta: float, t: float) -> float:
    """Hoeffding's inequality, as the module's head has it."""
    return min(1.0, 2 * math.exp(-32 * t**2 / (n * delta**4)))


@given(n=sizes, delta=positive, epsilon=shares)
def test_radius_and_tail_say_the_same(n: int, delta: float, epsilon: float) -> None:
    radius = hoeffding.radius(n, delta, epsilon)
    assert tail_bound(n, delta, radius) == pytest.approx(epsilon)
    assert hoeffding.radius(4 * n, delta, epsilon) == pytest.approx(2 * radius)
    assert hoeffding.radius(n, 2 * delta, epsilon) == pytest.approx(4 * radius)


@given(delta=positive, share=st.floats(0, 0.5))
def test_the_bound_holds_for_one_weight_where_the_probability_is_known(delta: float, share: float) -> None:
    t = share * delta**2 / 4
    low, high = delta**2 / 12 - t, delta**2 / 12 + t
    inside = 2 / delta * (min(math.sqrt(high), delta / 2) - math.sqrt(max(0.0, low)))
    assert 1 - inside <= tail_bound(1, delta, t) + 1e-12


def test_drawn_noise_has_the_moments_of_the_uniform_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    n, delta, trials = 20, 3.0, 5_000
    powers = hoeffding.sample_powers(n, delta, trials=trials, generator=seeded(1))
    variance = n * delta**4 / 180
    assert powers.shape == (trials,)
    assert len(powers.unique()) == trials
    assert float(powers.mean()) == pytest.approx(n * delta**2 / 12, abs=5 * math.sqrt(variance / trials))
    assert float(powers.var()) == pytest.approx(variance, rel=0.15)
    monkeypatch.setattr(hoeffding, "CHUNK", 7 * n)  # drawn in parts, the last one shorter
    parts = hoeffding.sample_powers(n, delta, trials=trials, generator=seeded(1))
    assert torch.equal(parts, powers)


def test_check_bound_holds_draws_against_the_bound() -> None:
    rows = hoeffding.check_bound((5, 500), delta=2.0, epsilon=0.1, trials=2_000, seed=3)
    assert [row.n for row in rows] == [5, 500]
    for row in rows:
        powers = hoeffding.sample_powers(row.n, 2.0, trials=2_000, generator=seeded(3))
        away = (powers - row.expected).abs()
        assert row.expected == row.n / 3
        assert row.mean == float(powers.mean())
        assert row.radius == hoeffding.radius(row.n, 2.0, 0.1)
        assert row.outside <= 0.1
        assert float((away <= row.quantile).double().mean()) == pytest.approx(0.9, abs=0.001)
        assert row.quantile <= row.radius
        assert row.length == pytest.approx(float((powers / row.n).sqrt().mean()) / 2)
    assert rows[1].length == pytest.approx(1 / math.sqrt(12), rel=0.01)
    assert rows == hoeffding.check_bound((5, 500), delta=2.0, epsilon=0.1, trials=2_000, seed=3)
    assert rows[0].mean != hoeffding.check_bound((5,), delta=2.0, trials=2_000, seed=4)[0].mean


def test_some_draws_are_beyond_a_radius_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hoeffding, "radius", lambda n, delta, epsilon: 0.0)
    assert hoeffding.check_bound((10,), trials=100)[0].outside == 1.0


@pytest.mark.parametrize("epsilon", [0.0, 1.0, math.nan])
def test_values_that_make_no_bound(epsilon: float) -> None:
    with pytest.raises(SpecError, match="a probability between 0 and 1"):
        hoeffding.radius(1, 1.0, epsilon)


# B: the second order


def on_a_grid(matrix: Tensor, points: int = 41) -> float:
    """The maximum over a fine grid of the cube."""
    line = torch.linspace(-1, 1, points, dtype=matrix.dtype)
    x = torch.cartesian_prod(*[line] * len(matrix)).reshape(-1, len(matrix))
    return float(((x @ matrix) * x).sum(1).max())


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 3), seed=seeds, shift=st.floats(-4, 2))
def test_the_exact_worst_case_is_that_of_a_fine_grid(n: int, seed: int, shift: float) -> None:
    matrix = symmetric(n, seed) + shift * torch.eye(n, dtype=torch.float64)
    exact, found = worst_case(matrix), on_a_grid(matrix)
    slack = float(torch.linalg.eigvalsh(matrix).abs().max()) * n * 0.025**2  # half a step in each free coordinate
    assert found - 1e-9 <= exact <= found + slack


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 7), seed=seeds)
def test_a_convex_worst_case_is_at_a_corner(n: int, seed: int) -> None:
    matrix = semidefinite(n, seed)
    corners = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=n)), dtype=torch.float64)
    assert worst_case(matrix) == pytest.approx(float(((corners @ matrix) * corners).sum(1).max()))


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 6), seed=seeds, factor=st.floats(0.1, 10))
def test_the_worst_case_scales_and_does_not_care_for_order(n: int, seed: int, factor: float) -> None:
    matrix = symmetric(n, seed)
    order = torch.randperm(n, generator=seeded(seed))
    assert worst_case(factor * matrix) == pytest.approx(factor * worst_case(matrix))
    assert worst_case(matrix[order][:, order]) == pytest.approx(worst_case(matrix))


def test_without_a_direction_that_grows_the_worst_is_zero() -> None:
    assert worst_case(-semidefinite(5, 0)) == 0.0
    assert worst_case(torch.zeros(3, 3)) == 0.0


def test_a_face_without_a_strict_maximum_is_left_to_its_edges() -> None:
    """`-s² + s·z` with s = x + y: the best is 1/4, on a line that ends at an edge."""
    matrix = torch.tensor([[-1.0, -1.0, 0.5], [-1.0, -1.0, 0.5], [0.5, 0.5, 0.0]], dtype=torch.float64)
    assert worst_case(matrix) == pytest.approx(0.25)
    assert worst_case(-torch.ones(4, 4)) == 0.0


@settings(max_examples=15, deadline=None)
@given(n=st.integers(1, 8), seed=seeds, convex=st.booleans())
def test_rounding_is_below_and_the_relaxation_above(n: int, seed: int, convex: bool) -> None:
    hessian = semidefinite(n, seed) if convex else symmetric(n, seed)
    row = enclose("layer", torch.ones(n, dtype=torch.float64), hessian, 0.5, seeded(seed))
    assert row.exact == pytest.approx(worst_case(hessian) / 8)
    assert row.first_order == pytest.approx(n / 2)
    assert row.least == pytest.approx(float(torch.linalg.eigvalsh(hessian)[0]))
    slack = 1e-9 * (1 + row.spectral)
    assert 0 <= row.rounding <= row.exact + slack
    assert row.exact <= row.relaxation + slack
    assert row.relaxation <= row.spectral + slack
    if convex:
        assert row.rounding >= 2 / math.pi * row.relaxation - slack


def test_the_triangle_where_the_relaxation_is_known_not_to_be_tight() -> None:
    """Three coordinates that all want to differ: two can, three vectors in the plane at 120 degrees do better."""
    triangle = torch.eye(3, dtype=torch.float64) - 1
    relaxed = relax(triangle)
    assert worst_case(triangle) == 2.0
    assert relaxed.upper == pytest.approx(3.0, rel=1e-6)
    assert relaxed.upper >= 3.0 - 1e-12
    assert torch.allclose(relaxed.moments, 1.5 * torch.eye(3, dtype=torch.float64) - 0.5, atol=1e-4)
    assert round_randomly(triangle, relaxed.moments, trials=100, generator=seeded(0)) == pytest.approx(2.0, abs=1e-3)


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_the_relaxation_is_solved_well_at_every_scale(scale: float) -> None:
    matrix = scale * symmetric(10, 0)
    relaxed = relax(matrix)
    assert float(torch.linalg.eigvalsh(relaxed.moments)[0]) >= -1e-6
    assert float(relaxed.moments.diagonal().max()) <= 1 + 1e-6
    assert float((matrix * relaxed.moments).sum()) == pytest.approx(relaxed.upper, rel=1e-5)  # primal meets dual
    assert relax(torch.zeros(2, 2, dtype=torch.float64)).upper == pytest.approx(0.0, abs=1e-6)


@given(n=st.integers(1, 6), seed=seeds, size=st.floats(-5, 5))
def test_any_multipliers_prove_a_bound(n: int, seed: int, size: float) -> None:
    generator = seeded(seed)
    matrix = symmetric(n, seed)
    multipliers = size * torch.rand(n, dtype=torch.float64, generator=generator)
    points = 2 * torch.rand(200, n, dtype=torch.float64, generator=generator) - 1
    points = torch.cat([points, points.sign()])
    assert float(((points @ matrix) * points).sum(1).max()) <= proven_bound(matrix, multipliers) + 1e-9


def test_rounding_stays_inside_the_cube_where_the_corner_is_not_best() -> None:
    matrix = torch.tensor([[-4.0, 1.0], [1.0, 0.0]], dtype=torch.float64)  # best at (1/4, 1), worth 1/4
    relaxed = relax(matrix)
    assert round_randomly(matrix, relaxed.moments, trials=50, generator=seeded(0)) == pytest.approx(0.25, abs=1e-3)
    ones = torch.ones(2, 2, dtype=torch.float64)
    assert round_randomly(ones, 9 * ones, trials=5, generator=seeded(0)) == 4.0
    assert round_randomly(-ones, 9 * ones, trials=5, generator=seeded(0)) == 0.0
    dented = ones - 1.1 * torch.eye(2, dtype=torch.float64)  # 2xy - x²/10 - y²/10, growing beyond the cube
    assert round_randomly(dented, 9 * ones, trials=5, generator=seeded(0)) == pytest.approx(1.8)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3)).double()


def batch_loss(model: nn.Module) -> Tensor:
    x = torch.randn(8, 4, dtype=torch.float64, generator=seeded(1))
    return F.cross_entropy(model(x), torch.arange(8) % 3)


def test_the_hessian_is_that_of_autograd() -> None:
    model = network().eval()
    weight = model[0].weight  # type: ignore[index]
    index = torch.tensor([0, 7, 19, 3])

    def loss_of(value: Tensor) -> Tensor:
        return torch.func.functional_call(model, {"0.weight": value}, (x,)).logsumexp(1).sum()

    x = torch.randn(8, 4, dtype=torch.float64, generator=seeded(1))
    whole: Any = torch.autograd.functional.hessian(loss_of, weight.detach())
    slope = torch.autograd.functional.jacobian(loss_of, weight.detach())
    gradient, hessian = hessian_block(model(x).logsumexp(1).sum(), weight, index)
    assert torch.allclose(hessian, whole.reshape(20, 20)[index][:, index], atol=1e-10)
    assert torch.allclose(gradient, slope.flatten()[index])


def test_second_order_looks_at_the_first_and_the_last_layer() -> None:
    model = network().train()
    rows = second_order.second_order(model, batch_loss, bits=3, sizes=(3, 17), seed=5)
    assert [(row.layer, row.n) for row in rows] == [("0", 3), ("0", 17), ("3", 3), ("3", 15)]
    assert [row.exact is None for row in rows] == [False, True, False, False]
    assert all(p.grad is None for p in model.parameters())
    for row in rows:
        weight = dict(model.named_parameters())[f"{row.layer}.weight"]
        assert row.delta == pytest.approx(float(weight.detach().abs().max()) / 3 / 2)
    assert rows[2].least >= -1e-9  # cross-entropy is convex in the last layer
    model.eval()
    weight = model[0].weight  # type: ignore[index]
    index = torch.randperm(20, generator=seeded(5))[:3]
    gradient, hessian = hessian_block(batch_loss(model), weight, index)
    assert rows[0].first_order == pytest.approx(rows[0].delta * float(gradient.abs().sum()))
    assert rows[0].exact == pytest.approx(rows[0].delta ** 2 / 2 * worst_case(hessian))
    assert rows == second_order.second_order(model, batch_loss, bits=3, sizes=(3, 17), seed=5)
    (other,) = second_order.second_order(model, batch_loss, sizes=(3,), layers=["3.weight"], seed=6)
    assert (other.layer, other.exact == rows[2].exact) == ("3", False)


def test_what_has_no_second_order() -> None:
    with pytest.raises(SpecError, match=r"no weight 'x'; the weights are 0\.weight, 3\.weight"):
        second_order.second_order(network(), batch_loss, layers=["x"])
    with pytest.raises(SpecError, match="ReLU has no weight"):
        second_order.second_order(nn.ReLU(), batch_loss)
    with pytest.raises(SpecError, match=r"square and not empty, got \(2, 3\)"):
        worst_case(torch.ones(2, 3))
    with pytest.raises(SpecError, match="infinite or NaN"):
        relax(torch.full((2, 2), math.nan))
    with pytest.raises(SpecError, match="16 weights or fewer, got 17"):
        worst_case(torch.eye(17))


def test_without_cvxpy_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cvxpy", None)
    with pytest.raises(FileError, match=r"relaxation needs cvxpy: pip install -r paper/requirements.txt"):
        relax(torch.eye(2))


# C: singular values


@given(rows=st.integers(1, 6), columns=st.integers(1, 6), seed=seeds)
def test_the_penalty_is_a_fourth_power_of_the_singular_values(rows: int, columns: int, seed: int) -> None:
    weight = torch.randn(rows, columns, 2, dtype=torch.float64, generator=seeded(seed))
    matrix = weight.flatten(1)
    assert float(fourth_power(weight)) == pytest.approx(float(orthogonality(weight)))
    # The larger of the two products has singular values of zero on top, each one away from one.
    larger = matrix.T @ matrix if rows <= 2 * columns else matrix @ matrix.T
    full = float((larger - torch.eye(len(larger), dtype=torch.float64)).square().sum())
    assert full == pytest.approx(float(fourth_power(weight)) + abs(rows - 2 * columns))
    assert growth(weight) == pytest.approx(4, abs=1e-3)
    assert growth(weight, "trace") == pytest.approx(2, abs=1e-3)


def test_nothing_grows_out_of_zero() -> None:
    assert growth(torch.zeros(2, 2)) == 0.0


def circular_matrix(kernel: Tensor, size: tuple[int, int], groups: int) -> Tensor:
    """The whole operator, column by column: what the convolution makes of each pixel."""
    height, width = size
    inputs = kernel.shape[1] * groups
    pixels = torch.eye(inputs * height * width, dtype=kernel.dtype).reshape(-1, inputs, height, width)
    rows = torch.arange(height + kernel.shape[2] - 1) % height
    columns = torch.arange(width + kernel.shape[3] - 1) % width
    return F.conv2d(pixels[:, :, rows][:, :, :, columns], kernel, groups=groups).flatten(1).T


@settings(max_examples=40, deadline=None)
@given(
    outputs=st.integers(1, 3),
    inputs=st.integers(1, 3),
    taps=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    size=st.tuples(st.integers(1, 5), st.integers(1, 4)),
    groups=st.integers(1, 2),
    seed=seeds,
)
def test_circular_singular_values_are_those_of_the_explicit_matrix(
    outputs: int, inputs: int, taps: tuple[int, int], size: tuple[int, int], groups: int, seed: int
) -> None:
    kernel = torch.randn(groups * outputs, inputs, *taps, dtype=torch.float64, generator=seeded(seed))
    values = circular_values(kernel, size, groups=groups)
    explicit = torch.linalg.svdvals(circular_matrix(kernel, size, groups))
    assert values.shape == explicit.shape
    assert torch.allclose(values, explicit, atol=1e-9)
    if taps[0] <= size[0] and taps[1] <= size[1]:
        assert float(values.square().sum()) == pytest.approx(size[0] * size[1] * float(kernel.square().sum()))
        reshaped = max(float(reshaped_values(part)[0]) for part in kernel.chunk(groups))
        assert float(values[0]) <= math.sqrt(taps[0] * taps[1]) * reshaped + 1e-9


def test_a_kernel_of_the_wrong_shape() -> None:
    with pytest.raises(SpecError, match=r"\(output, input, height, width\) is expected, got \(2, 3\)"):
        circular_values(torch.ones(2, 3), (4, 4))
    with pytest.raises(SpecError, match="is expected"):
        circular_values(torch.ones(3, 1, 1, 1), (4, 4), groups=2)


@pytest.mark.parametrize("layer", [nn.Conv2d(2, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, groups=4), nn.Linear(6, 3)])
def test_the_norm_in_use_is_that_of_the_whole_operator(layer: nn.Module) -> None:
    torch.manual_seed(0)
    shape = (6,) if isinstance(layer, nn.Linear) else (layer.in_channels, 6, 5)  # type: ignore[union-attr]
    (row,) = layer_values(layer, torch.randn(2, *shape))
    layer = layer.double()
    inputs = math.prod(shape)
    basis = torch.cat([torch.zeros(1, inputs), torch.eye(inputs)]).double().reshape(-1, *shape)
    with torch.no_grad():
        columns = layer(basis).flatten(1)
    explicit = torch.linalg.svdvals(columns[1:] - columns[:1])  # without the bias
    assert row.operator == pytest.approx(float(explicit[0]), rel=1e-6)
    assert row.reshaped == pytest.approx(float(torch.linalg.svdvals(layer.weight.detach().flatten(1))[0]))  # type: ignore[operator, union-attr]
    if isinstance(layer, nn.Linear):
        assert row.circular is None
        assert row.operator == pytest.approx(row.reshaped)
    else:
        values = circular_values(layer.weight.detach(), (6, 5), groups=layer.groups)  # type: ignore[arg-type]
        assert row.circular == pytest.approx(float(values[0]))


def test_the_norm_of_a_function_that_forgets_its_input() -> None:
    assert operator_norm(lambda x: 0 * x, (3,)) == 0.0


def test_power_iteration_ends_where_two_values_are_close(monkeypatch: pytest.MonkeyPatch) -> None:
    gains = torch.tensor([1.0, 1.0 - 1e-12], dtype=torch.float64)
    assert operator_norm(lambda x: gains * x, (2,)) == pytest.approx(1.0)
    monkeypatch.setattr(singular_values, "ITERATIONS", 1)
    assert 0 < operator_norm(lambda x: gains * x, (2,)) <= 1


class WithSpare(nn.Module):
    """Two convolutions, a linear layer, and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 1), nn.Linear(8, 2)
        self.spare = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(F.max_pool2d(self.a(x), 2)).flatten(1))  # type: ignore[no-any-return]


def test_layers_are_seen_as_the_network_uses_them() -> None:
    model = WithSpare()
    rows = layer_values(model, torch.randn(2, 1, 4, 4))
    assert [(row.layer, row.shape) for row in rows] == [("a", (2, 1, 3, 3)), ("b", (2, 2, 1, 1)), ("head", (2, 8))]
    weight = model.a.weight.detach().double()
    assert rows[0].circular == pytest.approx(float(circular_values(weight, (4, 4))[0]))
    for row in rows:
        assert row.penalty == pytest.approx(row.fourth_power)
        assert (row.growth, row.trace_growth) == (pytest.approx(4, abs=1e-3), pytest.approx(2, abs=1e-3))
    assert all(not module._forward_pre_hooks for module in model.modules())
    with pytest.raises(RuntimeError):
        layer_values(model, torch.randn(2, 3, 4, 4))
    assert all(not module._forward_pre_hooks for module in model.modules())


# The verb


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a network that was trained on the spot."""
    model, _ = small_run(seed=1)
    path = tmp_path_factory.mktemp("appendix")
    shape = {"name": "small-conv", "channels": 1, "classes": 10, "multiplier": 0.25}
    save_checkpoint(path / "model.safetensors", model, {"model": shape, "data": "digits", "seed": 1, "recipe": {}})
    return path


def invoke(*words: object) -> tuple[int, str]:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_appendix_a_prints_the_bound() -> None:
    code, out = invoke("a")
    assert code == 0
    assert "10000" in out
    assert "833.3" in out
    code, out = invoke("a", "--json", "--seed", 2)
    values = json.loads(out)
    assert (values["appendix"], values["seed"]) == ("a", 2)
    assert {"commit", "machine", "versions", "date"} <= set(values["origin"])
    assert [row["n"] for row in values["rows"]] == list(hoeffding.SIZES)
    assert values["rows"][0]["mean"] == hoeffding.check_bound(seed=2)[0].mean


def test_appendix_b_encloses_the_second_order(folder: Path) -> None:
    code, out = invoke("b", "--run", folder, "--json")
    assert code == 0
    rows = json.loads(out)["rows"]
    assert [(row["layer"], row["n"]) for row in rows] == [
        ("features.0", 12), ("features.0", 36), ("classifier", 12), ("classifier", 50)
    ]  # fmt: skip
    for row in rows:
        assert 0 <= row["rounding"] <= row["relaxation"] + 1e-12
        if row["exact"] is not None:
            assert row["rounding"] - 1e-12 <= row["exact"] <= row["relaxation"] + 1e-12
    code, table = invoke("b", "--run", folder)
    assert code == 0
    for row in rows:
        assert f"{row['relaxation']:.4g}" in table
    assert "…" not in table


def test_appendix_c_lists_every_layer(folder: Path) -> None:
    code, out = invoke("c", "--run", folder)
    assert code == 0
    assert "…" not in out
    for row in appendix_rows("c", run=folder):
        assert f"{row.operator:.4g}" in out  # type: ignore[union-attr]
        assert f" {row.layer} " in out  # type: ignore[union-attr]


def test_without_a_run_a_small_network_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def note(*, seed: int, **more: Any) -> Any:
        asked.append(seed)
        return small_run(seed=seed, **more)

    monkeypatch.setattr("paper.appendix.small_run", note)
    rows = appendix_rows("c", seed=4)
    assert asked == [4]
    assert len(rows) == 8


def test_the_seed_reaches_the_choice_of_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr("paper.appendix.second_order", lambda model, loss, **more: seen.update(more) or [])
    assert appendix_rows("b", run=folder, seed=9) == []
    assert seen["seed"] == 9


def test_an_appendix_that_is_not_there() -> None:
    with pytest.raises(SpecError, match="a, b and c; got 'd'"):
        appendix_rows("d")
