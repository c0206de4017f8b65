"""From a user's module to a graph of plain operators, by `torch.export`.

The graph is functional (no in-place operators), in evaluation mode, with a free batch dimension, and other sizes free
where the network allows it. Parameters keep the names they had in the module.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import is_concrete_int
from torch.utils import _pytree as pytree

from anybit.errors import CaptureError
from anybit.simulate.functional import functional
from anybit.simulate.recurrent import as_operators, to_built_in
from anybit.simulate.refusals import describe, reasons

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


def moved_to(device: torch.device, values: Any) -> Any:
    """Return tensors, however they are nested, on a device."""
    return pytree.tree_map_only(Tensor, lambda t: t.to(device), values)


def capture(model: nn.Module, example: Example) -> fx.GraphModule:
    """Return `model` in evaluation mode as a functional graph of ATen operators.

    The parameters of the result are those of `model`, not copies: replace them, never write into them.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(f"a torch.nn.Module is expected, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError("a ScriptModule has no Python code to capture; pass the module that it was made from")
    args, kwargs = call_arguments(example)
    args, kwargs = pytree.tree_map_only(Tensor, _at_least_two, (args, kwargs))
    if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
        raise CaptureError("an example input holds at least one tensor, with the batch as its first dimension")
    with evaluating(model), torch.no_grad(), quietly("torch.fx.experimental.symbolic_shapes"):
        try:
            module = _export(model, args, kwargs)
        except Exception as error:
            # An error in the model's own code is the user's to see first.
            _run_once(model, args, kwargs)
            found = reasons(model, args, kwargs, _export) or [describe(type(model).__name__, error)]
            raise CaptureError(f"{type(model).__name__} cannot be captured", found) from error
    if problems := [p for node in module.graph.nodes if (p := _fixed_batch(node))]:
        raise CaptureError(f"{type(model).__name__} works at one batch size only", problems)
    return module


@contextlib.contextmanager
def quietly(log: str) -> Iterator[None]:
    """Keep from the terminal what PyTorch says about its own internals: what matters of a failure is raised."""
    logger, aside = logging.getLogger(log), io.StringIO()
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(aside), contextlib.redirect_stderr(aside), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.GraphModule:
    """Capture with every size free that can be.

    Following free image sizes symbolically takes torch.export minutes. So pictures are captured at one size first; most
    networks then work at any size, which is tried (`_other_sizes`). Where that fails, and for all other inputs, sizes
    are followed symbolically, and some networks only go with a free batch.
    """
    fixed: fx.GraphModule | None = None
    pictures = all(x.dim() >= 4 for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor))
    error: Exception | None = None
    for all_dims in (False, True) if pictures else (True, False):
        try:
            with as_operators(), _attention_written_out():
                shapes = _free(args, kwargs, all_dims=all_dims)
                program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes)
                module = _functional(program)
            _tidy(module)
        except Exception as problem:
            error = error or problem
            continue
        if not pictures or all_dims:
            return module
        found = _at_other_sizes(model, module, args, kwargs)
        if found is None:  # the model takes other sizes, and this graph gives other answers
            fixed = module
            continue
        if found:
            _free_pictures(module)
        return module
    if fixed is not None:
        return fixed
    assert error is not None
    raise error


def _functional(program: torch.export.ExportedProgram) -> fx.GraphModule:
    """Return a captured network without operators in place or such that hide products."""
    module = program.module()
    if not (isinstance(module, fx.GraphModule) and functional(module)):
        module = program.run_decompositions(decompositions()).module()
    assert isinstance(module, fx.GraphModule)
    return module


def _at_other_sizes(model: nn.Module, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
    """Tell whether a graph captured at one picture size works at others; `None` if only the model itself does."""
    for factors in ((0.5, 0.75), (2, 3)):
        try:
            inputs = pytree.tree_map_only(Tensor, functools.partial(_resized, factors=factors), (args, kwargs))
            want = pytree.tree_leaves(model(*inputs[0], **inputs[1]))
        except Exception:  # the model takes no such size, for whatever reason
            continue
        try:
            got = pytree.tree_leaves(module(*inputs[0], **inputs[1]))
            same = [
                a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-3)
                for a, b in zip(want, got, strict=True)
            ]
        except Exception:
            return None
        return True if all(same) else None
    return False


def _resized(x: Tensor, factors: tuple[float, float]) -> Tensor:
    """Return a picture of another size, the last two dimensions by other factors."""
    sizes = [max(1, int(size * f)) for size, f in zip(x.shape[-2:], factors, strict=True)]
    new = x.new_zeros(*x.shape[:-2], *sizes)
    return new.normal_() if x.is_floating_point() else new


def _free_pictures(module: fx.GraphModule) -> None:
    """Note on each input of a captured network that its last dimensions are free."""
    for node in module.graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor):
            rank = node.meta["val"].dim()
            node.meta["anybit_free"] = (0, rank - 2, rank - 1)


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


def _at_least_two(x: Tensor) -> Tensor:
    """Double a batch of one: torch.export takes a dimension of size one for a constant."""
    return torch.cat([x, x]) if x.dim() and x.shape[0] == 1 else x


def _free(args: tuple[Any, ...], kwargs: dict[str, Any], *, all_dims: bool) -> Any:
    def shape(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.dim():
            return None
        return dict.fromkeys(range(x.dim() if all_dims else 1), torch.export.Dim.AUTO)

    return pytree.tree_map(shape, kwargs or args)


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


def _tidy(module: fx.GraphModule) -> None:
    """Remove what has no effect in evaluation: guards, unused parameters, copies that dropout leaves behind."""
    to_built_in(module.graph)
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
    # What comes in is checked by `Signature`, with messages that name the input.
    module._forward_pre_hooks.clear()
    module._forward_pre_hooks_with_kwargs.clear()
    for name in ("train", "eval"):
        # An exported module refuses to change mode; ours has no operator that depends on it.
        module.__dict__.pop(name, None)


# Operators that hide products, written out: integer accelerators quantize the operands of every product


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return `softmax(scale · Q Kᵀ + mask) V`, as scaled_dot_product_attention does in evaluation mode.

    Queries and keys each take the root of the scale, as in ONNX: then both have the range that a file has for them.
    """
    root = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = torch.matmul(query * root, key.transpose(-2, -1) * root)
    if is_causal:
        seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(seen.logical_not(), -math.inf)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return torch.matmul(torch.softmax(scores, -1), value)


@contextlib.contextmanager
def _attention_written_out() -> Iterator[None]:
    """Let models call `attention` in place of PyTorch's function for the time being: its products are traced."""
    before = F.scaled_dot_product_attention
    setattr(F, before.__name__, attention)
    try:
        yield
    finally:
        setattr(F, before.__name__, before)


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return what `ExportedProgram.run_decompositions` needs: operator to function."""
    einsum = torch.export.default_decompositions()[torch.ops.aten.einsum.default]
    return {torch.ops.aten.einsum.default: einsum, torch.ops.aten.scaled_dot_product_attention.default: attention}
