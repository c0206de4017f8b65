"""The networks known by name: shapes, sizes known from elsewhere, and names that pretrained weights have."""

import pytest
import torch
from torch import nn

from anybit.errors import SpecError
from anybit.models import MODELS, build_model
from anybit.models.mobilenet import round_to_eight
from anybit.objectives.quantizable import quantizable_weights

PARAMETERS = {
    ("vgg-like", 10): 12_979_082,
    ("resnet18-cifar", 10): 11_173_962,
    ("resnet18", 1000): 11_689_512,
    ("resnet50", 1000): 25_557_032,
    ("mobilenetv2", 1000): 3_504_872,
    ("mobilenetv2-cifar", 10): 2_236_682,
}

TORCHVISION = {
    "resnet18": (
        122,
        {
            "conv1.weight": (64, 3, 7, 7),
            "bn1.running_var": (64,),
            "bn1.num_batches_tracked": (),
            "layer1.0.conv1.weight": (64, 64, 3, 3),
            "layer1.0.bn1.weight": (64,),
            "layer1.1.bn2.running_mean": (64,),
            "layer2.0.conv1.weight": (128, 64, 3, 3),
            "layer2.0.downsample.0.weight": (128, 64, 1, 1),
            "layer2.0.downsample.1.bias": (128,),
            "layer4.1.conv2.weight": (512, 512, 3, 3),
            "fc.weight": (1000, 512),
            "fc.bias": (1000,),
        },
    ),
    "resnet50": (
        320,
        {
            "layer1.0.conv1.weight": (64, 64, 1, 1),
            "layer1.0.conv3.weight": (256, 64, 1, 1),
            "layer1.0.bn3.num_batches_tracked": (),
            "layer1.0.downsample.0.weight": (256, 64, 1, 1),
            "layer2.0.conv1.weight": (128, 256, 1, 1),
            "layer2.0.conv2.weight": (128, 128, 3, 3),
            "layer3.5.conv3.weight": (1024, 256, 1, 1),
            "layer4.0.downsample.1.running_mean": (2048,),
            "layer4.2.bn3.bias": (2048,),
            "fc.weight": (1000, 2048),
        },
    ),
    "mobilenetv2": (
        314,
        {
            "features.0.0.weight": (32, 3, 3, 3),
            "features.0.1.running_mean": (32,),
            "features.1.conv.0.0.weight": (32, 1, 3, 3),
            "features.1.conv.1.weight": (16, 32, 1, 1),
            "features.1.conv.2.num_batches_tracked": (),
            "features.2.conv.0.0.weight": (96, 16, 1, 1),
            "features.2.conv.1.0.weight": (96, 1, 3, 3),
            "features.2.conv.2.weight": (24, 96, 1, 1),
            "features.2.conv.3.bias": (24,),
            "features.17.conv.2.weight": (320, 960, 1, 1),
            "features.18.0.weight": (1280, 320, 1, 1),
            "classifier.1.weight": (1000, 1280),
        },
    ),
}
"""By name: how many entries torchvision's state dict has, and some of them. Written down, not computed."""


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_narrow_network_maps_images_to_logits(name: str, batch: int) -> None:
    torch.manual_seed(0)
    model = build_model(name, channels=3, classes=7, multiplier=0.125).eval()
    with torch.no_grad():
        out = model(torch.randn(batch, 3, 32, 32))
    assert out.shape == (batch, 7)
    assert out.isfinite().all()


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_learns(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(name, channels=1, classes=4, multiplier=0.125)
    side = 32 if name == "vgg-like" else 64
    model(torch.randn(4, 1, side, side)).square().sum().backward()
    idle = [key for key, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert idle == []


@pytest.mark.parametrize(("name", "classes"), PARAMETERS)
def test_parameter_counts_are_those_known(name: str, classes: int) -> None:
    with torch.device("meta"):
        model = build_model(name, channels=3, classes=classes, multiplier=1.0)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name, classes]


@pytest.mark.parametrize("name", TORCHVISION)
def test_pretrained_weights_find_their_names(name: str) -> None:
    with torch.device("meta"):
        state = build_model(name, channels=3, classes=1000, multiplier=1.0).state_dict()
    count, some = TORCHVISION[name]
    assert len(state) == count
    assert {key: tuple(state[key].shape) for key in some} == some


@pytest.mark.parametrize(
    ("name", "body", "side", "size"),
    [
        ("resnet18", "layer4", 64, 2),
        ("resnet18-cifar", "layer4", 32, 4),
        ("resnet50", "layer4", 64, 2),
        ("mobilenetv2", "features", 64, 2),
        ("mobilenetv2-cifar", "features", 32, 4),
        ("vgg-like", "features", 32, 4),
    ],
)
def test_the_last_feature_map_has_the_size_the_strides_give(name: str, body: str, side: int, size: int) -> None:
    model = build_model(name, channels=3, classes=2, multiplier=0.125).eval()
    seen: list[torch.Size] = []
    model.get_submodule(body).register_forward_hook(lambda module, args, out: seen.append(out.shape[2:]))
    with torch.no_grad():
        model(torch.zeros(1, 3, side, side))
    assert seen == [(size, size)]


def test_mobilenet_rounds_channels_as_its_pretrained_weights_do() -> None:
    # The published widths 0.35, 0.75 and 1.4 of the stem, of a stage, and of the head.
    assert [round_to_eight(c) for c in (32 * 0.35, 24 * 0.75, 96 * 0.35, 1280 * 1.4)] == [16, 24, 32, 1792]
    with torch.device("meta"):
        narrow = build_model("mobilenetv2", channels=3, classes=10, multiplier=0.5)
    assert narrow.get_parameter("classifier.1.weight").shape == (10, 1280)


def test_a_vgg_has_no_bias_in_front_of_batch_norm() -> None:
    model = build_model("vgg-like", channels=3, classes=10, multiplier=0.125)
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert [layer.bias is None for layer in layers] == [True] * 7 + [False]
    assert [layer.weight.shape[0] for layer in layers] == [16, 16, 32, 32, 64, 64, 128, 10]


def test_the_positions_of_a_transformer_are_no_weights_to_quantize() -> None:
    model = nn.ModuleDict({"positions": nn.Embedding(64, 24), "qkv": nn.Linear(24, 72)})
    assert list(quantizable_weights(model)) == ["qkv.weight"]


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(SpecError, match=r"no model 'resnet-18'.*did you mean 'resnet18'\?"):
        build_model("resnet-18", channels=3, classes=10, multiplier=1.0)
