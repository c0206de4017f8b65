"""The examples run, and each framework hands its optimizer the gradient that a bare loop would."""

from __future__ import annotations

import contextlib
import copy
import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from together import together, warm_torchrun
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset

from anybit.objectives.gradient import GradientPenalty

EXAMPLES = Path(__file__).parents[1] / "examples"
STRENGTH = 0.02
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "enable_progress_bar": False,
}

# PyTorch 2.13 deprecates what Lightning's combined loader asks it, and Lightning would like workers.
lightning_warns = pytest.mark.filterwarnings(
    r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated",
    "ignore:The 'train_dataloader' does not have many workers",
)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The examples as a script sees them, offline, and Accelerate's shared state as new."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    if sys.modules.get("accelerate") is not None:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)


def load(name: str, *needs: str) -> ModuleType:
    """Import an example, or skip the test if what it needs is not installed."""
    for package in needs:
        pytest.importorskip(package, reason=f"{package} is not installed; pip install 'anybit[examples]'")
    return importlib.import_module(name)


@contextlib.contextmanager
def gradients_stepped_with(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the gradient of `model` each time that any optimizer is about to use it."""
    seen: list[Tensor] = []
    handle = register_optimizer_step_pre_hook(lambda *_: seen.append(gradient(model)))
    try:
        yield seen
    finally:
        handle.remove()


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.detach().flatten().clone() for p in model.parameters() if p.grad is not None])


Loss = Callable[[nn.Module], Tensor]


def bare(model: nn.Module, losses: list[Loss], *, plain: bool = False, **options: Any) -> Tensor:
    """The gradient of the mean of the losses, each with its penalty, in a loop without any framework."""
    model = copy.deepcopy(model)
    model.zero_grad()
    penalty = GradientPenalty(model, **{"weight": STRENGTH, "activation": STRENGTH, **options})
    for loss in losses:
        closure = lambda loss=loss: loss(model) / len(losses)  # noqa: E731
        _ = closure().backward() if plain else penalty.backward(closure)
    return gradient(model)


def check_same(got: Tensor, model: nn.Module, losses: list[Loss], *, relative: float = 1e-5, **options: Any) -> None:
    """The penalty is neither dropped nor doubled: it is there, and what differs is a small part of it."""
    want, plain = (bare(model, losses, plain=plain, **options) for plain in (False, True))
    assert float((want - plain).norm()) > 0.05 * float(plain.norm()), "too weak to be seen"
    error = float((got - want).norm() / (want - plain).norm())
    assert error <= relative, error


def batches(n: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """The first n batches of the digits."""
    loader, _ = load("your_own_loop").digits()
    x, y = loader.dataset[: n * size]
    return list(zip(x.split(size), y.split(size), strict=True))


def in_order(parts: list[tuple[Tensor, Tensor]]) -> DataLoader[tuple[Tensor, ...]]:
    x, y = (torch.cat(column) for column in zip(*parts, strict=True))
    return DataLoader(TensorDataset(x, y), len(parts[0][1]))


def loss_on(x: Tensor, y: Tensor, context: Callable[[], Any] = contextlib.nullcontext) -> Loss:
    def loss(model: nn.Module) -> Tensor:
        with context():
            return F.cross_entropy(model(x), y)

    return loss


def half(dtype: torch.dtype) -> Callable[[], Any]:
    return lambda: torch.autocast("cpu", dtype=dtype)


def moved(model: nn.Module, before: nn.Module) -> bool:
    return all(not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))


# A bare loop


@pytest.mark.parametrize("option", [[], ["--no-penalty"]], ids=["penalty", "plain"])
def test_your_own_loop_trains_and_prints_a_table(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    example = load("your_own_loop", "sklearn")
    torch.manual_seed(0)
    before = example.network()
    model, losses, rows = example.main(["--epochs", "1", *option])
    assert moved(model, before)
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]
    assert [(row.weights, row.activations) for row in rows] == example.WIDTHS
    assert rows[0].accuracy > 0.5
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)


def test_your_own_loop_steps_with_the_gradient_of_the_objective() -> None:
    example = load("your_own_loop", "sklearn")
    torch.manual_seed(0)
    model = example.network()
    before = copy.deepcopy(model)
    [(x, y)] = batches(1, 32)
    with gradients_stepped_with(model) as seen:
        example.train(model, in_order([(x, y)]), epochs=1, strength=STRENGTH)
    check_same(seen[0], before, [loss_on(x, y)])


# Lightning


@lightning_warns
def test_lightning_trains_and_logs_the_norms() -> None:
    example = load("lightning_module", "lightning", "sklearn")
    torch.manual_seed(0)
    before = load("your_own_loop").network()
    trainer = example.main(["--steps", "3"])
    assert trainer.global_step == 3
    assert moved(trainer.lightning_module.net, before)
    assert set(trainer.callback_metrics) == {"loss", "weight_norm", "activation_norm"}
    assert all(bool(torch.isfinite(value)) for value in trainer.callback_metrics.values())


def lightning_precision(name: str) -> dict[str, Any]:
    """Options of a Trainer; 16-bit floats with loss scaling are for GPUs there, unless the plugin is given."""
    from lightning.pytorch.plugins import MixedPrecision

    if name == "16-mixed":
        return {"plugins": MixedPrecision(name, "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))}
    return {"precision": name}


@lightning_warns
@pytest.mark.parametrize(
    ("precision", "context"),
    [
        ("32-true", contextlib.nullcontext),
        ("bf16-mixed", half(torch.bfloat16)),
        ("16-mixed", half(torch.float16)),
    ],
)
def test_lightning_steps_with_the_gradient_of_a_bare_loop(precision: str, context: Callable[[], Any]) -> None:
    example = load("lightning_module", "lightning", "sklearn")
    import lightning

    torch.manual_seed(0)
    module = example.Digits(load("your_own_loop").network(), strength=STRENGTH)
    options: dict[str, Any] = {}
    if precision != "32-true":  # a difference of two passes wants more digits
        options = {"objective": "worst-case", "weight": 0.02, "activation": 0.0}
        module.penalty = GradientPenalty(module, **options)
    before = copy.deepcopy(module.net)
    [(x, y)] = batches(1, 32)
    with gradients_stepped_with(module.net) as seen:
        trainer = lightning.Trainer(max_steps=1, **QUIET, **lightning_precision(precision))
        trainer.fit(module, in_order([(x, y)]))
    assert len(seen) == 1
    relative = 0.01 if precision == "16-mixed" else 1e-5
    check_same(seen[0], before, [loss_on(x, y, context)], relative=relative, **options)


@lightning_warns
def test_lightning_strategies_with_a_backward_pass_of_their_own_are_refused() -> None:
    example = load("lightning_module", "lightning", "sklearn")
    import lightning
    from lightning.pytorch.strategies import SingleDeviceStrategy

    class Own(SingleDeviceStrategy):
        pass

    module = example.Digits(load("your_own_loop").network())
    trainer = lightning.Trainer(max_steps=1, strategy=Own("cpu"), **{**QUIET, "accelerator": "auto"})
    with pytest.raises(NotImplementedError, match="Own has a backward pass of its own"):
        trainer.fit(module, in_order(batches(1, 8)))


# Accelerate


def test_accelerate_trains() -> None:
    example = load("accelerate_loop", "accelerate", "sklearn")
    torch.manual_seed(0)
    before = load("your_own_loop").network()
    model, losses = example.main(["--epochs", "1"])
    assert moved(model, before)
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("scaled", [False, True], ids=["unscaled", "scaled"])
def test_accelerate_steps_with_the_gradient_of_a_bare_loop(accumulate: int, scaled: bool) -> None:
    example = load("accelerate_loop", "accelerate", "sklearn")
    accelerator = example.make_accelerator(accumulate)
    if scaled:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)  # as fp16 would have it, on a GPU
    torch.manual_seed(0)
    model = load("your_own_loop").network()
    before = copy.deepcopy(model)
    parts = batches(accumulate, 32)
    with gradients_stepped_with(model) as seen:
        example.train(accelerator, model, in_order(parts), epochs=1, strength=STRENGTH)
    assert len(seen) == 1
    check_same(seen[0], before, [loss_on(x, y) for x, y in parts])


# Hugging Face Trainer

TRAINER = {
    "per_device_train_batch_size": 16,
    "max_grad_norm": 0.0,
    "max_steps": 1,
    "optim": "adamw_torch",  # the fused default unscales inside its step, where no hook sees it
    "strength": STRENGTH,
}


def inputs_of(model: nn.Module) -> list[dict[str, Tensor]]:
    """Collect what the model is called with in training."""
    seen: list[dict[str, Tensor]] = []

    def note(module: nn.Module, args: Any, kwargs: dict[str, Tensor]) -> None:
        seen.append({name: kwargs[name] for name in ("pixel_values", "labels")})

    model.register_forward_pre_hook(note, with_kwargs=True)
    return seen


def called_twice_each(inputs: list[dict[str, Tensor]]) -> list[Loss]:
    """The loss on each batch, if the model saw each in two passes and no more; one look at the products comes first."""
    inputs = inputs[len(inputs) % 2 :]
    first, second = inputs[::2], inputs[1::2]
    assert all(torch.equal(a["pixel_values"], b["pixel_values"]) for a, b in zip(first, second, strict=True))
    return [lambda model, batch=batch: model(**batch).loss for batch in first]


def test_huggingface_trainer_trains_and_logs_the_norm() -> None:
    example = load("huggingface_trainer", "transformers", "accelerate", "sklearn")
    torch.manual_seed(0)
    before = example.vision_transformer()
    trainer = example.main(["--steps", "4"])
    assert trainer.state.global_step == 4
    assert any(not torch.equal(a, b) for a, b in zip(trainer.model.parameters(), before.parameters(), strict=True))
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 4
    assert all(math.isfinite(entry["loss"]) and entry["weight_norm"] > 0 for entry in logged)
    assert logged[0]["loss"] == pytest.approx(math.log(10), rel=0.1)  # neither halved nor doubled by accumulation


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("scaled", [False, True], ids=["unscaled", "scaled"])
def test_huggingface_trainer_steps_with_the_gradient_of_a_bare_loop(
    accumulate: int, scaled: bool, tmp_path: Path
) -> None:
    example = load("huggingface_trainer", "transformers", "accelerate", "sklearn")
    torch.manual_seed(0)
    model = example.vision_transformer()
    before = copy.deepcopy(model)
    inputs = inputs_of(model)
    trainer = example.make_trainer(model, output_dir=str(tmp_path), gradient_accumulation_steps=accumulate, **TRAINER)
    if scaled:
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with gradients_stepped_with(model) as seen:
        trainer.train()
    losses = called_twice_each(inputs)
    assert (len(seen), len(losses)) == (1, accumulate)
    check_same(seen[0], before, losses, layers="*.weight")


# Several processes: each framework has its own way to average gradients, and the penalty must not go past it


def unnormalized() -> nn.Module:
    """A network whose gradient on a batch is the mean over the parts of the batch."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))


def everywhere(mine: Any) -> list[Any]:
    """What each process has."""
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine)
    return found


