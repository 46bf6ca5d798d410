"""Rows of compressed sparse matrices (CSR), as AnnData stores them in HDF5 and Zarr.

The values of row i are ``data[indptr[i]:indptr[i + 1]]``, in the columns ``indices`` of the
same range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from growcache.errors import FormatError
from growcache.formats.base import choice_option
from growcache.formats.grids import Indices
from growcache.schema import Array

MEMBERS = ("data", "indices", "indptr")
MOST_COLUMNS = 1 << 31


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """Some rows: the columns with values, and the values."""

    indices: list[Array]
    data: list[Array]


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Consecutive rows as they are stored."""

    pointers: Array  # start of each row among the values, and the end of the last
    indices: Array
    data: Array

    def dense(self, columns: int) -> Array:
        found = np.zeros((len(self.pointers) - 1, columns), self.data.dtype.newbyteorder("="))
        rows = np.repeat(np.arange(len(found)), np.diff(self.pointers))
        found[rows, self.indices] = self.data
        return found

    def ragged(self) -> RaggedRows:
        borders = self.pointers[1:-1] - self.pointers[0]
        return RaggedRows(np.split(self.indices, borders), np.split(self.data, borders))

    def check(self, columns: int, key: str) -> None:
        size = len(self.indices)
        if size and not (0 <= int(self.indices.min()) <= int(self.indices.max()) < columns):
            raise FormatError(
                f"{key}: a sparse row has a column beyond its {columns:,}", code="GC302"
            )


def checked_pointers(pointers: Array, values: int, key: str) -> Array:
    """Return pointers as int64.

    Raises:
        FormatError: They do not describe rows of this number of values.
    """
    found = pointers.astype(np.int64)
    if len(found) and (found[0] < 0 or found[-1] > values or (np.diff(found) < 0).any()):
        raise FormatError(f"{key}: indptr does not point to rows of its {values:,} values")
    return found


def sparse_shape(attributes: Mapping[str, Any], path: str) -> tuple[int, int] | None:
    """Return the rows and columns of a group if it is a CSR matrix, or else None."""
    kind = _text(attributes.get("encoding-type", attributes.get("h5sparse_format", "")))
    if kind in ("csc_matrix", "csc"):
        raise FormatError(
            f"{path} is compressed by columns (csc_matrix), so a row is spread over all of it; "
            "write it as CSR, as adata.X = adata.X.tocsr() does",
            code="GC304",
        )
    if kind not in ("csr_matrix", "csr"):
        return None
    shape = [
        int(n) for n in np.ravel(attributes.get("shape", attributes.get("h5sparse_shape")))
    ]
    if len(shape) != 2 or min(shape) < 0 or shape[1] > MOST_COLUMNS:
        raise FormatError(f"{path} is a sparse matrix of shape {shape}")
    return shape[0], shape[1]


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def sparse_option(options: Mapping[str, Any]) -> bool:
    """Return whether samples have only the columns with values."""
    return choice_option(options, "sparse", ("dense", "ragged"), "dense") == "ragged"


def picked_columns(values: Array, columns: Indices) -> Array:
    whole = isinstance(columns, range) and len(columns) == values.shape[1]
    return values if whole else values[:, list(columns)]


def rows_together(rows: int, values: int, values_together: int) -> int:
    """Return the number of rows with about as many values as are fetched together."""
    return max(1, min(rows, values_together * rows // max(1, values)))


def refuse_other_axes(cut: Sequence[int], what: str) -> None:
    if list(cut) != [0]:
        raise FormatError(
            f"{what} is a sparse matrix, which is read by rows; use axis: 0, or a window along "
            "it",
            code="GC303",
        )
