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

TRUST = 0.7
"""How far weights follow the inputs' own error, as far as that is no chance: at 1 they fit what inputs happen to do."""

PIECES = 4
"""Parts that the rows of one batch are looked at in, to tell what they have in common from chance."""

BLOCK = 64
"""Inputs of a kernel that are dealt with before the rest hears of it."""

ROUNDS = 6
"""Passes of coordinate descent; later ones move next to nothing."""

PARTS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.5)
"""Parts of a range that are tried as the range."""


@dataclass(frozen=True, eq=False)
class Sums:
    """What rounding goes by: `h = x'x` and `cross = (y - x)'x` over the rows of a layer's input, by group."""

    h: Floats
    cross: Floats

    def damped(self) -> Floats:
        """Return H with a little added to its diagonal."""
        h = np.array(self.h, np.float32)
        diagonal = np.einsum("gii->gi", h)
        diagonal += DAMPING * diagonal.mean(1, keepdims=True) + np.float32(1e-12)
        return h


@dataclass
class Seen:
    """Sums over the rows of a layer's input, about the mean `base` of the first ones, piece by piece.

    `squares` sums the squares of what each piece adds to `h`, and so tells how sure that is.
    """

    h: Any = 0.0
    squares: Any = 0.0
    cross: Any = 0.0
    x: Any = 0.0
    off: Any = 0.0
    base: Any = None
    count: int = 0
    pieces: int = 0

    def add(self, x: Floats, y: Floats) -> None:
        """Look at rows (group, row, input) as they are in the quantized network and in floating point."""
        if self.base is None:
            self.base = x.mean(1, keepdims=True)
        near, off = x - self.base, y - x
        for piece in np.array_split(near, min(PIECES, x.shape[1]), axis=1):
            h = piece.swapaxes(1, 2) @ piece
            self.h = self.h + h
            self.squares = self.squares + h * h
            self.pieces += 1
        self.cross = self.cross + off.swapaxes(1, 2) @ near
        self.x = self.x + near.sum(1, keepdims=True, dtype=np.float64)
        self.off = self.off + off.sum(1, keepdims=True, dtype=np.float64)
        self.count += x.shape[1]

    @property
    def means(self) -> tuple[Any, Any]:
        """The mean row in the quantized network, and by how much that in floating point is larger (group, 1, input)."""
        return self.base + self.x / self.count, self.off / self.count

    def doubt(self) -> Any:
        """Return for each group how much of what inputs have in common is chance, from 0 to 1.

        The pieces are samples of H; the part of their spread in the squares of its entries off the diagonal is what
        correlations shrink by (Schäfer and Strimmer, 2005).
        """
        scale = 1 / np.maximum(np.einsum("gii->gi", self.h), 1e-30)
        spread = np.maximum(self.squares - self.h * self.h / self.pieces, 0) * (self.pieces / max(1, self.pieces - 1))
        parts = (np.einsum("gij,gi,gj->g", _off_diagonal(m), scale, scale) for m in (spread, self.h * self.h))
        chance, whole = parts
        return np.clip(np.where(whole > 0, chance / np.maximum(whole, 1e-30), 0), 0, 1)[:, None, None]

    @classmethod
    def of(cls, parts: list[Seen], *, centred: bool) -> Sums:
        """Return the sums of several together; about their means, if biases take care of those."""
        total = [0.0, 0.0]
        for part in parts:
            moved, sure = part.x / part.count, 1 - part.doubt()
            mean, off = part.means
            h = part.h - part.count * moved.swapaxes(1, 2) * moved
            h = np.where(np.eye(h.shape[1], dtype=bool), h, sure * h)
            cross = sure * (part.cross - part.count * off.swapaxes(1, 2) * moved)
            if not centred:
                h = h + part.count * mean.swapaxes(1, 2) * mean
                cross = cross + part.count * off.swapaxes(1, 2) * mean
            total = [total[0] + h, total[1] + cross]
        return Sums(*(np.asarray(v, np.float32) for v in total))

    def shift(self, exact: Floats, kernels: Floats) -> Floats:
        """Return what the mean of each output lacks if a layer's weight is `kernels` instead of `exact`."""
        mean, off = self.means
        found = np.einsum("gok,gk->go", exact - kernels, mean[:, 0]) + np.einsum("gok,gk->go", exact, off[:, 0])
        return np.asarray(found.reshape(-1), np.float32)


def _off_diagonal(matrices: Any) -> Any:
    return np.where(np.eye(matrices.shape[1], dtype=bool), 0, matrices)


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


def round_weight(weight: Floats, how: Weight, bits: int, seen: Sums, *, stacked: bool = False) -> Found:
    """Return the codes of a weight that change the layer's output least."""
    exact = grouped(weight, how, stacked=stacked)
    h = seen.damped()
    pull = np.linalg.solve(h, np.swapaxes(exact @ seen.cross, 1, 2))
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
