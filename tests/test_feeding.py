"""One preprocessing for measuring and for running: what it does to pictures, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anybit.artifact.feeding import GREY, PRESETS, Preprocessing
from anybit.artifact.inputs import Input, read_feeds
from anybit.artifact.pictures import decode, read_picture
from anybit.errors import DataError, SpecError

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return a smooth picture, in which a shift by a pixel shows."""
    small = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def read_one(path: Path, shape: tuple[int, ...], **how: Any) -> Any:
    """Return the one example in a file as a float input of this shape, without its batch dimension, takes it."""
    ((_, feed),) = read_feeds([str(path)], [Input("x", np.dtype(np.float32), (0, *shape))], Preprocessing(**how))
    return feed["x"]


def naive(how: Preprocessing, pixels: np.ndarray) -> np.ndarray:
    """Say the same step by step, in float64."""
    values = pixels.astype(np.float64)
    values = {"0-1": values / 255, "0-255": values, "-1-1": values / 127.5 - 1}[how.scale]
    if how.channels == "bgr":
        values = np.stack([values[..., 2], values[..., 1], values[..., 0]], -1)
    values = (values - np.array(how.mean)) / np.array(how.std)
    return values[None] if how.layout == "nhwc" else values.transpose(2, 0, 1)[None]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_every_preset_says_what_it_does(name: str, layout: str) -> None:
    shape = (0, 3, 0, 0) if layout == "nchw" else (0, 0, 0, 3)
    how = replace(PRESETS[name], size=(24, 40), layout=layout).settled(shape)
    picture = photo(100, 70)
    found = how(picture)
    assert found.dtype == np.float32
    assert found.shape == ((1, 3, 24, 40) if layout == "nchw" else (1, 24, 40, 3))
    assert np.allclose(found, naive(how, np.asarray(how.fit(picture))), atol=1e-4 if how.scale == "0-255" else 1e-6)
    low, high = how.interval
    assert low <= found.min()
    assert found.max() <= high
    back = how.pixels(found[0])
    assert np.array_equal(back, np.asarray(how.fit(picture)))


def test_an_image_folder_is_measured_as_it_is_run(tmp_path: Path) -> None:
    """What `anybit.data` measures a folder with is what `run` and `serve` feed."""
    folder = pytest.importorskip("anybit.data.folder")
    sizes = {"a": (90, 60), "b": (64, 200), "c": (33, 35)}
    for part in ("train", "val"):
        for label in ("cat", "dog"):
            (tmp_path / part / label).mkdir(parents=True)
            for name, (width, height) in sizes.items():
                photo(width, height, seed=len(label) + width).save(tmp_path / part / label / f"{name}.png")
    test = folder.load_folder(tmp_path, resize=36, size=32).test
    how = replace(PRESETS["imagenet"], shorter=36, size=(32, 32)).settled((0, 3, 32, 32))
    for i, name in enumerate(test.x.names):
        assert np.array_equal(test.x[i : i + 1].numpy(), how(read_picture(tmp_path / name))), name


def test_a_crop_is_the_middle_of_the_resized_picture() -> None:
    picture = photo(300, 200)
    how = Preprocessing(size=(50, 60), resize="crop", shorter=100, channels="rgb")
    whole = np.asarray(picture.resize((150, 100), Image.Resampling.BILINEAR)).astype(int)
    found = np.asarray(how.fit(picture)).astype(int)
    assert np.abs(found - whole[25:75, 45:105]).max() <= 1


def test_padding_keeps_the_ratio_of_the_sides() -> None:
    white = Image.new("RGB", (200, 100), "white")
    how = Preprocessing(size=(64, 64), resize="pad", mean=(0.5,), std=(0.5,)).settled((0, 3, 64, 64))
    found = how(white)
    assert (found[..., :32, :] == 1).all()
    assert (found[..., 32:, :] == 0).all()
    boxed = np.asarray(replace(how, resize="letterbox").fit(white))
    assert (boxed[16:48] == 255).all()
    assert (boxed[:16] == GREY).all()
    assert (boxed[48:] == GREY).all()
    tall = Preprocessing(size=(10, 1000), resize="pad", channels="rgb", layout="nhwc")
    assert tall(Image.new("RGB", (1, 4000))).shape == (1, 10, 1000, 3)


