from __future__ import annotations

import dataclasses
import itertools
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anybit
from anybit.data import Batches, Dataset, Split, load_dataset
from anybit.errors import CheckpointError, NonFiniteError, SpecError
from anybit.evaluate.accuracy import evaluate
from anybit.models import build_model
from anybit.train.checkpoint import load_model, read_checkpoint
from anybit.train.loop import fit, make_optimizer, steps_of, train
from anybit.train.recipe import DataRecipe, ModelRecipe, OptimizerRecipe, PenaltyRecipe, Recipe
from anybit.train.schedule import learning_rate

TINY = Recipe(
    name="tiny",
    epochs=1,
    model=ModelRecipe("small-conv", width=0.25),
    data=DataRecipe("digits", batch=64),
    optimizer=OptimizerRecipe(lr=0.05),
    penalty=PenaltyRecipe(weight=1e-3, activation=1e-3),
)


@cache
def digits() -> Dataset:
    """Some of the digits, so that an epoch is four steps; the last batch is not full."""
    data = load_dataset("digits")
    return dataclasses.replace(data, train=Split(data.train.x[:230], data.train.y[:230]))


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def fitted(recipe: Recipe, *, global_seed: int = 0) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    torch.manual_seed(5)
    model = build_model("small-conv", channels=1, classes=10, width=0.25)
    torch.manual_seed(global_seed)
    lines: list[dict[str, Any]] = []
    fit(model, recipe, digits(), log=lambda **values: lines.append(values))
    return state_of(model), lines


def test_the_same_seed_gives_the_same_weights_bit_for_bit() -> None:
    first, log = fitted(TINY, global_seed=1)
    again, log_again = fitted(TINY, global_seed=2)
    assert same(first, again)
    assert log == log_again
    other, _ = fitted(dataclasses.replace(TINY, seed=1))
    assert not torch.equal(first["features.0.weight"], other["features.0.weight"])


def test_a_run_from_start_to_end_repeats_too(tmp_path: Path) -> None:
    states = []
    for index, seed in enumerate((0, 0, 1)):
        torch.manual_seed(index)
        model, _ = train(dataclasses.replace(TINY, seed=seed), digits(), tmp_path / str(index))
        states.append(state_of(model))
    assert same(states[0], states[1])
    assert not torch.equal(states[0]["classifier.weight"], states[2]["classifier.weight"])
    log = (tmp_path / "0" / "log.jsonl").read_bytes()
    assert log == (tmp_path / "1" / "log.jsonl").read_bytes()


def test_training_learns_and_leaves_the_network_in_evaluation_mode() -> None:
    torch.manual_seed(0)
    model = build_model("small-conv", channels=1, classes=10, width=0.25)
    recipe = dataclasses.replace(TINY, epochs=12, data=DataRecipe("digits", augment=False), penalty=PenaltyRecipe())
    fit(model, recipe, digits())
    assert not any(module.training for module in model.modules())
    assert evaluate(model, Batches(digits().test, 450)).accuracy > 0.5  # guessing is right in a tenth


def test_fit_reads_the_training_split_only() -> None:
    want, _ = fitted(TINY)
    broken = Split(torch.full((4, 1, 8, 8), float("nan")), torch.full((4,), 99))
    torch.manual_seed(5)
    model = build_model("small-conv", channels=1, classes=10, width=0.25)
    fit(model, TINY, dataclasses.replace(digits(), validation=broken, test=broken))
    assert same(state_of(model), want)


def test_the_penalty_changes_what_is_learned() -> None:
    penalized, log = fitted(TINY)
    plain, plain_log = fitted(dataclasses.replace(TINY, penalty=PenaltyRecipe()))
    assert not torch.equal(penalized["classifier.weight"], plain["classifier.weight"])
    assert log[0]["loss"] == pytest.approx(plain_log[0]["loss"], rel=1e-6)  # the logged loss is without penalty
    assert log[0]["weight_norm"] == pytest.approx(plain_log[0]["weight_norm"], rel=1e-3)
    assert log[0]["activation_norm"] == pytest.approx(plain_log[0]["activation_norm"], rel=1e-3)


def test_augmentation_is_a_switch() -> None:
    a, _ = fitted(TINY)
    b, _ = fitted(dataclasses.replace(TINY, data=DataRecipe("digits", batch=64, augment=False)))
    assert not torch.equal(a["classifier.weight"], b["classifier.weight"])


