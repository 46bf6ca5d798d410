"""Values of different sizes: copied out of maps, one behind the other, and as batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
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
STYLES: tuple[RaggedStyle, ...] = ("offsets", "pad", "list")

# Values of fewer items are copied item by item, by an index that NumPy computes: a step of
# Python each would take as long, and hold the GIL.
SMALL_ITEMS = 256


def ends_of(lengths: Integers) -> Integers:
    """Return where values of these lengths begin, and where the last one ends: [n + 1]."""
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    return ends


class Run(NamedTuple):
    """Values in one piece of memory.

    Attributes:
        memory: uint8 [k].
        starts: int64 [n], the first byte of each value.
        lengths: int64 [n], in bytes.
    """

    memory: Bytes
    starts: Integers
    lengths: Integers


def copy_values(run: Run, item_bytes: int, out: Bytes, take_slices: TakeSlices) -> None:
    """Copy values into ``out``, one behind the other.

    Args:
        run: of the values.
        item_bytes: divides every length.
        out: uint8 [all lengths].
        take_slices: copies those that are long.
    """
    if len(out) > SMALL_ITEMS * item_bytes * len(run.lengths):
        take_slices(*run, out)
    else:
        copy_items(run, item_bytes, out)


def copy_items(run: Run, item_bytes: int, out: Bytes) -> None:
    """Copy values item by item, without a step of Python each.

    Args:
        run: of the values, wherever they lie: they need not be aligned.
        item_bytes: divides every length.
        out: uint8 [all lengths].
    """
    if not len(out):
        return
    unit = math.gcd(item_bytes, 8)
    before = ends_of(run.lengths)[:-1]
    index = np.repeat(run.starts - before, run.lengths // unit)
    index += np.arange(0, len(out), unit)
    items: Array = np.ndarray((len(run.memory) - unit + 1,), f"<u{unit}", run.memory, 0, (1,))
    out.view(f"<u{unit}")[:] = items[index]


@dataclass(frozen=True, slots=True)
class Ragged:
    """The values of a ragged field, one behind the other.

    Attributes:
        field: that they are of.
        values: uint8 [total bytes].
        ends: int64 [n + 1]: value i is ``values[ends[i]:ends[i + 1]]``.
        dims: int64 [n, k]: the sizes of each value's ragged dimensions.
    """

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
        return raw.view(self.field.item).reshape(self.field.shape_of(self.dims[i].tolist()))

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return self.values.nbytes

    def part(self, start: int, stop: int) -> Ragged:
        """Return the values from ``start`` to ``stop``, sharing memory."""
        ends = self.ends[start : stop + 1]
        values = self.values[ends[0] : ends[-1]]
        return Ragged(self.field, values, ends - ends[0], self.dims[start:stop])

    @property
    def grows_along_rows(self) -> bool:
        """Whether the first dimension alone is ragged, so that values are rows of one array."""
        return self.field.ragged_dims == (0,)

    @property
    def inner(self) -> tuple[int, ...]:
        """The fixed dimensions after the first one."""
        return tuple(size for size in self.field.dims[1:] if size is not None)


class Styler:
    """Makes of ragged values what a batch holds; used by one thread.

    Args:
        style: ``offsets``, ``pad`` or ``list``.
        framework: lends copies and memory.
    """

    def __init__(self, style: RaggedStyle, framework: Framework) -> None:
        self._style = style
        self._framework = framework
        self._join = framework.join
        self._pools: dict[str, BufferPool] = {}

    def batch(self, values: Ragged) -> dict[str, Any]:
        """Return arrays, or a list, by name: the field's own and what says where values lie."""
        name = values.field.name
        if values.field.dtype == STR or self._style == "list":
            return {name: [values[i] for i in range(len(values))]}
        return self._padded(values) if self._style == "pad" else _with_offsets(values)

    def close(self) -> None:
        """Leave the buffers to who comes next."""
        for name, pool in self._pools.items():
            self._framework.leave(_pool_name(name), pool)

    def _padded(self, values: Ragged) -> dict[str, Array]:
        field, name = values.field, values.field.name
        longest = field.shape_of(values.dims.max(axis=0, initial=0).tolist())
        nbytes = len(values) * math.prod(longest) * field.item.itemsize
        if name not in self._pools:
            self._pools[name] = self._framework.pool(_pool_name(name))
        memory = self._pools[name].take(nbytes)
        out: Array = memory.view(field.item).reshape(len(values), *longest)
        if values.grows_along_rows and nbytes:
            _pad_rows(values, memory.reshape(len(values), -1), self._join)
        else:
            out[...] = 0
            for i, dims in enumerate(values.dims.tolist()):
                out[i][tuple(map(slice, field.shape_of(dims)))] = values[i]
        lengths = values.dims[:, 0] if values.dims.shape[1] == 1 else values.dims
        return {name: out, f"{name}_lengths": np.ascontiguousarray(lengths)}


def _pool_name(name: str) -> str:
    """Return the name of the pool of what is padded; the field's own has that of the field."""
    return f"{name}, padded"


def _with_offsets(values: Ragged) -> dict[str, Array]:
    field, name = values.field, values.field.name
    flat: Array = values.values.view(field.item)
    if values.grows_along_rows:
        offsets = ends_of(values.dims[:, 0])
        return {name: flat.reshape(offsets[-1], *values.inner), f"{name}_offsets": offsets}
    shapes = np.empty((len(values), len(field.dims)), np.int64)
    shapes[:] = [0 if size is None else size for size in field.dims]
    shapes[:, list(field.ragged_dims)] = values.dims
    offsets = values.ends // field.item.itemsize
    return {name: flat, f"{name}_offsets": offsets, f"{name}_shapes": shapes}


def _pad_rows(values: Ragged, out: Bytes, join: Join) -> None:
    """Copy every value to the begin of a row, and zeros behind it."""
    width, lengths = out.shape[1], np.diff(values.ends)
    if len(values.values) > SMALL_ITEMS * values.field.item.itemsize * len(values):
        run = Run(values.values, values.ends[:-1], lengths)
        zeros = np.zeros(width - int(lengths.min()), np.uint8)
        rests = map(zeros.__getitem__, map(slice, (width - lengths).tolist()))
        pairs = zip(slices(*run), rests, strict=True)
        join(list(chain.from_iterable(pairs)), out.reshape(-1))
        return
    out[...] = 0
    item = f"V{math.gcd(values.field.item.itemsize, 8)}"
    cells: Array = out.view(item)
    filled = np.arange(cells.shape[1]) < (lengths // cells.dtype.itemsize)[:, None]
    cells[filled] = values.values.view(item)


def joined(values: Sequence[Ragged], pool: BufferPool, join: Join) -> Ragged:
    """Return all values as one; where there are several this copies them.

    Args:
        values: of one field.
        pool: that the memory comes from.
        join: copies parts.
    """
    first = values[0]
    if len(values) == 1:
        return first
    ends = ends_of(np.concatenate([np.diff(one.ends) for one in values]))
    out = pool.take(int(ends[-1]))
    if len(out):
        join([one.values for one in values], out)
    return Ragged(first.field, out, ends, np.concatenate([one.dims for one in values]))


def of_values(field: Field, values: Sequence[Value], pool: BufferPool) -> Ragged:
    """Return values that the user's code made; they are copied.

    Args:
        field: that every value fits.
        values: arrays in C order, bytes or str, in the field's dtype.
        pool: that the memory comes from.
    """
    parts = [_bytes_of(value) for value in values]
    ends = ends_of(np.fromiter(map(len, parts), np.int64, len(parts)))
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
