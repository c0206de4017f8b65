"""What each output of a layer is a product of: the inputs that its kernel sees, as rows of a matrix.

A weight as (output channel, input channel of its group, tap) times these rows is the layer's output without its bias.
Of large layers some rows are drawn: every row costs as much as it tells.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Windows:
    """How a convolution goes over its input; `kernel` is empty for products with a matrix.

    `begin` and `end` are how far the input is padded, `spread` is the stride of a transposed convolution, which goes
    over its input with zeros in between and its kernel turned around.
    """

    kernel: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()
    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    spread: tuple[int, ...] = ()
    groups: int = 1

    def rows(self, x: Floats, most: int, draw: np.random.Generator) -> Floats:
        """Return up to `most` rows (group, row, input channel of the group times taps), drawn if there are more.

        >>> x = np.arange(4, dtype=np.float32).reshape(1, 1, 4)
        >>> Windows((2,), (1,), (1,), (1,), (0,)).rows(x, 9, np.random.default_rng(0))[0].tolist()
        [[0.0, 0.0], [0.0, 1.0], [1.0, 2.0], [2.0, 3.0]]
        """
        if not self.kernel:
            flat = x.reshape(-1, x.shape[-1])
            return flat[_some(len(flat), most, draw)][None]
        views = self._views(x)
        rank = len(self.kernel)
        places = (views.shape[0], *views.shape[2 : 2 + rank])
        chosen = np.unravel_index(_some(math.prod(places), most, draw), places)
        found = views[(chosen[0], slice(None), *chosen[1:])]  # (row, channel, *kernel)
        if self.spread:
            found = found[(slice(None), slice(None), *[slice(None, None, -1)] * rank)]
        found = found.reshape(len(found), self.groups, -1)
        return np.ascontiguousarray(found.swapaxes(0, 1), np.float32)

    def _views(self, x: Floats) -> Any:
        """Return the input as (image, channel, *place, *kernel), without copying what kernels share."""
        rank = len(self.kernel)
        if self.spread:
            sizes = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], self.spread, strict=True)]
            wide = np.zeros((*x.shape[:2], *sizes), np.float32)
            wide[(slice(None), slice(None), *(slice(None, None, s) for s in self.spread))] = x
            x = wide
        sides = list(zip(self.begin, self.end, strict=True))
        x = np.pad(x, [(0, 0), (0, 0), *((max(b, 0), max(e, 0)) for b, e in sides)])
        cut = [slice(max(-b, 0), x.shape[2 + i] - max(-e, 0)) for i, (b, e) in enumerate(sides)]
        x = x[(slice(None), slice(None), *cut)]
        reach = tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))
        views = np.lib.stride_tricks.sliding_window_view(x, reach, axis=tuple(range(2, 2 + rank)))
        steps = [slice(None, None, s) for s in self.strides]
        taps = [slice(None, None, d) for d in self.dilations]
        return views[(slice(None), slice(None), *steps, *taps)]


def _some(count: int, most: int, draw: np.random.Generator) -> npt.NDArray[np.intp]:
    return np.arange(count) if count <= most else np.sort(draw.choice(count, most, replace=False))
