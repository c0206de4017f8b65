from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from anybit.common.strict import from_mapping
from anybit.data import DATASETS
from anybit.errors import RecipeError, SpecError
from anybit.models import MODELS
from anybit.spec import Bits
from anybit.task.checkpoint import check_room
from anybit.train.recipe import FLAGSHIP, PenaltyRecipe, Recipe, load_recipe, parse_recipe

RECIPES = Path(__file__).parents[1] / "src" / "anybit" / "recipes"

GOOD = """
name = "try"
epochs = 3
seed = 7
init = "runs/base/model.safetensors"

[model]
name = "small-conv"
multiplier = 2

[data]
name = "digits"
batch = 32
augment = false

[optimizer]
name = "adam"
lr = 0.01
schedule = "constant"

[penalty]
weight = 1e-3
norm = "l2"
"""


def save(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_good_recipe(tmp_path: Path) -> None:
    recipe = load_recipe(save(tmp_path, GOOD))
    assert (recipe.name, recipe.epochs, recipe.seed) == ("try", 3, 7)
    assert recipe.init == "runs/base/model.safetensors"
    assert recipe.model.multiplier == 2.0
    assert isinstance(recipe.model.multiplier, float)  # a whole number will do for a number
    assert (recipe.data.name, recipe.data.batch, recipe.data.augment) == ("digits", 32, False)
    assert (recipe.optimizer.name, recipe.optimizer.lr, recipe.optimizer.schedule) == ("adam", 0.01, "constant")
    assert (recipe.optimizer.momentum, recipe.optimizer.warmup) == (0.9, 0)  # the defaults
    assert (recipe.penalty.weight, recipe.penalty.activation, recipe.penalty.norm) == (1e-3, 0.0, "l2")
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.epochs = 4  # type: ignore[misc]


def test_a_recipe_survives_json(tmp_path: Path) -> None:
    recipe = load_recipe(save(tmp_path, GOOD))
    assert parse_recipe(json.loads(json.dumps(recipe.to_dict()))) == recipe


@pytest.mark.parametrize("old", ["init", "seed", "[optimizer]", "[penalty]"])
def test_what_has_a_default_may_be_left_out(old: str, tmp_path: Path) -> None:
    parts = GOOD.split("\n\n")
    text = (
        "\n\n".join(part for part in parts if not part.startswith(old))
        if old.startswith("[")
        else "\n".join(line for line in GOOD.splitlines() if not line.startswith(old))
    )
    assert text != GOOD
    load_recipe(save(tmp_path, text))


def test_every_recipe_of_the_repository_loads_and_names_things_that_exist() -> None:
    paths = sorted(RECIPES.rglob("*.toml"))
    assert {"digits-base.toml", "digits-l1.toml"} <= {path.name for path in paths}
    for path in paths:
        recipe = load_recipe(path)
        assert recipe.model.name in MODELS, path
        assert recipe.data.name in DATASETS, path


def test_recipes_that_come_with_the_package_go_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe("digits-l1") == load_recipe(RECIPES / "digits-l1.toml")
    Path("digits-l1").write_text(GOOD)  # a file of one's own comes first
    assert load_recipe("digits-l1") == load_recipe(save(tmp_path, GOOD))
    with pytest.raises(RecipeError, match="digits-l2: no such file; a recipe in TOML"):
        load_recipe("digits-l2")


def test_the_two_digits_recipes_belong_together() -> None:
    base, tuned = load_recipe(RECIPES / "digits-base.toml"), load_recipe(RECIPES / "digits-l1.toml")
    assert tuned.init == f"runs/{base.name}-{base.seed}/model.safetensors"
    assert tuned.model == base.model
    assert base.penalty.weight == base.penalty.activation == 0
    assert min(tuned.penalty.weight, tuned.penalty.activation) > 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        # unknown keys, with the nearest valid one
        ("epochs = 3", "epoch = 3", "unknown key 'epoch'; did you mean 'epochs'?"),
        ("lr = 0.01", "lrr = 0.01", "unknown key 'optimizer.lrr'; did you mean 'optimizer.lr'?"),
        ("batch = 32", "batches = 32", "unknown key 'data.batches'; did you mean 'data.batch'?"),
        ("[penalty]", "[penalties]", "unknown key 'penalties'; did you mean 'penalty'?"),
        ("multiplier = 2", "zzz = 2", "unknown key 'model.zzz'; valid keys are name, multiplier"),
        # wrong types
        ("epochs = 3", "epochs = 3.0", "'epochs' must be a whole number, got 3.0"),
        ("epochs = 3", 'epochs = "3"', "'epochs' must be a whole number, got '3'"),
        ("epochs = 3", "epochs = true", "'epochs' must be a whole number, got True"),
        ("lr = 0.01", 'lr = "fast"', "'optimizer.lr' must be a number, got 'fast'"),
        ("lr = 0.01", "lr = true", "'optimizer.lr' must be a number, got True"),
        ("lr = 0.01", "lr = [0.01]", "'optimizer.lr' must be a number, got [0.01]"),
        ('name = "try"', "name = 3", "'name' must be a text, got 3"),
        ('name = "try"', "name = 2020-02-20", "'name' must be a text, got "),
        ('init = "runs/base/model.safetensors"', "init = 3", "'init' must be a text, got 3"),
        ("augment = false", "augment = 0", "'data.augment' must be true or false, got 0"),
        ('[model]\nname = "small-conv"\nmultiplier = 2', 'model = "small"', "'model' must be a table ([model]), got"),
        # one of a few
        ('norm = "l2"', 'norm = "l3"', "'penalty.norm' must be one of l1, l2; got 'l3'"),
        (
            'name = "adam"',
            'name = "adm"',
            "'optimizer.name' must be one of sgd, adam, adamw; got 'adm'; did you mean 'adam'?",
        ),
        ('schedule = "constant"', "schedule = 3", "'optimizer.schedule' must be one of cosine, constant; got 3"),
        # missing keys
        ("epochs = 3", "", "missing key 'epochs'"),
        ('name = "small-conv"', "", "model.name is for a network of anybit, factory ="),
        ('[data]\nname = "digits"\nbatch = 32\naugment = false', "", "missing key 'data'"),
        # out of range
        ("epochs = 3", "epochs = 0", "epochs must be above zero, got 0"),
        ("seed = 7", "seed = -1", "seed must be zero or more, got -1"),
        ("seed = 7", f"seed = {2**63}", "seed must be below 2**63"),
        ("lr = 0.01", "lr = -0.01", "optimizer.lr must be above zero, got -0.01"),
        ("lr = 0.01", "lr = nan", "optimizer.lr must be above zero, got nan"),
        ("lr = 0.01", "lr = inf", "optimizer.lr must be above zero, got inf"),
        ("lr = 0.01", "momentum = 1.0", "optimizer.momentum must be below one, got 1.0"),
        ("lr = 0.01", "average = 1.0", "optimizer.average must be below one, got 1.0"),
        ("lr = 0.01", "warmup = -1", "optimizer.warmup must be zero or more, got -1"),
        ("batch = 32", "batch = 0", "data.batch must be above zero, got 0"),
        ("multiplier = 2", "multiplier = 0", "model.multiplier must be above zero, got 0.0"),
        ("weight = 1e-3", "weight = -1e-3", "penalty.weight must be zero or more, got -0.001"),
        ("weight = 1e-3", "start = -1", "penalty.start must be zero or more, got -1"),
        ('name = "try"', 'name = "../../etc"', "name is used as a folder and must be a plain word, got '../../etc'"),
        ("lr = 0.01", "lr = 1e308", "optimizer.lr must be at most 1e+31, got 1e+308"),
        ("multiplier = 2", "multiplier = 1e9", "model.multiplier must be at most 100, got 1000000000.0"),
        ("epochs = 3", "epochs = 1000000000000", "epochs must be at most 1,000,000, got 1000000000000"),
        ("batch = 32", "batch = 10000000000", "data.batch must be at most 1,000,000, got 10000000000"),
        ("weight = 1e-3", "weight = 1e300", "penalty.weight must be at most 1,000,000, got 1e+300"),
        ("weight = 1e-3", "every = 9999999", "penalty.every must be at most 1,000,000, got 9999999"),
        ('name = "try"', f'name = "{"x" * 9000}"', "name is used as a folder and must be a plain word, got 'xxxxx"),
        ('name = "try"', 'name = "a\\u001bb"', "name is used as a folder and must be a plain word, got 'a"),
        ('name = "try"', 'name = ""', "name is used as a folder and must be a plain word, got ''"),
        # no TOML
        ("epochs = 3", "epochs = ", "not valid TOML"),
        ("epochs = 3", "epochs = 3\nepochs = 4", "not valid TOML"),
        ("[optimizer]", "[optimizer", "not valid TOML"),
    ],
)
def test_a_bad_recipe_is_one_line_with_the_path_and_the_key(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert GOOD.count(old) == 1
    path = save(tmp_path, GOOD.replace(old, new))
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("9" * 400, "'optimizer.lr' must be a number that fits"),
        ("9" * 5000, "not valid TOML"),
        ("[" * 5000, "not valid TOML"),
    ],
    ids=["400 digits", "5000 digits", "5000 brackets"],
)
def test_numbers_and_brackets_without_end(value: str, message: str, tmp_path: Path) -> None:
    path = save(tmp_path, GOOD.replace("lr = 0.01", f"lr = {value}"))
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_recipe_cut_short_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    whole = GOOD.index('name = "digits"') + len('name = "digits"')  # with this, all that has no default is there
    for length in range(whole):
        path = save(tmp_path, GOOD[:length])
        with pytest.raises(RecipeError) as caught:
            load_recipe(path)
        assert str(caught.value).startswith(f"{path}: ")
    assert load_recipe(save(tmp_path, GOOD[:whole])).data.name == "digits"


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "noise").write_bytes(bytes(range(256)) * 4)
    (tmp_path / "empty").write_bytes(b"")
    for name, message in (
        ("missing", "no such file; a recipe in TOML is expected here"),
        ("folder", "is a folder; a recipe in TOML is expected here"),
        ("noise", "cannot be read as a recipe in TOML"),
        ("empty", "missing key"),
    ):
        with pytest.raises(RecipeError, match=message) as caught:
            load_recipe(tmp_path / name)
        assert str(caught.value).startswith(f"{tmp_path / name}: ")
        assert len(str(caught.value).splitlines()) == 1


