"""How a picture becomes what a network is fed: one value, stored in the master, and one function for every use.

    Preprocessing.named("imagenet")          what most classifiers were trained with; see PRESETS
    how.settled((0, 3, 224, 224))            what is open is taken from the network's own input
    how(picture)                             a batch of one
    how.fit(picture), how.normalize(pixels)  its two halves: a picture of the right size, and numbers out of its bytes

Calibrating, measuring a folder of images, running, watching and serving all go through here, so that a network is
measured on what it later sees.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from anybit.artifact.pictures import LARGEST, pillow
from anybit.common.strict import from_mapping
from anybit.common.text import did_you_mean, printable, quoted
from anybit.errors import DataError, RecipeError, SpecError

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

SCALES = {"0-1": (255.0, 0.0), "0-255": (1.0, 0.0), "-1-1": (127.5, -1.0)}
"""Bytes are divided by the first number, and the second is added."""

GREY = 114
"""What a letterbox is filled with: the middle grey that detectors are trained with."""

CROP = 0.875
"""Of the shorter side, which part the crop takes where nobody says: 224 of 256."""

LONGEST = 2**15
"""Of a side, in pixels."""


@dataclass(frozen=True)
class Preprocessing:
    """What is done to a picture: brought to size, its channels put in order, its bytes scaled and normalized.

    Attributes:
        size: Height and width, 0 where the picture's own shape decides; empty: as the network says.
        resize: "squash" to size; "crop" the middle, after the shorter side is brought to `shorter`; "pad" with zeros at
            the right and below; "letterbox": pad with grey around.
        shorter: Of a crop, the shorter side before it; where the size is free, the shorter side.
        multiple: Free sizes are brought to a multiple of this.
        channels: "rgb", "bgr" or "grey"; by the network's number of channels if not given.
        scale: What bytes become: "0-1", "0-255" or "-1-1".
        mean: What is then taken off, one number or one per channel, in the order of the channels.
        std: What that is then divided by.
        layout: "nchw" or "nhwc"; by the network's shape if not given.
        labels: The names of the classes.
    """

    size: tuple[int, ...] = ()
    resize: Literal["squash", "crop", "pad", "letterbox"] = "squash"
    shorter: int = 0
    multiple: int = 1
    channels: Literal["rgb", "bgr", "grey"] | None = None
    scale: Literal["0-1", "0-255", "-1-1"] = "0-1"
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    layout: Literal["nchw", "nhwc"] | None = None
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.size) not in (0, 2) or not all(0 <= side <= LONGEST for side in self.size):
            raise SpecError(f"size must be height and width of at most {LONGEST} pixels, got {quoted(self.size)}")
        if not (0 <= self.shorter <= LONGEST and 1 <= self.multiple <= LONGEST):
            raise SpecError(f"shorter and multiple must be at most {LONGEST}, got {self.shorter} and {self.multiple}")
        for name, values in (("mean", self.mean), ("std", self.std)):
            small = all(abs(value) < 1e6 for value in values)  # NaN is not
            if len(values) not in (1, 3) or not small or (name == "std" and min(values) <= 0):
                above = " above 0" if name == "std" else ""
                raise SpecError(f"{name} must be one number{above} or three, got {quoted(values)}")
        if self.channels == "grey" and max(len(self.mean), len(self.std)) > 1:
            raise SpecError("mean and std of a grey picture are one number each")
        if self.resize == "crop" and self.shorter and self.size and max(self.size) > self.shorter:
            raise SpecError(f"a crop of {_spoken(self.size)} does not fit into a shorter side of {self.shorter}")

    @classmethod
    def named(cls, name: str) -> Preprocessing:
        """Return one of PRESETS.

        >>> Preprocessing.named("imagenet").mean
        (0.485, 0.456, 0.406)
        """
        if name not in PRESETS:
            hint = did_you_mean(name, PRESETS) or f"; there are {', '.join(PRESETS)}"
            raise SpecError(f"no preprocessing is called {quoted(name)}{hint}")
        return PRESETS[name]

    @classmethod
    def of(cls, about: Mapping[str, Any], *, where: str) -> Preprocessing:
        """Return what a master tells in `about`: its `input`, and as labels its `classes`; `where` is for errors.

        >>> Preprocessing.of({"input": {"mean": [0.5]}, "classes": ["cat", "dog"]}, where="m.onnx").labels
        ('cat', 'dog')
        """
        values, labels = about.get("input", {}), about.get("classes", [])
        if not isinstance(values, dict):
            raise DataError(f"{where}: about.input must say how pictures are fed, got {quoted(values)}")
        named = isinstance(labels, list) and all(isinstance(label, str) for label in labels)
        try:
            return replace(from_mapping(cls, values), labels=tuple(labels) if named else ())
        except (RecipeError, SpecError) as error:
            raise DataError(f"{where}: about.input: {error}") from error

    def to_about(self) -> dict[str, Any]:
        """Return what `of` reads, ready for JSON.

        >>> Preprocessing(mean=(0.5,), labels=("cat",)).to_about()
        {'input': {'mean': [0.5]}, 'classes': ['cat']}
        """
        fields = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        own = {name: value for name, (value, usual) in fields.items() if value != usual and name != "labels"}
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in own.items()}
        return {"input": values, **({"classes": list(self.labels)} if self.labels else {})}

    def settled(self, shape: Sequence[int]) -> Preprocessing:
        """Return the same with everything that is open taken from a network's input.

        Args:
            shape: Of the input, its batch dimension included, 0 where a size is free.

        Raises:
            DataError: No picture has that shape, or the network wants something else than is said here.
        """
        if len(shape) != 4:
            raise DataError(f"takes inputs of shape {_spoken(shape)}, which no picture has; use .npy files")
        layout = self.layout or ("nhwc" if shape[1] not in (1, 3) and shape[3] in (1, 3) else "nchw")
        count, *fixed = (shape[1], *shape[2:]) if layout == "nchw" else (shape[3], *shape[1:3])
        count = count or (1 if self.channels == "grey" else 3)
        if count not in (1, 3):
            raise DataError(f"takes inputs of shape {_spoken(shape)}, which no picture has; use .npy files")
        channels = self.channels or ("rgb" if count == 3 else "grey")
        if (channels == "grey") != (count == 1):
            raise DataError(f"takes {count} channel{'s'[: count - 1]}, so pictures cannot be fed as {channels}")
        if count == 1 and max(len(self.mean), len(self.std)) > 1:
            raise DataError("takes 1 channel; mean and std must then be one number each")
        asked = self.size or (0, 0)
        if any(own and size and own != size for own, size in zip(asked, fixed, strict=True)):
            raise DataError(f"takes pictures of {_spoken(fixed)}; {_spoken(asked)} was asked for")
        size = tuple(own or side for own, side in zip(asked, fixed, strict=True))
        return replace(self, size=size, channels=channels, layout=layout)

    def __call__(self, picture: Any) -> Floats:
        """Return a picture, as `pictures.decode` gives it, as a batch of one."""
        values = self.normalize(np.asarray(self.fit(picture)))
        if self.resize == "pad" and self.size:
            high, wide = values.shape[-2:] if self.layout != "nhwc" else values.shape[:2]
            room = [(0, max(0, side - own)) for side, own in zip(self.size, (high, wide), strict=True)]
            values = np.pad(values, [(0, 0), *room] if self.layout != "nhwc" else [*room, (0, 0)])
        return values[None]

    def fit(self, picture: Any) -> Any:
        """Return a picture in grey or colour, brought to size; what "pad" adds is not there yet."""
        mode, smooth = "L" if self.channels == "grey" else "RGB", pillow().Resampling.BILINEAR
        picture = picture if picture.mode == mode else picture.convert(mode)
        height, width = self.target(picture.width, picture.height)
        if self.resize == "crop" and 0 not in (self.size or (0, 0)):
            # Only the pixels of the crop are computed; they are those of the whole picture, resized and then cut.
            return picture.resize((width, height), smooth, box=self.box(picture.width, picture.height))
        scaled = picture.resize((width, height), smooth)
        if self.resize != "letterbox" or 0 in (self.size or (0, 0)):
            return scaled
        canvas = pillow().new(mode, self.size[::-1], (GREY,) * 3 if mode == "RGB" else GREY)
        canvas.paste(scaled, ((self.size[1] - width) // 2, (self.size[0] - height) // 2))
        return canvas

    def target(self, width: int, height: int) -> tuple[int, int]:
        """Return height and width that a picture of this size is brought to.

        >>> Preprocessing(size=(48, 0)).target(200, 100), Preprocessing(multiple=32).target(100, 50)
        ((48, 96), (64, 96))
        """
        high, wide = self.size or (0, 0)
        if high and wide and self.resize in ("squash", "crop"):
            return high, wide
        if high and wide:
            factor = min(high / height, wide / width)
            return max(1, min(high, round(height * factor))), max(1, min(wide, round(width * factor)))
        factor = high / height or wide / width or (self.shorter or min(width, height)) / min(width, height)
        found = high or self._rounded(height * factor), wide or self._rounded(width * factor)
        if math.prod(found) > LARGEST:
            raise DataError(f"would become {_spoken(found)} pixels, more than {LARGEST:,}; make it smaller first")
        return found

    def _rounded(self, side: float) -> int:
        return max(1, round(side / self.multiple)) * self.multiple

    def box(self, width: int, height: int) -> tuple[float, float, float, float]:
        """Return which part of a picture a crop takes: left, top, right, bottom, in the picture's own pixels.

        >>> Preprocessing(size=(24, 24), resize="crop", shorter=32).box(128, 64)
        (40.0, 8.0, 88.0, 56.0)
        """
        shorter = self.shorter or max(round(min(self.size) / CROP), *self.size)
        short = min(width, height)
        across, down = (int(shorter * side / short) for side in (width, height))
        left, top = round((across - self.size[1]) / 2), round((down - self.size[0]) / 2)
        wide, high = width / across, height / down
        right, bottom = min(width, (left + self.size[1]) * wide), min(height, (top + self.size[0]) * high)
        return left * wide, top * high, right, bottom

    @cached_property
    def _line(self) -> tuple[Floats, Floats]:
        """Factor and offset of each channel."""
        divisor, start = SCALES[self.scale]
        count = 1 if self.channels == "grey" else 3
        mean, std = (values * count if len(values) == 1 else values for values in (self.mean, self.std))
        factor = [1 / (divisor * s) for s in std[:count]]
        offset = [(m - start) / s for m, s in zip(mean[:count], std, strict=False)]
        shape = (1, 1, count) if self.layout == "nhwc" else (count, 1, 1)
        return np.array(factor, np.float32).reshape(shape), np.array(offset, np.float32).reshape(shape)

    def normalize(self, pixels: Bytes) -> Floats:
        """Return bytes (height, width[, 3]), in grey or red, green, blue, as numbers in the network's layout."""
        pixels = pixels.reshape(*pixels.shape[:2], -1)
        pixels = pixels[..., ::-1] if self.channels == "bgr" else pixels
        factor, offset = self._line
        values = np.multiply(pixels if self.layout == "nhwc" else pixels.transpose(2, 0, 1), factor)
        return np.subtract(values, offset, out=values)

    def pixels(self, values: Floats) -> Bytes:
        """Return what `normalize` was given: the picture that a network sees."""
        factor, offset = self._line
        found: Bytes = np.rint((values + offset) / factor).clip(0, 255).astype(np.uint8)
        found = found if self.layout == "nhwc" else found.transpose(1, 2, 0)
        return found[..., ::-1] if self.channels == "bgr" else found

    @property
    def interval(self) -> tuple[float, float]:
        """The interval that numbers fall into, from black to white in every channel."""
        ends = self.normalize(np.array([[[0] * 3, [255] * 3]], np.uint8)[..., : len(self._line[0].ravel())])
        return float(ends.min()), float(ends.max())

    def label(self, index: int) -> str:
        """Return the name of a class, or its number.

        >>> Preprocessing(labels=("cat", "dog")).label(1), Preprocessing().label(1)
        ('dog', '1')
        """
        return printable(self.labels[index], 60) if 0 <= index < len(self.labels) else str(index)


def _spoken(sizes: Sequence[int]) -> str:
    return " x ".join(str(size) if size else "any" for size in sizes)


_IMAGENET = Preprocessing(resize="crop", channels="rgb", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))

PRESETS = {
    "imagenet": _IMAGENET,
    "imagenet-bgr": replace(_IMAGENET, channels="bgr"),
    "caffe": Preprocessing(resize="crop", channels="bgr", scale="0-255", mean=(103.939, 116.779, 123.68)),
    "tf": Preprocessing(resize="crop", channels="rgb", scale="-1-1"),
    "0-1": Preprocessing(),
    "0-255": Preprocessing(scale="0-255"),
    "-1-1": Preprocessing(scale="-1-1"),
    "yolo": Preprocessing(resize="letterbox", channels="rgb"),
    "ocr-line": Preprocessing(size=(48, 0), channels="bgr", mean=(0.5,), std=(0.5,)),
    "ocr-page": Preprocessing(multiple=32, channels="bgr", mean=(0.5,), std=(0.5,)),
}
"""Preprocessings by name. `imagenet-bgr` keeps the order of mean and std and only swaps the channels, as OCR detectors
do; `caffe` takes the mean off bytes."""
