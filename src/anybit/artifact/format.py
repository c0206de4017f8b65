"""What a master says about itself: a JSON text in the ONNX file's metadata, with a version.

    anybit          the header below, as JSON
    anybit.digest   SHA-256 over the graph and the header, so that a damaged file is noticed before it is used

    {"version": 1, "store": "fp32", "weights": [...], "biases": [...], "activations": [...], "about": {...}}

The lists name tensors of the graph; fields at their default are left out. `about` is for people: where the file
came from, how the network was trained, what was measured. Version 2 has one field more, `data`: a master in two files
says there which one the second is. Reading is strict: an unknown, missing or wrong field is an error with its path, as
in `activations[3].floor`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from anybit.errors import FileError, SpecError
from anybit.spec import (
    FLOAT,
    NARROWEST,
    Bits,
    LayerWidths,
    QuantSpec,
    Range,
    check_width,
    layer_bits,
    names_point,
)

IN_ONE, IN_TWO = 1, 2
"""The versions: a master in one file, which every anybit reads, and one in two files."""

KEY, DIGEST = "anybit", "anybit.digest"
STORES = ("fp32", "fp16", "int8")
KINDS = ("activation", "input", "accumulator")

Widths = Mapping[str, int]
"""The width of every point, by its name."""


@dataclass(frozen=True)
class Weight:
    """A weight of the graph and how it is put on a grid: `sums` keeps sums of errors small, `clip` clips its range.

    `channels` is the dimension that runs over output channels; `axis` the one with scales of its own.
    """

    name: str
    tensor: str
    axis: int | None = None
    symmetric: bool = True
    floor: int = NARROWEST
    sums: bool = False
    clip: bool = False
    channels: int = 0
    groups: int = 1

    def spec(self, bits: int) -> QuantSpec:
        """Return the grid at a width."""
        return QuantSpec(bits, self.symmetric, axis=self.axis)


@dataclass(frozen=True)
class Bias:
    """The bias of a layer. Where weight and input are both whole numbers it is one too, in units of both scales.

    `weight` and `value` are the layer's weight and the activation that feeds it. With the `mean` of each input
    channel the bias takes back what the rounding of the weight adds to the mean of the layer's output.
    """

    tensor: str
    weight: str
    value: str | None = None
    mean: tuple[float, ...] | None = None
    groups: int = 1
    transposed: bool = False


@dataclass(frozen=True)
class Activation:
    """A value of the graph and the interval it stays in, by width; 32 stands for all widths without their own.

    Without any interval it stays in floating point.
    """

    name: str
    kind: str
    value: str
    ranges: tuple[tuple[int, Range], ...] = ()
    symmetric: bool = True
    floor: int = NARROWEST

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SpecError(f"kind must be one of {', '.join(KINDS)}; got {self.kind[:60]!r}")

    def range_at(self, bits: int) -> Range | None:
        """Return the interval at a width."""
        found = dict(self.ranges)
        return found.get(bits, found.get(FLOAT))

    def spec(self, bits: int) -> QuantSpec:
        """Return the grid at a width; a range that starts at zero has no negative codes."""
        value = self.range_at(bits)
        return QuantSpec(bits, self.symmetric, signed=value is not None and value.low < 0)


@dataclass(frozen=True)
class Data:
    """The second file of a master that is too large for one: its name in the same folder, its size, its SHA-256."""

    file: str
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        if self.file in ("", ".", "..") or not self.file.isprintable() or set(self.file) & {"/", "\\", ":"}:
            raise SpecError(f"file must be the plain name of a file in the same folder, got {_said(self.file)}")
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise SpecError(f"sha256 must be 64 lower-case hexadecimal digits, got {_said(self.sha256)}")


@dataclass(frozen=True)
class Header:
    """Everything that the graph itself does not say."""

    weights: tuple[Weight, ...]
    activations: tuple[Activation, ...]
    biases: tuple[Bias, ...] = ()
    store: str = "fp32"
    about: dict[str, Any] = field(default_factory=dict)
    data: Data | None = None

    def __post_init__(self) -> None:
        if self.store not in STORES:
            raise SpecError(f"store must be one of {', '.join(STORES)}; got {_said(self.store)}")
        _once("name", [point.name for point in self.points])
        _once("tensor", [*(w.tensor for w in self.weights), *(b.tensor for b in self.biases)])
        _once("value", [a.value for a in self.activations])

    @property
    def points(self) -> tuple[Weight | Activation, ...]:
        """Everything that has a width."""
        return (*self.weights, *self.activations)

    def widths(self, bits: Bits, layers: LayerWidths | None = None) -> Widths:
        """Return the width of every point: that of `bits`, or of the last pattern that matches, above its floor.

        A pattern matches the name of a point, or that of the layer that a weight belongs to.

        >>> header = Header((Weight("a.weight", "a.weight"),), (Activation("x", "input", "x", floor=8),))
        >>> header.widths(Bits(4, 4))
        {'a.weight': 4, 'x': 32}
        >>> header.widths(Bits(4, 4), {"a": (8, 8)})
        {'a.weight': 8, 'x': 32}
        """
        chosen = layer_bits(layers)
        for pattern in chosen:
            if not any(_matches(point, pattern) for point in self.points):
                some = ", ".join(point.name for point in self.points[:5])
                raise SpecError(f"no point matches the pattern {pattern!r}; there are {some}, ...")
        widths = {}
        for point in self.points:
            pair = next((chosen[pattern] for pattern in reversed(chosen) if _matches(point, pattern)), bits)
            width = max(pair.weights if isinstance(point, Weight) else pair.activations, point.floor)
            unknown = isinstance(point, Activation) and point.range_at(width) is None
            widths[point.name] = FLOAT if unknown else width
        return widths


def _matches(point: Weight | Activation, pattern: str) -> bool:
    return names_point(pattern, point.name, weight=isinstance(point, Weight))


def _once(what: str, names: list[str]) -> None:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise SpecError(f"the {what} {twice[0][:60]!r} is listed twice")


# Writing


def write_header(header: Header) -> str:
    """Return the header as JSON.

    >>> write_header(Header((), ()))
    '{"version": 1, "store": "fp32", "weights": [], "biases": [], "activations": [], "about": {}}'
    """
    lists = ("weights", "biases", "activations")
    first: dict[str, Any] = {"version": IN_ONE if header.data is None else IN_TWO, "store": header.store}
    values = {name: [_short(entry) for entry in getattr(header, name)] for name in lists}
    last = {} if header.data is None else {"data": dataclasses.asdict(header.data)}
    try:
        return json.dumps({**first, **values, "about": header.about, **last}, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise FileError(f"what a master says about itself must fit in JSON: {error}") from error


def _short(entry: Any) -> dict[str, Any]:
    """Leave out what is at its default."""
    values = {f.name: v for f in dataclasses.fields(entry) if (v := getattr(entry, f.name)) != f.default}
    if isinstance(entry, Activation) and entry.ranges:
        values["ranges"] = [[bits, r.low, r.high, r.source] for bits, r in entry.ranges]
    return values


# Reading


def read_header(text: str, *, where: str) -> Header:
    """Read what `write_header` wrote, trusting nothing; `where` names the file in errors."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{where}: metadata {KEY!r} is no JSON ({error}); save the master again") from error
    if not isinstance(values, dict):
        raise FileError(f"{where}: metadata {KEY!r} must be a JSON object, got {_said(values)}")
    version: Any = values.get("version")
    if not _is_whole(version) or version < 1:
        raise FileError(f"{where}: version must be a whole number from 1 on, got {_said(version)}")
    if version > IN_TWO:
        raise FileError(
            f"{where}: version is {_said(version)}, this anybit reads up to {IN_TWO}; "
            "update anybit: pip install -U anybit"
        )
    fields = {"version", "store", "weights", "biases", "activations", "about"} | ({"data"} if version > 1 else set())
    _same_keys(values, fields, fields, where)
    if not isinstance(values["about"], dict):
        raise FileError(f"{where}: about must be a JSON object, got {_said(values['about'])}")
    kinds: dict[str, type[Any]] = {"weights": Weight, "biases": Bias, "activations": Activation}
    lists = {name: tuple(_entries(kind, values[name], f"{where}: {name}")) for name, kind in kinds.items()}
    data = _entry(Data, values["data"], f"{where}: data") if "data" in values else None
    try:
        return Header(**lists, store=values["store"], about=values["about"], data=data)
    except SpecError as error:
        raise FileError(f"{where}: {error}") from error


