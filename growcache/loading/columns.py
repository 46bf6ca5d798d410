"""Where the values of a field lie in the maps of several shards, as one piece of memory.

An array over all addresses from the first map to the last lets one operation copy out of
every shard at once, in any order: rows then need not be sorted by shard, nor copied a
second time into the order that was planned. What lies between the maps belongs to others,
so a row is looked for in the tables of its shard before it becomes an address.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from growcache.cache.formats.mapped import RaggedColumn
from growcache.errors import CacheError
from growcache.loading.framework import Bytes, Integers
from growcache.schema import Array


class Columns(Protocol):
    """What a mapped shard shows: each of its fields is in one of both."""

    @property
    def fields(self) -> Mapping[str, Bytes]:
        """The columns of equal rows: uint8 [samples, nbytes]."""

    @property
    def ragged(self) -> Mapping[str, RaggedColumn]:
        """All others."""

    def __len__(self) -> int:
        """Return the number of samples."""


@dataclass(frozen=True, slots=True)
class Span:
    """Memory that reaches over several arrays.

    Attributes:
        memory: uint8 [k]; only what lies in one of the arrays may be touched.
        address: of its first byte.
    """

    memory: Bytes
    address: int


@dataclass(frozen=True, slots=True)
class Equal:
    """A column of equal rows.

    Attributes:
        span: that reaches over them.
        starts: int64 [shards], where the first row of each shard is in the span.
        strides: int64 [shards], from one row to the next.
    """

    span: Span
    starts: Integers
    strides: Integers

    def find(self, places: Integers, rows: Integers) -> Integers:
        """Return int64 [n], where in the span these rows begin."""
        found = self.strides[places]
        found *= rows
        found += self.starts[places]
        return found


@dataclass(frozen=True, slots=True)
class Varied:
    """A column of values that are each of their own size.

    Attributes:
        span: that reaches over them.
        firsts: int64 [shards], how many values are in the shards before.
        starts: int64 [values], where each begins in the span.
        lengths: int64 [values], in bytes.
        dims: int64 [values, k], the sizes of its ragged dimensions.
    """

    span: Span
    firsts: Integers
    starts: Integers
    lengths: Integers
    dims: Integers

    def find(self, places: Integers, rows: Integers) -> Integers:
        """Return int64 [n], which of the values these rows are."""
        return self.firsts[places] + rows


Column: TypeAlias = Equal | Varied


class Shards:
    """Some mapped shards, and where their columns lie; they stay mapped until `close`.

    Args:
        shards: by place; None for one that cannot be read, which has no rows.
    """

    def __init__(self, shards: Sequence[Columns | None]) -> None:
        self._shards = tuple(shards)
        self._counts = np.array([0 if s is None else len(s) for s in shards], np.uint64)
        self._columns: dict[str, Column] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._shards)

    def beside(self, shard: Columns) -> Shards:
        """Return the same shards with one more behind them."""
        return Shards((*self._shards, shard))

    def column(self, name: str) -> Column:
        """Return where a field's values lie; found out once.

        Raises:
            CacheError: the shards were closed.
        """
        if self._closed:
            raise CacheError("rows of a window that was closed were asked for; iterate anew")
        if name not in self._columns:
            self._columns[name] = _column(self._shards, name)
        return self._columns[name]

    def prepare(self, names: Iterable[str]) -> None:
        """Find out where the values of these fields lie before it is asked for."""
        for name in names:
            self.column(name)

    def check(self, places: Integers, rows: Integers) -> None:
        """Refuse rows that are not there.

        Raises:
            IndexError: there is one.
        """
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


def _column(shards: Sequence[Columns | None], name: str) -> Column:
    there = [shard for shard in shards if shard is not None and len(shard)]
    if all(name in shard.fields for shard in there):
        return _equal([None if s is None or not len(s) else s.fields[name] for s in shards])
    return _varied([None if s is None or not len(s) else s.ragged[name] for s in shards])


def _equal(columns: Sequence[Bytes | None]) -> Equal:
    span = spanning([column for column in columns if column is not None])
    starts = [span.address if c is None else _address(c) for c in columns]
    strides = [0 if c is None else c.strides[0] for c in columns]
    return Equal(span, np.array(starts, np.int64) - span.address, np.array(strides, np.int64))


def _varied(columns: Sequence[RaggedColumn | None]) -> Varied:
    there = [column for column in columns if column is not None]
    span = spanning([column.memory for column in there])
    sizes = [0 if column is None else len(column.starts) for column in columns]
    return Varied(
        span,
        np.cumsum([0, *sizes[:-1]], dtype=np.int64),
        np.concatenate([c.starts + (_address(c.memory) - span.address) for c in there]),
        np.concatenate([column.lengths for column in there]),
        np.concatenate([column.dims for column in there]),
    )


class _Addresses:
    """What an array over a range of addresses stands on; it keeps what lies there."""

    def __init__(self, first: int, last: int, kept: Sequence[Bytes]) -> None:
        self._kept = kept
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": (last - first,),
            "data": (first, False),
        }


def spanning(arrays: Sequence[Bytes]) -> Span:
    """Return the memory from the first byte of these arrays to the last.

    Args:
        arrays: uint8, of one dimension or two; the last one without gaps.
    """
    arrays = [array for array in arrays if array.size]
    if not arrays:
        return Span(np.empty(0, np.uint8), 0)
    first = min(map(_address, arrays))
    last = max(map(_end, arrays))
    memory: Bytes = np.asarray(_Addresses(first, last, tuple(arrays)))
    return Span(memory, first)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _end(array: Bytes) -> int:
    reach: int = sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True))
    return _address(array) + reach + 1
