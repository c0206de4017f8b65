"""The penalty in a training loop of your own: two lines, then one set of weights at several bit widths.

A small convolutional network on scikit-learn's digits, in seconds on a laptop. Compare the tables of
`python examples/your_own_loop.py` and `python examples/your_own_loop.py --no-penalty`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import anybit

WIDTHS = [(32, 32), (8, 8), (4, 4), (3, 3), (2, 2)]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def digits(batch: int = 64) -> tuple[DataLoader, DataLoader]:
    raw = load_digits()
    x, y = torch.from_numpy(raw.images).float().div(16).unsqueeze(1), torch.from_numpy(raw.target)
    train, test = TensorDataset(x[:1400], y[:1400]), TensorDataset(x[1400:], y[1400:])
    return DataLoader(train, batch, shuffle=True), DataLoader(test, 256)


def train(model: nn.Module, loader: DataLoader, *, epochs: int, strength: float) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    penalty = anybit.GradientPenalty(model, weight=strength, activation=strength)  # <- line one
    losses = []
    for _ in range(epochs):
        for x, y in loader:
            step = penalty.backward(lambda: F.cross_entropy(model(x), y))  # <- line two, was: loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(step.loss)
    return losses


def main(argv: Sequence[str] | None = None) -> tuple[nn.Module, list[float], list[anybit.Row]]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--no-penalty", action="store_true", help="train on the plain loss, for comparison")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    model, (train_loader, test_loader) = network(), digits()
    losses = train(model, train_loader, epochs=args.epochs, strength=0.0 if args.no_penalty else 2e-3)

    net = anybit.prepare(model.eval(), next(iter(test_loader))[0], input_range=(0.0, 1.0))
    rows = anybit.sweep(net, test_loader, widths=WIDTHS)
    print("weights  activations  accuracy")
    for row in rows:
        print(f"{row.weights:7}  {row.activations:11}  {row.accuracy:8.1%}")
    return model, losses, rows


if __name__ == "__main__":
    main()
