"""What the server says: an answer, or a refusal with a plain sentence."""

from __future__ import annotations

import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from anybit.errors import AnybitError


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


def refusal(status: HTTPStatus, message: str) -> Answer:
    """Return an answer that says what is wrong.

    >>> refusal(HTTPStatus.NOT_FOUND, "no such page").body
    b'{"error": "no such page"}'
    """
    return say({"error": message}, status)
