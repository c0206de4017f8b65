"""Pictures in: text lines, pages, captchas, photographs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path

import drawn
import numpy as np
from drawn import Picture, Rng
from fetch import fetched
from measures import best_boxes, ctc, overlap, same_boxes, same_text, share_equal
from PIL import Image
from task import CALIBRATION_SEED, MOST_INPUTS, TEST_SEED, Array, Feed, Task, seeded, simple

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
PHOTOS = ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "rocket.jpg")
BILINEAR = Image.Resampling.BILINEAR


@functools.cache
def _photo(name: str) -> Picture:
    return Image.open(fetched("scikit-image") / "skimage" / "data" / name).convert("RGB")


def photo(rng: Rng, size: tuple[int, int]) -> Picture:
    """Return a random part of a random photograph."""
    whole = _photo(PHOTOS[rng.integers(len(PHOTOS))])
    most = min(whole.width / size[0], whole.height / size[1])
    scale = rng.uniform(0.6, 1.0) * most
    width, height = int(size[0] * scale), int(size[1] * scale)
    x, y = rng.integers(whole.width - width + 1), rng.integers(whole.height - height + 1)
    return whole.crop((x, y, x + width, y + height)).resize(size, BILINEAR)


def blue_first(picture: Picture) -> Array:
    """Return a picture's numbers as OpenCV has them: height, width, and blue before green before red."""
    return np.asarray(picture, np.float32)[:, :, ::-1]


def normal(pixels: Array, how: tuple[tuple[float, ...], tuple[float, ...]]) -> Array:
    mean, std = (np.array(v, np.float32) for v in how)
    return np.ascontiguousarray(((pixels / 255 - mean) / std).transpose(2, 0, 1)[None], np.float32)


def both(make: Callable[[Rng], Feed], tests: int) -> tuple[list[Feed], list[Feed]]:
    """Return calibration inputs and others to test with."""
    return seeded(make, CALIBRATION_SEED, MOST_INPUTS), seeded(make, TEST_SEED, tests)


# Text


def fitted_line(picture: Picture, height: int, least: int, most: int | None = None) -> Array:
    """Return a line at the height that a recognizer wants, zeros at its right, at least so wide."""
    width = math.ceil(height * picture.width / picture.height)
    width = min(width, most) if most else width
    pixels = normal(blue_first(picture.resize((width, height), BILINEAR)), HALF)
    return np.pad(pixels, ((0, 0), (0, 0), (0, 0), (0, max(0, least - width))))


def recognizer(path: Path, *, height: int = 48, least: int = 320) -> Task:
    feeds = both(lambda rng: {"x": fitted_line(drawn.line(rng), height, least)}, 24)
    return simple(*feeds, lambda out: ctc(next(iter(out.values()))[0]), same_text)


def line_turner(path: Path) -> Task:
    """Is a line upside down?"""

    def feed(rng: Rng) -> Feed:
        picture = drawn.line(rng)
        turned = picture.rotate(180) if rng.random() < 0.5 else picture
        return {"x": fitted_line(turned, 48, 192, 192)}

    return simple(*both(feed, 48), lambda out: next(iter(out.values())).argmax(-1), share_equal)


def fitted_page(picture: Picture, *, least: int = 0) -> Picture:
    """Return a page whose shorter side is long enough, both sides multiples of 32."""
    ratio = max(1.0, least / min(picture.size))
    width, height = (max(32, round(int(side * ratio) / 32) * 32) for side in picture.size)
    return picture.resize((width, height), BILINEAR)


def detector(path: Path, *, how: tuple[tuple[float, ...], tuple[float, ...]] = HALF, least: int = 736) -> Task:
    def feed(rng: Rng) -> Feed:
        size = [(640, 480), (480, 640), (736, 416), (560, 560)][rng.integers(4)]
        return {"x": normal(blue_first(fitted_page(drawn.page(rng, size), least=least)), how)}

    return simple(*both(feed, 8), lambda out: next(iter(out.values())) > 0.3, overlap)


def captcha_reader(path: Path) -> Task:
    def feed(rng: Rng) -> Feed:
        picture = drawn.captcha(rng).convert("L")
        picture = picture.resize((int(picture.width * 64 / picture.height), 64), BILINEAR)
        return {"input1": np.asarray(picture, np.float32)[None, None] / 255}

    return simple(*both(feed, 24), lambda out: ctc(next(iter(out.values()))[:, 0]), same_text)


# Pages


