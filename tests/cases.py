"""The shared table of networks: small, each with its input and its loss, each for a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybit.models import build_model


@dataclass(frozen=True)
class Case:
    """A network to try things on. `inputs(n)` are positional arguments for a batch of n, or a dict of named ones."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    loss: Callable[[Any, int], Tensor]
    data_free: bool = True
    """Whether batch norm alone gives every activation range."""

    def run(self, model: nn.Module, inputs: Any) -> Any:
        return model(**inputs) if isinstance(inputs, dict) else model(*inputs)

    def closure(self, model: nn.Module, n: int = 32, dtype: torch.dtype = torch.float32) -> Callable[[], Tensor]:
        """The loss of one fixed batch."""
        inputs = torch.utils._pytree.tree_map_only(
            Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, self.inputs(n)
        )
        return lambda: self.loss(self.run(model, inputs), n)


def images(*shape: int) -> Callable[[int], tuple[Tensor]]:
    return lambda n: (torch.randn(n, *shape),)


def cross_entropy(output: Any, n: int) -> Tensor:
    return F.cross_entropy(output, torch.arange(n) % output.shape[1])


def warmed_up(model: nn.Module, inputs: Callable[[int], Any], rounds: int = 20) -> nn.Module:
    """Give batch norm parameters unlike its starting ones, and statistics that are those of the network."""
    model.train()
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    with torch.no_grad():
        for module in norms:
            module.weight.uniform_(0.5, 1.5)
            module.bias.normal_(0, 0.3)
        for _ in range(rounds if norms else 0):
            model(*inputs(16))
    return model


class Functional(nn.Module):
    """Functional and in-place ReLUs, one module used twice, a residual sum written with +=."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.norm_a, self.norm_b, self.norm_c = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm_a(self.a(x)))
        y = F.relu(self.norm_b(self.b(x)), inplace=True)
        y = self.norm_c(self.c(y))
        y += x
        y = self.relu(y)
        y = F.max_pool2d(torch.relu_(y * 1.0), 2)
        return self.head(y.mean((2, 3)))


class Pooled(nn.Module):
    """Pooling of one kind between convolutions, without batch norm."""

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.LeakyReLU(0.1), pool, nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))


class Block(nn.Module):
    """A transformer block: LayerNorm, fused attention, a GELU between two linear layers."""

    def __init__(self, size: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.proj = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.heads, self.head = heads, nn.Linear(size, 5)

    def forward(self, x: Tensor) -> Tensor:
        n, length, size = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, length, 3, self.heads, size // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, length, size)
        x = x + self.proj(attended)
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(x.mean(1))


class Recurrent(nn.Module):
    """An LSTM and a GRU in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(6, 8, batch_first=True), nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.gru(self.lstm(x)[0])[0][:, -1]))


class TwoInputs(nn.Module):
    """Several inputs by name, a dict as output, a head that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.vector = nn.Conv2d(1, 4, 3), nn.Linear(6, 4)
        self.join, self.mean, self.other = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 2)

    def forward(self, picture: Tensor, features: Tensor) -> dict[str, Tensor]:
        a = F.hardswish(self.image(picture)).mean((2, 3))
        hidden = F.selu(self.join(torch.cat([a, F.elu(self.vector(features))], 1)))
        return {"mean": self.mean(hidden), "other": self.other(hidden)}


class Zoo(nn.Module):
    """Every kink that is replayed, once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(12))
        self.prelu = nn.PReLU(12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        functions = [
            F.relu6, F.hardtanh, F.hardswish, lambda t: F.relu6(t + 3) / 6, F.selu, self.prelu, torch.abs, F.leaky_relu,
            lambda t: t.clamp(min=-0.5, max=0.5), lambda t: F.threshold(t, 0.1, -0.2),
            lambda t: torch.maximum(t, 0.3 * t.flip(1)), lambda t: t.view(-1, 3, 4).max(1)[0].repeat(1, 3),
        ]  # fmt: skip
        for layer, function in zip(self.layers, functions, strict=True):
            x = x + function(layer(x))
        return self.head(F.silu(x, inplace=True))


def _model(name: str, width: float, channels: int = 3, size: int = 32, classes: int = 10) -> Callable[[], nn.Module]:
    build = lambda: build_model(name, channels=channels, classes=classes, multiplier=width)  # noqa: E731
    return lambda: warmed_up(build(), images(channels, size, size), rounds=4)


def _squared(output: dict[str, Tensor], n: int) -> Tensor:
    return (output["mean"].squeeze(1) - torch.linspace(-1, 1, n, dtype=output["mean"].dtype)).pow(2).mean()


def _two_inputs(n: int) -> dict[str, Tensor]:
    return {"picture": torch.randn(n, 1, 6, 6), "features": torch.randn(n, 6)}


CASES = [
    Case("small-conv", _model("small-conv", 0.5, 1, 8), images(1, 8, 8), cross_entropy),
    Case("vgg-like", _model("vgg-like", 0.125), images(3, 32, 32), cross_entropy),
    Case("resnet18", _model("resnet18-cifar", 0.125), images(3, 32, 32), cross_entropy),
    Case("mobilenetv2", _model("mobilenetv2-cifar", 0.25), images(3, 32, 32), cross_entropy),
    Case("functional", lambda: warmed_up(Functional(), images(3, 8, 8)), images(3, 8, 8), cross_entropy),
    Case("max-pool", lambda: Pooled(nn.MaxPool2d(3, 2, padding=1)), images(3, 12, 12), cross_entropy, False),
    Case("average-pool", lambda: Pooled(nn.AvgPool2d(2)), images(3, 12, 12), cross_entropy, False),
    Case("transformer", Block, images(7, 16), cross_entropy, False),
    Case("recurrent", Recurrent, images(5, 6), cross_entropy, False),
    Case("dropout", lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 5)), images(8),
         cross_entropy, False),
    Case("two-inputs", TwoInputs, _two_inputs, _squared, False),
    Case("kinks", Zoo, images(12), cross_entropy, False),
]  # fmt: skip
