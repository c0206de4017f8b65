"""Figure 5: which class four networks see in a random plane through a test image.

The four are a run without penalty and one with, each in floating point and quantized. The upper row goes through an
image that all four get right, the lower one through an image that only the quantized network without penalty gets
wrong. The plane leaves the space of real images almost at once: it shows the shape of the function, not its accuracy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybit.data import Batches, Dataset, Split
from anybit.errors import DataError
from paper.figures.drawing import title
from paper.figures.request import Request, floats
from paper.runs import predict, quantized

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIDE = 65
"""Points along each side of the plane."""

CONTOURS = (0.5, 0.9)
"""Largest probabilities along which lines are drawn."""

FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0)
"""Planes tried, in units of how far a typical image is from the mean image."""

FILLED, COARSE = 2 / 3, 17
"""Share that the image's own class must have within half the distance, and the side of the plane that is tried."""

NAMED = 3
"""Pixels between the edge and the middle of a region from which on it gets the name of its class."""

CLEAR = 7
"""Pixels around the image itself where no name is put."""

SMOOTHED = 5
"""Pixels over which the probability is averaged before lines are drawn: quantized networks are rough."""

ALL_RIGHT, SAVED = "all four are right", "only the quantized network without penalty is wrong"


@dataclass(frozen=True)
class Section:
    """What one network sees in the plane: row by row, the class and its probability."""

    network: str
    classes: tuple[tuple[int, ...], ...]
    confidence: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Plane:
    """A plane through one test image: from `-reach` to `reach` along both directions, in the units of the input."""

    case: str
    example: int
    label: str
    reach: float
    names: tuple[str, ...]
    sections: tuple[Section, ...]


