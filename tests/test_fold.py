from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from views import applied, viewed

from anybit.errors import FoldError
from anybit.graph.from_torch import BATCH_NORM
from anybit.graph.view import Norm
from anybit.plan.fold import fold, folded


def trained_norm(kind: type[nn.Module], channels: int, **options: object) -> nn.Module:
    """A batch norm whose every statistic is far from its starting value."""
    norm = kind(channels, **options).double()
    with torch.no_grad():
        norm.running_mean.normal_()  # type: ignore[operator, union-attr]
        norm.running_var.uniform_(0.1, 4.0)  # type: ignore[operator, union-attr]
        if norm.weight is not None:
            norm.weight.normal_()  # type: ignore[operator, union-attr]
            norm.bias.normal_()  # type: ignore[operator, union-attr]
    return norm.eval()


def constants(norm: nn.Module, channels: int) -> Norm:
    """The constants of a batch norm, as torch tensors."""
    one = torch.ones(channels, dtype=torch.float64)
    gamma = one if norm.weight is None else norm.weight
    beta = 0 * one if norm.bias is None else norm.bias
    return Norm(gamma, beta, norm.running_mean, norm.running_var, norm.eps)  # type: ignore[arg-type]


LAYERS = {
    "conv": (nn.Conv2d(4, 6, 3), nn.BatchNorm2d, (2, 4, 5, 5), 0),
    "conv without bias": (nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d, (2, 4, 5, 5), 0),
    "depthwise": (nn.Conv2d(6, 6, 3, groups=6), nn.BatchNorm2d, (2, 6, 5, 5), 0),
    "conv1d": (nn.Conv1d(4, 6, 3, stride=2), nn.BatchNorm1d, (2, 4, 9), 0),
    "conv3d": (nn.Conv3d(2, 6, 2), nn.BatchNorm3d, (2, 2, 4, 4, 4), 0),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2), nn.BatchNorm2d, (2, 4, 5, 5), 1),
    "transposed in groups": (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), nn.BatchNorm2d, (2, 4, 5, 5), 1),
    "transposed depthwise": (nn.ConvTranspose2d(6, 6, 3, groups=6, bias=False), nn.BatchNorm2d, (2, 6, 5, 5), 1),
    "linear": (nn.Linear(4, 6), nn.BatchNorm1d, (3, 4), 0),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("affine", [True, False])
def test_one_layer_does_what_two_did(name: str, affine: bool) -> None:
    torch.manual_seed(0)
    layer, kind, shape, axis = LAYERS[name]
    layer = layer.double()
    norm = trained_norm(kind, 6, affine=affine)
    x = torch.randn(shape, dtype=torch.float64)
    groups = getattr(layer, "groups", 1)
    with torch.no_grad():
        want = norm(layer(x))
        old = 0.0 if layer.bias is None else layer.bias
        weight, bias = folded(layer.weight, old, constants(norm, 6), axis=axis, groups=groups)
        body, graph = viewed(nn.Sequential(layer, norm), x)
        known = fold(graph)
        torch.testing.assert_close(applied(body, graph)(x), want, rtol=1e-10, atol=1e-10)
    assert not [n for n in body.graph.nodes if n.target is BATCH_NORM]
    assert [n.kind for n in graph.nodes] == ["layer"]
    assert set(known) == set(graph.outputs)
    for name, value in (("0.weight", weight), ("0.bias", bias)):
        np.testing.assert_allclose(graph.constants[name], value.numpy(), rtol=1e-14)
        assert torch.equal(body.get_parameter(name), torch.from_numpy(graph.constants[name]))
    assert [(norm.path, into.path, into is graph.nodes[0]) for norm, into in graph.removed] == [("1", "1", True)]


def test_gradients_go_through_folding() -> None:
    torch.manual_seed(0)
    norm = trained_norm(nn.BatchNorm2d, 6)
    weight = torch.randn(6, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda w: folded(w, 0.0, constants(norm, 6)), weight)


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), trained_norm(nn.BatchNorm2d, 2).float())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model.train()
    body, graph = viewed(model, torch.randn(2, 1, 4, 4))
    fold(graph)
    applied(body, graph)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert model.training
    assert model[1].training is True


class Shared(nn.Module):
    """One convolution, used twice, under two batch norms: folding either would spoil the other."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.one, self.two = (trained_norm(nn.BatchNorm2d, 2).float() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.conv(self.one(self.conv(x))))


class BeforeAnything(nn.Module):
    """A batch norm with no layer in front of it, as in pre-activation networks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = trained_norm(nn.BatchNorm2d, 2).float()
        self.conv = nn.Conv2d(2, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(self.norm(x).relu())


class TwoReaders(nn.Module):
    """The convolution's own output is needed beside the batch norm's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3)
        self.norm = trained_norm(nn.BatchNorm2d, 2).float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return y + self.norm(y)


@pytest.mark.parametrize(("model", "left"), [(Shared(), 2), (BeforeAnything(), 1), (TwoReaders(), 1)])
def test_what_cannot_be_folded_stays_and_is_still_known(model: nn.Module, left: int) -> None:
    model.eval()
    x = torch.randn(2, 2, 6, 6)
    body, graph = viewed(model, x)
    known = fold(graph)
    assert len(known) == left
    assert graph.removed == []
    torch.testing.assert_close(applied(body, graph)(x), model(x))


def test_a_batch_norm_that_uses_the_batch_itself_is_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, track_running_stats=False)).eval()
    x = torch.randn(3, 1, 4, 4)
    body, graph = viewed(model, x)
    assert fold(graph) == {}
    torch.testing.assert_close(applied(body, graph)(x), model(x))


def test_statistics_that_are_not_finite_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    model[1].running_var[1] = float("nan")
    with pytest.raises(FoldError, match="1: var is not finite"):
        fold(viewed(model, torch.randn(2, 1, 4, 4))[1])


def test_channels_that_do_not_fit() -> None:
    ones = np.ones(3)
    with pytest.raises(FoldError, match="2 outputs, its batch norm has 3"):
        folded(np.ones((2, 1)), 0.0, Norm(ones, ones, ones, ones))
