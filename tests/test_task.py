from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import anybit
from anybit.cli.main import main
from anybit.data import Given, load_dataset
from anybit.errors import AnybitError, CheckpointError, DataError, RecipeError, SpecError
from anybit.models import build_model
from anybit.task.checkpoint import fill, read_weights
from anybit.task.networks import make_network
from anybit.task.task import load_task, pick_device, without_paths
from anybit.train.loop import train
from anybit.train.recipe import load_recipe, recipe_by_word

CODE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

noise = torch.Generator().manual_seed(0)
X = torch.rand(120, 1, 8, 8, generator=noise)
Y = (X.mean((1, 2, 3)) * 40).long() % 3
MASKS = (X[:, 0] * 2.99).long()

def make():
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
                         nn.Flatten(), nn.Linear(8, 3))

def segmenter():
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 1))

def pairs(a, b, y=Y, **more):
    return DataLoader(TensorDataset(X[a:b], y[a:b]), 16, **more)

def loaders():
    return pairs(0, 65, shuffle=True), pairs(65, 90), pairs(90, 120)

def two():
    return pairs(0, 65, shuffle=True), pairs(90, 120)

def one():
    return pairs(90, 120)

def unlabelled():
    return DataLoader(X[90:], 16)

def optional():
    return pairs(0, 65), None, pairs(90, 120)

def listed():
    return list(loaders())

def too_many():
    return [one()] * 4

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y))

def stream():
    return DataLoader(Stream(), 16), one()

def numbers():
    return pairs(0, 65, X[:, 0, 0, :3]), pairs(65, 90, X[:, 0, 0, :3]), pairs(90, 120, X[:, 0, 0, :3])

def masks():
    return pairs(0, 60, MASKS), pairs(60, 90, MASKS), pairs(90, 120, MASKS)

def four():
    return (1, 2, 3, 4)

def share(outputs, targets):
    return float((outputs.argmax(1) == targets).sum()), len(targets)

def squared(outputs, targets):
    return (outputs - nn.functional.one_hot(targets, 3)).square().mean()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with code of a user's own, a state dict of its network, and nothing else."""
    (tmp_path / "mine.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    torch.manual_seed(0)
    model, _ = make_network("mine.py:make")
    torch.save(model.state_dict(), "best.pt")
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    """Run a command and return what it printed, on stderr if it is to fail."""
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert (caught.value.code or 0) == code, err
    return err if code else out


# A network by a word


@pytest.mark.parametrize("word", ["mine.py:make", "mine:make"])
def test_code_makes_a_network(word: str, here: Path) -> None:
    model, shape = make_network(word)
    assert isinstance(model, nn.Sequential)
    assert shape == {"factory": word}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("mine.py:four", "must return a torch.nn.Module, returned tuple"),
        ("mine.py:gone", "has no 'gone'"),
        ("small-cov", "did you mean 'small-conv'"),
        (
            "small-conv",
            r"small-conv comes without weights; say --weights FILE, or first: anybit train small-conv",
        ),
        ("timm/resnet18", "needs timm, which cannot be imported .* run: pip install timm"),
    ],
)
def test_words_that_name_no_network(word: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(SpecError, match=message):
        make_network(word)


@pytest.mark.parametrize(("name", "multiplier"), [("small-conv", 0.5), ("vgg-like", 0.125), ("resnet18", 0.25)])
def test_weights_tell_the_sizes_of_our_networks(name: str, multiplier: float) -> None:
    want = build_model(name, channels=3, classes=7, multiplier=multiplier)
    tensors = {f"module.{key}": value for key, value in want.state_dict().items()}
    model, shape = make_network(name, tensors=tensors)
    assert shape == {"name": name, "channels": 3, "classes": 7, "multiplier": multiplier}
    fill(model, tensors, "x.pt")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), want.state_dict().values(), strict=True))


