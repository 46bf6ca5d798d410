"""Blocks: the rows of one or more batches, gathered, transformed and labelled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from growcache.cache.formats.mapped import MappedShard
from growcache.loading.gather import (
    LARGE_ROW_BYTES,
    Gatherer,
    Integers,
    Take,
    batches_per_block,
)
from growcache.loading.options import LoaderOptions
from growcache.loading.passes import Piece
from growcache.loading.transforms import Transform
from growcache.schema import Array, Origin, Schema

Batch: TypeAlias = dict[str, Array]


@dataclass(frozen=True, slots=True)
class Block:
    """Some batches of an epoch in one set of arrays.

    Attributes:
        epoch: that it belongs to.
        arrays: [rows, *shape] per field.
        numbers: int64 [rows], the shard of each row.
        counts: how many rows are of which shard.
    """

    epoch: int
    arrays: Batch
    numbers: Integers
    counts: dict[int, int]


def count_of(numbers: Integers) -> dict[int, int]:
    """Return how often each number occurs."""
    found, counts = np.unique(numbers, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


class Assembler:
    """Makes blocks out of pieces; used by one thread.

    Args:
        options: of the loader.
        schema: of the samples.
        take: copies the rows of one shard.

    Attributes:
        rows: of a full block.
    """

    def __init__(self, options: LoaderOptions, schema: Schema, take: Take) -> None:
        nbytes = schema.nbytes
        self.rows = options.batch_size * batches_per_block(nbytes, options.batch_size)
        self._gatherer = Gatherer(schema, self.rows, take, in_order=nbytes < LARGE_ROW_BYTES)
        self._transform = (
            Transform(options.transform, options.seed, self.rows) if options.transform else None
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
        arrays = self._gatherer.finish()
        numbers, places, origins = self._numbers, self._places, self._origins
        self._numbers, self._places, self._origins = [], [], []
        if self._transform is not None:
            arrays = self._transform.run(arrays, places, origins or None)
        joined = np.concatenate(numbers)
        return Block(epoch, arrays, joined, count_of(joined))

    def discard(self) -> None:
        """Begin another block instead of this one."""
        self._gatherer.finish()
        self._numbers, self._places, self._origins = [], [], []

    def close(self) -> None:
        """End the threads of the transform."""
        if self._transform is not None:
            self._transform.close()
