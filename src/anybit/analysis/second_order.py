"""Appendix B: the worst second-order term, `max ΔᵀHΔ` over ‖Δ‖∞ ≤ δ, which is hard to compute and easy to enclose.

- Exactly, for a dozen weights. The maximum lies on a face of the cube where H is negative definite in the free
  coordinates (elsewhere one could move on to a smaller face without losing), so it is enough to try every sign of
  the coordinates with `H_ii ≥ 0`, and for the others both signs and the place where the slope is zero.
- From above: dropping the rank constraint of `N = ΔΔᵀ` leaves the semidefinite program `max tr(HN)` with `N ⪰ 0` and
  `N_ii ≤ δ²`. Its dual variables y, repaired until `diag(y) - H ⪰ 0` holds exactly, prove the bound `δ² Σ y_i`,
  however early the solver stopped.
- From below: signs of random Gaussian vectors with covariance N. For a positive semidefinite H this reaches
  2/π of the bound on average.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anybit.common.progress import Start, quiet
from anybit.errors import MissingDependency, SpecError
from anybit.objectives.quantizable import quantizable_weights
from anybit.quant.capture import evaluating
from anybit.quant.uniform import make_grid, min_max
from anybit.spec import QuantSpec

MOST_ENUMERATED = 16
"""Weights for which all corners of the cube are tried: 3¹⁶ faces at most take a minute."""

SINGULAR = 1e-12
"""An eigenvalue that is smaller than this share of the largest entry counts as zero."""

SIZES = (12, 50)
"""How many weights of a layer are looked at together."""

ROUNDINGS = 2_000


def worst_case(matrix: Tensor) -> float:
    """Return `max xᵀHx` over the cube ‖x‖∞ ≤ 1, by going through its faces.

    Convex in both coordinates, the corner (1, 1) is the worst; where the first coordinate is concave the maximum of
    `-4x² + 2x` is inside, at 1/4.

    >>> worst_case(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
    6.0
    >>> worst_case(torch.tensor([[-4.0, 1.0], [1.0, 0.0]]))
    0.25
    """
    matrix = _symmetric(matrix)
    if len(matrix) > MOST_ENUMERATED:
        raise SpecError(f"enumeration is for {MOST_ENUMERATED} weights or fewer, got {len(matrix)}; use `relax`")
    concave = [i for i in range(len(matrix)) if matrix[i, i] < 0]
    free_sets = (free for size in range(len(concave) + 1) for free in itertools.combinations(concave, size))
    return max(0.0, *(_best_on_faces(matrix, free) for free in free_sets))


def _best_on_faces(matrix: Tensor, free: Sequence[int]) -> float:
    """Return the maximum over the faces where the `free` coordinates are inside and the others at ±1."""
    fixed = [i for i in range(len(matrix)) if i not in free]
    corners = _signs(len(fixed)).to(matrix)
    values = ((corners @ matrix[fixed][:, fixed]) * corners).sum(1)
    if not free:
        return float(values.max())
    inner = matrix[list(free)][:, list(free)]
    if float(torch.linalg.eigvalsh(inner)[-1]) >= -SINGULAR * float(inner.abs().max()):
        return 0.0  # no strict maximum in there: a smaller face has one as good
    pull = corners @ matrix[fixed][:, list(free)]
    place = -torch.linalg.solve(inner, pull.T).T
    inside = (place.abs() <= 1).all(1)
    values = values + (place * pull).sum(1)
    return float(values[inside].max()) if bool(inside.any()) else 0.0


def _signs(n: int) -> Tensor:
    """Return the corners of the n-cube, one of each opposite pair."""
    if n == 0:
        return torch.ones(1, 0)
    codes = torch.arange(2 ** (n - 1))[:, None] >> torch.arange(n)
    return 1.0 - 2.0 * (codes & 1)


@dataclass(frozen=True)
class Relaxation:
    """The solved semidefinite program over the cube of size one: a proven upper bound, and the matrix N."""

    upper: float
    moments: Tensor


def relax(matrix: Tensor) -> Relaxation:
    """Solve `max tr(HN)` over `N ⪰ 0`, `N_ii ≤ 1`; needs cvxpy."""
    cvxpy = _cvxpy()
    matrix = _symmetric(matrix)
    n, scale = len(matrix), float(matrix.abs().max()) or 1.0
    moments = cvxpy.Variable((n, n), PSD=True)
    box = cvxpy.diag(moments) <= 1
    # Entries of order one: the solver's tolerances are absolute.
    problem = cvxpy.Problem(cvxpy.Maximize(cvxpy.trace((matrix / scale).numpy() @ moments)), [box])
    problem.solve(solver=cvxpy.CLARABEL)
    if moments.value is None:
        raise SpecError(f"the semidefinite program was not solved ({problem.status}); is the matrix finite?")
    multipliers = scale * torch.as_tensor(box.dual_value, dtype=matrix.dtype)
    upper = min(proven_bound(matrix, y) for y in (multipliers, torch.zeros_like(multipliers)))
    return Relaxation(upper, torch.as_tensor(moments.value, dtype=matrix.dtype))


def proven_bound(matrix: Tensor, multipliers: Tensor) -> float:
    """Return an upper bound of `xᵀHx` over the cube from any multipliers y: `Σ y_i`, once `diag(y) - H ⪰ 0`.

    For then `xᵀHx ≤ Σ y_i x_i² ≤ Σ y_i`. What is missing to `⪰ 0` is added to every y_i; with y = 0 that leaves
    n times the largest eigenvalue.

    >>> proven_bound(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([2.0, 1.0]))
    3.0
    >>> proven_bound(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.zeros(2))
    4.0
    """
    multipliers = multipliers.clamp(min=0)
    missing = float(torch.linalg.eigvalsh(matrix - torch.diag(multipliers))[-1])
    return float(multipliers.sum()) + len(matrix) * max(0.0, missing)


def round_randomly(matrix: Tensor, moments: Tensor, *, trials: int, generator: torch.Generator) -> float:
    """Return the best `xᵀHx` among random points of the cube: signs of Gaussian vectors with covariance N.

    Where H_ii is negative the corner need not be best, and the sign is taken times √N_ii.

    >>> ones = torch.ones(2, 2)
    >>> round_randomly(ones, ones, trials=1, generator=torch.Generator().manual_seed(0))
    4.0
    """
    matrix = _symmetric(matrix)
    values, vectors = torch.linalg.eigh(_symmetric(moments))
    root = vectors * values.clamp(min=0).sqrt()
    drawn = torch.randn(trials, len(matrix), dtype=matrix.dtype, generator=generator) @ root.T
    reach = torch.where(matrix.diagonal() < 0, moments.diagonal().clamp(0, 1).sqrt(), torch.ones(()).to(matrix))
    points = torch.where(drawn < 0, -1.0, 1.0).to(matrix) * reach
    return max(0.0, float(((points @ matrix) * points).sum(1).max()))


def hessian_block(loss: Tensor, weight: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradient and Hessian of a loss with respect to some entries of a weight, numbered as if it were flat.

    >>> w = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    >>> gradient, hessian = hessian_block((w[0] * w[1] ** 2).sum(), w, torch.tensor([0, 1]))
    >>> gradient.tolist(), hessian.tolist()
    ([4.0, 4.0], [[0.0, 4.0], [4.0, 2.0]])
    """
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    entries = gradient.flatten()[index]
    rows = [
        torch.autograd.grad(entry, weight, retain_graph=True, materialize_grads=True)[0].flatten()[index]
        for entry in entries
    ]
    return entries.detach(), _symmetric(torch.stack(rows))


@dataclass(frozen=True)
class SecondOrder:
    """The worst loss increase that n weights of one layer can cause at one width, term by term, in nats."""

    layer: str
    n: int
    delta: float
    """Half a quantization bin."""
    least: float
    """Smallest eigenvalue of the Hessian; below zero it is not convex."""
    first_order: float
    """δ·‖∇L‖₁."""
    rounding: float
    """½ ΔᵀHΔ at the best of the random points: a lower bound."""
    exact: float | None
    """½ max ΔᵀHΔ, or `None` where there are too many corners to try."""
    relaxation: float
    """½ of the semidefinite program: an upper bound."""
    spectral: float
    """½ δ²·n·λ_max: the upper bound from the eigenvalues alone."""


def second_order(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    *,
    bits: int = 4,
    sizes: Sequence[int] = SIZES,
    layers: Sequence[str] | None = None,
    seed: int = 0,
    start: Start = quiet,
) -> list[SecondOrder]:
    """Enclose the worst second-order term for random sets of weights, by default of the first and the last layer."""
    weights = quantizable_weights(model)
    if not weights:
        raise SpecError(f"{type(model).__name__} has no weight of two or more dimensions to look at")
    names = list(dict.fromkeys((next(iter(weights)), next(reversed(weights))))) if layers is None else list(layers)
    if unknown := [name for name in names if name not in weights]:
        raise SpecError(f"no weight {unknown[0]!r}; the weights are {', '.join(weights)}")
    rows = []
    advance = start("sets of weights", len(names) * len(sizes))
    for name, wanted in itertools.product(names, sizes):
        generator = torch.Generator().manual_seed(seed)
        weight = weights[name]
        index = torch.randperm(weight.numel(), generator=generator)[:wanted]
        with evaluating(model):
            gradient, hessian = hessian_block(loss(model), weight, index)
        delta = float(make_grid(*min_max(weight.detach()), QuantSpec(bits)).scale) / 2
        rows.append(enclose(name.removesuffix(".weight"), gradient.double(), hessian.double(), delta, generator))
        advance(1)
    return rows


def enclose(layer: str, gradient: Tensor, hessian: Tensor, delta: float, generator: torch.Generator) -> SecondOrder:
    """Return every bound for one gradient and Hessian; the exact value too where it can be had."""
    n, half = len(hessian), delta**2 / 2
    relaxed = relax(hessian)
    eigenvalues = torch.linalg.eigvalsh(hessian)
    return SecondOrder(
        layer=layer,
        n=n,
        delta=delta,
        least=float(eigenvalues[0]),
        first_order=delta * float(gradient.abs().sum()),
        rounding=half * round_randomly(hessian, relaxed.moments, trials=ROUNDINGS, generator=generator),
        exact=half * worst_case(hessian) if n <= MOST_ENUMERATED else None,
        relaxation=half * relaxed.upper,
        spectral=half * n * max(0.0, float(eigenvalues[-1])),
    )


def _symmetric(matrix: Tensor) -> Tensor:
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) == 0:
        raise SpecError(f"a Hessian is square and not empty, got {tuple(matrix.shape)}")
    if not math.isfinite(float(matrix.abs().sum())):
        raise SpecError("the Hessian has infinite or NaN entries; are the weights and the loss finite?")
    return (matrix + matrix.T) / 2


def _cvxpy() -> Any:
    try:
        import cvxpy
    except ImportError as error:
        raise MissingDependency("cvxpy", "paper", "the semidefinite relaxation") from error
    return cvxpy
