"""CSR matrices in Zarr groups, as AnnData writes them.

A chunk of values owns the rows that start in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from growcache.errors import FormatError, ObjectMissingError
from growcache.formats.base import RUN_LENGTH_RATIO, ObjectReader
from growcache.formats.chunks import (
    ArrayOrStrings,
    ChunkGrid,
    FieldArray,
    refuse_large_visit,
)
from growcache.formats.grids import Box
from growcache.formats.memory import SingleFlightCache, reserve_decoded
from growcache.formats.sparse_rows import (
    MEMBERS,
    RaggedRows,
    StoredRows,
    checked_pointers,
    picked_columns,
    sparse_shape,
)
from growcache.formats.zarr_field import ZarrField
from growcache.formats.zarr_metadata import ZarrMetadata, read_json
from growcache.schema import Array

MetadataOf: TypeAlias = Callable[[ObjectReader, str], Awaitable[ZarrMetadata]]

MOST_POINTER_BYTES = 1 << 26  # of all matrices whose pointers are kept
_KNOWN_FOLDERS = 4096
VALUES = "data/"  # the folder of a matrix's values


@dataclass(frozen=True, slots=True)
class ZarrMatrix:
    folder: str
    shape: tuple[int, int]
    data: ZarrMetadata
    indices: ZarrMetadata
    indptr: ZarrMetadata

    @property
    def values(self) -> int:
        return self.data.shape[0]


class ZarrMatrices:
    def __init__(self, metadata_of: MetadataOf) -> None:
        self._metadata_of = metadata_of
        self._named: set[str] = set()
        self._known: SingleFlightCache[str, tuple[ZarrMatrix | None]]
        self._known = SingleFlightCache(_KNOWN_FOLDERS)
        self._pointers: SingleFlightCache[str, Array] = SingleFlightCache(MOST_POINTER_BYTES)

    async def find(self, reader: ObjectReader, folder: str) -> ZarrMatrix | None:
        """Return the matrix of a group, or None for another group or an array."""

        async def load() -> tuple[tuple[ZarrMatrix | None], int]:
            return (await self._described(reader, folder),), 1

        (found,) = await self._known.get(folder, load)
        if found is not None:
            self._named.add(folder)
        return found

    async def at(self, reader: ObjectReader, folder: str) -> ZarrMatrix | None:
        """Return the known matrix of a folder, or None."""
        return await self.find(reader, folder) if folder in self._named else None

    async def of_values(self, reader: ObjectReader, root: str) -> ZarrMatrix | None:
        """Return the known matrix with these values, or None."""
        return (
            await self.at(reader, root.removesuffix(VALUES)) if root.endswith(VALUES) else None
        )

    async def _described(self, reader: ObjectReader, folder: str) -> ZarrMatrix | None:
        shape = sparse_shape(await _group_attributes(reader, folder), folder)
        if shape is None:
            return None
        members = [await self._metadata_of(reader, f"{folder}{name}/") for name in MEMBERS]
        data, indices, indptr = members
        if (
            indptr.shape != (shape[0] + 1,)
            or data.shape != indices.shape
            or len(data.shape) != 1
        ):
            raise FormatError(f"{folder} is not a sparse matrix of {list(shape)}")
        if indptr.dtype.kind not in "iu" or indices.dtype.kind not in "iu":
            raise FormatError(f"{folder} has indices that are not integers", code="GC306")
        return ZarrMatrix(folder, shape, data, indices, indptr)

    async def pointers(self, reader: ObjectReader, matrix: ZarrMatrix) -> Array:
        async def load() -> tuple[Array, int]:
            one = ZarrField("indptr", f"{matrix.folder}indptr/", matrix.indptr, reader)
            (found,) = await one.stored([(range(matrix.shape[0] + 1),)])
            pointers = checked_pointers(np.asarray(found), matrix.values, matrix.folder)
            return pointers, pointers.nbytes

        return await self._pointers.get(matrix.folder, load)

    async def rows_of_chunk(
        self, reader: ObjectReader, matrix: ZarrMatrix, number: int
    ) -> range:
        """Return the rows that start in a chunk of values.

        The last chunk also owns empty rows at the end.
        """
        starts = (await self.pointers(reader, matrix))[:-1]
        chunk = matrix.data.chunks[0]
        first, stop = np.searchsorted(starts, [number * chunk, (number + 1) * chunk])
        is_last = (number + 1) * chunk >= matrix.values
        return range(int(first), len(starts) if is_last else int(stop))

    def field(
        self, name: str, matrix: ZarrMatrix, reader: ObjectReader, *, ragged: bool
    ) -> FieldArray:
        return _MatrixField(name, matrix, reader, self, ragged=ragged)


class _MatrixField(FieldArray):
    def __init__(
        self,
        name: str,
        matrix: ZarrMatrix,
        reader: ObjectReader,
        matrices: ZarrMatrices,
        *,
        ragged: bool,
    ) -> None:
        dtype = matrix.data.dtype
        fill = np.zeros((), dtype)
        super().__init__(
            name,
            ChunkGrid(
                matrix.shape, (1, max(1, matrix.shape[1])), dtype, fill, RUN_LENGTH_RATIO
            ),
        )
        self._matrix = matrix
        self._reader = reader
        self._matrices = matrices
        self._ragged = ragged

    async def stored(self, boxes: Sequence[Box]) -> list[ArrayOrStrings]:
        pointers = await self._matrices.pointers(self._reader, self._matrix)
        return list(await asyncio.gather(*(self._rows(pointers, box) for box in boxes)))

    async def _rows(self, pointers: Array, box: Box) -> ArrayOrStrings:
        (rows, columns), matrix, dtype = box, self._matrix, self._matrix.data.dtype
        own = pointers[rows[0] : rows[-1] + 2] if rows else pointers[:1]
        values = range(int(own[0]), int(own[-1]))
        nbytes = len(values) * (dtype.itemsize + matrix.indices.dtype.itemsize)
        refuse_large_visit(self._reader.entry, nbytes, RUN_LENGTH_RATIO)
        indices, data = await asyncio.gather(
            self._member("indices", matrix.indices, values),
            self._member("data", matrix.data, values),
        )
        found = StoredRows(own, indices, data)
        found.check(matrix.shape[1], matrix.folder)
        if not self._ragged:
            await reserve_decoded(len(rows) * matrix.shape[1] * dtype.itemsize)
        return await asyncio.to_thread(self._taken, found, columns)

    async def _member(self, name: str, metadata: ZarrMetadata, values: range) -> Array:
        one = ZarrField(name, f"{self._matrix.folder}{name}/", metadata, self._reader)
        (found,) = await one.stored([(values,)])
        return np.asarray(found)

    def _taken(self, found: StoredRows, columns: Any) -> Array | RaggedRows:
        if self._ragged:
            return found.ragged()
        return picked_columns(found.dense(self._matrix.shape[1]), columns)


async def _group_attributes(reader: ObjectReader, folder: str) -> dict[str, Any]:
    for file in ("zarr.json", ".zattrs"):
        try:
            found = await read_json(await reader.find(folder + file))
        except ObjectMissingError:
            continue
        if file == "zarr.json" and isinstance(found, dict):
            found = found.get("attributes")
        return found if isinstance(found, dict) else {}
    return {}
