"""Copy rows of mapped shards into a block: few large operations, in the planned order.

One operation per field copies rows out of all shards of a window. Each operation releases the GIL
once, and a thread beside a busy main thread gets it back only every switch interval. For the same
reason small rows are gathered for many batches at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from growcache.loading.buffers import BLOCK_BYTES, BufferPool
from growcache.loading.columns import MappedRows
from growcache.loading.framework import (
    Bytes,
    Framework,
    Integers,
    Join,
    TakeSlices,
    join_parts,
    slices,
)
from growcache.schema import STR, Array, Field, Schema, Value

RaggedStyle: TypeAlias = Literal["offsets", "pad", "list"]
RAGGED_STYLES: tuple[RaggedStyle, ...] = ("offsets", "pad", "list")

# Values of fewer items are copied item by item, by an index that NumPy computes: a step of
# Python each would take as long, and hold the GIL.
SMALL_ITEMS = 256


def offsets_of(lengths: Integers) -> Integers:
    """Return where values of these lengths begin, and the end of the last: [n + 1]."""
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    return ends


class ValueRanges(NamedTuple):
    """Values in one memory: uint8 [k], starts and lengths int64 [n]."""

    memory: Bytes
    starts: Integers
    lengths: Integers


def copy_values(run: ValueRanges, item_bytes: int, out: Bytes, take_slices: TakeSlices) -> None:
    """Copy values into ``out``, back to back."""
    if len(out) > SMALL_ITEMS * item_bytes * len(run.lengths):
        take_slices(*run, out)
    else:
        copy_items(run, item_bytes, out)


def copy_items(run: ValueRanges, item_bytes: int, out: Bytes) -> None:
    """Copy short values without a step of Python for each."""
    if not len(out):
        return
    unit = math.gcd(item_bytes, 8)
    before = offsets_of(run.lengths)[:-1]
    index = np.repeat(run.starts - before, run.lengths // unit)
    index += np.arange(0, len(out), unit)
    items: Array = np.ndarray((len(run.memory) - unit + 1,), f"<u{unit}", run.memory, 0, (1,))
    out.view(f"<u{unit}")[:] = items[index]


@dataclass(frozen=True, slots=True)
class Ragged:
    """The values of a ragged field, back to back, with their lengths and shapes."""

    field: Field
    values: Bytes
    ends: Integers
    dims: Integers

    def __len__(self) -> int:
        return len(self.dims)

    def __getitem__(self, i: int) -> Value:
        """Return value ``i``; an array shares memory."""
        raw = self.values[self.ends[i] : self.ends[i + 1]]
        if self.field.is_blob:
            data = raw.tobytes()
            return data.decode() if self.field.dtype == STR else data
        return raw.view(self.field.item_dtype).reshape(
            self.field.shape_of(self.dims[i].tolist())
        )

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def part(self, start: int, stop: int) -> Ragged:
        ends = self.ends[start : stop + 1]
        values = self.values[ends[0] : ends[-1]]
        return Ragged(self.field, values, ends - ends[0], self.dims[start:stop])

    @property
    def grows_along_rows(self) -> bool:
        return self.field.ragged_dims == (0,)

    @property
    def inner(self) -> tuple[int, ...]:
        return tuple(size for size in self.field.dims[1:] if size is not None)


class RaggedStyler:
    """Turns ragged values into what a batch holds; used by one thread."""

    def __init__(self, style: RaggedStyle, framework: Framework) -> None:
        self._style = style
        self._framework = framework
        self._join = framework.join
        self._pools: dict[str, BufferPool] = {}

    def batch(self, values: Ragged) -> dict[str, Any]:
        """Return arrays, or a list, by name."""
        name = values.field.name
        if values.field.dtype == STR or self._style == "list":
            return {name: [values[i] for i in range(len(values))]}
        return self._padded(values) if self._style == "pad" else _with_offsets(values)

    def close(self) -> None:
        for name, pool in self._pools.items():
            self._framework.leave(_padded_pool_name(name), pool)

    def _padded(self, values: Ragged) -> dict[str, Array]:
        field, name = values.field, values.field.name
        longest = field.shape_of(values.dims.max(axis=0, initial=0).tolist())
        nbytes = len(values) * math.prod(longest) * field.item_dtype.itemsize
        if name not in self._pools:
            self._pools[name] = self._framework.pool(_padded_pool_name(name))
        memory = self._pools[name].take(nbytes)
        out: Array = memory.view(field.item_dtype).reshape(len(values), *longest)
        if values.grows_along_rows and nbytes:
            _pad_rows(values, memory.reshape(len(values), -1), self._join)
        else:
            out[...] = 0
            for i, dims in enumerate(values.dims.tolist()):
                out[i][tuple(map(slice, field.shape_of(dims)))] = values[i]
        lengths = values.dims[:, 0] if values.dims.shape[1] == 1 else values.dims
        return {name: out, f"{name}_lengths": np.ascontiguousarray(lengths)}


def _padded_pool_name(name: str) -> str:
    return f"{name}, padded"


def _with_offsets(values: Ragged) -> dict[str, Array]:
    field, name = values.field, values.field.name
    flat: Array = values.values.view(field.item_dtype)
    if values.grows_along_rows:
        offsets = offsets_of(values.dims[:, 0])
        return {name: flat.reshape(offsets[-1], *values.inner), f"{name}_offsets": offsets}
    shapes = np.empty((len(values), len(field.dims)), np.int64)
    shapes[:] = [0 if size is None else size for size in field.dims]
    shapes[:, list(field.ragged_dims)] = values.dims
    offsets = values.ends // field.item_dtype.itemsize
    return {name: flat, f"{name}_offsets": offsets, f"{name}_shapes": shapes}


def _pad_rows(values: Ragged, out: Bytes, join: Join) -> None:
    """Copy each value to the start of a row, followed by zeros."""
    width, lengths = out.shape[1], np.diff(values.ends)
    if len(values.values) > SMALL_ITEMS * values.field.item_dtype.itemsize * len(values):
        run = ValueRanges(values.values, values.ends[:-1], lengths)
        zeros = np.zeros(width - int(lengths.min()), np.uint8)
        rests = map(zeros.__getitem__, map(slice, (width - lengths).tolist()))
        pairs = zip(slices(*run), rests, strict=True)
        join(list(chain.from_iterable(pairs)), out.reshape(-1))
        return
    out[...] = 0
    item = f"V{math.gcd(values.field.item_dtype.itemsize, 8)}"
    cells: Array = out.view(item)
    filled = np.arange(cells.shape[1]) < (lengths // cells.dtype.itemsize)[:, None]
    cells[filled] = values.values.view(item)


def join_ragged(values: Sequence[Ragged], pool: BufferPool, join: Join) -> Ragged:
    first = values[0]
    if len(values) == 1:
        return first
    ends = offsets_of(np.concatenate([np.diff(one.ends) for one in values]))
    out = pool.take(int(ends[-1]))
    if len(out):
        join([one.values for one in values], out)
    return Ragged(first.field, out, ends, np.concatenate([one.dims for one in values]))


def ragged_of_values(field: Field, values: Sequence[Value], pool: BufferPool) -> Ragged:
    parts = [_bytes_of(value) for value in values]
    ends = offsets_of(np.fromiter(map(len, parts), np.int64, len(parts)))
    out = pool.take(int(ends[-1]))
    if len(out):
        join_parts(parts, out)  # torch warns about memory that may only be read
    if field.is_blob:
        return Ragged(field, out, ends, np.diff(ends)[:, None])
    shapes = np.array([np.shape(value) for value in values], np.int64)
    dims = shapes.reshape(len(values), -1)[:, list(field.ragged_dims)]
    return Ragged(field, out, ends, dims)


def _bytes_of(value: Value) -> Bytes:
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes):
        return np.frombuffer(value, np.uint8)
    return value.reshape(-1).view(np.uint8)


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
RAMP_FACTOR = 4

# [rows, *shape], or values of different shapes.
Column: TypeAlias = Array | Ragged


def batches_per_block(sample_bytes: int, batch_size: int, *, transformed: bool = False) -> int:
    """Return how many batches are gathered at once.

    >>> batches_per_block(64 * 1024, 64), batches_per_block(3072, 64)
    (8, 128)
    >>> [batches_per_block(nbytes, 64, transformed=True) for nbytes in (256 * 1024, 64)]
    [1, 64]
    """
    if transformed and sample_bytes >= LARGE_ROW_BYTES:
        return 1
    batches, nbytes = BLOCK_BATCHES, BLOCK_BYTES
    if transformed:
        batches, nbytes = TRANSFORMED_BATCHES, TRANSFORMED_BYTES
    return max(1, min(batches, nbytes // max(1, sample_bytes * batch_size)))


class BlockSizeRamp:
    """The number of rows of the next block: few while the consumer waits, then more and more.

    A block is delivered as a whole, so a small one brings the first batch of an epoch sooner.
    """

    def __init__(self, batch_size: int, least: int, most: int) -> None:
        self._batch_size = batch_size
        self._least = min(least, most)
        self._most = most
        self._batches = most

    @property
    def rows(self) -> int:
        return self._batches * self._batch_size

    def begin(self, filled: int) -> None:
        self._batches = min(self._batches, filled // self._batch_size + self._least)

    def grow(self) -> None:
        self._batches = min(self._most, RAMP_FACTOR * self._batches)


class Gatherer:
    """Fills recycled buffers with rows, block after block; used by one thread at a time."""

    def __init__(self, schema: Schema, rows: int, framework: Framework) -> None:
        self.filled = 0
        self._columns: list[_FixedColumn | _RaggedColumnBuffer] = [
            _RaggedColumnBuffer(f, framework)
            if f.is_ragged
            else _FixedColumn(f, rows, framework)
            for f in schema.fields
        ]

    def add(self, rows: MappedRows) -> None:
        for column in self._columns:
            column.add(rows, self.filled)
        self.filled += len(rows)

    def rewind(self, filled: int) -> None:
        """Drop all but the first rows of the block."""
        self.filled = filled
        for column in self._columns:
            column.rewind(filled)

    def finish(self) -> dict[str, Column]:
        """Return the block: arrays [filled, *shape] in the dtypes of the schema, or `Ragged`."""
        rows, self.filled = self.filled, 0
        return {column.field.name: column.finish(rows) for column in self._columns}

    def close(self) -> None:
        for column in self._columns:
            column.close()


class _FixedColumn:
    def __init__(self, field: Field, rows: int, framework: Framework) -> None:
        self.field = field
        self._nbytes = field.nbytes
        self._framework = framework
        self._take = framework.take
        self._pool = framework.pool(field.name, rows * self._nbytes)
        self._buffer: Bytes | None = None

    def add(self, rows: MappedRows, start: int) -> None:
        memory = rows.memory(self.field.name)
        if self._buffer is None:
            self._buffer = self._pool.take()
        out = _row_view(self._buffer, self._nbytes, start, start + len(rows))
        if out.size:
            self._take(memory, rows.values[self.field.name].begins, out)

    def rewind(self, filled: int) -> None:
        pass  # rows are counted by the block

    def finish(self, rows: int) -> Array:
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            buffer = np.empty(0, np.uint8)
        return typed_rows(_row_view(buffer, self._nbytes, 0, rows), self.field)

    def close(self) -> None:
        self._framework.leave(self.field.name, self._pool)


class _RaggedColumnBuffer:
    def __init__(self, field: Field, framework: Framework) -> None:
        self.field = field
        self._item_bytes = field.item_dtype.itemsize
        self._framework = framework
        self._join = framework.join
        self._take_slices = framework.take_slices
        self._pool = framework.pool(field.name)
        self._added: list[Ragged] = []

    def add(self, rows: MappedRows, start: int) -> None:
        begins, lengths, dims = rows.values[self.field.name]
        assert lengths is not None
        assert dims is not None
        ends = offsets_of(lengths)
        out = self._pool.take(int(ends[-1]))
        run = ValueRanges(rows.memory(self.field.name), begins, lengths)
        copy_values(run, self._item_bytes, out, self._take_slices)
        self._added.append(Ragged(self.field, out, ends, dims))

    def rewind(self, filled: int) -> None:
        while sum(map(len, self._added)) > filled:
            self._added.pop()

    def finish(self, rows: int) -> Ragged:
        added, self._added = self._added, []
        if added:
            return join_ragged(added, self._pool, self._join)
        nothing: Bytes = np.empty(0, np.uint8)
        dims = np.empty((0, len(self.field.ragged_dims)), np.int64)
        return Ragged(self.field, nothing, np.zeros(1, np.int64), dims)

    def close(self) -> None:
        self._framework.leave(self.field.name, self._pool)


def _row_view(buffer: Bytes, nbytes: int, start: int, stop: int) -> Bytes:
    return buffer[start * nbytes : stop * nbytes].reshape(stop - start, nbytes)


def typed_rows(rows: Bytes, field: Field) -> Array:
    """Return uint8 [n, nbytes] as [n, *shape] of the field's dtype, sharing memory."""
    return rows.reshape(-1).view(field.item_dtype).reshape(len(rows), *field.fixed_shape)
