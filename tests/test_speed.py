"""Recipe switches that change how training is computed, and processes that share it: the same run, up to rounding."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_train import TINY, digits, straight
from together import script_alone, script_together, together
from torch import Tensor, nn

from anybit.errors import RecipeError
from anybit.models import build_model
from anybit.train.loop import fit, train
from anybit.train.place import placed
from anybit.train.recipe import Recipe

PLAIN = TINY.changed({"data.augment": False, "data.batch": 45, "epochs": 2, "optimizer.lr": 0.02})
NO_PENALTY = {"penalty.weight": 0.0, "penalty.activation": 0.0}
COMPILES = any(map(shutil.which, ("c++", "g++", "clang++")))


def smooth() -> nn.Module:
    """A network without batch norm."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.Tanh(), nn.Flatten(),
        nn.Linear(72, 10),
    )  # fmt: skip


def normed() -> nn.Module:
    torch.manual_seed(0)
    return build_model("small-conv", channels=1, classes=10, multiplier=0.5)


def curve(model: nn.Module, recipe: Recipe) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    lines: list[dict[str, Any]] = []
    with placed() as place:
        fit(model, recipe, digits(), log=lambda **values: lines.append(values), place=place)
    return lines, dict(model.state_dict())


def close(found: dict[str, Tensor], wanted: dict[str, Tensor], share: float) -> None:
    for name, value in wanted.items():
        gap = float((found[name].double() - value.double()).norm() / value.double().norm().clamp(min=1e-12))
        assert gap <= share, (name, gap)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # PyTorch's own compiler
@pytest.mark.parametrize("penalty", [{}, NO_PENALTY], ids=["penalized", "plain"])
@pytest.mark.parametrize(
    "speed", [{"channels_last": True}, {"accumulate": 4}, {"compile": True}, {"accumulate": 45}], ids=str
)
def test_switches_give_the_same_training_up_to_rounding(speed: dict[str, Any], penalty: dict[str, Any]) -> None:
    if "compile" in speed and not COMPILES:
        pytest.skip("torch.compile needs a C++ compiler on a CPU, and this machine has none")
    recipe = PLAIN.changed(penalty)
    wanted, weights = curve(smooth(), recipe)
    switched = recipe.changed({f"speed.{key}": value for key, value in speed.items()})
    found, others = curve(smooth(), switched)
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in wanted], rel=2e-3)
    close(others, weights, 2e-3)
    assert all(value.is_contiguous() for value in others.values())
    norms = [line["activation_norm"] for line in found]
    if "compile" in speed and penalty:
        assert norms == [None] * len(norms)
    else:
        assert norms == pytest.approx([line["activation_norm"] for line in wanted], rel=1e-2)


def test_mixed_precision_computes_in_bfloat16_but_for_the_two_passes() -> None:
    seen: list[torch.dtype] = []
    model = smooth()
    model[5].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    mixed = {"speed.precision": "bfloat16"}
    wanted, _ = curve(smooth(), PLAIN.changed(NO_PENALTY))
    found, _ = curve(model, PLAIN.changed({**mixed, **NO_PENALTY}))
    assert set(seen) == {torch.bfloat16}
    losses = [[line["loss"] for line in lines] for lines in (found, wanted)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    # The penalty is switched on in the second epoch.
    seen.clear()
    model = smooth()
    model[5].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    curve(model, PLAIN.changed({**mixed, "penalty.start": 1}))
    steps = -(-230 // 45)
    assert seen == [torch.bfloat16] * steps + [torch.float32] * 2 * steps
    seen.clear()
    curve(model, PLAIN.changed({**mixed, "penalty.objective": "worst-case", "epochs": 1}))
    assert seen == [torch.bfloat16] * 2 * steps


def test_a_switched_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    recipe = TINY.changed({"epochs": 2, "speed.channels_last": True, "speed.accumulate": 2})
    train(recipe, digits(), tmp_path / "whole")

    class StoppedError(Exception):
        pass

    def stop_at(steps: int) -> Any:
        left = [steps]

        def progress(n: int) -> None:
            left[0] -= n
            if left[0] <= 0:
                raise StoppedError

        return progress

    with pytest.raises(StoppedError):
        train(recipe, digits(), tmp_path / "cut", progress=stop_at(6), save_every=0)
    train(recipe, digits(), tmp_path / "cut", resume=True)
    whole, cut = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(cut[name], value) for name, value in whole.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speed.accumulate": 0}, "speed.accumulate must be above zero"),
        ({"speed.precision": "float16"}, "'speed.precision' must be one of"),
        ({"speed.chanels_last": True}, "did you mean 'speed.channels_last'"),
        ({"speed.accumulate": 2, "penalty.engine": "double-backward"}, "double backward takes a batch at once"),
    ],
)
def test_bad_switches(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        TINY.changed(change)


def test_straight_through_training_runs_as_written() -> None:
    for change in ({"speed.compile": True}, {"speed.precision": "bfloat16"}):
        with pytest.raises(RecipeError, match="straight-through training runs as written and in float32"):
            straight(**change)
    found, _ = curve(normed(), straight(**{"speed.channels_last": True, "speed.accumulate": 2}))
    wanted, _ = curve(normed(), straight())
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in wanted], rel=0.05)


