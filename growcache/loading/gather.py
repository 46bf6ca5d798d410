"""Copy rows of mapped shards into a block: few large operations, in the planned order.

An array over all addresses from the first map of a window to the last lets one operation per
field copy from every shard. Each operation releases the GIL once, and a busy main thread
returns it only every switch interval. So small rows are gathered for many batches together.
Memory between the maps belongs to others, so a row is looked up in the tables of its shard
before it becomes an address.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from growcache.cache.formats import mapped
from growcache.cache.formats.mapped import FileEnd, RaggedColumn
from growcache.errors import CacheError
from growcache.loading.buffers import BufferPool
from growcache.loading.framework import Bytes, Framework, Integers
from growcache.loading.ragged import (
    Column,
    Ragged,
    ValueRanges,
    copy_values,
    join_ragged,
    offsets_of,
)
from growcache.schema import Array, Field, Schema

# Indexes in the smallest unsigned type.
ShardPlaces: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]


class ShardColumns(Protocol):
    """A mapped shard; each field is uint8 [samples, nbytes] or ragged."""

    @property
    def fields(self) -> Mapping[str, Bytes]: ...

    @property
    def ragged(self) -> Mapping[str, RaggedColumn]: ...

    @property
    def sentinels(self) -> Sequence[FileEnd]: ...

    @property
    def damaged(self) -> bool: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class MemorySpan:
    memory: Bytes  # uint8 [k]; only the arrays' own bytes may be touched
    address: int


@dataclass(frozen=True, slots=True)
class FixedAddresses:
    span: MemorySpan
    starts: Integers  # int64 [shards], first row of each in the span
    strides: Integers  # int64 [shards], bytes from row to row

    def values(self, places: Integers, rows: Integers) -> ValueAddresses:
        begins = self.strides[places]
        begins *= rows
        begins += self.starts[places]
        return ValueAddresses(begins)


@dataclass(frozen=True, slots=True)
class RaggedAddresses:
    span: MemorySpan
    firsts: Integers  # int64 [shards], number of values in earlier shards
    starts: Integers  # int64 [values], bytes
    lengths: Integers  # int64 [values], bytes
    dims: Integers  # int64 [values, k], the ragged dimensions

    def values(self, places: Integers, rows: Integers) -> ValueAddresses:
        found = self.firsts[places] + rows
        return ValueAddresses(self.starts[found], self.lengths[found], self.dims[found])


ColumnAddresses: TypeAlias = FixedAddresses | RaggedAddresses


class ValueAddresses(NamedTuple):
    begins: Integers  # int64 [n], bytes
    lengths: Integers | None = None  # int64 [n], bytes; None: fixed by the schema
    dims: Integers | None = None  # int64 [n, k], the ragged dimensions; None without

    def chosen(self, which: slice | Integers) -> ValueAddresses:
        return ValueAddresses._make(
            None if column is None else column[which] for column in self
        )


@dataclass(frozen=True, slots=True)
class MappedRows:
    """Rows of mapped shards, looked up when a window is opened.

    The copying thread would wait for the GIL.
    """

    shards: MappedShards
    places: ShardPlaces  # unsigned [n], index of each row's shard
    values: Mapping[str, ValueAddresses]  # by field

    def __len__(self) -> int:
        return len(self.places)

    def chosen(self, which: slice | Integers) -> MappedRows:
        values = {name: values.chosen(which) for name, values in self.values.items()}
        return MappedRows(self.shards, self.places[which], values)

    def damaged(self) -> bool:
        """Whether some rows may be zeros, because their file was truncated."""
        places = self.shards.damaged()
        return bool(places) and bool(np.isin(self.places, places).any())

    def memory(self, name: str) -> Bytes:
        return self.shards.column(name).span.memory


class MappedShards:
    def __init__(self, shards: Sequence[ShardColumns | None]) -> None:
        self._shards = tuple(shards)
        self._counts = np.array([0 if s is None else len(s) for s in shards], np.uint64)
        self._columns: dict[str, ColumnAddresses] = {}
        self._closed = False
        self._sentinels = _Sentinels([s for s in shards if s is not None])

    def __len__(self) -> int:
        return len(self._shards)

    def with_shard(self, shard: ShardColumns) -> MappedShards:
        return MappedShards((*self._shards, shard))

    def column(self, name: str) -> ColumnAddresses:
        if self._closed:
            raise CacheError(
                "rows of a closed window were requested; iterate again", code="GC613"
            )
        if name not in self._columns:
            self._columns[name] = _find_column(self._shards, name)
        return self._columns[name]

    def rows(self, names: Iterable[str], places: Integers, rows: Integers) -> MappedRows:
        self._check(places, rows)
        values = {name: self.column(name).values(places, rows) for name in names}
        return MappedRows(self, places.astype(np.min_scalar_type(len(self))), values)

    def whole(self) -> bool:
        """Whether all bytes copied so far existed. Check it after each copy."""
        return self._sentinels.hold() and not mapped.any_map_damaged()

    def damaged(self) -> list[int]:
        shards = enumerate(self._shards)
        return [place for place, shard in shards if shard is not None and shard.damaged]

    def _check(self, places: Integers, rows: Integers) -> None:
        # As an unsigned number, a negative one is larger than all others, which saves a
        # comparison.
        wrong = rows.view(np.uint64) >= self._counts.take(places)
        if wrong.any():
            i = int(wrong.argmax())
            raise IndexError(
                f"row {rows[i]} of a shard with {self._counts[places[i]]} samples was requested"
            )

    def close(self) -> None:
        self._closed = True
        self._shards = ()
        self._columns = {}


def _find_column(shards: Sequence[ShardColumns | None], name: str) -> ColumnAddresses:
    there = [shard for shard in shards if shard is not None and len(shard)]
    if all(name in shard.fields for shard in there):
        return _fixed_addresses(
            [None if s is None or not len(s) else s.fields[name] for s in shards]
        )
    return _ragged_addresses(
        [None if s is None or not len(s) else s.ragged[name] for s in shards]
    )


def _fixed_addresses(columns: Sequence[Bytes | None]) -> FixedAddresses:
    span = span_of([column for column in columns if column is not None])
    starts = [span.address if c is None else _address(c) for c in columns]
    strides = [0 if c is None else c.strides[0] for c in columns]
    return FixedAddresses(
        span, np.array(starts, np.int64) - span.address, np.array(strides, np.int64)
    )


def _ragged_addresses(columns: Sequence[RaggedColumn | None]) -> RaggedAddresses:
    there = [column for column in columns if column is not None]
    span = span_of([column.memory for column in there])
    sizes = [0 if column is None else len(column.starts) for column in columns]
    return RaggedAddresses(
        span,
        np.cumsum([0, *sizes[:-1]], dtype=np.int64),
        np.concatenate([c.starts + (_address(c.memory) - span.address) for c in there]),
        np.concatenate([column.lengths for column in there]),
        np.concatenate([column.dims for column in there]),
    )


class _Sentinels:
    def __init__(self, shards: Sequence[ShardColumns]) -> None:
        found = [sentinel for shard in shards for sentinel in shard.sentinels]
        addresses = np.array([sentinel.address for sentinel in found], np.int64)
        # NumPy 2.0 refuses address 0, so an empty range begins at 1.
        first, last = (addresses.min(), addresses.max() + 1) if found else (1, 1)
        self._memory: Bytes = np.asarray(_AddressRange(int(first), int(last), ()))
        self._places = addresses - first
        self._values = np.array([sentinel.value for sentinel in found], np.uint8)

    def hold(self) -> bool:
        return bool((self._memory[self._places] == self._values).all())


class _AddressRange:
    """Base of an array over a range of addresses. It keeps the mapped arrays alive."""

    def __init__(self, first: int, last: int, kept: Sequence[Bytes]) -> None:
        self._kept = kept
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": (last - first,),
            "data": (first, False),
        }


def span_of(arrays: Sequence[Bytes]) -> MemorySpan:
    arrays = [array for array in arrays if array.size]
    if not arrays:
        return MemorySpan(np.empty(0, np.uint8), 0)
    first = min(map(_address, arrays))
    last = max(map(_end_address, arrays))
    memory: Bytes = np.asarray(_AddressRange(first, last, tuple(arrays)))
    return MemorySpan(memory, first)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _end_address(array: Bytes) -> int:
    reach: int = sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True))
    return _address(array) + reach + 1


class Gatherer:
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
        self.filled = filled
        for column in self._columns:
            column.rewind(filled)

    def finish(self) -> dict[str, Column]:
        rows, self.filled = self.filled, 0
        return {column.field.name: column.finish(rows) for column in self._columns}


class _FixedColumn:
    def __init__(self, field: Field, rows: int, framework: Framework) -> None:
        self.field = field
        self._nbytes = field.nbytes
        self._take = framework.take
        self._pool = BufferPool(rows * self._nbytes, allocate=framework.allocate)
        self._buffer: Bytes | None = None

    def add(self, rows: MappedRows, start: int) -> None:
        memory = rows.memory(self.field.name)
        if self._buffer is None:
            self._buffer = self._pool.take()
        out = _row_view(self._buffer, self._nbytes, start, start + len(rows))
        if out.size:
            self._take(memory, rows.values[self.field.name].begins, out)

    def rewind(self, filled: int) -> None:
        pass  # the block counts rows

    def finish(self, rows: int) -> Array:
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            buffer = np.empty(0, np.uint8)
        return typed_rows(_row_view(buffer, self._nbytes, 0, rows), self.field)


class _RaggedColumnBuffer:
    def __init__(self, field: Field, framework: Framework) -> None:
        self.field = field
        self._item_bytes = field.item_dtype.itemsize
        self._join = framework.join
        self._take_slices = framework.take_slices
        self._pool = BufferPool(allocate=framework.allocate)
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


def _row_view(buffer: Bytes, nbytes: int, start: int, stop: int) -> Bytes:
    return buffer[start * nbytes : stop * nbytes].reshape(stop - start, nbytes)


def typed_rows(rows: Bytes, field: Field) -> Array:
    """Return uint8 [n, nbytes] as [n, *shape], sharing memory."""
    return rows.reshape(-1).view(field.item_dtype).reshape(len(rows), *field.fixed_shape)
