"""What a captured network takes: the inputs of the example, with any batch size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from anybit.errors import SpecError


@dataclass(frozen=True)
class Signature:
    """The shapes of an example's tensors, by where they were in the call; `None` stands for the batch.

    Whatever else the call had (a flag, a missing mask) has no shape: it is a constant of the captured network.
    """

    shapes: dict[str, tuple[int | None, ...] | None]

    def __str__(self) -> str:
        parts = [name if shape is None else f"{name} of shape {_text(shape)}" for name, shape in self.shapes.items()]
        return ", ".join(parts)

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a call with other inputs than the example had."""
        given = _leaves(args, kwargs)
        if given.keys() != self.shapes.keys():
            got = ", ".join(f"{name}: {_kind(leaf)}" for name, leaf in given.items()) or "nothing"
            raise SpecError(f"the network is called as in its example, with {self}; got {got}")
        for name, leaf in given.items():
            want = self.shapes[name]
            if want is None:
                continue
            if not isinstance(leaf, Tensor):
                raise SpecError(f"{name} must be a tensor of shape {_text(want)}, got {_kind(leaf)}")
            if len(leaf.shape) != len(want) or any(w not in (None, s) for w, s in zip(want, leaf.shape, strict=True)):
                raise SpecError(f"{name} must have the shape {_text(want)} of the example, got {tuple(leaf.shape)}")


def signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
    """Return what a call looked like.

    >>> import torch
    >>> str(signature((torch.ones(4, 3),), {"mask": torch.ones(4)}))
    'argument 1 of shape (N, 3), mask of shape (N)'
    """
    return Signature({name: _shape(leaf) for name, leaf in _leaves(args, kwargs).items()})


def _shape(leaf: Any) -> tuple[int | None, ...] | None:
    if not isinstance(leaf, Tensor):
        return None
    return (None, *leaf.shape[1:]) if leaf.dim() else ()


def _leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    named = {f"argument {index + 1}": value for index, value in enumerate(args)} | dict(sorted(kwargs.items()))
    found: dict[str, Any] = {}
    for name, value in named.items():
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            found[name + pytree.keystr(path)] = leaf
    return found


def _text(shape: tuple[int | None, ...]) -> str:
    return f"({', '.join('N' if size is None else str(size) for size in shape)})"


def _kind(leaf: Any) -> str:
    return f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
