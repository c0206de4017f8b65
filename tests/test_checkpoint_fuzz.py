"""Thousands of broken checkpoints, states and PyTorch files, in a process of their own with little memory."""

from __future__ import annotations

import contextlib
import io
import json
import resource
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from test_resume import TINY, Killed, after, digits, kill

from anybit.errors import AnybitError
from anybit.models import build_model
from anybit.objectives.gradient import GradientPenalty
from anybit.train.checkpoint import FORMAT, digest_of, load_model, load_weights, save_checkpoint
from anybit.train.loop import make_optimizer, make_penalty, train
from anybit.train.place import Place
from anybit.train.recipe import Recipe
from anybit.train.resume import FORMAT as STATE
from anybit.train.resume import Keeper, Moving, Stop, read_state
from anybit.train.run import RunFolder

Rng = np.random.Generator
SHAPE = {"name": "small-conv", "channels": 1, "classes": 10, "multiplier": 0.25}
RECIPE = TINY.changed({"optimizer.name": "adam"})
MEMORY = 768 * 2**20
"""What reading any of these small files may add to the address space, in bytes."""

VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**62, 2**63, 10**30, 1e300, -0.5, "", "x" * 70_000, "nan", [], [[]], {}, {"": {}},
    [1, 2], ["a"], [0.0, -1.0], {"epoch": 10**9},
]  # fmt: skip


def damaged(data: bytes, rng: Rng) -> bytes:
    """Change a few bytes: flip bits, write others, cut out, put in, cut off the end, most often near the front."""
    out = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        if not out:
            break
        reach = len(out) if rng.random() < 0.5 else min(len(out), 4000)
        at, length = int(rng.integers(0, reach)), int(rng.integers(1, 9))
        match int(rng.integers(0, 6)):
            case 0 | 1:
                out[at] ^= 1 << int(rng.integers(0, 8))
            case 2:
                out[at : at + length] = rng.bytes(length)
            case 3:
                del out[at : at + length]
            case 4:
                out[at:at] = rng.bytes(length)
            case _:
                del out[max(1, at) :]
    return bytes(out)


def parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def joined(header: Any, body: bytes, *, size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + body


def lying(data: bytes, rng: Rng) -> bytes:
    """Change what the header says about a tensor, the length of the header, or the header as a whole."""
    header, body = parts(data)
    names = [name for name in header if name != "__metadata__"]
    name = names[int(rng.integers(0, len(names)))]
    entry = header[name]
    match int(rng.integers(0, 8)):
        case 0:
            entry["shape"] = [[2**40], [2**63, 2], [], [0], [-1], [1] * 100, entry["shape"] * 2][
                int(rng.integers(0, 7))
            ]
        case 1:
            dtypes = ["F64", "F16", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "F4", "C64", "E8M0", "X9", ""]
            entry["dtype"] = dtypes[int(rng.integers(0, len(dtypes)))]
        case 2:
            entry["data_offsets"] = [[0, 2**62], [5, 1], [-4, 4], [2**64, 2**64 + 8], [0]][int(rng.integers(0, 5))]
        case 3:
            entry[["shape", "dtype", "data_offsets"][int(rng.integers(0, 3))]] = VALUES[
                int(rng.integers(0, len(VALUES)))
            ]
        case 4:
            header[name + "!"] = header.pop(name)
        case 5:
            return joined(header, body, size=[0, 1, 10**6, 2**31, 2**63, 2**64 - 1][int(rng.integers(0, 6))])
        case 6:
            return joined(
                [b"{}", b"[" * 90_000, b'{"a":' * 5000, b"\xff\xfe", b'{"__metadata__":{}}'][int(rng.integers(0, 5))],
                body,
            )
        case _:
            del header[name]
    return joined(header, body)


def changed(value: Any, rng: Rng) -> Any:
    """Replace something deep in a JSON value."""
    if isinstance(value, dict | list) and value and rng.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = keys[int(rng.integers(0, len(keys)))]
        if rng.random() < 0.1:
            del value[key]
        else:
            value[key] = changed(value[key], rng)
        return value
    return VALUES[int(rng.integers(0, len(VALUES)))]


def sealed(data: bytes, rng: Rng, kind: str) -> bytes:
    """Change values and seal the file again, as somebody with bad intentions would."""
    tensors = safetensors.torch.load(data)
    about = json.loads(parts(data)[0]["__metadata__"]["about"])
    name = list(tensors)[int(rng.integers(0, len(tensors)))]
    match int(rng.integers(0, 6)):
        case 0:
            tensors[name] = tensors[name].reshape(-1)[: max(1, tensors[name].numel() // 2)].clone()
        case 1:
            tensors[name] = tensors[name].to([torch.float64, torch.int32, torch.bfloat16][int(rng.integers(0, 3))])
        case 2:
            tensors[name] = torch.full_like(tensors[name], float("nan") if tensors[name].is_floating_point() else 255)
        case 3:
            tensors.pop(name)
        case _:
            about = changed(about, rng)
    text = json.dumps(about)
    metadata = {"format": kind, "about": text, "digest": digest_of(tensors, text)}
    return safetensors.torch.save(tensors, metadata=metadata)


def pickled(data: bytes, rng: Rng) -> bytes:
    """Change the pickle inside a PyTorch file and pack it again, so that every checksum fits."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for entry in old.infolist():
            content = old.read(entry)
            hit = entry.filename.endswith("data.pkl") or rng.random() < 0.05
            new.writestr(entry.filename, damaged(content, rng) if hit else content)
    return out.getvalue()


def fresh() -> torch.nn.Module:
    return build_model("small-conv", channels=1, classes=10, multiplier=0.25)


class Files:
    """Whole files to break, and what a user would do with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        torch.manual_seed(0)
        self.model = fresh()
        self.whole = {"checkpoint": folder / "model.safetensors", "state": folder / "run" / "state.safetensors"}
        self.whole["pickled"] = folder / "model.pt"
        save_checkpoint(self.whole["checkpoint"], self.model, {"model": SHAPE, "seed": 3})
        torch.save(self.model.state_dict(), self.whole["pickled"])
        with contextlib.suppress(Killed):
            train(RECIPE, digits(), folder / "run", save_every=0, progress=after(3, kill))
        metadata = parts(self.whole["state"].read_bytes())[0]["__metadata__"]
        self.identity = json.loads(metadata["about"])["identity"]

    def use(self, kind: str) -> str:
        """Return a checksum of what was loaded."""
        if kind == "checkpoint":
            return digest_of(load_model(self.whole[kind])[0].state_dict())
        if kind == "pickled":
            model = fresh()
            load_weights(self.whole[kind], model)
            return digest_of(model.state_dict())
        return self.resume(RECIPE)

    def resume(self, recipe: Recipe) -> str:
        saved = read_state(self.whole["state"], lambda: self.identity)
        assert saved is not None
        model, generator = fresh(), torch.Generator()
        penalties = (make_penalty(recipe.penalty, model), GradientPenalty(model))
        moving = Moving(model, make_optimizer(recipe.optimizer, model), penalties, generator, generator.get_state())
        run = RunFolder(self.folder / "run", recipe)
        stop, every = Stop(), 60.0
        keeper = Keeper(run, dict, place=Place(), every=every, saved=saved, stop=stop, say=print)
        keeper.start(moving, recipe, 4)
        return digest_of(moving.module.state_dict())


def mutations(kind: str, data: bytes, count: int) -> Iterator[tuple[bytes, bool]]:
    """Yield broken files, and whether one may load as something else because it was sealed again."""
    rng = np.random.default_rng(0)
    seal: Callable[[bytes, Rng], bytes] = pickled
    if kind != "pickled":
        seal = lambda data, rng: sealed(data, rng, FORMAT if kind == "checkpoint" else STATE)  # noqa: E731
    for number in range(count):
        match number % 4:
            case 0:
                yield damaged(data, rng), False
            case 1 if kind != "pickled":
                yield lying(data, rng), False
            case 2:
                yield data[: int(rng.integers(0, len(data)))], False
            case _:
                yield seal(data, rng), True


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, resource.RLIM_INFINITY))


def main(folder: str, kind: str, count: str) -> None:
    files = Files(Path(folder))
    path = files.whole[kind]
    data = path.read_bytes()
    want = files.use(kind)  # and everything is imported
    limit_memory()
    found = {"refused": 0, "harmless": 0, "other": 0}
    for number, (broken, may_differ) in enumerate(mutations(kind, data, int(count))):
        path.write_bytes(broken)
        try:
            got = files.use(kind)
        except AnybitError as error:
            message = str(error)
            assert message.startswith(f"{path}: "), (number, message[:500])
            assert len(message) < 900 + len(str(path)), (number, len(message))
            assert len(message.splitlines()) == 1, (number, message)
            found["refused"] += 1
            continue
        except BaseException:
            print(f"number {number}", file=sys.stderr)
            raise
        assert got == want or may_differ, number
        found["harmless" if got == want else "other"] += 1
    print(json.dumps(found))


@pytest.mark.parametrize(("kind", "count"), [("checkpoint", 1200), ("state", 1200), ("pickled", 600)])
def test_broken_files_are_refused_or_load_what_was_saved(kind: str, count: int, tmp_path: Path) -> None:
    tests = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {tests!r}); import test_checkpoint_fuzz as fuzz; fuzz.main(*sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), kind, str(count)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert sum(found.values()) == count
    assert found["refused"] > count * 0.6
    assert found["harmless"] > 0  # a key of the header that nobody asks for, a byte between two records
