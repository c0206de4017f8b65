from __future__ import annotations

import dataclasses
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from anybit.cli.search import search as search_verb
from anybit.data import Dataset, Split, load_dataset
from anybit.errors import NonFiniteError, RecipeError, SpecError
from anybit.train import search as module
from anybit.train.loop import train
from anybit.train.recipe import DataRecipe, ModelRecipe, OptimizerRecipe, PenaltyRecipe, Recipe
from anybit.train.search import (
    BARELY,
    GROWTH,
    Knob,
    Tracked,
    choose_best,
    choose_strongest,
    next_value,
    nice,
    part_of,
    propose,
    search,
    study_name,
    track,
    try_value,
)

TINY = Recipe(
    name="tiny",
    epochs=3,
    model=ModelRecipe("small-conv", multiplier=0.25),
    data=DataRecipe("digits", batch=64, augment=False),
    optimizer=OptimizerRecipe(lr=0.05),
)
LAMBDA = Knob(("penalty.weight", "penalty.activation"))
RATE = Knob(("optimizer.lr",), (0.01, 0.03, 0.1))


@cache
def digits() -> Dataset:
    """Some of the digits; the test split would break whatever looked at it."""
    data = load_dataset("digits")
    broken = Split(torch.full((4, 1, 8, 8), float("nan")), torch.full((4,), 99))
    return dataclasses.replace(data, train=Split(data.train.x[:256], data.train.y[:256]), test=broken)


def storage(folder: Path) -> str:
    return f"sqlite:///{folder / 'deeper' / 'search.db'}"


class Scores:
    """Stands in for training: accuracy by value, and what was asked for."""

    def __init__(self, scores: dict[float, float]) -> None:
        self.scores, self.asked = scores, list[float]()
        self.stop_at: float | None = None
        self.error: BaseException = KeyboardInterrupt()

    def __call__(self, recipe: Recipe, data: Dataset, knob: Knob, value: float, *, device: Any = None) -> float:
        if value == self.stop_at:
            self.stop_at = None
            raise self.error
        self.asked.append(value)
        return self.scores[value]


def fake(monkeypatch: pytest.MonkeyPatch, scores: dict[float, float]) -> Scores:
    stand_in = Scores(scores)
    monkeypatch.setattr(module, "try_value", stand_in)
    return stand_in


# The grid and the choice


@given(st.floats(1e-12, 1e12))
def test_nice_numbers_are_near_and_stay(value: float) -> None:
    rounded = nice(value)
    assert abs(math.log10(rounded / value)) < 0.27  # half of the wider of the two steps, from 3 to 10
    assert nice(rounded) == rounded
    assert f"{rounded:.0e}"[0] in "13"


@given(st.floats(1e-6, 1e3), st.floats(1e-3, 1e6))
def test_the_proposed_strengths_span_the_order_of_the_loss(loss: float, penalty: float) -> None:
    values = propose(Tracked(loss, penalty))
    assert list(values) == sorted(set(values))
    ratios = [value * penalty / loss for value in values]
    assert 0.05 < ratios[0] < 0.2
    assert 5 < ratios[-1] < 20


@pytest.mark.parametrize("tracked", [Tracked(0.0, 1.0), Tracked(1.0, 0.0), Tracked(1.0, math.nan)])
def test_nothing_is_proposed_from_nothing(tracked: Tracked) -> None:
    with pytest.raises(SpecError, match="nothing to compare"):
        propose(tracked)


@given(st.dictionaries(st.floats(1e-6, 1e3), st.floats(0, 1), min_size=1), st.floats(0, 1), st.floats(0, 0.2))
def test_the_strongest_harmless_strength_wins(scores: dict[float, float], plain: float, tolerance: float) -> None:
    accuracies = {0.0: plain, **scores}
    chosen = choose_strongest(accuracies, tolerance)
    assert accuracies[chosen] >= plain - tolerance
    assert all(accuracies[value] < plain - tolerance for value in accuracies if value > chosen)


@given(st.dictionaries(st.floats(1e-6, 1e3), st.sampled_from([0.1, 0.2, 0.3]), min_size=1))
def test_the_best_value_wins_and_of_equals_the_smallest(scores: dict[float, float]) -> None:
    chosen = choose_best(scores)
    assert scores[chosen] == max(scores.values())
    assert all(value >= chosen for value in scores if scores[value] == scores[chosen])


