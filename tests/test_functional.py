"""Captured graphs that are made functional by rewriting: the same operators as tracing again gives, or none at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from architectures import ARCHITECTURES
from cases import CASES
from torch import Tensor, nn

from anybit.simulate.capture import _attention_written_out, _free, _tidy, capture, decompositions, quietly
from anybit.simulate.functional import functional
from anybit.simulate.recurrent import as_operators

RESHAPING = {"flatten.using_ints", "unflatten.int", "reshape.default"}
LOG = "torch.fx.experimental.symbolic_shapes"


def operators(module: Any) -> Counter[tuple[str, torch.dtype]]:
    """Operators and the dtype of what they give; sizes do not count, and all reshaping is one."""
    _tidy(module)
    nodes = [n for n in module.graph.nodes if n.op == "call_function" and isinstance(n.meta.get("val"), Tensor)]
    names = [str(n.target).removeprefix("aten.") for n in nodes]
    kinds = ["reshape" if name in RESHAPING else name for name in names]
    return Counter(zip(kinds, (n.meta["val"].dtype for n in nodes), strict=True))


def both_ways(model: nn.Module, inputs: Any) -> tuple[Counter[Any] | None, Counter[Any]]:
    """The operators after rewriting, if that goes, and after tracing again."""
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    with torch.no_grad(), as_operators(), _attention_written_out(), quietly(LOG):
        program = torch.export.export(model.eval(), args, kwargs, dynamic_shapes=_free(args, kwargs, all_dims=False))
        module: Any = program.module()
        rewritten = operators(module) if functional(module) else None
        return rewritten, operators(program.run_decompositions(decompositions()).module())


REWRITTEN = {
    "small-conv", "vgg-like", "resnet18", "functional", "max-pool", "average-pool", "recurrent", "dropout",
    "two-inputs", "kinks", "transformer", "hf-vit", "mobilenetv3", "efficientnet", "densenet", "unet",
}  # fmt: skip


@pytest.mark.parametrize("case", [c for c in (*CASES, *ARCHITECTURES) if c.name in REWRITTEN], ids=lambda c: c.name)
def test_rewriting_gives_what_tracing_again_gives(case: Any) -> None:
    rewritten, traced = both_ways(case.build(), case.inputs(2))
    assert rewritten == traced


class Calls(nn.Module):
    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.call = call
        self.register_buffer("vector", torch.rand(4) + 0.5)
        self.register_buffer("short", torch.rand(4, 6).half())

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


UNTOUCHED: dict[str, Callable[..., Tensor]] = {
    "group norm": lambda m, x: F.group_norm(x, 2),
    "instance norm": lambda m, x: F.instance_norm(x),
    "batch norm without parameters": lambda m, x: F.batch_norm(x, m.vector, m.vector),
    "pools": lambda m, x: F.avg_pool1d(x, 2) + F.max_pool1d(x, 2) + F.adaptive_avg_pool1d(x, 3),
    "sizes": lambda m, x: F.interpolate(x, scale_factor=2, mode="linear") + F.interpolate(x, scale_factor=2),
    "pieces": lambda m, x: torch.cat(
        [x.split([1, 3], 1)[1], x.unbind(1)[0][:, None], x[:, 1:2].squeeze(1)[:, None]], 1
    ),
    "copies": lambda m, x: x.flip(1).roll(1, 2).repeat(1, 2, 1).repeat_interleave(2, 1),
    "choices": lambda m, x: torch.where(x > 0, x, x.exp()).maximum(x.masked_fill(x > 1, 0.5)).max(1)[0],
    "sums": lambda m, x: x.sum(-1).log_softmax(-1) + F.rms_norm(x, (6,)).mean(-1) + F.selu(x).amax(-1),
    "memory": lambda m, x: x.transpose(1, 2).contiguous().view(-1, 4),
    "functions": lambda m, x: F.mish(x) + F.logsigmoid(x) + F.threshold(x, 0.1, 0.0) + (1 - x) ** 2 + F.elu(x),
    "in place": lambda m, x: F.silu(F.hardswish(F.leaky_relu(x * 2, inplace=True), inplace=True), inplace=True),
    "dropout in place": lambda m, x: F.dropout(x * 2, training=False, inplace=True).sigmoid_(),
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_single_operators_come_out_as_from_tracing_again(name: str) -> None:
    rewritten, traced = both_ways(Calls(UNTOUCHED[name]), (torch.randn(2, 4, 6),))
    assert rewritten == traced


def used_later(m: Any, x: Tensor) -> Tensor:
    y = x * 2
    z = y.view(-1, 24)
    y.relu_()
    return z.sum(-1)


def base_used_later(m: Any, x: Tensor) -> Tensor:
    y = x * 2
    y[:, :1].relu_()
    return y


def into_half(m: Any, x: Tensor) -> Tensor:
    return (m.short * 3).add_(x[0].float()).float() + x


SEEN_ELSEWHERE: dict[str, Callable[..., Tensor]] = {
    "a view was taken before": used_later,
    "a part of what is used later": base_used_later,
    "a shorter format": into_half,
    "a reshaped tensor": lambda m, x: (x * 2).flatten(1).relu_(),
}


@pytest.mark.parametrize("name", SEEN_ELSEWHERE)
def test_writing_into_what_others_see_is_left_to_tracing(name: str) -> None:
    model, x = Calls(SEEN_ELSEWHERE[name]).eval(), torch.randn(2, 4, 6)
    assert both_ways(model, (x,))[0] is None
    found = capture(model, x)
    torch.testing.assert_close(found(x), model(x))


ATTENTION = {"called by name": lambda m, x: F.scaled_dot_product_attention(x, x, x),
             "held before": lambda m, x, held=F.scaled_dot_product_attention: held(x, x, x)}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTION)
def test_products_in_attention_are_written_out(name: str) -> None:
    model, x, before = Calls(ATTENTION[name]).eval(), torch.randn(2, 4, 6), F.scaled_dot_product_attention
    found = capture(model, x)
    assert sum(node.target is torch.ops.aten.matmul.default for node in found.graph.nodes) == 2
    torch.testing.assert_close(found(x), model(x))
    assert F.scaled_dot_product_attention is before
