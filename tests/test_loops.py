"""The two-pass engine in every kind of training loop, and what it leaves behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_gradient import flat, grads, penalty_gradient, unchanged
from together import script_together
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anybit.errors import NonFiniteError, PenaltyError
from anybit.objectives.gradient import GradientPenalty
from anybit.objectives.kurtosis import KurtosisPenalty
from anybit.objectives.noise import UniformNoise

STRONG = {"weight": 1e-2, "activation": 1e-2}


class Net(nn.Module):
    """Convolutions with and without batch norm, dropout, pooling by maximum."""

    def __init__(self, norm: bool = True, drop: float = 0.0) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6) if norm else nn.Identity()
        self.drop = nn.Dropout(drop)
        self.head = nn.Linear(6 * 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.a(x))), 2)
        return self.head(self.drop(F.relu(self.b(x))).flatten(1))


def batch(n: int = 16, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 1, 8, 8, generator=generator), torch.arange(n) % 4


def loss_of(model: nn.Module, n: int = 16, seed: int = 0) -> Callable[[], Tensor]:
    x, y = batch(n, seed)
    return lambda: F.cross_entropy(model(x), y)


def close(a: Tensor, b: Tensor, tolerance: float = 2e-3) -> None:
    """Equal up to what a finite difference in float32 leaves."""
    assert float((a - b).norm()) <= tolerance * float(b.norm()), float((a - b).norm() / b.norm())


def test_gradient_accumulation_adds_up() -> None:
    torch.manual_seed(0)
    model = Net(norm=False)
    parts = []
    for seed in range(3):
        model.zero_grad()
        GradientPenalty(model, **STRONG).backward(loss_of(model, seed=seed))
        parts.append(flat(grads(model)))
    model.zero_grad()
    penalty = GradientPenalty(model, **STRONG)
    for seed in range(3):
        penalty.backward(loss_of(model, seed=seed))
    torch.testing.assert_close(flat(grads(model)), sum(parts), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("settings", [{}, {"scale": "range"}, {"objective": "worst-case"}], ids=str)
def test_a_batch_in_parts_has_the_gradient_of_the_whole(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Net(norm=False)
    x, y = batch(15)
    whole = GradientPenalty(model, **STRONG, **settings).backward(lambda: F.cross_entropy(model(x), y))
    wanted = flat(grads(model))
    model.zero_grad()
    sizes, parts = [7, 4, 4], []
    for part, labels in zip(x.split(sizes), y.split(sizes), strict=True):
        parts.append(lambda a=part, b=labels: F.cross_entropy(model(a), b) * (len(a) / 15))
    step = GradientPenalty(model, **STRONG, **settings).backward(parts)
    assert step.loss == pytest.approx(whole.loss, rel=1e-5)
    assert step.weight_norm == pytest.approx(whole.weight_norm, rel=1e-4)
    assert step.activation_norm == pytest.approx(whole.activation_norm, rel=1e-4)
    if "scale" not in settings:  # there the range of an activation is that of its part
        close(flat(grads(model)), wanted)


def test_parts_see_one_step_of_everything_else() -> None:
    torch.manual_seed(0)
    model = Net(drop=0.5)
    parts = [loss_of(model, seed=seed) for seed in range(2)]
    penalty = GradientPenalty(model, **STRONG) + KurtosisPenalty(model, strength=0.1) + UniformNoise(model)
    before = {name: value.clone() for name, value in model.named_parameters()}
    step = penalty.backward(parts)
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    assert int(model.norm.num_batches_tracked) == 2  # once for each part
    assert set(step.terms) == {"kurtosis"}
    for bad in ([], [1.0], 1.0):
        with pytest.raises(PenaltyError, match="takes a function that returns the loss, or a list"):
            penalty.backward(bad)  # type: ignore[arg-type]
    with pytest.raises(PenaltyError, match="double backward takes a batch at once"):
        GradientPenalty(model, **STRONG, engine="double-backward").backward(parts)


def test_clipping_sees_the_whole_gradient() -> None:
    torch.manual_seed(0)
    model = Net()
    GradientPenalty(model, **STRONG).backward(loss_of(model))
    whole = flat(grads(model))
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert float(norm) == pytest.approx(float(whole.norm()), rel=1e-5)
    torch.testing.assert_close(flat(grads(model)), whole * 0.1 / (whole.norm() + 1e-6), rtol=1e-4, atol=1e-7)


OPTIMIZERS = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad]


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda o: o.__name__)
def test_any_optimizer_trains_the_objective_down(kind: type[torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = kind(model.parameters(), lr=0.2 if kind is torch.optim.SGD else 1e-2)  # type: ignore[call-arg]
    penalty = GradientPenalty(model, weight=1e-3, activation=1e-3)
    closure = loss_of(model)
    seen = []
    for _ in range(25):
        step = penalty.backward(closure)
        seen.append(step.loss + 1e-3 * (step.weight_norm + (step.activation_norm or 0.0)))
        optimizer.step()
        optimizer.zero_grad()
    assert min(seen[-5:]) < 0.7 * seen[0]


def test_lbfgs_calls_it_as_a_closure() -> None:
    torch.manual_seed(0)
    model = Net(norm=False)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    penalty = GradientPenalty(model, weight=1e-4)
    closure = loss_of(model)

    def evaluate() -> float:
        optimizer.zero_grad()
        return penalty.backward(closure).loss

    before = float(closure().detach())
    for _ in range(3):
        optimizer.step(evaluate)  # type: ignore[arg-type]
    assert float(closure().detach()) < before


def test_frozen_parameters_get_no_gradient_and_the_others_theirs() -> None:
    torch.manual_seed(0)
    model = Net()
    for parameter in (*model.a.parameters(), *model.norm.parameters()):
        parameter.requires_grad_(False)
    closure = loss_of(model)
    a = penalty_gradient(model, closure, **STRONG, engine="double-backward")
    b = penalty_gradient(model, closure, **STRONG)
    close(b, a)
    assert model.a.weight.grad is None
    assert model.b.weight.grad is not None


def test_a_model_frozen_but_for_its_head_still_feels_its_activations() -> None:
    torch.manual_seed(0)
    model = Net()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head"))
    closure = loss_of(model)
    a = penalty_gradient(model, closure, activation=0.1, engine="double-backward")
    close(penalty_gradient(model, closure, activation=0.1), a)
    assert float(a.norm()) > 0


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(torch.tanh(self.mix(self.embed(tokens))))))


def test_tied_weights_are_shifted_once() -> None:
    torch.manual_seed(0)
    model = Tied()
    tokens = torch.randint(0, 11, (6, 5))
    closure = lambda: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())  # noqa: E731
    penalty = GradientPenalty(model, **STRONG)
    assert len(penalty.weights) == 2
    close(
        penalty_gradient(model, closure, **STRONG),
        penalty_gradient(model, closure, **STRONG, engine="double-backward"),
    )


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(3, 3)


def test_parameters_that_the_loss_does_not_reach_stay_without_gradient() -> None:
    torch.manual_seed(0)
    model = Unused()
    GradientPenalty(model, **STRONG).backward(loss_of(model))
    assert model.extra.weight.grad is None
    assert model.a.weight.grad is not None


class Checkpointed(Net):
    """The same network, parts of which are computed again in the backward pass."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda t: F.max_pool2d(F.relu(self.norm(self.a(t))), 2), x, use_reentrant=self.reentrant)
        x = checkpoint(lambda t: F.hardswish(F.relu(self.b(t))), x, use_reentrant=self.reentrant)
        return self.head(F.gelu(x).flatten(1))


