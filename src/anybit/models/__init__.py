"""Networks by name, so that a recipe and a checkpoint can say which one they are for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from anybit.common.text import did_you_mean, quoted
from anybit.errors import SpecError
from anybit.models.mobilenet import MobileNetV2
from anybit.models.resnet import BasicBlock, Bottleneck, ResNet
from anybit.models.small import VGGLike

__all__ = ["MODELS", "build_model"]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "small-conv": partial(VGGLike, (16, 32, 64), 64),
    "vgg-like": partial(VGGLike, (128, 256, 512), 1024, side=4),
    "resnet18-cifar": partial(ResNet, BasicBlock, (2, 2, 2, 2), small_images=True),
    "resnet18": partial(ResNet, BasicBlock, (2, 2, 2, 2), small_images=False),
    "resnet50": partial(ResNet, Bottleneck, (3, 4, 6, 3), small_images=False),
    "mobilenetv2-cifar": partial(MobileNetV2, small_images=True),
    "mobilenetv2": partial(MobileNetV2, small_images=False),
}
"""The networks known by name: add one here. Each takes `channels`, `classes` and `multiplier`."""


def build_model(name: str, *, channels: int, classes: int, multiplier: float) -> nn.Module:
    """Return a new network; `multiplier` multiplies the number of channels of every hidden layer."""
    if name not in MODELS:
        raise SpecError(f"no model {quoted(name)}: use {', '.join(MODELS)}{did_you_mean(name, MODELS)}")
    return MODELS[name](channels=channels, classes=classes, multiplier=multiplier)