def test_the_grid_grows_only_where_the_winner_is_at_its_end() -> None:
    strengths = {0.0: 0.9, 0.1: 0.9, 1.0: 0.9}
    assert next_value(strengths, 1.0) == 3.0
    assert next_value(strengths, 0.1) is None  # between zero and the next there is no end
    assert next_value(strengths, 0.0) == 0.03
    rates = {0.1: 0.9, 0.3: 0.8, 1.0: 0.7}
    assert next_value(rates, 0.1) == 0.03
    assert next_value(rates, 0.3) is None
    assert next_value(rates, 1.0) == 3.0


def test_what_cannot_be_searched_is_refused() -> None:
    with pytest.raises(SpecError, match="at least one key"):
        Knob(())
    with pytest.raises(SpecError, match=r"no range can be proposed for optimizer\.lr; give the values"):
        Knob(("optimizer.lr",))
    for value in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(SpecError, match="above zero"):
            Knob(("optimizer.lr",), (0.1, value))
    for share in (0.0, 1.1, -0.1):
        with pytest.raises(SpecError, match="share"):
            part_of(digits(), share)
    assert LAMBDA.aim == Knob(("penalty.kurtosis",)).aim == Knob(("penalty.noise",), (0.1,)).aim == "strongest"
    with pytest.raises(SpecError, match=r"no range can be proposed for penalty\.noise; give the values"):
        Knob(("penalty.noise",))
    assert RATE.aim == Knob(("penalty.weight", "optimizer.lr"), (1.0,)).aim == "best"
    with pytest.raises(RecipeError, match=r"unknown key 'penalty\.wieght'"):
        Knob(("penalty.wieght",), (1.0,)).apply(TINY, 1.0)


def test_a_part_of_the_data_is_always_the_same_part() -> None:
    part = part_of(digits(), 0.25)
    assert torch.equal(part.train.x, digits().train.x[:64])
    assert torch.equal(part.train.y, digits().train.y[:64])
    assert part.validation is digits().validation
    assert len(part_of(digits(), 1e-9).train) == 1


# Tracking and trials


def test_tracking_measures_the_penalty_without_applying_it() -> None:
    both = track(TINY, digits(), LAMBDA, steps=3)
    weights = track(TINY, digits(), Knob(("penalty.weight",)), steps=3)
    assert both.loss == weights.loss  # what is tracked changes nothing
    assert 0 < weights.penalty < both.penalty
    strong = TINY.changed({"penalty.weight": 5.0, "penalty.activation": 5.0})
    assert track(strong, digits(), LAMBDA, steps=3) == both
    l2 = track(TINY.changed({"penalty.norm": "l2"}), digits(), LAMBDA, steps=3)
    assert l2.penalty < both.penalty / 3
    orthogonal = track(TINY, digits(), Knob(("penalty.orthogonal",)), steps=3)
    assert orthogonal.penalty > 1
    assert orthogonal.loss == pytest.approx(both.loss)
    assert BARELY < 1e-9


def test_tracking_takes_the_median_of_so_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(model: object, recipe: Recipe, data: Dataset, *, log: Any, place: object) -> None:
        assert (recipe.epochs, len(data.train)) == (1, 3 * 64)
        for loss, weight, activation in ((1.0, 10.0, 1.0), (5.0, 30.0, 2.0), (2.0, 20.0, 9.0)):
            log(loss=loss, weight_norm=weight, activation_norm=activation)

    monkeypatch.setattr(module, "fit", fit)
    assert track(TINY, digits(), LAMBDA, steps=3) == Tracked(2.0, 29.0)


def test_a_trial_starts_from_the_checkpoint_and_counts_validation_accuracy(tmp_path: Path) -> None:
    _, results = train(TINY.changed({"epochs": 15}), digits(), tmp_path)
    start = str(tmp_path / "model.safetensors")
    still = TINY.changed({"init": start, "epochs": 1, "optimizer.momentum": 0.0, "optimizer.weight_decay": 0.0})
    accuracy = try_value(still, digits(), RATE, 1e-12)
    assert accuracy == pytest.approx(results["validation_accuracy"], abs=0.05)  # only the statistics move
    assert accuracy > 0.3
    assert try_value(still, digits(), RATE, 1e30) == 0.0  # diverged


