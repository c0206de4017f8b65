"""The penalties beside the gradient one: orthogonality, kurtosis, noise, sums of them, schedules."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracles import finite_difference
from test_gradient import flat, grads
from test_loops import Net, batch, loss_of
from torch import Tensor, nn

from anybit.errors import PenaltyError, SpecError
from anybit.graph.view import Norm
from anybit.objectives.gradient import GradientPenalty
from anybit.objectives.kurtosis import KurtosisPenalty, kurtosis
from anybit.objectives.noise import UniformNoise, bin_noise
from anybit.objectives.orthogonal import OrthogonalPenalty, orthogonality
from anybit.objectives.quantizable import Products
from anybit.objectives.schedule import last_epochs
from anybit.plan.fold import folded


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4), (4, 2, 3, 3), (8, 1, 3, 3)])
def test_orthogonality_is_a_power_of_the_singular_values(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape, dtype=torch.float64)
    values = torch.linalg.svdvals(weight.flatten(1))
    assert float(orthogonality(weight)) == pytest.approx(float((values**2 - 1).pow(2).sum()))
    assert float(orthogonality(weight, "trace")) == pytest.approx(abs(float((values**2 - 1).sum())))
    q = torch.linalg.qr(torch.randn(6, 4, dtype=torch.float64))[0]
    assert float(orthogonality(q)) == pytest.approx(0, abs=1e-20)
    assert float(orthogonality(q.T)) == pytest.approx(0, abs=1e-20)


def test_kurtosis_of_known_distributions() -> None:
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(200_000, generator=generator, dtype=torch.float64)
    normal = torch.randn(200_000, generator=generator, dtype=torch.float64)
    assert float(kurtosis(uniform)) == pytest.approx(1.8, abs=0.01)
    assert float(kurtosis(normal)) == pytest.approx(3.0, abs=0.06)
    assert float(kurtosis(3 * uniform + 7)) == pytest.approx(float(kurtosis(uniform)))


PENALTIES = {
    "orthogonal": lambda m: OrthogonalPenalty(m, strength=0.3),
    "trace": lambda m: OrthogonalPenalty(m, strength=0.3, form="trace"),
    "kurtosis": lambda m: KurtosisPenalty(m, strength=0.3),
}


@pytest.mark.parametrize("name", PENALTIES)
def test_weight_penalties_add_their_gradient_to_the_loss(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(8, 2)).double()
    x, y = torch.randn(4, 1, 3, 3).double(), torch.tensor([0, 1, 1, 0])
    penalty = PENALTIES[name](model)
    closure = lambda: F.cross_entropy(model(x), y)  # noqa: E731

    def objective() -> float:
        with torch.no_grad():
            return float(closure() + 0.3 * penalty.total())

    want = finite_difference(objective, list(model.parameters()))
    step = penalty.backward(closure)
    for parameter, expected in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-6, atol=1e-8)
    assert step.terms[penalty.name] == pytest.approx(float(penalty.total().detach()))
    assert step.loss == pytest.approx(float(closure().detach()))
    penalty.factor = 0.0
    model.zero_grad()
    penalty.backward(closure)
    got = flat(grads(model))
    model.zero_grad()
    closure().backward()
    torch.testing.assert_close(got, flat(grads(model)))


def test_a_sum_is_the_sum_of_its_parts() -> None:
    torch.manual_seed(0)
    model = Net()
    closure = loss_of(model)
    parts = [
        GradientPenalty(model, weight=1e-3, activation=1e-3),
        KurtosisPenalty(model, strength=0.1),
        OrthogonalPenalty(model, strength=0.01),
    ]
    model.zero_grad()
    closure().backward()
    plain = flat(grads(model))
    extra = []
    for part in parts:
        model.zero_grad()
        part.backward(closure)
        extra.append(flat(grads(model)) - plain)
    model.zero_grad()
    total = parts[0] + parts[1] + parts[2]
    step = total.backward(closure)
    torch.testing.assert_close(flat(grads(model)) - plain, sum(extra), rtol=1e-3, atol=1e-5)
    assert set(step.terms) == {"kurtosis", "orthogonal"}
    total.factor = 0.5
    assert {part.factor for part in parts} == {0.5}
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    total.factor = 1.0
    model.zero_grad()
    total.backward(closure, scaler=scaler)
    torch.testing.assert_close(flat(grads(model)) / 64 - plain, sum(extra), rtol=1e-3, atol=1e-5)
    with pytest.raises(PenaltyError, match="one gradient penalty"):
        parts[0] + GradientPenalty(model, weight=1.0)


def test_bad_settings() -> None:
    model = Net()
    with pytest.raises(SpecError, match="strength is a strength of zero or more"):
        KurtosisPenalty(model, strength=-1.0)
    with pytest.raises(SpecError, match="form must be one of"):
        OrthogonalPenalty(model, strength=1.0, form="cube")  # type: ignore[arg-type]
    with pytest.raises(PenaltyError, match="no weight"):
        KurtosisPenalty(nn.BatchNorm1d(3), strength=1.0)
    with pytest.raises(SpecError, match="widths must be 2 to 16"):
        UniformNoise(model, widths=(1,))
    with pytest.raises(SpecError, match="at least one width"):
        UniformNoise(model, widths=())
    for strength in (-0.1, float("nan"), float("inf")):
        with pytest.raises(SpecError, match="strength is zero or more, in units of the bin"):
            UniformNoise(model, strength=strength)
    with pytest.raises(SpecError, match="neither"):
        UniformNoise(model, weights=False, activations=False)


def test_noise_is_uniform_over_one_bin_of_the_folded_weight() -> None:
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2.0)
        norm.running_var.uniform_(0.5, 2.0)
    with torch.no_grad(), Products() as found:
        norm.eval()(conv(torch.randn(2, 4, 5, 5)))
    folding = found.foldings[id(conv.weight)]
    weight = conv.weight.detach()
    constants = Norm(norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps)
    weights = folded(conv.weight, conv.bias, constants)[0].detach()
    half = float(weights.abs().max()) / 7 / 2  # four bits: codes up to 7
    draws = torch.stack([bin_noise(weight, 4, folding) for _ in range(400)])
    in_folded = draws * folding.factor(4)
    assert float(in_folded.abs().max()) <= half * (1 + 1e-5)
    assert float(in_folded.abs().max()) > 0.99 * half
    assert float(in_folded.mean()) == pytest.approx(0, abs=0.01 * half)
    assert float(in_folded.var()) == pytest.approx(half**2 / 3, rel=0.02)  # that of a uniform distribution
    plain = torch.stack([bin_noise(weight, 4) for _ in range(50)])
    assert float(plain.abs().max()) <= float(weight.abs().max()) / 14 * (1 + 1e-5)


def test_weaker_noise_moves_weights_less() -> None:
    moved = []
    x, y = batch()
    for strength in (1.0, 0.5, 0.0):
        torch.manual_seed(0)
        model = Net()
        seen: list[Tensor] = []

        def closure(model: nn.Module = model, seen: list[Tensor] = seen) -> Tensor:
            seen.append(model.a.weight.detach().clone())
            return F.cross_entropy(model(x), y)

        UniformNoise(model, widths=(3,), activations=False, strength=strength).backward(closure)
        moved.append(seen[-1] - model.a.weight.detach())
    torch.testing.assert_close(moved[1], moved[0] / 2, rtol=1e-4, atol=1e-6)
    assert float(moved[0].abs().max()) > 0
    assert float(moved[2].abs().max()) == 0


def test_noise_leaves_weights_alone_and_its_gradient_is_that_of_the_perturbed_point() -> None:
    torch.manual_seed(0)
    model = Net()
    before = {k: v.clone() for k, v in model.named_parameters()}
    penalty = UniformNoise(model, widths=(3,), activations=False)
    seen: list[Tensor] = []
    x, y = batch()

    def closure() -> Tensor:
        seen.append(model.a.weight.detach().clone())
        return F.cross_entropy(model(x), y)

    step = penalty.backward(closure)
    assert all(torch.equal(v, before[k]) for k, v in model.named_parameters())
    assert torch.equal(seen[0], before["a.weight"])  # the run that looks for batch norms
    assert not torch.equal(seen[1], before["a.weight"])
    got = flat(grads(model))
    assert int(model.norm.num_batches_tracked) == 1
    model.zero_grad()
    with torch.no_grad():
        model.a.weight.copy_(seen[1])
    other = model.b.weight.detach().clone()
    F.cross_entropy(model(x), y).backward()
    assert not torch.allclose(got, flat(grads(model)))  # b and head were perturbed too
    assert torch.equal(other, before["b.weight"])
    assert step.activation_norm is None


@pytest.mark.parametrize("strength", [1.0, 0.25, 0.0])
def test_activation_noise_has_the_size_of_a_bin(strength: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 1000), nn.ReLU())
    x = torch.randn(50, 4)
    clean = model(x).detach()
    seen: list[Tensor] = []

    def closure() -> Tensor:
        seen.append(model(x))
        return seen[-1].sum()

    penalty = UniformNoise(model, widths=(4,), weights=False, strength=2 * strength)
    penalty.factor = 0.5  # a schedule on its way
    penalty.backward(closure)
    noise = (seen[-1] - clean).detach()
    half = strength * float(clean.max()) / 15 / 2
    assert float(noise.abs().max()) <= half * (1 + 1e-5)
    assert float(noise.var()) == pytest.approx(half**2 / 3, rel=0.02)


@pytest.mark.parametrize("spelling", ["module", "function", "statement"])
def test_noise_behind_functions_that_write_into_their_input(spelling: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
            self.relu = nn.ReLU(inplace=spelling == "module")

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            if spelling == "statement":
                y.relu_()  # what it returns is not looked at
            else:
                y = self.relu(y) if spelling == "module" else F.relu(y, True)
            self.hidden = y.detach().clone()
            return self.b(y)

    class Plain(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.hidden = F.relu(self.a(x))
            return self.b(self.hidden)

    x, y = torch.randn(5, 6), torch.arange(5) % 3
    results = []
    for kind in (Net, Plain):
        torch.manual_seed(0)
        net = kind()
        UniformNoise(net, widths=(3,), weights=False).backward(lambda net=net: F.cross_entropy(net(x), y))
        results.append((net.hidden.detach(), [p.grad for p in net.parameters()]))
    assert not torch.equal(results[0][0], F.relu(net.a(x)).detach())
    torch.testing.assert_close(results[0], results[1])


def test_noise_under_the_gradient_penalty_is_the_same_in_both_passes() -> None:
    torch.manual_seed(0)
    model = Net(drop=0.3)
    outputs: list[Tensor] = []
    model.head.register_forward_hook(lambda module, args, out: outputs.append(args[0].detach().clone()))
    penalty = GradientPenalty(model, weight=1e-9, activation=1e-9) + UniformNoise(model, widths=(4,))
    penalty.backward(loss_of(model))
    first, second = outputs[-2:]
    torch.testing.assert_close(first, second, rtol=1e-2, atol=1e-2)
    assert torch.equal(first == 0, second == 0)


def test_noise_training_survives_low_widths_better() -> None:
    """The point of it, on a problem small enough for a test: less loss under two-bit rounding."""
    from grids import quantize_tensor

    from anybit.spec import QuantSpec

    x, y = batch(64)

    def trained(noise: bool) -> float:
        torch.manual_seed(0)
        model = Net(norm=False)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        penalty = UniformNoise(model, widths=(2,), activations=False) if noise else GradientPenalty(model, weight=0.0)
        for _ in range(300):
            penalty.backward(lambda: F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for layer in (model.a, model.b, model.head):
                layer.weight.copy_(quantize_tensor(layer.weight, QuantSpec(2)))
            return float(F.cross_entropy(model(x), y))

    assert trained(noise=True) < 0.8 * trained(noise=False)


def test_schedules() -> None:
    assert [last_epochs(e, epochs=20) for e in (0, 4, 5, 19)] == [0.0, 0.0, 1.0, 1.0]
    assert [last_epochs(e, epochs=3, last=99) for e in range(3)] == [1.0, 1.0, 1.0]
    assert [last_epochs(e, epochs=3, last=0) for e in range(3)] == [0.0, 0.0, 0.0]
    ramp = [last_epochs(e, epochs=10, last=6, ramp=3) for e in range(10)]
    assert ramp == sorted(ramp)
    assert ramp[-1] == 1.0
    with pytest.raises(SpecError, match="not negative"):
        last_epochs(0, epochs=3, last=-1)
