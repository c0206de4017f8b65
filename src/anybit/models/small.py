"""A small convolutional network with batch norm, for images of 8x8 pixels and up."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn


def scaled(channels: int, multiplier: float) -> int:
    """Return a channel count times a multiplier, at least one.

    >>> scaled(32, 0.25), scaled(3, 0.1)
    (8, 1)
    """
    return max(1, round(channels * multiplier))


class SmallConvNet(nn.Module):
    """A VGG in miniature: pairs of 3x3 convolutions with batch norm and ReLU, pooled between, two linear layers."""

    def __init__(self, *, channels: int = 1, classes: int = 10, multiplier: float = 1.0) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = channels
        for stage, size in enumerate((16, 32, 64)):
            after = scaled(size, multiplier)
            for _ in range(2):
                layers += [
                    nn.Conv2d(before, after, 3, padding=1, bias=False),
                    nn.BatchNorm2d(after),
                    nn.ReLU(),
                ]
                before = after
            if stage < 2:
                layers.append(nn.MaxPool2d(2))
        hidden = scaled(64, multiplier)
        self.features = nn.Sequential(*layers)
        self.hidden = nn.Sequential(nn.Linear(before, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU())
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        return cast(Tensor, self.classifier(self.hidden(self.features(x).mean((2, 3)))))
