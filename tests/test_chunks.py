"""Elementwise work in chunks is the plain chain, whatever the layout in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from anybit.objectives.chunks import CHUNK, chunks, extrapolate_, gated, l1_norm, signs, signs_and_l1

BIG = (16, 32, 64, 65)  # more than four chunks, and not a whole number of them


def layouts() -> dict[str, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(BIG)
    return {
        "contiguous": x,
        "channels last": x.to(memory_format=torch.channels_last),
        "transposed": x.transpose(1, 3),
        "every other": torch.randn(4, 64, 64, 65)[:, ::2],
        "expanded": torch.randn(1, 32, 64, 65).expand(BIG),
        "part of another": torch.randn(5, 32, 64, 65)[1:],
        "one channel": torch.randn(4, 1, 400, 400).to(memory_format=torch.channels_last),
        "small": torch.randn(3, 5),
        "empty": torch.randn(0, 5),
        "scalar": torch.tensor(-2.0),
        "double": x.double(),
    }


@pytest.mark.parametrize("name", layouts())
def test_every_layout_gives_the_plain_result(name: str) -> None:
    x = layouts()[name]
    found = signs(x)
    assert found.dtype == torch.int8
    assert torch.equal(found, torch.sign(x).to(torch.int8))
    torch.testing.assert_close(l1_norm(x), x.abs().sum(), rtol=1e-5, atol=1e-5)
    both = signs_and_l1(x)
    assert torch.equal(both[0], found)
    torch.testing.assert_close(both[1], l1_norm(x))
    if name == "expanded":
        return  # nothing may be written into it
    gate = (x > 0).to(torch.uint8)
    for mixed in (found, found.contiguous()):
        y = x.clone()
        assert gated(y, gate, mixed, 0.25, out=y) is y
        torch.testing.assert_close(y, torch.relu(x) + 0.25 * torch.sign(x))
    assert torch.equal(gated(x, gate, None, 0.0, out=torch.empty_like(x)), torch.relu(x))
    old = torch.randn(x.shape, dtype=x.dtype)
    y = x.clone()
    extrapolate_(y, old, 0.5)
    torch.testing.assert_close(y, old + 2 * (x - old))


def test_chunks_cover_every_entry_once_in_place() -> None:
    x = torch.zeros(BIG).to(memory_format=torch.channels_last)
    parts = list(chunks(x))
    assert len(parts) == -(-x.numel() // (CHUNK * torch.get_num_threads())) > 1
    for (part,) in parts:
        part.add_(1)
    assert torch.equal(x, torch.ones(BIG))


def test_a_view_into_a_larger_tensor_leaves_the_rest_alone() -> None:
    whole = torch.ones(18, 32, 64, 65)
    part, ones = whole[1:17], torch.ones(BIG, dtype=torch.int8)
    gated(part, ones, ones, 1.0, out=part)
    assert torch.equal(whole[1:17], torch.full(BIG, 2.0))
    assert torch.equal(whole[::17], torch.ones(2, 32, 64, 65))


def test_not_a_number_stays_visible_in_the_norm() -> None:
    x = torch.ones(BIG)
    x[3, 31, 63, 64] = float("nan")
    assert bool(l1_norm(x).isnan())
