"""Rounding that looks at data: of all codes those that change a layer's output least on the inputs it gets.

With rows x of a layer's input in the quantized network (`plan.windows`) and rows y of it in floating point, codes Q are
sought that make `|Q x - W y|²` small. That is `(Q - V) H (Q - V)'` and a constant, with `H = x'x` and V the best weight
in floating point for the inputs as they are now. Two steps, both over one input of the kernel after the other:

1. error feedback (Frantar et al., "GPTQ"): round the inputs in the order of their weight in H, and let those that are
   not rounded yet make up for the error;
2. coordinate descent: move each code to where it is best while all others stay, until nothing moves.

The grid is chosen first: of several parts of the weight's range the one with the least error. What is left of the
output's mean error goes into the bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from anybit.graph.view import by_output
from anybit.plan.codes import limits
from anybit.plan.grid import Grid, min_max, weight_grid
from anybit.plan.points import Weight

Floats = npt.NDArray[np.float32]

DAMPING = 0.02
"""Of the mean of H's diagonal, added to it: inputs that were never seen must not decide anything."""

TRUST = 0.5
"""How far weights follow the inputs' own error: at 1 they fit what a few hundred inputs happen to do."""

NOISE = 1e-5
"""Of what H's diagonal was before means were taken off it, added to it as well."""

BLOCK = 64
"""Inputs of a kernel that are dealt with before the rest hears of it."""

ROUNDS = 6
"""Passes of coordinate descent; later ones move next to nothing."""

PARTS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.5)
"""Parts of a range that are tried as the range."""


@dataclass
class Seen:
    """Sums over the rows of a layer's input: `h = x'x` and `cross = (y - x)'x` by group, and the means of both."""

    h: Any = 0.0
    cross: Any = 0.0
    x: Any = 0.0
    y: Any = 0.0
    count: int = 0
    size: float = 0.0

    def add(self, x: Floats, y: Floats) -> None:
        """Look at rows (group, row, input) as they are in the quantized network and in floating point."""
        across = x.swapaxes(1, 2)
        self.h = self.h + across @ x
        self.cross = self.cross + (y - x).swapaxes(1, 2) @ x
        self.x = self.x + x.sum(1, dtype=np.float64)
        self.y = self.y + y.sum(1, dtype=np.float64)
        self.count += x.shape[1]

    @classmethod
    def of(cls, parts: list[Seen], *, centred: bool) -> Seen:
        """Return the sum of several; about their means, if biases take care of those."""
        total = cls()
        for part in parts:
            mean = [v[:, :, None] / part.count if centred else np.zeros((1, 1, 1)) for v in (part.x, part.y)]
            x, off = (np.asarray(m, np.float32) for m in (mean[0], mean[1] - mean[0]))
            total.h = total.h + part.h - part.count * x * np.swapaxes(x, 1, 2)
            total.cross = total.cross + part.cross - part.count * off * np.swapaxes(x, 1, 2)
            total.count += part.count
            total.size += float(np.einsum("gii->gi", np.asarray(part.h)).mean())
        return total

    def shift(self, exact: Floats, kernels: Floats) -> Floats:
        """Return what the mean of each output lacks if a layer's weight is `kernels` instead of `exact`."""
        wanted = np.einsum("gok,gk->go", exact, self.y / self.count)
        found = np.einsum("gok,gk->go", kernels, self.x / self.count)
        return np.asarray((wanted - found).reshape(-1), np.float32)

    def damped(self) -> Floats:
        """Return H with a little added to its diagonal."""
        h = np.array(self.h, np.float32)
        diagonal = np.einsum("gii->gi", h)
        # Inputs that never move leave nothing about their means but the noise of subtracting them.
        diagonal += DAMPING * diagonal.mean(1, keepdims=True) + np.float32(NOISE * self.size + 1e-12)
        return h


@dataclass(frozen=True, eq=False)
class Found:
    """Codes of a weight between the ends of a grid, that grid, and the error of the layer's output before and after."""

    codes: Floats
    grid: Grid
    before: float
    after: float


