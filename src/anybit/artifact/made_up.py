"""Inputs that nobody brought: noise and simple pictures of a size that a network takes, to see where its values lie.

Ranges from such inputs are a guess, and say so. They are far better than none: a file without batch norm tells nothing.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from anybit.artifact.runtime import TooSlow, run_in_time
from anybit.artifact.texts import TEXT, Words
from anybit.artifact.values import TYPES, Kind, as_value
from anybit.errors import DataError
from anybit.graph.view import Graph, Node, origins

Array = npt.NDArray[Any]

COUNT = 8
SECONDS = 60.0
"""How long a size may take that is tried."""

SIZES: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((1,), (32,), (512,)),
    2: ((32,), (128,), (512,), (576,), (2048,)),
    3: ((100, 100), (160, 160), (32, 32), (512, 512)),
    4: ((224, 224), (48, 320), (32, 320), (64, 256), (640, 640), (416, 416)),
}
"""What free sizes are tried as, by the number of dimensions, behind the first one."""

BATCHES = (1, 4)
"""What the first one is tried as: some networks take an input together with its mirror images, or in pairs."""

SOUND = ((4096,), *SIZES[2])
"""The same for two dimensions of floating-point numbers: sound, most of the time."""

TEXTS = ((32,), *SIZES[1])
"""The same for one dimension of text: words of a sentence, most of the time."""

LARGEST = 2**20
"""A remembered size from which on it is taken for a mistake."""

SAMPLES = 256
"""So many numbers in a row, in fewer than four dimensions, are taken for sound."""
STATE = re.compile("hidden|state|cache|memory|embed", re.IGNORECASE)
"""In the names of inputs: what another run or another network made, which may be as long but is no sound."""

NUMBERS = (1, 16000)
"""What a lone whole number is tried as: a flag, or a sampling rate."""

BOUNDS = {"min": 0.0, "max": 8000.0}
"""What a lone number with a fraction is, by a word in its name: sound has pitches up to half its sampling rate."""

BYTES, CENTRED = (0.0, 255.0), (-128.0, 127.0)
"""Where pictures of bytes lie, as they are or with a mean taken off."""
BEYOND = 3.0
"""So many times what inputs from -1 to 1 can cause at most: a network that expects it takes bytes."""


def pictures_of_bytes(graph: Graph) -> dict[str, tuple[float, float]]:
    """Return where pictures lie that are fed as bytes: their first layer expects far more than others could cause.

    What it expects is its bias, which has to be outweighed now and then, and what a batch norm behind it has seen. A
    bias takes off what the mean of all pictures causes, which tells that mean.
    """
    makers = graph.makers()
    found: dict[str, tuple[float, float]] = {}
    for node in graph.nodes:
        weight = graph.constants.get(node.inputs[1]) if node.kind == "layer" and node.convolution else None
        if weight is None or node.transposed:
            continue
        rows = weight.reshape(len(weight), -1).astype(np.float64)
        most = np.maximum(np.abs(rows).sum(1), 1e-30)
        bias, sums = graph.constants.get(graph.bias(node) or "", 0.0 * most) / most, rows.sum(1) / most
        expected = [seen / most for seen in _seen_behind(graph, node) if seen.shape == most.shape]
        if np.median(np.abs(bias)) > BEYOND:
            interval = BYTES if -(bias @ sums) > BYTES[1] / 4 * (sums @ sums) else CENTRED
        elif any(np.median(value) > BEYOND for value in expected):
            interval = BYTES
        else:
            continue
        names = {source for source, _ in origins(graph, node.inputs[0], None, makers)}
        found |= {name: interval for name in graph.inputs if name in names and graph.rank(name) == 4}
    return found


def _seen_behind(graph: Graph, layer: Node) -> Iterator[Array]:
    """Yield the sizes of what batch norms behind a layer have seen, with nothing but functions and sums between."""
    reached = {layer.output}
    for node in graph.nodes:
        if reached.isdisjoint(node.inputs):
            continue
        if node.norm is not None and node.norm.mean is not None and node.norm.var is not None:
            yield np.sqrt(np.square(node.norm.mean) + node.norm.var)
        elif node.kind in ("function", "pass", "average", "slopes", "add", "sub", "mul"):
            reached.add(node.output)


def made_up_inputs(
    engine: Any,
    inputs: Sequence[Kind],
    *,
    ids: int,
    interval: Mapping[str, tuple[float, float]],
    usual: Mapping[str, tuple[int, ...]] | None = None,
    whole: Container[str] = (),
    words: Mapping[str, Words] | None = None,
    where: str,
) -> list[dict[str, Any]]:
    """Return a few inputs that a compiled network takes.

    Args:
        engine: The network.
        inputs: What it takes.
        ids: Whole numbers are drawn below this: the rows of its smallest table.
        interval: Where floating-point inputs lie, for those of which it is known.
        usual: Shapes to try first, 0 where a size is not known.
        whole: Inputs that are whole numbers whatever their type says.
        words: What text is drawn from, for each input that takes text.
        where: The file, for errors.

    Raises:
        DataError: None of the sizes that were tried works.
    """
    reason = ""
    for shapes, number in itertools.product(_shapes(inputs, usual or {}, whole), NUMBERS):
        feeds = [
            _feed(inputs, shapes, number, ids, interval, whole, words or {}, np.random.default_rng(seed))
            for seed in range(COUNT)
        ]
        try:
            run_in_time(engine, None, feeds[0], SECONDS)
        except TooSlow as error:  # another size would hardly be faster
            reason = str(error)
            break
        except DataError as error:
            reason = str(error)[:200]
            continue
        return feeds
    raise DataError(f"{where}: no made-up input runs ({reason}); pass calibration inputs")


def shapes_in(values: Mapping[Any, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes that a master remembers, by input; whatever else stands there is left out.

    >>> shapes_in({"x": [1, 3, 8, 8], "y": "much"})
    {'x': (1, 3, 8, 8)}
    """
    shapes = {str(name): tuple(shape) for name, shape in values.items() if isinstance(shape, list)}
    return {n: s for n, s in shapes.items() if all(isinstance(size, int) and 0 < size < LARGEST for size in s)}