def accelerate_in_two_processes() -> None:
    example, model, parts = load("accelerate_loop"), unnormalized(), batches(4, 16)
    before = copy.deepcopy(model)
    with gradients_stepped_with(model) as seen:
        example.train(example.make_accelerator(2), model, in_order(parts), epochs=1, strength=STRENGTH)
    (a, b), (c, d) = parts[:2], parts[2:]  # each process has one batch of each pair
    losses = [loss_on(*(torch.cat(both) for both in zip(*pair, strict=True))) for pair in ((a, b), (c, d))]
    check_same(seen[0], before, losses, relative=5e-3)


def lightning_in_two_processes() -> None:
    import lightning

    example, [(x, y)] = load("lightning_module"), batches(1, 64)
    module = example.Digits(unnormalized(), strength=STRENGTH)
    before = copy.deepcopy(module.net)
    with gradients_stepped_with(module.net) as seen:
        trainer = lightning.Trainer(max_steps=1, devices=2, strategy="ddp", **QUIET)
        trainer.fit(module, in_order([(x[:32], y[:32]), (x[32:], y[32:])]))
    check_same(seen[0], before, [loss_on(x, y)], relative=5e-3)


def huggingface_in_two_processes() -> None:
    example = load("huggingface_trainer")
    torch.manual_seed(0)
    model = example.vision_transformer()
    before, inputs = copy.deepcopy(model), inputs_of(model)
    trainer = example.make_trainer(model, output_dir="unused", gradient_accumulation_steps=2, **TRAINER)
    with gradients_stepped_with(model) as seen:
        trainer.train()
    whole = [
        {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        for parts in zip(*everywhere(inputs), strict=True)
    ]
    check_same(seen[0], before, called_twice_each(whole), relative=5e-3, layers="*.weight")


@pytest.mark.slow
def test_two_processes_step_with_the_gradient_of_one_on_both_their_batches(tmp_path: Path) -> None:
    for package in ("accelerate", "lightning", "transformers", "sklearn"):
        pytest.importorskip(package, reason=f"{package} is not installed; pip install 'anybit[examples]'")
    together(
        [__file__],
        launcher=warm_torchrun(),
        cwd=tmp_path,
        PYTHONPATH=os.pathsep.join([str(EXAMPLES), str(Path(__file__).parent)]),
        HF_HUB_OFFLINE="1",
    )


if __name__ == "__main__":
    accelerate_in_two_processes()
    huggingface_in_two_processes()
    lightning_in_two_processes()
    torch.distributed.barrier()
    os._exit(0)  # the frameworks keep the process group alive; how its threads end at exit is not ours to test
