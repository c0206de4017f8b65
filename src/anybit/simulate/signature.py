"""What a captured network takes: the inputs of the example, with other sizes where the network leaves them free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import is_concrete_int
from torch.utils import _pytree as pytree

from anybit.errors import SpecError


@dataclass(frozen=True)
class Signature:
    """The shapes of an example's tensors, by where they were in the call; `None` stands for a size that is free.

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
            if len(leaf.shape) != len(want):
                raise SpecError(f"{name} must have the shape {_text(want)} of the example, got {tuple(leaf.shape)}")
            wrong = [d for d, size in enumerate(want) if size not in (None, leaf.shape[d])]
            if wrong:
                raise SpecError(
                    f"{name} must have the shape {_text(want)}, got {tuple(leaf.shape)}: the network fixes dimension "
                    f"{wrong[0]} at {want[wrong[0]]}, through the size of a weight or a number in its forward pass"
                )


def signature(body: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
    """Return what a call looked like, with the sizes free that the captured network leaves free."""
    leaves = _leaves(args, kwargs)
    in_order = [*_leaves(args, {}), *(n for key, value in kwargs.items() for n in _leaves((), {key: value}))]
    holders = [node for node in body.graph.nodes if node.op == "placeholder"]
    captured = dict(zip(in_order, holders, strict=True)) if len(in_order) == len(holders) else {}
    return Signature({name: _shape(leaf, captured.get(name)) for name, leaf in leaves.items()})


def _shape(leaf: Any, captured: fx.Node | None) -> tuple[int | None, ...] | None:
    if not isinstance(leaf, Tensor):
        return None
    if captured is None or not isinstance(captured.meta.get("val"), Tensor):
        return (None, *leaf.shape[1:]) if leaf.dim() else ()
    free = free_dims(captured)
    return tuple(None if d in free else int(size) for d, size in enumerate(captured.meta["val"].shape))


def free_dims(holder: fx.Node) -> set[int]:
    """Return the dimensions of an input that the captured network leaves free."""
    symbolic = {d for d, size in enumerate(holder.meta["val"].shape) if not is_concrete_int(size)}
    return symbolic | set(holder.meta.get("anybit_free", ()))


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


def output_names(body: fx.GraphModule, count: int) -> list[str]:
    """Return what a file calls each output: its key in a dict, or its number."""
    spec = getattr(getattr(body.graph._codegen, "pytree_info", None), "out_spec", None)
    if count == 1 and (spec is None or spec.is_leaf()):
        return ["output"]
    paths = []
    if spec is not None and spec.num_leaves == count:
        paths = pytree.tree_flatten_with_path(pytree.tree_unflatten([0] * count, spec))[0]
    keys = ["_".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path) for path, _ in paths]
    names = [key if not key.isdigit() else f"output_{key}" for key in keys]
    return names if len(set(names)) == count else [f"output_{i}" for i in range(count)]
