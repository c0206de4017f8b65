"""A few runs in PyTorch: inputs that are made up like the example, and where they set ranges."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import anybit
from anybit.graph.from_torch import read_torch
from anybit.simulate.capture import call_arguments, capture
from anybit.simulate.few_runs import _counts, made_up_calls


class Reader(nn.Module):
    """A small transformer without batch norm: letters, a mask and a loudness come in."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.head = nn.Linear(16, 4)

    def forward(self, letters: Tensor, mask: Tensor, loud: Tensor) -> Tensor:
        x = self.layer(self.table(letters) * mask[..., None])
        return self.head(x.mean(1) * loud)


def example() -> dict[str, Tensor]:
    return {
        "letters": torch.zeros(2, 7, dtype=torch.long),
        "mask": torch.ones(2, 7, dtype=torch.long),
        "loud": torch.ones(2, 1),
    }


def reader() -> Reader:
    torch.manual_seed(0)
    return Reader().eval()


def test_letters_and_numbers_are_drawn_and_masks_stay() -> None:
    body = capture(reader(), example())
    first, *rest = made_up_calls(body, call_arguments(example()), {"loud": (2.0, 3.0)})
    assert first[1]["letters"].eq(0).all()
    letters = torch.cat([call[1]["letters"] for call in rest])
    assert letters.min() >= 0
    assert 30 < letters.max() < 50
    assert all(call[1]["mask"].eq(1).all() for call in rest)
    loud = torch.cat([call[1]["loud"] for call in rest])
    assert loud.min() >= 2
    assert loud.max() <= 3
    assert loud.std() > 0.05


def test_a_mask_with_minus_infinity_stays() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return (x + mask).softmax(-1)

    shut = torch.tensor([[0.0, -torch.inf, 0.0]]).repeat(2, 1)
    calls = list(made_up_calls(capture(Masked(), (torch.randn(2, 3), shut)), ((torch.randn(2, 3), shut), {}), {}))
    assert all(torch.equal(call[0][1], shut) for call in calls)
    assert not torch.equal(calls[1][0][0], calls[2][0][0])


def test_without_data_and_batch_norm_a_network_still_gets_all_its_ranges() -> None:
    with pytest.warns(UserWarning, match="guessed from made-up inputs; to be sure pass calibration=loader"):
        net = anybit.prepare(reader(), example())
    sources = {a.ranges[0][1].source for a in net.plan.activations if a.kind == "activation"}
    assert {"made-up inputs", "softmax stays inside"} <= sources
    real = example() | {"letters": torch.randint(0, 50, (2, 7))}
    exact = reader()(**real)
    net.set_bits(weights=8, activations=8)
    assert float((net(**real) - exact).detach().abs().max() / exact.detach().std()) < 0.1


def test_what_the_user_said_of_an_input_is_where_it_is_drawn() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    ends = {}
    for top in (1.0, 10.0):
        with pytest.warns(UserWarning, match="range of 1: guessed"):
            net = anybit.prepare(model, torch.zeros(2, 8), input_range=(0.0, top))
        (middle,) = [a for a in net.plan.activations if a.ranges and a.ranges[0][1].source == "made-up inputs"]
        ends[top] = middle.ranges[0][1].high
    assert ends[10.0] > 5 * ends[1.0]


def test_an_example_of_real_size_says_how_large_inputs_are() -> None:
    torch.manual_seed(0)
    model, real = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), 500 * torch.rand(64, 8)
    with pytest.warns(UserWarning, match="made-up"):
        net = anybit.prepare(model, real[:2])
    net.set_bits(weights=8, activations=8)
    with torch.no_grad():
        assert float((net(real) - model(real)).abs().mean() / model(real).std()) < 0.05


@pytest.mark.parametrize("batch", [2, 64])
def test_multiplications_are_those_of_one_input_whatever_the_example(batch: int) -> None:
    body = capture(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5)).eval(), torch.randn(batch, 3, 8, 8)
    )
    assert sorted(_counts(body, read_torch(body)).values()) == [144 * 5, 4 * 36 * 27]
