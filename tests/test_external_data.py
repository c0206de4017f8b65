"""Masters that are too large for one file: every path, with networks of kilobytes and a limit to match."""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from test_artifact_small import HEADER, MODEL, header_with, small_master, write
from torch import nn
from typer.testing import CliRunner

import anybit
from anybit.artifact import storage
from anybit.artifact.adopt import adopt
from anybit.artifact.bench import footprint
from anybit.artifact.header import Data, Header, read_header, write_header
from anybit.artifact.master import open_master, write_master
from anybit.artifact.model import OnnxModel
from anybit.artifact.quantized_graph import quantized_graph
from anybit.artifact.runtime import onnxruntime
from anybit.artifact.session import load
from anybit.artifact.storage import size_on_disk, write_model
from anybit.cli.main import app
from anybit.errors import AnybitError, FileError, SpecError
from anybit.plan.points import Weight
from anybit.simulate.to_onnx import translate
from anybit.spec import Bits

X = np.random.default_rng(0).normal(size=(3, 1, 6, 6)).astype(np.float32)
LIMIT = 1200
"""Bytes: the small master has some more."""


def in_two(folder: Path, header: Header = HEADER, *, name: str = "m.onnx") -> tuple[Path, Path]:
    """Write the small master in two files; return both."""
    write_master(folder / name, MODEL, header, limit=LIMIT)
    (second,) = folder.glob(f"{name}.*.data")
    return folder / name, second


def outputs(path: Path) -> Any:
    """What ONNX Runtime makes of a file by itself."""
    return onnxruntime().InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {"x": X})[0]


# Two files are as good as one


@pytest.mark.parametrize("store", ["fp32", "fp16", "int8"])
def test_two_files_give_the_same_numbers_as_one(store: str, tmp_path: Path) -> None:
    header = header_with(store=store)
    first, second = in_two(tmp_path, header)
    write_master(tmp_path / "one.onnx", MODEL, header)
    one, two = load(tmp_path / "one.onnx"), load(first)
    for name, array in one.master.weights.items():
        np.testing.assert_array_equal(two.master.weights[name], array)
    for bits in (Bits(), Bits(8, 8), Bits(4, 4)):
        for session in (one, two):
            session.set_bits(weights=bits.weights, activations=bits.activations)
        np.testing.assert_array_equal(two.run(X), one.run(X))
    np.testing.assert_array_equal(outputs(first), outputs(tmp_path / "one.onnx"))
    assert two.master.header.data == Data(
        second.name, second.stat().st_size, hashlib.sha256(second.read_bytes()).hexdigest()
    )
    assert one.master.header.data is None


def test_the_second_file_is_what_onnx_calls_external_data(tmp_path: Path) -> None:
    first, second = in_two(tmp_path)
    onnx.checker.check_model(str(first), full_check=True)
    held = {t.name: numpy_helper.to_array(t) for t in MODEL.graph.initializer}
    for tensor in onnx.load(first).graph.initializer:  # with the data of the second file
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), held[tensor.name])
    bare = {t.name: t for t in onnx.load(first, load_external_data=False).graph.initializer}
    outside = {name: {e.key: e.value for e in t.external_data} for name, t in bare.items() if t.external_data}
    assert outside == {
        "a.weight": {"location": second.name, "offset": "0", "length": "144"},
        "b.weight": {"location": second.name, "offset": "4096", "length": "768"},
    }
    assert second.stat().st_size == 8192
    assert second.read_bytes()[4096 : 4096 + 768] == held["b.weight"].tobytes()
    assert second.name == f"m.onnx.{hashlib.sha256(second.read_bytes()).hexdigest()[:16]}.data"


def test_one_file_is_written_as_long_as_it_can_be(tmp_path: Path) -> None:
    path = small_master(tmp_path)
    assert "data" not in json.loads(metadata(path)["anybit"])
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    first, _ = in_two(tmp_path)
    assert json.loads(metadata(first)["anybit"])["data"].keys() == {"file", "bytes", "sha256"}


def metadata(path: Path) -> dict[str, str]:
    return {e.key: e.value for e in onnx.load(path, load_external_data=False).metadata_props}


def test_both_files_can_be_moved_and_the_first_renamed(tmp_path: Path) -> None:
    first, second = in_two(tmp_path)
    want = load(first).run(X)
    other = tmp_path / "elsewhere"
    other.mkdir()
    shutil.move(first, other / "renamed.onnx")
    shutil.move(second, other / second.name)
    np.testing.assert_array_equal(load(other / "renamed.onnx").run(X), want)


