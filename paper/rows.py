"""The rows of the paper's tables and those it lacks: what each changes in the recipe, and what is searched for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from anybit.spec import FLOAT, Bits
from anybit.train.search import TOLERANCE, Knob

LAMBDA = ("penalty.weight", "penalty.activation")
"""As in the paper, one strength for both."""

RATES = (3e-4, 1e-3, 3e-3, 1e-2)
"""Learning rates of straight-through training, where batch norm is folded and no longer tames a large step."""

NOISE = (0.1, 0.3, 1.0)
"""How far the noise reaches, in bins. At one, two bits of noise in every sixth step cost more than ten points."""

WIDTHS = tuple(Bits(*pair) for pair in ((32, 32), (8, 4), (6, 4), (4, 4), (3, FLOAT), (8, 3), (3, 3)))
"""The paper's widths for CIFAR-10, then narrower ones."""

DRAWN = ("FP", "W8A4", "W6A4", "W4A4", "W3A32", "W8A3", "W3A3")
"""What multi-width training draws from: the widths of the table."""


@dataclass(frozen=True)
class TableRow:
    """One way to train: changes to the fine-tuning recipe, a knob to search, rows whose searched values it shares."""

    name: str
    label: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    knob: Knob | None = None
    takes: tuple[str, ...] = ()
    tolerance: float = TOLERANCE
    """What a searched strength may cost the unquantized network."""
    trials_of: str | None = None
    """The row whose trials it chooses from; by default its own."""
    trained_at: Bits | None = None
    """The one pair of widths that straight-through training was for."""
    by_network: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Changes for single networks: what a search for them found elsewhere."""


def _straight_through(bits: Bits) -> TableRow:
    return TableRow(
        f"ste-{bits.weights}-{bits.activations}",
        f"STE @ ({bits.weights},{bits.activations})",
        {"quantize.widths": (str(bits),)},
        Knob(("optimizer.lr",), RATES),
        trained_at=bits,
    )


ROWS = (
    TableRow("none", "No regularization"),
    TableRow("l1", "L1 regularization", knob=Knob(LAMBDA)),
    TableRow("kurtosis", "Kurtosis", knob=Knob(("penalty.kurtosis",))),
    TableRow("l1+kurtosis", "L1 + kurtosis", takes=("l1", "kurtosis")),
    _straight_through(Bits(4, 4)),
    TableRow("noise", "Noise", knob=Knob(("penalty.noise",), NOISE)),
    TableRow("noise+kurtosis", "Noise + kurtosis", takes=("noise", "kurtosis")),
    TableRow("noise+kurtosis+l1", "Noise + kurtosis + L1", takes=("noise", "l1", "kurtosis")),
    TableRow("l2", "L2 regularization", {"penalty.norm": "l2"}, Knob(LAMBDA)),
    # Without weight decay, as the paper ran it.
    TableRow("dq", "DQ regularization", {"optimizer.weight_decay": 0.0}, Knob(("penalty.orthogonal",))),
    _straight_through(Bits(8, 4)),
    _straight_through(Bits(6, 4)),
    TableRow("ste-multi", "STE, width drawn at random", {"quantize.widths": DRAWN}, Knob(("optimizer.lr",), RATES)),
    TableRow("l1-range", "L1, in units of the range", {"penalty.scale": "range"}, Knob(LAMBDA)),
    TableRow("worst-case", "Worst case", {"penalty.objective": "worst-case"}, Knob(LAMBDA)),
    TableRow("l1-every-4", "L1, every fourth step", {"penalty.every": 4}, takes=("l1",)),
)
"""In the order in which they are trained: what matters most first."""


STRONG = 0.06
"""What the paper's second l1 row on ImageNet costs the unquantized network: from 70.07 to 64.02 %."""

SLOW = {"speed.compile": False}
"""A step with a second pass, or with rounding in it, is not compiled. Nor is that without any penalty, for the norms of
the gradient in its log."""


AVERAGED = TableRow(
    "any-width-averaged",
    "Any width, averaged",
    {"penalty.any_width": True, "penalty.kurtosis": 0.1, "optimizer.average": 0.99},
)
"""What `anybit train` does unless told otherwise."""


def _converged() -> tuple[TableRow, ...]:
    strong = TableRow("l1-strong", "L1 regularization, stronger", {}, Knob(LAMBDA), tolerance=STRONG, trials_of="l1")
    known = {row.name: row for row in (*ROWS, strong, AVERAGED)}
    fast = ("kurtosis", "dq")
    names = "none l1 any-width-averaged kurtosis l1+kurtosis l1-strong l2 ste-4-4 dq ste-8-4 ste-6-4"
    rows = (known[name] for name in names.split())
    return tuple(row if row.name in fast else replace(row, changes={**row.changes, **SLOW}) for row in rows)


CONVERGED_ROWS = _converged()
"""For networks that were trained to the end: the paper's rows, kurtosis, l1 with kurtosis, the any-width objective."""


