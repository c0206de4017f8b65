"""What all pictures share: a style that is readable in grey, and how a figure gets to disk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from anybit.common.files import replacing
from anybit.errors import FileError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")

COLORS = ("#1f3b73", "#d9822b", "#3a8f5c", "#8c4a86")
"""From dark to light and back: neighbours differ in grey too."""
MARKERS = ("o", "^", "s", "D")
LINES = ("-", "--", ":", "-.")
HATCHES = ("", "////", "....", "xxxx")

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.labelsize": 11,
    "legend.fontsize": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": True,
    "legend.framealpha": 0.9,
    "legend.edgecolor": "#cccccc",
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.hashsalt": "anybit",
    "svg.fonttype": "path",
}
DPI = 150

SINGLE, PANEL = 6.4, 4.8
"""Inches that one panel takes alone, and beside others."""


@contextlib.contextmanager
def canvas(width: float = 6.4, height: float = 4.4) -> Iterator[Figure]:
    """Give an empty figure, in inches, with the style switched on; needs matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure as Empty
    except ImportError as error:
        raise FileError("a figure needs matplotlib: pip install -r paper/requirements.txt") from error
    # A figure made without pyplot draws with Agg, opens no window and leaves no state behind.
    with matplotlib.rc_context(STYLE):
        yield Empty(figsize=(width, height), layout="constrained")


SHORT, FEW, MANY = 20.0, (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Up to which ratio a logarithmic axis is short; what a long and a short one have labels at, times powers of ten."""


def plain_log(axes: Axes, *names: Literal["x", "y"]) -> None:
    """Make axes with something on them logarithmic, with plain numbers, more of them where the range is short."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    for name in names:
        axes.set(**{f"{name}scale": "log"})
        axis = axes.xaxis if name == "x" else axes.yaxis
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=FEW if high > SHORT * low else MANY))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())


def panels(figure: Figure, count: int, *, sharex: bool = False, sharey: bool = False) -> list[Axes]:
    """Return so many axes side by side, and make the figure as wide as they need."""
    figure.set_figwidth(max(SINGLE, PANEL * count))
    return list(figure.subplots(1, count, sharex=sharex, sharey=sharey, squeeze=False)[0])


def title(label: str) -> str:
    r"""Return a label on several lines, for a panel that is not wide.

    >>> title("l1 penalty, W4A4")
    'l1 penalty\nW4A4'
    """
    return label.replace(", ", "\n")


def legend_below(axes: Axes, columns: int) -> None:
    """Put the legend under the axes, where it hides nothing."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=columns, frameon=False)


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure in every format; the same figure gives the same bytes."""
    paths = [stem.with_suffix(f".{ending}") for ending in FORMATS]
    for path in paths:
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        with replacing(path) as beside:
            figure.savefig(beside, format=path.suffix[1:], dpi=DPI, metadata=metadata)
    return paths
