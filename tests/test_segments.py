"""A network that is run piece by piece gives what it gives as a whole."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybit
from anybit.artifact import segments
from anybit.artifact.layers import layers_of
from anybit.artifact.reconstruct import runner


@pytest.fixture(scope="module")
def data() -> Tensor:
    return torch.randn(96, 3, 12, 12, generator=torch.Generator().manual_seed(1)).cumsum(3) / 2


def prepared(model: nn.Module, data: Tensor) -> Any:
    ways = {"method": "mse", "symmetric": False, "per_channel": True, "sensitive": "same", "helpers": ()}
    return anybit.prepare(model, data[:2], calibration=[data[:64]], **ways)


class Chain(nn.Module):
    """Layers one after the other, with a cell that sees its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.apart = nn.Conv2d(3, 8, 3, stride=2), nn.Conv2d(8, 8, 3, groups=8)
        self.cell, self.last = nn.LSTM(8, 7, batch_first=True), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.apart(F.relu(self.first(x))))
        return self.last(self.cell(x.mean(2).transpose(1, 2))[0])


class Twice(nn.Module):
    """A layer that is used twice, a way around it, and two layers side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.left, self.right = nn.Conv2d(6, 4, 1), nn.Conv2d(6, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = F.relu(x + self.again(F.relu(self.again(x))))
        return F.relu(self.left(x)) + self.right(x)


class Halves(nn.Module):
    """One node makes two values: a layer takes the one, and what comes after it both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(12, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        one, other = F.relu(self.first(x)).split(4, 1)
        return self.last(torch.cat([one, other, F.relu(self.inner(other))], 1))


@pytest.mark.parametrize("network", [Chain, Twice, Halves])
def test_values_that_have_no_room_are_computed_again(
    network: type[nn.Module], data: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net, found = prepared(network().eval(), data), []
    begins: list[set[str]] = []
    for room in (2**30, 0):
        begins.append(set())
        monkeypatch.setattr(segments, "MEMORY", room)
        cut = segments.cut

        def noted(master: Any, names: Any, known: Any, cut: Any = cut) -> Any:
            begins[-1].update(known)
            return cut(master, names, known)

        with monkeypatch.context() as patch:
            patch.setattr("anybit.artifact.reconstruct.cut", noted)
            own = copy.deepcopy(net)
            anybit.reconstruct(own, data[:64].split(16), [(4, 8)])
        own.set_bits(weights=4, activations=8)
        found.append({name: own.numbers().codes(name).values for name in own.weights})
    assert len(begins[0]) >= 2
    assert not begins[1]
    # Sums in another order may take a value across a step, and few codes with it.
    same = [float((found[0][name] == found[1][name]).mean()) for name in found[0]]
    assert np.mean(same) > 0.95, same


def test_a_piece_begins_with_what_is_known_and_needs_nothing_else(data: Tensor) -> None:
    torch.manual_seed(0)
    master = prepared(Twice().eval(), data).as_master()
    by_name = {layer.weight.name: layer for layer in layers_of(master)}
    inner = by_name["left.weight"].uses[0].value
    float_widths = dict.fromkeys(master.plan.widths(anybit.Bits()), 32)
    feed = {"x": data[:2].numpy()}
    values = runner(master, master.plan, float_widths, [inner])(feed)
    whole = runner(master, master.plan, float_widths, master.outputs)(feed)
    rest = runner(master, master.plan, float_widths, master.outputs, known={inner})({inner: values[inner]})
    assert all(np.array_equal(rest[name], whole[name]) for name in master.outputs)
    needs = segments.behind(master.model.graph, {layer.weight.place for layer in by_name.values()})
    assert needs[inner] == {by_name["first.weight"].weight.place, by_name["again.weight"].weight.place}
