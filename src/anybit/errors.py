"""Every error a user can meet, as one tree.

    AnybitError
    ├── SpecError           a value that no network could use: 1 bit, a range from 3 to 2 (also a ValueError)
    ├── FileError           something on disk is missing, cut short, or not what it says it is
    │   ├── RecipeError     a recipe with an unknown key, a wrong type, or broken TOML
    │   ├── CheckpointError weights that are missing, do not fit, or are not finite
    │   └── DataError       a data set that is missing, broken or empty
    ├── NetworkError        a network that cannot be handled, with the list of all reasons
    │   ├── CaptureError    torch.export could not follow it
    │   ├── FoldError       batch norm cannot be folded into the layer in front
    │   └── RangeError      points whose range is unknown; calibration data would tell
    ├── PenaltyError        the training step cannot be penalized as asked
    │   └── NonFiniteError  a loss or gradient is infinite or not a number
    └── MissingDependency   an optional package is not installed (also an ImportError)

Each message says what was expected, what came, and what to do. The command line prints it on one line and
exits with code 2.
"""

from __future__ import annotations

from collections.abc import Sequence


class AnybitError(Exception):
    """The root: `except AnybitError` catches everything this package raises on purpose."""


class SpecError(AnybitError, ValueError):
    """A value that makes no sense for any network."""


class FileError(AnybitError):
    """A file that is missing, cut short, or not what it says it is."""


class RecipeError(FileError):
    """A recipe that cannot be followed."""


class CheckpointError(FileError):
    """Weights that cannot be loaded."""


class DataError(FileError):
    """A data set that cannot be used."""


class NetworkError(AnybitError):
    """A network that cannot be handled; `problems` lists every reason, each with its module path."""

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join([message, *(f"  - {problem}" for problem in self.problems)]))


class CaptureError(NetworkError):
    """`torch.export` could not follow the network."""


class FoldError(NetworkError):
    """A batch norm cannot be folded."""


class RangeError(NetworkError):
    """Some quantization points have no range."""


class PenaltyError(AnybitError):
    """A training step cannot be penalized as asked."""


class NonFiniteError(PenaltyError):
    """A loss or a gradient is infinite or not a number; nothing was changed."""


class MissingDependency(AnybitError, ImportError):  # noqa: N818
    """An optional package is not installed."""

    def __init__(self, package: str, extra: str, what: str) -> None:
        line = f"'anybit[{extra}]'" if extra else "anybit"
        super().__init__(f"{what} needs {package}, which is not installed; run: pip install {line}")
