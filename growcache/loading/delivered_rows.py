"""The rows of a batch as positions in the plans of passes, which a journal records.

Almost every batch is the run of positions after the previous batch. All other content is
recorded in full: rows of two passes, rows left out because a shard is damaged, substitutes, and
padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from growcache.loading.framework import Booleans, Integers
from growcache.loading.options import LoaderOptions
from growcache.loading.plan import PassPlan, Window, locate_samples
from growcache.loading.windows import Piece


class Run(NamedTuple):
    pass_number: int
    start: int  # position in the pass
    stop: int


class Substitute(NamedTuple):
    place: int  # row in the batch
    shard: int
    row: int


@dataclass(frozen=True, slots=True)
class BatchRows:
    runs: tuple[Run, ...]
    substitutes: tuple[Substitute, ...] = ()
    padding: int = 0  # rows at the end that only fill up the batch

    def __len__(self) -> int:
        return sum(run.stop - run.start for run in self.runs)

    def after(self, batches: int, batch_size: int, stride: int) -> BatchRows | None:
        """Return the rows of a later batch if all batches in between are regular.

        The result is None after an irregular batch.

        >>> BatchRows((Run(0, 8, 12),)).after(2, 4, 4)
        BatchRows(runs=(Run(pass_number=0, start=16, stop=20),), substitutes=(), padding=0)
        """
        if len(self.runs) != 1 or self.substitutes or self.padding or len(self) != batch_size:
            return None
        ((number, start, stop),) = self.runs
        return BatchRows((Run(number, start + batches * stride, stop + batches * stride),))


def irregular_batches(pieces: Sequence[Piece], size: int, stride: int) -> dict[int, BatchRows]:
    """Return the rows of the batches of a block that do not follow from the batch before.

    The pieces are the block's rows in order. The first batch is always among them.
    """
    positions = np.concatenate([w.positions(start, stop) for w, start, stop in pieces])
    lengths = [stop - start for _, start, stop in pieces]
    passes = np.repeat([w.plan.pass_number for w, _, _ in pieces], lengths)
    substitutes, padding = _substitutes(pieces), _padding(pieces)
    starts = np.arange(0, len(positions), size)
    jumps = _jumps(positions, passes)
    follows = (np.diff(positions[starts]) == stride) & (np.diff(passes[starts]) == 0)
    odd = {at // size for at in (*jumps[jumps % size > 0].tolist(), *substitutes, *padding)}
    if len(positions) % size:
        odd.add(len(starts) - 1)
    found: dict[int, BatchRows] = {}
    for batch, start in enumerate(starts.tolist()):
        if not batch or batch in odd or batch - 1 in odd or not follows[batch - 1]:
            mine = slice(start, start + size)
            others = (
                (at - start, *substitutes[at]) for at in substitutes if at // size == batch
            )
            found[batch] = BatchRows(
                _runs(positions[mine], passes[mine]),
                tuple(Substitute(*other) for other in others),
                sum(at // size == batch for at in padding),
            )
    return found


def _jumps(positions: Integers, passes: Integers) -> Integers:
    """Return the rows that do not follow the row before."""
    found: Integers = np.flatnonzero((np.diff(positions) != 1) | (np.diff(passes) != 0)) + 1
    return found


def _runs(positions: Integers, passes: Integers) -> tuple[Run, ...]:
    edges = [0, *_jumps(positions, passes).tolist(), len(positions)]
    return tuple(
        Run(int(passes[first]), int(positions[first]), int(positions[first]) + end - first)
        for first, end in pairwise(edges)
    )


def _substitutes(pieces: Sequence[Piece]) -> dict[int, tuple[int, int]]:
    """Return shard and row of those rows of the block that are not the planned ones."""
    found: dict[int, tuple[int, int]] = {}
    first = 0
    for window, start, stop in pieces:
        if window.valid is not None:  # in windows with damaged shards
            planned = plan_rows(window.plan, window.positions(start, stop))
            places, rows = window.located(start, stop)
            numbers = np.array(window.numbers, np.int64)[places]
            for at in np.flatnonzero((numbers != planned[0]) | (rows != planned[1])).tolist():
                found[first + at] = int(numbers[at]), int(rows[at])
        first += stop - start
    return found


def _padding(pieces: Sequence[Piece]) -> list[int]:
    found: list[int] = []
    first = 0
    for window, start, stop in pieces:
        if window.padding:
            found += range(first, first + stop - start)
        first += stop - start
    return found


def plan_rows(window: Window, positions: Integers) -> tuple[Integers, Integers]:
    """Return shard and row of these positions of the pass: int64 [n] each.

    All positions are in the window.
    """
    places, rows = locate_samples(window.order()[positions - window.first], window.starts())
    return np.array(window.numbers, np.int64)[places], rows


class Places(NamedTuple):
    """The rows of a batch, in order."""

    passes: Integers
    positions: Integers  # in the pass
    shards: Integers
    rows: Integers
    valid: Booleans  # False: substitutes and padding


def places_of(
    batch: BatchRows, plans: Mapping[int, PassPlan], options: LoaderOptions
) -> Places:
    """Return the places of a batch's samples. The plans are those of its runs."""
    columns = [_run_rows(run, plans[run.pass_number], options) for run in batch.runs]
    passes, positions, shards, rows = (np.concatenate(c) for c in zip(*columns, strict=True))
    valid = np.arange(len(rows)) < len(rows) - batch.padding
    for place, shard, row in batch.substitutes:
        shards[place], rows[place], valid[place] = shard, row, False
    return Places(passes, positions, shards, rows, valid)


def _run_rows(
    run: Run, plan: PassPlan, options: LoaderOptions
) -> tuple[Integers, Integers, Integers, Integers]:
    positions = np.arange(run.start, run.stop)
    shards, rows = np.zeros_like(positions), np.zeros_like(positions)
    for window in plan.windows(options):
        end = window.first + len(window)
        mine = np.flatnonzero((positions >= window.first) & (positions < end))
        if len(mine):
            shards[mine], rows[mine] = plan_rows(window, positions[mine])
    return np.full(len(positions), run.pass_number), positions, shards, rows
