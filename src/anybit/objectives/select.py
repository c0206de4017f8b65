"""Which parameters are weights that will be quantized."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from anybit.errors import SpecError


def quantizable_weights(model: nn.Module, layers: str | list[str] | None = None) -> dict[str, nn.Parameter]:
    """Return the weight tensors of matrix products and convolutions, by name, each once.

    These are the parameters with two or more dimensions, which leaves out biases and normalization. Embedding tables
    and learned tokens are looked up or added, not multiplied, and do not count unless a layer shares them. `layers`
    keeps those whose name matches one of the patterns; a pattern may name the layer or the weight.

    >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2))
    >>> list(quantizable_weights(net)), list(quantizable_weights(net, "2"))
    (['0.weight', '2.weight'], ['2.weight'])
    """
    tables = (nn.Embedding, nn.EmbeddingBag)
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for path, module in model.named_modules():
        if isinstance(module, tables):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if _is_weight(name, parameter):
                found.setdefault(id(parameter), (f"{path}.{name}".lstrip("."), parameter))
    weights = dict(found.values())
    if layers is None:
        return weights
    patterns = [layers] if isinstance(layers, str) else list(layers)
    chosen = {name: p for name, p in weights.items() if any(_matches(name, pattern) for pattern in patterns)}
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in weights):
            some = ", ".join(list(weights)[:5])
            raise SpecError(f"no weight matches the pattern {pattern!r}; the weights are {some}, ...")
    return chosen


def _is_weight(name: str, parameter: nn.Parameter) -> bool:
    """Tell a matrix or kernel from a bias, and from a token or position embedding of shape (1, ..., size)."""
    embedding = parameter.dim() >= 3 and parameter.shape[0] == 1 and "weight" not in name
    return parameter.dim() >= 2 and parameter.is_floating_point() and not embedding


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[0], pattern)
