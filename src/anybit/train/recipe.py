"""What a training run is made of, frozen, read from TOML."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from anybit.common.files import read_text
from anybit.common.named import is_code
from anybit.common.strict import from_mapping
from anybit.common.text import printable, quoted
from anybit.errors import RecipeError, SpecError
from anybit.models import MODELS
from anybit.spec import Bits
from anybit.task.networks import in_package

BUNDLED = Path(__file__).parents[1] / "recipes"
"""The recipes that come with this package."""

MOST = 10**6
"""Of epochs, strengths and the like: above it lies no training that anybody wants, and what overflows."""


def _positive(most: int = MOST, **values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise SpecError(f"{name} must be above zero, got {quoted(value)}")
        _not_negative(most, **{name: value})


def _not_negative(most: int = MOST, **values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise SpecError(f"{name} must be zero or more, got {quoted(value)}")
        if value > most:
            limit = f"{most:,}" if most <= MOST else f"{most:.0e}"
            raise SpecError(f"{name} must be at most {limit}, got {quoted(value)}")


@dataclass(frozen=True)
class ModelRecipe:
    """Which network: one of ours by its `name`, or a `factory`.

    A factory is code such as `my_model.py:make` or `package.module:make`, or a model of another package such as
    `torchvision/resnet18`, `timm/NAME` or `huggingface/NAME`. `multiplier` multiplies the channel counts of ours.
    """

    name: str | None = None
    multiplier: float = 1.0
    factory: str | None = None

    def __post_init__(self) -> None:
        _positive(100, multiplier=self.multiplier)
        if (self.name is None) == (self.factory is None):
            raise SpecError('name is for a network of anybit, factory = "my_model.py:make" for yours; give one')

    @property
    def word(self) -> str:
        """The network in one word."""
        return self.name or self.factory or ""


@dataclass(frozen=True)
class DataRecipe:
    """Which data: a known name, the path of an .npz file, a folder of images by class, or code that returns loaders."""

    name: str
    batch: int = 64
    augment: bool = True
    size: int | None = None
    """The side that the images in a folder are brought to."""

    def __post_init__(self) -> None:
        _positive(batch=self.batch)
        if self.size is not None:
            _positive(2**15, size=self.size)


@dataclass(frozen=True)
class OptimizerRecipe:
    """How the weights move: the optimizer, its learning rate, and the shape that the rate follows."""

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup: int = 0
    """Epochs over which the rate rises from zero."""
    average: float | None = None
    """How much a step keeps of a running average of the weights, which the run then ends with; else with the last.

    0.99 lets the last hundred steps count, in a short run its last tenth. It gives back a part of what training for
    any width costs.
    """

    def __post_init__(self) -> None:
        _positive(10**31, lr=self.lr)  # far beyond any that trains; what diverges says so itself
        _not_negative(momentum=self.momentum, weight_decay=self.weight_decay, warmup=self.warmup)
        _not_negative(average=self.average or 0.0)
        for name, value in (("momentum", self.momentum), ("average", self.average or 0.0)):
            if value >= 1:
                raise SpecError(f"{name} must be below one, got {value}")


@dataclass(frozen=True)
class PenaltyRecipe:
    """The penalties and their strengths; zero is off.

    `weight` and `activation` belong to the gradient penalty, whose other settings are those of `GradientPenalty`.
    """

    any_width: bool = False
    """Add a quantized pass at a width drawn anew each step (`AnyWidth`)."""
    any_width_strength: float | None = None
    """What that pass counts beside the loss; without a number it follows the loss in floating point."""
    weight: float = 0.0
    activation: float = 0.0
    norm: Literal["l1", "l2"] = "l1"
    engine: Literal["two-pass", "double-backward"] = "two-pass"
    objective: Literal["penalty", "worst-case"] = "penalty"
    scale: Literal["none", "range"] = "none"
    every: int = 1
    orthogonal: float = 0.0
    kurtosis: float = 0.0
    noise: float = 0.0
    start: int = 0
    """The epoch in which the penalties are switched on; the first is 0."""
    ramp: int = 0
    """Epochs over which the strengths rise from there."""

    def __post_init__(self) -> None:
        _not_negative(weight=self.weight, activation=self.activation, start=self.start, ramp=self.ramp)
        _not_negative(orthogonal=self.orthogonal, kurtosis=self.kurtosis, noise=self.noise)
        _positive(every=self.every)
        if self.any_width_strength is not None:
            _not_negative(any_width_strength=self.any_width_strength)

    @property
    def gradient(self) -> bool:
        """Whether gradients are penalized."""
        return max(self.weight, self.activation) > 0

    @property
    def any(self) -> bool:
        """Whether anything is penalized at all."""
        return self.any_width or max(self.weight, self.activation, self.orthogonal, self.kurtosis, self.noise) > 0


FLAGSHIP = PenaltyRecipe(any_width=True, kurtosis=0.1)
"""What `anybit train` does for a recipe that says nothing about penalties, with an average of the weights at the end.

