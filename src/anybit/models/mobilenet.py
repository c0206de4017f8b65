"""MobileNetV2, with the strides for ImageNet or those for 32x32 images.

At every size the parameters have torchvision's names and shapes, so that pretrained weights load.
"""

from __future__ import annotations

from typing import NamedTuple, cast

from torch import Tensor, nn

STEM, HEAD = 32, 1280
DROPOUT = 0.2


class Stage(NamedTuple):
    """A row of the paper's table: blocks of one expansion and size, the first of them with a stride."""

    expansion: int
    channels: int
    blocks: int
    stride: int


STAGES = (
    Stage(1, 16, 1, 1),
    Stage(6, 24, 2, 2),
    Stage(6, 32, 3, 2),
    Stage(6, 64, 4, 2),
    Stage(6, 96, 3, 1),
    Stage(6, 160, 3, 2),
    Stage(6, 320, 1, 1),
)


def round_to_eight(channels: float) -> int:
    """Return the nearest multiple of eight, but never one that loses more than a tenth of the channels.

    >>> round_to_eight(32 * 0.75), round_to_eight(24 * 0.35), round_to_eight(18), round_to_eight(2)
    (24, 8, 24, 8)
    """
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * channels else nearest + 8


def conv_unit(before: int, after: int, *, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Return a convolution with batch norm and ReLU6."""
    convolution = nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU6())


class InvertedResidual(nn.Module):
    """Expand by a 1x1 convolution, filter each channel alone, project back; add the input where it fits."""

    def __init__(self, before: int, after: int, *, expansion: int, stride: int) -> None:
        super().__init__()
        middle = before * expansion
        expand = [conv_unit(before, middle, kernel=1)] if expansion > 1 else []
        depthwise = conv_unit(middle, middle, kernel=3, stride=stride, groups=middle)
        project = nn.Conv2d(middle, after, 1, bias=False)
        self.conv = nn.Sequential(*expand, depthwise, project, nn.BatchNorm2d(after))
        self.residual = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        inner = cast(Tensor, self.conv(x))
        return x + inner if self.residual else inner


class MobileNetV2(nn.Module):
    """A stem, seventeen inverted residual blocks, and a linear classifier on 1280 features.

    `small_images` leaves out the first two strides, for 32x32 images. As usual for this network, the channels
    are rounded to multiples of eight, and multipliers under 1 leave the 1280 features as they are.
    """

    def __init__(self, *, small_images: bool, channels: int, classes: int, multiplier: float) -> None:
        super().__init__()
        before = round_to_eight(STEM * multiplier)
        layers: list[nn.Module] = [conv_unit(channels, before, kernel=3, stride=1 if small_images else 2)]
        for number, stage in enumerate(STAGES):
            after = round_to_eight(stage.channels * multiplier)
            first = 1 if small_images and number < 2 else stage.stride
            for stride in (first, *[1] * (stage.blocks - 1)):
                layers.append(InvertedResidual(before, after, expansion=stage.expansion, stride=stride))
                before = after
        head = round_to_eight(HEAD * max(1.0, multiplier))
        layers.append(conv_unit(before, head, kernel=1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(DROPOUT), nn.Linear(head, classes))
        self._initialize()

    def _initialize(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        return cast(Tensor, self.classifier(self.features(x).mean((2, 3))))
