"""Defensive Quantization's penalty: `‖WᵀW - I‖²`, which pulls every singular value of a layer towards one."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from anybit.errors import SpecError
from anybit.objectives.strength import Strength
from anybit.objectives.weights import SummedWeightPenalty

Form = Literal["fourth-power", "trace"]


def as_matrix(weight: Tensor) -> Tensor:
    """Return a convolution's weight as the matrix (output channels, everything else); a matrix stays what it is."""
    return weight.flatten(1)


def orthogonality(weight: Tensor, form: Form = "fourth-power") -> Tensor:
    """Return `‖WᵀW - I‖² = Σ (σ² - 1)²`, or in its softer form `|tr(WᵀW - I)| = |Σ (σ² - 1)|`.

    The smaller of WᵀW and WWᵀ is used, so that as many singular values are asked for as there are.

    >>> two = 2 * torch.eye(2)
    >>> float(orthogonality(two)), float(orthogonality(two, "trace")), float(orthogonality(torch.eye(2)))
    (18.0, 6.0, 0.0)
    """
    matrix = as_matrix(weight)
    rank = min(matrix.shape)
    if form == "trace":
        return (matrix.pow(2).sum() - rank).abs()
    product = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    return (product - torch.eye(rank, dtype=matrix.dtype, device=matrix.device)).pow(2).sum()


class OrthogonalPenalty(SummedWeightPenalty):
    """Adds `strength · Σ ‖WᵀW - I‖²` to the loss (or the softer trace form of the paper's appendix C)."""

    name = "orthogonal"

    def __init__(
        self,
        model: nn.Module,
        *,
        strength: Strength = "auto",
        loss: float = 0.01,
        form: Form = "fourth-power",
        layers: str | list[str] | None = None,
    ) -> None:
        if form not in get_args(Form):
            raise SpecError(f"form must be one of {', '.join(get_args(Form))}; got {form!r}")
        super().__init__(model, strength=strength, loss=loss, layers=layers)
        self.form = form

    def value(self, weight: Tensor) -> Tensor:
        """Return the penalty of one weight tensor."""
        return orthogonality(weight, self.form)
