"""Whole architectures, small: what people bring to `prepare`. Each with inputs for a batch of n."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from cases import images, warmed_up
from torch import Tensor, nn

from anybit.models import build_model


@dataclass(frozen=True)
class Architecture:
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    data_free: bool = True
    """Whether batch norm alone gives every activation range."""

    def run(self, model: nn.Module, inputs: Any) -> Any:
        return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def block(before: int, after: int, size: int = 3, *, activation: nn.Module | None = None, **options: Any) -> nn.Module:
    """Convolution, batch norm, activation."""
    layers: list[nn.Module] = [nn.Conv2d(before, after, size, padding=size // 2, bias=False, **options)]
    layers.append(nn.BatchNorm2d(after))
    return nn.Sequential(*layers, *([] if activation is None else [activation]))


class Squeeze(nn.Module):
    """Squeeze and excitation: a gate per channel, computed from the channel means."""

    def __init__(self, channels: int, gate: nn.Module) -> None:
        super().__init__()
        self.down, self.up, self.gate = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1), gate

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))))


class Inverted(nn.Module):
    """The inverted residual of MobileNetV3 and EfficientNet: expand, depthwise, squeeze, project, add."""

    def __init__(self, channels: int, activation: Callable[[], nn.Module], gate: nn.Module) -> None:
        super().__init__()
        wide = 2 * channels
        self.expand = block(channels, wide, 1, activation=activation())
        self.depthwise = block(wide, wide, activation=activation(), groups=wide)
        self.squeeze = Squeeze(wide, gate)
        self.project = block(wide, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(self.squeeze(self.depthwise(self.expand(x))))


class Mobile(nn.Module):
    """Stem, two inverted residuals, head with dropout."""

    def __init__(self, activation: Callable[[], nn.Module], gate: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stem = block(3, 8, activation=activation(), stride=2)
        self.blocks = nn.Sequential(*(Inverted(8, activation, gate()) for _ in range(2)))
        self.head = block(8, 16, 1, activation=activation())
        self.classifier = nn.Sequential(nn.Linear(16, 12), activation(), nn.Dropout(0.2), nn.Linear(12, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.head(self.blocks(self.stem(x))).mean((2, 3)))


class Dense(nn.Module):
    """DenseNet: every layer reads the concatenation of all before it, behind batch norm and ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8 + 4 * i) for i in range(3))
        self.layers = nn.ModuleList(nn.Conv2d(8 + 4 * i, 4, 3, padding=1, bias=False) for i in range(3))
        self.norm, self.transition = nn.BatchNorm2d(20), nn.Conv2d(20, 8, 1)
        self.last, self.head = nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for norm, layer in zip(self.norms, self.layers, strict=True):
            features.append(layer(F.relu(norm(torch.cat(features, 1)))))
        x = F.avg_pool2d(self.transition(F.relu(self.norm(torch.cat(features, 1)))), 2)
        return self.head(F.relu(self.last(x)).mean((2, 3)))


class UNet(nn.Module):
    """Down, up by transposed convolution and by interpolation, with skips; one label per pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (block(a, b, activation=nn.ReLU()) for a, b in ((3, 8), (8, 16), (16, 16)))
        self.up = nn.Sequential(nn.ConvTranspose2d(16, 16, 2, stride=2, bias=False), nn.BatchNorm2d(16))
        self.four, self.five = block(32, 8, activation=nn.ReLU()), block(16, 8, activation=nn.ReLU())
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.one(x)
        two = self.two(F.max_pool2d(one, 2))
        three = self.three(F.max_pool2d(two, 2))
        four = self.four(torch.cat([F.relu(self.up(three)), two], 1))
        five = self.five(torch.cat([F.interpolate(four, scale_factor=2, mode="nearest"), one], 1))
        return self.head(five)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, num_labels=3,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def tokens(n: int) -> dict[str, Tensor]:
    mask = torch.ones(n, 9, dtype=torch.long)
    mask[:, 6:] = 0
    return {"input_ids": torch.randint(0, 50, (n, 9)), "attention_mask": mask}


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=4,
        num_labels=5,
    )  # fmt: skip
    return ViTForImageClassification(config)


def resnet50() -> nn.Module:
    return build_model("resnet50", channels=3, classes=10, multiplier=0.125)


def warm(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: warmed_up(build(), images(3, 32, 32), rounds=5).eval()


ARCHITECTURES = [
    Architecture("resnet50", warm(resnet50), images(3, 32, 32)),
    Architecture("mobilenetv3", warm(lambda: Mobile(nn.Hardswish, nn.Hardsigmoid)), images(3, 32, 32)),
    Architecture("efficientnet", warm(lambda: Mobile(nn.SiLU, nn.Sigmoid)), images(3, 32, 32)),
    Architecture("densenet", warm(Dense), images(3, 32, 32)),
    Architecture("unet", warm(UNet), images(3, 32, 32)),
    Architecture("hf-vit", lambda: vit().eval(), lambda n: {"pixel_values": torch.randn(n, 3, 16, 16)}, False),
    Architecture("hf-bert", lambda: bert().eval(), tokens, False),
]