def test_a_straight_through_trial_counts_the_accuracy_at_its_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = {"validation_accuracy": 0.9, "validation_accuracy_at_widths": 0.4}
    monkeypatch.setattr(module, "fit", lambda *args, **kwargs: [])
    monkeypatch.setattr(module, "validate", lambda *args, **kwargs: scores)
    assert try_value(TINY, digits(), RATE, 0.1) == 0.4
    del scores["validation_accuracy_at_widths"]
    assert try_value(TINY, digits(), RATE, 0.1) == 0.9


def test_only_divergence_counts_as_a_score(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(module, "fit", fail)
    error: Exception = NonFiniteError("the loss is nan")
    assert try_value(TINY, digits(), RATE, 0.1) == 0.0
    error = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        try_value(TINY, digits(), RATE, 0.1)


# The search


def test_a_real_search_from_tracking_to_choice(tmp_path: Path) -> None:
    train(TINY, digits(), tmp_path / "base")
    recipe = TINY.changed({"init": str(tmp_path / "base" / "model.safetensors")})
    seen: list[float] = []
    found = search(
        recipe, digits(), LAMBDA, storage=storage(tmp_path), share=0.5, on_trial=lambda value, _: seen.append(value)
    )
    assert found.tracked is not None
    assert {0.0, *propose(found.tracked)} <= set(found.accuracies)
    assert sorted(seen) == sorted(found.accuracies)  # each once
    assert found.chosen == choose_strongest(found.accuracies, found.tolerance)
    again = search(recipe, digits(), LAMBDA, storage=storage(tmp_path), share=0.5, on_trial=lambda v, _: seen.append(v))
    assert again == found
    assert len(seen) == len(found.accuracies)  # nothing new
    values = json.loads(json.dumps(found.to_dict()))
    assert values["chosen"] == found.chosen
    assert values["accuracies"] == [list(pair) for pair in sorted(found.accuracies.items())]
    assert values["tracked"] == {"loss": found.tracked.loss, "penalty": found.tracked.penalty}


def test_trials_are_short_and_see_a_part_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, float]] = []

    def look(recipe: Recipe, data: Dataset, knob: Knob, value: float, *, device: Any) -> float:
        seen.append((recipe.epochs, len(data.train), knob.apply(recipe, value).optimizer.lr))
        return -abs(value - 0.03)

    monkeypatch.setattr(module, "try_value", look)
    found = search(TINY, digits(), RATE, storage=storage(tmp_path), epochs=2, share=0.25)
    assert sorted(seen) == [(2, 64, 0.01), (2, 64, 0.03), (2, 64, 0.1)]
    assert (found.chosen, found.epochs, found.share, found.at_edge) == (0.03, 2, 0.25, False)


def test_the_grid_grows_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    knob = Knob(("penalty.kurtosis",), (0.1, 0.3))
    scores = fake(monkeypatch, dict.fromkeys((0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0), 0.9))
    found = search(TINY, digits(), knob, storage=storage(tmp_path))
    assert (found.chosen, found.at_edge) == (10.0, True)
    assert len(scores.asked) == 3 + GROWTH
    search(TINY, digits(), knob, storage=storage(tmp_path))
    assert len(scores.asked) == 3 + GROWTH  # grown values are remembered too


def test_where_every_strength_hurts_weaker_ones_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    knob = Knob(("penalty.kurtosis",), (0.1, 0.3))
    fake(monkeypatch, {0.0: 0.9, 0.1: 0.5, 0.3: 0.4, 0.03: 0.8, 0.01: 0.897})
    found = search(TINY, digits(), knob, storage=storage(tmp_path), tolerance=0.005)
    assert (found.chosen, found.at_edge) == (0.01, False)
    assert set(found.accuracies) == {0.0, 0.1, 0.3, 0.03, 0.01}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("stop")])
