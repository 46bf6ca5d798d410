"""The models of the experiments: small, so that many seeds can be trained on two cores."""

from __future__ import annotations

import torch
from torch import nn


def digits_model(seed: int) -> nn.Module:
    """Return a convolutional network of 24,000 weights for images of 28 × 28 pixels."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Unflatten(1, (1, -1)),
        nn.Conv2d(1, 8, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, 28),
        nn.ReLU(),
        nn.Linear(28, 10),
    )
