"""Ways to a device, and the one that serves any."""

from __future__ import annotations

from typing import Protocol

import torch

from growcache.loading.framework import Bytes


class Mark(Protocol):
    """A place in a stream."""

    def query(self) -> bool:
        """Return whether the stream has passed it."""

    def synchronize(self) -> None:
        """Return when the stream has passed it."""


class Lane(Protocol):
    """A way to a device: all that is done with it, by threads that entered it.

    Marks are awaited, and batches arrive, in any thread.
    """

    def enter(self) -> None:
        """Let what the calling thread does on the device come before the next mark."""

    def lock(self, buffer: Bytes) -> None:
        """Page-lock a buffer for as long as it lives."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy a tensor there, behind all copies before."""

    def mark(self) -> Mark:
        """Return a mark behind all copies that were begun."""

    def arrive(self, mark: Mark, tensors: list[torch.Tensor]) -> None:
        """Let what the calling thread computes from now on come behind the mark."""


class Passed:
    """The mark of copies that are done when they return."""

    def query(self) -> bool:
        """Say so."""
        return True

    def synchronize(self) -> None:
        """Return at once."""


class PlainLane:
    """Copies that are awaited where they are begun: any device but those of CUDA.

    Args:
        device: where to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def enter(self) -> None:
        """Do nothing: copies are done when they return."""

    def lock(self, buffer: Bytes) -> None:
        """Leave the buffer as it is."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor there."""
        return tensor.to(self._device)

    def mark(self) -> Mark:
        """Return a mark that was passed."""
        return Passed()

    def arrive(self, mark: Mark, tensors: list[torch.Tensor]) -> None:
        """Do nothing: they are there."""
