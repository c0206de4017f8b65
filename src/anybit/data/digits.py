"""scikit-learn's digits: 1,797 handwritten digits of 8x8 pixels, inside the package, no download."""

from __future__ import annotations

import torch

from anybit.artifact.feeding import Preprocessing
from anybit.data.base import Dataset, Split, shift
from anybit.errors import MissingDependency

TRAIN, VALIDATION = 1097, 250
"""The rest, 450 images, is the test set."""


def load_digits() -> Dataset:
    """Return the digits in [0, 1], split by a fixed permutation."""
    try:
        from sklearn import datasets
    except ImportError as error:
        raise MissingDependency("scikit-learn", "data", "the digits data set") from error
    raw = datasets.load_digits()
    x = torch.from_numpy(raw.images).float().div_(16).unsqueeze(1)
    y = torch.from_numpy(raw.target).long()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    parts = (order[:TRAIN], order[TRAIN : TRAIN + VALIDATION], order[TRAIN + VALIDATION :])
    train, validation, test = (Split(x[part], y[part]) for part in parts)
    classes = tuple(str(digit) for digit in range(10))
    how = Preprocessing(size=(8, 8), channels="grey", labels=classes)
    return Dataset("digits", train, validation, test, classes, (0.0, 1.0), augment=shift(1), preprocessing=how)