def test_parts_for_batch_norm_hold_two_examples_or_more() -> None:
    for make, wanted in ((normed, {2, 3}), (smooth, {1, 2, 3})):
        model, sizes = make(), set[int]()
        model.register_forward_pre_hook(lambda module, inputs, sizes=sizes: sizes.add(len(inputs[0])))
        fit(model, PLAIN.changed({"data.batch": 64, "speed.accumulate": 30, "epochs": 1}), digits())
        assert sizes == wanted  # batches of 64, 64, 64 and 38


TOGETHER = """
import json, sys
import torch.distributed as dist
from safetensors.torch import save_file
from test_speed import NO_PENALTY, PLAIN, curve, normed, smooth
from anybit.train.place import placed

folder = sys.argv[1]
with placed() as place:
    for name, make, change in (
        ("smooth", smooth, {}),
        ("parts", smooth, {"speed.accumulate": 3, "speed.channels_last": True}),
        ("mixed", smooth, {"speed.precision": "bfloat16", **NO_PENALTY}),
        ("compiled", smooth, {"speed.compile": True, **NO_PENALTY}),
        ("normed", normed, {"data.batch": 115, "epochs": 6}),
    ):
        if name == "compiled" and sys.argv[2] == "no":
            continue
        lines, state = curve(make(), PLAIN.changed(change))
        stem = f"{folder}/{name}-{place.rank}-of-{place.processes}"
        save_file({key: value.contiguous() for key, value in state.items()}, stem + ".safetensors")
        with open(stem + ".json", "w") as file:
            json.dump(lines, file)
"""


@pytest.mark.slow
def test_two_processes_have_the_loss_curve_of_one(tmp_path: Path) -> None:
    words = [str(tmp_path), "yes" if COMPILES else "no"]
    script_alone(tmp_path, TOGETHER, *words)
    script_together(tmp_path, TOGETHER, *words)

    def lines(name: str, which: str, key: str) -> list[float]:
        return [line[key] for line in json.loads((tmp_path / f"{name}-{which}.json").read_text())]

    names = ["smooth", "parts", "mixed", "compiled", "normed"] if COMPILES else ["smooth", "parts", "mixed", "normed"]
    for name in names:
        first, second = (load_file(tmp_path / f"{name}-{rank}-of-2.safetensors") for rank in (0, 1))
        weights = {key for key in first if "running" not in key}  # statistics are each process's own
        assert all(torch.equal(first[key], second[key]) for key in weights)
        # Batches of 45 are 23 and 22. Without batch norm nothing but rounding differs; with it, each half is
        # normalized by itself.
        one, two = lines(name, "0-of-1", "loss"), lines(name, "0-of-2", "loss")
        assert len(one) == 12
        assert two == lines(name, "1-of-2", "loss")
        assert two == pytest.approx(one, rel={"normed": 0.15, "mixed": 0.02}.get(name, 1e-3)), name
    for key in ("weight_norm", "activation_norm"):
        assert lines("smooth", "0-of-2", key) == pytest.approx(lines("smooth", "0-of-1", key), rel=1e-2)
    close(load_file(tmp_path / "smooth-0-of-2.safetensors"), load_file(tmp_path / "smooth-0-of-1.safetensors"), 2e-3)


@pytest.mark.slow
def test_of_two_processes_one_speaks(tmp_path: Path) -> None:
    text = 'name = "a"\nepochs = 1\n[model]\nname = "small-conv"\nmultiplier = 0.25\n'
    text += '[data]\nname = "digits"\nbatch = 256\n'
    (tmp_path / "a.toml").write_text(text + "[speed]\nchannels_last = true\naccumulate = 2\n")
    done = together(["-m", "anybit", "train", "a.toml"], cwd=tmp_path)
    assert done.stdout.count("validation accuracy") == 1
    assert done.stderr.count("training for any width (any_width = true") == 1
    assert "strides" not in done.stderr
    assert (tmp_path / "runs" / "a-0" / "model.safetensors").is_file()
