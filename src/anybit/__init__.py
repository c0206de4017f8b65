"""Train once, store one set of weights, run it at any bit width.

    objective = anybit.AnyWidth(model, example_input)                       # train: the user keeps the loop
    step = objective.backward(lambda: F.cross_entropy(model(x), y))

    net = anybit.prepare(model, example_input)                              # quantize: any width, without data
    net.set_bits(weights=4, activations=4)
    rows = anybit.sweep(net, test_loader, widths=[(8, 8), (4, 4)])

    anybit.save(net, "model.onnx")                                          # ship: one file, no torch on the other side
    session = anybit.load("model.onnx")
    session.set_bits(weights=4, activations=8)

Importing this package imports no PyTorch; a name that needs it does, on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from anybit.errors import AnybitError, MissingDependency
from anybit.spec import Bits, QuantSpec, Range, Row

if TYPE_CHECKING:
    from anybit.artifact.adopt import adopt
    from anybit.artifact.export import export
    from anybit.artifact.output_error import allocate
    from anybit.artifact.reconstruct import reconstruct
    from anybit.artifact.session import load
    from anybit.evaluate.sweep import sweep
    from anybit.objectives.any_width import AnyWidth
    from anybit.objectives.gradient import GradientPenalty
    from anybit.objectives.kurtosis import KurtosisPenalty
    from anybit.objectives.noise import UniformNoise
    from anybit.objectives.orthogonal import OrthogonalPenalty
    from anybit.pages.page import report
    from anybit.simulate.prepare import prepare
    from anybit.simulate.to_onnx import save

__version__ = "0.1.0"

__all__ = [
    "AnyWidth",
    "AnybitError",
    "Bits",
    "GradientPenalty",
    "KurtosisPenalty",
    "OrthogonalPenalty",
    "QuantSpec",
    "Range",
    "Row",
    "UniformNoise",
    "adopt",
    "allocate",
    "export",
    "load",
    "prepare",
    "reconstruct",
    "report",
    "save",
    "sweep",
]

_ON_FIRST_USE = {
    "AnyWidth": ("anybit.objectives.any_width", "torch"),
    "GradientPenalty": ("anybit.objectives.gradient", "torch"),
    "KurtosisPenalty": ("anybit.objectives.kurtosis", "torch"),
    "OrthogonalPenalty": ("anybit.objectives.orthogonal", "torch"),
    "UniformNoise": ("anybit.objectives.noise", "torch"),
    "adopt": ("anybit.artifact.adopt", ""),
    "allocate": ("anybit.artifact.output_error", ""),
    "export": ("anybit.artifact.export", ""),
    "load": ("anybit.artifact.session", ""),
    "prepare": ("anybit.simulate.prepare", "torch"),
    "reconstruct": ("anybit.artifact.reconstruct", ""),
    "report": ("anybit.pages.page", ""),
    "save": ("anybit.simulate.to_onnx", "torch"),
    "sweep": ("anybit.evaluate.sweep", "torch"),
}
"""Public names that need more than the base install: where they are, and the extra that brings what they need."""


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module 'anybit' has no attribute {name!r}; it has {', '.join(__all__)}")
    module, extra = _ON_FIRST_USE[name]
    try:
        value = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("anybit"):
            raise
        raise MissingDependency(error.name or "a package", extra, f"anybit.{name}") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
