"""The task as a value, and the one way from it to a network that runs at any width."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from anybit.artifact.feeding import Preprocessing
from anybit.common.named import by_name, is_code
from anybit.common.text import did_you_mean, first_line
from anybit.data import Batches, Dataset, Given, load_dataset
from anybit.errors import CheckpointError, DataError, SpecError
from anybit.evaluate.batches import Takes
from anybit.evaluate.metric import Function, Metric, metric_of
from anybit.models import MODELS
from anybit.simulate.network import QuantizedNetwork
from anybit.simulate.prepare import prepare
from anybit.task.checkpoint import fill, model_of, read_weights
from anybit.task.networks import WORDS, feeding_of, in_package, make_network

BATCH = 128
CALIBRATION = 1024
"""Examples that are looked at for ranges, of data that has more."""


@dataclass(frozen=True)
class Task:
    """A network with its weights, its data, what it is judged by, and how pictures are fed to it."""

    name: str
    model: nn.Module
    data: Dataset
    metric: Metric | None = None
    preprocessing: Preprocessing | None = None
    weights: Path | None = None
    about: dict[str, Any] = field(default_factory=dict)
    """What the header of the checkpoint says, or what one would have to say."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def seed(self) -> int:
        """The seed that the network was trained with."""
        seed = self.about.get("seed", 0)
        if not isinstance(seed, int):
            raise CheckpointError(f"{self.weights}: the header has a seed that is no whole number: {seed!r}")
        return seed

    def test(self, what: str) -> Iterable[Any]:
        """Return the test batches, in their order."""
        return in_order(self.data.need("test", what))

    def network(self, *, calibrate: str | None = None, **settings: Any) -> QuantizedNetwork:
        """Return the network with its width switch, on the device of the task.

        Args:
            calibrate: Set ranges by data: a number of training examples, or the name of other data.
            settings: Of `anybit.prepare`.
        """
        loader = None if calibrate is None else self.calibration(calibrate)
        return prepared(self.model, self.data, calibration=loader, **settings).to(self.device)

    def calibration(self, word: str) -> Iterable[Any]:
        """Return the inputs that `--calibrate` names."""
        if word.isdecimal():
            part, count = self.data.need("train", "--calibrate with a number"), int(word)
        else:
            data = load_dataset(word, code=True, how=self.preprocessing)
            part, count = data.train if data.train is not None else data.need("test", "--calibrate"), CALIBRATION
        if count < 1:
            raise SpecError(f"--calibrate takes one training example or more, got {word}")
        mixed = part.loader if isinstance(part, Given) else Batches(part, BATCH, generator=torch.Generator())
        return Inputs(mixed, Takes.of(self.model), count)


@dataclass(frozen=True)
class Inputs:
    """The batches of a loader without their targets, as `anybit.prepare` takes them for calibration."""

    loader: Iterable[Any]
    takes: Takes
    count: int
    """Of the examples that will do."""

    def __iter__(self) -> Iterator[Any]:
        left = self.count
        for batch in map(self.takes.split, self.loader):
            if left <= 0:
                return
            yield pytree.tree_map_only(Tensor, functools.partial(_first, left), batch.inputs), None
            left -= len(batch)


def _first(count: int, tensor: Tensor) -> Tensor:
    return tensor[:count] if tensor.dim() else tensor


def in_order(part: Any, batch: int = BATCH) -> Iterable[Any]:
    """Return the batches of a part of a data set, in its own order."""
    return part.loader if isinstance(part, Given) else Batches(part.channels_last(), batch)


def example_of(model: nn.Module, data: Dataset, device: torch.device | None = None) -> Any:
    """Return what a model is called with: two examples of a data set."""
    inputs = Takes.of(model).split(data.example).inputs
    return pytree.tree_map_only(Tensor, lambda t: _first(2, t).to(device), inputs)


def prepared(
    model: nn.Module, data: Dataset, *, calibration: Iterable[Any] | None = None, **settings: Any
) -> QuantizedNetwork:
    """Return a model with its width switch, for inputs like those of a data set."""
    example = example_of(model, data)
    return prepare(model, example, input_range=data.input_range, calibration=calibration, **settings)


def pick_device(name: str | None) -> torch.device:
    """Return a device by its name; without one, the graphics card if there is one."""
    if name is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error, 120)
        raise SpecError(f"no device {name[:40]!r} here ({reason}); use cpu, or cuda where there is a card") from error
    return device


def pick_metric(word: str | Metric | Function | None) -> Metric | None:
    """Return a metric by its name, or by the name of a function of the user's."""
    return None if word is None else metric_of(by_name(word) if isinstance(word, str) and is_code(word) else word)


