"""What a second pass over the same batch may not change, and how it is put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn


def random_state() -> tuple[Tensor, list[Tensor]]:
    """Return the state of every random number generator that a model draws from."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return torch.get_rng_state(), cuda


def set_random_state(state: tuple[Tensor, list[Tensor]]) -> None:
    """Put every generator where it was."""
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])


@contextlib.contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Put every buffer back to the value it has now: batch-norm statistics move once per step."""
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
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
