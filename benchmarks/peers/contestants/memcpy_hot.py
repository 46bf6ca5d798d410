"""The same as `memcpy`, into one buffer, which stays in the CPU's cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers.cases import Case
from benchmarks.peers.contestants.memcpy import buffers, copied, write
from benchmarks.peers.contestants.torch_loader import Epochs

__all__ = ["opened", "write"]


@contextmanager
def opened(case: Case, folder: Path) -> Iterator[Epochs]:
    buffers(case, 1)
    yield Epochs(lambda epoch: copied(case, epoch, 1))