On the validation split of CIFAR-10 (VGG-like, trained to the end; results/any-width-trials.json) it beats gradient l1
with kurtosis, which was the default before, in floating point (88.3 against 88.0) and on average over the settings at
4 bits and less (74.9 against 71.8). Plain training has 88.9 and 63.5.
"""
AVERAGE = 0.99


@dataclass(frozen=True)
class QuantizeRecipe:
    """Straight-through training of the quantized network; without widths it is off."""

    widths: tuple[str, ...] = ()
    """Pairs such as "W4A4"; of several, each step draws one at random."""
    per_channel: bool = False

    def __post_init__(self) -> None:
        if len(self.widths) > 100:
            raise SpecError(f"widths must be at most 100 pairs, got {len(self.widths)}")
        for width in self.widths:
            Bits.parse(width)

    @property
    def pairs(self) -> tuple[Bits, ...]:
        """The widths as values."""
        return tuple(Bits.parse(width) for width in self.widths)


@dataclass(frozen=True)
class SpeedRecipe:
    """How the numbers are computed, not what: each choice gives the same training up to rounding and random draws."""

    channels_last: bool = False
    """Keep the channels of a pixel side by side in memory, which convolutions often like better."""
    compile: bool = False
    """Let `torch.compile` translate the network. Steps that look at activations, as the two-pass engine does, run as
    written; norms of gradients are then not measured in the other ones, which would have to look too."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 multiplies in that format where PyTorch's autocast finds it safe. It has too few digits for the
    difference of two passes: epochs with the two-pass engine stay in float32."""
    accumulate: int = 1
    """Parts that each batch is cut into, one after the other, so that the graph of one fits into memory. The penalty is
    still that of the whole batch; batch norm sees the parts."""

    def __post_init__(self) -> None:
        _positive(1000, accumulate=self.accumulate)


@dataclass(frozen=True)
class Recipe:
    """One training run. The same recipe, seed and number of threads give the same weights."""

    name: str
    epochs: int
    model: ModelRecipe
    data: DataRecipe
    seed: int = 0
    init: str | None = None
    """A checkpoint to start from, or a state dict of PyTorch (.pt), instead of random weights."""
    loss: str | None = None
    """What is minimized: code such as `my_loss.py:loss`, of outputs and targets; cross-entropy, if not given."""
    metric: str | None = None
    """What validation tells: the name of a metric of `anybit.sweep`, or code; the usual one, if not given."""
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    penalty: PenaltyRecipe = field(default_factory=PenaltyRecipe)
    quantize: QuantizeRecipe = field(default_factory=QuantizeRecipe)
    speed: SpeedRecipe = field(default_factory=SpeedRecipe)

    def __post_init__(self) -> None:
        _positive(epochs=self.epochs)
        if self.seed < 0:
            raise SpecError(f"seed must be zero or more, got {quoted(self.seed)}")
        if self.seed >= 2**63:
            raise SpecError(f"seed must be below 2**63, got {quoted(self.seed)}")
        plain = self.name.isprintable() and self.name not in (".", "..") and not set(self.name) & set("/\\")
        if not plain or not 0 < len(self.name) <= 100:
            raise SpecError(f"name is used as a folder and must be a plain word, got {quoted(self.name)}")
        if self.quantize.widths and self.penalty.any:
            raise SpecError("quantize.widths and the penalties exclude each other; drop one of the two tables")
        if self.quantize.widths and (self.speed.compile or self.speed.precision != "float32"):
            raise SpecError("straight-through training runs as written and in float32; drop speed.compile or precision")
        if self.speed.accumulate > 1 and self.penalty.engine == "double-backward":
            raise SpecError("double backward takes a batch at once; drop speed.accumulate, or use the two-pass engine")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        values = dataclasses.asdict(self)
        values["quantize"]["widths"] = list(self.quantize.widths)
        for table, key in (
            (values, "loss"),
            (values, "metric"),
            (values["model"], "factory"),
            (values["data"], "size"),
            (values["optimizer"], "average"),
            (values["penalty"], "any_width_strength"),
        ):
            if table[key] is None:  # as before there was such a key
                del table[key]
        return values

    def changed(self, changes: Mapping[str, Any]) -> Recipe:
        """Return the same recipe with other values, by their keys in TOML (`"optimizer.lr"`)."""
        values = self.to_dict()
        for key, value in changes.items():
            *tables, last = key.split(".")
            inner = values
            for table in tables:
                inner = inner.setdefault(table, {})
            inner[last] = list(value) if isinstance(value, tuple) else value
        kept = {key: value for key, value in values.items() if value is not None}
        kept["model"] = {key: value for key, value in kept["model"].items() if value is not None}
        return parse_recipe(kept, source=self.name)


def parse_recipe(values: dict[str, Any], *, source: str = "recipe") -> Recipe:
    """Build a recipe from plain values; the error names the source and the key."""
    try:
        return from_mapping(Recipe, values)
    except RecipeError as error:
        raise RecipeError(f"{source}: {error}") from error


def recipe_by_word(word: str, *, penalty: PenaltyRecipe | None = None, **changes: Any) -> Recipe:
    """Return a recipe by its file or name, or the usual one for a network that a word names; with other values.

    Args:
        word: A recipe, or a network such as `my_model.py:make`, `small-conv` or `timm/resnet18`.
        penalty: For one that says nothing about penalties.
        changes: Values by their keys, with `__` for the dot (`data__name`); `None` leaves a value as it is.
    """
    wanted = {key.replace("__", "."): value for key, value in changes.items() if value is not None}
    if not (is_code(word) or word in MODELS or in_package(word)):
        recipe = load_recipe(word, penalty=penalty)
        return dataclasses.replace(recipe.changed(wanted), penalty=recipe.penalty) if wanted else recipe
    if "data.name" not in wanted:
        raise RecipeError(f"{word} needs data to be trained on: say --data digits, a folder, or my_data.py:loaders")
    name = word.replace(".py:", "-").replace(":", "-").replace("\\", "/").rpartition("/")[2].strip(".")
    model = {"name": word} if word in MODELS else {"factory": word}
    rate = 0.1 if "init" not in wanted and not in_package(word) else 0.01
    values = {"name": name, "epochs": 10, "model": model, "data": {"name": ""}, "optimizer": {"lr": rate}}
    recipe = parse_recipe(values, source=word).changed(wanted)
    return recipe if penalty is None else _with_default(recipe, penalty)


def load_recipe(path: str | Path, *, penalty: PenaltyRecipe | None = None) -> Recipe:
    """Read a recipe from a TOML file, or one that comes with this package, by its name.

    One without tables for penalty and quantization gets the `penalty` given here.
    """
    path = Path(path)
    if not path.exists() and (own := BUNDLED / f"{path}.toml").is_file():
        path = own
    text = read_text(path, what="a recipe in TOML", error=RecipeError)
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # broken, or numbers and brackets without end
        raise RecipeError(f"{path}: not valid TOML: {printable(error, 200)}") from error
    recipe = parse_recipe(values, source=str(path))
    if penalty is None or {"penalty", "quantize"} & values.keys():
        return recipe
    return _with_default(recipe, penalty)


def _with_default(recipe: Recipe, penalty: PenaltyRecipe) -> Recipe:
    """Return a recipe with the default penalty; training for any width goes with an average of the weights."""
    optimizer = recipe.optimizer
    if penalty.any_width and optimizer.average is None:
        optimizer = dataclasses.replace(optimizer, average=AVERAGE)
    return dataclasses.replace(recipe, penalty=penalty, optimizer=optimizer)