def load_task(
    model: str,
    *,
    weights: str | Path | None = None,
    data: str | None = None,
    metric: str | None = None,
    size: int | None = None,
    shape: Sequence[int] = (),
    device: str | None = None,
    what: str = "this",
) -> Task:
    """Return the task that some words name.

    Args:
        model: A checkpoint of anybit or the run folder it is in, code such as `my_model.py:make`, a name of ours, or
            `torchvision/NAME`, `timm/NAME`, `huggingface/NAME`.
        weights: A state dict: safetensors, or of `torch.save`.
        data: The name of a data set, a folder, an .npz file, or code that returns loaders. A checkpoint names its own.
        metric: A name, or code that returns a metric.
        size: The side that the images in a folder are brought to.
        shape: Of one input, where there is no data.
        device: Where to run; the graphics card if there is one.
        what: Who asks, for errors.
    """
    place, judged = pick_device(device), pick_metric(metric)
    word, path, about, tensors = _words(model, weights)
    feeding = Preprocessing.of(about, where=str(path)) if "input" in about else None
    if data is None and not about.get("data") and not shape:
        more = "; or the shape of one input: --input 3x224x224" * (what == "anybit save")
        raise DataError(f"{what} needs data: say --data digits, a folder, an .npz, or my_data.py:loaders{more}")
    if word in MODELS and "model" in about:
        assert path is not None
        assert tensors is not None
        network, made = model_of(path, tensors, about)
    else:
        network, made = make_network(word, tensors=tensors)
    feeding = feeding or feeding_of(word, network)
    if data is None and shape:
        found = Dataset("no data", None, None, None, sample=torch.zeros(2, *shape))
    else:
        found = load_dataset(data or str(about["data"]), code=data is not None, how=feeding, size=size)
    if tensors is not None:
        fill(network, tensors, path or model)
    _check_fit(made, found, data or found.name, path or model)
    name = path.resolve().parent.name if path and path.name == "model.safetensors" else Path(word).name
    about = {**about, "model": made}
    return Task(name, network.eval(), found, judged, found.preprocessing or feeding, path, about, place)


def _words(model: str, weights: str | Path | None) -> tuple[str, Path | None, dict[str, Any], dict[str, Tensor] | None]:
    """Return which network it is, and where its weights are, with what they say and hold."""
    if is_code(model) or model in MODELS or in_package(model):
        if weights is None:
            return model, None, {}, None
        tensors, about = read_weights(weights)
        return model, _file(Path(weights)), about, tensors
    path = Path(model)
    if weights is not None:
        raise SpecError(f"{model} is no network; with --weights say which one: {', '.join(MODELS)}, {WORDS}")
    if not path.exists():
        hint = did_you_mean(model, MODELS)
        raise CheckpointError(f"{path}: no such file; say a run, a checkpoint, {', '.join(MODELS)}, {WORDS}{hint}")
    tensors, about = read_weights(path)
    shape = about.get("model")
    word = (shape.get("name") or shape.get("factory")) if isinstance(shape, dict) else None
    if not isinstance(word, str) or is_code(word):
        said = f"{word} --weights {model}" if word else f"my_model.py:make --weights {model}"
        reason = f"is of {word}, and a file may not start code" if word else "holds weights and no network"
        raise CheckpointError(f"{path}: {reason}; say {said}")
    return word, _file(path), about, tensors


def _file(path: Path) -> Path:
    return path / "model.safetensors" if path.is_dir() else path


def _check_fit(shape: dict[str, Any], data: Dataset, name: str, where: object) -> None:
    """Refuse data that a network of ours is not for, before anything is measured."""
    if "channels" not in shape:
        return
    channels, classes = shape["channels"], shape["classes"]
    if len(data.shape) != 3 or data.shape[0] != channels or len(data.classes) > classes:
        raise DataError(
            f"{name}: inputs of shape {data.shape} in {len(data.classes)} classes; "
            f"{where} is for images of {channels} channels in {classes} classes"
        )


def without_paths(value: Any) -> Any:
    """Return values without the folders that files had on this machine.

    >>> without_paths({"data": "/home/me/flowers", "epochs": 3})
    {'data': 'flowers', 'epochs': 3}
    """
    if isinstance(value, dict):
        return {key: without_paths(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(inner) for inner in value]
    if isinstance(value, str) and not in_package(value):
        return value.replace("\\", "/").rstrip("/").rpartition("/")[2] or value
    return value
