"""Why a network cannot be captured: every module that stands in the way, with its path and what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

Attempt = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], object]
"""Tries to capture a module called with these arguments; raises if it cannot."""

ADVICE = (
    (
        ("Could not extract specialized integer", "_local_scalar_dense", ".item()"),
        "it turns a tensor into a Python number (.item(), int(), .tolist()); keep it a tensor",
    ),
    (
        ("data-dependent", "DataDependent", "GuardOnData", "is_nonzero", "Could not guard"),
        "it branches on the values of a tensor; use torch.where, or torch.cond for whole blocks",
    ),
    (
        ("Constraints violated", "specialized", "not dynamic"),
        "it works at one batch size only; take sizes from x.shape[0], or use x.flatten(1)",
    ),
    (("numpy",), "it leaves PyTorch for numpy; write that part with torch functions"),
    (("FakeTensor", "fake tensor"), "it needs the values of its input while being captured; compute them in torch"),
)


def reasons(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], attempt: Attempt) -> list[str]:
    """Return one line per module that cannot be captured, innermost first.

    Every submodule is tried by itself, with the inputs that it gets in a real forward pass. One that fails only
    because of something inside it is not to blame: it is tried again with its failing parts replaced by their outputs.
    """
    calls = _record(model, args, kwargs)
    failed: dict[nn.Module, str] = {}
    found: list[str] = []
    for path, module in reversed(list(model.named_modules())):
        if module not in calls:
            continue
        inputs, named, _ = calls[module]
        error = _try(attempt, module, inputs, named)
        if error is None:
            continue
        inside = [child for child in module.modules() if child is not module and child in failed]
        if inside:
            with _answering({child: calls[child][2] for child in inside}):
                error = _try(attempt, module, inputs, named)
        failed[module] = path
        if error is not None:
            found.append(describe(path or type(model).__name__, error))
    return found


def describe(path: str, error: Exception) -> str:
    """Return one line: where, what to do about it, and what torch.export said."""
    text = str(error)
    first = (text.strip().splitlines() or [""])[0].rstrip(". ")
    advice = next((a for words, a in ADVICE if any(word in text or word in type(error).__name__ for word in words)), "")
    advice = advice or "rewrite it with plain torch operations, or leave it out of the network that is prepared"
    return f"{path}: {advice} ({type(error).__name__}: {first[:200]})"


def _record(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[nn.Module, Any]:
    """Run the model once and note what each module was called with, the first time, and what it returned."""
    calls: dict[nn.Module, Any] = {}

    def note(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        calls.setdefault(module, (inputs, named, output))

    handles = [module.register_forward_hook(note, with_kwargs=True) for module in model.modules()]
    try:
        with torch.no_grad(), contextlib.suppress(Exception):
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _try(attempt: Attempt, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    try:
        attempt(module, args, kwargs)
    except Exception as error:
        return error
    return None


@contextlib.contextmanager
def _answering(outputs: dict[nn.Module, Any]) -> Iterator[None]:
    """Make modules return a tensor of the shape they returned before, without running them."""
    for module, output in outputs.items():

        def answer(*args: Any, output: Any = output, **kwargs: Any) -> Any:
            leaf = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
            batch = leaf.shape[0]
            return pytree.tree_map_only(
                torch.Tensor, lambda t: t.new_zeros((batch, *t.shape[1:])) if t.dim() else t.clone(), output
            )

        module.__dict__["forward"] = answer
    try:
        yield
    finally:
        for module in outputs:
            module.__dict__.pop("forward", None)
