from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from anybit import demo
from anybit.common.progress import Advance
from anybit.pages.rows import read_rows
from anybit.spec import Bits, Row
from anybit.task.checkpoint import load_model
from anybit.train.side_by_side import SideBySide, one_by_one

FEW = tuple(Bits(w, a) for w in (32, 4, 2) for a in (32, 4, 2))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same experiment with one epoch each and fewer widths."""
    for name in ("BASE", "TUNE"):
        recipe = getattr(demo, name)
        small = dataclasses.replace(recipe, epochs=1, model=dataclasses.replace(recipe.model, multiplier=0.25))
        monkeypatch.setattr(demo, name, small)
    monkeypatch.setattr(demo, "GRID", FEW)


@pytest.mark.usefixtures("short")
def test_the_whole_way_leaves_rows_checkpoints_and_a_page(tmp_path: Path) -> None:
    bars: dict[str, list[int]] = {}

    def start(name: str, total: int) -> object:
        bars[name] = [total, 0]

        def advance(steps: int) -> None:
            bars[name][1] += steps

        return advance

    made = demo.run_demo(tmp_path, seeds=(0, 1), start=start, workers=1)  # type: ignore[arg-type]
    file = read_rows(tmp_path / "rows.json")
    assert file.rows == made.rows
    assert len(file.rows) == 2 * 2 * len(FEW)
    assert {row.label for row in file.rows} == {demo.PLAIN, demo.TRAINED}
    assert {row.seed for row in file.rows} == {0, 1}
    text = (tmp_path / "report.html").read_text()
    assert text.count('class="heat"') == 3  # the difference, and each of the two
    assert len(text) < 300_000
    assert "missing" not in text
    assert all(total == done for total, done in bars.values())
    for seed in (0, 1):
        _, base = load_model(tmp_path / f"base-{seed}" / "model.safetensors")
        folders = [tmp_path / f"{name}-training-{seed}" for name in ("usual", "any-width")]
        for folder, any_width in zip(folders, (False, True), strict=True):
            _, about = load_model(folder / "model.safetensors")
            assert about["recipe"]["penalty"]["any_width"] is any_width
            assert about["recipe"]["epochs"] == base["recipe"]["epochs"]
            assert about["recipe"]["init"].endswith(f"base-{seed}/model.safetensors")
        logs = [(folder / "log.jsonl").read_text().splitlines() for folder in folders]
        assert len(logs[0]) == len(logs[1])  # the same number of steps
        first = [json.loads(log[0]) for log in logs]
        assert first[0]["loss"] == pytest.approx(first[1]["loss"])  # from the same weights, on the same batch


@pytest.mark.usefixtures("short")
def test_side_by_side_gives_the_same_numbers(tmp_path: Path) -> None:
    """Processes import the module anew and see its own settings, so only sweeping is shared out here."""
    demo.run_demo(tmp_path, seeds=(0,), workers=1)
    jobs = [
        (tmp_path / "usual-training-0", demo.PLAIN, 0, FEW, "paper"),
        (tmp_path / "any-width-training-0", demo.TRAINED, 0, FEW, "paper"),
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


def test_the_text_says_what_the_default_settings_do() -> None:
    rows = [
        Row(
            label,
            seed,
            bits.weights,
            bits.activations,
            accuracy + 0.01 * bits.weights * (label == demo.PLAIN),
            None,
            450,
        )
        for label, accuracy in ((demo.PLAIN, 0.9), (demo.TRAINED, 0.95))
        for bits in demo.SHOWN
        for seed in (0, 1)
    ]
    said = demo.describe(rows)[-1]
    assert said.endswith("they differ most at W2A8: 92.0 % trained as usual, 95.0 % for any width.")