class NotCheckpointed(Checkpointed):
    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.a(x))), 2)
        return self.head(F.gelu(F.hardswish(F.relu(self.b(x)))).flatten(1))


def test_gradient_checkpointing_changes_nothing() -> None:
    torch.manual_seed(0)
    model = NotCheckpointed()
    same = Checkpointed()
    same.load_state_dict(model.state_dict())
    want = penalty_gradient(model, loss_of(model), **STRONG)
    got = penalty_gradient(same, loss_of(same), **STRONG)
    assert float(want.norm()) > 0
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def test_reentrant_checkpointing_is_refused_not_wrong() -> None:
    model = Checkpointed()
    model.reentrant = True
    x, y = batch()
    closure = lambda: F.cross_entropy(model(x.requires_grad_()), y)  # noqa: E731
    with pytest.raises(PenaltyError, match="use_reentrant=False"):
        GradientPenalty(model, **STRONG).backward(closure)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
def test_compiled_models_give_the_same_gradient() -> None:
    torch.manual_seed(0)
    model = Net()
    want = penalty_gradient(model, loss_of(model), **STRONG)
    compiled = torch.compile(model, backend="aot_eager")
    closure = loss_of(compiled)
    closure().backward()  # compiled before the penalty comes
    got = penalty_gradient(compiled, closure, **STRONG)
    close(got, want)
    assert list(GradientPenalty(compiled, **STRONG).weights) == [
        f"_orig_mod.{name}" for name in GradientPenalty(model, **STRONG).weights
    ]