def directions(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return two random directions of length one at a right angle.

    >>> u, v = directions((3, 4, 4), torch.Generator().manual_seed(0)).flatten(1)
    >>> round(float(u @ u), 4), round(abs(float(u @ v)), 4)
    (1.0, 0.0)
    """
    size = torch.Size(shape).numel()
    drawn = torch.randn(size, 2, dtype=torch.float64, generator=generator)
    basis: Tensor = torch.linalg.qr(drawn)[0]
    return basis.T.reshape(2, *shape).float()


def plane_points(center: Tensor, basis: Tensor, reach: float, side: int) -> Tensor:
    """Return `side²` points of the plane, row by row; the center is in the middle of an odd side.

    >>> points = plane_points(torch.zeros(2), torch.eye(2), 1.0, 3)
    >>> points[0].tolist(), points[1].tolist(), points[4].tolist()
    ([-1.0, -1.0], [0.0, -1.0], [0.0, 0.0])
    """
    steps = torch.linspace(-reach, reach, side)
    down, across = torch.meshgrid(steps, steps, indexing="ij")
    flat = basis.flatten(1)
    points = center.flatten() + across.reshape(-1, 1) * flat[0] + down.reshape(-1, 1) * flat[1]
    return points.reshape(side * side, *center.shape)


def choose(right: Tensor, wanted: Tensor, generator: torch.Generator) -> int | None:
    """Return the number of a random column of `right` that is as `wanted`, or `None` where there is none.

    >>> right = torch.tensor([[True, False], [True, True]])
    >>> choose(right, torch.tensor([False, True]), torch.Generator().manual_seed(0))
    1
    """
    (found,) = torch.nonzero((right == wanted[:, None]).all(0), as_tuple=True)
    return int(found[torch.randint(len(found), (), generator=generator)]) if len(found) else None


def middle_of(region: Tensor) -> tuple[int, int, int]:
    """Return row and column of a pixel that is as far from the edge of a region as any, and how far that is.

    >>> region = torch.zeros(5, 7, dtype=torch.bool)
    >>> region[1:4, 2:5] = True
    >>> middle_of(region)
    (2, 3, 1)
    """
    now, depth = region.float(), -1
    while bool(now.any()):
        last, depth = now, depth + 1
        now = -F.max_pool2d(-F.pad(now, [1] * 4)[None, None], 3, stride=1)[0, 0]
    row, column = torch.nonzero(last)[0].tolist()
    return row, column, depth


def smooth(values: Tensor, size: int = SMOOTHED) -> Tensor:
    """Return the mean over a square around each pixel, as far as the picture goes.

    >>> smooth(torch.tensor([[0.0, 3.0, 0.0]]), 3)
    tensor([[1.5000, 1.0000, 1.5000]])
    """
    return F.avg_pool2d(values[None, None], size, stride=1, padding=size // 2, count_include_pad=False)[0, 0]


def look(network: nn.Module, name: str, points: Tensor) -> Section:
    """Run a network on every point of a plane."""
    labels = torch.zeros(len(points), dtype=torch.long)
    logits, _ = predict(network, Batches(Split(points, labels), 500))
    confidence, classes = F.softmax(logits.double(), 1).max(1)
    side = round(len(points) ** 0.5)
    return Section(
        name,
        tuple(tuple(int(c) for c in row) for row in classes.reshape(side, side)),
        tuple(floats(row.mul(1e4).round().div(1e4)) for row in confidence.reshape(side, side)),
    )


def fitting_reach(network: nn.Module, center: Tensor, basis: Tensor, typical: float) -> float:
    """Return how far to go: on and on while within half the distance most points are of the image's own class."""
    reach = FACTORS[0] * typical
    for farther in (factor * typical for factor in FACTORS):
        inner = torch.tensor(look(network, "", plane_points(center, basis, farther / 2, COARSE)).classes)
        if float((inner == inner[COARSE // 2, COARSE // 2]).double().mean()) < FILLED:
            break
        reach = farther
    return reach


def measure(request: Request) -> list[Plane]:
    """Choose the images by what the networks make of them, and look at a plane through each."""
    runs, dataset = request.load(pair=True)
    nets = [quantized(run.model, dataset) for run in runs]
    widths = ((32, 32), (request.bits.weights, request.bits.activations))
    bits = str(request.bits)
    names = [f"{run.label}, {'float' if index == 0 else bits}" for run in runs for index in range(2)]
    advance = request.start("networks", 3 * len(names))
    right = []
    for net in nets:
        for weights, activations in widths:
            with net.at(weights=weights, activations=activations):
                logits, labels = predict(net, Batches(dataset.test, 500))
            right.append(logits.argmax(1) == labels)
            advance(1)
    generator = torch.Generator().manual_seed(request.seed)
    wanted = {ALL_RIGHT: [True, True, True, True], SAVED: [True, False, True, True]}
    planes = []
    for case, pattern in wanted.items():
        example = choose(torch.stack(right), torch.tensor(pattern), generator)
        if example is not None:
            planes.append(_plane(case, example, dataset, nets, names, widths, generator))
        advance(len(names))
    if not planes:
        raise DataError("no test example is classified right by all four networks; take runs that learned more")
    return planes


def _plane(
    case: str,
    example: int,
    dataset: Dataset,
    nets: Sequence[Any],
    names: Sequence[str],
    widths: Sequence[tuple[int, int]],
    generator: torch.Generator,
) -> Plane:
    (inputs, labels), basis = dataset.test.tensors(), directions(dataset.shape, generator)
    typical = float(torch.linalg.vector_norm((inputs - inputs.mean(0)).flatten(1), dim=1).median())
    reach = fitting_reach(nets[0], inputs[example], basis, typical)
    points = plane_points(inputs[example], basis, reach, SIDE)
    sections: list[Section] = []
    for net in nets:
        for weights, activations in widths:
            with net.at(weights=weights, activations=activations):
                sections.append(look(net, names[len(sections)], points))
    label = dataset.classes[int(labels[example])]
    return Plane(case, example, label, reach, dataset.classes, tuple(sections))


def draw(figure: Figure, planes: list[Plane]) -> None:
    """Draw one row per image and one panel per network, every region with the name of its class."""
    figure.set_size_inches(12.0, 3.5 * len(planes))
    rows = figure.subplots(len(planes), len(planes[0].sections), squeeze=False)
    for panels, plane in zip(rows, planes, strict=True):
        for axes, section in zip(panels, plane.sections, strict=True):
            _panel(axes, plane, section, _shades(plane))
        panels[0].set_ylabel(f"image of class “{plane.label}”:\n{plane.case}".replace(" without", "\nwithout"))
    figure.supxlabel(
        "distance from the image along a random direction; lines: largest probability 0.5 (dashed) and 0.9", fontsize=11
    )


def _panel(axes: Axes, plane: Plane, section: Section, shades: Any) -> None:
    from matplotlib.colors import ListedColormap

    reach, last = plane.reach, len(plane.names) - 0.5
    place: dict[str, Any] = {"origin": "lower", "extent": (-reach, reach, -reach, reach)}
    axes.imshow(section.classes, cmap=ListedColormap(shades), vmin=-0.5, vmax=last, **place)
    confidence = smooth(torch.tensor(section.confidence)).numpy()
    axes.contour(confidence, CONTOURS, colors="black", linewidths=(0.8, 1.4), linestyles=("--", "-"), **place)
    axes.plot(0, 0, marker="o", color="black", markersize=6, markeredgecolor="white")
    _name_regions(axes, plane, torch.tensor(section.classes))
    axes.set_title(title(section.network), fontsize=11)
    axes.set(xticks=[-reach, 0, reach], yticks=[], xticklabels=[f"{-reach:.3g}", "0", f"{reach:.3g}"])
    axes.grid(visible=False)


def _name_regions(axes: Axes, plane: Plane, classes: Tensor) -> None:
    side = len(classes)
    away = (torch.arange(side) - side // 2).abs()
    clear = torch.maximum(away[:, None], away) > CLEAR
    for index in sorted(set(classes.flatten().tolist())):
        if not bool((region := (classes == index) & clear).any()):
            continue
        row, column, depth = middle_of(region)
        if depth >= NAMED:
            x, y = (plane.reach * (2 * i / (side - 1) - 1) for i in (column, row))
            side_of = "left" if x < -plane.reach / 2 else "right" if x > plane.reach / 2 else "center"
            text = axes.text(x, y, plane.names[index], ha=side_of, va="center", fontsize=10)
            text.set_bbox({"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1.5})


def _shades(plane: Plane) -> Any:
    """Return a color for each class, those in sight spread from dark to light."""
    from matplotlib import colormaps

    seen = sorted({index for section in plane.sections for row in section.classes for index in row})
    level = {index: 0.3 + 0.65 * place / max(1, len(seen) - 1) for place, index in enumerate(seen)}
    return colormaps["cividis"]([level.get(index, 0.0) for index in range(len(plane.names))])
