from __future__ import annotations

import dataclasses
import json

import pytest

from anybit.errors import SpecError
from anybit.spec import Bits, QuantSpec, Range, Row


@pytest.mark.parametrize("bits", [*range(2, 17), 32])
def test_every_width_is_accepted_and_survives_text(bits: int) -> None:
    pair = Bits(bits, 8)
    assert Bits.parse(str(pair)) == pair


@pytest.mark.parametrize("bits", [-1, 0, 1, 17, 31, 33, 64, 4.0, "4", True, None])
def test_other_widths_are_refused_with_the_value(bits: object) -> None:
    with pytest.raises(SpecError, match="weights must be") as caught:
        Bits(bits, 8)  # type: ignore[arg-type]
    assert repr(bits).strip("'") in str(caught.value)


@pytest.mark.parametrize("text", ["", "W4", "4", "a4w8", "W4A", "w4a8x", "four,four"])
def test_widths_that_are_no_pair(text: str) -> None:
    with pytest.raises(SpecError, match="looks like W4A8"):
        Bits.parse(text)


@pytest.mark.parametrize("bits", range(2, 17))
def test_levels(bits: int) -> None:
    low, high = QuantSpec(bits).levels
    assert (low, high) == (-high, 2 ** (bits - 1) - 1)
    assert QuantSpec(bits, signed=False).levels == QuantSpec(bits, symmetric=False).levels == (0, 2**bits - 1)


def test_float_has_no_levels() -> None:
    with pytest.raises(SpecError, match="no levels"):
        _ = QuantSpec(32).levels


@pytest.mark.parametrize(("low", "high"), [(1.0, 0.0), (float("nan"), 1.0), (0.0, float("inf"))])
def test_broken_ranges(low: float, high: float) -> None:
    with pytest.raises(SpecError, match="from low to high"):
        Range(low, high, "test")


@pytest.mark.parametrize(
    "text", ["W" + "9" * 5000 + "A4", "W4A" + "9" * 5000, "W999999999A4", "W0A4", "W-4A4", "", "4"]
)
def test_text_that_is_no_pair_of_widths(text: str) -> None:
    with pytest.raises(SpecError, match=r"looks like W4A8|must be 2 to 16") as caught:
        Bits.parse(text)
    assert len(str(caught.value)) < 200


def test_values_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Bits(4, 4).weights = 8  # type: ignore[misc]


def test_rows_survive_json() -> None:
    row = Row("l1", 3, 4, 8, accuracy=0.93, loss=0.2, n=100, kl=0.01)
    assert Row.from_dict(json.loads(json.dumps(row.to_dict()))) == row


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accurcy": 1.0}, "unknown key 'accurcy'; did you mean 'accuracy'"),
        ({"n": None}, "'n' must be a whole number"),
        ({"n": 0}, "at least one example"),
        ({"accuracy": "high"}, "'accuracy' must be a number"),
    ],
)
def test_bad_rows(change: dict[str, object], message: str) -> None:
    values = {**Row("a", 0, 4, 4, accuracy=0.5, loss=1.0, n=9).to_dict(), **change}
    with pytest.raises(SpecError, match=message):
        Row.from_dict(values)


def test_a_row_without_a_field() -> None:
    values = Row("a", 0, 4, 4, accuracy=0.5, loss=1.0, n=9).to_dict()
    del values["loss"]
    with pytest.raises(SpecError, match="missing key 'loss'"):
        Row.from_dict(values)
