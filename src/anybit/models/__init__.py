"""Networks by name, so that a recipe and a checkpoint can say which one they are for."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from torch import nn

from anybit.common.text import quoted
from anybit.errors import SpecError
from anybit.models.mobilenet import mobilenetv2, mobilenetv2_cifar
from anybit.models.resnet import resnet18, resnet18_cifar, resnet50
from anybit.models.small import SmallConvNet
from anybit.models.vgg import VGGLike
from anybit.models.vit import TinyViT

__all__ = ["MODELS", "SmallConvNet", "build_model"]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "small-conv": SmallConvNet,
    "vgg-like": VGGLike,
    "resnet18-cifar": resnet18_cifar,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "mobilenetv2-cifar": mobilenetv2_cifar,
    "mobilenetv2": mobilenetv2,
    "vit-tiny": TinyViT,
}
"""The networks known by name: add one here. Each takes `channels`, `classes` and `multiplier`."""


def build_model(name: str, *, channels: int, classes: int, multiplier: float) -> nn.Module:
    """Return a new network; `multiplier` multiplies the number of channels of every hidden layer."""
    if name not in MODELS:
        close = get_close_matches(name[:80], MODELS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise SpecError(f"no model {quoted(name)}: use {', '.join(MODELS)}{hint}")
    return MODELS[name](channels=channels, classes=classes, multiplier=multiplier)
