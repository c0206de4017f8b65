"""Checkpoints and run folders, for `fuzz.py`; everything here needs torch."""

from __future__ import annotations

import contextlib
import io
import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mutations import VALUES, changed, damaged, pick

from anybit.data import load_dataset
from anybit.data.base import Split
from anybit.errors import AnybitError
from anybit.models import build_model
from anybit.task.checkpoint import FORMAT, digest_of, load_model, load_weights, save_checkpoint
from anybit.train.loop import train
from anybit.train.recipe import DataRecipe, ModelRecipe, OptimizerRecipe, Recipe
from anybit.train.resume import FORMAT as STATE

Rng = np.random.Generator
SHAPE = {"name": "small-conv", "channels": 1, "classes": 10, "multiplier": 0.25}


class Enough(BaseException):
    """Ends a run that went on as it should."""


def parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def joined(header: Any, body: bytes, *, size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + body


def lying(data: bytes, rng: Rng) -> bytes:
    """Change what the header says about a tensor, the length of the header, or the header as a whole."""
    header, body = parts(data)
    name = pick(rng, [name for name in header if name != "__metadata__"])
    entry = header[name]
    match int(rng.integers(0, 8)):
        case 0:
            entry["shape"] = pick(rng, [[2**40], [2**63, 2], [], [0], [-1], [1] * 100, entry["shape"] * 2])
        case 1:
            entry["dtype"] = pick(rng, ["F64", "F16", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "F4", "C64", "X9", ""])
        case 2:
            entry["data_offsets"] = pick(rng, [[0, 2**62], [5, 1], [-4, 4], [2**64, 2**64 + 8], [0]])
        case 3:
            entry[pick(rng, ["shape", "dtype", "data_offsets"])] = pick(rng, VALUES)
        case 4:
            header[name + "!"] = header.pop(name)
        case 5:
            return joined(header, body, size=pick(rng, [0, 1, 10**6, 2**31, 2**63, 2**64 - 1]))
        case 6:
            texts = [b"{}", b"[" * 90_000, b'{"a":' * 5000, b"\xff\xfe", b'{"__metadata__":{}}']
            return joined(pick(rng, texts), body)
        case _:
            del header[name]
    return joined(header, body)


def sealed(data: bytes, rng: Rng, kind: str) -> bytes:
    """Change values and seal the file again, as somebody with bad intentions would."""
    import safetensors.torch

    tensors = safetensors.torch.load(data)
    about = json.loads(parts(data)[0]["__metadata__"]["about"])
    name = pick(rng, list(tensors))
    match int(rng.integers(0, 6)):
        case 0:
            tensors[name] = tensors[name].reshape(-1)[: max(1, tensors[name].numel() // 2)].clone()
        case 1:
            tensors[name] = tensors[name].to(pick(rng, [torch.float64, torch.int32, torch.bfloat16]))
        case 2:
            tensors[name] = torch.full_like(tensors[name], float("nan") if tensors[name].is_floating_point() else 255)
        case 3:
            tensors.pop(name)
        case _:
            about = changed(about, rng)
    text = json.dumps(about)
    return safetensors.torch.save(tensors, {"format": kind, "about": text, "digest": digest_of(tensors, text)})


def broken_tensors(data: bytes, rng: Rng, kind: str) -> tuple[bytes, bool]:
    match int(rng.integers(0, 4)):
        case 0:
            return damaged(data, rng), False
        case 1:
            return lying(data, rng), False
        case 2:
            return data[: int(rng.integers(0, len(data)))], False
        case _:
            return sealed(data, rng, kind), True


def fresh() -> torch.nn.Module:
    return build_model("small-conv", channels=1, classes=10, multiplier=0.25)


class Checkpoints:
    """What training leaves."""

    suffix = ".safetensors"

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        save_checkpoint(folder / "whole.safetensors", fresh(), {"model": SHAPE, "seed": 3})
        self.whole = (folder / "whole.safetensors").read_bytes()

    def broken(self, rng: Rng) -> tuple[bytes, bool]:
        return broken_tensors(self.whole, rng, FORMAT)

    def use(self, path: Path) -> str:
        return digest_of(load_model(path)[0].state_dict())


class Pickled:
    """State dicts of PyTorch."""

    suffix = ".pt"

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        torch.save(fresh().state_dict(), folder / "whole.pt")
        self.whole = (folder / "whole.pt").read_bytes()

    def broken(self, rng: Rng) -> tuple[bytes, bool]:
        if rng.random() < 0.5:
            return damaged(self.whole, rng), False
        out = io.BytesIO()  # the pickle is changed and packed again, so that every checksum fits
        with zipfile.ZipFile(io.BytesIO(self.whole)) as old, zipfile.ZipFile(out, "w") as new:
            for entry in old.infolist():
                content = old.read(entry)
                hit = entry.filename.endswith("data.pkl") or rng.random() < 0.05
                new.writestr(entry.filename, damaged(content, rng) if hit else content)
        return out.getvalue(), True

    def use(self, path: Path) -> str:
        model = fresh()
        load_weights(path, model)
        return digest_of(model.state_dict())


class RunFolders:
    """Folders of unfinished runs, as one archive of their files; a run that is refused must leave them as they were."""

    suffix = ".zip"

    def __init__(self, folder: Path) -> None:
        data = load_dataset("digits")
        few = Split(data.train.x[:64], data.train.y[:64])
        self.data = type(data)(data.name, few, few, few, data.classes, data.input_range)
        self.recipe = Recipe(
            "tiny",
            3,
            ModelRecipe("small-conv", 0.25),
            DataRecipe("digits", batch=32),
            optimizer=OptimizerRecipe(lr=0.05),
        )
        steps = iter([None] * 3)

        def progress(more: int) -> None:
            if next(steps, Enough) is Enough:
                raise Enough

        with contextlib.suppress(Enough):
            train(self.recipe, self.data, folder / "seed", save_every=0, progress=progress)
        self.files = {path.name: path.read_bytes() for path in sorted((folder / "seed").iterdir())}
        self.whole = self._packed(self.files)

    def _packed(self, files: dict[str, bytes]) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return out.getvalue()

    def broken(self, rng: Rng) -> tuple[bytes, bool]:
        files = dict(self.files)
        name = pick(rng, list(files))
        match int(rng.integers(0, 6)):
            case 0:
                files.pop(name)
            case 1:
                files[name] = damaged(files[name], rng)
            case 2:
                files["run.json"] = json.dumps(changed(json.loads(files["run.json"]), rng)).encode()
            case 3:
                files[".tmp" + "Ab3dE9"] = files[".state.safetensors.0a1b2c3d.partial"] = b"half"
            case _:
                files["state.safetensors"], _ = broken_tensors(files["state.safetensors"], rng, STATE)
        return self._packed(files), True

    def use(self, path: Path) -> str:
        import shutil

        folder = path.with_name("run")
        shutil.rmtree(folder, ignore_errors=True)
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder)
        before = {file.name: file.read_bytes() for file in folder.iterdir()}

        def progress(more: int) -> None:
            raise Enough

        try:
            train(self.recipe, self.data, folder, resume=True, save_every=1e6, progress=progress)
        except Enough:
            assert not [file.name for file in folder.iterdir() if file.name.startswith(".")]
            return "went on"
        except AnybitError:
            assert {file.name: file.read_bytes() for file in folder.iterdir()} == before, "refused, and changed"
            raise
        return "was finished"