class Wide(nn.Module):
    """A network with tensors of megabytes, which never go through protobuf."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 64, 3, bias=False), nn.BatchNorm2d(64)
        self.wide, self.after, self.last = nn.Linear(1024, 512), nn.BatchNorm1d(512), nn.Linear(512, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.after(self.wide(torch.relu(self.norm(self.conv(x))).flatten(1)))))


@pytest.fixture(scope="module")
def wide() -> Any:
    torch.manual_seed(0)
    model = Wide()
    with torch.no_grad():
        for _ in range(20):
            model(torch.randn(32, 1, 6, 6))
    return anybit.prepare(model.eval(), torch.zeros(2, 1, 6, 6), input_range=(-4, 4), preset="paper")


@pytest.fixture(scope="module")
def translated(wide: Any) -> tuple[OnnxModel, Header]:
    return translate(wide), Header(wide.plan)


Translated = tuple[OnnxModel, Header]


@pytest.mark.parametrize("limit", [2**31, 2**20], ids=["one file", "two files"])
def test_large_tensors_are_written_read_and_run_bit_for_bit(
    wide: Any, translated: Translated, limit: int, tmp_path: Path
) -> None:
    model, header = translated
    assert [a.nbytes for a in model.arrays.values()] == [1024 * 512 * 4]
    exact = {name: weight.detach().numpy() for name, weight in wide.weights.items()}
    (array,) = model.arrays.values()
    assert np.shares_memory(array, exact["wide.weight"])  # saved from where it is
    write_master(tmp_path / "m.onnx", model, header, limit=limit)
    session = load(tmp_path / "m.onnx")
    assert (session.master.header.data is None) == (limit > 2**21)
    for name, weight in exact.items():
        np.testing.assert_array_equal(session.master.weights[name], weight)
    np.testing.assert_array_equal(outputs(tmp_path / "m.onnx"), session.run(X))
    for bits in (Bits(), Bits(8, 8), Bits(4, 8)):
        wide.set_bits(weights=bits.weights, activations=bits.activations)
        session.set_bits(weights=bits.weights, activations=bits.activations)
        with torch.no_grad():
            want = wide(torch.from_numpy(X)).numpy()
        np.testing.assert_allclose(session.run(X), want, atol=0.02 * np.abs(want).max())
    del session


def test_a_second_file_is_mapped_and_not_copied(translated: Translated, tmp_path: Path) -> None:
    write_master(tmp_path / "m.onnx", *translated, limit=2**20)
    weight = open_master(tmp_path / "m.onnx").weights["wide.weight"]
    base: Any = weight
    while getattr(base, "base", None) is not None:
        base = base.base
    assert type(base).__name__ == "mmap"
    assert not weight.flags.writeable


def test_checking_a_file_holds_no_weights(translated: Translated, tmp_path: Path) -> None:
    for limit in (2**31, 2**20):
        write_master(tmp_path / "m.onnx", *translated, limit=limit)
        weights = open_master(tmp_path / "m.onnx", hold=False).weights
        assert weights["wide.weight"].shape == (512, 1024)
        assert weights["wide.weight"].strides == (0, 0)


# The commands


def test_every_command_takes_two_files(tmp_path: Path) -> None:
    about = {"classes": ["a", "b", "c"], "input": {"mean": [0.0], "std": [1.0]}}
    first, _ = in_two(tmp_path, header_with(about=about))
    np.save(tmp_path / "x.npy", X[0])
    run = CliRunner().invoke
    done = run(app, ["run", str(first), "--input", str(tmp_path / "x.npy"), "--policy", "fixed", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["bits"] == "W8A8"
    done = run(app, ["export", str(first), str(tmp_path / "w4a8.onnx"), "--bits", "W4A8"])
    assert done.exit_code == 0, done.output
    session = load(first)
    session.set_bits(weights=4, activations=8)
    np.testing.assert_allclose(outputs(tmp_path / "w4a8.onnx"), session.run(X), rtol=1e-5)
    done = run(app, ["watch", str(first), "--policy", "fixed", "--times", "1"])
    assert done.exit_code == 0, done.output
    from anybit.cli.serve import make_app

    assert make_app(first).model.classes == 3
    assert footprint(first, Bits(8, 8), {"x": X[:1]})[0] < size_on_disk(first)


def test_an_export_can_have_two_files_too(tmp_path: Path) -> None:
    path, out = small_master(tmp_path), tmp_path / "out.onnx"
    session = load(path)
    session.set_bits(weights=32, activations=8)
    model, _ = quantized_graph(
        session.master, session.plan.at(Bits(32, 8), tensors=session.master.tensors), packed=True
    )
    write_model(out, model, lambda file, data: None, spare=0, limit=LIMIT)
    (second,) = tmp_path.glob("out.onnx.*.data")
    np.testing.assert_allclose(outputs(out), session.run(X), rtol=1e-5)
    assert size_on_disk(out) == out.stat().st_size + second.stat().st_size
    anybit.export(path, out, weights=4, activations=8)  # fits into one file
    assert not second.exists()
    assert size_on_disk(out) == out.stat().st_size


def test_a_model_in_two_files_is_adopted(wide: Any, translated: Translated, tmp_path: Path) -> None:
    """As others write them: any name, any offset, an older version of the operators."""
    write_master(tmp_path / "one.onnx", *translated)
    model = onnx.load(tmp_path / "one.onnx")
    del model.metadata_props[:]
    model.opset_import[0].version = 20
    (tmp_path / "plain").mkdir()
    onnx.save(model, tmp_path / "plain" / "p.onnx", save_as_external_data=True, location="w.bin", size_threshold=100)
    adopt(tmp_path / "plain" / "p.onnx", tmp_path / "m.onnx", calibration=[{"x": X}])
    master = open_master(tmp_path / "m.onnx")
    exact = {name: weight.detach().numpy() for name, weight in wide.weights.items()}
    for name, array in master.weights.items():
        np.testing.assert_array_equal(array, exact[name])
    np.testing.assert_array_equal(outputs(tmp_path / "m.onnx"), outputs(tmp_path / "one.onnx"))
    data = (tmp_path / "plain" / "w.bin").read_bytes()
    (tmp_path / "plain" / "w.bin").write_bytes(data[:-5000])
    with pytest.raises(FileError, match=r"needs \d+ bytes from byte \d+ on, w\.bin ends before"):
        adopt(tmp_path / "plain" / "p.onnx", tmp_path / "m.onnx", calibration=[{"x": X}])


# A second file that is not what it should be


def shorten(second: Path) -> None:
    second.write_bytes(second.read_bytes()[:-1])


def change(second: Path) -> None:
    data = bytearray(second.read_bytes())
    data[100] ^= 1
    second.write_bytes(data)


def lead_out(second: Path) -> None:
    outside = second.parent.parent / "secret.bin"
    second.rename(outside)
    second.symlink_to(outside)


def make_folder(second: Path) -> None:
    second.unlink()
    second.mkdir()


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (Path.unlink, r"its second file \S+ is missing; both files belong together"),
    "cut short": (shorten, r"its second file \S+ has 8191 bytes, not 8192; both files"),
    "changed": (change, r"its second file \S+ is damaged or was changed; both files"),
    "a link out of the folder": (lead_out, r"its second file \S+ leads out of the folder; both files"),
    "a folder": (make_folder, r"its second file \S+ is missing; both files"),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_a_second_file_that_is_not_right_is_one_clear_error(damage: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    first, second = in_two(folder)
    harm, message = BROKEN[damage]
    harm(second)
    for hold in (True, False):
        with pytest.raises(FileError, match=message) as caught:
            open_master(first, hold=hold)
        assert str(caught.value).startswith(f"{first}: ")
        assert "\n" not in str(caught.value)
    done = CliRunner().invoke(app, ["export", str(first), str(tmp_path / "out.onnx")])
    assert done.exit_code != 0
    assert not (tmp_path / "out.onnx").exists()


def test_a_link_inside_the_folder_is_followed(tmp_path: Path) -> None:
    first, second = in_two(tmp_path)
    second.rename(tmp_path / "blob")
    second.symlink_to("blob")
    assert load(first).run(X).shape == (3, 3)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "/etc/passwd", "../secret.bin", "a/b", "a\\b", "C:secret", "a\0b", "a\nb", 7, None]
)
def test_the_name_is_a_plain_one(name: Any) -> None:
    values = json.loads(write_header(header_with(data=Data("x", 1, "0" * 64))))
    values["data"]["file"] = name
    with pytest.raises(FileError, match=r"f: data(\.file| must|: file must)"):
        read_header(json.dumps(values), where="f")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("bytes", 0, "data.bytes must be a whole number from 1 on"),
        ("bytes", 2**60, "data.bytes must be a whole number"),
        ("bytes", "1", "data.bytes must be a whole number"),
        ("sha256", "0" * 63, "sha256 must be 64 lower-case hexadecimal digits"),
        ("sha256", "G" * 64, "sha256 must be 64"),
        ("more", 1, "data: unknown field 'more'"),
    ],
)
def test_what_the_header_says_about_it_is_checked(field: str, value: Any, message: str) -> None:
    values = json.loads(write_header(header_with(data=Data("x", 1, "0" * 64))))
    values["data"][field] = value
    with pytest.raises(FileError, match=message):
        read_header(json.dumps(values), where="f")
    with pytest.raises(SpecError, match="plain name"):
        Data("../x", 1, "0" * 64)


def entry(tensor: TensorProto, key: str, value: str) -> None:
    for found in tensor.external_data:
        if found.key == key:
            found.value = value


ATTACKS: dict[str, tuple[Callable[[TensorProto], Any], str]] = {
    "another file": (lambda t: entry(t, "location", "other.data"), "lie in another file than"),
    "a file outside": (lambda t: entry(t, "location", "../../etc/passwd"), "lie in another file than"),
    "our own key": (lambda t: entry(t, "location", "#0"), "lie in another file than"),
    "beyond the end": (lambda t: entry(t, "offset", "8192"), "must be a multiple of 4096 and the data end before"),
    "not aligned": (lambda t: entry(t, "offset", "4"), "must be a multiple of 4096"),
    "no number": (lambda t: entry(t, "offset", "-1"), "offset and length must be whole numbers"),
    "a huge number": (lambda t: entry(t, "offset", "9" * 40), "offset and length must be whole numbers"),
    "another length": (lambda t: entry(t, "length", "764"), r"shape \[3, 64\] needs 768 bytes, there are 764"),
    "another shape": (lambda t: t.dims.__setitem__(0, 2**40), "is absurd"),
    "no length": (lambda t: t.external_data.pop(), "external_data must be location, offset and length"),
    "twice": (lambda t: t.external_data.add(key="offset", value="0"), "external_data must be location"),
    "in two places": (lambda t: setattr(t, "raw_data", b"0" * 768), "has its data in two places"),
    "unknown type": (lambda t: setattr(t, "data_type", 77), "data_type 77 is none"),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_tensor_that_points_elsewhere_is_refused(attack: str, tmp_path: Path) -> None:
    first, _ = in_two(tmp_path)
    harm, message = ATTACKS[attack]
    model = onnx.load(first, load_external_data=False)
    text = metadata(first)["anybit"]
    del model.metadata_props[:]
    (tensor,) = [t for t in model.graph.initializer if t.name == "b.weight"]
    harm(tensor)
    write(first, model=model, text=text)  # with a digest that fits
    with pytest.raises(FileError, match=message) as caught:
        open_master(first)
    assert str(caught.value).startswith(f"{first}: ")


def test_a_second_file_without_a_header_that_names_it_is_refused(tmp_path: Path) -> None:
    first, _ = in_two(tmp_path)
    model = onnx.load(first, load_external_data=False)
    del model.metadata_props[:]
    write(first, model=model)
    with pytest.raises(FileError, match=r"'a\.weight': its data lie in another file, which the header"):
        open_master(first)


# Writing


def test_saving_again_replaces_both_files(tmp_path: Path) -> None:
    first, second = in_two(tmp_path)
    opened = load(first)  # goes on with what it has
    want = opened.run(X)
    model = copy.deepcopy(MODEL)
    (tensor,) = [t for t in model.graph.initializer if t.name == "b.weight"]
    tensor.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(tensor), "b.weight"))
    write_master(first, model, HEADER, limit=LIMIT)
    assert not second.exists()
    assert len(list(tmp_path.iterdir())) == 2
    assert not np.array_equal(load(first).run(X), want)
    opened.set_bits(weights=8, activations=8)
    assert np.abs(opened.run(X) - want).max() < 0.1 * np.abs(want).max()
    write_master(first, MODEL, HEADER, limit=LIMIT)
    assert second.exists()  # the same weights, so the same name
    small_master(tmp_path)
    write_master(first, MODEL, HEADER)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "small.onnx"]


@pytest.mark.parametrize("again", [False, True], ids=["new", "over another"])
@pytest.mark.parametrize("step", ["second file", "first file", "check"])
def test_a_save_that_fails_leaves_what_was_there(
    again: bool, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if again:
        in_two(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model = copy.deepcopy(MODEL)
    (tensor,) = [t for t in model.graph.initializer if t.name == "b.weight"]
    tensor.CopyFrom(numpy_helper.from_array(2 * numpy_helper.to_array(tensor), "b.weight"))

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    if step == "check":
        tensor.CopyFrom(numpy_helper.from_array(np.full((3, 64), np.nan, np.float32), "b.weight"))
    else:
        monkeypatch.setattr(storage, {"second file": "_laid_out", "first file": "_write"}[step], full)
    with pytest.raises((FileError, OSError)):
        write_master(tmp_path / "m.onnx", model, HEADER, limit=LIMIT)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_failed_save_of_the_same_weights_keeps_the_file_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = in_two(tmp_path)

    def broken(*args: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(storage, "_write", broken)
    with pytest.raises(FileError, match="cannot be written"):
        write_master(first, MODEL, HEADER, limit=LIMIT)
    assert load(first).run(X).shape == (3, 3)


def test_a_graph_that_is_too_large_without_its_tensors_is_refused(tmp_path: Path) -> None:
    model = copy.deepcopy(MODEL)
    del model.graph.initializer[:]
    with pytest.raises(FileError, match=r"m\.onnx: not written, its graph and header alone have more than"):
        write_master(tmp_path / "m.onnx", model, HEADER, limit=LIMIT)
    assert list(tmp_path.iterdir()) == []


def test_tensors_that_share_their_numbers_are_written_once(translated: Translated, tmp_path: Path) -> None:
    model, header = translated[0].copy(), translated[1]
    (large,) = [t for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL]
    twin = model.graph.initializer.add()
    twin.CopyFrom(large)
    twin.name = "twin"
    model.graph.node.append(onnx.helper.make_node("Identity", ["twin"], ["copy"]))
    header = Header(replace(header.plan, points=(*header.plan.points, Weight("twin"))))
    write_master(tmp_path / "m.onnx", model, header, limit=2**20)
    (second,) = tmp_path.glob("*.data")
    assert second.stat().st_size < 1.2 * 1024 * 512 * 4
    master = open_master(tmp_path / "m.onnx")
    np.testing.assert_array_equal(master.weights["twin"], master.weights[large.name])


# Damage of any kind


def test_random_damage_to_either_file_is_refused(tmp_path: Path) -> None:
    first, second = in_two(tmp_path)
    rng = np.random.default_rng(0)
    whole = {path: path.read_bytes() for path in (first, second)}
    for _ in range(150):
        path = first if rng.integers(2) else second
        data = bytearray(whole[path])
        data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        try:
            changed = load(first, threads=1, keep=1)
        except AnybitError:
            pass
        else:  # the name of the program that wrote it may change
            assert changed.plan == HEADER.plan
            np.testing.assert_array_equal(
                changed.master.weights["b.weight"], open_master(small_master(tmp_path)).weights["b.weight"]
            )
        path.write_bytes(whole[path])


# Memory


def test_saving_and_opening_take_no_copies(tmp_path: Path) -> None:
    """40 MB of weights in 8 tensors: with copies of all of them the peak would rise by 40 MB and more."""
    code = f"""
