"""The demo's model: a small convolutional network, trained as any PyTorch model is."""

from __future__ import annotations

import torch
from torch import nn

from growcache.cli.demo_data import CHANNELS, CLASSES, held_out_windows

HELD_OUT_RECORDINGS = 20  # of each class; none of them is in the remote store
HELD_OUT_SEED = 1


class Training:
    """A model, its optimizer, and what one epoch has come to so far."""

    def __init__(self, seed: int) -> None:
        # One thread is enough for this model, and does not fight with the samplers.
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.model = make_network()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self._held_out = held_out_windows(HELD_OUT_RECORDINGS, HELD_OUT_SEED)
        self.start_epoch()

    def start_epoch(self) -> None:
        self.samples, self._loss, self._right = 0, 0.0, 0

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Learn from a batch: x float32 (n, 256, 4), y int64 (n,)."""
        scores = self.model(x.transpose(1, 2))
        loss = nn.functional.cross_entropy(scores, y)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.optimizer.step()
        self.samples += len(y)
        self._loss += loss.item() * len(y)
        self._right += _count_right(scores, y)

    @property
    def loss(self) -> float:
        return self._loss / max(1, self.samples)

    @property
    def accuracy(self) -> float:
        """Share of this epoch's samples that were classified rightly, while learning."""
        return self._right / max(1, self.samples)

    def held_out_accuracy(self) -> float:
        """Share of windows classified rightly, of recordings that are never trained on."""
        x, y = (torch.from_numpy(array) for array in self._held_out)
        with torch.no_grad():
            return _count_right(self.model(x.transpose(1, 2)), y) / len(y)


def make_network() -> nn.Module:
    """Return the untrained network: (n, 4, 256) to scores (n, 3)."""
    layers: list[nn.Module] = []
    for channels, filters in ((CHANNELS, 16), (16, 32), (32, 32)):
        layers += [
            nn.Conv1d(channels, filters, 9, stride=2, padding=4),
            nn.GroupNorm(4, filters),
            nn.ReLU(),
        ]
    layers += [nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(32, len(CLASSES))]
    return nn.Sequential(*layers)


def _count_right(scores: torch.Tensor, y: torch.Tensor) -> int:
    return int((scores.argmax(1) == y).sum())
