"""What a master says about itself: a JSON text in the ONNX file's metadata, with a version.

    anybit          the header below, as JSON
    anybit.digest   SHA-256 over the graph and the header, so that a damaged file is noticed before it is used

    {"version": 5, "store": "fp32", "plan": {...}, "about": {...}}

The plan names tensors and values of the graph. `about` is for people: where the file came from, how the network was
trained, what was measured. A master in two files says in `data` which one the second is. Reading is strict: an unknown,
missing or wrong field is an error with its path. Older versions are read too: 1 and 2 had the plan's lists apart.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from anybit.common.text import quoted
from anybit.errors import FileError, SpecError
from anybit.plan.points import Plan
from anybit.plan.text import entry, is_whole, plan_from_old, plan_from_values, plan_to_values, same_keys

VERSION = 5
"""What is written; 1 (in one file), 2 (in two) and 3 (no width has anything of its own) are read."""

KEY, DIGEST = "anybit", "anybit.digest"
STORES = ("fp32", "fp16", "int8")


@dataclass(frozen=True)
class Data:
    """The second file of a master that is too large for one: its name in the same folder, its size, its SHA-256."""

    file: str
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        if self.file in ("", ".", "..") or not self.file.isprintable() or set(self.file) & {"/", "\\", ":"}:
            raise SpecError(f"file must be the plain name of a file in the same folder, got {quoted(self.file)}")
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise SpecError(f"sha256 must be 64 lower-case hexadecimal digits, got {quoted(self.sha256)}")


@dataclass(frozen=True)
class Header:
    """Everything that the graph itself does not say."""

    plan: Plan
    store: str = "fp32"
    about: dict[str, Any] = field(default_factory=dict)
    data: Data | None = None

    def __post_init__(self) -> None:
        if self.store not in STORES:
            raise SpecError(f"store must be one of {', '.join(STORES)}; got {quoted(self.store)}")
        places = [entry.place for entry in (*self.plan.points, *self.plan.biases)]
        if twice := [name for name, count in Counter(places).items() if count > 1]:
            raise SpecError(f"the tensor or value {twice[0][:60]!r} is listed twice")


def write_header(header: Header) -> str:
    """Return the header as JSON.

    >>> write_header(Header(Plan()))
    '{"version": 5, "store": "fp32", "plan": {"points": [], "biases": [], "left": []}, "about": {}}'
    """
    values: dict[str, Any] = {"version": VERSION, "store": header.store, "plan": plan_to_values(header.plan)}
    last = {} if header.data is None else {"data": dataclasses.asdict(header.data)}
    try:
        return json.dumps({**values, "about": header.about, **last}, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise FileError(f"what a master says about itself must fit in JSON: {error}") from error


def read_header(text: str, *, where: str) -> Header:
    """Read what `write_header` wrote, trusting nothing; `where` names the file in errors."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{where}: metadata {KEY!r} is no JSON ({error}); save the master again") from error
    if not isinstance(values, dict):
        raise FileError(f"{where}: metadata {KEY!r} must be a JSON object, got {quoted(values)}")
    version: Any = values.get("version")
    if not is_whole(version) or version < 1:
        raise FileError(f"{where}: version must be a whole number from 1 on, got {quoted(version)}")
    if version > VERSION:
        raise FileError(
            f"{where}: version is {quoted(version)}, this anybit reads up to {VERSION}; "
            "update anybit: pip install -U anybit"
        )
    lists = {"plan"} if version >= 3 else {"weights", "biases", "activations"}
    needed = {"version", "store", "about"} | lists | ({"data"} if version == 2 else set())
    same_keys(values, needed | ({"data"} if version >= 3 else set()), needed, where)
    if not isinstance(values["about"], dict):
        raise FileError(f"{where}: about must be a JSON object, got {quoted(values['about'])}")
    if version >= 3:
        own = values["plan"] if version >= 5 else _without_extras(values["plan"])
        plan = plan_from_values(own, where=f"{where}: plan")
    else:
        plan = plan_from_old(values, where=where)
    data = entry(Data, values["data"], f"{where}: data") if "data" in values else None
    try:
        return Header(plan, store=values["store"], about=values["about"], data=data)
    except SpecError as error:
        raise FileError(f"{where}: {error}") from error


def _without_extras(plan: Any) -> Any:
    """Return the plan of an older version without what widths had of their own: its keys did not tell which pair."""
    lists = [plan.get(part) for part in ("points", "biases")] if isinstance(plan, dict) else []
    for values in (values for found in lists if isinstance(found, list) for values in found):
        if isinstance(values, dict):
            values.pop("rounded", None)
            values.pop("shifts", None)
    return plan