def test_the_first_error_names_the_source_given() -> None:
    with pytest.raises(RecipeError, match=r"^here: missing key 'name'"):
        parse_recipe({}, source="here")


@dataclasses.dataclass(frozen=True)
class Inner:
    size: int

    def __post_init__(self) -> None:
        if self.size > 9:
            raise SpecError(f"size must be below ten, got {self.size}")


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner
    steps: tuple[int, ...] = ()
    note: str | None = None


def test_strict_goes_down_into_tables_and_lists() -> None:
    values: dict[str, Any] = {"inner": {"size": 3}, "steps": [1, 2], "note": "x"}
    assert from_mapping(Outer, values) == Outer(Inner(3), (1, 2), "x")
    for change, message in (
        ({"steps": 3}, "'steps' must be a list, got 3"),
        ({"steps": [1, "b"]}, "'steps[1]' must be a whole number, got 'b'"),
        ({"inner": {"size": 10}}, "inner.size must be below ten, got 10"),
        ({"inner": {"sice": 1}}, "unknown key 'inner.sice'; did you mean 'inner.size'?"),
        ({"inner": {}}, "missing key 'inner.size'"),
        ({"inner": [3]}, "'inner' must be a table"),
    ):
        with pytest.raises(RecipeError) as caught:
            from_mapping(Outer, {**values, **change})
        assert str(caught.value).startswith(message)


