"""How long work tells that it moves on: a function that starts a bar, and by default none."""

from __future__ import annotations

from collections.abc import Callable

Advance = Callable[[int], None]
Start = Callable[[str, int], Advance]
"""Starts a progress bar of so many steps, 0 where nobody knows how many; returns what moves it on."""


def quiet(name: str, total: int) -> Advance:
    """Start no progress bar."""
    return lambda steps: None
