from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from anybit.errors import CheckpointError, FileError
from anybit.models import MODELS, build_model
from anybit.task.checkpoint import FORMAT, digest_of, load_model, load_weights, read_checkpoint, save_checkpoint

ABOUT: dict[str, Any] = {
    "model": {"name": "small-conv", "channels": 1, "classes": 10, "multiplier": 0.25},
    "seed": 3,
    "note": "λ",
}
State = dict[str, Tensor]


def make(seed: int = 0, *, width: float = 0.25) -> nn.Module:
    """A network whose buffers are not at their defaults either."""
    torch.manual_seed(seed)
    model = build_model("small-conv", channels=1, classes=10, multiplier=width)
    with torch.no_grad():
        model.train()(torch.randn(8, 1, 8, 8))
    return model


def state_of(model: nn.Module) -> State:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: State, b: State) -> bool:
    return list(a) == list(b) and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_checkpoint(path, make(), ABOUT)
    return path


def refused(path: Path, *, match: str | None = None, width: float = 0.25) -> str:
    """Check that both ways of loading refuse a file, in one line with the path, and leave the model alone."""
    model = make(1, width=width)
    before = state_of(model)
    with pytest.raises(CheckpointError, match=match) as caught:
        load_weights(path, model)
    assert same(state_of(model), before)
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def rewrite(path: Path, change: Callable[[State], Any], header: dict[str, str] | None = None) -> None:
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    about = {"format": FORMAT, "about": json.dumps(ABOUT)}
    safetensors.torch.save_file(tensors, path, metadata=about if header is None else header)


def test_every_entry_comes_back_bit_for_bit(path: Path) -> None:
    want = state_of(make())
    assert any(name.endswith("running_var") for name in want)
    assert any(name.endswith("num_batches_tracked") for name in want)
    model = make(1)
    assert not same(state_of(model), want)
    assert load_weights(path, model) == ABOUT
    assert same(state_of(model), want)
    built, about = load_model(path)
    assert about == ABOUT
    assert same(state_of(built), want)
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(built.eval()(x), make().eval()(x))


@pytest.mark.parametrize("name", [name for name in MODELS if name != "resnet50"])
def test_every_model_can_be_built_again_from_its_checkpoint(name: str, tmp_path: Path) -> None:
    shape = {"name": name, "channels": 3, "classes": 7, "multiplier": 0.125}
    torch.manual_seed(0)
    model = build_model(**shape)
    save_checkpoint(tmp_path / "a", model, {"model": shape})
    torch.manual_seed(1)
    again, _ = load_model(tmp_path / "a")
    assert same(state_of(again), state_of(model))
    assert not any(tensor.is_meta for tensor in [*again.parameters(), *again.buffers()])


def test_odd_memory_layouts_and_rare_values_survive(tmp_path: Path) -> None:
    model = make()
    with torch.no_grad():
        model.classifier.weight = nn.Parameter(torch.randn(16, 10).t())  # not contiguous
        model.classifier.bias[:4] = torch.tensor([-0.0, 1e-45, 3.4e38, -3.4e38])
    save_checkpoint(tmp_path / "a", model, ABOUT)
    again, _ = load_model(tmp_path / "a")
    assert same(state_of(again), state_of(model))
    assert torch.signbit(again.classifier.bias[0])


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 100, 1000, 3000, -1000, -100, -4, -1])
def test_a_file_cut_short(length: int, path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[:length])
    refused(path, match="not a whole safetensors file")
    with pytest.raises(CheckpointError, match="not a whole"):
        load_model(path)


