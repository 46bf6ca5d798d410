"""A CSR matrix of an HDF5 file (h5ad) as a field, whose rows are read by range."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from growcache.errors import FormatError
from growcache.formats.base import SMALL_OBJECT_BYTES, ObjectReader
from growcache.formats.chunks import (
    ArrayOrStrings,
    ChunkGrid,
    FieldArray,
    refuse_large_visit,
)
from growcache.formats.grids import Box
from growcache.formats.hdf5_dataset import (
    DatasetLayout,
    check_filters,
    describe_dataset,
)
from growcache.formats.hdf5_field import DatasetField
from growcache.formats.hdf5_file import HDF5File
from growcache.formats.hdf5_paths import group_at
from growcache.formats.memory import reserve_decoded
from growcache.formats.sparse_rows import (
    MEMBERS,
    RaggedRows,
    StoredRows,
    checked_pointers,
    picked_columns,
    rows_together,
    sparse_shape,
)
from growcache.schema import Array

_ATTRIBUTES = ("encoding-type", "shape", "h5sparse_format", "h5sparse_shape")


@dataclass(frozen=True, slots=True)
class SparseLayout:
    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    data: DatasetLayout
    indices: DatasetLayout
    indptr: DatasetLayout
    string_storage: None = None

    @property
    def values(self) -> int:
        return self.data.shape[0]


def describe_sparse(file: Any, path: str, key: str) -> SparseLayout | None:
    """Return the matrix at a path, or None if there is no group or another one."""
    group = group_at(file, path)
    if group is None:
        return None
    attributes = {name: group.attrs[name] for name in _ATTRIBUTES if name in group.attrs}
    try:
        shape = sparse_shape(attributes, path)
    except FormatError as error:
        raise FormatError(f"{key}: {error}", code=error.code) from None
    if shape is None:
        return None
    members = [describe_dataset(file, f"{path}/{name}", key) for name in MEMBERS]
    for one in members:
        check_filters(one, key)
    data, indices, indptr = members
    if indptr.shape != (shape[0] + 1,) or data.shape != indices.shape or len(data.shape) != 1:
        raise FormatError(f"{key}: {path} is not a sparse matrix of {list(shape)}")
    if indptr.dtype.kind not in "iu" or indices.dtype.kind not in "iu":
        raise FormatError(f"{key}: {path} has indices that are not integers", code="GC306")
    return SparseLayout(path, shape, data.dtype, data, indices, indptr)


class SparseField(FieldArray):
    def __init__(
        self,
        name: str,
        layout: SparseLayout,
        reader: ObjectReader,
        file: HDF5File,
        *,
        ragged: bool,
    ) -> None:
        together = SMALL_OBJECT_BYTES // layout.dtype.itemsize
        if layout.data.chunks:
            together = layout.data.chunks[0]
        rows = rows_together(layout.shape[0], layout.values, together)
        chunks = (rows, max(1, layout.shape[1]))
        super().__init__(
            name, ChunkGrid(layout.shape, chunks, layout.dtype, np.zeros((), layout.dtype))
        )
        self.layout = layout
        self._reader = reader
        self._ragged = ragged
        self._members = {
            name: DatasetField(name, one, reader, file)
            for name, one in zip(
                MEMBERS, (layout.data, layout.indices, layout.indptr), strict=True
            )
        }

    async def stored(self, boxes: Sequence[Box]) -> list[ArrayOrStrings]:
        return list(await asyncio.gather(*map(self._rows, boxes)))

    async def _rows(self, box: Box) -> ArrayOrStrings:
        rows, columns = box
        key = f"{self._reader.entry.key}: {self.layout.path}"
        if not rows:
            return self._taken(StoredRows(*(np.zeros(n, np.int64) for n in (1, 0, 0))), columns)
        pointers = checked_pointers(
            await self._member("indptr", range(rows[0], rows[-1] + 2)), self.layout.values, key
        )
        values = range(int(pointers[0]), int(pointers[-1]))
        nbytes = len(values) * (self.layout.dtype.itemsize + self.layout.indices.dtype.itemsize)
        refuse_large_visit(self._reader.entry, nbytes)
        indices, data = await asyncio.gather(
            self._member("indices", values), self._member("data", values)
        )
        found = StoredRows(pointers, indices, data)
        found.check(self.layout.shape[1], key)
        if not self._ragged:
            await reserve_decoded(len(rows) * self.layout.shape[1] * self.layout.dtype.itemsize)
        return await asyncio.to_thread(self._taken, found, columns)

    async def _member(self, name: str, values: range) -> Array:
        (found,) = await self._members[name].stored([(values,)])
        return np.asarray(found)

    def _taken(self, found: StoredRows, columns: Any) -> Array | RaggedRows:
        if self._ragged:
            return found.ragged()
        return picked_columns(found.dense(self.layout.shape[1]), columns)
