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
    """Fills recycled buffers with the rows of a block; used by one thread at a time.

    Args:
        schema: of the samples.
        rows: the most that one block holds.
        take: copies the rows of one shard.
        in_order: put the rows in the planned order at the price of a second copy.
    """

    def __init__(self, schema: Schema, rows: int, take: Take, *, in_order: bool) -> None:
        self._schema = schema
        self._take = take
        self._pools = {f.name: BufferPool(rows * f.nbytes) for f in schema.fields}
        widest = max(f.nbytes for f in schema.fields)
        self._scratch = np.empty(rows * widest if in_order else 0, np.uint8)
        self._in_order = in_order

    def gather(
        self, shards: Sequence[Columns | None], places: Integers, rows: Integers
    ) -> tuple[dict[str, Array], Integers]:
        """Return the fields of a block, and which planned row stands where.

        Args:
            shards: the shards that the block touches; None for one that no row is of.
            places: int64 [n], for each row its shard in ``shards``.
            rows: int64 [n], the row in that shard.

        Returns:
            arrays [n, *shape] in the dtypes of the schema, and ``origin`` int64 [n]: row i
            of the arrays is ``rows[origin[i]]``.
        """
        by_shard = np.argsort(places, kind="stable")
        edges = np.searchsorted(places[by_shard], np.arange(len(shards) + 1)).tolist()
        rows = rows[by_shard]
        back = np.argsort(by_shard) if self._in_order else by_shard
        arrays = {}
        for field in self._schema.fields:
            out = self._rows_of(self._pools[field.name].take(), field, len(rows))
            target = self._rows_of(self._scratch, field, len(rows)) if self._in_order else out
            for shard, start, stop in zip(shards, edges[:-1], edges[1:], strict=True):
                if shard is not None and stop > start:
                    self._take(shard.fields[field.name], rows[start:stop], target[start:stop])
            if self._in_order:
                self._take(target, back, out)
            arrays[field.name] = typed(out, field)
        return arrays, np.arange(len(rows)) if self._in_order else by_shard

    def _rows_of(self, buffer: Bytes, field: Field, rows: int) -> Bytes:
        return buffer[: rows * field.nbytes].reshape(rows, field.nbytes)


def typed(rows: Bytes, field: Field) -> Array:
    """Return uint8 [n, nbytes] as [n, *shape] of the field's dtype, sharing memory."""
    return rows.reshape(-1).view(field.dtype).reshape(len(rows), *field.shape)
