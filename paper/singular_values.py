"""Appendix C: what `‖WᵀW - I‖²` asks of the singular values, and how far a reshaped kernel's are from the layer's.

- `‖WᵀW - I‖² = Σ (σ_i² - 1)²`: a fourth power of the singular values. The trace form grows with their square only.
- A convolution's kernel is penalized as the matrix (output channels, everything else), but the operator it stands
  for has other singular values. With circular padding they are those of the kernel's Fourier transform, one small
  matrix per frequency; with zero padding and strides the largest comes from power iteration on the layer itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybit.errors import SpecError
from anybit.objectives.orthogonal import Form, as_matrix, orthogonality

ITERATIONS, SETTLED = 2_000, 1e-10
"""Power iteration stops when the norm moves by less than this share, or after so many rounds."""

FAR = 1e3
"""A multiple of a weight at which its penalty has long been a pure power."""


def reshaped_values(kernel: Tensor) -> Tensor:
    """Return the singular values of a kernel as the penalty sees it, largest first.

    >>> reshaped_values(torch.tensor([[[[3.0, 4.0]]]]))
    tensor([5.])
    """
    values: Tensor = torch.linalg.svdvals(as_matrix(kernel))
    return values


def fourth_power(weight: Tensor) -> Tensor:
    """Return `Σ (σ_i² - 1)²` over the singular values.

    >>> fourth_power(torch.diag(torch.tensor([2.0, 1.0, 0.0])))
    tensor(10.)
    """
    return (reshaped_values(weight).square() - 1).square().sum()


def growth(weight: Tensor, form: Form = "fourth-power") -> float:
    """Return the power p such that the penalty of `c·W` grows as `c^p` for large c.

    >>> round(growth(torch.eye(2)), 3), round(growth(torch.eye(2), "trace"), 3)
    (4.0, 2.0)
    """
    size = float(weight.abs().max())
    if size == 0:
        return 0.0  # every multiple of zero is zero
    far = FAR / size
    return math.log10(float(orthogonality(10 * far * weight, form)) / float(orthogonality(far * weight, form)))


def circular_values(kernel: Tensor, size: tuple[int, int], *, groups: int = 1) -> Tensor:
    """Return all singular values of a convolution with stride 1 and circular padding on images of `size`.

    Averaging two neighbours on a ring of two has the gains |1 ± 1|:

    >>> circular_values(torch.tensor([[[[1.0, 1.0]]]]), (1, 2))
    tensor([2., 0.])
    """
    if kernel.dim() != 4 or kernel.shape[0] % groups:
        raise SpecError(f"a kernel of shape (output, input, height, width) is expected, got {tuple(kernel.shape)}")
    parts = []
    for part in kernel.chunk(groups):
        gains = torch.fft.fft2(_wrapped(part, size))
        parts.append(torch.linalg.svdvals(gains.permute(2, 3, 0, 1)).flatten())
    return torch.cat(parts).sort(descending=True).values


def _wrapped(kernel: Tensor, size: tuple[int, int]) -> Tensor:
    """Lay a kernel on an image, around its edges where it is larger."""
    out = kernel.new_zeros(*kernel.shape[:2], *size)
    for row in range(kernel.shape[2]):
        for column in range(kernel.shape[3]):
            out[..., row % size[0], column % size[1]] += kernel[..., row, column]
    return out


def operator_norm(function: Callable[[Tensor], Tensor], shape: tuple[int, ...], *, seed: int = 0) -> float:
    """Return the largest singular value of a linear function of tensors of `shape`, by power iteration.

    >>> round(operator_norm(lambda x: 3 * x, (4,)), 6)
    3.0
    """
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    before = 0.0
    for _ in range(ITERATIONS):
        x = (x / torch.linalg.vector_norm(x)).requires_grad_()
        y = function(x)
        norm = float(torch.linalg.vector_norm(y.detach()))
        if norm == 0 or abs(norm - before) <= SETTLED * norm:
            return norm
        (x,) = torch.autograd.grad(y, x, y.detach())
        before = norm
    return before


@dataclass(frozen=True)
class LayerValues:
    """One layer: the penalty computed in two ways, and its largest singular value in three."""

    layer: str
    shape: tuple[int, ...]
    penalty: float
    """‖WᵀW - I‖²."""
    fourth_power: float
    """Σ (σ_i² - 1)²."""
    growth: float
    """The power with which the penalty grows, and that of its trace form."""
    trace_growth: float
    reshaped: float
    """Largest singular value of the reshaped kernel."""
    circular: float | None
    """The same of the convolution with circular padding and stride 1; `None` for a linear layer."""
    operator: float
    """The same of the layer as the network uses it."""


def layer_values(model: nn.Module, example: Tensor) -> list[LayerValues]:
    """Return the values of every convolution and linear layer; `example` tells how large its images are."""
    shapes: dict[nn.Module, tuple[int, ...]] = {}

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        shapes[module] = tuple(args[0].shape[1:])

    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    handles = [layer.register_forward_pre_hook(note) for layer in layers.values()]
    try:
        with torch.no_grad():
            model.eval()(example)
    finally:
        for handle in handles:
            handle.remove()
    return [_values(name, layer, shapes[layer]) for name, layer in layers.items() if layer in shapes]


def _values(name: str, layer: nn.Conv2d | nn.Linear, shape: tuple[int, ...]) -> LayerValues:
    weight = layer.weight.detach().double()
    circular = None
    if isinstance(layer, nn.Conv2d):
        circular = float(circular_values(weight, (shape[1], shape[2]), groups=layer.groups)[0])
    return LayerValues(
        layer=name,
        shape=tuple(weight.shape),
        penalty=float(orthogonality(weight)),
        fourth_power=float(fourth_power(weight)),
        growth=growth(weight),
        trace_growth=growth(weight, "trace"),
        reshaped=float(reshaped_values(weight)[0]),
        circular=circular,
        operator=operator_norm(_linear_part(layer, weight), (1, *shape)),
    )


def _linear_part(layer: nn.Conv2d | nn.Linear, weight: Tensor) -> Callable[[Tensor], Tensor]:
    if isinstance(layer, nn.Linear):
        return lambda x: F.linear(x, weight)
    return lambda x: F.conv2d(x, weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)
