"""The routes of the page: each one a function from query and body to an answer. Nothing else can be reached."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from anybit.errors import AnybitError, SpecError
from anybit.policy import BATTERY, Chooser, Reading, Step, battery
from anybit.serve.model import LiveModel, pair
from anybit.serve.upload import ARRAYS, LARGEST_UPLOAD, TYPES, Example
from anybit.spec import FLOAT, Bits


@dataclass(frozen=True)
class Answer:
    """The body of a response, its media type and its status."""

    body: bytes
    kind: str
    status: HTTPStatus = HTTPStatus.OK


class Refused(AnybitError):  # noqa: N818
    """A request that is not served; `status` is what HTTP calls the reason."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        self.status = status
        super().__init__(message)


def say(value: Any, status: HTTPStatus = HTTPStatus.OK) -> Answer:
    """Return an answer in JSON.

    >>> say({"bits": "W4A8"}).body
    b'{"bits": "W4A8"}'
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return Answer(text.encode("utf-8", "replace"), "application/json; charset=utf-8", status)


Query = Mapping[str, str]
Route = Callable[[Query, bytes], Answer]

WIDTHS = (*range(2, 9), FLOAT)
MARGIN = 3.0
"""Percent of charge above a border at which a wider width comes back, as `anybit run` has it."""

_FILES = {
    "": ("page.html", "text/html; charset=utf-8"),
    "page.js": ("page.js", "text/javascript; charset=utf-8"),
    "page.css": ("page.css", "text/css; charset=utf-8"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
}


class App:
    """The page of one model."""

    def __init__(
        self,
        model: LiveModel,
        *,
        steps: tuple[Step, ...] = (),
        examples: tuple[Example, ...] = (),
        machine: Reading | None = None,
    ) -> None:
        self.model, self.examples, self.machine = model, examples, machine
        self.steps = tuple(sorted(steps or BATTERY))
        self.policy = battery(*self.steps)
        self.routes: dict[str, tuple[str, Route]] = {
            "about": ("GET", lambda query, body: say(self.about())),
            "policy": ("GET", lambda query, body: self.choose(query)),
            "footprint": ("GET", lambda query, body: say(model.footprint(bits_of(query)))),
            "predict": ("POST", lambda query, body: say(model.predict(body, bits_of(query)))),
        }
        for route, (name, kind) in _FILES.items():
            self.routes[route] = "GET", _fixed((Path(__file__).parent / name).read_bytes(), kind)
        for i, example in enumerate(examples):
            self.routes[f"examples/{i}"] = "GET", _fixed(example.data, example.kind)

    def find(self, method: str, name: str) -> Route:
        """Return the route of that name, or refuse."""
        if name not in self.routes:
            raise Refused(HTTPStatus.NOT_FOUND, "there is nothing at this address; open the page itself")
        wanted, route = self.routes[name]
        if method != wanted:
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, f"this address takes {wanted}, got {method}")
        return route

    def about(self) -> dict[str, Any]:
        """Return what the page shows before anything is uploaded."""
        machine = self.machine
        widths = {width for step in self.steps for width in (step.bits.weights, step.bits.activations)}
        return {
            "name": self.model.session.master.path.name,
            "takes": self.model.fed_with,
            "pictures": self.model.how is not None,
            "classes": self.model.classes,
            "widths": sorted(widths | set(WIDTHS)),
            "examples": [example.name for example in self.examples],
            "measured": _measured(self.model.session.master.header.about),
            "steps": [{"percent": step.percent, "bits": str(step.bits)} for step in self.steps],
            "margin": MARGIN,
            "machine": None if machine is None else {"percent": machine.percent, "on_mains": machine.on_mains},
            "limit": LARGEST_UPLOAD,
            "types": [*(sorted(TYPES.values()) if self.model.how is not None else []), *ARRAYS.values()],
        }

    def choose(self, query: Query) -> Answer:
        """Return what the policy chooses; `now` is what it chose before, if anything, so that it does not flap."""
        chooser = Chooser(self.policy, margin=MARGIN)
        if "now" in query:
            chooser.bits = Bits.parse(query["now"][:20])
        mains = query.get("mains")
        if mains not in ("0", "1"):
            raise SpecError(f"mains must be 0 or 1, got {mains!r}"[:80])
        return say(pair(chooser.choose(Reading(percent_of(query), mains == "1"))))


def bits_of(query: Query) -> Bits:
    """Return the pair of widths that a query names.

    >>> str(bits_of({"weights": "4", "activations": "8"}))
    'W4A8'
    """
    found = {}
    for key in ("weights", "activations"):
        text = query.get(key, "")
        if not re.fullmatch(r"[0-9]{1,2}", text):
            raise SpecError(f"{key} must be a width such as 8, got {text[:20]!r}")
        found[key] = int(text)
    return Bits(**found)


def percent_of(query: Query) -> float:
    """Return the charge that a query names.

    >>> percent_of({"percent": "37.5"})
    37.5
    """
    text = query.get("percent", "")
    if not re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,6})?", text) or float(text) > 100:
        raise SpecError(f"percent must be a number from 0 to 100, got {text[:20]!r}")
    return float(text)


def _fixed(body: bytes, kind: str) -> Route:
    answer = Answer(body, kind)
    return lambda query, body: answer


def _measured(about: dict[str, Any]) -> dict[str, float]:
    """Return the accuracies that the master tells; whatever else stands there is left out."""
    found = about.get("measured")
    pairs = found.items() if isinstance(found, dict) else ()
    return {k: float(v) for k, v in pairs if isinstance(v, int | float) and 0 <= v <= 1}
