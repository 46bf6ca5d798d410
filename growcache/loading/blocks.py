"""Blocks: the rows of one or more batches, gathered, transformed, labelled and cut."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from growcache.cache.formats.mapped import MappedShard
from growcache.loading.calls import blamed
from growcache.loading.framework import Framework, Integers
from growcache.loading.gather import LARGE_ROW_BYTES, Column, Gatherer, batches_per_block
from growcache.loading.options import LoaderOptions
from growcache.loading.passes import Piece
from growcache.loading.ragged import Ragged, Styler
from growcache.loading.snapshot import Snapshot
from growcache.loading.transforms import Transform
from growcache.schema import Origin

Batch: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Block:
    """Some batches of an epoch.

    Attributes:
        epoch: that it belongs to.
        batches: what is delivered; whoever delivers one takes it out, for its memory is
            wanted again as soon as the user lets go of it.
        numbers: int64 [rows], the shard of each row.
        counts: how many rows are of which shard.
        nbytes: of the arrays that the batches are cut of.
    """

    epoch: int
    batches: deque[Any]
    numbers: Integers
    counts: dict[int, int]
    nbytes: int


def count_of(numbers: Integers) -> dict[int, int]:
    """Return how often each number occurs."""
    found, counts = np.unique(numbers, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


class Assembler:
    """Makes blocks out of pieces; used by one thread.

    Args:
        options: of the loader.
        snapshot: the first one, for the schema and the size of samples.
        framework: lends copies, and says what a batch holds.

    Attributes:
        rows: of a full block.

    Raises:
        ConfigError: the schema has no such field.
    """

    def __init__(
        self, options: LoaderOptions, snapshot: Snapshot, framework: Framework
    ) -> None:
        schema = options.chosen(snapshot.schema)
        nbytes = snapshot.sample_bytes if schema.is_ragged else schema.nbytes
        self.rows = options.batch_size * batches_per_block(nbytes, options.batch_size)
        in_order = nbytes < LARGE_ROW_BYTES
        self._gatherer = Gatherer(schema, self.rows, framework, in_order=in_order)
        self._options = options
        self._deliver = framework.deliver
        self._styler = Styler(options.ragged, framework.join)
        self._transform = (
            Transform(options.transform, options.seed, self.rows, schema)
            if options.transform
            else None
        )
        self._numbers: list[Integers] = []
        self._places: list[tuple[int, int]] = []
        self._origins: list[Origin] = []

    @property
    def room(self) -> int:
        """Rows that the current block still takes."""
        return self.rows - self._gatherer.filled

    def add(self, pieces: list[Piece]) -> None:
        """Append rows of one pass; its snapshot may be closed afterwards."""
        shards: list[MappedShard | None] = []
        places, rows, numbers = [], [], []
        for window, start, stop in pieces:
            place = window.places[start:stop]
            places.append(place + len(shards))
            rows.append(window.rows[start:stop])
            numbers.append(np.asarray(window.plan.numbers)[place])
            shards += window.shards
        origin = self._gatherer.add(shards, np.concatenate(places), np.concatenate(rows))
        self._numbers.append(np.concatenate(numbers)[origin])
        if self._transform is not None:
            self._note(self._transform, pieces, origin)

    def _note(self, transform: Transform, pieces: list[Piece], origin: Integers) -> None:
        where: list[tuple[int, int]] = []
        origins: list[Origin] = []
        for window, start, stop in pieces:
            plan = window.plan
            where += [(plan.pass_number, p) for p in window.positions[start:stop].tolist()]
            if transform.takes_origin:
                places, rows = window.places[start:stop], window.rows[start:stop]
                origins += [
                    window.snapshot.sidecar(plan.numbers[place]).origin(row)
                    for place, row in zip(places.tolist(), rows.tolist(), strict=True)
                ]
        order = origin.tolist()
        self._places += [where[i] for i in order]
        if transform.takes_origin:
            self._origins += [origins[i] for i in order]

    def finish(self, epoch: int) -> Block:
        """Return the block, and begin another."""
        columns: Mapping[str, Column] = self._gatherer.finish()
        numbers, places, origins = self._numbers, self._places, self._origins
        self._numbers, self._places, self._origins = [], [], []
        if self._transform is not None:
            columns = self._transform.run(columns, places, origins or None)
        joined, size = np.concatenate(numbers), self._options.batch_size
        starts = range(0, len(joined), size)
        batches = deque(self._batch(columns, i, min(i + size, len(joined))) for i in starts)
        nbytes = sum(column.nbytes for column in columns.values())
        return Block(epoch, batches, joined, count_of(joined), nbytes)

    def _batch(self, columns: Mapping[str, Column], start: int, stop: int) -> Any:
        """Return what is delivered of the rows from ``start`` to ``stop``."""
        arrays: Batch = {}
        for name, column in columns.items():
            if isinstance(column, Ragged):
                arrays |= self._styler.batch(column.part(start, stop))
            else:
                arrays[name] = column[start:stop]
        batch = {name: self._delivered(name, value) for name, value in arrays.items()}
        function = self._options.batch_transform
        if function is None:
            return batch
        with blamed("batch_transform", function):
            return function(batch)

    def _delivered(self, name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [self._deliver(name, v) if isinstance(v, np.ndarray) else v for v in value]
        return self._deliver(name, value)

    def discard(self) -> None:
        """Begin another block instead of this one."""
        self._gatherer.finish()
        self._numbers, self._places, self._origins = [], [], []

    def close(self) -> None:
        """End the threads of the transform."""
        if self._transform is not None:
            self._transform.close()
