"""Planned rows that are lost, for their shards cannot be read: told with what comes behind them.

A row counts when the consumer goes past its place: with the batch that comes next, or at the
end of the epoch. So each counts once wherever another producer goes on, and what nobody
reaches is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from growcache.loading.framework import Integers
from growcache.loading.windows import Piece, Place


class Losses:
    """What one producer tells of the rows that its walk lost; used by its thread."""

    def __init__(self) -> None:
        self._told = 0  # of those that the walk counts
        self._stand_ins: list[Integers] = []  # where they are in the current block

    def note(self, piece: Piece, first: int) -> None:
        """Note which rows of the piece stand in for lost ones, and where it begins in the block."""
        window, start, stop = piece
        if window.valid is not None and not window.padding:
            self._stand_ins.append(first + np.flatnonzero(~window.valid[start:stop]))

    def before(self, ends: Iterable[Place], size: int) -> list[int]:
        """Return for each batch of the block how many rows were lost since the one before.

        Args:
            ends: of the batches, in the walk: there ranks lose no rows, others stand in.
            size: of a batch.
        """
        lost = [self.until(window.lost_until(row)) for window, row in ends]
        for places in self._stand_ins:
            for batch in (places // size).tolist():
                lost[batch] += 1
        self._stand_ins = []
        return lost

    def until(self, lost: int) -> int:
        """Return how many of the walk's rows were lost that nobody was told of yet.

        Args:
            lost: that the walk has counted.
        """
        new, self._told = lost - self._told, lost
        return new

    def discard(self) -> None:
        """Begin another block: nobody gets the current one."""
        self._stand_ins = []
