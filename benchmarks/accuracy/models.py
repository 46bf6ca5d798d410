"""The models of the experiments: small, so that many seeds can be trained on two cores."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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


class Histograms(nn.Module):
    """The logarithms of how often bytes, and hashed pairs of neighbours, occur in windows of bytes."""

    PAIRS = 2_048
    WIDTH = PAIRS + 256

    def forward(self, windows: Tensor) -> Tensor:
        """Return [windows, WIDTH]."""
        values = windows.long()
        pairs = ((values[:, :-1] * 31 + values[:, 1:] * 257) * 2_654_435_761 >> 8) % self.PAIRS
        places = torch.cat([values, pairs + 256], 1)
        rows = torch.arange(len(values))[:, None] * self.WIDTH
        counts = torch.bincount((places + rows).view(-1), minlength=len(values) * self.WIDTH)
        return torch.log1p(counts.view(len(values), -1).float())


def sources_model(seed: int) -> nn.Sequential:
    """Return a perceptron of 149,000 weights for windows of bytes, 20 classes."""
    torch.manual_seed(seed)
    return nn.Sequential(
        Histograms(), nn.Linear(Histograms.WIDTH, 64), nn.ReLU(), nn.Linear(64, 20)
    )
