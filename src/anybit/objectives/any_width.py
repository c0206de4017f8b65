"""Training for every width at once: the ordinary pass, and one quantized pass at a width drawn anew each step.

    L(θ)  +  s · E over widths and grids of D(quantized(θ), θ)

The first pass is the user's own. The second runs the network that `prepare` would make of the model as it is right now
(`anybit.simulate.live`), and learns from what the first one said of the same examples: D is the cross-entropy to its
outputs, which count as given, or their squared distance. Gradients go straight through the rounding.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils import _pytree as pytree

from anybit.errors import NonFiniteError, PenaltyError, SpecError
from anybit.objectives.base import FurtherPass, Scaler, Step, check_loss, eagerly, read_numbers
from anybit.objectives.closures import LossOf, split
from anybit.objectives.processes import averaged, synced
from anybit.objectives.restore import add_gradients, buffers_kept, random_state, set_random_state
from anybit.objectives.strength import FAR, Auto, Strength, checked
from anybit.plan.build import Interval, Settings
from anybit.simulate.capture import Example
from anybit.simulate.live import Live
from anybit.spec import Bits

Kind = Literal["classes", "values"]

WIDTHS = ("W8A8", "W6A6", "W4A8", "W4A4", "W3A8", "W3A4", "W3A3", "W8A3")
"""The pairs that steps draw from, each as often."""

USUAL = 100
"""Steps over which the usual length of the loss's gradient is taken."""

START, MOST = 0.25, 0.5
"""The strength that training starts with after a first look, and the most: with a limit of 2 the quantized pass then
adds gradients as long as those of the loss, the most that cost nothing in trials (results/any-width-trials.json)."""


