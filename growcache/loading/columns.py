"""Where the values of a field are in the maps of several shards, as one span of memory.

An array over all addresses from the first map to the last lets one operation copy out of every
shard at once, in any order. Memory between the maps belongs to others, so a row is looked up in
the tables of its shard before it becomes an address.
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
from growcache.loading.framework import Bytes, Integers
from growcache.schema import Array

# Of numbers that are as short as they can be.
ShardPlaces: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]


class ShardColumns(Protocol):
    """What a mapped shard shows: each of its fields is in one of both."""

    @property
    def fields(self) -> Mapping[str, Bytes]:
        """The columns of equal rows: uint8 [samples, nbytes]."""

    @property
    def ragged(self) -> Mapping[str, RaggedColumn]:
        """All others."""

    @property
    def sentinels(self) -> Sequence[FileEnd]:
        """Bytes that tell whether it was cut short."""

    @property
    def damaged(self) -> bool:
        """Whether bytes of it were missing when they were touched."""

    def __len__(self) -> int:
        """Return the number of samples."""


@dataclass(frozen=True, slots=True)
class MemorySpan:
    """Memory that reaches over several arrays.

    Attributes:
        memory: uint8 [k]; only what lies in one of the arrays may be touched.
        address: of its first byte.
    """

    memory: Bytes
    address: int


@dataclass(frozen=True, slots=True)
class FixedAddresses:
    """A column of equal rows.

    Attributes:
        span: that reaches over them.
        starts: int64 [shards], where the first row of each shard is in the span.
        strides: int64 [shards], from one row to the next.
    """

    span: MemorySpan
    starts: Integers
    strides: Integers

    def values(self, places: Integers, rows: Integers) -> ValueAddresses:
        """Return where the values of these rows lie."""
        begins = self.strides[places]
        begins *= rows
        begins += self.starts[places]
        return ValueAddresses(begins)


@dataclass(frozen=True, slots=True)
class RaggedAddresses:
    """A column of values that are each of their own size.

    Attributes:
        span: that reaches over them.
        firsts: int64 [shards], how many values are in the shards before.
        starts: int64 [values], where each begins in the span.
        lengths: int64 [values], in bytes.
        dims: int64 [values, k], the sizes of its ragged dimensions.
    """

    span: MemorySpan
    firsts: Integers
    starts: Integers
    lengths: Integers
    dims: Integers

    def values(self, places: Integers, rows: Integers) -> ValueAddresses:
        """Return where the values of these rows lie, how long they are, and their shapes."""
        found = self.firsts[places] + rows
        return ValueAddresses(self.starts[found], self.lengths[found], self.dims[found])


ColumnAddresses: TypeAlias = FixedAddresses | RaggedAddresses


class ValueAddresses(NamedTuple):
    """Where the values of some rows begin in the span of their field.

    Attributes:
        begins: int64 [n], in bytes.
        lengths: int64 [n], in bytes; None: as the schema says.
        dims: int64 [n, k], the sizes of the ragged dimensions; None: there are none.
    """

    begins: Integers
    lengths: Integers | None = None
    dims: Integers | None = None

    def chosen(self, which: slice | Integers) -> ValueAddresses:
        """Return those of some of the rows."""
        return ValueAddresses._make(
            None if column is None else column[which] for column in self
        )


@dataclass(frozen=True, slots=True)
class MappedRows:
    """MappedRows of shards, in the order in which they are wanted.

    They are looked up for a whole window at once, in the thread that opens it: the thread
    that copies would let go of the GIL in each of these operations, and wait to have it back.

    Attributes:
        shards: that they are in.
        places: unsigned [n], the place of each row's shard among them.
        values: of each field, where they lie.
    """

    shards: MappedShards
    places: ShardPlaces
    values: Mapping[str, ValueAddresses]

    def __len__(self) -> int:
        return len(self.places)

    def chosen(self, which: slice | Integers) -> MappedRows:
        """Return some of the rows; those of a slice share memory."""
        values = {name: values.chosen(which) for name, values in self.values.items()}
        return MappedRows(self.shards, self.places[which], values)

    def damaged(self) -> bool:
        """Whether some of them may be zeros: their files were cut short since they were mapped."""
        places = self.shards.damaged()
        return bool(places) and bool(np.isin(self.places, places).any())

    def memory(self, name: str) -> Bytes:
        """Return what the values of a field lie in: uint8 [k].

        Raises:
            CacheError: the shards were closed.
        """
        return self.shards.column(name).span.memory


class MappedShards:
    """Some mapped shards, and where their columns lie; they stay mapped until `close`.

    Args:
        shards: by place; None for one that cannot be read, which has no rows.
    """

    def __init__(self, shards: Sequence[ShardColumns | None]) -> None:
        self._shards = tuple(shards)
        self._counts = np.array([0 if s is None else len(s) for s in shards], np.uint64)
        self._columns: dict[str, ColumnAddresses] = {}
        self._closed = False
        self._sentinels = _Sentinels([s for s in shards if s is not None])

    def __len__(self) -> int:
        return len(self._shards)

    def beside(self, shard: ShardColumns) -> MappedShards:
        """Return the same shards with one more behind them."""
        return MappedShards((*self._shards, shard))

    def column(self, name: str) -> ColumnAddresses:
        """Return where a field's values lie; found out once.

        Raises:
            CacheError: the shards were closed.
        """
        if self._closed:
            raise CacheError("rows of a window that was closed were asked for; iterate anew")
        if name not in self._columns:
            self._columns[name] = _find_column(self._shards, name)
        return self._columns[name]

    def rows(self, names: Iterable[str], places: Integers, rows: Integers) -> MappedRows:
        """Return where the values of some rows lie.

        Args:
            names: of the fields that are wanted.
            places: int64 [n], for each row its shard.
            rows: int64 [n], the row in that shard.

        Raises:
            IndexError: a row that is not there.
            CacheError: the shards were closed.
        """
        self._check(places, rows)
        values = {name: self.column(name).values(places, rows) for name in names}
        return MappedRows(self, places.astype(np.min_scalar_type(len(self))), values)

    def whole(self) -> bool:
        """Whether all that was copied out of the shards was there; asked after each copy."""
        return self._sentinels.hold() and not mapped.any_map_damaged()

    def damaged(self) -> list[int]:
        """Return the places of shards whose files were cut short since they were mapped."""
        shards = enumerate(self._shards)
        return [place for place, shard in shards if shard is not None and shard.damaged]

    def _check(self, places: Integers, rows: Integers) -> None:
        # Below zero is beyond all as an unsigned number: one comparison less.
        wrong = rows.view(np.uint64) >= self._counts.take(places)
        if wrong.any():
            i = int(wrong.argmax())
            raise IndexError(
                f"row {rows[i]} of a shard with {self._counts[places[i]]} samples was asked for"
            )

    def close(self) -> None:
        """Let go of the maps; no rows can be found any more."""
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
    """The sentinels of some shards, looked at in one operation.

    Args:
        shards: that are mapped as long as these are looked at.
    """

    def __init__(self, shards: Sequence[ShardColumns]) -> None:
        found = [sentinel for shard in shards for sentinel in shard.sentinels]
        addresses = np.array([sentinel.address for sentinel in found], np.int64)
        first, last = (addresses.min(), addresses.max() + 1) if found else (0, 0)
        self._memory: Bytes = np.asarray(_AddressRange(int(first), int(last), ()))
        self._places = addresses - first
        self._values = np.array([sentinel.value for sentinel in found], np.uint8)

    def hold(self) -> bool:
        """Whether all of them hold."""
        return bool((self._memory[self._places] == self._values).all())


class _AddressRange:
    """What an array over a range of addresses stands on; it keeps what lies there."""

    def __init__(self, first: int, last: int, kept: Sequence[Bytes]) -> None:
        self._kept = kept
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": (last - first,),
            "data": (first, False),
        }


def span_of(arrays: Sequence[Bytes]) -> MemorySpan:
    """Return the memory from the first byte of these arrays to the last.

    Args:
        arrays: uint8, of one dimension or two; the last one without gaps.
    """
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
