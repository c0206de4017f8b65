"""A plan as plain values, ready for JSON, and back: strictly, since files come from strangers.

    {"points": [...], "biases": [...], "left": [...]}

Fields at their default are left out. An unknown, missing or wrong field is an error with its path, as in
`points[3].floor`. Version 1 and 2 of the master had `weights` and `activations` apart, and the tensor of each.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from anybit.common.text import quoted
from anybit.errors import FileError, SpecError
from anybit.plan.extras import Rounded, Shift
from anybit.plan.points import Activation, Bias, Left, Plan, Weight
from anybit.spec import Range, check_width

T = TypeVar("T")

FIELDS = ("points", "biases", "left")


def plan_to_values(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain values.

    >>> plan_to_values(Plan((Weight("a", shape=(2, 3)),)))
    {'points': [{'kind': 'weight', 'name': 'a', 'shape': [2, 3]}], 'biases': [], 'left': []}
    """
    return {name: [_short(entry) for entry in getattr(plan, name)] for name in FIELDS}


def _short(entry: Any) -> dict[str, Any]:
    """Leave out what is at its default."""
    values = {f.name: v for f in dataclasses.fields(entry) if (v := getattr(entry, f.name)) != f.default}
    if isinstance(entry, Weight):
        values = {"kind": "weight", **values}
    if "ranges" in values:
        values["ranges"] = [[bits, r.low, r.high, r.source] for bits, r in entry.ranges]
    for key in values.keys() & _EXTRAS.keys():
        rows = [dataclasses.astuple(extra) for extra in values[key]]
        values[key] = [[base64.b64encode(v).decode() if isinstance(v, bytes) else v for v in row] for row in rows]
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def plan_from_values(values: Any, *, where: str) -> Plan:
    """Read what `plan_to_values` wrote, trusting nothing; `where` names the file in errors."""
    if not isinstance(values, dict):
        raise FileError(f"{where}: a plan must be a JSON object, got {quoted(values)}")
    same_keys(values, set(FIELDS), set(FIELDS), where)
    points = _entries(_point, values["points"], f"{where}: points")
    biases = _entries(partial(entry, Bias), values["biases"], f"{where}: biases")
    left = _entries(partial(entry, Left), values["left"], f"{where}: left")
    return _plan(points, biases, left, where)


def plan_from_old(values: dict[str, Any], *, where: str) -> Plan:
    """Read the lists of a master of version 1 or 2."""
    weights = _entries(partial(entry, Weight), values["weights"], f"{where}: weights")
    activations = _entries(partial(entry, Activation), values["activations"], f"{where}: activations")
    places = {a.value: a.name for a in activations} | {w.tensor: w.name for w in weights}

    def bias(v: Any, spot: str) -> Bias:
        if not isinstance(v, dict):
            raise FileError(f"{spot} must be a JSON object, got {quoted(v)}")
        found = entry(Bias, {"name": v.get("tensor")} | {k: x for k, x in v.items() if k not in _GONE}, spot)
        for name in [n for n in (found.weight, v.get("value")) if n is not None]:
            if not isinstance(name, str) or name not in places:
                raise FileError(f"{spot}: {quoted(name)} is not the tensor or value of a point")
        source = places[v["value"]] if v.get("value") is not None else ""
        return dataclasses.replace(found, weight=places[found.weight], input=source)

    return _plan([*weights, *activations], _entries(bias, values["biases"], f"{where}: biases"), [], where)


_GONE = ("value", "groups", "transposed")


def _plan(points: list[Any], biases: list[Any], left: list[Any], where: str) -> Plan:
    try:
        plan = Plan(tuple(points), tuple(biases), tuple(left))
    except SpecError as error:
        raise FileError(f"{where}: {error}") from error
    kinds = {point.name: point.kind for point in points}
    for i, bias in enumerate(biases):
        if kinds.get(bias.weight) != "weight":
            raise FileError(f"{where}: biases[{i}].weight: {quoted(bias.weight)} is not the name of a weight")
        if bias.input and kinds.get(bias.input, "weight") == "weight":
            raise FileError(f"{where}: biases[{i}].input: {quoted(bias.input)} is not the name of an activation")
    return plan


def _point(values: Any, where: str) -> Weight | Activation:
    if isinstance(values, dict) and values.get("kind") == "weight":
        return entry(Weight, {k: v for k, v in values.items() if k != "kind"}, where)
    return entry(Activation, values, where)