def test_free_sizes_follow_the_picture() -> None:
    how = PRESETS["ocr-line"].settled((0, 3, 48, 0))
    assert how(photo(200, 100)).shape == (1, 3, 48, 96)
    page = PRESETS["ocr-page"].settled((0, 3, 0, 0))
    assert page(photo(100, 50)).shape == (1, 3, 64, 96)
    assert replace(page, shorter=128)(photo(100, 50)).shape == (1, 3, 128, 256)
    assert Preprocessing().settled((0, 1, 0, 0))(photo(7, 5)).shape == (1, 1, 5, 7)
    with pytest.raises(DataError, match="would become 48 x 2400000 pixels"):
        how(Image.new("L", (50_000, 1)))


def test_what_is_open_is_taken_from_the_network() -> None:
    assert Preprocessing().settled((1, 224, 224, 3)) == Preprocessing(size=(224, 224), channels="rgb", layout="nhwc")
    assert Preprocessing().settled((0, 1, 8, 0)) == Preprocessing(size=(8, 0), channels="grey", layout="nchw")
    assert Preprocessing(channels="grey").settled((0, 0, 0, 0)).channels == "grey"


@pytest.mark.parametrize(
    ("how", "shape", "message"),
    [
        (Preprocessing(), (0, 512), "no picture has"),
        (Preprocessing(), (0, 7, 8, 8), "takes inputs of shape any x 7 x 8 x 8, which no picture has"),
        (Preprocessing(channels="grey"), (0, 3, 8, 8), "takes 3 channels, so pictures cannot be fed as grey"),
        (Preprocessing(channels="bgr"), (0, 1, 8, 8), "takes 1 channel, so pictures cannot be fed as bgr"),
        (Preprocessing(mean=(0.1, 0.2, 0.3)), (0, 1, 8, 8), "mean and std must then be one number"),
        (Preprocessing(size=(9, 8)), (0, 3, 8, 8), "takes pictures of 8 x 8; 9 x 8 was asked for"),
        (Preprocessing(layout="nhwc"), (0, 3, 8, 8), "no picture has"),
    ],
)
def test_what_does_not_go_together_is_said(how: Preprocessing, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        how.settled(shape)


@pytest.mark.parametrize("how", [*PRESETS.values(), Preprocessing(size=(8, 0), labels=("a", "b"))])
def test_it_goes_through_a_master(how: Preprocessing) -> None:
    assert Preprocessing.of(json.loads(json.dumps(how.to_about())), where="m.onnx") == how


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1], " must say how pictures are fed"),
        ({"mean": ["a"]}, "must be a number"),
        ({"mean": [float("nan")]}, "mean must be one number or three"),
        ({"std": [0.0]}, "std must be one number above 0"),
        ({"std": [1.0, 2.0]}, "std must be one number above 0 or three"),
        ({"size": [8]}, "size must be height and width"),
        ({"size": [-1, 8]}, "size must be height and width"),
        ({"size": [10**9, 8]}, "size must be height and width"),
        ({"scale": "0-2"}, "must be one of 0-1"),
        ({"sice": [8, 8]}, "did you mean 'size'"),
        ({"multiple": 0}, "multiple must be"),
        ({"resize": "crop", "shorter": 8, "size": [9, 9]}, "does not fit into a shorter side of 8"),
        ({"channels": "grey", "mean": [1.0, 1.0, 1.0]}, "one number each"),
    ],
)
def test_what_a_strangers_file_says_is_checked(values: object, message: str) -> None:
    with pytest.raises(DataError, match=f"^m.onnx: about.input.*{message}"):
        Preprocessing.of({"input": values}, where="m.onnx")


def test_labels_that_are_none_are_left_out() -> None:
    assert Preprocessing.of({"classes": [1, 2]}, where="m").labels == ()
    assert Preprocessing.of({"classes": "cats"}, where="m").labels == ()


def test_a_name_with_a_typing_error() -> None:
    with pytest.raises(SpecError, match="did you mean 'imagenet'"):
        Preprocessing.named("imagnet")
    with pytest.raises(SpecError, match="there are imagenet"):
        Preprocessing.named("zzz")


def test_grey_pictures_are_fed_in_colour_and_colour_in_grey() -> None:
    grey = decode(_png(Image.new("L", (8, 8), 51)))
    assert Preprocessing().settled((0, 3, 8, 8))(grey).shape == (1, 3, 8, 8)
    red = Image.new("RGB", (8, 8), "red")
    found = Preprocessing().settled((0, 1, 8, 8))(red)
    assert found.shape == (1, 1, 8, 8)
    assert np.allclose(found, 76 / 255)


def _png(picture: Image.Image) -> bytes:
    import io

    out = io.BytesIO()
    picture.save(out, "PNG")
    return out.getvalue()