def _any_width() -> tuple[TableRow, ...]:
    known = {row.name: row for row in (*ROWS, _straight_through(Bits(3, 3)))}
    both = (*LAMBDA, "penalty.kurtosis")
    l1 = {"vgg-like": (1e-3,), "resnet18": (1e-4,), "mobilenet-v2": (3e-4,)}
    kurtosis = {"vgg-like": (3e-4, 3e-4, 0.3), "resnet18": (1e-4, 1e-4, 0.1), "mobilenet-v2": (3e-4, 3e-4, 0.3)}
    rates = {
        "ste-3-3": (3e-3, 3e-4, 1e-3), "ste-6-4": (1e-3, 1e-3, 1e-3), "ste-8-4": (1e-3, 3e-5, 1e-3),
        "ste-4-4": (3e-3, 3e-4, 1e-3), "ste-multi": (1e-3, 3e-4, 1e-3),
    }  # fmt: skip
    straight = [
        replace(known[name], knob=None, by_network={n: {"optimizer.lr": lr} for n, lr in zip(l1, found, strict=True)})
        for name, found in rates.items()
    ]
    return (
        known["none"],
        TableRow("any-width", "Any width + kurtosis", {"penalty.any_width": True, "penalty.kurtosis": 0.1}),
        AVERAGED,
        TableRow("any-width-alone", "Any width", {"penalty.any_width": True}),
        TableRow("none-six", "Nothing, six epochs", {"epochs": 6}),
        TableRow("any-width-six", "Any width, six epochs", {**AVERAGED.changes, "epochs": 6}),
        TableRow(
            "l1+kurtosis", "L1 + kurtosis", by_network={n: dict(zip(both, v, strict=True)) for n, v in kurtosis.items()}
        ),
        *straight[::-1],
        replace(known["l1"], knob=None, by_network={n: dict.fromkeys(LAMBDA, v[0]) for n, v in l1.items()}),
    )


ANY_WIDTH_ROWS = _any_width()
"""The any-width objective beside what else can be trained. Strengths and learning rates of VGG-like and ResNet-18 are
those that searches found (results/search-laptop.json, results/search-converged.json), MobileNetV2 has the defaults;
straight-through training at (3,3) has the learning rate of (4,4)."""

PAPER_WIDTHS = {
    1: tuple(Bits(*pair) for pair in ((32, 32), (8, 4), (6, 4), (4, 4))),
    2: tuple(Bits(*pair) for pair in ((32, 32), (8, 8), (6, 6), (4, 4))),
}
_PAPER: dict[str, tuple[int, dict[str, tuple[float | None, ...]]]] = {
    "vgg-like": (
        1,
        {
            "none": (92.49, 79.10, 78.84, 11.47),
            "dq": (91.51, 86.30, 84.29, 30.86),
            "l2": (91.88, 86.64, 86.14, 63.93),
            "l1": (92.63, 89.74, 89.78, 85.99),
            "ste-8-4": (None, 91.28, 89.99, 32.83),
            "ste-6-4": (None, None, 90.25, 39.56),
            "ste-4-4": (None, None, None, 89.79),
        },
    ),
    "resnet18": (
        1,
        {
            "none": (93.54, 85.51, 85.35, 83.98),
            "dq": (92.46, 83.31, 83.34, 82.47),
            "l2": (93.31, 84.50, 84.99, 83.82),
            "l1": (93.36, 88.70, 88.45, 87.62),
            "ste-8-4": (None, 89.10, 87.79, 86.21),
            "ste-6-4": (None, None, 90.77, 88.17),
            "ste-4-4": (None, None, None, 89.98),
        },
    ),
    "imagenet-resnet18": (
        2,
        {
            "none": (69.70, 69.20, 63.80, 0.30),
            "dq": (68.28, 67.76, 62.31, 0.24),
            "l2": (68.34, 68.02, 64.52, 0.19),
            "l1": (70.07, 69.92, 66.39, 0.22),
            "l1-strong": (64.02, 63.76, 61.19, 55.32),
            "ste-8-8": (None, 70.06, 60.18, 0.13),
            "ste-6-6": (None, None, 69.63, 11.34),
            "ste-4-4": (None, None, None, 57.50),
        },
    ),
}
"""Test accuracy in %, from the paper's Tables 1 and 2, at its widths."""

PAPER_COST = {"vgg-like": 79 / 14, "resnet18": 209 / 24, "imagenet-resnet18": 17100 / 2000}
"""Time of an epoch with the l1 penalty over one without, in seconds, from the paper's section 4.1."""


VARIANTS = {"vgg-like-quarter": "vgg-like", "vgg-like-decay": "vgg-like"}
"""Networks that differ from one of the paper's in width or in how their start was trained."""


def paper_numbers(network: str) -> dict[str, dict[Bits, float]]:
    """Return the paper's accuracies for one network in %, by row and widths.

    >>> paper_numbers("vgg-like-quarter")["l1"][Bits(4, 4)]
    85.99
    """
    table, rows = _PAPER.get(VARIANTS.get(network, network), (1, {}))
    return {
        name: {bits: value for bits, value in zip(PAPER_WIDTHS[table], values, strict=True) if value is not None}
        for name, values in rows.items()
    }


IMAGENET_WIDTHS = tuple(Bits(*pair) for pair in ((32, 32), (8, 8), (6, 6), (4, 4)))
IMAGENET_ROWS = (
    *(row for row in ROWS if row.name in ("none", "l1", "kurtosis", "l1+kurtosis", "l2", "dq")),
    TableRow("l1-strong", "L1 regularization, λ = 0.05", dict.fromkeys(LAMBDA, 0.05)),
    *(_straight_through(Bits(bits, bits)) for bits in (8, 6, 4)),
)
"""The paper's Table 2, and the two rows that matter most of those it lacks."""