def _entries(read: Callable[[Any, str], Any], values: Any, where: str) -> list[Any]:
    if not isinstance(values, list):
        raise FileError(f"{where} must be a list, got {quoted(values)}")
    return [read(value, f"{where}[{i}]") for i, value in enumerate(values)]


def entry(cls: type[T], values: Any, where: str) -> T:
    """Read one entry of a list into a dataclass."""
    if not isinstance(values, dict):
        raise FileError(f"{where} must be a JSON object, got {quoted(values)}")
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    same_keys(values, set(fields), {n for n, f in fields.items() if f.default is dataclasses.MISSING}, where)
    read = {}
    for key, value in values.items():
        wanted, convert = _FIELDS[key]
        try:
            read[key] = convert(value)
        except SpecError as error:
            raise FileError(f"{where}.{key}: {error}") from error
        except (TypeError, ValueError):
            raise FileError(f"{where}.{key} must be {wanted}, got {quoted(value)}") from None
    try:
        return cls(**read)
    except SpecError as error:
        raise FileError(f"{where}: {error}") from error


def same_keys(values: dict[str, Any], allowed: set[str], required: set[str], where: str) -> None:
    """Refuse unknown and missing fields."""
    if unknown := sorted(set(values) - allowed):
        raise FileError(f"{where}: unknown field {unknown[0][:60]!r}; known are {', '.join(sorted(allowed))}")
    if missing := sorted(required - set(values)):
        raise FileError(f"{where}: field {missing[0]!r} is missing")


def is_whole(value: Any) -> bool:
    """Tell whether a value is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def _only(test: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """Return what hands a value on if it passes a test."""

    def convert(value: Any) -> Any:
        if not test(value):
            raise TypeError
        return value

    return convert


def _whole(least: int, below: int = 2**31) -> Callable[[Any], int]:
    return _only(lambda value: is_whole(value) and least <= value < below)


_text = _only(lambda value: isinstance(value, str))
_size = _only(lambda value: value is None or isinstance(value, str) or (is_whole(value) and 0 <= value < 2**31))


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        raise TypeError  # neither NaN nor infinity is less, and all that is left fits in float32
    return float(value)


def _list(value: Any, convert: Callable[[Any], Any]) -> tuple[Any, ...]:
    return tuple(convert(v) for v in _only(lambda v: isinstance(v, list))(value))


def _by_width(value: Any, convert: Callable[[Any], Any], widths: Callable[[Any], object]) -> tuple[Any, ...]:
    """Read a list of which no two entries may be for the same widths."""
    found = _list(value, convert)
    if len({widths(entry) for entry in found}) != len(found):
        raise SpecError("a width is listed twice")
    return found


def _range(value: Any) -> tuple[int, Range]:
    bits, low, high, source = _list(value, lambda part: part)
    return check_width(bits), Range(_number(low), _number(high), _text(source))


def _extras(cls: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Return what reads a list of extras."""
    kinds = [_whole(0, 2**32) if field.type == "int" else _bytes for field in dataclasses.fields(cls)]

    def one(value: Any) -> Any:
        parts = _list(value, lambda part: part)
        return cls(*(convert(part) for convert, part in zip(kinds, parts, strict=True)))

    return lambda value: _by_width(value, one, lambda extra: extra.pair)


def _bytes(value: Any) -> bytes:
    return base64.b64decode(_text(value), validate=True)


_EXTRAS: dict[str, type[Any]] = {"rounded": Rounded, "shifts": Shift}

_FIELDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    **dict.fromkeys(("name", "tensor", "value", "kind", "weight", "input", "reason", "because"), ("a text", _text)),
    **dict.fromkeys(("symmetric", "centred", "sums", "clip"), ("true or false", _only(lambda v: isinstance(v, bool)))),
    **dict.fromkeys(("axis", "channels"), ("a whole number from 0 on", _whole(0))),
    **dict.fromkeys(("file", "sha256"), ("a text", _text)),
    "bytes": ("a whole number from 1 on", _whole(1, 2**48)),
    "groups": ("a whole number from 1 on", _whole(1)),
    "floor": ("a width", check_width),
    "shape": ("a list of sizes", lambda value: _list(value, _size)),
    "mean": ("a list of finite numbers", lambda value: _list(value, _number)),
    "ranges": ("a list of [width, low, high, where from]", lambda value: _by_width(value, _range, lambda r: r[0])),
    "rounded": (
        "a list of [weights, activations, mark, scale, zero, ranks], the last three in base64",
        _extras(Rounded),
    ),
    "shifts": ("a list of [weights, activations, numbers in base64]", _extras(Shift)),
}
"""What each field of an entry must be, in words and as the function that sees to it."""