class AnyWidth(FurtherPass):
    """Trains a model for all widths at once, in any training loop, for the time of about two plain steps.

    Args:
        model: The network to train. Wrapped ones (DDP, compiled) are fine.
        example_input: What it is called with, as in `anybit.prepare`.
        strength: What the quantized pass counts beside the loss. "auto" follows the loss in floating point, as
            `anybit.objectives.strength` derives, after 100 plain steps; a number stays.
        loss: The part of the loss in floating point that may be lost, for "auto".
        points: The accuracy that may be lost where that is more, in percent; of outputs that are classes.
        widths: Pairs such as "W4A8" to draw from; one that stands there twice is drawn twice as often.
        outputs: What the closure's outputs are: "classes", scores whose softmax over dimension 1 is a distribution, or
            "values", of which the squared error counts, relative to their variance.
        grids: The presets of `prepare` to draw from, for weights and activations.
        limit: Gradients of the quantized pass are cut to this many times the usual length of those of the loss: at few
            bits they are so long that a single such step undoes many.
        input_range: The interval of the network's input, as in `anybit.prepare`.
        every: After how many steps the ranges of activations follow the model; weights are followed in every step.
        seed: Of the widths and grids that are drawn. The random numbers of PyTorch itself are left alone.

    Attributes:
        factor: Multiplies the strength; set it to follow a schedule, or to 1/k in a loop that divides the loss by k.

    The closure returns the loss, or `(loss, outputs)`; it runs a second time with the same random state, and there
    the model is the quantized one. Without outputs the quantized pass learns from the loss itself.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        >>> x, y = torch.randn(16, 4), torch.zeros(16, dtype=torch.long)
        >>> objective = AnyWidth(model, x, strength=0.5)
        >>> def closure():
        ...     outputs = model(x)
        ...     return F.cross_entropy(outputs, y), outputs
        >>> step = objective.backward(closure)
        >>> sorted(step.terms)
        ['any-width', 'strength']
    """

    name = "any-width"

    def __init__(
        self,
        model: nn.Module,
        example_input: Example,
        *,
        strength: Strength = "auto",
        loss: float = 0.01,
        points: float = 0.3,
        widths: Sequence[str | Bits] = WIDTHS,
        outputs: Kind = "classes",
        grids: Sequence[str] = ("paper", "default"),
        limit: float = 2.0,
        input_range: Interval | Mapping[str, Interval] | None = None,
        every: int = 50,
        seed: int = 0,
    ) -> None:
        checked("strength", strength)
        if outputs not in get_args(Kind):
            raise SpecError(f"outputs are {' or '.join(get_args(Kind))}; got {outputs!r}")
        if not limit > 0 or every < 1 or not points >= 0:
            raise SpecError(
                f"limit is above zero, every one or more, points not negative; {limit=}, {every=}, {points=}"
            )
        if not widths or not grids:
            raise SpecError("there must be a pair of widths and a grid to draw from")
        self.widths = [width if isinstance(width, Bits) else Bits.parse(width) for width in widths]
        self.model, self.outputs, self.limit = model, outputs, limit
        self.auto = Auto(start=START, most=MOST, loss=loss) if strength == "auto" else None
        self._strength = START if strength == "auto" else float(strength)
        settings = [Settings.of(grid, helpers=()) for grid in grids]
        self.live = Live(innermost(model), example_input, settings=settings, input_range=input_range, every=every)
        self.seed, self.points = seed, points
        self._steps = 0
        self._usual, self._longest = 0.0, -FAR

    @property
    def strength(self) -> float:
        """What the quantized pass counts beside the loss right now."""
        return self._strength if self.auto is None else self.auto.value

    def state_dict(self) -> dict[str, float]:
        """Return what a resumed run needs, as plain numbers."""
        auto = {} if self.auto is None else self.auto.state_dict()
        own = {"steps": self._steps, "factor": self.factor, "usual": self._usual, "longest": self._longest}
        return {**own, **auto, **self.live.state_dict()}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from what `state_dict` returned."""
        self._steps, self.factor = int(state["steps"]), float(state["factor"])
        self._usual, self._longest = float(state["usual"]), float(state["longest"])
        if self.auto is not None and "strength" in state:
            self.auto.load_state_dict(state)
        self.live.load_state_dict(state)

    def after(self, parts: Sequence[LossOf], step: Step, scaler: Scaler | None) -> dict[str, float]:
        """Run the quantized pass over what the loss's pass has seen, and add its gradient."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if self.auto is not None and self.outputs == "classes":
            self.auto.nats = self.points / 100 * _guessing(parts[0].outputs)
        strength = self.factor * self.strength
        if not parameters or strength == 0:
            self._follow(step.loss, 0.0)
            return {"strength": strength}
        end = random_state()
        try:
            found, grads = self._quantized_pass(parts, parameters, scaler)
        finally:
            set_random_state(end)
        value, by = self._measured(found, grads, [p.grad for p in parameters], scaler)
        if by:
            add_gradients(parameters, [None if g is None else g.mul_(strength * by) for g in grads])
        self._follow(step.loss, value)
        self._steps += 1
        return {"any-width": value, "strength": strength}

    def _follow(self, loss: float, value: float) -> None:
        """Let the strength follow the loss, if it is to."""
        if self.auto is not None and self.factor:
            self.auto.update(loss=loss, value=value)

    def _quantized_pass(
        self, parts: Sequence[LossOf], parameters: list[nn.Parameter], scaler: Scaler | None
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the loss of the quantized network, and its gradient, scaled if there is a scaler."""
        total: Tensor | None = None
        grads: list[Tensor | None] = [None] * len(parameters)
        counts = [_examples(part.outputs) for part in parts]
        with eagerly(), buffers_kept(self.model), synced(self.model, False), self._drawn() as calls:
            for part, count in zip(parts, counts, strict=True):
                assert part.start is not None
                set_random_state(part.start)
                loss, outputs = split(part.closure())
                if part.outputs is not None:
                    loss = _difference(outputs, part.outputs, self.outputs) * (count / max(1, sum(counts)))
                if not calls:
                    raise PenaltyError(
                        "the closure does not call the model that AnyWidth was built for; build it from that"
                    )
                own = torch.autograd.grad(_scaled(check_loss(loss), scaler), parameters, allow_unused=True)
                grads = [b if a is None else a if b is None else a + b for a, b in zip(grads, own, strict=True)]
                total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total, list(averaged(self.model, grads))

    @contextlib.contextmanager
    def _drawn(self) -> Iterator[list[int]]:
        """Let the model be a quantized one, of a width and a grid drawn at random; give a list of its calls."""
        # A generator of its own for each step: all processes draw the same, and a resumed run what comes next.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self._steps)
        number, grid = (
            int(torch.randint(n, (), generator=generator)) for n in (len(self.widths), len(self.live.variants))
        )
        calls: list[int] = []
        due = self.live.due()
        if due:
            self.live.refresh()

        def forward(*args: Any, **kwargs: Any) -> Any:
            if due and not calls:
                self.live.look(*args, **kwargs)
            calls.append(1)
            self.live.set_width(self.widths[number], grid)
            return self.live(*args, **kwargs)

        model = self.live.model
        before = model.__dict__.get("forward")
        model.__dict__["forward"] = forward
        try:
            yield calls
        finally:
            if before is None:
                del model.__dict__["forward"]
            else:
                model.__dict__["forward"] = before

    def _measured(
        self, value: Tensor, grads: list[Tensor | None], plain: list[Tensor | None], scaler: Scaler | None
    ) -> tuple[float, float]:
        """Return the loss as a number, and what to multiply its gradient by so that it is not too long."""
        lengths = [_length(some, value) for some in (grads, plain)]
        found = read_numbers([value, _scaled(torch.ones_like(value), scaler), *lengths])
        loss, scale, norm, usual = found
        if not math.isfinite(loss) or (scaler is None and not math.isfinite(norm)):
            raise NonFiniteError(
                f"the quantized network's loss is {loss}, its gradient's length {norm}; no gradient was changed. "
                "Lower the learning rate?"
            )
        if not math.isfinite(norm + usual):
            return loss, 1.0  # the scaler sees it and drops the step
        if usual > 0:
            self._usual += (math.log(usual / scale) - self._usual) * max(1 / (self._steps + 1), 1 / USUAL)
            # A loss that is all but learned has gradients near zero, and that is no reason to learn nothing else.
            self._longest = max(self._longest, self._usual)
        return loss, min(1.0, self.limit * math.exp(self._longest) * scale / norm) if norm else 0.0


def innermost(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers that PyTorch puts around one: DDP, compilation."""
    while True:
        inner = model.module if isinstance(model, DataParallel | DistributedDataParallel) else None
        inner = getattr(model, "_orig_mod", None) if inner is None else inner
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _length(grads: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """Return the length of all gradients together, without waiting for the device."""
    parts = [torch.linalg.vector_norm(g.float()) for g in grads if g is not None]
    length: Tensor = torch.linalg.vector_norm(torch.stack(parts)) if parts else like.new_zeros(())
    return length


def _scaled(x: Tensor, scaler: Scaler | None) -> Tensor:
    return x if scaler is None else scaler.scale(x)


def _examples(outputs: Any) -> int:
    """Return how many examples outputs stand for."""
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    return len(leaves[0]) if leaves and leaves[0].dim() else 1


def _guessing(outputs: Any) -> float:
    """Return what guessing among classes costs, in cross-entropy.

    >>> round(_guessing(torch.zeros(4, 10)), 2), _guessing(None)
    (2.3, 0.0)
    """
    scores = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.dim() > 1]
    return math.log(scores[0].shape[1]) if scores else 0.0


def _difference(outputs: Any, given: Any, kind: Kind) -> Tensor:
    """Return how far outputs are from those that are given, summed over all tensors among them."""
    pairs = zip(pytree.tree_leaves(outputs), pytree.tree_leaves(given), strict=True)
    found = [
        (_cross_entropy if kind == "classes" else _relative_error)(own, other.detach())
        for own, other in pairs
        if isinstance(own, Tensor) and own.is_floating_point()
    ]
    if not found:
        raise PenaltyError("the closure's outputs hold no floating-point tensor to learn from; return the loss alone")
    return torch.stack(found).sum()


def _cross_entropy(scores: Tensor, given: Tensor) -> Tensor:
    """Return the cross-entropy to the distribution that the given scores stand for, over dimension 1."""
    if scores.dim() < 2 or scores.shape[1] < 2:
        raise PenaltyError(
            f"outputs of shape {tuple(scores.shape)} are no scores of two or more classes; say outputs='values'"
        )
    return F.cross_entropy(scores.float(), given.float().softmax(1))


def _relative_error(values: Tensor, given: Tensor) -> Tensor:
    """Return the mean squared error relative to the variance of what is given.

    >>> float(_relative_error(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 2.0])))
    1.0
    """
    given = given.float()
    variance = given.var(correction=0).clamp(min=torch.finfo(torch.float32).tiny)
    return F.mse_loss(values.float(), given) / variance