def test_a_file_with_more_behind_its_end(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")
    refused(path, match="not a whole safetensors file")


@pytest.mark.parametrize(("mask", "every"), [(0x01, 2), (0x10, 5), (0xFF, 7)])
def test_flipped_bytes_in_the_header_never_load_other_weights(mask: int, every: int, path: Path) -> None:
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    want, model = state_of(make()), make(1)
    before = state_of(model)
    survived = 0
    for position in range(0, 8 + size, every):
        damaged = bytearray(raw)
        damaged[position] ^= mask
        path.write_bytes(damaged)
        message = None
        try:
            load_weights(path, model)
        except CheckpointError as error:
            message = str(error)
        if message is not None:
            assert message.startswith(f"{path}: "), position
            assert same(state_of(model), before), position
        else:  # the byte was inside a value that the header only carries along
            survived += 1
            assert same(state_of(model), want), position
            model.load_state_dict(before)
    assert survived <= len(json.dumps(json.dumps(ABOUT))) + 8  # the text of `about`, and blanks at the end


@pytest.mark.parametrize("position", range(8))
def test_flipped_bytes_in_the_length_of_the_header(position: int, path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 0xFF
    path.write_bytes(raw)
    refused(path, match="not a whole safetensors file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("classifier.bias"), "lacks classifier.bias"),
        (lambda s: s.pop("features.1.running_mean"), "lacks features.1.running_mean"),
        (lambda s: s.update(extra=torch.zeros(2)), "has extra, which the model lacks"),
        (lambda s: s.update(extra=torch.full((2,), float("nan"))), "has extra, which the model lacks"),
        (
            lambda s: s.update({"classifier.bias": torch.zeros(11)}),
            r"classifier.bias is \(11,\), the model has \(10,\)",
        ),
        (lambda s: s.update({"classifier.weight": s["classifier.weight"].t().contiguous()}), "the model has"),
        (lambda s: s.update({"classifier.bias": torch.zeros(10, dtype=torch.int32)}), "is torch.int32, the model has"),
        (
            lambda s: s.update({"classifier.bias": torch.full((10,), 1e300, dtype=torch.float64)}),
            "infinite or NaN entries|is torch.float64, the model has",  # brought to the model's own type, or not at all
        ),
        (lambda s: s["classifier.bias"].fill_(float("nan")), "classifier.bias has infinite or NaN entries"),
        (lambda s: s["features.0.weight"].view(-1)[-1:].fill_(-float("inf")), "features.0.weight has infinite or NaN"),
        (lambda s: s["features.1.running_var"][:1].fill_(float("nan")), "features.1.running_var has infinite or NaN"),
    ],
)
def test_weights_that_do_not_fit(change: Callable[[State], Any], message: str, path: Path) -> None:
    rewrite(path, change)
    refused(path, match=message)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_many_problems_are_counted_and_the_line_stays_short(path: Path) -> None:
    message = refused(path, match="more", width=0.5)
    assert "take the network that these weights are of" in message
    assert len(message) < 400 + len(str(path))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"format": "anybit-checkpoint/99", "about": "{}"}, "the header says 'anybit-checkpoint/99', this version"),
        ({"format": FORMAT}, "the header cannot be read"),
        ({"format": FORMAT, "about": "{"}, "the header cannot be read"),
        ({"format": FORMAT, "about": "[]"}, "no table in it"),
        ({"format": FORMAT, "about": "[" * 100_000}, "the header cannot be read"),
    ],
    ids=["format", "no about", "broken about", "list", "too deep"],
)
def test_headers_that_cannot_be_used(header: dict[str, str], message: str, path: Path) -> None:
    rewrite(path, lambda s: None, header)
    refused(path, match=message)


@pytest.mark.parametrize(
    "shape",
    [
        None,
        "small-conv",
        {},
        {"name": "small-conv", "channels": 1, "classes": 10},
        {"name": "no-such-model", "channels": 1, "classes": 10, "multiplier": 0.25},
        {"name": ["small-conv"], "channels": 1, "classes": 10, "multiplier": 0.25},
        {"name": "small-conv", "channels": "one", "classes": 10, "multiplier": 0.25},
        {"name": "small-conv", "channels": -1, "classes": 10, "multiplier": 0.25},
        {"name": "small-conv", "channels": 1, "classes": 11, "multiplier": 0.25},
        {"name": "small-conv", "channels": 1, "classes": 10**12, "multiplier": 0.25},  # would be 64 TB
        {"name": "small-conv", "channels": 1, "classes": 10, "multiplier": 1e9},
        {"name": "small-conv", "channels": 1, "classes": 10, "multiplier": 1e300},
        {"name": "small-conv", "channels": 1, "classes": 10, "multiplier": "wide"},
        {"name": "resnet18", "channels": 1, "classes": 10, "multiplier": 0.25},
    ],
)
def test_a_header_that_asks_for_another_model_builds_nothing(shape: Any, path: Path) -> None:
    save_checkpoint(path, make(), {"model": shape})
    with pytest.raises(CheckpointError) as caught:
        load_model(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value).splitlines()) == 1