def test_an_interrupted_search_loses_one_trial(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = fake(monkeypatch, {0.01: 0.5, 0.03: 0.8, 0.1: 0.6})
    scores.stop_at, scores.error = 0.03, error
    with pytest.raises(type(error)):
        search(TINY, digits(), RATE, storage=storage(tmp_path))
    before = list(scores.asked)
    found = search(TINY, digits(), RATE, storage=storage(tmp_path))
    assert found.chosen == 0.03
    assert sorted(scores.asked) == [0.01, 0.03, 0.1]  # whatever was done before was not done again
    assert scores.asked[: len(before)] == before


def test_the_step_above_the_winner_is_halved_as_often_as_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    knob = Knob(("penalty.kurtosis",), (0.01, 0.1, 1.0))
    monkeypatch.setattr(module, "try_value", lambda recipe, data, knob, value, device: 0.9 if value <= 0.2 else 0.5)
    seen: list[float] = []
    found = search(
        TINY, digits(), knob, storage=storage(tmp_path), finer=3, on_trial=lambda value, _: seen.append(value)
    )
    assert seen[4:] == [0.32, 0.18, 0.24]
    assert (found.chosen, found.at_edge) == (0.18, False)
    rate = search(TINY, digits(), RATE, storage=storage(tmp_path), finer=3)
    assert set(rate.accuracies) <= {0.01, 0.03, 0.1, 0.003, 0.001, 0.0003}  # the best of some is not made finer


def test_trials_with_other_data_or_other_weights_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = fake(monkeypatch, {0.01: 0.5, 0.03: 0.8, 0.1: 0.6})
    said: list[str] = []

    def asked(recipe: Recipe, data: Dataset) -> int:
        scores.asked.clear()
        search(recipe, data, RATE, storage=storage(tmp_path), share=1.0, say=said.append)
        return len(scores.asked)

    assert (asked(TINY, digits()), asked(TINY, digits()), said) == (3, 0, [])
    changed = Split(digits().train.x.clone(), digits().train.y)
    changed.x[0, 0, 0, 0] += 1
    assert asked(TINY, dataclasses.replace(digits(), train=changed)) == 3
    assert len(said) == 1
    assert "trials of this recipe with other data or other starting weights; they are not used" in said[0]
    other = Split(digits().validation.x, digits().validation.y.flip(0))
    assert asked(TINY, dataclasses.replace(digits(), validation=other)) == 3
    assert asked(TINY, digits()) == 0
    init = tmp_path / "base" / "model.safetensors"
    tuned = TINY.changed({"init": str(init)})
    said.clear()
    train(TINY, digits(), init.parent)
    assert (asked(tuned, digits()), asked(tuned, digits()), said) == (3, 0, [])
    train(TINY.changed({"seed": 1}), digits(), init.parent)
    assert (asked(tuned, digits()), len(said)) == (3, 1)


def test_tracking_is_done_once_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, dict.fromkeys((0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3), 0.9) | {0.1: 0.5})
    tracks: list[str] = []

    def track_once(recipe: Recipe, data: Dataset, knob: Knob, *, device: Any) -> Tracked:
        tracks.append(recipe.name)
        return Tracked(0.5 * 10 ** len(tracks), 500.0)  # on another machine it might come out differently

    monkeypatch.setattr(module, "track", track_once)
    one, two = (search(TINY, digits(), LAMBDA, storage=storage(tmp_path)) for _ in range(2))
    assert tracks == ["tiny"]
    assert one == two
    assert one.tracked == Tracked(5.0, 500.0)
    assert set(propose(Tracked(5.0, 500.0))) < set(one.accuracies)


def test_where_nothing_was_learned_a_search_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    knob = Knob(("penalty.kurtosis",), (0.1, 0.3, 1.0))
    said: list[str] = []

    def warned(zero: float, recipe: Recipe, name: str, knob: Knob = knob) -> bool:
        fake(monkeypatch, {0.0: zero, 0.01: zero - 0.1, 0.1: zero, 0.3: zero - 0.1, 1.0: zero - 0.1})
        said.clear()
        search(recipe.changed({"name": name}), digits(), knob, storage=storage(tmp_path), say=said.append)
        return bool(said)

    assert warned(0.2, TINY, "a")
    assert said[0].startswith("warning: without the penalty the trials reach only 20.0 %, near guessing")
    assert not warned(0.9, TINY, "b")
    base = tmp_path / "base"
    train(TINY.changed({"epochs": 1}), digits(), base)
    assert not warned(0.2, TINY.changed({"init": str(base / "model.safetensors")}), "c")
    assert not warned(0.2, TINY, "d", knob=Knob(("optimizer.lr",), (0.01, 0.1, 0.3)))  # a rate has no zero