FAKE = {
    "torchvision": """
from . import models
""",
    "torchvision.models": """
from torch import nn
class Transforms:
    crop_size, resize_size, mean, std = [40], [44], [0.5, 0.5, 0.5], [0.25, 0.25, 0.25]
class Weights:
    @staticmethod
    def transforms(): return Transforms()
class Every:
    DEFAULT = Weights
def get_model_weights(name): return Every
def get_model(name, weights=None, num_classes=1000):
    if name != "tiny": raise ValueError(f"Unknown model {name}")
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                        nn.Linear(4, num_classes))
    net.pretrained = weights is not None
    return net
""",
    "timm": """
from torch import nn
def create_model(name, pretrained=False, num_classes=1000):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                        nn.Linear(4, num_classes))
    net.pretrained = pretrained
    net.pretrained_cfg = {"input_size": (3, 40, 40), "crop_pct": 0.9, "mean": (0.5,) * 3, "std": (0.25,) * 3}
    return net
""",
}


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stand-ins for packages that need not be installed here."""
    root = tmp_path / "packages"
    for name, text in FAKE.items():
        monkeypatch.delitem(sys.modules, name, raising=False)
        package, _, inner = name.partition(".")
        (root / package).mkdir(parents=True, exist_ok=True)
        (root / package / f"{inner or '__init__'}.py").write_text(text)
    monkeypatch.syspath_prepend(str(root))
    yield root
    for name in FAKE:
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("word", ["torchvision/tiny", "timm/tiny"])
def test_a_model_of_another_package_with_its_head_and_feeding(word: str, tmp_path: Path) -> None:
    usual, shape = make_network(word)
    assert usual.pretrained
    assert usual[-1].out_features == 1000
    assert shape == {"factory": word}
    other, shape = make_network(
        word, tensors={**usual.state_dict(), "5.weight": torch.zeros(6, 4), "5.bias": torch.ones(6)}
    )
    assert not other.pretrained
    assert other[-1].out_features == 6
    assert shape == {"factory": word, "classes": 6}
    from PIL import Image

    for name in ("cat", "dog"):
        (tmp_path / "images" / "test" / name).mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (60, 50), (i * 50, 10, 200)).save(tmp_path / "images" / "test" / name / f"{i}.png")
    task = load_task(word, data=str(tmp_path / "images"))
    assert task.data.shape == (3, 40, 40)
    assert task.preprocessing is not None
    assert (task.preprocessing.size, task.preprocessing.mean) == ((40, 40), (0.5, 0.5, 0.5))
    assert task.preprocessing.shorter == 44
    with pytest.raises(SpecError, match="torchvision cannot make it"):
        make_network("torchvision/gone")


def test_a_hugging_face_model_by_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        num_channels=3, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=4, layer_type="basic"
    )
    torch.manual_seed(0)
    transformers.ResNetForImageClassification(config).save_pretrained(tmp_path / "tiny")
    capsys.readouterr()
    word = f"huggingface/{tmp_path / 'tiny'}"
    model, _ = make_network(word)
    x, y = np.random.default_rng(0).random((12, 3, 32, 32), np.float32), np.arange(12) % 4
    np.savez(tmp_path / "test.npz", x_test=x, y_test=y)
    task = load_task(word, data=str(tmp_path / "test.npz"))
    net = task.network(calibrate=str(tmp_path / "test.npz"))
    rows = anybit.sweep(net, task.test("a test"), widths=["FP", "W8A8"])
    with torch.no_grad():
        want = model(torch.from_numpy(x)).logits.argmax(1)
    assert rows[0].accuracy == pytest.approx(float((want == torch.from_numpy(y)).float().mean()))
    assert [row.metric for row in rows] == ["accuracy", "accuracy"]


# Weights


@pytest.mark.usefixtures("here")
def test_weights_of_every_kind_are_read() -> None:
    want = torch.load("best.pt", weights_only=True)
    prefixed = {f"module.{key}": value for key, value in want.items()}
    save_file(want, "plain.safetensors")
    half = {key: value.half() if value.is_floating_point() else value for key, value in want.items()}
    save_file(half, "half.safetensors")
    torch.save({"epoch": 3, "state_dict": prefixed}, "nested.pth")
    torch.save({"model": {f"_orig_mod.{key}": value for key, value in want.items()}}, "model.pt")
    torch.save({key: value for key, value in want.items() if "num_batches" not in key}, "old.pt")
    for name in ("best.pt", "plain.safetensors", "half.safetensors", "nested.pth", "model.pt", "old.pt"):
        model, _ = make_network("mine.py:make")
        tensors, about = read_weights(name)
        fill(model, tensors, name)
        assert about == {}
        for key, value in model.state_dict().items():
            assert torch.allclose(value.float(), want[key].float(), atol=1e-3), (name, key)


@pytest.mark.usefixtures("here")
def test_weights_that_do_not_fit_leave_the_network_alone() -> None:
    model, _ = make_network("mine.py:segmenter")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"best.pt: .*; take the network that these weights are of"):
        fill(model, read_weights("best.pt")[0], "best.pt")
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


# Data


@pytest.mark.usefixtures("here")
def test_loaders_are_a_data_set() -> None:
    for word, there in (
        ("loaders", (1, 1, 1)), ("two", (1, 0, 1)), ("one", (0, 0, 1)), ("optional", (1, 0, 1)), ("listed", (1, 1, 1)),
    ):  # fmt: skip
        data = load_dataset(f"mine.py:{word}", code=True)
        assert tuple(int(part is not None) for part in (data.train, data.validation, data.test)) == there
        assert data.shape == (1, 8, 8)
    assert load_dataset("mine.py:loaders", code=True).count_classes() == 3
    with pytest.raises(DataError, match=r"mine.py:four: must return one loader, or .*; returned tuple of 4"):
        load_dataset("mine.py:four", code=True)
    with pytest.raises(DataError, match=r"must return one loader, or .*; returned list of 4"):
        load_dataset("mine.py:too_many", code=True)
    with pytest.raises(DataError, match="training needs a loader with a length"):
        _ = load_dataset("mine.py:stream", code=True).train.steps
    with pytest.raises(DataError, match=r"a search needs validation data, and mine.py:two has none"):
        load_dataset("mine.py:two", code=True).need("validation", "a search")


def test_a_pass_over_a_loader_can_be_taken_up_and_leaves_the_random_numbers_alone() -> None:
    whole = TensorDataset(torch.arange(40), torch.arange(40))
    part = Given(DataLoader(whole, 8, shuffle=True))

    def drawn(done: int, seed: int = 0) -> list[list[int]]:
        return [x.tolist() for x, _ in part.after(done, torch.Generator().manual_seed(seed))]

    torch.manual_seed(5)
    before = torch.get_rng_state()
    every = drawn(0)
    assert torch.equal(torch.get_rng_state(), before)
    assert sorted(number for batch in every for number in batch) == list(range(40))
    torch.manual_seed(6)
    assert drawn(2) == every[2:]
    assert drawn(0, seed=1) != every
    assert part.digest() == Given(DataLoader(whole, 8, shuffle=True)).digest()
    changed = TensorDataset(torch.arange(40), torch.arange(40).flip(0))
    assert part.digest() != Given(DataLoader(changed, 8, shuffle=True)).digest()


# A task


@pytest.mark.usefixtures("here")
def test_a_task_is_what_its_words_name() -> None:
    task = load_task("mine.py:make", weights="best.pt", data="mine.py:loaders", metric="mine.py:share", device="cpu")
    want = torch.load("best.pt", weights_only=True)
    assert torch.equal(task.model.state_dict()["0.weight"], want["0.weight"])
    assert task.metric is not None
    assert (task.metric.name, str(task.device), task.seed) == ("share", "cpu", 0)
    net = task.network()
    with pytest.raises(AttributeError):
        task.name = "other"  # type: ignore[misc]
    rows = anybit.sweep(net, task.test("a test"), widths=["FP", "W8A8"], metric=task.metric)
    usual = anybit.sweep(net, task.test("a test"), widths=["FP", "W8A8"])
    assert [row.accuracy for row in rows] == [row.accuracy for row in usual]
    free, ranged = task.network(), task.network(calibrate="48")
    assert [a.ranges for a in free.plan.activations] != [a.ranges for a in ranged.plan.activations]


@pytest.mark.usefixtures("here")
def test_what_is_needed_is_asked_for_by_name() -> None:
    with pytest.raises(DataError, match="anybit sweep needs data: say --data digits"):
        load_task("mine.py:make", weights="best.pt", what="anybit sweep")
    with pytest.raises(CheckpointError, match=r"best.pt: holds weights and no network; say my_model.py:make --w"):
        load_task("best.pt", data="digits")
    with pytest.raises(SpecError, match="no device 'gpu' here"):
        pick_device("gpu")
    with pytest.raises(
        CheckpointError, match=r"no such file; say a run, a checkpoint, small-conv.*did you mean 'small-co"
    ):
        load_task("smal-conv", data="digits")
    with pytest.raises(SpecError, match="with --weights say which one"):
        load_task("gone", weights="best.pt", data="digits")
    task = load_task("mine.py:make", data="mine.py:one")
    with pytest.raises(DataError, match=r"--calibrate with a number needs training data, and mine.py:one has"):
        task.network(calibrate="16")
    with pytest.raises(RecipeError, match=r"mine.py:make needs data to be trained on: say --data"):
        recipe_by_word("mine.py:make")


@pytest.mark.usefixtures("here")
def test_a_range_that_is_missing_points_to_calibrate() -> None:
    layers = "nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3)"
    Path("plain.py").write_text(f"from torch import nn\ndef make(): return nn.Sequential({layers})")
    task = load_task("plain.py:make", data="mine.py:loaders")
    with pytest.raises(AnybitError, match="--calibrate 256"):
        task.network(preset="paper")
    with pytest.warns(UserWarning, match=r"guessed from made-up inputs; .*--calibrate 256"):
        guessed = task.network()
    assert {a.ranges[0][1].source for a in guessed.plan.activations if a.kind != "input"} == {"made-up inputs"}
    assert task.network(calibrate="32").plan.activations


def test_folders_of_this_machine_are_left_out_of_what_is_passed_on() -> None:
    values = {
        "recipe": {"init": "/home/me/a.pt", "data": {"name": "C:\\pictures\\cats"}, "epochs": 3},
        "list": ["/a/b"],
    }
    assert without_paths(values) == {"recipe": {"init": "a.pt", "data": {"name": "cats"}, "epochs": 3}, "list": ["b"]}
    assert without_paths("timm/resnet18") == "timm/resnet18"


# The verbs


def test_a_network_of_the_users_own_from_training_to_the_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "mine.py:make", "--data", "mine.py:loaders", "--epochs", 2, "--lr", 0.02, "--device", "cpu"]
    assert "validation accuracy" in said(capsys, *words)
    run = here / "runs" / "mine-make-0"
    before = (run / "model.safetensors").read_bytes()
    error = said(capsys, *words, code=2)
    assert "holds a finished run; choose another folder with --out, or say --overwrite" in error
    assert (run / "model.safetensors").read_bytes() == before
    assert "validation accuracy" in said(capsys, *words, "--overwrite")
    assert (run / "model.safetensors").read_bytes() == before  # the same seed, the same weights

    error = said(capsys, "sweep", run, code=2)
    assert f"is of mine.py:make, and a file may not start code; say mine.py:make --weights {run}" in error
    task = ["mine.py:make", "--weights", run, "--data", "mine.py:loaders"]
    rows = json.loads(said(capsys, "sweep", *task, "--widths", "FP W4A4", "--json"))
    assert [(row["weights"], row["n"], row["metric"]) for row in rows] == [(32, 30, "accuracy"), (4, 30, "accuracy")]
    found = json.loads(said(capsys, "save", *task, "--out", "m.onnx", "--widths", "FP W8A8", "--json"))
    assert found["measured"]["FP"] == rows[0]["accuracy"]
    assert anybit.load("m.onnx").run(np.zeros((1, 1, 8, 8), np.float32)).shape == (1, 3)
    assert "page.html" in said(capsys, "report", *task, "--out", "page.html")
    assert "W4A4" in Path("page.html").read_text()


def test_a_segmenter_is_trained_and_judged_by_overlap(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, "train", "mine.py:segmenter", "--data", "mine.py:masks", "--epochs", 1, "--out", "run")
    assert "validation mean IoU" in out
    table = said(
        capsys, "sweep", "mine.py:segmenter", "--weights", "run", "--data", "mine.py:masks", "--widths", "W8A8"
    )
    assert "mean IoU in %" in " ".join(table.split())


@pytest.mark.usefixtures("here")
def test_without_data_a_file_is_saved_by_the_shape_of_an_input(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["save", "mine.py:make", "--weights", "best.pt", "--out", "m.onnx"]
    assert "or the shape of one input: --input 3x224x224" in said(capsys, *words, code=2)
    assert not Path("m.onnx").exists()
    assert "m.onnx" in said(capsys, *words, "--input", "1x8x8")
    assert "measured" not in anybit.load("m.onnx").master.header.about
    assert "looks like 3x224x224" in said(capsys, *words, "--input", "square", code=2)


@pytest.mark.usefixtures("here")
def test_a_recipe_names_code_and_a_loss(tmp_path: Path) -> None:
    text = 'name = "own"\nepochs = 2\nloss = "mine.py:squared"\nmetric = "mine.py:share"\n'
    text += '[model]\nfactory = "mine.py:make"\n[data]\nname = "mine.py:loaders"\n[optimizer]\nlr = 0.05\n'
    (tmp_path / "own.toml").write_text(text)
    recipe = load_recipe(tmp_path / "own.toml")
    data = load_dataset(recipe.data.name, code=True)
    _, results = train(recipe, data, tmp_path / "run")
    assert results["metric"] == "share"
    assert 0 <= results["validation_accuracy"] <= 1
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * 4  # 65 examples in batches of 16 leave one, which batch norm cannot take
    assert lines[0]["loss"] < 2  # no cross-entropy of an untrained network times anything
    plain = recipe.changed({"loss": None})
    assert plain.loss is None
    again, _ = train(recipe, data, tmp_path / "again")
    first = read_weights(tmp_path / "run")[0]
    assert all(torch.equal(first[key], value) for key, value in again.state_dict().items())


def test_numbers_are_no_classes_and_that_is_said_before_the_first_step(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("train", "mine.py:make", "--data", "mine.py:numbers", "--epochs", "1", "--lr", "0.01", "--out", "run")
    assert "are no classes for cross-entropy; name another loss, such as torch.nn" in said(capsys, *words, code=2)
    words += ("--loss", "torch.nn.functional:mse_loss")
    assert "have no accuracy; take metric='mean absolute error'" in said(capsys, *words, code=2)
    assert not (here / "run" / "log.jsonl").exists()  # it did not begin
    assert "validation mean squared error 0." in said(capsys, *words, "--metric", "mean-squared-error")


@pytest.mark.usefixtures("here")
def test_loaders_are_counted_and_streams_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, "data", "mine.py:two")
    assert "train      65 examples in 5 batches" in out
    assert "validation none" in out
    assert "train      a loader without a length" in said(capsys, "data", "mine.py:stream")


@pytest.mark.usefixtures("here")
def test_that_no_weight_is_narrow_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("sweep", "mine.py:make", "--weights", "best.pt", "--data", "mine.py:one", "--widths", "FP,W4A4")
    for more, told in (((), True), (("--sensitive", "same"), False)):
        with pytest.raises(SystemExit):
            main([*words, *more])
        note = "every weight keeps 8 bits or more (first layer, last layer); --sensitive same makes"
        assert (note in capsys.readouterr().err) is told


@pytest.mark.usefixtures("here")
def test_that_no_weights_were_given_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("sweep", "mine.py:make", "--data", "mine.py:one", "--widths", "FP")
    for more, told in (((), True), (("--weights", "best.pt"), False)):
        with pytest.raises(SystemExit):
            main([*words, *more])
        assert ("with the weights that it comes with; --weights FILE" in capsys.readouterr().err) is told


def test_a_master_holds_no_folder_of_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = tmp_path / "a-secret-folder"
    secret.mkdir()
    noise = np.random.default_rng(0)
    x, y = noise.random((40, 1, 8, 8), np.float32), np.arange(40) % 4
    np.savez(secret / "mine.npz", x_train=x, y_train=y, x_test=x[:8], y_test=y[:8])
    out = secret / "run"
    said(capsys, "train", "small-conv", "--data", secret / "mine.npz", "--epochs", 1, "--out", out)
    said(capsys, "save", out, "--out", tmp_path / "m.onnx", "--widths", "FP")
    assert b"a-secret-folder" not in (tmp_path / "m.onnx").read_bytes()
    about = anybit.load(tmp_path / "m.onnx").master.header.about
    assert about["training"]["recipe"]["data"]["name"] == "mine.npz"


def test_brackets_stay_in_the_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = said(capsys, "train", "--help")
    assert "[penalty]" in text
    assert "\\[" not in text


@pytest.mark.usefixtures("here")
def test_lines_break_where_they_end(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    assert "any width, with kurtosis; an empty one trains without any penalty." in said(capsys, "train", "--help")
    words = ("sweep", "mine.py:make", "--weights", "best.pt", "--data", "mine.py:one", "--widths", "FP")
    assert said(capsys, *words).splitlines()[0] == "test accuracy in %, mine.py:one, n = 30"


def test_training_leaves_malloc_to_whoever_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes

    def refuse(*args: Any) -> None:
        raise AssertionError("a library may not set up malloc for the whole process")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    recipe = recipe_by_word("small-conv", data__name="digits", epochs=1, model__multiplier=0.25, data__batch=256)
    train(recipe, load_dataset("digits"), tmp_path / "run")


def test_trials_are_not_used_again_after_the_data_changed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["search", "mine.py:make", "--data", "mine.py:loaders", "--values", "0.001", "--share", 1]
    words += ["--storage", f"sqlite:///{here}/s.db", "--out", "found.json"]
    with pytest.raises(SystemExit):
        main([str(word) for word in words])
    first = capsys.readouterr().err
    assert "0.001: " in first
    with pytest.raises(SystemExit):
        main([str(word) for word in words])
    assert "0.001: " not in capsys.readouterr().err  # nothing was tried again
    (here / "mine.py").write_text(CODE.replace("% 3", "% 2"))
    with pytest.raises(SystemExit):
        main([str(word) for word in words])
    again = capsys.readouterr().err
    assert "other data or other starting weights; they are not used" in again
    assert "0.001: " in again