def test_the_run_folder_says_everything(tmp_path: Path) -> None:
    seen: list[int] = []
    recipe = dataclasses.replace(TINY, epochs=2, seed=3)
    model, results = train(recipe, digits(), tmp_path / "run", progress=seen.append)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["log.jsonl", "model.safetensors", "run.json"]

    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["recipe"] == recipe.to_dict()
    assert about["seed"] == 3
    assert about["commit"]
    assert {"python", "torch", "numpy", "anybit"} <= set(about["versions"])
    assert about["versions"]["torch"] == torch.__version__
    assert about["versions"]["anybit"] == anybit.__version__
    assert about["machine"]["cpu"]
    assert about["machine"]["cores"] >= 1
    assert about["date"].endswith("+00:00")
    assert about["results"] == results

    score = evaluate(model, Batches(digits().validation, 256))
    assert results == {"validation_accuracy": score.accuracy, "validation_loss": score.loss}

    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert len(lines) == sum(seen) == steps_of(recipe, digits()) == 8
    assert [line["step"] for line in lines] == list(range(8))
    assert [line["epoch"] for line in lines] == [0] * 4 + [1] * 4
    for line in lines:
        assert all(math.isfinite(line[name]) for name in ("loss", "weight_norm", "activation_norm", "lr"))
        assert line["weight_norm"] > 0
        assert line["activation_norm"] > 0
        want = learning_rate(line["step"], steps=8, peak=0.05)
        assert line["lr"] == want


@pytest.mark.parametrize(("weight", "activation"), [(0.0, 0.0), (1e-3, 0.0), (0.0, 1e-3)])
def test_both_norms_are_logged_whatever_is_penalized(weight: float, activation: float) -> None:
    _, both = fitted(TINY)
    _, log = fitted(dataclasses.replace(TINY, penalty=PenaltyRecipe(weight=weight, activation=activation)))
    for name in ("loss", "weight_norm", "activation_norm"):
        assert all(math.isfinite(line[name]) for line in log)
        assert log[0][name] == pytest.approx(both[0][name], rel=1e-3)  # the first step starts from the same weights


def test_the_checkpoint_is_the_network_and_says_what_it_is(tmp_path: Path) -> None:
    model, results = train(TINY, digits(), tmp_path)
    again, about = load_model(tmp_path / "model.safetensors")
    assert same(state_of(again), state_of(model))
    assert about["model"] == {"name": "small-conv", "channels": 1, "classes": 10, "width": 0.25}
    assert (about["data"], about["seed"], about["recipe"]) == ("digits", 0, TINY.to_dict())
    assert about["validation_accuracy"] == results["validation_accuracy"]


def test_the_penalty_starts_when_the_recipe_says() -> None:
    recipe = dataclasses.replace(TINY, epochs=3, penalty=PenaltyRecipe(weight=1e-2, activation=1e-2, start=1))
    _, log = fitted(recipe)
    assert [line["penalized"] for line in log] == [line["epoch"] >= 1 for line in log]
    _, plain = fitted(dataclasses.replace(recipe, penalty=PenaltyRecipe()))
    assert not any(line["penalized"] for line in plain)
    losses, plain_losses = ([line["loss"] for line in lines] for lines in (log, plain))
    assert losses[:5] == plain_losses[:5]  # the first penalized step is the fifth; it shows in the sixth
    assert all(a != b for a, b in zip(losses[5:], plain_losses[5:], strict=True))


