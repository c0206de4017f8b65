"""From a user's module to a graph of plain operators, by `torch.export`.

The graph is functional (no in-place operators), in evaluation mode, with a free batch dimension. Parameters
keep the names they had in the module.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import is_concrete_int
from torch.utils import _pytree as pytree

from anybit.errors import CaptureError
from anybit.quant.blame import describe, reasons
from anybit.quant.decompose import decompositions

Example = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every submodule in evaluation mode and afterwards back into the mode it was in, one by one."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def call_arguments(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turn an example input into positional and keyword arguments: a tensor, a tuple of them, or a dict.

    >>> call_arguments({"x": 1})
    ((), {'x': 1})
    """
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple | list):
        return tuple(example), {}
    return (example,), {}


def capture(model: nn.Module, example: Example) -> fx.GraphModule:
    """Return `model` in evaluation mode as a functional graph of ATen operators.

    The parameters of the result are those of `model`, not copies: replace them, never write into them.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(f"a torch.nn.Module is expected, got {type(model).__name__}")
    args, kwargs = call_arguments(example)
    args, kwargs = pytree.tree_map_only(Tensor, _at_least_two, (args, kwargs))
    if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
        raise CaptureError("an example input holds at least one tensor, with the batch as its first dimension")
    with evaluating(model), torch.no_grad(), warnings.catch_warnings():
        # torch.export warns about its own internals; what matters to the user is raised below.
        warnings.simplefilter("ignore")
        try:
            module = _export(model, args, kwargs)
        except Exception as error:
            # An error in the model's own code is the user's to see first.
            _run_once(model, args, kwargs)
            found = reasons(model, args, kwargs, _export) or [describe(type(model).__name__, error)]
            raise CaptureError(f"{type(model).__name__} cannot be captured", found) from error
    assert isinstance(module, fx.GraphModule)
    if problems := [p for node in module.graph.nodes if (p := _fixed_batch(node))]:
        raise CaptureError(f"{type(model).__name__} works at one batch size only", problems)
    _drop_bookkeeping(module)
    # What comes in is checked by `Signature`, with messages that name the input.
    module._forward_pre_hooks.clear()
    module._forward_pre_hooks_with_kwargs.clear()
    for name in ("train", "eval"):
        # An exported module refuses to change mode; ours has no operator that depends on it.
        module.__dict__.pop(name, None)
    return module


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    program = torch.export.export(model, args, kwargs, dynamic_shapes=_free_batch(args, kwargs), strict=False)
    module: nn.Module = program.run_decompositions(decompositions()).module()
    return module


def _run_once(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse an example input that the model itself cannot take."""
    try:
        model(*args, **kwargs)
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0]
        raise CaptureError(
            f"{type(model).__name__} itself fails on the example input",
            [f"{type(error).__name__}: {text}; pass an example as the network gets it, shapes and dtypes included"],
        ) from error


def module_path(node: fx.Node) -> str:
    """Return the path of the user's module that a node came from, or the node's own name."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return paths[-1] if paths and paths[-1] else str(node.name)


def _at_least_two(x: Tensor) -> Tensor:
    """Double a batch of one: torch.export takes a dimension of size one for a constant."""
    return torch.cat([x, x]) if x.dim() and x.shape[0] == 1 else x


def _free_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def shape(x: Any) -> Any:
        return {0: torch.export.Dim.AUTO} if isinstance(x, Tensor) and x.dim() else None

    free = pytree.tree_map(shape, {**dict(enumerate(args)), **kwargs})
    return (*(free[i] for i in range(len(args))),) if not kwargs else {**{k: free[k] for k in kwargs}}


def _fixed_batch(node: fx.Node) -> str | None:
    value = node.meta.get("val")
    if node.op != "placeholder" or not isinstance(value, Tensor) or not value.dim():
        return None
    if is_concrete_int(value.shape[0]):
        return (
            f"input {node.name}: its first dimension is fixed at {value.shape[0]}; write the forward pass "
            "without the batch size as a constant (x.flatten(1) instead of x.view(32, -1))"
        )
    return None


def _drop_bookkeeping(module: fx.GraphModule) -> None:
    """Remove what has no effect in evaluation: guards, unused parameters, copies that dropout leaves behind."""
    for node in list(module.graph.nodes):
        if node.op == "call_module" and node.target == "_guards_fn":
            module.graph.erase_node(node)
        elif node.target is torch.ops.aten.clone.default or node.target is torch.ops.aten.alias.default:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
        elif node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            # A view may rely on the order in memory that a copy had made.
            node.target = torch.ops.aten.reshape.default
    module.graph.eliminate_dead_code()
    module.delete_all_unused_submodules()
    module.recompile()
