"""Pictures that are drawn: lines of text, pages, tables, captchas. The same seed gives the same picture."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
from fetch import fetched
from PIL import Image, ImageDraw, ImageFont

Rng = np.random.Generator
Picture = Image.Image

TEXT = """
the quick brown fox jumps over a lazy dog while seven wizards quietly judge boxing kangaroos in winter
invoice total amount due date customer number street city phone email delivery order quantity price tax
quantization keeps small networks fast and honest measure twice cut once every river finds its own way home
railway station platform ticket arrival departure north south garden museum entrance closed open monday friday
"""
WORDS = TEXT.split()
FONTS = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSansMono", "LiberationSans-Regular",
    "LiberationSerif-Regular", "LiberationSans-Italic", "LiberationSerif-Bold",
    "LiberationMono-Regular", "LiberationSansNarrow-Regular",
)  # fmt: skip


@functools.cache
def _fonts() -> dict[str, Path]:
    folders = [fetched("fonts-dejavu-core"), fetched("fonts-liberation")]
    return {path.stem: path for folder in folders for path in sorted(folder.rglob("*.ttf"))}


def font(rng: Rng, size: int) -> ImageFont.FreeTypeFont:
    known = [name for name in FONTS if name in _fonts()]
    return ImageFont.truetype(_fonts()[known[rng.integers(len(known))]], size)


def words(rng: Rng, count: int) -> str:
    """Return some words; now and then a number, a price or a capital letter among them."""
    made = []
    for _ in range(count):
        word = WORDS[rng.integers(len(WORDS))]
        kind = rng.random()
        if kind < 0.12:
            word = str(rng.integers(1, 100_000))
        elif kind < 0.18:
            word = f"${rng.integers(1, 900)}.{rng.integers(10, 99)}"
        elif kind < 0.4:
            word = word.capitalize()
        made.append(word + ("," if rng.random() < 0.08 else ""))
    return " ".join(made)


def _colours(rng: Rng) -> tuple[tuple[int, ...], tuple[int, ...]]:
    paper = tuple(int(c) for c in rng.integers(205, 256, 3))
    ink = tuple(int(c) for c in rng.integers(0, 90, 3))
    return (paper, ink) if rng.random() < 0.85 else (ink, paper)


def grain(picture: Picture, rng: Rng, spread: float) -> Picture:
    """Return the picture with some noise, as a camera or a scanner would make it."""
    array = np.asarray(picture, np.float64)
    return Image.fromarray(np.clip(array + rng.normal(0, spread, array.shape), 0, 255).astype(np.uint8))


def line(rng: Rng) -> Picture:
    """Return one line of text, cut out closely as a text detector would do it."""
    size = int(rng.integers(18, 48))
    text, face = words(rng, int(rng.integers(1, 6))), font(rng, size)
    left, top, right, bottom = face.getbbox(text)
    edge = max(2, size // 6)
    paper, ink = _colours(rng)
    picture = Image.new("RGB", (int(right - left) + 2 * edge, int(bottom - top) + 2 * edge), paper)
    ImageDraw.Draw(picture).text((edge - left, edge - top), text, fill=ink, font=face)
    return grain(picture, rng, float(rng.uniform(0, 8)))


def page(rng: Rng, size: tuple[int, int] = (640, 480)) -> Picture:
    """Return a page with lines of text of several sizes and fonts."""
    paper, ink = _colours(rng)
    picture = Image.new("RGB", size, paper)
    draw = ImageDraw.Draw(picture)
    y = int(rng.integers(10, 40))
    while y < size[1] - 50:
        height = int(rng.integers(14, 40))
        face = font(rng, height)
        x = int(rng.integers(10, 120))
        text = words(rng, int(rng.integers(1, 7)))
        while text and face.getlength(text) > size[0] - x - 10:
            text = text.rpartition(" ")[0]
        draw.text((x, y), text, fill=ink, font=face)
        y += int(height * rng.uniform(1.3, 2.6))
    return grain(picture, rng, float(rng.uniform(0, 6)))


def document(rng: Rng, photo: Callable[[Rng, tuple[int, int]], Picture]) -> Picture:
    """Return a page of a report: a heading, paragraphs, a photograph with a caption, a table."""
    size = (760, 1000)
    picture = Image.new("RGB", size, (255, 255, 255))
    draw = ImageDraw.Draw(picture)
    draw.text((120, 40), words(rng, 4).title(), fill=(0, 0, 0), font=font(rng, 36))
    y = 120
    blocks = ["text", "photo", "table", "text", "heading", "text"]
    for kind in [blocks[i] for i in rng.permutation(len(blocks))]:
        if y > 800:
            break
        if kind == "photo":
            picture.paste(photo(rng, (360, 200)), (200, y))
            draw.text((230, y + 208), "Figure 1: " + words(rng, 4), fill=(30, 30, 30), font=font(rng, 15))
            y += 250
        elif kind == "table":
            picture.paste(table(rng, (600, 180)), (80, y))
            y += 200
        elif kind == "heading":
            draw.text((60, y), f"{rng.integers(1, 9)}. {words(rng, 3).title()}", fill=(0, 0, 0), font=font(rng, 24))
            y += 44
        else:
            face = font(rng, 17)
            for _ in range(int(rng.integers(4, 8))):
                text = words(rng, 14)
                while face.getlength(text) > 640:
                    text = text.rpartition(" ")[0]
                draw.text((60, y), text, fill=(20, 20, 20), font=face)
                y += 24
            y += 16
    return picture


def table(rng: Rng, size: tuple[int, int] | None = None) -> Picture:
    """Return a table with lines around its cells."""
    rows, columns = int(rng.integers(3, 7)), int(rng.integers(2, 6))
    width, height = size or (int(rng.integers(360, 640)), int(rng.integers(150, 420)))
    picture = Image.new("RGB", (width, height), (255, 255, 255))
    draw = ImageDraw.Draw(picture)
    ys = np.linspace(4, height - 5, rows + 1).astype(int)
    xs = np.linspace(4, width - 5, columns + 1).astype(int)
    for y in ys:
        draw.line((xs[0], y, xs[-1], y), fill=(0, 0, 0), width=2)
    for x in xs:
        draw.line((x, ys[0], x, ys[-1]), fill=(0, 0, 0), width=2)
    face = font(rng, int(min(20, (ys[1] - ys[0]) * 0.5)))
    for y in ys[:-1]:
        for x in xs[:-1]:
            text = words(rng, 1) if rng.random() < 0.85 else ""
            while face.getlength(text) > xs[1] - xs[0] - 8:
                text = text[:-1]
            draw.text((x + 5, y + 6), text, fill=(0, 0, 0), font=face)
    return picture


def captcha(rng: Rng) -> Picture:
    """Return four to six turned letters over a few lines."""
    signs = "abcdefghijkmnpqrstuvwxyz23456789ABCDEFGHJKLMNPQRSTUVWXYZ"
    picture = Image.new("RGB", (int(rng.integers(130, 190)), 60), tuple(int(c) for c in rng.integers(215, 256, 3)))
    count = int(rng.integers(4, 7))
    for i in range(count):
        stamp = Image.new("RGBA", (50, 50))
        ink = tuple(int(c) for c in rng.integers(0, 130, 3))
        sign = signs[rng.integers(len(signs))]
        ImageDraw.Draw(stamp).text((10, 2), sign, fill=ink, font=font(rng, int(rng.integers(28, 36))))
        stamp = stamp.rotate(float(rng.uniform(-20, 20)), resample=Image.Resampling.BILINEAR)
        picture.paste(stamp, (int(4 + i * (picture.width - 40) / count), int(rng.integers(0, 12))), stamp)
    draw = ImageDraw.Draw(picture)
    for _ in range(int(rng.integers(1, 4))):
        ends = [int(v) for v in rng.integers(0, (picture.width, 60, picture.width, 60))]
        draw.line(ends, fill=tuple(int(c) for c in rng.integers(90, 200, 3)), width=1)
    return picture


def scattered(rng: Rng, photo: Callable[[Rng, tuple[int, int]], Picture]) -> Picture:
    """Return a photograph with a few large letters all over it, as a "click in this order" captcha has."""
    picture = photo(rng, (344, 344))
    for i in range(int(rng.integers(3, 6))):
        stamp = Image.new("RGBA", (80, 80))
        ink = tuple(int(c) for c in rng.integers(0, 256, 3))
        text = WORDS[rng.integers(len(WORDS))][0].upper()
        outline = {"stroke_width": 3, "stroke_fill": (255, 255, 255)}
        ImageDraw.Draw(stamp).text((16, 4), text, fill=ink, font=font(rng, int(rng.integers(44, 60))), **outline)
        stamp = stamp.rotate(float(rng.uniform(-30, 30)), resample=Image.Resampling.BILINEAR)
        picture.paste(stamp, (int(rng.integers(10, 90)) + 120 * (i % 2), 10 + 64 * i), stamp)
    return picture


def puzzle(rng: Rng, photo: Callable[[Rng, tuple[int, int]], Picture]) -> Picture:
    """Return a photograph with a piece cut out and the piece at its left, as a "slide it in" captcha has."""
    picture = photo(rng, (320, 160))
    size, y = int(rng.integers(40, 54)), int(rng.integers(20, 90))
    x = int(rng.integers(120, 250))
    shape = Image.new("L", (size + 14, size + 14))
    draw = ImageDraw.Draw(shape)
    draw.rectangle((0, 12, size, size + 12), fill=255)
    draw.ellipse((size // 2 - 9, 1, size // 2 + 9, 19), fill=255)
    draw.ellipse((size - 8, size // 2, size + 12, size // 2 + 20), fill=255)
    piece = picture.crop((x, y, x + size + 14, y + size + 14))
    hole = Image.blend(piece, Image.new("RGB", piece.size), 0.55)
    picture.paste(hole, (x, y), shape)
    picture.paste(Image.blend(piece, Image.new("RGB", piece.size, (255, 255, 255)), 0.12), (8, y), shape)
    return picture
