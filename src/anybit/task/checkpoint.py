"""Weights on disk: safetensors with a small header that says which network they are for. No pickle.

The header carries a checksum over every byte, so that a flipped bit is an error and not another network.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anybit.common.files import replacing
from anybit.common.text import explaining, first_line, printable
from anybit.data.base import bytes_of
from anybit.errors import CheckpointError, MissingDependency, SpecError
from anybit.models import build_model

FORMAT = "anybit-checkpoint/1"
KEYS = frozenset({"format", "about", "digest"})
TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""What safetensors calls the types of numbers that a network has."""


def digest_of(tensors: Mapping[str, Tensor], about: str = "") -> str:
    """Return a checksum over a text and over the names, types, shapes and bytes of tensors, in whatever order.

    >>> a, b = torch.zeros(2), torch.ones(2)
    >>> digest_of({"a": a, "b": b}) == digest_of({"b": b, "a": a})
    True
    >>> digest_of({"a": a}) == digest_of({"a": -a})
    False
    """
    total = hashlib.blake2b(about.encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        total.update(bytes_of(tensor))
    return total.hexdigest()


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], about: dict[str, Any], *, kind: str) -> None:
    """Write tensors and what is known about them as a safetensors file, at once, with a checksum.

    The library's own writer makes a temporary file that outlives a killed process and that only its owner may read.
    """
    text = json.dumps(about, allow_nan=False)
    entries: dict[str, Any] = {"__metadata__": {"format": kind, "about": text, "digest": digest_of(tensors, text)}}
    end = 0
    # The widest numbers first, so that each lies at a multiple of its own size.
    ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    for name in ordered:
        if tensors[name].dtype not in TYPES:
            raise CheckpointError(f"{path}: not written, {name} has numbers of type {tensors[name].dtype}")
        start, end = end, end + tensors[name].numel() * tensors[name].element_size()
        number, shape = TYPES[tensors[name].dtype], list(tensors[name].shape)
        entries[name] = {"dtype": number, "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with replacing(path) as beside, beside.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for name in ordered:
            file.write(bytes_of(tensors[name]))


def read_tensors(
    path: str | Path, *, kind: str, what: str, foreign: bool = False
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a file and what its header says; nothing is executed while reading.

    With `foreign` it may be a file of another program, whose header says nothing that counts here.
    """
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise MissingDependency("safetensors", "torch", "a checkpoint") from error
    path = Path(path)
    _check_file(path, what)
    broken = f"{path}: not a whole safetensors file", "; train again or copy it again"
    with explaining(CheckpointError, *broken, first_line), safe_open(str(path), framework="pt") as file:
        header = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if foreign and header.get("format") != kind and "about" not in header:
        return tensors, {}
    if header.get("format") != kind:
        found = printable(header.get("format", "no format at all"), 40)
        raise CheckpointError(f"{path}: the header says {found!r}, this version reads {kind!r}")
    return tensors, _about(path, header, tensors)


def _about(path: Path, header: dict[str, str], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return what the header says, if it and the tensors are what was written."""
    with explaining(CheckpointError, f"{path}: the header cannot be read", "; save it again", first_line):
        about = json.loads(header["about"])
    if not isinstance(about, dict):
        raise CheckpointError(f"{path}: the header cannot be read (no table in it); save it again")
    if unknown := sorted(header.keys() - KEYS):
        raise CheckpointError(f"{path}: the header cannot be read (unknown key {unknown[0][:40]!r}); save it again")
    # Files of earlier versions have no checksum.
    if "digest" in header and header["digest"] != digest_of(tensors, header["about"]):
        raise CheckpointError(f"{path}: damaged, the checksum does not fit the contents; train again or copy it again")
    return about


def _check_file(path: Path, what: str) -> None:
    if path.is_dir():
        raise CheckpointError(f"{path}: is a folder; {what} is expected here")
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; {what} is expected here")


def save_checkpoint(path: str | Path, model: nn.Module, about: dict[str, Any]) -> None:
    """Write the weights and buffers of `model`, and `about`: what `load_model` needs, and whatever else is known."""
    state = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    write_tensors(path, state, about, kind=FORMAT)


def read_checkpoint(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a checkpoint and what its header says; nothing is executed while reading."""
    return read_tensors(path, kind=FORMAT, what="a checkpoint (.safetensors)")


def read_pickled(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a state dict that `torch.save` wrote; whatever else is in such a file is refused."""
    path = Path(path)
    _check_file(path, "a state dict of PyTorch")
    advice = "; save model.state_dict() again with torch.save, or as safetensors"
    whole = explaining(CheckpointError, f"{path}: not a whole file of torch.save", advice, first_line)
    with whole, zipfile.ZipFile(path) as archive:
        # PyTorch packs nothing; a file that does may be a few bytes that unfold to fill the memory.
        packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist())
        broken = None if packed else archive.testzip()
    if packed or broken is not None:
        what = "is compressed" if packed else f"is damaged at {printable(broken or '', 60)}"
        raise CheckpointError(f"{path}: {what}{advice}")
    with explaining(CheckpointError, f"{path}: more than tensors in it, or damaged", advice, _unpickled):
        # Mapped into memory, so that no tensor can claim more bytes than the file has.
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    for key in NESTED:
        if isinstance(values, dict) and isinstance(values.get(key), dict):
            values = values[key]
    if not isinstance(values, dict) or not all(isinstance(k, str) and _plain(v) for k, v in values.items()):
        raise CheckpointError(f"{path}: more than names and tensors in it{advice}")
    return dict(values)


def _unpickled(error: BaseException, length: int) -> str:
    """Return what a file holds that is no tensor, without PyTorch's advice to read it all the same."""
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    return f"it holds {found[1][:length]}" if found else first_line(error, length)


def _plain(value: object) -> bool:
    if not isinstance(value, Tensor):
        return False
    return value.layout == torch.strided and value.device.type == "cpu" and not value.is_quantized


def check_room(shape: Mapping[str, Any]) -> None:
    """Refuse to build a network that training would not find room for; nothing is allocated to find out.

    Weights, gradients and the optimizer's moments take 16 bytes for each parameter, in 32 bits.
    """
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in build_model(**shape).parameters())
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 16 * count > room:
        raise SpecError(
            f"{shape['name']} at multiplier {shape['multiplier']:g} has {count:,} parameters, and training takes 16 "
            f"bytes for each; this machine has {room / 2**30:.0f} GB: choose a smaller multiplier"
        )


PICKLED = (".pt", ".pth", ".ckpt", ".bin")
"""What `torch.save` is usually told to write."""

PREFIXES = ("module.", "_orig_mod.", "model.", "net.")
"""What training programs put in front of every name."""

NESTED = ("state_dict", "model_state_dict", "model")
"""Where training programs keep the weights in a larger file."""


def read_weights(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors in a file, and what its header says if anybit wrote it.

    A checkpoint of anybit or any other safetensors file, a run folder, or a state dict that `torch.save` wrote. Nothing
    is executed while reading.
    """
    path = Path(path)
    path = path / "model.safetensors" if path.is_dir() and (path / "model.safetensors").is_file() else path
    if path.suffix in PICKLED or _starts(path, b"PK"):
        return read_pickled(path), {}
    return read_tensors(path, kind=FORMAT, what="a checkpoint (.safetensors)", foreign=True)


def _starts(path: Path, mark: bytes) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(mark)) == mark


def fill(model: nn.Module, tensors: dict[str, Tensor], path: str | Path) -> None:
    """Put tensors into a model; on any mismatch it stays as it is.

    What programs put in front of all names is taken off, numbers are brought to the model's own type, and counters that
    evaluation does not look at may be missing.
    """
    own = model.state_dict()
    tensors = named_like(tensors, own)
    tensors = {k: v.to(own[k].dtype) if k in own and v.is_floating_point() else v for k, v in tensors.items()}
    counters = {k: v for k, v in own.items() if k.endswith("num_batches_tracked") and k not in tensors}
    check_fit(path, {**counters, **tensors}, own, advice="take the network that these weights are of")
    model.load_state_dict({**counters, **tensors})


def named_like(tensors: dict[str, Tensor], own: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return tensors without what stands in front of all their names and of none of `own`.

    >>> list(named_like({"module.fc.weight": torch.zeros(1)}, {"fc.weight": 0}))
    ['fc.weight']
    """
    found = True
    while found and not own.keys() & tensors.keys():
        found = False
        for prefix in PREFIXES:
            if tensors and all(name.startswith(prefix) for name in tensors):
                tensors, found = {name[len(prefix) :]: value for name, value in tensors.items()}, True
    return tensors


def load_weights(path: str | Path, model: nn.Module) -> dict[str, Any]:
    """Fill `model` from a file and return what its header says; on any mismatch `model` stays as it is."""
    tensors, about = read_weights(path)
    fill(model, tensors, path)
    return about


def load_model(path: str | Path) -> tuple[nn.Module, dict[str, Any]]:
    """Build the network that a checkpoint says it is for, fill it, and return it with the header."""
    tensors, about = read_checkpoint(path)
    return model_of(path, tensors, about)[0], about


def model_of(
    path: str | Path, tensors: dict[str, Tensor], about: Mapping[str, Any]
) -> tuple[nn.Module, dict[str, Any]]:
    """Build the network that a header says it is for, fill it, and return it with its sizes."""
    try:
        known = {"multiplier": about["model"].get("width"), **about["model"]}  # its name before version 0.2
        shape = {key: known[key] for key in ("name", "channels", "classes", "multiplier")}
        with torch.device("meta"):  # shapes without memory: the header may ask for any size
            outline = build_model(**shape)
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise CheckpointError(
            f"{path}: the header does not say which model it is for ({reason}); train it again"
        ) from error
    check_fit(path, tensors, outline.state_dict())
    model = build_model(**shape)
    model.load_state_dict(tensors)
    return model, shape


def check_fit(
    path: str | Path,
    tensors: dict[str, Tensor],
    own: dict[str, Tensor],
    *,
    advice: str = "use a checkpoint of the same model and multiplier",
) -> None:
    """Refuse tensors whose names, shapes or types are not those of `own`, or that are not finite."""
    problems = [f"lacks {name}" for name in own if name not in tensors]
    problems += [f"has {printable(name, 80)}, which the model lacks" for name in tensors if name not in own]
    for name, value, wanted in ((name, tensors[name], own[name]) for name in own if name in tensors):
        if value.shape != wanted.shape:
            problems.append(f"{name} is {tuple(value.shape)}, the model has {tuple(wanted.shape)}")
        elif value.dtype != wanted.dtype:
            problems.append(f"{name} is {value.dtype}, the model has {wanted.dtype}")
        elif value.is_floating_point() and not bool(torch.isfinite(value).all()):
            problems.append(f"{name} has infinite or NaN entries")
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise CheckpointError(f"{path}: {'; '.join(problem[:200] for problem in problems[:3])}{more}; {advice}")