def page_turner(path: Path) -> Task:
    """Which of four ways is a page turned?"""

    def feed(rng: Rng) -> Feed:
        picture = drawn.page(rng, (560, 560)).rotate(90 * int(rng.integers(4))).resize((256, 256), BILINEAR)
        return {"x": normal(blue_first(picture.crop((16, 16, 240, 240))), IMAGENET)}

    return simple(*both(feed, 40), lambda out: next(iter(out.values())).argmax(-1), share_equal)


def page_parts(path: Path) -> Task:
    """Where are headings, texts, tables and figures?"""

    def feed(rng: Rng) -> Feed:
        picture = drawn.document(rng, photo).resize((608, 800), BILINEAR)
        return {"image": normal(blue_first(picture), IMAGENET)}

    return simple(*both(feed, 24), _page_boxes, same_boxes)


def _page_boxes(out: dict[str, Array]) -> Array:
    values = list(out.values())
    all_boxes, all_scores = [], []
    for stride, found, sides in zip((8, 16, 32, 64), values[:4], values[4:], strict=True):
        rows, columns = math.ceil(800 / stride), math.ceil(608 / stride)
        y, x = ((np.mgrid[:rows, :columns] + 0.5) * stride).reshape(2, -1)
        parts = np.exp(sides[0].reshape(len(x), 4, -1))
        reach = (parts / parts.sum(-1, keepdims=True)) @ np.arange(parts.shape[-1]) * stride
        all_boxes.append(np.stack([x, y, x, y], 1) + reach * (-1, -1, 1, 1))
        all_scores.append(found[0])
    return best_boxes(np.concatenate(all_boxes), np.concatenate(all_scores), threshold=0.4)


def table_reader(path: Path) -> Task:
    """What rows and cells has a table? The answer is a sequence of tags of free length."""

    def feed(rng: Rng) -> Feed:
        picture = drawn.table(rng)
        ratio = 488 / max(picture.size)
        small = picture.resize((int(picture.width * ratio), int(picture.height * ratio)), BILINEAR)
        pixels = normal(blue_first(small), IMAGENET)
        below, right = 488 - pixels.shape[2], 488 - pixels.shape[3]
        return {"x": np.pad(pixels, ((0, 0), (0, 0), (0, below), (0, right)))}

    return simple(*both(feed, 8), lambda out: [int(i) for i in list(out.values())[1][0].argmax(-1)], same_text)


# Captchas with boxes


def letter_finder(path: Path) -> Task:
    def feed(rng: Rng) -> Feed:
        pixels = blue_first(drawn.scattered(rng, photo).resize((416, 416), BILINEAR))
        return {"images": np.ascontiguousarray(pixels.transpose(2, 0, 1)[None])}

    return simple(*both(feed, 12), _letter_boxes, same_boxes)


def _letter_boxes(out: dict[str, Array]) -> Array:
    (raw,) = next(iter(out.values()))
    x, y, strides = [], [], []
    for stride in (8, 16, 32):
        rows, columns = np.mgrid[: 416 // stride, : 416 // stride].reshape(2, -1)
        y.append(rows), x.append(columns), strides.append(np.full(len(rows), stride))
    stride = np.concatenate(strides)
    middle_x, middle_y = (raw[:, 0] + np.concatenate(x)) * stride, (raw[:, 1] + np.concatenate(y)) * stride
    width, height = (np.exp(np.clip(raw[:, i], -20, 20)) * stride / 2 for i in (2, 3))
    boxes = np.stack([middle_x - width, middle_y - height, middle_x + width, middle_y + height], 1)
    return best_boxes(boxes, raw[:, 4:5] * raw[:, 5:], threshold=0.1)


def piece_finder(path: Path) -> Task:
    """A detector of the YOLO kind: boxes in pixels (0 to 640) and scores (0 to 1) in one tensor."""

    def feed(rng: Rng) -> Feed:
        picture = Image.new("RGB", (640, 640), (114, 114, 114))
        picture.paste(drawn.puzzle(rng, photo).resize((640, 320), BILINEAR), (0, 160))
        return {"images": np.ascontiguousarray(np.asarray(picture, np.float32).transpose(2, 0, 1)[None] / 255)}

    def decide(out: dict[str, Array]) -> Array:
        x, y, width, height, score = next(iter(out.values()))[0][:5]
        boxes = np.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2], 1)
        return best_boxes(boxes, score[:, None], threshold=0.25)

    return simple(*both(feed, 8), decide, same_boxes)