def grouped(weight: Floats, how: Weight, *, stacked: bool = False) -> Floats:
    """Return a weight as (group, output of the group, input of the group times taps); `stacked` ones are that."""
    if stacked:
        return np.ascontiguousarray(weight)
    rows = by_output(weight, how.channels, how.groups)
    return np.ascontiguousarray(rows.reshape(how.groups, len(rows) // how.groups, -1))


def _ungrouped(kernels: Floats, weight: Floats, how: Weight, *, stacked: bool) -> Floats:
    """Undo `grouped`."""
    if how.channels == 0 or stacked:
        return kernels.reshape(weight.shape)
    ins, outs = weight.shape[:2]
    taps = kernels.reshape(how.groups, outs, ins // how.groups, -1)
    return taps.swapaxes(1, 2).reshape(weight.shape)


def round_weight(weight: Floats, how: Weight, bits: int, seen: Seen, *, stacked: bool = False) -> Found:
    """Return the codes of a weight that change the layer's output least."""
    exact = grouped(weight, how, stacked=stacked)
    h = seen.damped()
    pull = np.linalg.solve(h, np.swapaxes(exact @ np.asarray(seen.cross, np.float32), 1, 2))
    target = np.asarray(exact + TRUST * np.swapaxes(pull, 1, 2), np.float32)
    plain = _by_group(weight_grid(*limits(weight, how, bits), how.spec(bits)), how)
    grid = best_grid(weight, how, bits, target, h)
    flat = _by_group(grid, how)
    codes = feed_back(target, flat, h)
    descend(codes, target, flat, h)
    before, after = (
        float(_costs(kernels, target, h).sum())
        for kernels in (_nearest(exact, plain), (codes - flat.zero) * flat.scale)
    )
    return Found(_ungrouped(codes, weight, how, stacked=stacked), grid, before, after)


def _by_group(grid: Grid, how: Weight) -> Grid:
    """Return a grid whose scale and zero broadcast with a weight by groups."""
    # The groups of a transposed convolution share scales, as the directions of a recurrent cell do.
    groups = how.groups if how.channels == 0 and how.axis is not None else 1
    scale, zero = (np.asarray(v).reshape(groups, -1, 1) for v in grid[:2])
    return Grid(scale, zero, *grid[2:])


def _nearest(kernels: Floats, grid: Grid) -> Floats:
    codes = np.clip(np.rint(kernels / grid.scale) + grid.zero, grid.low, grid.high)
    return np.asarray((codes - grid.zero) * grid.scale, np.float32)


def _costs(kernels: Floats, target: Floats, h: Floats) -> Floats:
    """Return the error of each output (group, output)."""
    error = kernels - target
    return np.asarray(np.einsum("gok,gok->go", error @ h, error))


def best_grid(weight: Floats, how: Weight, bits: int, target: Floats, h: Floats) -> Grid:
    """Return the grid of a weight: for each scale the part of its range with the least error of the output."""
    spec = how.spec(bits)
    low, high = min_max(weight, spec.axis)
    best: Any = None
    least: Any = None
    for part in PARTS:
        grid = weight_grid(low * np.float32(part), high * np.float32(part), spec)
        costs = _costs(_nearest(target, _by_group(grid, how)), target, h)
        if how.axis is None:
            costs = costs.sum().reshape(())
        else:
            costs = costs.reshape(-1) if how.channels == 0 else costs.sum(0)
            costs = costs.reshape(grid.scale.shape)
        if best is None:
            best, least = grid, costs
            continue
        better = costs < least
        least = np.where(better, costs, least)
        scale, zero = (np.where(better, new, old) for new, old in zip(grid[:2], best[:2], strict=True))
        best = Grid(scale, zero, *grid[2:])
    return Grid(best.scale.astype(np.float32), best.zero.astype(np.float32), *best[2:])


def feed_back(target: Floats, grid: Grid, h: Floats) -> Floats:
    """Return codes found by rounding one input after the other, the rest making up for the error."""
    order = np.argsort(-np.einsum("gii->gi", h), axis=1)
    lines = np.arange(len(h))[:, None]
    sorted_h = h[lines[..., None], order[:, :, None], order[:, None, :]]
    # The upper Cholesky factor of the inverse holds, row by row, how each error is passed on.
    inverse = np.linalg.inv(sorted_h.astype(np.float64))
    inverse = (inverse + np.swapaxes(inverse, 1, 2)) / 2
    upper = np.swapaxes(np.linalg.cholesky(inverse), 1, 2).astype(np.float32)
    rest = np.swapaxes(target, 1, 2)[lines, order]  # (group, input, output): an input is a row
    codes = np.empty_like(rest)
    scale, zero = grid.scale[..., 0], grid.zero[..., 0]
    size = rest.shape[1]
    for start in range(0, size, BLOCK):
        stop = min(start + BLOCK, size)
        errors = np.empty_like(rest[:, start:stop])
        for i in range(start, stop):
            row = rest[:, i]
            code = np.clip(np.rint(row / scale) + zero, grid.low, grid.high)
            codes[:, i] = code
            error = (row - (code - zero) * scale) / upper[:, i, i, None]
            errors[:, i - start] = error
            rest[:, i + 1 : stop] -= upper[:, i, i + 1 : stop, None] * error[:, None]
        rest[:, stop:] -= np.swapaxes(upper[:, start:stop, stop:], 1, 2) @ errors
    out = np.empty_like(codes)
    out[lines, order] = codes
    return np.ascontiguousarray(np.swapaxes(out, 1, 2))


def descend(codes: Floats, target: Floats, grid: Grid, h: Floats) -> None:
    """Move codes one after the other to where the error is least, in place."""
    scale = grid.scale[..., 0]
    kernels = np.swapaxes((codes - grid.zero) * grid.scale - target, 1, 2)
    found = np.ascontiguousarray(np.swapaxes(codes, 1, 2))  # (group, input, output)
    slope = h @ np.ascontiguousarray(kernels)
    size = found.shape[1]
    diagonal = np.einsum("gii->gi", h)[..., None]
    for _ in range(ROUNDS):
        moved = False
        for start in range(0, size, BLOCK):
            stop = min(start + BLOCK, size)
            steps = np.zeros_like(found[:, start:stop])
            for i in range(start, stop):
                own = slope[:, i]
                wanted = np.clip(found[:, i] - np.rint(own / (diagonal[:, i] * scale)), grid.low, grid.high)
                step = (wanted - found[:, i]) * scale
                found[:, i] = wanted
                if step.any():
                    steps[:, i - start] = step
                    slope[:, i:stop] += h[:, i:stop, i, None] * step[:, None]
            if steps.any():
                moved = True
                slope[:, stop:] += h[:, stop:, start:stop] @ steps
                slope[:, :start] += h[:, :start, start:stop] @ steps
        if not moved:
            break
    codes[...] = np.swapaxes(found, 1, 2)