@pytest.mark.parametrize("outside", [False, True], ids=["autocast inside", "autocast outside"])
def test_bfloat16_autocast(outside: bool) -> None:
    """A difference of two passes is refused, the exact engine and the worst case work, around the closure or in it."""
    torch.manual_seed(0)
    model = Net()
    x, y = batch(64)
    mixed = lambda: torch.autocast("cpu", dtype=torch.bfloat16)  # noqa: E731

    def closure() -> Tensor:
        with contextlib.nullcontext() if outside else mixed():
            return F.cross_entropy(model(x), y)

    with mixed() if outside else contextlib.nullcontext():
        with pytest.raises(PenaltyError, match="computes in bfloat16, too few digits"):
            GradientPenalty(model, **STRONG).backward(closure)
        assert all(p.grad is None for p in model.parameters())
        exact = penalty_gradient(model, closure, **STRONG, engine="double-backward")
        worst = penalty_gradient(model, closure, weight=1e-2, objective="worst-case")
    full = penalty_gradient(model, loss_of(model, 64), **STRONG, engine="double-backward")
    assert float(F.cosine_similarity(exact, full, 0)) > 0.9
    worst_full = penalty_gradient(model, loss_of(model, 64), weight=1e-2, objective="worst-case")
    assert float(F.cosine_similarity(worst, worst_full, 0)) > 0.9