def test_a_recipe_made_in_code_is_checked_too(tmp_path: Path) -> None:
    recipe = load_recipe(save(tmp_path, GOOD))
    with pytest.raises(SpecError, match="seed must be zero or more"):
        dataclasses.replace(recipe, seed=-5)
    assert isinstance(dataclasses.replace(recipe, seed=5), Recipe)


# Straight-through training

STRAIGHT = (
    GOOD.partition("[penalty]")[0]
    + """
[quantize]
widths = ["W4A4", "w8a32", "FP"]
per_channel = true
"""
)


def test_a_recipe_with_widths(tmp_path: Path) -> None:
    recipe = load_recipe(save(tmp_path, STRAIGHT))
    assert recipe.quantize.pairs == (Bits(4, 4), Bits(8, 32), Bits(32, 32))
    assert recipe.quantize.per_channel
    assert parse_recipe(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert json.loads(json.dumps(recipe.to_dict())) == recipe.to_dict()  # lists stay lists
    assert load_recipe(save(tmp_path, GOOD)).quantize.pairs == ()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('["W4A4", "w8a32", "FP"]', '"W4A4"', "'quantize.widths' must be a list, got 'W4A4'"),
        ('"W4A4"', "4", "'quantize.widths[0]' must be a text, got 4"),
        ('"W4A4"', '"W1A4"', "quantize.weights must be 2 to 16"),
        ('"W4A4"', '"four"', "quantize."),
        ("widths", "width", "unknown key 'quantize.width'; did you mean 'quantize.widths'?"),
        ("per_channel = true", "per_channel = 1", "'quantize.per_channel' must be true or false, got 1"),
        ("[quantize]", "[penalty]\nweight = 1\n[quantize]", "quantize.widths and the penalties exclude each other"),
    ],
)
def test_bad_widths(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = save(tmp_path, STRAIGHT.replace(old, new))
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert str(caught.value).startswith(f"{path}: {message}")


# Changing a recipe by key


def test_a_changed_recipe_differs_where_it_was_told_to(tmp_path: Path) -> None:
    recipe = load_recipe(save(tmp_path, GOOD))
    changed = recipe.changed({"optimizer.lr": 1, "seed": 8, "penalty.norm": "l1"})
    assert (changed.optimizer.lr, changed.seed, changed.penalty.norm) == (1.0, 8, "l1")
    assert changed.changed({"optimizer.lr": 0.01, "seed": 7, "penalty.norm": "l2"}) == recipe
    assert recipe.changed({}) == recipe
    off = recipe.changed({"seed": 0, "data.augment": False, "penalty.weight": 0})  # zero and false are values too
    assert (off.seed, off.data.augment, off.penalty.weight) == (0, False, 0.0)
    assert off.changed({"seed": 7, "penalty.weight": 1e-3}) == recipe
    plain = dataclasses.replace(recipe, init=None, penalty=PenaltyRecipe())
    assert plain.changed({}) == plain
    assert plain.changed({"quantize.widths": ("W4A4",)}).quantize.pairs == (Bits(4, 4),)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer.lrr": 1.0}, "try: unknown key 'optimizer.lrr'; did you mean 'optimizer.lr'?"),
        ({"optimiser.lr": 1.0}, "try: unknown key 'optimiser'; did you mean 'optimizer'?"),
        ({"optimizer.lr": "fast"}, "try: 'optimizer.lr' must be a number"),
        ({"penalty.weight": -1.0}, "try: penalty.weight must be zero or more"),
        ({"quantize.widths": ["W4A4"]}, "try: quantize.widths and the penalties exclude"),
    ],
)
def test_a_bad_change_is_refused_like_a_bad_recipe(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    recipe = load_recipe(save(tmp_path, GOOD))
    with pytest.raises(RecipeError) as caught:
        recipe.changed(change)
    assert str(caught.value).startswith(message)


def test_a_recipe_that_says_nothing_about_penalties_gets_the_default_it_is_loaded_with(tmp_path: Path) -> None:
    silent = "\n".join(['name = "a"', "epochs = 1", "[model]", 'name = "small-conv"', "[data]", 'name = "digits"', ""])
    assert load_recipe(save(tmp_path, silent)).penalty == PenaltyRecipe()
    default = load_recipe(save(tmp_path, silent), penalty=FLAGSHIP)
    assert (default.penalty is FLAGSHIP, default.optimizer.average) == (True, 0.99)
    assert (
        load_recipe(save(tmp_path, silent + "[optimizer]\naverage = 0.5\n"), penalty=FLAGSHIP).optimizer.average == 0.5
    )
    assert load_recipe(save(tmp_path, silent), penalty=PenaltyRecipe(kurtosis=1.0)).optimizer.average is None
    for table in ("[penalty]\n", '[quantize]\nwidths = ["W4A4"]\n'):
        assert load_recipe(save(tmp_path, silent + table), penalty=FLAGSHIP).penalty == PenaltyRecipe()
    own = load_recipe(save(tmp_path, silent + "[penalty]\nkurtosis = 2.0\n"), penalty=FLAGSHIP)
    assert own.penalty == PenaltyRecipe(kurtosis=2.0)


def test_the_bundled_recipes_say_what_they_want() -> None:
    for path in sorted(RECIPES.rglob("*.toml")):
        assert load_recipe(path, penalty=FLAGSHIP) == load_recipe(path), path


@pytest.mark.parametrize("name", ["vgg-like", "resnet50", "mobilenetv2", "small-conv"])
def test_a_network_without_room_is_refused_before_it_is_built(name: str) -> None:
    shape = {"name": name, "channels": 1, "classes": 10, "multiplier": 100.0}
    if name == "small-conv":  # small enough even so; nothing is built to find that out
        check_room(shape)
        return
    with pytest.raises(
        SpecError, match=rf"^{name} at multiplier 100 has [\d,]+ parameters, and training takes 16 bytes"
    ):
        check_room(shape)
