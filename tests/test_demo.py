from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from anybit import demo
from anybit.common.progress import Advance
from anybit.pages.rows import read_rows
from anybit.spec import Bits
from anybit.task.checkpoint import load_model
from anybit.train.search import choose_strongest
from anybit.train.side_by_side import SideBySide, one_by_one

FEW = tuple(Bits(w, a) for w in (32, 4, 2) for a in (32, 4, 2))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same experiment with one epoch each, fewer strengths and fewer widths."""
    for name in ("BASE", "TUNE"):
        recipe = getattr(demo, name)
        small = dataclasses.replace(recipe, epochs=1, model=dataclasses.replace(recipe.model, multiplier=0.25))
        monkeypatch.setattr(demo, name, small)
    monkeypatch.setattr(demo, "STRENGTHS", (0.001, 0.003))
    monkeypatch.setattr(demo, "GRID", FEW)


@pytest.mark.usefixtures("short")
def test_the_whole_way_leaves_rows_checkpoints_and_a_page(tmp_path: Path) -> None:
    bars: dict[str, list[int]] = {}

    def start(name: str, total: int) -> object:
        bars[name] = [total, 0]

        def advance(steps: int) -> None:
            bars[name][1] += steps

        return advance

    result = demo.run_demo(tmp_path, seeds=(0, 1), start=start, workers=1)  # type: ignore[arg-type]
    file = read_rows(tmp_path / "rows.json")
    assert file.rows == result.file.rows
    assert len(file.rows) == 2 * 2 * len(FEW)
    assert {row.label for row in file.rows} == {demo.PLAIN, demo.PENALIZED}
    assert {row.seed for row in file.rows} == {0, 1}
    text = (tmp_path / "report.html").read_text()
    assert text.count('class="heat"') == 3  # the difference, and each of the two
    assert len(text) < 300_000
    assert "missing" not in text
    assert all(total == done for total, done in bars.values())
    assert set(result.validation) == {0.0, 0.001, 0.003}
    for seed in (0, 1):
        _, base = load_model(tmp_path / f"base-{seed}" / "model.safetensors")
        for value in (0.0, result.strength):
            _, about = load_model(tmp_path / f"tune-{value:g}-{seed}" / "model.safetensors")
            assert about["recipe"]["penalty"]["weight"] == about["recipe"]["penalty"]["activation"] == value
            assert about["recipe"]["epochs"] == base["recipe"]["epochs"]
            assert about["recipe"]["init"].endswith(f"base-{seed}/model.safetensors")
        logs = [(tmp_path / f"tune-{v:g}-{seed}" / "log.jsonl").read_text().splitlines() for v in (0.0, 0.003)]
        assert len(logs[0]) == len(logs[1])  # the same number of steps
        first = [json.loads(log[0]) for log in logs]
        assert first[0]["loss"] == pytest.approx(first[1]["loss"])  # from the same weights, on the same batch


@pytest.mark.usefixtures("short")
def test_side_by_side_gives_the_same_numbers(tmp_path: Path) -> None:
    """Processes import the module anew and see its own settings, so only sweeping is shared out here."""
    demo.run_demo(tmp_path, seeds=(0,), workers=1)
    jobs = [
        (tmp_path / "tune-0-0", demo.PLAIN, 0, FEW, "paper"),
        (tmp_path / "tune-0.001-0", demo.PENALIZED, 0, FEW, "paper"),
    ]
    drawn = {"here": 0, "there": 0}

    def advance(name: str) -> Advance:
        def move(steps: int) -> None:
            drawn[name] += steps

        return move

    here = one_by_one(demo._sweep, jobs, advance("here"))
    with SideBySide(2, jobs=2) as processes:
        there = processes.run(demo._sweep, jobs, advance("there"))
    assert drawn == {"here": 2 * len(FEW), "there": 2 * len(FEW)}
    assert [[row.accuracy for row in part] for part in here] == [[row.accuracy for row in part] for part in there]


def test_the_strongest_harmless_strength_is_chosen() -> None:
    validation = {0.0: 0.98, 0.001: 0.985, 0.003: 0.971, 0.006: 0.969, 0.012: 0.975}
    assert choose_strongest(validation, tolerance=0.01) == 0.012
    assert choose_strongest({0.0: 0.98, 0.1: 0.5}, tolerance=0.01) == 0.0


def test_the_text_says_how_the_strength_was_chosen() -> None:
    first, second = demo.describe(0.003, {0.0: 0.98, 0.003: 0.975, 0.1: 0.5})
    assert first.endswith("the only difference is the gradient l1 penalty, λ = 0.003.")
    assert second.endswith("(0: 98.0 %, 0.003: 97.5 %, 0.1: 50.0 %).")


def test_the_text_says_what_the_default_settings_do() -> None:
    text = demo.describe(0.003, {0.0: 0.99, 0.003: 0.985}, {demo.SHOWN[1]: 0.9512})
    assert text[-1].endswith("With anybit's default settings the network without penalty has 95.1 % at W3A3.")
