"""What `fuzz.py` breaks: for each kind of file whole ones, ways to break them, and what a user would do with one.

A kind is a class with `whole`, `broken(rng)` and `use(path)`. `broken` gives bytes, and whether they may mean something
else than `whole` does (sealed again, so that every checksum fits). `use` returns a text that tells two contents apart,
or raises an `AnybitError`.
"""

from __future__ import annotations

import contextlib
import io
import json
import struct
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from mutations import changed, damaged, reshaped_graph, spliced
from onnx import TensorProto, helper, numpy_helper

from anybit.artifact import protobuf_scan
from anybit.artifact.adopt import adopt
from anybit.artifact.feeding import Preprocessing
from anybit.artifact.inputs import Input, fed, read_feeds
from anybit.artifact.pictures import LARGEST, read_picture
from anybit.artifact.session import load

FLOAT = np.dtype(np.float32)
Rng = np.random.Generator
Broken = tuple[bytes, bool]


def pick(rng: Rng, options: Any) -> Any:
    return options[int(rng.integers(0, len(options)))]


# ONNX


def small_model() -> onnx.ModelProto:
    """Return a network with a convolution, shapes computed on the way, and a layer at the end; any batch, any size."""
    rng = np.random.default_rng(0)
    tensors = {
        "a.weight": rng.normal(size=(4, 1, 3, 3)).astype(np.float32),
        "a.bias": rng.normal(size=4).astype(np.float32),
        "b.weight": rng.normal(size=(3, 4)).astype(np.float32),
        "b.bias": rng.normal(size=3).astype(np.float32),
        "first": np.array([0]),
        "four": np.array([4]),
    }
    nodes = [
        helper.make_node("Conv", ["x", "a.weight", "a.bias"], ["conv"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["conv"], ["relu"]),
        helper.make_node("GlobalAveragePool", ["relu"], ["pool"]),
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "first"], ["batch"], axis=0),
        helper.make_node("Concat", ["batch", "four"], ["wanted"], axis=0),
        helper.make_node("Reshape", ["pool", "wanted"], ["flat"]),
        helper.make_node("Gemm", ["flat", "b.weight", "b.bias"], ["y"], transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 1, 6, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def feed() -> np.ndarray:
    return np.ones((2, 1, 6, 6), np.float32)


class Plain:
    """ONNX files of strangers, which `anybit adopt` reads."""

    suffix = ".onnx"

    def __init__(self, folder: Path) -> None:
        self.model = small_model()
        self.whole = self.model.SerializeToString()

    def broken(self, rng: Rng) -> Broken:
        match int(rng.integers(0, 4)):
            case 0:
                return damaged(self.whole, rng), True
            case 1:
                return spliced(self.model, rng).SerializeToString(), True
            case _:
                return reshaped_graph(self.model, rng).SerializeToString(), True

    def use(self, path: Path) -> str:
        adopt(path, path.with_name("adopted.onnx"), calibration=[{"x": feed()}])
        return run_master(path.with_name("adopted.onnx"))


def run_master(path: Path) -> str:
    session = load(path, threads=1, keep=1)
    for width in (8, 4):
        session.set_bits(weights=width, activations=width)
    result = session.run(feed())
    return repr(result)[:2000]


class Masters:
    """Masters, damaged by accident or sealed again by somebody with bad intentions."""

    suffix = ".onnx"

    def __init__(self, folder: Path) -> None:
        onnx.save(small_model(), folder / "plain.onnx")
        self.all: list[tuple[bytes, onnx.ModelProto, dict[str, str]]] = []
        for store, per_channel in (("fp32", False), ("fp16", True), ("int8", True)):
            adopt(
                folder / "plain.onnx", folder / "whole.onnx", calibration=[{"x": feed()}], store=store,
                per_channel=per_channel, about={"classes": ["a", "b", "c"]},
            )  # fmt: skip
            data = (folder / "whole.onnx").read_bytes()
            model = onnx.load_model_from_string(data)
            texts = {entry.key: entry.value for entry in model.metadata_props}
            del model.metadata_props[:]
            self.all.append((data, model, texts))
        self.whole = self.all[0][0]

    def broken(self, rng: Rng) -> Broken:
        data, model, texts = pick(rng, self.all)
        (digest,) = [key for key in texts if key.endswith(".digest")]
        (main,) = [key for key in texts if key == digest.removesuffix(".digest")]
        text = texts[main]
        match int(rng.integers(0, 6)):
            case 0:
                return damaged(data, rng), False
            case 1:
                text = json.dumps(changed(json.loads(text), rng))
            case 2:
                text = damaged(text.encode(), rng).decode(errors="replace")
            case 3:
                model = spliced(model, rng)
            case _:
                model = reshaped_graph(model, rng)
        return sealed(model, main, text, digest), True

    def use(self, path: Path) -> str:
        return run_master(path)


def sealed(model: onnx.ModelProto, main: str, text: str, digest: str) -> bytes:
    """Return a master with these contents and a digest that fits them."""
    data = model.SerializeToString()
    file = io.BytesIO(data)
    seal = protobuf_scan.digest(file, protobuf_scan.scan(file, len(data)), text)
    return data + protobuf_scan.entry(main, text) + protobuf_scan.entry(digest, seal)


# Pictures and arrays


class Pictures:
    """Pictures in all formats that are read, and some in others."""

    suffix = ".png"
    rise = 8 * LARGEST  # a tiny file may be the largest picture of one colour, twice in memory while it is converted

    def __init__(self, folder: Path) -> None:
        from PIL import Image

        noise = Image.effect_noise((40, 30), 60)
        deep = Image.fromarray(np.asarray(noise).astype(np.uint16) * 257)
        pictures = {"grey": noise, "colour": noise.convert("RGB"), "palette": noise.convert("P"), "deep": deep}
        self.all = []
        for kind in ("PNG", "JPEG", "BMP", "WEBP", "GIF", "PPM", "TIFF", "EPS"):
            for picture in pictures.values():
                out = io.BytesIO()
                with contextlib.suppress(OSError, ValueError, KeyError):  # not every format takes every picture
                    picture.save(out, kind, **({"progressive": True} if kind == "JPEG" else {}))
                    self.all.append(out.getvalue())
        self.whole = self.all[0]

    def broken(self, rng: Rng) -> Broken:
        data = pick(rng, self.all)
        if rng.random() < 0.2:  # a piece again and again, such as a pass of a progressive JPEG
            at, length = int(rng.integers(0, len(data))), int(rng.integers(1, 400))
            return data[:at] + data[at : at + length] * int(rng.integers(2, 400)) + data[at + length :], True
        if rng.random() < 0.3:  # a great size in the head
            at = int(rng.integers(0, min(40, len(data))))
            return data[:at] + pick(rng, [b"\xff\xff", b"\x7f\xff\xff\xff", b"99999 99999"]) + data[at + 2 :], True
        return damaged(data, rng), True

    def use(self, path: Path) -> str:
        from anybit.serve.upload import read_upload

        with contextlib.suppress(OSError):
            fed(Preprocessing(mean=(0.5,), std=(0.5,)), read_picture(path), Input("x", FLOAT, (0, 3, 8, 8)))
        grey = Input("x", FLOAT, (0, 1, 8, 8))
        found = read_upload(path.read_bytes(), [grey], grey.settle(Preprocessing()))["x"]
        assert np.isfinite(found).all()
        return repr(found.sum())


class Arrays:
    """NumPy files: inputs of `anybit run`, and data sets."""

    suffix = ".npy"

    def __init__(self, folder: Path) -> None:
        rng = np.random.default_rng(0)
        out = io.BytesIO()
        np.save(out, rng.normal(size=(3, 1, 4, 4)).astype(np.float32))
        self.whole = out.getvalue()
        x, y = rng.normal(size=(8, 1, 4, 4)).astype(np.float32), np.arange(8) % 3
        self.archives = []
        for save in (np.savez, np.savez_compressed):
            out = io.BytesIO()
            save(out, x_train=x, y_train=y, x_test=x, y_test=y)
            self.archives.append(out.getvalue())

    def broken(self, rng: Rng) -> Broken:
        if rng.random() < 0.5:
            return self._lying(self.whole, rng), True
        data = pick(rng, self.archives)
        if rng.random() < 0.4:
            return damaged(data, rng), True
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
            for entry in old.infolist():
                content = old.read(entry)
                new.writestr(entry.filename, self._lying(content, rng) if rng.random() < 0.4 else content)
        return out.getvalue(), True

    def _lying(self, data: bytes, rng: Rng) -> bytes:
        """Change the header of an array, its numbers, or bytes of it."""
        if rng.random() < 0.4:
            return damaged(data, rng)
        (length,) = struct.unpack("<H", data[8:10])
        header = eval(data[10 : 10 + length])  # ours
        body = data[10 + length :]
        match int(rng.integers(0, 4)):
            case 0:
                header["shape"] = pick(rng, [(2**40,), (0,), (-1, 1, 4, 4), (3, 1, 4), (10**6, 10**6), (), "x", (1.5,)])
            case 1:
                header["descr"] = pick(rng, ["<f8", "|O", ">f4", "<U9", "<c8", "<f2", "<M8[s]", [("a", "<f4")], "zz"])
            case 2:
                body = np.frombuffer(body[: len(body) // 4 * 4], np.float32).copy()
                body[rng.integers(0, len(body))] = pick(rng, [np.nan, np.inf, -np.inf, 3e38, -1e-40])
                body = body.tobytes()
            case _:
                header = changed(header, rng)
        text = repr(header).encode()[:60_000].ljust(length - 1) + b"\n"
        return data[:8] + struct.pack("<H", len(text)) + text + body

    def use(self, path: Path) -> str:
        if path.read_bytes()[:2] == b"PK":
            from anybit.data.arrays import load_arrays

            return load_arrays(path).train.digest()
        found = [feed["x"] for _, feed in read_feeds([str(path)], [Input("x", FLOAT, (0, 1, 4, 4))], Preprocessing())]
        assert np.isfinite(found).all()
        return repr(np.sum(found))


# Recipes


RECIPE = """
name = "tiny"
epochs = 3
seed = 1
[model]
name = "small-conv"
multiplier = 0.25
[data]
name = "digits"
batch = 64
[optimizer]
name = "adam"
lr = 0.05
warmup = 1
[penalty]
weight = 1e-3
every = 2
[quantize]
widths = []
[speed]
accumulate = 2
precision = "float32"
"""


class Recipes:
    """Recipes; a network is never built, only counted."""

    suffix = ".toml"

    def __init__(self, folder: Path) -> None:
        self.whole = RECIPE.encode()

    def broken(self, rng: Rng) -> Broken:
        if rng.random() < 0.3:
            return damaged(self.whole, rng), True
        lines = RECIPE.splitlines()
        for _ in range(int(rng.integers(1, 3))):
            at = int(rng.integers(1, len(lines)))
            key = lines[at].partition("=")[0]
            values = [
                "1e308", "-1", "nan", "inf", "0", "1e-320", "10000000000000000000000000", "9" * 5000, "true", '""',
                '"' + "x" * 5000 + '"', '"\\u001b[2J"', "[]", "[" * 2000, "{}", "1979-05-27", '["W4A4"]', "0.5", "100",
                '"vgg-like"', '"resnet18"', '"double-backward"', "3", "1000", "999999",
            ]  # fmt: skip
            lines[at] = (
                f"{key}= {pick(rng, values)}" if "=" in lines[at] else f"[{pick(rng, ['model', 'x', 'speed.a'])}]"
            )
        return "\n".join(lines).encode(), True

    def use(self, path: Path) -> str:
        from anybit.task.checkpoint import check_room
        from anybit.train.recipe import load_recipe

        recipe = load_recipe(path)
        shape = {"name": recipe.model.name, "multiplier": recipe.model.multiplier}
        check_room({**shape, "channels": 1, "classes": 10})
        tomllib.loads(path.read_text())
        return repr(recipe)


def make_kind(name: str, folder: Path) -> Any:
    """Return a kind by its name; its whole files are made in `folder`."""
    known: dict[str, Callable[[Path], Any]] = {
        "masters": Masters, "plain": Plain, "pictures": Pictures, "arrays": Arrays, "recipes": Recipes,
    }  # fmt: skip
    if name not in known:  # these need torch, which takes seconds to import
        from fuzz_runs import Checkpoints, Pickled, RunFolders

        known = {"checkpoints": Checkpoints, "pickled": Pickled, "run-folders": RunFolders}
    return known[name](folder)
