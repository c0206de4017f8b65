"""The prepared network in a live mode: it shares a model's parameters and follows them as they are trained.

What `prepare` does once is done anew in every pass: batch norm is folded with its running statistics, with gradients
through it to weight, scale and shift; weights are equalized, and rounded on grids that follow them. The ranges of
activations and the factors of equalization move slowly; they are made anew from the model every `every` passes, by
the very functions that `prepare` uses. Right after that the live network is what `prepare` would make of the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from anybit.errors import SpecError
from anybit.graph.from_torch import BATCH_NORM, STANDARD, aten, read_torch, to_numpy
from anybit.graph.view import Graph, Node, Norm
from anybit.plan.build import Interval, Ranges, Settings, build, joined, with_inputs
from anybit.plan.fold import folded
from anybit.plan.observe import Calibration
from anybit.plan.points import Plan
from anybit.simulate.capture import Example, call_arguments, capture
from anybit.simulate.modules import Activation, Bias, Weight, executors, wide
from anybit.simulate.prepare import apply_changes, splice
from anybit.simulate.signature import signature
from anybit.spec import FLOAT, Bits, Range

FORGET = 0.2
"""How much of an observed range comes from the newest look at the data."""


@dataclass
class Variant:
    """One way to quantize the network: the settings, and the plan and factors that they lead to right now."""

    settings: Settings
    plan: Plan
    scaled: dict[str, Tensor]
    observed: dict[str, Ranges]


@dataclass(frozen=True)
class Fold:
    """A layer and the batch norm behind it, all by the names that their tensors have in the model."""

    layer: Node
    bias: str | None
    """The layer's bias before it was folded."""
    names: Mapping[str, str | None]
    eps: float


