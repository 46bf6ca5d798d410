"""Rows of mapped shards into a batch: few large operations.

One operation per (shard, field): each releases the GIL once, and a thread beside a busy
main thread gets it back only every switch interval. Rows are therefore taken in the
order of their shards. For large rows that becomes their order in the batch, which
means nothing to training; small rows are gathered for many batches at once, through a
block that a second operation puts in the planned order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from growcache.cache.formats.mapped import RaggedColumn
from growcache.loading.buffers import BufferPool
from growcache.loading.framework import Bytes, Framework, Integers
from growcache.loading.ragged import Ragged, Run, copy_values, ends_of, joined
from growcache.schema import Array, Field, Schema

# Samples from here on are copied once; smaller ones go through a block.
LARGE_ROW_BYTES = 64 * 1024
BLOCK_BYTES = 8_000_000
BLOCK_BATCHES = 64

# [rows, *shape], or values of different shapes.
Column: TypeAlias = Array | Ragged


class Columns(Protocol):
    """What a mapped shard shows: each of its fields is in one of both."""

    @property
    def fields(self) -> Mapping[str, Bytes]:
        """The columns of equal rows: uint8 [samples, nbytes]."""

    @property
    def ragged(self) -> Mapping[str, RaggedColumn]:
        """All others."""


def batches_per_block(sample_bytes: int, batch_size: int) -> int:
    """Return how many batches are gathered at once.

    >>> batches_per_block(256 * 1024, 64), batches_per_block(3072, 64)
    (1, 40)
    """
    if sample_bytes >= LARGE_ROW_BYTES:
        return 1
    return max(1, min(BLOCK_BATCHES, BLOCK_BYTES // max(1, sample_bytes * batch_size)))


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Rows of several shards.

    Attributes:
        shards: that they are of; None for one without rows.
        edges: the rows of shard i are those from ``edges[i]`` to ``edges[i + 1]``.
        rows: int64 [n], by shard.
        order: int64 [n], which of them comes when; None: as they are.
    """

    shards: Sequence[Columns | None]
    edges: Sequence[int]
    rows: Integers
    order: Integers | None

    def __iter__(self) -> Iterator[tuple[Columns, int, int]]:
        for shard, low, high in zip(self.shards, self.edges[:-1], self.edges[1:], strict=True):
            if shard is not None and high > low:
                yield shard, low, high


class Gatherer:
    """Fills recycled buffers with rows, block after block; used by one thread at a time.

    Args:
        schema: of what is gathered; the shards may hold more fields.
        rows: the most that one block holds.
        framework: lends its copies.
        in_order: put the rows in the planned order at the price of a second copy.

    Attributes:
        filled: rows of the current block.
    """

    def __init__(
        self, schema: Schema, rows: int, framework: Framework, *, in_order: bool
    ) -> None:
        self.filled = 0
        self._in_order = in_order
        widest = max((f.nbytes for f in schema.fields if not f.is_ragged), default=0)
        scratch = np.empty(rows * widest if in_order else 0, np.uint8)
        self._columns: list[_Equal | _Varied] = [
            _Varied(f, framework) if f.is_ragged else _Equal(f, rows, framework, scratch)
            for f in schema.fields
        ]

    def add(
        self, shards: Sequence[Columns | None], places: Integers, rows: Integers
    ) -> Integers:
        """Append rows to the block; their shards may be closed afterwards.

        Args:
            shards: the shards that the rows are in; None for one that no row is in.
            places: int64 [n], for each row its shard in ``shards``.
            rows: int64 [n], the row in that shard.

        Returns:
            ``origin`` int64 [n]: the i-th row that was appended is ``rows[origin[i]]``.
        """
        by_shard = np.argsort(places, kind="stable")
        edges = np.searchsorted(places[by_shard], np.arange(len(shards) + 1)).tolist()
        order = np.argsort(by_shard) if self._in_order else None
        chosen = _Chosen(shards, edges, rows[by_shard], order)
        for column in self._columns:
            column.add(chosen, self.filled)
        self.filled += len(rows)
        return np.arange(len(rows)) if self._in_order else by_shard

    def finish(self) -> dict[str, Column]:
        """Return the block: arrays [filled, *shape] in the dtypes of the schema, or `Ragged`."""
        rows, self.filled = self.filled, 0
        return {column.field.name: column.finish(rows) for column in self._columns}


class _Equal:
    """The column of a field whose values have one size."""

    def __init__(self, field: Field, rows: int, framework: Framework, scratch: Bytes) -> None:
        self.field = field
        self._framework = framework
        self._scratch = scratch
        self._pool = BufferPool(rows * field.nbytes)
        self._buffer: Bytes | None = None

    def add(self, chosen: _Chosen, start: int) -> None:
        if self._buffer is None:
            self._buffer = self._pool.take()
        field, rows, take = self.field, chosen.rows, self._framework.take
        out = _rows(self._buffer, field, start, start + len(rows))
        target = out if chosen.order is None else _rows(self._scratch, field, 0, len(rows))
        for shard, low, high in chosen:
            column = shard.fields.get(field.name)
            if column is not None:
                take(column, rows[low:high], target[low:high])
            else:
                run = _run(shard.ragged[field.name], rows[low:high])
                flat = target[low:high].reshape(-1)
                copy_values([run], None, field.item.itemsize, flat, self._framework.join)
        if chosen.order is not None:
            take(target, chosen.order, out)

    def finish(self, rows: int) -> Array:
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            buffer = np.empty(0, np.uint8)
        return typed(_rows(buffer, self.field, 0, rows), self.field)


class _Varied:
    """The column of a ragged field."""

    def __init__(self, field: Field, framework: Framework) -> None:
        self.field = field
        self._join = framework.join
        self._pool = BufferPool()
        self._added: list[Ragged] = []

    def add(self, chosen: _Chosen, start: int) -> None:
        runs, dims = [], []
        for shard, low, high in chosen:
            column = shard.ragged[self.field.name]
            runs.append(_run(column, chosen.rows[low:high]))
            dims.append(column.dims[chosen.rows[low:high]])
        lengths = np.concatenate([run.lengths for run in runs])
        sizes = np.concatenate(dims)
        if chosen.order is not None:
            lengths, sizes = lengths[chosen.order], sizes[chosen.order]
        ends = ends_of(lengths)
        out = self._pool.take(int(ends[-1]))
        copy_values(runs, chosen.order, self.field.item.itemsize, out, self._join)
        self._added.append(Ragged(self.field, out, ends, sizes))

    def finish(self, rows: int) -> Ragged:
        added, self._added = self._added, []
        if added:
            return joined(added)
        nothing: Bytes = np.empty(0, np.uint8)
        dims = np.empty((0, len(self.field.ragged_dims)), np.int64)
        return Ragged(self.field, nothing, np.zeros(1, np.int64), dims)


def _run(column: RaggedColumn, rows: Integers) -> Run:
    return Run(column.memory, column.starts[rows], column.lengths[rows])


def _rows(buffer: Bytes, field: Field, start: int, stop: int) -> Bytes:
    part = buffer[start * field.nbytes : stop * field.nbytes]
    return part.reshape(stop - start, field.nbytes)


def typed(rows: Bytes, field: Field) -> Array:
    """Return uint8 [n, nbytes] as [n, *shape] of the field's dtype, sharing memory."""
    return rows.reshape(-1).view(field.item).reshape(len(rows), *field.fixed_shape)
