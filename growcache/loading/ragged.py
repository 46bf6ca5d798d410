"""Values of ragged fields: copied back to back, and delivered with offsets, padded, or in lists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from growcache.loading.buffers import BufferPool
from growcache.loading.framework import (
    Bytes,
    Framework,
    Integers,
    Join,
    TakeSlices,
    join_parts,
    slices,
)
from growcache.schema import STR, Array, Field, Value

RaggedStyle: TypeAlias = Literal["offsets", "pad", "list"]
RAGGED_STYLES: tuple[RaggedStyle, ...] = ("offsets", "pad", "list")

# Values with fewer items are copied item by item, by an index that NumPy computes. A Python
# step per value would take as long, and hold the GIL.
SMALL_ITEMS = 256


def offsets_of(lengths: Integers) -> Integers:
    """Return the start of each value, and the end of the last: [n + 1]."""
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    return ends


class ValueRanges(NamedTuple):
    """Values in one memory: uint8 [k], with starts and lengths int64 [n]."""

    memory: Bytes
    starts: Integers
    lengths: Integers


def copy_values(run: ValueRanges, item_bytes: int, out: Bytes, take_slices: TakeSlices) -> None:
    if len(out) > SMALL_ITEMS * item_bytes * len(run.lengths):
        take_slices(*run, out)
    else:
        copy_items(run, item_bytes, out)


def copy_items(run: ValueRanges, item_bytes: int, out: Bytes) -> None:
    """Copy short values without a Python step for each."""
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
    field: Field
    values: Bytes
    ends: Integers
    dims: Integers

    def __len__(self) -> int:
        return len(self.dims)

    def __getitem__(self, i: int) -> Value:
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


@dataclass(slots=True)
class RaggedStyler:
    _style: RaggedStyle
    _framework: Framework
    _pools: dict[str, BufferPool] = field(default_factory=dict)

    def batch(self, values: Ragged) -> dict[str, Any]:
        name = values.field.name
        if values.field.dtype == STR or self._style == "list":
            return {name: [values[i] for i in range(len(values))]}
        return self._padded(values) if self._style == "pad" else _with_offsets(values)

    def _padded(self, values: Ragged) -> dict[str, Array]:
        field, name = values.field, values.field.name
        longest = field.shape_of(values.dims.max(axis=0, initial=0).tolist())
        nbytes = len(values) * math.prod(longest) * field.item_dtype.itemsize
        if name not in self._pools:
            self._pools[name] = BufferPool(allocate=self._framework.allocate)
        memory = self._pools[name].take(nbytes)
        out: Array = memory.view(field.item_dtype).reshape(len(values), *longest)
        if values.grows_along_rows and nbytes:
            _pad_rows(values, memory.reshape(len(values), -1), self._framework.join)
        else:
            out[...] = 0
            for i, dims in enumerate(values.dims.tolist()):
                out[i][tuple(map(slice, field.shape_of(dims)))] = values[i]
        lengths = values.dims[:, 0] if values.dims.shape[1] == 1 else values.dims
        return {name: out, f"{name}_lengths": np.ascontiguousarray(lengths)}


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
        join_parts(parts, out)  # torch would warn about read-only memory
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


# [rows, *shape], or values of different shapes.
Column: TypeAlias = Array | Ragged
