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
from safetensors.torch import load_file
from together import script_alone, script_together
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import anybit
from anybit.data import Batches, Dataset, Given, Split, load_dataset
from anybit.errors import CheckpointError, NonFiniteError, SpecError
from anybit.evaluate.sweep import evaluate
from anybit.models import build_model
from anybit.spec import Bits
from anybit.task.checkpoint import load_model, read_checkpoint
from anybit.task.task import prepared
from anybit.train.begin import make_optimizer
from anybit.train.clock import Clock, time_running
from anybit.train.loop import fit, steps_of, train, validate
from anybit.train.recipe import (
    DataRecipe,
    ModelRecipe,
    OptimizerRecipe,
    PenaltyRecipe,
    Recipe,
    parse_recipe,
)
from anybit.train.schedule import learning_rate
from anybit.train.straight import DrawnWidth, unfold

TINY = Recipe(
    name="tiny",
    epochs=1,
    model=ModelRecipe("small-conv", multiplier=0.25),
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
    model = build_model("small-conv", channels=1, classes=10, multiplier=0.25)
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
    model = build_model("small-conv", channels=1, classes=10, multiplier=0.25)
    recipe = dataclasses.replace(TINY, epochs=12, data=DataRecipe("digits", augment=False), penalty=PenaltyRecipe())
    fit(model, recipe, digits())
    assert not any(module.training for module in model.modules())
    assert evaluate(model, Batches(digits().test, 450)).accuracy > 0.5  # guessing is right in a tenth


def test_fit_reads_the_training_split_only() -> None:
    want, _ = fitted(TINY)
    broken = Split(torch.full((4, 1, 8, 8), float("nan")), torch.full((4,), 99))
    torch.manual_seed(5)
    model = build_model("small-conv", channels=1, classes=10, multiplier=0.25)
    fit(model, TINY, dataclasses.replace(digits(), validation=broken, test=broken))
    assert same(state_of(model), want)


@pytest.mark.parametrize("kind", ["plain", "straight through"])
def test_a_run_may_end_with_an_average_of_its_weights(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[dict[str, Tensor]] = []
    follow = AveragedModel.update_parameters

    def seen(average: AveragedModel, module: nn.Module) -> None:
        passed.append({name: value.detach().clone() for name, value in module.named_parameters()})
        follow(average, module)
        state[:] = [{name: value.detach().clone() for name, value in average.module.named_parameters()}]

    state: list[dict[str, Tensor]] = []
    monkeypatch.setattr(AveragedModel, "update_parameters", seen)
    recipe = TINY if kind == "plain" else straight()
    last, log = fitted(recipe)
    assert not passed
    found, log_again = fitted(recipe.changed({"optimizer.average": 0.75}))
    assert log == log_again  # the steps are the same ones
    assert len(passed) == len(log)
    want = passed[0]
    for number, weights in enumerate(passed[1:], start=1):
        keep = min(0.75, (1 + number) / (10 + number))
        want = {name: keep * want[name] + (1 - keep) * weights[name] for name in want}
    for name, value in want.items():
        torch.testing.assert_close(state[0][name], value, rtol=1e-4, atol=1e-6)
    assert not torch.equal(found["classifier.weight"], last["classifier.weight"])
    if kind == "plain":
        for name, value in want.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


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
    assert set(about["epoch_seconds"]) == {"wall", "processor"}
    for seconds in about["epoch_seconds"].values():
        assert len(seconds) == 2
        assert all(0 < second < 60 for second in seconds)

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
    assert about["model"] == {"name": "small-conv", "channels": 1, "classes": 10, "multiplier": 0.25}
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
        {"noise": 0.5},
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
    [({"multiplier": 0.5}, "the model has"), ({"name": "vgg-like"}, "lacks|has")],
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
    single = dataclasses.replace(TINY, data=DataRecipe("digits", batch=1))
    with pytest.raises(SpecError, match=r"data.batch = 1 gives batches of one example"):
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
    assert type(adam) is torch.optim.Adam
    assert (adam.defaults["lr"], adam.defaults["weight_decay"]) == (0.3, 0.01)
    assert type(make_optimizer(OptimizerRecipe(name="adamw"), model)) is torch.optim.AdamW


@pytest.mark.parametrize("own", [False, True])
def test_a_last_batch_of_one_does_not_end_the_epoch(own: bool) -> None:
    """229 of 230 examples leave one, which batch norm cannot take; a loader of the user's own may do the same."""
    data, recipe = digits(), dataclasses.replace(TINY, epochs=2, data=DataRecipe("digits", batch=229, augment=False))
    if own:
        whole = TensorDataset(data.train.x, data.train.y)
        data = dataclasses.replace(data, train=Given(DataLoader(whole, 229, shuffle=True)))
    lines: list[dict[str, Any]] = []
    model = build_model("small-conv", channels=1, classes=10, multiplier=0.25)
    fit(model, recipe, data, log=lambda **values: lines.append(values))
    assert len(lines) == 2
    assert all(math.isfinite(line["loss"]) for line in lines)


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


def test_time_in_which_a_process_was_stopped_does_not_count() -> None:
    assert time_running([5.0, 6.0, 8.0, 9.0]) == 4.0
    assert time_running([0.0, 1.0, 2.0, 3.0, 3600.0]) == 13.0
    assert time_running([0.0, 1.0, 12.0]) == 12.0  # of two steps the median is between them: nothing stands out
    assert time_running([1.0, 1.5]) == 0.5


def test_processor_time_does_not_run_while_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"perf_counter": 10.0, "process_time": 3.0}
    for name in now:
        monkeypatch.setattr(f"anybit.train.clock.time.{name}", lambda name=name: now[name])
    clock = Clock()
    for wall, processor in ((12.0, 4.0), (14.0, 4.5)):
        now.update(perf_counter=wall, process_time=processor)
        clock.tick()
    assert clock.read() == (4.0, 1.5)


# Straight-through training


def straight(**changes: Any) -> Recipe:
    plain = dataclasses.replace(TINY, penalty=PenaltyRecipe(), data=DataRecipe("digits", batch=64, augment=False))
    return plain.changed({"optimizer.lr": 0.003, "quantize.widths": ["W3A3"], **changes})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A trained network to start from."""
    folder = tmp_path_factory.mktemp("base")
    data = load_dataset("digits")
    model = ModelRecipe("small-conv", multiplier=0.5)
    recipe = Recipe("base", 4, model, DataRecipe("digits", augment=False), optimizer=OptimizerRecipe(lr=0.1))
    train(recipe, data, folder)
    return str(folder / "model.safetensors")


def test_straight_through_training_pays_at_its_own_width(base: str, tmp_path: Path) -> None:
    data = load_dataset("digits")
    recipe = straight(**{"init": base, "epochs": 4, "model.multiplier": 0.5})
    before, _ = load_model(base)
    plain = validate(before, recipe, data)["validation_accuracy_at_widths"]
    model, results = train(recipe, data, tmp_path)
    assert results["validation_accuracy_at_widths"] > plain + 0.1
    again, about = load_model(tmp_path / "model.safetensors")  # an ordinary checkpoint of the same network
    assert same(state_of(again), state_of(model))
    assert validate(again, recipe, data) == results
    assert about["recipe"]["quantize"] == {"widths": ["W3A3"], "per_channel": False}
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert {line["weight_norm"] for line in lines} == {line["activation_norm"] for line in lines} == {None}
    assert not any(line["penalized"] for line in lines)


def test_straight_through_training_keeps_the_ranges_of_batch_norm(base: str, tmp_path: Path) -> None:
    data = digits()
    before, _ = load_model(base)
    model, _ = train(straight(**{"init": base, "model.multiplier": 0.5}), data, tmp_path)
    old, new = ([p.ranges for p in prepared(m, data).plan.activations] for m in (before, model))
    assert old == new
    assert not same(state_of(before), state_of(model))


def test_accuracy_at_widths_is_the_mean_over_them(base: str) -> None:
    data = load_dataset("digits")
    model, _ = load_model(base)
    recipe = straight(**{"model.multiplier": 0.5})
    alone = [validate(model, recipe.changed({"quantize.widths": [w]}), data) for w in ("W2A2", "W8A8")]
    both = validate(model, recipe.changed({"quantize.widths": ["W2A2", "W8A8"]}), data)
    key = "validation_accuracy_at_widths"
    assert alone[0][key] < alone[1][key]
    assert both[key] == pytest.approx((alone[0][key] + alone[1][key]) / 2)
    assert both["validation_accuracy"] == alone[0]["validation_accuracy"]
    assert key not in validate(model, recipe.changed({"quantize.widths": []}), data)


def test_straight_through_training_repeats_and_every_setting_matters(base: str) -> None:
    def tuned(*, global_seed: int = 0, **changes: Any) -> dict[str, Tensor]:
        model, _ = load_model(base)
        torch.manual_seed(global_seed)
        fit(model, straight(**{"model.multiplier": 0.5, **changes}), digits())
        return state_of(model)

    several = {"quantize.widths": ["W3A3", "W8A8"]}
    first = tuned(**several)
    assert same(first, tuned(global_seed=2, **several))
    others = [first, tuned(), tuned(**{"quantize.widths": ["W8A8"]}), tuned(**{"quantize.per_channel": True})]
    for a, b in itertools.combinations(others, 2):
        assert not torch.equal(a["classifier.weight"], b["classifier.weight"])


def test_each_step_draws_one_of_the_widths() -> None:
    model = build_model("small-conv", channels=1, classes=10, multiplier=0.25).eval()
    net = prepared(model, digits())
    pairs = (Bits(4, 4), Bits(8, 3), Bits())
    seen: list[Bits] = []

    def closure() -> Tensor:
        seen.append(net.bits)
        return net(digits().train.x[:2]).square().mean()

    torch.manual_seed(0)
    drawn = DrawnWidth(net, pairs)
    for _ in range(40):
        drawn.backward(closure)
        assert net.bits == Bits()  # as before
    assert set(seen) == set(pairs)
    with pytest.raises(ZeroDivisionError):
        drawn.backward(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    assert net.bits == Bits()


@pytest.mark.parametrize("name", ["small-conv", "resnet18-cifar"])
def test_what_was_folded_can_be_written_back(name: str) -> None:
    torch.manual_seed(0)
    channels, size = (1, 8) if name == "small-conv" else (3, 32)
    model = build_model(name, channels=channels, classes=10, multiplier=0.125)
    x = torch.randn(8, channels, size, size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        model(x)  # statistics
        norm = next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d))
        norm.weight[0] = 0.0  # a channel that folding makes zero
        norm.weight[1] = -0.3
    model.eval()
    split = Split(x, torch.zeros(8, dtype=torch.long))
    data = Dataset("noise", split, split, split, tuple("0123456789"), (-3.0, 3.0))
    net = prepared(model, data, preset="paper")
    with torch.no_grad():
        before = model(x)
        unfold(net, model)  # nothing to do: the function stays
        torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)
        for parameter in net.parameters():
            parameter.add_(0.1 * parameter.abs().mean() * torch.randn_like(parameter))
        moved = net(x)
        assert not torch.allclose(model(x), moved, rtol=1e-2, atol=1e-2)
        unfold(net, model)
        torch.testing.assert_close(model(x), moved, rtol=1e-4, atol=1e-4)
        again = prepared(model, data, preset="paper")
        assert again.plan == net.plan
        for name, weight in net.weights.items():
            torch.testing.assert_close(again.weights[name], weight, rtol=1e-5, atol=1e-6)


def test_a_bias_in_front_of_batch_norm_is_written_back_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 10))
    x = torch.randn(8, 1, 8, 8)
    model(x)
    model.eval()
    split = Split(x, torch.zeros(8, dtype=torch.long))
    data = Dataset("noise", split, split, split, tuple("0123456789"), (-3.0, 3.0))
    net = prepared(model, data, preset="paper")
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        unfold(net, model)
        torch.testing.assert_close(model(x), net(x), rtol=1e-4, atol=1e-5)


# Several processes

TOGETHER = """
import sys
import torch
from torch import nn
from safetensors.torch import save_file
from anybit.data import Batches
from anybit.train.loop import fit, train
from anybit.train.place import placed
from test_train import TINY, digits, straight

folder = sys.argv[1]
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
recipe = TINY.changed({"data.augment": False, "data.batch": 46, "optimizer.momentum": 0.0})
with placed() as place:
    fit(model, recipe, digits(), place=place)
    save_file(model.state_dict(), f"{folder}/linear-{place.rank}-of-{place.processes}.safetensors")
    if place.processes > 1:
        train(TINY.changed({"data.batch": 46}), digits(), f"{folder}/run")
        for bad in (straight(), TINY.changed({"data.batch": 227})):
            try:
                train(bad, digits(), f"{folder}/bad")
            except ValueError as error:
                sys.stdout.write(f"refused: {error}\\n")  # whole lines: two processes write to one pipe
"""


@pytest.mark.slow
def test_processes_that_train_together_take_the_steps_of_one(tmp_path: Path) -> None:
    script_alone(tmp_path, TOGETHER, str(tmp_path))
    done = script_together(tmp_path, TOGETHER, str(tmp_path))
    one, first, second = (load_file(tmp_path / f"linear-{rank}.safetensors") for rank in ("0-of-1", "0-of-2", "1-of-2"))
    assert same(first, second)
    for name, value in one.items():  # 46 examples are two times 23: the mean of two means is the mean of all
        torch.testing.assert_close(first[name], value, rtol=1e-4, atol=1e-5)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["log.jsonl", "model.safetensors", "run.json"]
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 5
    _, about = load_model(tmp_path / "run" / "model.safetensors")
    assert 0 <= about["validation_accuracy"] <= 1
    assert done.stdout.count("refused: straight-through training runs in one process") == 2
    assert done.stdout.count("refused: data.batch = 227 leaves a last batch of 3 out of 230: 2 processes need two") == 2
    assert not (tmp_path / "bad").exists()


def test_tensorboard_has_the_numbers_of_the_log_under_their_names(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    data = load_dataset("digits")
    values = {
        "name": "board", "epochs": 1, "model": {"name": "small-conv", "multiplier": 0.25},
        "data": {"name": "digits", "batch": 256}, "penalty": {"weight": 1e-3, "kurtosis": 0.1},
    }  # fmt: skip
    train(parse_recipe(values), data, tmp_path / "run", board=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {k for k, v in lines[0].items() if v is not None and k != "step"}
    for name in ("loss", "weight_norm", "kurtosis", "lr"):
        seen = [(event.step, event.value) for event in events.Scalars(name)]
        assert seen == [(line["step"], pytest.approx(line[name], rel=1e-6)) for line in lines]


def test_the_command_trains_with_the_flagship_unless_told_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from anybit.cli.main import main

    text = 'name = "a"\nepochs = 1\n[model]\nname = "small-conv"\nmultiplier = 0.25\n'
    text += '[data]\nname = "digits"\nbatch = 256\n'
    for name, more, default in (("silent", "", True), ("empty", "[penalty]\n", False)):
        path = tmp_path / f"{name}.toml"
        path.write_text(text + more)
        with pytest.raises(SystemExit) as exit_code:
            main(["train", str(path), "--out", str(tmp_path / name)])
        assert exit_code.value.code in (None, 0)
        said = capsys.readouterr().err
        assert ("training for any width (any_width = true, kurtosis = 0.1" in said) is default
        run = json.loads((tmp_path / name / "run.json").read_text())
        assert (run["recipe"]["penalty"]["kurtosis"] > 0) is default
        lines = [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        assert {line["penalized"] for line in lines} == {default}
