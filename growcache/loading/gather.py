"""Rows of mapped shards into a batch: few large operations.

One operation per (shard, field): each releases the GIL once, and a thread beside a busy
main thread gets it back only every switch interval. Rows are therefore taken in the
order of their shards. For large rows that becomes their order in the batch, which
means nothing to training; small rows are gathered for many batches at once, through a
block that a second operation puts in the planned order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from growcache.loading.buffers import BufferPool
from growcache.schema import Array, Field, Schema

Bytes: TypeAlias = npt.NDArray[np.uint8]
Integers: TypeAlias = npt.NDArray[np.int64]

# take(source, rows, out): out[i] = source[rows[i]]; uint8 [samples, nbytes] with any row
# stride, int64 [n], uint8 [n, nbytes] contiguous. Rows are within bounds.
Take: TypeAlias = Callable[[Bytes, Integers, Bytes], None]

# Samples from here on are copied once; smaller ones go through a block.
LARGE_ROW_BYTES = 64 * 1024
BLOCK_BYTES = 8_000_000
BLOCK_BATCHES = 64


class Columns(Protocol):
    """What a mapped shard shows: uint8 [samples, nbytes] per field."""

    @property
    def fields(self) -> Mapping[str, Bytes]:
        """The columns by name."""


def take_rows(source: Bytes, rows: Integers, out: Bytes) -> None:
    """Copy row after row: the `Take` that needs NumPy alone.

    `numpy.take` would first copy the whole of a strided source.
    """
    for i, row in enumerate(rows.tolist()):
        out[i] = source[row]


def batches_per_block(sample_bytes: int, batch_size: int) -> int:
    """Return how many batches are gathered at once.

    >>> batches_per_block(256 * 1024, 64), batches_per_block(3072, 64)
    (1, 40)
    """
    if sample_bytes >= LARGE_ROW_BYTES:
        return 1
    return max(1, min(BLOCK_BATCHES, BLOCK_BYTES // max(1, sample_bytes * batch_size)))


class Gatherer:
    """Fills recycled buffers with rows, block after block; used by one thread at a time.

    Args:
        schema: of the samples.
        rows: the most that one block holds.
        take: copies the rows of one shard.
        in_order: put the rows in the planned order at the price of a second copy.

    Attributes:
        filled: rows of the current block.
    """

    def __init__(self, schema: Schema, rows: int, take: Take, *, in_order: bool) -> None:
        self.filled = 0
        self._schema = schema
        self._take = take
        self._pools = {f.name: BufferPool(rows * f.nbytes) for f in schema.fields}
        self._buffers: dict[str, Bytes] = {}
        widest = max(f.nbytes for f in schema.fields)
        self._scratch = np.empty(rows * widest if in_order else 0, np.uint8)
        self._in_order = in_order

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
        if not self._buffers:
            self._buffers = {name: pool.take() for name, pool in self._pools.items()}
        start, self.filled = self.filled, self.filled + len(rows)
        by_shard = np.argsort(places, kind="stable")
        edges = np.searchsorted(places[by_shard], np.arange(len(shards) + 1)).tolist()
        rows = rows[by_shard]
        back = np.argsort(by_shard) if self._in_order else by_shard
        for field in self._schema.fields:
            out = _rows(self._buffers[field.name], field, start, self.filled)
            target = _rows(self._scratch, field, 0, len(rows)) if self._in_order else out
            for shard, low, high in zip(shards, edges[:-1], edges[1:], strict=True):
                if shard is not None and high > low:
                    self._take(shard.fields[field.name], rows[low:high], target[low:high])
            if self._in_order:
                self._take(target, back, out)
        return np.arange(len(rows)) if self._in_order else by_shard

    def finish(self) -> dict[str, Array]:
        """Return the block as arrays [filled, *shape] in the dtypes of the schema."""
        buffers, rows = self._buffers, self.filled
        self._buffers, self.filled = {}, 0
        return {
            f.name: typed(_rows(buffers[f.name], f, 0, rows), f) for f in self._schema.fields
        }


def _rows(buffer: Bytes, field: Field, start: int, stop: int) -> Bytes:
    part = buffer[start * field.nbytes : stop * field.nbytes]
    return part.reshape(stop - start, field.nbytes)


def typed(rows: Bytes, field: Field) -> Array:
    """Return uint8 [n, nbytes] as [n, *shape] of the field's dtype, sharing memory."""
    return rows.reshape(-1).view(field.dtype).reshape(len(rows), *field.shape)
