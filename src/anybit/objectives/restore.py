"""What a step or a second pass changes for a while, and how it is put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def random_state() -> tuple[Tensor, list[Tensor]]:
    """Return the state of every random number generator that a model draws from: the CPU's and each accelerator's."""
    return torch.get_rng_state(), [module.get_rng_state(*device) for module, device in _accelerators()]


def set_random_state(state: tuple[Tensor, list[Tensor]]) -> None:
    """Put every generator where it was."""
    torch.set_rng_state(state[0])
    for value, (module, device) in zip(state[1], _accelerators() if state[1] else (), strict=False):
        module.set_rng_state(value, *device)


@contextlib.contextmanager
def random_kept() -> Iterator[None]:
    """Put every generator back where it was."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def _accelerators() -> list[tuple[Any, tuple[int, ...]]]:
    """Return PyTorch's module for the accelerator in use (`torch.cuda` and its like) with what names each device.

    Apple's module has one device and takes no name.
    """
    module = torch.get_device_module() if torch.accelerator.is_available() else None
    if module is None or not getattr(module, "is_initialized", lambda: True)():
        return []
    return [(module, ())] if module.__name__ == "torch.mps" else [(module, (i,)) for i in range(module.device_count())]


@contextlib.contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Put every buffer back, the tensor and its value: statistics and counters move once per step.

    A forward pass may write into a buffer or put another tensor in its place.
    """
    places = [(module._buffers, name) for module in model.modules() for name in module._buffers]
    kept = [(place, name, b := place[name], None if b is None else b.detach().clone()) for place, name in places]
    try:
        yield
    finally:
        with torch.no_grad():
            for place, name, buffer, value in kept:
                place[name] = buffer
                if buffer is not None and value is not None:
                    buffer.copy_(value)


@contextlib.contextmanager
def replaced(parameters: Sequence[nn.Parameter], values: Iterable[Tensor]) -> Iterator[None]:
    """Run with other values in the parameters, then with the very tensors from before: nothing is recomputed."""
    originals = [parameter.data for parameter in parameters]
    try:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data = value
        torch.clear_autocast_cache()  # it remembers weights by their parameter, not by their values
        yield
    finally:
        for parameter, original in zip(parameters, originals, strict=True):
            parameter.data = original
        torch.clear_autocast_cache()


@contextlib.contextmanager
def gradients_set_aside(parameters: Sequence[nn.Parameter]) -> Iterator[list[Tensor | None]]:
    """Start from empty gradients; if the block raises, put back those from before."""
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield before
    except BaseException:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
        raise


def add_gradients(parameters: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
    """Add to what is in `.grad` already."""
    for parameter, grad in zip(parameters, grads, strict=True):
        if grad is not None:
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


@contextlib.contextmanager
def full_precision(wanted: bool = True) -> Iterator[None]:
    """Compute float32 products in float32: TF32 and bfloat16 stand-ins keep too few digits for a difference."""
    b: Any = torch.backends
    libraries = [b.cuda.matmul, b.cudnn.conv, b.cudnn.rnn, b.mkldnn.matmul, b.mkldnn.conv, b.mkldnn.rnn]
    before = [library.fp32_precision for library in libraries] if wanted else []
    try:
        for library, _ in zip(libraries, before, strict=False):
            library.fp32_precision = "ieee"
        yield
    finally:
        for library, value in zip(libraries, before, strict=False):
            library.fp32_precision = value
