"""The models of the experiments: small, so that many seeds can be trained on two cores."""

from __future__ import annotations

import torch
from torch import nn

TEXT_CONTEXT = 11  # bytes from which the next one is predicted


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


def text_model(seed: int) -> nn.Module:
    """Return a causal convolutional network of 45,000 weights: bytes to logits of the byte that follows each."""
    torch.manual_seed(seed)
    return nn.Sequential(
        PastBytes(16, seen=TEXT_CONTEXT),
        nn.Conv1d(16, 64, 8),
        nn.ReLU(),
        nn.Conv1d(64, 64, TEXT_CONTEXT - 7),
        nn.ReLU(),
        nn.Conv1d(64, 256, 1),
    )


class PastBytes(nn.Module):
    """Embeds bytes, [batch, length], as channels; in front of them come zeros, so that nothing later is seen."""

    def __init__(self, channels: int, seen: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, channels)
        self.before = nn.ConstantPad1d((seen - 1, 0), 0.0)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return channels, [batch, channels, seen − 1 + length]."""
        channels: torch.Tensor = self.before(self.embedding(text.long()).transpose(1, 2))
        return channels
