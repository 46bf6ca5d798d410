"""Rows of mapped shards into a batch: few large operations, in the planned order.

One operation per field copies rows out of all shards of a window: each operation releases
the GIL once, and a thread beside a busy main thread gets it back only every switch
interval. For the same reason small rows are gathered for many batches at once.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from growcache.loading.columns import Rows
from growcache.loading.framework import BLOCK_BYTES, Bytes, Framework
from growcache.loading.ragged import Ragged, Run, copy_values, ends_of, joined
from growcache.schema import Array, Field, Schema

BLOCK_BATCHES = 128

# Nothing of a block is delivered before all of it is transformed. Samples from here on are
# transformed a batch at a time; of smaller ones it takes several to be worth it.
LARGE_ROW_BYTES = 64 * 1024
TRANSFORMED_BYTES = 8_000_000
TRANSFORMED_BATCHES = 64

# Of the first block for a consumer that waits, if batches are not larger: as much as is copied
# in the time that a block takes besides.
FIRST_BYTES = 2_000_000
# From block to block; each takes a buffer for a full one, so they had better not be many.
STEEPNESS = 4

# [rows, *shape], or values of different shapes.
Column: TypeAlias = Array | Ragged


def batches_per_block(
    sample_bytes: int,
    batch_size: int,
    *,
    transformed: bool = False,
    block_bytes: int = BLOCK_BYTES,
) -> int:
    """Return how many batches are gathered at once.

    >>> batches_per_block(256 * 1024, 64), batches_per_block(3072, 64)
    (4, 128)
    >>> [batches_per_block(nbytes, 64, transformed=True) for nbytes in (256 * 1024, 64)]
    [1, 64]
    """
    if transformed and sample_bytes >= LARGE_ROW_BYTES:
        return 1
    batches, nbytes = BLOCK_BATCHES, block_bytes
    if transformed:
        batches, nbytes = TRANSFORMED_BATCHES, TRANSFORMED_BYTES
    return max(1, min(batches, nbytes // max(1, sample_bytes * batch_size)))


class Ramp:
    """How many rows the next block holds: few where the consumer waits, and then ever more.

    Nothing of a block is delivered before all of it is there. So who waits for the first batch
    of an epoch gets a small block, and who then copies quicker than that is consumed comes to
    the large ones after some.

    Args:
        batch_size: rows of a batch.
        least: batches of the smallest block.
        most: of a full one.
    """

    def __init__(self, batch_size: int, least: int, most: int) -> None:
        self._batch_size = batch_size
        self._least = min(least, most)
        self._most = most
        self._batches = most

    @property
    def rows(self) -> int:
        """Of the block."""
        return self._batches * self._batch_size

    def begin(self, filled: int) -> None:
        """Have the block be as small as it can be, where so many of its rows are there."""
        self._batches = min(self._batches, filled // self._batch_size + self._least)

    def climb(self) -> None:
        """Have the next block be larger, if there are such."""
        self._batches = min(self._most, STEEPNESS * self._batches)


class Gatherer:
    """Fills recycled buffers with rows, block after block; used by one thread at a time.

    Args:
        schema: of what is gathered; the shards may hold more fields.
        rows: the most that one block holds.
        framework: lends its copies.

    Attributes:
        filled: rows of the current block.
    """

    def __init__(self, schema: Schema, rows: int, framework: Framework) -> None:
        self.filled = 0
        self._columns: list[_Equal | _Varied] = [
            _Varied(f, framework) if f.is_ragged else _Equal(f, rows, framework)
            for f in schema.fields
        ]

    def add(self, rows: Rows) -> None:
        """Append rows to the block; their shards may be closed afterwards.

        Raises:
            CacheError: the shards were closed before.
        """
        for column in self._columns:
            column.add(rows, self.filled)
        self.filled += len(rows)

    def rewind(self, filled: int) -> None:
        """Take rows back: only the first so many of the block stay."""
        self.filled = filled
        for column in self._columns:
            column.rewind(filled)

    def finish(self) -> dict[str, Column]:
        """Return the block: arrays [filled, *shape] in the dtypes of the schema, or `Ragged`."""
        rows, self.filled = self.filled, 0
        return {column.field.name: column.finish(rows) for column in self._columns}

    def close(self) -> None:
        """Leave the buffers to who comes next."""
        for column in self._columns:
            column.close()


class _Equal:
    """The column of a field whose values have one size."""

    def __init__(self, field: Field, rows: int, framework: Framework) -> None:
        self.field = field
        self._nbytes = field.nbytes
        self._framework = framework
        self._take = framework.take
        self._pool = framework.pool(field.name, rows * self._nbytes)
        self._buffer: Bytes | None = None

    def add(self, rows: Rows, start: int) -> None:
        memory = rows.memory(self.field.name)
        if self._buffer is None:
            self._buffer = self._pool.take()
        out = _rows(self._buffer, self._nbytes, start, start + len(rows))
        if out.size:
            self._take(memory, rows.values[self.field.name].begins, out)

    def rewind(self, filled: int) -> None:
        pass  # rows are counted by the block

    def finish(self, rows: int) -> Array:
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            buffer = np.empty(0, np.uint8)
        return typed(_rows(buffer, self._nbytes, 0, rows), self.field)

    def close(self) -> None:
        self._framework.leave(self.field.name, self._pool)


class _Varied:
    """The column of a ragged field."""

    def __init__(self, field: Field, framework: Framework) -> None:
        self.field = field
        self._item_bytes = field.item.itemsize
        self._framework = framework
        self._join = framework.join
        self._take_slices = framework.take_slices
        self._pool = framework.pool(field.name)
        self._added: list[Ragged] = []

    def add(self, rows: Rows, start: int) -> None:
        begins, lengths, dims = rows.values[self.field.name]
        assert lengths is not None
        assert dims is not None
        ends = ends_of(lengths)
        out = self._pool.take(int(ends[-1]))
        run = Run(rows.memory(self.field.name), begins, lengths)
        copy_values(run, self._item_bytes, out, self._take_slices)
        self._added.append(Ragged(self.field, out, ends, dims))

    def rewind(self, filled: int) -> None:
        while sum(map(len, self._added)) > filled:
            self._added.pop()

    def finish(self, rows: int) -> Ragged:
        added, self._added = self._added, []
        if added:
            return joined(added, self._pool, self._join)
        nothing: Bytes = np.empty(0, np.uint8)
        dims = np.empty((0, len(self.field.ragged_dims)), np.int64)
        return Ragged(self.field, nothing, np.zeros(1, np.int64), dims)

    def close(self) -> None:
        self._framework.leave(self.field.name, self._pool)


def _rows(buffer: Bytes, nbytes: int, start: int, stop: int) -> Bytes:
    return buffer[start * nbytes : stop * nbytes].reshape(stop - start, nbytes)


def typed(rows: Bytes, field: Field) -> Array:
    """Return uint8 [n, nbytes] as [n, *shape] of the field's dtype, sharing memory."""
    return rows.reshape(-1).view(field.item).reshape(len(rows), *field.fixed_shape)
