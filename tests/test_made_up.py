"""Inputs that nobody brought: of which size they are, and what lies in them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from anybit.artifact.made_up import made_up_inputs, sound


class Engine:
    """Says what it takes, and takes it."""

    def __init__(self, **inputs: tuple[str, Sequence[int | str]]) -> None:
        self.inputs = [
            SimpleNamespace(name=name, type=f"tensor({kind})", shape=shape) for name, (kind, shape) in inputs.items()
        ]

    def get_inputs(self) -> list[Any]:
        return self.inputs

    def run(self, *given: Any) -> list[Any]:
        return []


def made(engine: Engine, **settings: Any) -> dict[str, Any]:
    return made_up_inputs(engine, ids=50, interval={}, where="file", **settings)[0]


def test_floating_point_numbers_of_free_length_are_sound() -> None:
    feed = made(Engine(audio=("float", [1, "samples"]), fmin=("float", []), fmax=("float", [])))
    assert feed["audio"].shape == (1, 4096)
    assert (float(feed["fmin"]), float(feed["fmax"])) == (0.0, 8000.0)


def test_letters_stay_whole_numbers_whatever_their_type() -> None:
    engine = Engine(letters=("float", ["n", "length"]))
    feed = made(engine, whole={"letters"})
    assert feed["letters"].shape == (1, 32)
    assert feed["letters"].dtype == np.float32
    assert set(feed["letters"].ravel()) <= set(map(float, range(50)))
    assert len(set(feed["letters"].ravel())) > 5


def test_sound_falls_silent_and_is_loud_elsewhere() -> None:
    waves = [2 * sound((1, 8192), np.random.default_rng(seed)).ravel() - 1 for seed in range(8)]
    parts = [np.sqrt(np.square(wave.reshape(-1, 256)).mean(1)) for wave in waves]
    assert min(float(part.min()) for part in parts) < 1e-3
    assert max(float(part.max()) for part in parts) > 0.05


def test_what_another_network_made_is_no_sound() -> None:
    """A decoder: sound would leave most of the interval empty, and what it really gets fills it."""
    inputs = {"encoder_outputs": ("float", [1, "length", 256]), "hidden": ("float", [1, 1, 256])}
    feed = made(Engine(letter=("int32", [1, 1]), **inputs))
    assert all(np.ptp(np.quantile(feed[name], (0.01, 0.99))) > 0.5 for name in inputs)
