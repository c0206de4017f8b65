"""ResNet-18 and ResNet-50, with the stem for ImageNet or the one for 32x32 images.

At full size the parameters have the names and shapes that torchvision gives them, so pretrained weights load.
"""

from __future__ import annotations

from typing import ClassVar, cast

from torch import Tensor, nn

from anybit.models.small import scaled

STAGES = (64, 128, 256, 512)


def shortcut(before: int, after: int, stride: int) -> nn.Sequential | None:
    """Return what fits a block's input to its output, or `None` where the input can be added as it is."""
    if stride == 1 and before == after:
        return None
    return nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and the shortcut around them."""

    expansion: ClassVar[int] = 1

    def __init__(self, before: int, middle: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, middle, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(middle)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(middle, middle, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(middle)
        self.downsample = shortcut(before, middle, stride)
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output; both ReLUs are modules of their own, so that each has a name."""
        around = x if self.downsample is None else self.downsample(x)
        inner = self.relu1(self.bn1(self.conv1(x)))
        return cast(Tensor, self.relu2(self.bn2(self.conv2(inner)) + around))


class Bottleneck(nn.Module):
    """A 3x3 convolution, which carries the stride, between two of 1x1, and the shortcut around them."""

    expansion: ClassVar[int] = 4

    def __init__(self, before: int, middle: int, stride: int) -> None:
        super().__init__()
        after = middle * self.expansion
        self.conv1 = nn.Conv2d(before, middle, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(middle)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(middle, middle, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(middle)
        self.relu2 = nn.ReLU()
        self.conv3 = nn.Conv2d(middle, after, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(after)
        self.downsample = shortcut(before, after, stride)
        self.relu3 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        around = x if self.downsample is None else self.downsample(x)
        inner = self.relu1(self.bn1(self.conv1(x)))
        inner = self.relu2(self.bn2(self.conv2(inner)))
        return cast(Tensor, self.relu3(self.bn3(self.conv3(inner)) + around))


class ResNet(nn.Module):
    """Four stages of blocks, each but the first halving the image, between a stem and a linear classifier.

    `depths` is the number of blocks in each stage. `small_images` asks for the stem for 32x32 images, with a
    3x3 convolution and no pooling, instead of ImageNet's with 7x7.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, int, int, int],
        *,
        small_images: bool,
        channels: int,
        classes: int,
        multiplier: float,
    ) -> None:
        super().__init__()
        before = scaled(STAGES[0], multiplier)
        kernel, stride = (3, 1) if small_images else (7, 2)
        self.conv1 = nn.Conv2d(channels, before, kernel, stride, padding=kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(before)
        self.relu = nn.ReLU()
        self.maxpool = nn.Identity() if small_images else nn.MaxPool2d(3, 2, padding=1)
        stages: list[nn.Sequential] = []
        for size, depth in zip(STAGES, depths, strict=True):
            middle = scaled(size, multiplier)
            after = middle * block.expansion
            first = block(before, middle, 2 if stages else 1)
            stages.append(nn.Sequential(first, *(block(after, middle, 1) for _ in range(depth - 1))))
            before = after
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(before, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return cast(Tensor, self.fc(x.mean((2, 3))))