def test_no_memory_is_taken_before_the_shapes_are_compared(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[bool] = []

    def spy(*args: Any, **kwargs: Any) -> nn.Module:
        model = build_model(*args, **kwargs)
        built.append(all(parameter.is_meta for parameter in model.parameters()))
        return model

    monkeypatch.setattr("anybit.task.checkpoint.build_model", spy)
    load_model(path)
    assert built == [True, False]
    save_checkpoint(path, make(), {"model": {**ABOUT["model"], "classes": 10**6}})
    with pytest.raises(CheckpointError, match=r"classifier.weight is \(10, 16\), the model has \(1000000, 16\)"):
        load_model(path)
    assert built == [True, False, True]


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("these are not the weights you are looking for\n" * 100)
    torch.save({"a": torch.zeros(3)}, tmp_path / "pickle")
    for name, message in (
        ("missing", "no such file; a checkpoint"),
        ("folder", "is a folder; a checkpoint"),
        ("text", "not a whole safetensors file"),
        ("text/below", "no such file"),
        ("pickle", "lacks features.0.weight|not a whole safetensors file"),
    ):
        refused(tmp_path / name, match=message)
        with pytest.raises(CheckpointError, match=message):
            load_model(tmp_path / name)


def test_no_pickle_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path(tmp_path / "boom").touch, ()

    torch.save(Bomb(), path)
    refused(path)
    assert not (tmp_path / "boom").exists()


def test_an_interrupted_save_leaves_the_old_file(path: Path) -> None:
    raw = path.read_bytes()
    model = make(1)
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_checkpoint(path, model, {"loss": float("nan")})
    model.register_buffer("spectrum", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(CheckpointError, match=r"spectrum has numbers of type torch\.complex64"):
        save_checkpoint(path, model, ABOUT)
    assert path.read_bytes() == raw
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_save_stopped_while_it_renames_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = path.read_bytes()
    seen: list[int] = []

    def stop(beside: Path, target: Path) -> None:
        seen.append(beside.stat().st_size)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(path, make(1), ABOUT)
    assert seen == [len(raw)]  # the new file was whole, and beside the old one
    assert path.read_bytes() == raw
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_saving_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    for path in (tmp_path / "file" / "model", tmp_path / ("x" * 250)):
        with pytest.raises(FileError, match="cannot") as caught:
            save_checkpoint(path, make(), ABOUT)
        assert str(tmp_path) in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_saving_over_the_file_that_was_read(path: Path) -> None:
    tensors, about = read_checkpoint(path)
    model, _ = load_model(path)
    with torch.no_grad():
        model.classifier.bias.add_(1)
    want = tensors["classifier.bias"] + 1
    save_checkpoint(path, model, about)
    assert torch.equal(load_model(path)[0].classifier.bias, want)


# The checksum


def test_a_flipped_bit_anywhere_in_the_weights_is_noticed(path: Path) -> None:
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    for position in range(8 + size, len(raw), 997):
        damaged = bytearray(raw)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        refused(path, match="damaged, the checksum does not fit the contents")
    assert len(raw) - size > 20 * 997
    path.write_bytes(raw)
    load_model(path)


def test_a_checkpoint_of_an_earlier_version_has_no_checksum_and_loads(path: Path) -> None:
    rewrite(path, lambda s: None)
    assert same(state_of(load_model(path)[0]), state_of(make()))


def test_a_checksum_under_another_name_is_not_overlooked(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"digest"', b'"digesT"'))
    refused(path, match="unknown key 'digesT'")


def test_the_checksum_sees_names_types_and_shapes() -> None:
    x = torch.arange(6, dtype=torch.float32)
    seen = [
        digest_of({"a": x}),
        digest_of({"b": x}),
        digest_of({"a": x.view(2, 3)}),
        digest_of({"a": x.view(torch.int32)}),
        digest_of({"a": x[:3], "b": x[3:]}),
        digest_of({"a": x}, "about"),
    ]
    assert len(set(seen)) == len(seen)
    assert digest_of({"a": x.view(2, 3).t().contiguous().t()}) == digest_of({"a": x.view(2, 3)})


# State dicts of PyTorch from elsewhere


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    torch.save(make().state_dict(), tmp_path / "model.pt")
    return tmp_path / "model.pt"


def test_a_state_dict_of_pytorch_fills_a_model(pickled: Path, tmp_path: Path) -> None:
    torch.save({"epoch": 3, "state_dict": make().state_dict()}, tmp_path / "wrapped.pth")
    for path in (pickled, tmp_path / "wrapped.pth"):
        model = make(1)
        assert load_weights(path, model) == {}
        assert same(state_of(model), state_of(make()))
    refused(pickled, match="the model has", width=0.5)


def test_what_is_more_than_a_state_dict_is_refused_and_not_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path(tmp_path / "boom").touch, ()

    torch.save({**make().state_dict(), "bomb": Bomb()}, tmp_path / "bomb.pt")
    refused(tmp_path / "bomb.pt", match="more than tensors in it")
    assert not (tmp_path / "boom").exists()
    torch.save(make(), tmp_path / "whole.pt")
    refused(
        tmp_path / "whole.pt",
        match=r"more than tensors in it.*\(it holds [\w.]+\); save model.state_dict\(\) again with torch.save",
    )
    torch.save([torch.zeros(3)], tmp_path / "list.pt")
    refused(tmp_path / "list.pt", match="more than names and tensors in it")
    torch.save({"a": 1}, tmp_path / "numbers.pt")
    refused(tmp_path / "numbers.pt", match="more than names and tensors in it")
    refused(tmp_path / "gone.pt", match="no such file; a state dict of PyTorch is expected here")


def test_broken_files_of_pytorch(pickled: Path, tmp_path: Path) -> None:
    raw = pickled.read_bytes()
    for length in (0, 1, 100, len(raw) // 2, len(raw) - 1):
        pickled.write_bytes(raw[:length])
        refused(pickled, match="not a whole file of torch.save")
    inside = raw.index(make().state_dict()["classifier.weight"].numpy().tobytes())
    pickled.write_bytes(raw[:inside] + bytes([raw[inside] ^ 1]) + raw[inside + 1 :])
    refused(pickled, match="is damaged at model/data/")
    torch.save(make().state_dict(), pickled, _use_new_zipfile_serialization=False)
    refused(pickled, match="not a whole file of torch.save")


def test_a_packed_file_of_pytorch_is_not_unpacked(pickled: Path, tmp_path: Path) -> None:
    """A kilobyte of zip can be a gigabyte of zeros."""
    packed = tmp_path / "packed.pt"
    with zipfile.ZipFile(pickled) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    refused(packed, match="is compressed")
