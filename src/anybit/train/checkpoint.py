"""Weights on disk: safetensors with a small header that says which network they are for. No pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anybit.errors import CheckpointError, MissingDependency
from anybit.files import replacing
from anybit.models import build_model

FORMAT = "anybit-checkpoint/1"


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise MissingDependency("safetensors", "torch", "a checkpoint") from error
    return safetensors


def save_checkpoint(path: str | Path, model: nn.Module, about: dict[str, Any]) -> None:
    """Write the weights and buffers of `model`, and `about`: what `load_model` needs, and whatever else is known."""
    state = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    header = {"format": FORMAT, "about": json.dumps(about, allow_nan=False)}
    library = _safetensors()
    with replacing(path) as beside:
        try:
            library.torch.save_file(state, str(beside), metadata=header)
        except library.SafetensorError as error:
            raise CheckpointError(f"{path}: cannot be written ({error})") from error


def read_checkpoint(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a checkpoint and what its header says; nothing is executed while reading."""
    path = Path(path)
    if path.is_dir():
        raise CheckpointError(f"{path}: is a folder; a checkpoint (.safetensors) is expected here")
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; a checkpoint (.safetensors) is expected here")
    try:
        with _safetensors().safe_open(str(path), framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except MissingDependency:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path}: not a whole safetensors file ({error}); train again or copy it again"
        ) from error
    if header.get("format") != FORMAT:
        found = header.get("format", "no format at all")
        raise CheckpointError(f"{path}: the header says {found!r}, this version reads {FORMAT!r}")
    try:
        about = json.loads(header["about"])
    except (KeyError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header cannot be read ({error}); save it again") from error
    if not isinstance(about, dict):
        raise CheckpointError(f"{path}: the header cannot be read (no table in it); save it again")
    return tensors, about


def load_weights(path: str | Path, model: nn.Module) -> dict[str, Any]:
    """Fill `model` from a checkpoint and return what its header says; on any mismatch `model` stays as it is."""
    tensors, about = read_checkpoint(path)
    _check_fit(path, tensors, model.state_dict())
    model.load_state_dict(tensors)
    return about


def load_model(path: str | Path) -> tuple[nn.Module, dict[str, Any]]:
    """Build the network that a checkpoint says it is for, fill it, and return it with the header."""
    tensors, about = read_checkpoint(path)
    try:
        shape = {key: about["model"][key] for key in ("name", "channels", "classes", "width")}
        with torch.device("meta"):  # shapes without memory: the header may ask for any size
            outline = build_model(**shape)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise CheckpointError(
            f"{path}: the header does not say which model it is for ({reason}); train it again"
        ) from error
    _check_fit(path, tensors, outline.state_dict())
    model = build_model(**shape)
    model.load_state_dict(tensors)
    return model, about


def _check_fit(path: str | Path, tensors: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    problems = [f"lacks {name}" for name in own if name not in tensors]
    problems += [f"has {name}, which the model lacks" for name in tensors if name not in own]
    problems += [
        f"{name} is {tuple(tensors[name].shape)}, the model has {tuple(own[name].shape)}"
        for name in own
        if name in tensors and tensors[name].shape != own[name].shape
    ]
    same = [name for name in own if name in tensors and tensors[name].shape == own[name].shape]
    problems += [
        f"{name} is {tensors[name].dtype}, the model has {own[name].dtype}"
        for name in same
        if tensors[name].dtype != own[name].dtype
    ]
    problems += [
        f"{name} has infinite or NaN entries"
        for name in same
        if tensors[name].dtype == own[name].dtype and _broken(tensors[name])
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise CheckpointError(f"{path}: {'; '.join(problems[:3])}{more}; use a checkpoint of the same model and width")


def _broken(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())
