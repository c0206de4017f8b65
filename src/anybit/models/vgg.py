"""The paper's VGG-like network for CIFAR-10: six convolutions, a wide dense layer, batch norm throughout."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from anybit.models.small import scaled

STAGES = (128, 256, 512)
HIDDEN = 1024
FINAL_SIZE = 4
"""The side of the last feature map: 32 pixels halved three times."""


class VGGLike(nn.Module):
    """2x128C3 - MP2 - 2x256C3 - MP2 - 2x512C3 - MP2 - 1024FC - classes, for images of 32x32 pixels.

    Every convolution and the dense layer is followed by batch norm, which stands in for the bias, and ReLU.
    """

    def __init__(self, *, channels: int = 3, classes: int = 10, multiplier: float = 1.0) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = channels
        for size in STAGES:
            after = scaled(size, multiplier)
            for _ in range(2):
                convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
                layers += [convolution, nn.BatchNorm2d(after), nn.ReLU()]
                before = after
            layers.append(nn.MaxPool2d(2))
        inputs, hidden = before * FINAL_SIZE**2, scaled(HIDDEN, multiplier)
        self.features = nn.Sequential(*layers)
        self.hidden = nn.Sequential(nn.Linear(inputs, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU())
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        return cast(Tensor, self.classifier(self.hidden(torch.flatten(self.features(x), 1))))