class Live:
    """A model at any width, as it is now, with gradients to its parameters.

    Args:
        model: The model itself, without DDP or compilation around it.
        example: What it is called with.
        settings: The ways to quantize it; `set_width` chooses among them.
        input_range: The interval of its input, as in `anybit.prepare`.
        every: After how many passes ranges and factors are made anew.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        *,
        settings: Sequence[Settings],
        input_range: Interval | Mapping[str, Interval] | None = None,
        every: int = 50,
    ) -> None:
        if any({"bias", "sums"} & s.helpers for s in settings):
            raise SpecError(
                "live networks know the helpers equalize and clip; drop bias and sums, which need no training"
            )
        self.model, self.every, self._input_range = model, every, input_range
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        with torch.autocast(device.type, enabled=False):  # which formats it computes in is decided when it runs
            self.body = capture(model, example)
        self._takes = signature(self.body, *call_arguments(example))
        self._example = call_arguments(example)
        self._view = read_torch(self.body)
        self._norms = {node.output: _norm_names(node.origin) for node in self._view.nodes if node.norm is not None}
        old = {node.output: self._view.bias(node) for node in self._view.nodes if node.kind == "layer"}
        graph = self._graph()
        layers = {id(node): node.output for node in graph.nodes}
        built = build(graph, settings[0])
        self._places, self._joined = built.places, built.joined
        self._folds = [
            Fold(layer, old[layers[id(layer)]], self._norms[node.output], node.norm.eps)
            for node, layer in graph.removed
            if node.norm is not None
        ]
        apply_changes(self.body, graph)
        splice(self.body, graph, built)
        _fuse(self.body)
        self._parts = executors(self.body)
        for part in self._parts.values():
            if isinstance(part, Weight):
                part.stretches = True
        self._shells = _emptied(self.body, self._places)
        self.body.train()
        self.variants = [Variant(s, built.plan, {}, {}) for s in settings]
        self.variant = self.variants[0]
        self._passes = 0
        self._unranged = False
        self.refresh()

    def _graph(self) -> Graph:
        """Return a view of the model as it is now, for passes to change."""
        tensors = self.tensors()
        view = self._view
        constants = {name: to_numpy(tensors[name]) if name in tensors else v for name, v in view.constants.items()}
        nodes = [self._node(node, constants) for node in view.nodes]
        return replace(
            view, nodes=nodes, constants=constants, shapes=dict(view.shapes), changed=set(), removed=[], scaled={}
        )

    def _node(self, node: Node, constants: Mapping[str, Any]) -> Node:
        new = replace(node, inputs=list(node.inputs))
        if node.norm is not None:
            names = self._norms[node.output]
            new.norm = replace(node.norm, **{part: constants[name] for part, name in names.items() if name is not None})
        return new

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters and buffers of the model by name."""
        buffers = {name: buffer.detach() for name, buffer in self.model.named_buffers(remove_duplicate=False)}
        return {**dict(self.model.named_parameters(remove_duplicate=False)), **buffers}

    def refresh(self) -> None:
        """Make ranges and factors anew from the model as it is now."""
        for variant in self.variants:
            graph = self._graph()
            built = build(graph, variant.settings)
            if built.places != self._places:
                raise SpecError("the settings of a live network differ in where they quantize; give them alone")
            device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
            variant.scaled = {n: torch.from_numpy(f).to(device, torch.float32) for n, f in graph.scaled.items()}
            variant.plan = with_inputs(built.plan, self._input_range)
            self._unranged |= bool(_unranged(variant.plan))
            variant.plan = self._with_observed(variant)

    def set_width(self, bits: Bits, variant: int = 0) -> None:
        """Run at these widths from now on."""
        self.variant = self.variants[variant]
        plan = self.variant.plan
        widths = plan.widths(bits)
        named: dict[str, Any] = {entry.name: entry for entry in (*plan.points, *plan.biases)}
        for name, module in self._parts.items():
            module.point = named[name]
            if isinstance(module, Weight):
                module.bits = widths[name]
            elif isinstance(module, Activation):
                width = widths[name]
                grid = None if width == FLOAT else named[name].grid(width)
                module.set_grid(grid, width)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network; it is called as the model is."""
        args, kwargs = self._as_example(args, kwargs)
        self._takes.check(args, kwargs)
        return torch.func.functional_call(self.body, self._values(), args, kwargs, tie_weights=False)

    def due(self) -> bool:
        """Count a pass; tell whether ranges are to be made anew in front of it."""
        self._passes += 1
        return self._passes % self.every == 1 or self.every == 1

    def state_dict(self) -> dict[str, float]:
        """Return the ranges in use and when they were made, as plain numbers."""
        found: dict[str, float] = {"passes": self._passes}
        for key, value in self._ranges():
            found |= {f"{key} low": value.low, f"{key} high": value.high}
        return found

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on with the ranges that `state_dict` returned; factors of equalization are those of the model as it is."""
        self._passes = int(state["passes"])
        own: list[dict[str, dict[int, Range]]] = [{} for _ in self.variants]
        for key in [key for key in state if key.endswith(" low")]:
            number, bits, name = key.removesuffix(" low").split(" ", 2)
            low, high = float(state[key]), float(state[f"{key.removesuffix(' low')} high"])
            own[int(number)].setdefault(name, {})[int(bits)] = Range(low, high, "training")
        for variant, ranges in zip(self.variants, own, strict=True):
            unknown = set(_unranged(variant.plan)) | variant.observed.keys()
            found = {name: tuple(by.items()) for name, by in ranges.items()}
            variant.observed = {name: by for name, by in found.items() if name in unknown}
            variant.plan = variant.plan.with_ranges(found)

    def _ranges(self) -> Iterator[tuple[str, Range]]:
        """Yield every range in use, by variant, width and point."""
        for number, variant in enumerate(self.variants):
            for point in variant.plan.activations:
                yield from ((f"{number} {bits} {point.name}", value) for bits, value in point.ranges)

    @torch.no_grad()
    def look(self, *args: Any, **kwargs: Any) -> None:
        """Run the model's data through in floating point and note the ranges that no normalization tells."""
        if not self._unranged:
            return
        for number, variant in enumerate(self.variants):
            self.set_width(Bits(), number)
            plan = variant.plan.with_ranges(dict.fromkeys(variant.observed, ()))
            unknown = set(_unranged(plan))
            watch = Calibration(Plan(tuple(a for a in plan.activations if a.name in unknown)), variant.settings.method)
            for name in watch.observers:
                self._parts[name].calibration = watch
            try:
                self(*args, **kwargs)
            finally:
                for name in watch.observers:
                    self._parts[name].calibration = None
            new = {a.name: a.ranges for a in watch.done().activations}
            old = variant.observed
            variant.observed = {n: _blended(old[n], r) if n in old else r for n, r in new.items()}
            variant.plan = self._with_observed(replace(variant, plan=plan))

    def _with_observed(self, variant: Variant) -> Plan:
        return joined(variant.plan.with_ranges(variant.observed), self._joined)

    def _values(self) -> dict[str, Tensor]:
        """Return what stands in for every parameter and buffer of the body: the model's, folded and scaled."""
        tensors = self.tensors()
        for f in self._folds:
            weight, bias = folded(*_operands(f, tensors), axis=f.layer.axis, groups=f.layer.groups)
            tensors[f.layer.inputs[1]], tensors[f.layer.inputs[2]] = weight, bias
        for name, factor in self.variant.scaled.items():
            tensors[name] = wide(tensors[name]) * factor
        return {shell: tensors[name] for shell, name in self._shells.items() if name in tensors}

    def _as_example(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call's arguments by position or by name, as the example had them."""
        if len(args) == len(self._example[0]) and kwargs.keys() == self._example[1].keys():
            return args, kwargs
        given = inspect.signature(type(self.model).forward).bind(self.model, *args, **kwargs).arguments
        values = list(given.items())[1:]
        first = tuple(value for _, value in values[: len(self._example[0])])
        return first, dict(values[len(first) :])


def _norm_names(origin: fx.Node) -> dict[str, str | None]:
    """Return the names of a normalization's tensors, by the part they play."""
    node: Any = origin if origin.target in STANDARD else origin.args[0]  # of a batch norm it is the first result
    parts = ("gamma", "beta", "mean", "var")[: 4 if node.target is BATCH_NORM else 2]
    first = 1 if node.target in (BATCH_NORM, aten.instance_norm.default) else 2
    held = dict(zip(parts, (*node.args[first:], None, None), strict=False))
    return {part: str(arg.target) if isinstance(arg, fx.Node) else None for part, arg in held.items()}


def _operands(f: Fold, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Norm]:
    """Return weight, bias and batch norm as tensors in float32."""
    held = {part: wide(tensors[name]) for part, name in {**f.names, "bias": f.bias}.items() if name is not None}
    gamma, beta, bias = (held.get(k, torch.full_like(held["var"], v)) for k, v in _ABSENT.items())
    norm = Norm(gamma, beta, held["mean"], held["var"], f.eps)  # type: ignore[arg-type]
    return wide(tensors[f.layer.inputs[1]]), bias, norm


_ABSENT = {"gamma": 1.0, "beta": 0.0, "bias": 0.0}
"""What stands for a tensor that a layer or its batch norm does not have."""


def _fuse(body: fx.GraphModule) -> None:
    """Let activations do the ReLU in front of them too, where nobody else sees its result."""
    for node in list(body.graph.nodes):
        if node.op != "call_module" or not isinstance(body.get_submodule(str(node.target)), Activation):
            continue
        source: Any = node.args[0]
        if source.op == "call_function" and source.target is aten.relu.default and len(source.users) == 1:
            body.get_submodule(str(node.target)).rectifies = True  # type: ignore[assignment]
            node.args = (source.args[0],)
            body.graph.erase_node(source)
    body.recompile()


def _emptied(body: fx.GraphModule, places: Mapping[str, str]) -> dict[str, str]:
    """Drop the body's own parameters, for which the model's stand in; return whose place each takes."""
    shells: dict[str, str] = {}
    for path, module in body.named_modules():
        own = isinstance(module, Weight | Bias)
        for name, value in [*module._parameters.items(), *module._buffers.items()]:
            if value is None:
                continue
            shell = f"{path}.{name}".lstrip(".")
            shells[shell] = places[module.point.name] if own else shell
            if name in module._parameters:
                module._parameters[name] = nn.Parameter(value.new_empty(0), requires_grad=False)
    return shells


def _unranged(plan: Plan) -> list[str]:
    """Return the activations of unknown range; an input then stays in floating point."""
    return [a.name for a in plan.activations if not a.ranges and a.kind != "input"]


def _blended(old: Ranges, new: Ranges) -> Ranges:
    """Return ranges that go a part of the way from the old ones to the new."""
    before = dict(old)

    def between(bits: int, now: Range) -> Range:
        was = before.get(bits, now)
        low, high = (a + FORGET * (b - a) for a, b in ((was.low, now.low), (was.high, now.high)))
        return replace(now, low=low, high=high)

    return tuple((bits, between(bits, now)) for bits, now in new)
