"""Sizes of pictures and lengths of sequences are free in simulation, file and runtime where the network allows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import Block, images, warmed_up
from torch import Tensor, nn

import anybit
from anybit.errors import DataError, SpecError
from anybit.models import build_model
from anybit.simulate.network import QuantizedNetwork


class Segments(nn.Module):
    """A picture in, a picture of scores out, at half the size."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6)
        self.b = nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.norm(self.a(x))))


class Upscales(nn.Module):
    """A picture that comes back at its own size, which the forward pass asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6)
        self.b = nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.a(x)))
        return self.b(F.interpolate(y, size=x.shape[2:], mode="nearest"))


class Tokens(nn.Module):
    """A language model without positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.block = nn.Embedding(11, 16), Block(16)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.block(self.table(tokens))


class Positions(nn.Module):
    """A transformer with one learned vector for each of seven places."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.block = nn.Parameter(torch.randn(7, 16)), Block(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x + self.places)


class Flat(nn.Module):
    """A linear layer over every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 2, 3, padding=1), nn.Linear(128, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x)).flatten(1))


class Remembers(nn.Module):
    """Keeps something for each size that it saw, which nobody can follow for a size without a number."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(1, 2, 3, padding=1)
        self.sizes: dict[int, float] = {}

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.a(x)).mean((2, 3)) * self.sizes.setdefault(x.shape[3], x.shape[3] / 8)


def small_conv() -> nn.Module:
    return warmed_up(build_model("small-conv", channels=3, classes=5, multiplier=0.5), images(3, 16, 16))


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape)


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 11, shape)


FREE: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], tuple[int, ...], list[tuple[int, ...]]]] = {
    "classifier": (small_conv, floats, (2, 3, 16, 16), [(1, 3, 24, 16), (3, 3, 32, 40)]),
    "segments": (Segments, floats, (2, 3, 16, 16), [(1, 3, 8, 20), (3, 3, 31, 17)]),
    "upscales": (Upscales, floats, (2, 3, 16, 16), [(1, 3, 8, 20), (3, 3, 32, 18)]),
    "transformer": (Block, floats, (2, 7, 16), [(1, 4, 16), (3, 20, 16)]),
    "tokens": (Tokens, tokens, (2, 7), [(1, 4), (3, 20)]),
}


def prepared(model: nn.Module, make: Callable[..., Tensor], shape: tuple[int, ...]) -> QuantizedNetwork:
    return anybit.prepare(model.eval(), make(*shape), calibration=[make(8, *shape[1:])], preset="paper")


@pytest.mark.parametrize("name", FREE)
def test_sizes_are_free_in_simulation_file_and_runtime(name: str, tmp_path: Path) -> None:
    build, make, shape, others = FREE[name]
    torch.manual_seed(0)
    model = build().eval()
    net = prepared(model, make, shape)
    anybit.save(net, tmp_path / "net.onnx")
    session = anybit.load(tmp_path / "net.onnx")
    anybit.export(tmp_path / "net.onnx", tmp_path / "w8.onnx", weights=8, activations=8)
    plain = _runtime(tmp_path / "w8.onnx")
    for sizes in [shape, *others]:
        x = make(*sizes)
        with torch.no_grad():
            want = model(x)
        for bits in (32, 8):
            net.set_bits(weights=bits, activations=bits)
            session.set_bits(weights=bits, activations=bits)
            with torch.no_grad():
                simulated = net(x)
            ran = session.run(x.numpy())
            assert simulated.shape == want.shape == ran.shape
            close = 1e-5 if bits == 32 else 0.05  # a sum on the border between two codes may fall on either side
            assert float((simulated - torch.from_numpy(ran)).abs().max()) <= close * float(want.abs().max())
            if bits == 32:
                torch.testing.assert_close(simulated, want, rtol=1e-4, atol=1e-4)
        again = plain.run(None, {plain.get_inputs()[0].name: x.numpy()})[0]
        assert np.array_equal(again, ran)


def _runtime(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


FIXED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...], int, int]] = {
    "positions": (Positions, (2, 7, 16), (2, 9, 16), 1, 7),
    "flat": (Flat, (2, 1, 8, 8), (2, 1, 8, 12), 3, 8),
    "remembers": (Remembers, (2, 1, 8, 8), (2, 1, 8, 12), 3, 8),
    "channels": (Segments, (2, 3, 16, 16), (2, 4, 16, 16), 1, 3),
    "features": (Block, (2, 7, 16), (2, 7, 12), 2, 16),
}


@pytest.mark.parametrize("name", FIXED)
def test_a_fixed_size_is_named_with_the_reason(name: str, tmp_path: Path) -> None:
    build, shape, other, dimension, size = FIXED[name]
    torch.manual_seed(0)
    net = prepared(build(), floats, shape)
    with pytest.raises(SpecError) as caught:
        net(torch.randn(other))
    text = str(caught.value)
    assert f"dimension {dimension} at {size}" in text
    assert "size of a weight" in text
    assert str(other) in text
    with torch.no_grad():
        net(torch.randn(5, *shape[1:]))
    anybit.save(net, tmp_path / "net.onnx")
    session = anybit.load(tmp_path / "net.onnx")
    assert session.run(np.zeros((5, *shape[1:]), np.float32)).shape[0] == 5
    with pytest.raises(DataError, match=r"has the shape .* x .*; got"):
        session.run(np.zeros(other, np.float32))


def test_the_plan_shows_which_sizes_are_free() -> None:
    torch.manual_seed(0)
    text = str(prepared(Block(), floats, (2, 7, 16)).plan)
    (line,) = [line for line in text.splitlines() if line.startswith("x ")] or [text.splitlines()[2]]
    assert "x7x" not in line
