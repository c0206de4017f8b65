"""From plain values to frozen dataclasses, strictly: an unknown key or a wrong type is an error that names the key."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, TypeVar

from anybit.common.text import did_you_mean, quoted
from anybit.errors import AnybitError, RecipeError, SpecError

T = TypeVar("T")


def from_mapping(cls: type[T], values: dict[str, Any], *, where: str = "", error: type[AnybitError] = RecipeError) -> T:
    """Build the dataclass `cls` from plain values, checking every key and type on the way down.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Point:
    ...     x: int
    ...     label: str = "here"
    >>> from_mapping(Point, {"x": 3})
    Point(x=3, label='here')
    >>> from_mapping(Point, {"x": 3, "lable": "there"})
    Traceback (most recent call last):
    anybit.errors.RecipeError: unknown key 'lable'; did you mean 'label'?
    """
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            near = did_you_mean(key, fields, where=where, cutoff=0.5)
            raise error(f"unknown key {quoted(where + key)}{near or '; valid keys are ' + ', '.join(fields)}")
    converted = {key: _convert(hints[key], value, where + key, error) for key, value in values.items()}
    missing = [
        name for name, field in fields.items()
        if name not in converted
        and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]  # fmt: skip
    if missing:
        raise error(f"missing key {where + missing[0]!r}")
    try:
        return cls(**converted)
    except SpecError as wrong:
        raise error(f"{where}{wrong}") from wrong


def _convert(hint: Any, value: Any, key: str, error: type[AnybitError]) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise error(f"{key!r} must be a table ([{key}]), got {quoted(value)}")
        return from_mapping(typing.cast(type[Any], hint), value, where=f"{key}.", error=error)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        (inner,) = [a for a in arguments if a is not type(None)]
        return None if value is None else _convert(inner, value, key, error)
    if origin is typing.Literal:
        if value in arguments and not isinstance(value, bool):
            return value
        nearest = did_you_mean(quoted(value).strip("'"), map(str, arguments))
        raise error(f"{key!r} must be one of {', '.join(map(str, arguments))}; got {quoted(value)}{nearest}")
    if origin is tuple:
        if not isinstance(value, list):
            raise error(f"{key!r} must be a list, got {quoted(value)}")
        return tuple(_convert(arguments[0], item, f"{key}[{i}]", error) for i, item in enumerate(value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError as large:
            raise error(f"{key!r} must be a number that fits in 64 bits, got {quoted(value)}") from large
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise error(f"{key!r} must be {_spoken(hint)}, got {quoted(value)}")
    return value


def _spoken(hint: type) -> str:
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return names.get(hint, hint.__name__)