def _shapes(
    inputs: Sequence[Kind], usual: Mapping[str, tuple[int, ...]], whole: Container[str]
) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield sizes for all inputs together: a size that several share is the same everywhere."""
    free = [value for value in inputs if any(not isinstance(size, int) for size in value.shape)]
    most = max((len(value.shape) for value in free), default=1)
    long = most == 2 and all(_floats(value, whole) for value in free)
    row = most == 1 and any(value.tensor == TEXT for value in free)
    usual_sizes = SOUND if long else TEXTS if row else SIZES.get(most, ((16, 16),))
    for batch, sizes in itertools.product(BATCHES, usual_sizes):
        known: dict[str, int] = {}
        shapes = {}
        for value in inputs:
            left = iter(itertools.chain(sizes, itertools.repeat(sizes[-1])))
            shape = []
            for d, size in enumerate(value.shape):
                own = usual.get(value.name, ())
                if isinstance(size, int) or (d < len(own) and own[d]):
                    shape.append(size if isinstance(size, int) else own[d])
                    continue
                wanted = batch if d == 0 and len(value.shape) > 1 else next(left)
                shape.append(known.setdefault(str(size), wanted) if size else wanted)
            shapes[value.name] = tuple(shape)
        yield shapes


def _feed(
    inputs: Sequence[Kind],
    shapes: Mapping[str, tuple[int, ...]],
    number: int,
    ids: int,
    interval: Mapping[str, tuple[float, float]],
    whole: Container[str],
    words: Mapping[str, Words],
    rng: np.random.Generator,
) -> dict[str, Any]:
    lengths = [size for shape in shapes.values() for size in shape[1:2]]
    feed: dict[str, Any] = {}
    for value in inputs:
        kind, shape = TYPES[value.tensor], shapes[value.name]
        if value.tensor == TEXT:
            array = words.get(value.name, Words()).draw(shape, rng)
        elif _floats(value, whole) and not shape and (bound := _bound(value.name)) is not None:
            array = np.asarray(bound)
        elif _floats(value, whole):
            low, high = interval.get(value.name, (-1.0, 1.0))
            array = low + (high - low) * drawn(shape, rng, value.name)
        elif int(np.prod(shape)) <= 1:
            array = np.full(shape, max(lengths, default=1) if "len" in value.name.lower() else number)
        else:
            array = rng.integers(0, 2 if kind is np.bool_ else max(ids, 2), shape)
        made: Any = np.asarray(array, kind)
        if "map(" in value.type:
            made = dict(zip(words.get(value.name, Words()).draw(shape, rng), made, strict=True))
        feed[value.name] = as_value(made, value.type)
    return feed


def is_sound(name: str, shape: tuple[int, ...]) -> bool:
    """Tell whether an input is taken for samples of sound: many in a row, in one channel or two, and no state.

    >>> is_sound("audio", (1, 512)), is_sound("encoder_outputs", (1, 100, 512)), is_sound("decoder_hidden", (1, 1, 512))
    (True, False, False)
    """
    channels = shape[1] if len(shape) == 3 else 1
    return 0 < len(shape) < 4 and shape[-1] >= SAMPLES and channels <= 2 and not STATE.search(name)


def _bound(name: str) -> float | None:
    """Return what shuts nothing out, for a lone number that says from where or up to where something counts."""
    return next((value for word, value in BOUNDS.items() if word in name.lower()), None)


def _floats(value: Kind, whole: Container[str]) -> bool:
    return bool(np.issubdtype(TYPES[value.tensor], np.floating)) and value.name not in whole


def drawn(shape: tuple[int, ...], rng: np.random.Generator, name: str = "") -> Array:
    """Return numbers from 0 to 1 that look like sound or like a picture, whichever an input is taken for."""
    return (sound if is_sound(name, shape) else picture)(shape, rng)


def sound(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Return numbers from 0 to 1 around a half: a voice that swells and falls silent over noise, some loud, some soft.

    >>> x = sound((1, 512), np.random.default_rng(0))
    >>> x.shape, bool(abs(x.mean() - 0.5) < 0.1 and (x >= 0).all() and (x <= 1).all())
    ((1, 512), True)
    """
    time = np.arange(shape[-1])
    pitch, noise, loud = np.exp(rng.uniform(np.log((0.004, 1e-5, 0.02)), np.log((0.04, 0.1, 0.6))))
    tones = [np.sin(2 * np.pi * (pitch * k * time + rng.uniform())) for k in range(1, 12)]
    swell = np.maximum(np.sin(np.pi * (time / rng.uniform(500, 4000) + rng.uniform())), 0)
    wave = loud * (swell * np.mean(tones, axis=0) + noise * rng.normal(size=shape))
    return np.asarray(np.clip(0.5 + 0.5 * wave, 0, 1))


def picture(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Return numbers from 0 to 1: noise over a slope, with bright and dark boxes where there is room for them.

    >>> x = picture((1, 3, 8, 8), np.random.default_rng(0))
    >>> x.shape, bool((x >= 0).all() and (x <= 1).all())
    ((1, 3, 8, 8), True)
    """
    base = rng.uniform(0, 1) + 0.15 * rng.normal(size=shape)
    if len(shape) >= 3:
        rows, columns = shape[-2:]
        slope = np.linspace(-1, 1, columns) * rng.normal() + np.linspace(-1, 1, rows)[:, None] * rng.normal()
        base = base + 0.3 * slope
        for _ in range(12):
            top, left = rng.integers(0, rows), rng.integers(0, columns)
            box = np.s_[..., top : top + 1 + rows // 6, left : left + 1 + columns // 10]
            base[box] = rng.uniform(0, 1)
    return np.asarray(np.clip(base, 0, 1))