def _entries(cls: type[Any], values: Any, where: str) -> list[Any]:
    if not isinstance(values, list):
        raise FileError(f"{where} must be a list, got {_said(values)}")
    return [_entry(cls, value, f"{where}[{i}]") for i, value in enumerate(values)]


def _entry(cls: type[Any], values: Any, where: str) -> Any:
    if not isinstance(values, dict):
        raise FileError(f"{where} must be a JSON object, got {_said(values)}")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    _same_keys(values, set(fields), {n for n, f in fields.items() if f.default is dataclasses.MISSING}, where)
    read = {}
    for key, value in values.items():
        wanted, convert = _FIELDS[key]
        try:
            read[key] = convert(value)
        except SpecError as error:
            raise FileError(f"{where}.{key}: {error}") from error
        except (TypeError, ValueError):
            raise FileError(f"{where}.{key} must be {wanted}, got {_said(value)}") from None
    try:
        return cls(**read)
    except SpecError as error:
        raise FileError(f"{where}: {error}") from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(least: int, below: int = 2**31) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        if not _is_whole(value) or not least <= value < below:
            raise TypeError
        return int(value)

    return convert


def _width(value: Any) -> int:
    return check_width(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        raise TypeError  # neither NaN nor infinity is less, and all that is left fits in float32
    return float(value)


def _numbers(value: Any) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise TypeError
    return tuple(_number(v) for v in value)


def _ranges(value: Any) -> tuple[tuple[int, Range], ...]:
    if not isinstance(value, list) or not all(isinstance(v, list) and len(v) == 4 for v in value):
        raise TypeError
    found = [(_width(bits), Range(_number(low), _number(high), _text(source))) for bits, low, high, source in value]
    if len(dict(found)) != len(found):
        raise SpecError("a width is listed twice")
    return tuple(found)


_FIELDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    **dict.fromkeys(("name", "tensor", "value", "kind", "weight"), ("a text", _text)),
    **dict.fromkeys(("symmetric", "sums", "clip", "transposed"), ("true or false", _flag)),
    **dict.fromkeys(("axis", "channels"), ("a whole number from 0 on", _whole(0))),
    **dict.fromkeys(("file", "sha256"), ("a text", _text)),
    "bytes": ("a whole number from 1 on", _whole(1, 2**48)),
    "groups": ("a whole number from 1 on", _whole(1)),
    "floor": ("a width", _width),
    "mean": ("a list of finite numbers", _numbers),
    "ranges": ("a list of [width, low, high, where from]", _ranges),
}
"""What each field of an entry must be, in words and as the function that sees to it."""


def _same_keys(values: dict[str, Any], allowed: set[str], required: set[str], where: str) -> None:
    if unknown := sorted(set(values) - allowed):
        raise FileError(f"{where}: unknown field {unknown[0][:60]!r}; known are {', '.join(sorted(allowed))}")
    if missing := sorted(required - set(values)):
        raise FileError(f"{where}: field {missing[0]!r} is missing")


def _said(value: Any) -> str:
    """Return a value as an error quotes it: never pages of it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