@pytest.mark.parametrize(
    "settings",
    [
        {"weight": 1e-2, "engine": "double-backward"},
        {"weight": 1e-2, "activation": 1e-2, "norm": "l2"},
        {"weight": 1e-2, "objective": "worst-case"},
        {"weight": 1e-2, "scale": "range"},
        {"weight": 1e-2, "every": 2},
        {"weight": 1e-2, "ramp": 2},
        {"orthogonal": 1e-2},
        {"kurtosis": 1e-2},
        {"noise": True},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_every_setting_of_the_penalty_reaches_the_weights_and_repeats(settings: dict[str, Any]) -> None:
    recipe = dataclasses.replace(TINY, epochs=2, penalty=PenaltyRecipe(**settings))
    state, log = fitted(recipe, global_seed=1)
    again, _ = fitted(recipe, global_seed=2)
    assert same(state, again)
    plain = {key: value for key, value in settings.items() if key in ("weight", "activation") and len(settings) > 1}
    other, _ = fitted(dataclasses.replace(recipe, penalty=PenaltyRecipe(**plain)))
    assert not torch.equal(state["classifier.weight"], other["classifier.weight"])
    assert all(line["penalized"] for line in log)
    for name in {"orthogonal", "kurtosis"} & set(settings):
        assert all(math.isfinite(line[name]) for line in log)


def test_a_run_can_start_from_a_checkpoint(tmp_path: Path) -> None:
    train(TINY, digits(), tmp_path / "base")
    start = str(tmp_path / "base" / "model.safetensors")
    slow = OptimizerRecipe(lr=1e-30, weight_decay=0.0, momentum=0.0)
    recipe = dataclasses.replace(TINY, init=start, seed=9, optimizer=slow)
    model, _ = train(recipe, digits(), tmp_path / "tuned")
    before, _ = read_checkpoint(start)
    after = state_of(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
    assert not torch.equal(after["features.1.running_mean"], before["features.1.running_mean"])


@pytest.mark.parametrize(
    ("change", "message"),
    [({"width": 0.5}, "the model has"), ({"name": "vgg-like"}, "lacks|has")],
)
def test_a_checkpoint_of_another_model_is_refused_before_anything_is_written(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    train(TINY, digits(), tmp_path / "base")
    other = dataclasses.replace(TINY.model, **change)
    recipe = dataclasses.replace(TINY, model=other, init=str(tmp_path / "base" / "model.safetensors"))
    with pytest.raises(CheckpointError, match=message):
        train(recipe, digits(), tmp_path / "tuned")
    with pytest.raises(CheckpointError, match="no such file"):
        train(dataclasses.replace(TINY, init=str(tmp_path / "gone")), digits(), tmp_path / "tuned")
    assert not (tmp_path / "tuned").exists()


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt()])
def test_an_interrupted_run_keeps_its_log_and_makes_no_checkpoint(error: BaseException, tmp_path: Path) -> None:
    done = 0

    def stop(steps: int) -> None:
        nonlocal done
        done += steps
        if done == 3:
            raise error

    with pytest.raises(type(error)):
        train(TINY, digits(), tmp_path, progress=stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.partial", "run.json"]
    assert len((tmp_path / "log.partial").read_text().splitlines()) == 3
    assert json.loads((tmp_path / "run.json").read_text())["results"] == {}

    train(TINY, digits(), tmp_path)  # once more, and well
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl", "model.safetensors", "run.json"]


def test_a_run_that_diverges_says_so(tmp_path: Path) -> None:
    wild = OptimizerRecipe(lr=1e30, momentum=0.0, weight_decay=0.0)
    recipe = dataclasses.replace(TINY, epochs=2, optimizer=wild, penalty=PenaltyRecipe())
    with pytest.raises(NonFiniteError, match="learning rate"):
        train(recipe, digits(), tmp_path)
    # The same when only the last step goes wrong, so that no loss of a later step could tell.
    once = dataclasses.replace(recipe, epochs=1, data=DataRecipe("digits", batch=1000))
    with pytest.raises(NonFiniteError, match="after training the validation loss is"):
        train(once, digits(), tmp_path)
    assert not (tmp_path / "model.safetensors").exists()


def test_what_cannot_work_is_refused_before_the_first_step(tmp_path: Path) -> None:
    data = digits()
    flat = dataclasses.replace(data, train=Split(data.train.x.flatten(1), data.train.y))
    with pytest.raises(SpecError, match=r"take images \(channels, height, width\); the data has \(64,\)"):
        train(TINY, flat, tmp_path / "run")
    small = dataclasses.replace(data, train=Split(data.train.x[..., :2, :2], data.train.y))
    with pytest.raises(SpecError, match=r"small-conv cannot take inputs of shape \(1, 2, 2\)"):
        train(TINY, small, tmp_path / "run")
    for batch in (1, 229):
        single = dataclasses.replace(TINY, data=DataRecipe("digits", batch=batch))
        with pytest.raises(SpecError, match=f"data.batch = {batch} leaves a batch of one example out of 230"):
            train(single, data, tmp_path / "run")
    with pytest.raises(SpecError, match="did you mean 'small-conv'"):
        train(dataclasses.replace(TINY, model=ModelRecipe("small-cov")), data, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_optimizers_are_what_the_recipe_says() -> None:
    model = nn.Linear(2, 2)
    sgd = make_optimizer(OptimizerRecipe(lr=0.3, momentum=0.8, weight_decay=0.01), model)
    assert isinstance(sgd, torch.optim.SGD)
    assert {k: sgd.defaults[k] for k in ("lr", "momentum", "weight_decay", "nesterov")} == {
        "lr": 0.3,
        "momentum": 0.8,
        "weight_decay": 0.01,
        "nesterov": True,
    }
    assert not make_optimizer(OptimizerRecipe(momentum=0.0), model).defaults["nesterov"]
    adam = make_optimizer(OptimizerRecipe(name="adam", lr=0.3, weight_decay=0.01), model)
    assert isinstance(adam, torch.optim.AdamW)
    assert (adam.defaults["lr"], adam.defaults["weight_decay"]) == (0.3, 0.01)


@pytest.mark.parametrize("steps", [1, 2, 7, 100])
@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize("shape", ["cosine", "constant"])
def test_the_rate_rises_to_its_peak_and_never_leaves_its_bounds(steps: int, warmup: int, shape: str) -> None:
    rates = [learning_rate(i, steps=steps, peak=0.4, warmup=warmup, shape=shape) for i in range(steps)]
    assert all(0 < rate <= 0.4 for rate in rates)
    rise, rest = rates[:warmup], rates[warmup:]
    np.testing.assert_allclose(rise, [0.4 * (i + 1) / warmup for i in range(len(rise))])
    if rest:
        assert rest[0] == pytest.approx(0.4)
    if shape == "constant":
        assert all(rate == 0.4 for rate in rest)
    else:
        assert all(a > b for a, b in itertools.pairwise(rest))
        np.testing.assert_allclose(  # a half cosine is odd around its middle
            [a + b for a, b in zip(rest[1:], rest[:0:-1], strict=True)], 0.4
        )