def test_a_gradient_scaler_scales_everything_alike() -> None:
    torch.manual_seed(0)
    model = Net()
    closure = loss_of(model)
    plain = GradientPenalty(model, **STRONG).backward(closure)
    want = flat(grads(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for engine in ("two-pass", "double-backward"):
        model.zero_grad()
        step = GradientPenalty(model, **STRONG, engine=engine).backward(closure, scaler=scaler)  # type: ignore[arg-type]
        assert step.weight_norm == pytest.approx(plain.weight_norm, rel=1e-4)
        close(flat(grads(model)) / 2.0**10, want)
        scaler.unscale_(optimizer)
        close(flat(grads(model)), want)
        scaler.step(optimizer)
        scaler.update()


def test_overflow_under_a_scaler_is_left_to_the_scaler() -> None:
    model = nn.Linear(2, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.detach().clone()
    penalty = GradientPenalty(model, weight=0.1)
    penalty.backward(lambda: (model(torch.full((1, 2), 1e3))).sum(), scaler=scaler)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, before)
    assert scaler.get_scale() < 2.0**126


# State


def test_a_step_moves_statistics_once_and_random_numbers_as_a_plain_step_does() -> None:
    torch.manual_seed(0)
    one, two = Net(drop=0.5), Net(drop=0.5)
    two.load_state_dict(one.state_dict())
    results = []
    for model, run in (
        (one, lambda m: loss_of(m)().backward()),
        (two, lambda m: GradientPenalty(m, **STRONG).backward(loss_of(m))),
    ):
        torch.manual_seed(3)
        weights = {k: v.clone() for k, v in model.named_parameters()}
        run(model)
        assert all(torch.equal(v, weights[k]) for k, v in model.named_parameters())
        results.append((dict(model.named_buffers()), torch.get_rng_state()))
    for name, value in results[0][0].items():
        assert torch.equal(value, results[1][0][name]), name
    assert torch.equal(results[0][1], results[1][1])
    assert int(two.norm.num_batches_tracked) == 1


def test_dropout_sees_one_mask_in_both_passes() -> None:
    torch.manual_seed(0)
    model = Net(drop=0.5)
    masks = []
    model.drop.register_forward_hook(lambda module, args, out: masks.append((out == 0) & (args[0] != 0)))
    GradientPenalty(model, weight=1e-3).backward(loss_of(model))
    assert len(masks) == 2
    assert torch.equal(masks[0], masks[1])
    assert bool(masks[0].any())


def test_no_hook_and_no_mode_stays_behind() -> None:
    torch.manual_seed(0)
    model = Net()
    GradientPenalty(model, **STRONG).backward(loss_of(model))
    assert all(not m._forward_hooks and not m._backward_hooks for m in model.modules())
    assert all(not p._backward_hooks for p in model.parameters())
    assert torch.overrides._get_current_function_mode_stack() == []


class Stop(Exception):  # noqa: N818
    pass


@pytest.mark.parametrize("where", range(10))
@pytest.mark.parametrize("which", [1, 2], ids=["first pass", "second pass"])
def test_an_error_at_any_point_leaves_weights_gradients_and_modes_as_they_were(where: int, which: int) -> None:
    """Raise in the forward pass before or after each layer, in the loss, or in the backward pass, of either pass."""
    torch.manual_seed(0)
    model = Net(drop=0.5)
    GradientPenalty(model, weight=0.0).backward(loss_of(model))
    weights = {k: v.clone() for k, v in model.named_parameters()}
    before = flat(grads(model))
    x, y = batch()
    calls = {"pass": 0}
    places = [model.a, model.norm, model.b, model.drop]

    def fail(*_: object) -> None:
        if calls["pass"] == which:
            raise Stop

    handles = []
    if where < 4:
        handles.append(places[where].register_forward_pre_hook(fail))
    elif where < 8:
        handles.append(places[where - 4].register_forward_hook(fail))

    def closure() -> Tensor:
        calls["pass"] += 1
        out = model(x)
        if where == 8:
            fail()
        if where == 9:
            out.register_hook(fail)
        return F.cross_entropy(out, y)

    statistics = []
    model.norm.register_forward_hook(lambda *_: statistics.append({k: v.clone() for k, v in model.named_buffers()}))
    with pytest.raises(Stop):
        GradientPenalty(model, **STRONG).backward(closure)
    assert calls["pass"] == which
    assert all(torch.equal(v, weights[k]) for k, v in model.named_parameters())
    assert torch.equal(flat(grads(model)), before)
    assert torch.overrides._get_current_function_mode_stack() == []
    if which == 2:  # the first pass was a whole one: its statistics stay, the second's do not
        assert all(torch.equal(v, statistics[0][k]) for k, v in model.named_buffers())
    for handle in handles:
        handle.remove()
    GradientPenalty(model, **STRONG).backward(lambda: F.cross_entropy(model(x), y))  # and it still works


def test_a_shifted_loss_that_overflows_is_reported() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        return (model(torch.ones(1, 1)) * (1.0 if len(calls) == 1 else float("inf"))).sum()

    with pytest.raises(NonFiniteError, match="the shifted loss is inf"):
        GradientPenalty(model, weight=0.1).backward(closure)
    assert model.weight.item() == 1.0
    assert model.weight.grad is None


def test_evaluation_between_steps_is_untouched() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    with unchanged(model):
        GradientPenalty(model, **STRONG).check(loss_of(model))


# Several processes

WORKER = """
import contextlib, sys, torch, torch.distributed as dist, torch.nn.functional as F
from test_loops import Net, batch
from test_gradient import flat, grads
from torch.nn.parallel import DistributedDataParallel
from anybit.objectives.gradient import GradientPenalty

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
results = {{}}
for norm in (False, True):
    for view in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(Net(norm=norm), gradient_as_bucket_view=view)
        x, y = batch(16)
        x, y = x[rank::world], y[rank::world]
        penalty = GradientPenalty(model, weight=1e-2, activation=1e-2)
        step = penalty.backward(lambda: F.cross_entropy(model(x), y))
        buffers = torch.cat([b.flatten().double() for b in model.buffers()]) if norm else torch.zeros(1)
        results[norm, view] = (flat(grads(model.module)), step.loss, step.weight_norm, step.activation_norm, buffers)
for view in (False, True):
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(norm=False), gradient_as_bucket_view=view)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    penalty = GradientPenalty(model, weight=1e-2, activation=1e-2)
    for index in range(3):  # two parts each; the first stays in the process, the second is averaged with it
        optimizer.zero_grad()
        for part in range(2):
            x, y = batch(16, seed=2 * index + part)
            x, y = x[rank::world] * (1 + 3 * rank), y[rank::world]
            with model.no_sync() if part == 0 else contextlib.nullcontext():
                penalty.backward(lambda: F.cross_entropy(model(x), y) / 2)
        results["steps", view, index] = flat(grads(model.module))
        optimizer.step()
if rank == 0:
    torch.save(results, {out!r})
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_give_the_gradient_of_one(tmp_path: Path) -> None:
    """Half the batch each, signs from the gradient over both: without batch norm the result is that of the whole batch.

    With batch norm each process normalizes its own half, as DDP does without SyncBatchNorm: then the result is the
    mean over the halves, with the signs of the weights' gradient taken from that mean.
    """
    script_together(tmp_path, WORKER.format(out=str(tmp_path / "out.pt")))
    results = torch.load(tmp_path / "out.pt", weights_only=True)
    torch.manual_seed(0)
    model = Net(norm=False)
    step = GradientPenalty(model, weight=1e-2, activation=1e-2).backward(loss_of(model, 16))
    want = flat(grads(model))
    for view in (False, True):
        gradient, loss, weight_norm, _, _ = results[False, view]
        close(gradient, want, 1e-3)
        assert weight_norm == pytest.approx(step.weight_norm, rel=1e-4)  # the norm of the global gradient
        assert loss != pytest.approx(step.loss, rel=1e-6)  # the loss of the process's own half
    torch.manual_seed(0)
    model = Net(norm=True)
    close(results[True, False][0], _per_process(model), 2e-3)
    torch.testing.assert_close(results[True, True][0], results[True, False][0], rtol=1e-5, atol=1e-6)
    for view in (False, True):
        for index, want in enumerate(_accumulated()):
            close(results["steps", view, index], want, 5e-3)


def _accumulated() -> Iterator[Tensor]:
    """The steps of the second half of the script in one process, by double backward.

    The part under `no_sync` is penalized in each process by itself; the other one by the signs of both together.
    """
    torch.manual_seed(0)
    model = Net(norm=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    penalty = GradientPenalty(model, weight=1e-2, activation=1e-2, engine="double-backward")
    for index in range(3):
        losses = []
        for part in range(2):
            x, y = batch(16, seed=2 * index + part)
            losses.append(
                [lambda x=x[r::2] * (1 + 3 * r), y=y[r::2]: F.cross_entropy(model(x), y) / 2 for r in range(2)]
            )
        optimizer.zero_grad()
        for alone in losses[0]:
            penalty.backward(alone)
        for p in model.parameters():
            p.grad /= 2
        penalty.backward(lambda both=losses[1]: (both[0]() + both[1]()) / 2)
        yield flat(grads(model))
        optimizer.step()


def _per_process(model: nn.Module) -> Tensor:
    """What the docstring above says, by double backward: one graph over both halves, each normalized by itself."""
    x, y = batch(16)

    def closure() -> Tensor:
        halves = [F.cross_entropy(model(x[rank::2]), y[rank::2]) for rank in range(2)]
        return (halves[0] + halves[1]) / 2

    GradientPenalty(model, weight=1e-2, activation=1e-2, engine="double-backward").backward(closure)
    return flat(grads(model))
