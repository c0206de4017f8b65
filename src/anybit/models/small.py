"""Small convolutional networks with batch norm: one for images of 8x8 pixels and up, and the paper's for CIFAR-10."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn


def scaled(channels: int, multiplier: float) -> int:
    """Return a channel count times a multiplier, at least one.

    >>> scaled(32, 0.25), scaled(3, 0.1)
    (8, 1)
    """
    return max(1, round(channels * multiplier))


class VGGLike(nn.Module):
    """Stages of two 3x3 convolutions with batch norm and ReLU, pooled between; a hidden layer, and a classifier.

    With `side` the last feature map has that side, after pooling once more, and is flattened: the paper's network is
    2x128C3 - MP2 - 2x256C3 - MP2 - 2x512C3 - MP2 - 1024FC - classes, for images of 32x32 pixels and so a side of 4.
    Without it images may have any size, and the mean over the pixels is taken.
    """

    def __init__(
        self,
        stages: Sequence[int],
        hidden: int,
        side: int | None = None,
        *,
        channels: int,
        classes: int,
        multiplier: float,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = channels
        for size in stages:
            after = scaled(size, multiplier)
            for _ in range(2):
                convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
                layers += [convolution, nn.BatchNorm2d(after), nn.ReLU()]
                before = after
            layers.append(nn.MaxPool2d(2))
        inputs, hidden = before * (side or 1) ** 2, scaled(hidden, multiplier)
        self.flat = side is not None
        self.features = nn.Sequential(*(layers if self.flat else layers[:-1]))
        self.hidden = nn.Sequential(nn.Linear(inputs, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU())
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        x = self.features(x)
        return cast(Tensor, self.classifier(self.hidden(x.flatten(1) if self.flat else x.mean((2, 3)))))