def test_other_settings_are_another_study() -> None:
    start = torch.nn.Linear(1, 1)
    name = study_name(TINY, digits(), RATE.keys, start)
    assert name == study_name(TINY, digits(), RATE.keys, start)
    others = [
        study_name(TINY.changed({"optimizer.momentum": 0.5}), digits(), RATE.keys, start),
        study_name(TINY.changed({"seed": 1}), digits(), RATE.keys, start),
        study_name(TINY, part_of(digits(), 0.5), RATE.keys, start),
        study_name(TINY, dataclasses.replace(digits(), name="other"), RATE.keys, start),
        study_name(TINY, digits(), LAMBDA.keys, start),
        study_name(TINY, digits(), RATE.keys, torch.nn.Linear(1, 1)),
    ]
    assert len({name, *others}) == 7
    # How it is computed changes nothing.
    assert study_name(TINY.changed({"speed.channels_last": True}), digits(), RATE.keys, start) == name


# The command


def run(*words: str) -> Any:
    app = typer.Typer()
    app.command()(search_verb)
    return CliRunner().invoke(app, list(words))


def save(folder: Path, recipe: Recipe) -> Path:
    path = folder / "recipe.toml"
    path.write_text(
        f'name = "{recipe.name}"\nepochs = 2\n[model]\nname = "small-conv"\nmultiplier = 0.25\n'
        '[data]\nname = "digits"\naugment = false\n[optimizer]\nlr = 0.05\n'
    )
    return path


def test_the_command_prints_and_writes_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, {0.01: 0.5, 0.03: 0.8, 0.1: 0.6})
    out = tmp_path / "found.json"
    result = run(
        str(save(tmp_path, TINY)), "--vary", "optimizer.lr", "--values", "0.01, 0.03,0.1",
        "--storage", storage(tmp_path), "--out", str(out),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "chosen: optimizer.lr = 0.03" in result.output
    assert "80.00" in result.output
    values = json.loads(out.read_text())
    assert values["chosen"] == 0.03
    assert values["recipe"]["name"] == "tiny"
    assert values["origin"]["commit"]


def test_the_command_says_when_the_winner_is_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "try_value", lambda recipe, data, knob, value, device: value)
    words = ("--vary", "optimizer.lr", "--values", "0.01", "--storage", storage(tmp_path))
    result = run(str(save(tmp_path, TINY)), *words)
    assert "end of what was tried" in result.output


def test_the_tolerance_is_in_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, {0.0: 0.9, 0.1: 0.88, 0.3: 0.8, 0.03: 0.9})
    words = ("--vary", "penalty.kurtosis", "--values", "0.03,0.1,0.3", "--storage", storage(tmp_path))
    assert "penalty.kurtosis = 0.03" in run(str(save(tmp_path, TINY)), *words).output
    assert "penalty.kurtosis = 0.1" in run(str(save(tmp_path, TINY)), *words, "--tolerance", "3").output


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (("--values", "a"), SpecError, "numbers separated by commas; got 'a'"),
        (("--vary", ""), SpecError, "at least one key"),
        (("--share", "2"), RecipeError, "recipe.toml: the share"),
        (("--vary", "optimizer.lrr", "--values", "1"), RecipeError, "unknown key 'optimizer.lrr'"),
    ],
)
def test_bad_words_are_one_clear_error(
    words: tuple[str, ...], error: type[Exception], message: str, tmp_path: Path
) -> None:
    result = run(str(save(tmp_path, TINY)), *words, "--storage", storage(tmp_path))
    assert isinstance(result.exception, error)
    assert message in str(result.exception)


def test_penalties_of_the_recipe_stay_on_while_another_is_searched() -> None:
    recipe = dataclasses.replace(TINY, penalty=PenaltyRecipe(kurtosis=0.1))
    changed = LAMBDA.apply(recipe, 0.01)
    assert (changed.penalty.kurtosis, changed.penalty.weight, changed.penalty.activation) == (0.1, 0.01, 0.01)
