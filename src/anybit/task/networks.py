"""A network by a word: code of the user's, a name of ours, or a model of torchvision, timm or Hugging Face."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from anybit.artifact.feeding import Preprocessing
from anybit.common.named import by_name, called, is_code
from anybit.common.text import did_you_mean, explaining, first_line, quoted
from anybit.errors import SpecError
from anybit.models import MODELS, build_model
from anybit.task.checkpoint import named_like

PACKAGES = {"torchvision": "torchvision", "timm": "timm", "huggingface": "transformers"}
"""What stands in front of a model's name, and the package that it then comes from: `timm/resnet18.a1_in1k`."""

WORDS = "my_model.py:make, package.module:make, torchvision/NAME, timm/NAME or huggingface/NAME"


def in_package(word: str) -> bool:
    """Tell whether a word names a model of another package.

    >>> in_package("timm/resnet18"), in_package("runs/mine")
    (True, False)
    """
    return word.partition("/")[0] in PACKAGES and bool(word.partition("/")[2])


def make_network(
    word: str,
    *,
    tensors: dict[str, Tensor] | None = None,
    classes: Callable[[], int] | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """Return a new network, not filled yet, and what a checkpoint must say so that it can be built again.

    Args:
        word: Which one.
        tensors: The weights that will be put in: they tell the sizes of a network that comes in several.
        classes: Tells how many classes a new network has; without it a named model has its usual ones.
    """
    if is_code(word):
        return _made(word), {"factory": word}
    if word in MODELS:
        if tensors is None:
            raise SpecError(f"{word} comes without weights; say --weights FILE, or first: anybit train {word}")
        shape = _shape(word, tensors)
        return build_model(**shape), shape
    if in_package(word):
        count = None if classes is None else classes()
        model = _named(word, count, pretrained=tensors is None)
        if tensors is not None and (found := _outputs(model, tensors)) not in (None, _outputs(model, {})):
            count = found
            model = _named(word, count, pretrained=False)
        return model, {"factory": word} | ({} if count is None else {"classes": count})
    hint = did_you_mean(word, MODELS)
    raise SpecError(f"no model {quoted(word)}: use {', '.join(MODELS)}, or {WORDS}{hint}")


def _made(word: str) -> nn.Module:
    made = by_name(word)
    made = made if isinstance(made, nn.Module) else called(word)
    if not isinstance(made, nn.Module):
        raise SpecError(f"{word}: must return a torch.nn.Module, returned {type(made).__name__}")
    return made


def _shape(word: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the sizes of a network of ours that has these weights."""
    with torch.device("meta"):
        own = build_model(word, channels=3, classes=10, multiplier=1.0).state_dict()
    tensors = named_like(tensors, own)
    first = next(name for name, value in own.items() if value.dim() == 4)
    last = [name for name, value in own.items() if value.dim() in (1, 2) and value.is_floating_point()][-1]
    missing = [name for name in (first, last) if name not in tensors or not tensors[name].dim()]
    if missing or tensors[first].dim() != 4:
        raise SpecError(f"{word} has {first} and {last}, and the weights have no such tensors; name their own network")
    sizes = {"channels": tensors[first].shape[1], "classes": tensors[last].shape[0]}
    shape: dict[str, Any] = {"name": word, **sizes, "multiplier": tensors[first].shape[0] / own[first].shape[0]}
    with torch.device("meta"):  # before memory is taken for whatever sizes a file claims
        own = build_model(**shape).state_dict()
    if other := [name for name in own if name in tensors and tensors[name].shape != own[name].shape]:
        raise SpecError(f"{word} has another {other[0]} than the weights have; name the network that they are of")
    return shape


def _outputs(model: nn.Module, tensors: dict[str, Tensor]) -> int | None:
    """Return how many outputs the last layer has, as far as the weights know it; without weights, as it is."""
    own = {name: value for name, value in model.state_dict().items() if value.is_floating_point() and value.dim()}
    known = named_like(tensors, own) if tensors else own
    last = list(own)[-1]
    return known[last].shape[0] if last in known else None


def _named(word: str, classes: int | None, *, pretrained: bool) -> nn.Module:
    """Return a model of another package; `classes` other than it usually has give it a new last layer."""
    package, _, name = word.partition("/")
    try:
        library: Any = importlib.import_module(PACKAGES[package])
    except ImportError as error:
        raise SpecError(
            f"{word} needs {PACKAGES[package]}, which cannot be imported ({error}); run: pip install "
            f"{PACKAGES[package]}"
        ) from error
    # An unknown name, or no way to the weights.
    what = f"{word}: {PACKAGES[package]} cannot make it"
    with explaining(SpecError, what, "; give weights, or another name", first_line):
        model = _BUILDERS[package](library, name, classes, pretrained)
    assert isinstance(model, nn.Module)
    return model.eval()


def _torchvision(library: Any, name: str, classes: int | None, pretrained: bool) -> Any:
    models = importlib.import_module(f"{library.__name__}.models")
    sizes = {} if classes is None else {"num_classes": classes}
    if not pretrained or classes is not None:
        return models.get_model(name, weights=None, **sizes)
    weights = models.get_model_weights(name).DEFAULT
    model = models.get_model(name, weights=weights)
    model.anybit_transforms = weights.transforms()
    return model


def _timm(library: Any, name: str, classes: int | None, pretrained: bool) -> Any:
    return library.create_model(name, pretrained=pretrained, **({} if classes is None else {"num_classes": classes}))


def _huggingface(library: Any, name: str, classes: int | None, pretrained: bool) -> Any:
    library.utils.logging.disable_progress_bar()
    library.utils.logging.set_verbosity_error()
    sizes = {} if classes is None else {"num_labels": classes, "ignore_mismatched_sizes": True}
    if pretrained:
        return library.AutoModelForImageClassification.from_pretrained(name, **sizes)
    sizes.pop("ignore_mismatched_sizes", None)
    return library.AutoModelForImageClassification.from_config(library.AutoConfig.from_pretrained(name, **sizes))


_BUILDERS = {"torchvision": _torchvision, "timm": _timm, "huggingface": _huggingface}


def feeding_of(word: str, model: nn.Module) -> Preprocessing | None:
    """Return how a named model wants its pictures, as far as its package says so."""
    usual = Preprocessing.named("imagenet")
    known = getattr(model, "pretrained_cfg", None)
    if isinstance(known, Mapping) and "input_size" in known:  # timm
        size, part = tuple(known["input_size"][1:]), known.get("crop_pct") or 0.875
        found = replace(usual, size=size, shorter=round(min(size) / part))
        return replace(found, mean=tuple(known["mean"]), std=tuple(known["std"]))
    shown = getattr(model, "anybit_transforms", None)
    if shown is not None and hasattr(shown, "crop_size"):  # torchvision
        size = (shown.crop_size[0], shown.crop_size[-1])
        found = replace(usual, size=size, shorter=shown.resize_size[0])
        return replace(found, mean=tuple(shown.mean), std=tuple(shown.std))
    side = getattr(getattr(model, "config", None), "image_size", None)
    if word.startswith("huggingface/") and isinstance(side, int):
        return replace(usual, size=(side, side), shorter=0)
    return None
