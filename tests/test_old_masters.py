"""Masters of versions 1 and 2, written by the code of that time with what it made of one input at several widths.

`two` lies in two files (version 2), all others in one. `dead` has a channel of zeros and one of nearly zeros: their
scale was their own then, and is at least 2**-16 of the weight's largest now.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from anybit.artifact.header import KEY
from anybit.artifact.master import open_master, write_master
from anybit.artifact.session import load

FOLDER = Path(__file__).parent / "old_masters"
NAMES = sorted(path.stem for path in FOLDER.glob("*.onnx"))
FAINT = [1, 2]
STORES = {"fp16": "fp16", "int8": "int8"}


def widths(arrays: dict[str, np.ndarray]) -> list[tuple[int, int]]:
    return [tuple(map(int, key[1:].split("A"))) for key in arrays if key.startswith("W")]  # type: ignore[misc]


def test_every_kind_is_there() -> None:
    assert NAMES == ["asymmetric", "channel", "dead", "fp16", "helpers", "int8", "tensor", "tied", "two"]
    versions = {}
    for name in NAMES:
        entries = {e.key: e.value for e in onnx.load(FOLDER / f"{name}.onnx", load_external_data=False).metadata_props}
        versions[name] = json.loads(entries[KEY])["version"]
    assert versions == {name: 2 if name == "two" else 1 for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_an_old_master_gives_what_it_gave_then(name: str) -> None:
    with np.load(FOLDER / f"{name}.npz") as file:
        arrays = dict(file)
    session = load(FOLDER / f"{name}.onnx", threads=1)
    assert session.master.header.store == STORES.get(name, "fp32")
    assert session.master.header.about["name"] == name
    pairs = widths(arrays)
    assert len(pairs) == 6
    for weights, activations in pairs:
        session.set_bits(weights=weights, activations=activations)
        want, got = arrays[f"W{weights}A{activations}"], session.run(arrays["x"])
        if name == "dead":
            # What the two faint channels of the last layer give is as close to the exact output as before, or closer.
            then, now = (np.abs(y[:, FAINT] - arrays["W32A32"][:, FAINT]).max() for y in (want, got))
            assert now <= then + 1e-4, (weights, activations)
            want, got = np.delete(want, FAINT, 1), np.delete(got, FAINT, 1)
        # Where the faint channels' bias does not fit 2**30 units, that of the others is not rounded either.
        close = 1e-4 if name == "dead" else 1e-5
        far = np.abs(got - want).max(1) > close * np.abs(want).max()
        assert far.mean() <= 0.05, (weights, activations)  # a code on the border


@pytest.mark.parametrize("name", NAMES)
def test_an_old_master_can_be_written_anew(name: str, tmp_path: Path) -> None:
    old = open_master(FOLDER / f"{name}.onnx")
    whole = old.model.copy()
    for weight in old.plan.weights:
        whole.graph.initializer.append(whole.tensor(old.weights[weight.name], weight.place))
    write_master(tmp_path / "new.onnx", whole, old.header)
    new = open_master(tmp_path / "new.onnx")
    assert new.plan == old.plan
    for key, array in old.weights.items():
        np.testing.assert_allclose(new.weights[key], array, rtol=1e-6)