import gc, torch, anybit
from pathlib import Path
from torch import nn
from anybit.artifact.master import open_master
from anybit.simulate.to_onnx import save

def status(field):
    return next(int(l.split()[1]) / 1024 for l in Path("/proc/self/status").read_text().splitlines() if field in l)

def rise(action):
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    result = action()
    return status("VmHWM") - before, result

def network(width):
    layers = [m for _ in range(8) for m in (nn.Linear(width, width, bias=False), nn.BatchNorm1d(width), nn.ReLU())]
    return anybit.prepare(nn.Sequential(*layers).eval(), torch.zeros(2, width), input_range=(0, 1))

save(network(8), {str(tmp_path / "warm.onnx")!r})
open_master({str(tmp_path / "warm.onnx")!r})
net = network(1120)
saved, _ = rise(lambda: save(net, {str(tmp_path / "m.onnx")!r}))
del net
opened, master = rise(lambda: open_master({str(tmp_path / "m.onnx")!r}))
print(saved, opened, sum(w.nbytes for w in master.weights.values()) / 2**20)
"""
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    saved, opened, weights = map(float, done.stdout.split())
    assert weights == pytest.approx(8 * 1120**2 * 4 / 2**20)
    assert saved < 0.6 * weights
    assert opened < 1.4 * weights
